//! Performing a step.

use std::ops::Deref;

use bindery::addr::{Order, PAGE_SHIFT, PAGE_SIZE, VirtAddr};
use bindery::{
    Access, AddressSpace, Errno, Error, FaultError, FileAccess, Limits, Locking, Operation,
    PinTime, SizeMode, SwapArea, SwapError, UserfaultFeatures, UserfaultScope,
};
use bindery_hosted::{Machine, Program, Walk};
use bindery_linux::{
    self as linux, Call, CopyDirection, IpcUser, LockAccount, OpenFile, SegmentLocking,
};

use super::step::{FileCall, PROCESSES, SegmentCall, Step};
use super::world::{Process, World, lock, number_on_disk, read};

/// The result of a step that has no object, or returns nothing.
const NOTHING: i64 = 0;

/// The maximum number of userfaultfds of one process.
const MOST_USERFAULTS: usize = 3;

/// The maximum number of pins of all processes.
const MOST_PINS: usize = 12;

/// The maximum number of swap areas that are on.
const MOST_AREAS: usize = 3;

type Space<'m, A> = AddressSpace<'m, Machine<A>>;

/// A process in a call, as the Linux ABI requests it.
struct Caller<'w, 'm, A: Walk> {
    world: &'w World<'m, A>,
    space: &'w Space<'m, A>,
    /// The process of a pidfd.
    other: Option<&'w Space<'m, A>>,
}

impl<'m, A: Walk> linux::Process<'m, Machine<A>> for Caller<'_, 'm, A> {
    fn space(&self) -> &Space<'m, A> {
        self.space
    }

    fn file(&self, descriptor: i32) -> Option<OpenFile<'m, Machine<A>>> {
        let number = usize::try_from(descriptor.checked_sub(3)?).ok()?;
        let files = read(&self.world.files);
        let device = || self.world.shown.get(number.checked_sub(files.len())?);
        files.get(number).or_else(device).cloned()
    }

    fn zeroes(&self, descriptor: i32) -> Option<FileAccess> {
        (descriptor == 2).then_some(FileAccess::READ | FileAccess::WRITE)
    }

    fn process(&self, _descriptor: i32) -> Option<&Space<'m, A>> {
        self.other
    }
}

/// A borrowed address space, for calls that require an owner.
struct Borrowed<'a, T>(&'a T);

impl<T> Deref for Borrowed<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0
    }
}

fn raw(result: Result<u64, Errno>) -> i64 {
    result.map_or_else(|errno| -i64::from(errno as i32), |value| value as i64)
}

fn raw_fault(result: Result<u64, FaultError>) -> i64 {
    raw(result.map_err(|fault| match fault {
        FaultError::OutOfMemory => Errno::ENOMEM,
        FaultError::NotMapped
        | FaultError::Protection
        | FaultError::ProtectionKey(_)
        | FaultError::Bus
        | FaultError::Interrupted
        | _ => Errno::EFAULT,
    }))
}

impl<'m, A: Walk> World<'m, A> {
    /// Performs the step. Returns the raw result of the call.
    pub(super) fn perform(&self, step: &Step) -> i64 {
        match *step {
            Step::Fork { process, child } => self.fork(process, child),
            Step::Exit { process } => self.exit(process),
            Step::Unpin { number } => {
                let mut pins = lock(&self.pins);
                let pin = (!pins.is_empty()).then(|| number % pins.len());
                let pin = pin.map(|number| pins.swap_remove(number));
                drop(pins);
                drop(pin);
                NOTHING
            }
            Step::Userfault { process, features } => self.userfault(process, features),
            Step::CloseUserfault { process, number } => self.close_userfault(process, number),
            Step::File { file, call, offset, length } => self.file(file, call, offset, length),
            Step::NewFile { file } => self.new_file(file),
            Step::Reclaim { pages } => self.memory.reclaim(pages).freed as i64,
            Step::SwapOn { device, slots, priority } => self.swap_on(device, slots, priority),
            Step::SwapOff { number, between } => self.swap_off(number, between),
            Step::StopSwapping { number } => {
                self.with_area(number, |area| self.memory.stop_swapping_to(&area))
            }
            Step::ResumeSwapping { number } => {
                self.with_area(number, |area| self.memory.resume_swapping_to(&area))
            }
            Step::Folios { order } => self.folios(order),
            Step::Show { device, slot, order, page } => {
                let order = Some(Order(order)).filter(|order| order.0 <= 10);
                let device = device % self.devices.len();
                let object = &self.shown[device].object;
                let on = (object, self.memory);
                self.devices[device].show(on, self.machine, slot, (order, page));
                NOTHING
            }
            Step::Trim => {
                self.memory.trim();
                self.memory.discard_free_slots();
                NOTHING
            }
            Step::Call { .. }
            | Step::AdviseOther { .. }
            | Step::Store { .. }
            | Step::Load { .. }
            | Step::Fill { .. }
            | Step::Pin { .. }
            | Step::Control { .. }
            | Step::PagemapScan { .. }
            | Step::ProcessVm { .. }
            | Step::Segment { .. }
            | Step::Proc { .. }
            | Step::Split { .. }
            | Step::Limit { .. }
            | Step::Kill { .. } => {
                let (Some(process), _) = step.touches() else { return NOTHING };
                let guard = self.process(process);
                let perform = |found| self.perform_in(found, process, step);
                guard.as_ref().map_or(NOTHING, perform)
            }
        }
    }

    /// Performs a step of one process.
    fn perform_in(&self, process: &Process<'m, A>, number: usize, step: &Step) -> i64 {
        let space = &process.space;
        let program = Program::new(self.machine, space);
        let alone = Caller { world: self, space, other: None };
        match *step {
            Step::Call { call, arguments, .. } => linux::call(&alone, call, arguments),
            Step::AdviseOther { other, vector, start, length, advice, .. } => {
                let vector = vector & !7;
                let _ = program.store(VirtAddr(vector), start);
                let _ = program.store(VirtAddr(vector.wrapping_add(8)), length);
                let arguments = [other, vector, 1, advice, 0, 0];
                self.with_other(number, space, other as usize, |other| {
                    linux::call(&Caller { other, ..alone }, Call::ProcessMadvise, arguments)
                })
            }
            Step::Store { at, value, .. } => {
                let stored = program.store(VirtAddr(at), value);
                if self.machine.cpus() == 1 && stored.is_ok() {
                    let back = program.load(VirtAddr(at));
                    assert_eq!(back, Ok(value), "a load after a store at {at:#x}");
                }
                raw_fault(stored.map(|()| 0))
            }
            Step::Load { at, .. } => raw_fault(program.load(VirtAddr(at)).map(|_| 0)),
            Step::Fill { at, pages, value, .. } => {
                let page = |page| VirtAddr(at.wrapping_add(page << PAGE_SHIFT));
                let filled = (0..pages).try_for_each(|number| program.store(page(number), value));
                raw_fault(filled.map(|()| 0))
            }
            Step::Pin { at, pages, write, long, .. } => {
                let access = if write { Access::Write } else { Access::Read };
                let time = if long { PinTime::Long } else { PinTime::Short };
                let pinned = space.pin(VirtAddr(at), pages, access, time);
                let mut pins = lock(&self.pins);
                match pinned {
                    Ok(pin) if pins.len() < MOST_PINS => pins.push(pin),
                    Ok(_) => {}
                    Err(error) => return raw(Err(error.errno())),
                }
                NOTHING
            }
            Step::Control { number: userfault, caller, request, mut words, .. } => {
                let userfaults = read(&process.userfaults);
                if userfaults.is_empty() {
                    return NOTHING;
                }
                let userfault = &userfaults[userfault % userfaults.len()];
                self.with_other(number, space, caller, |caller| {
                    let caller = caller.unwrap_or(space);
                    let program = Program::new(self.machine, caller);
                    let mut source = |at, bytes: &mut [u8]| program.read(at, bytes);
                    let words = &mut words;
                    raw(linux::userfault_control(
                        space,
                        caller,
                        userfault,
                        request,
                        words,
                        &mut source,
                    ))
                })
            }
            Step::PagemapScan { mut words, .. } => {
                let mut sink = |at, bytes: &[u8]| space.write_user(at, bytes);
                raw(linux::proc::pagemap_scan(space, &mut words, &mut sink))
            }
            Step::ProcessVm { other, write, arguments, .. } => {
                let direction = if write { CopyDirection::Write } else { CopyDirection::Read };
                let room = linux::process_vm_ranges(arguments);
                let mut ranges = vec![linux::IoRange::default(); room];
                self.with_other(number, space, other, |other| {
                    let find = |_| other.map(Borrowed).ok_or(Errno::ESRCH);
                    linux::process_vm(space, direction, arguments, &mut ranges, find)
                })
            }
            Step::Segment { call, arguments, .. } => {
                static ACCOUNT: LockAccount = LockAccount::new();
                let user = IpcUser { privileged: true, ..IpcUser::default() };
                let locking =
                    SegmentLocking { account: &ACCOUNT, limit: u64::MAX, privileged: true };
                match call {
                    SegmentCall::Get => linux::shmget(self.segments, &user, arguments),
                    SegmentCall::Attach => linux::shmat(self.segments, space, &user, arguments),
                    SegmentCall::Detach => linux::shmdt(space, arguments[1]),
                    SegmentCall::Control => {
                        linux::shmctl(self.segments, space, &user, &locking, arguments)
                    }
                }
            }
            Step::Proc { first, clear, .. } => self.proc(space, first, clear),
            Step::Split { at, order, .. } => {
                let _ = space.split_folio(VirtAddr(at), Order(order));
                NOTHING
            }
            Step::Limit { locked, privileged, .. } => {
                let locking = if privileged { Locking::Privileged } else { Locking::Limited };
                space.set_limits(&Limits { locked, locking, ..Limits::default() });
                NOTHING
            }
            Step::Kill { after, start, length, advice, .. } => {
                let arguments = [start, length, advice, 0, 0, 0];
                self.machine.fatal_signal_after(Some(after));
                let result = linux::call(&alone, Call::Madvise, arguments);
                self.machine.fatal_signal_after(None);
                result
            }
            // `World::perform` handles these steps.
            Step::Fork { .. }
            | Step::Exit { .. }
            | Step::Unpin { .. }
            | Step::Userfault { .. }
            | Step::CloseUserfault { .. }
            | Step::File { .. }
            | Step::NewFile { .. }
            | Step::Reclaim { .. }
            | Step::SwapOn { .. }
            | Step::SwapOff { .. }
            | Step::StopSwapping { .. }
            | Step::ResumeSwapping { .. }
            | Step::Folios { .. }
            | Step::Show { .. }
            | Step::Trim => NOTHING,
        }
    }

    /// Calls `f` with the memory of another process, which may be `space` itself. A thread already
    /// holds one process locked when it tries to lock the second, so this function does not wait
    /// for the lock.
    fn with_other<R>(
        &self,
        number: usize,
        space: &Space<'m, A>,
        other: usize,
        f: impl FnOnce(Option<&Space<'m, A>>) -> R,
    ) -> R {
        if other % PROCESSES == number % PROCESSES {
            return f(Some(space));
        }
        let guard = self.processes[other % PROCESSES].try_read().ok();
        let other = guard.as_ref().and_then(|guard| guard.as_ref());
        f(other.map(|process| &process.space))
    }

    fn fork(&self, process: usize, child: usize) -> i64 {
        if process % PROCESSES == child % PROCESSES {
            return NOTHING;
        }
        let forked = match self.process(process).as_ref() {
            Some(process) => process.space.fork(),
            None => return NOTHING,
        };
        let mut place = self.processes[child % PROCESSES].write().expect("no thread panicked");
        // The old process is dropped first, because the memory is small.
        drop(place.take());
        match forked {
            Ok(space) => *place = Some(Process::new(space)),
            Err(_) => return raw(Err(Errno::ENOMEM)),
        }
        NOTHING
    }

    fn exit(&self, process: usize) -> i64 {
        let others = (0..PROCESSES).filter(|other| *other != process % PROCESSES);
        if others.into_iter().any(|other| self.process(other).is_some()) {
            let mut place =
                self.processes[process % PROCESSES].write().expect("no thread panicked");
            let exited = place.take();
            drop(exited);
        }
        NOTHING
    }

    fn userfault(&self, process: usize, features: u32) -> i64 {
        let guard = self.process(process);
        let Some(process) = guard.as_ref() else { return NOTHING };
        let mut userfaults = process.userfaults.write().expect("no thread panicked");
        if userfaults.len() < MOST_USERFAULTS {
            let features =
                UserfaultFeatures::from_bits_truncate(features) | UserfaultFeatures::SIGBUS;
            let made = process.space.userfault(features, UserfaultScope::All);
            userfaults.extend(made);
        }
        NOTHING
    }

    fn close_userfault(&self, process: usize, number: usize) -> i64 {
        let guard = self.process(process);
        let Some(process) = guard.as_ref() else { return NOTHING };
        let mut userfaults = process.userfaults.write().expect("no thread panicked");
        if !userfaults.is_empty() {
            let number = number % userfaults.len();
            let userfault = userfaults.swap_remove(number);
            drop(userfaults);
            process.space.close_userfault(userfault);
        }
        NOTHING
    }

    fn file(&self, file: usize, call: FileCall, offset: u64, length: u64) -> i64 {
        let file = {
            let files = read(&self.files);
            files[file % files.len()].clone()
        };
        let (offset, bytes) = (offset as i64, length.min(3 * PAGE_SIZE) as usize);
        match call {
            FileCall::Truncate => linux::ftruncate(&file, offset),
            FileCall::Allocate => linux::fallocate(&file, 0, offset, length as i64),
            FileCall::AllocateBeyond => linux::fallocate(&file, 1, offset, length as i64),
            FileCall::Punch => linux::fallocate(&file, 3, offset, length as i64),
            FileCall::Read => linux::pread(&file, &mut vec![0; bytes], offset),
            FileCall::Write => linux::pwrite(&file, &vec![7; bytes], offset),
            FileCall::Sync => {
                let _ = file.object.sync(offset as u64, length);
                NOTHING
            }
            FileCall::WriteBack => self.disk.write_back(length % 64) as i64,
            FileCall::DiscardFailed => file.object.discard_failed().map_or(NOTHING, |_| NOTHING),
            FileCall::Evict => file.object.evict(offset as u64, length) as i64,
            FileCall::Seal => linux::add_seals(&file, length as u32 & 0x3f),
            FileCall::Seek => {
                let _ = file.object.next_data(offset as u64);
                let _ = file.object.next_hole(offset as u64);
                NOTHING
            }
        }
    }

    fn new_file(&self, file: usize) -> i64 {
        let place = file % read(&self.files).len();
        let access = FileAccess::READ | FileAccess::WRITE;
        let object = match number_on_disk(place) {
            Some(number) => {
                let size = self.pager.files.size(number);
                self.disk.file(number, size).map_err(|error| error.errno(Operation::Object))
            }
            None => linux::memfd_create(self.memory, 2),
        };
        let made = match object {
            Ok(object) => OpenFile { object, access },
            Err(errno) => return raw(Err(errno)),
        };
        let old =
            std::mem::replace(&mut self.files.write().expect("no thread panicked")[place], made);
        drop(old);
        NOTHING
    }

    fn folios(&self, order: u8) -> i64 {
        let memory = self.memory;
        for policy in
            [memory.folio_policy(), memory.shared_folio_policy(), memory.file_folio_policy()]
        {
            (1..=9).for_each(|order| policy.set(Order(order), SizeMode::Never));
            if order > 0 {
                policy.set(Order(order), SizeMode::Always);
            }
        }
        NOTHING
    }

    fn proc(&self, space: &Space<'m, A>, first: u64, clear: u64) -> i64 {
        let mut text = String::new();
        let _ = linux::proc::status(space, &mut text);
        let _ = linux::proc::smaps_rollup(space, &mut text);
        let mut words = [0; 64];
        let addresses = linux::proc::PhysicalAddresses::Shown;
        linux::proc::pagemap(space, first, addresses, &mut words);
        match linux::proc::ClearRefs::from_number(clear as i32) {
            Ok(kind) => raw(linux::proc::clear_refs(space, kind).map(|()| 0)),
            Err(errno) => raw(Err(errno)),
        }
    }

    fn with_area(&self, number: usize, f: impl FnOnce(SwapArea)) -> i64 {
        let areas = lock(&self.areas);
        if !areas.is_empty() {
            f(areas[number % areas.len()]);
        }
        NOTHING
    }

    fn swap_on(&self, device: bool, slots: u64, priority: i16) -> i64 {
        let Ok(mut areas) = self.areas.try_lock() else { return NOTHING };
        // The device's area is the only one with that number of slots.
        let device_slots = bindery::SwapDevice::<Machine<A>>::slots(self.device);
        let has_device = areas.iter().any(|area| area.slots == device_slots);
        if areas.len() < MOST_AREAS {
            let on = match device && !has_device {
                true => self.memory.swap_on_device(self.device, priority),
                false => self.memory.swap_on(slots.min(device_slots - 1), priority),
            };
            areas.extend(on);
        }
        NOTHING
    }

    /// `swapoff(2)`, one try. On one CPU it must succeed if all pages could be swapped in.
    fn swap_off(&self, number: usize, between: u64) -> i64 {
        let Ok(mut areas) = self.areas.try_lock() else { return NOTHING };
        if areas.is_empty() {
            return NOTHING;
        }
        let number = number % areas.len();
        let area = areas[number];
        self.memory.stop_swapping_to(&area);
        let mut back = Ok(());
        let everyone = self.processes.iter().map(read);
        for process in everyone {
            if let Some(process) = process.as_ref() {
                back = back.and(process.space.swap_in_area(&area));
            }
            if between > 0 {
                self.memory.reclaim(between);
            }
        }
        back = back.and(lock(&self.bystander).space.swap_in_area(&area));
        back = back.and(self.memory.swap_in_objects(&area));
        match self.memory.swap_off(&area) {
            Ok(()) => {
                areas.swap_remove(number);
                NOTHING
            }
            Err(error) => {
                let alone = self.machine.cpus() == 1;
                assert!(
                    !alone || back.is_err() && error == SwapError::InUse,
                    "swapoff failed with {error:?} after all pages had come back from the area"
                );
                self.memory.resume_swapping_to(&area);
                raw(Err(match back {
                    Err(Error::OutOfMemory) => Errno::ENOMEM,
                    _ => Errno::EBUSY,
                }))
            }
        }
    }
}
