//! The hosted machine: the core runs the same sequences. Operations and observations have the same
//! order as in [`super::linux`].
//!
//! Only `core.rs` calls the core, and only `look.rs` inspects it.

mod core;
mod look;

use std::cell::Cell;
use std::thread;

use bindery::addr::VirtAddr;
use bindery::check;
use bindery::{AddressSpace, FaultError, Memory, Object, SwapArea, Usage, Userfault};
use bindery_hosted::{Config, Contents, Machine, Program, SwapFile, Walk};

use super::names::{NO_SWAP, NOTHING, UNLIMITED};
use super::observation::{
    Counters, FILE_PAGES_LOOKED_AT, LONGEST, Observation, Outcome, Signal, digest_of_bytes,
    put_bytes, significant, stamped,
};
use super::operation::{Operation, OperationKind};
use super::place::{PAGE, SCRATCH, SCRATCH_PAGES, in_region};
use super::swapped::free_wiped;

/// The machine's memory in bytes: enough for everything a sequence can touch.
const MEMORY: u64 = 64 << 20;

/// Stands for all other mappings of a process on Linux.
const BALLAST: u64 = 0x1000_0000_0000;

/// A process: its address space and its open files.
pub struct Process<'m, A: Walk> {
    space: AddressSpace<'m, Machine<A>>,
}

/// The state that a sequence operates on.
pub struct Theatre<'m, A: Walk> {
    machine: &'m Machine<A>,
    memory: &'m Memory<Machine<A>>,
    files: Vec<Object<'m, Machine<A>>>,
    /// The first process and its child.
    processes: [Option<Process<'m, A>>; 2],
    /// The index of the acting process.
    acting: usize,
    /// The size of the Linux process's mappings before the scenario, and the maximum that a limited
    /// process may lock.
    before: Counters,
    /// The usage of the hosted process before the scenario.
    base: Usage,
    observations: Vec<Observation>,
    scratch: Vec<u32>,
    /// The first process's userfaultfd, once `UFFDIO_API` has succeeded.
    userfault: Option<Userfault<'m, Machine<A>>>,
    /// The argument structure of the last userfaultfd request.
    words: [u64; 5],
    /// The swap area.
    area: Option<SwapArea>,
    device: &'static SwapFile,
}

/// Runs a sequence. `before` is the initial state of the process on Linux.
pub fn scenario<A: Walk>(operations: &[Operation], before: &Counters) -> Vec<Observation> {
    let config = Config { memory: MEMORY, contents: Contents::Anything, ..Config::default() };
    let machine = Machine::<A>::new(config);
    let memory = machine.memory().expect("memory");
    // Only base pages, unless the caller chooses.
    memory.folio_policy().set_global(bindery::SizeMode::Never);
    core::prepare(&memory);
    let free = memory.free_frame_count();
    let observations = with_device(&memory, |device| {
        let mut theatre = Theatre::new(&machine, &memory, *before, device);
        for (step, operation) in operations.iter().enumerate() {
            theatre.act(step, operations.len(), operation);
            // The audit needs an idle device, but most calls should run while the device is busy.
            if theatre.area.is_none() || step % 4 == 0 {
                theatre.audit();
            }
        }
        theatre.finish(operations.len());
        theatre.audit();
        std::mem::take(&mut theatre.observations)
    });
    machine.assert_clean();
    memory.trim();
    let kept = memory.huge_zero_page().map_or(0, |page| u64::from(page.count));
    assert_eq!(memory.free_frame_count() + kept, free, "frames have leaked");
    observations
}

struct StopAtEnd(&'static SwapFile);

impl Drop for StopAtEnd {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Runs `scenario` with a swap device that its own thread serves.
fn with_device<A: Walk, R>(
    memory: &Memory<Machine<A>>,
    scenario: impl FnOnce(&'static SwapFile) -> R,
) -> R {
    thread_local! {
        /// The device, if the last scenario left it intact.
        static DEVICE: Cell<Option<&'static SwapFile>> = const { Cell::new(None) };
    }
    let device = DEVICE.take().unwrap_or_else(core::device);
    device.start();
    let result = thread::scope(|scope| {
        scope.spawn(|| device.serve(memory));
        // Stops the device even if a scenario fails, because the scope waits for its threads.
        let _stop = StopAtEnd(device);
        scenario(device)
    });
    DEVICE.set(Some(device));
    result
}

impl<'m, A: Walk> Theatre<'m, A> {
    fn new(
        machine: &'m Machine<A>,
        memory: &'m Memory<Machine<A>>,
        before: Counters,
        device: &'static SwapFile,
    ) -> Self {
        let files = core::files(memory);
        let space = core::space(memory, before.locked * PAGE);
        let mut theatre = Self {
            machine,
            memory,
            files,
            processes: [Some(Process { space }), None],
            acting: 0,
            before,
            base: Usage::default(),
            observations: Vec::new(),
            scratch: vec![0; check::scratch_words(memory)],
            userfault: None,
            words: [0; 5],
            area: None,
            device,
        };
        core::map_private(theatre.space(), SCRATCH, SCRATCH_PAGES * PAGE, core::Use::ReadWrite);
        let rest = (before.mapped - SCRATCH_PAGES) * PAGE;
        core::map_private(theatre.space(), BALLAST, rest, core::Use::None);
        for number in 0..SCRATCH_PAGES {
            theatre.store(SCRATCH + number * PAGE, 0).expect("the scratch pages");
        }
        theatre.base = theatre.space().usage();
        theatre
    }

    /// The address space of the acting process.
    fn space(&self) -> &AddressSpace<'m, Machine<A>> {
        &self.processes[self.acting].as_ref().expect("who acts lives").space
    }

    fn program(&self) -> Program<'_, 'm, A> {
        Program::new(self.machine, self.space())
    }

    fn act(&mut self, step: usize, end: usize, operation: &Operation) {
        let nothing = Outcome::Returned(0);
        match operation.operation {
            OperationKind::Fork => {
                if self.processes[1].is_none() {
                    let space = self.space().fork().expect("memory for a child");
                    self.processes[1] = Some(Process { space });
                }
                self.observe(step, nothing, Vec::new());
            }
            OperationKind::Switch => {
                self.observe(step, nothing, Vec::new());
                if self.processes[1].is_some() {
                    self.acting ^= 1;
                }
            }
            OperationKind::Exit => {
                self.end_the_child(end);
                self.observe(step, nothing, Vec::new());
            }
            _ => {
                let mut buffer = vec![0; LONGEST as usize];
                let outcome = self.perform(operation, &mut buffer);
                let data = self.what_it_read(operation, outcome, &buffer);
                self.observe(step, outcome, data);
            }
        }
    }

    /// Ends the scenario: the child observes its memory and exits, then the parent observes its
    /// own.
    fn finish(&mut self, end: usize) {
        self.end_the_child(end);
        self.look_at_contents(end);
        core::swap_to(self, NO_SWAP);
    }

    fn end_the_child(&mut self, end: usize) {
        if self.processes[1].is_some() {
            self.acting = 1;
            self.look_at_contents(end);
            self.processes[1] = None;
        }
        self.acting = 0;
    }

    fn observe(&mut self, step: usize, outcome: Outcome, data: Vec<u64>) {
        let snapshot = look::snapshot(self.space(), &self.files, &self.base);
        let process = self.acting as u64;
        self.observations.push(Observation { step, process, outcome, data, snapshot });
    }

    fn look_at_contents(&mut self, step: usize) {
        let mut data = Vec::new();
        for area in look::areas(self.space(), &self.files) {
            for at in (area.start..area.end).step_by(PAGE as usize) {
                data.extend([at, self.digest(at)]);
            }
        }
        for (number, file) in (0..).zip(&self.files) {
            for page in 0..FILE_PAGES_LOOKED_AT {
                let mut bytes = [0; PAGE as usize];
                if core::read_object(file, page * PAGE, &mut bytes) > 0 {
                    data.extend([(number << 32) | (page * PAGE), digest_of_bytes(&bytes)]);
                }
            }
        }
        self.observe(step, Outcome::Looked, data);
    }

    /// The content of a page as the program sees it.
    fn digest(&self, at: u64) -> u64 {
        let mut bytes = [0; PAGE as usize];
        match self.program().read(VirtAddr(at), &mut bytes) {
            Ok(()) => digest_of_bytes(&bytes),
            Err(error) => super::observation::digest(|_| Err(signal(error))),
        }
    }

    fn store(&self, at: u64, value: u64) -> Result<u64, Signal> {
        self.program().store(VirtAddr(at), value).map(|()| 0).map_err(signal)
    }

    /// Zeroes a page. Returns whether all of it could be read and written.
    fn wipe(&self, page: u64) -> bool {
        let mut bytes = [0; PAGE as usize];
        let read = self.program().read(VirtAddr(page), &mut bytes).is_ok();
        let words = (page..).step_by(8).zip(bytes.as_chunks::<8>().0);
        read && words.filter(|(_, word)| **word != [0; 8]).all(|(at, _)| self.store(at, 0).is_ok())
    }

    fn perform(&mut self, operation: &Operation, buffer: &mut [u8]) -> Outcome {
        let a = operation.arguments;
        if let Some((request, _)) = operation.operation.userfault_request() {
            let mut words = operation.userfault_words();
            let outcome = core::userfault_request(self, request, &mut words);
            self.words = words;
            return Outcome::Returned(outcome);
        }
        match operation.operation {
            OperationKind::Load => self.program().load(VirtAddr(a[0])).map_err(signal).into(),
            OperationKind::Store => self.store(a[0], a[1]).into(),
            OperationKind::Mmap => self.map(operation, a[1]),
            OperationKind::Mremap => self.map(operation, a[2]),
            OperationKind::ProcessMadvise => {
                for (at, (start, length)) in (SCRATCH..).step_by(16).zip(&operation.ranges) {
                    for (at, word) in [(at, *start), (at + 8, *length)] {
                        self.store(at, word).expect("the vector is written");
                    }
                }
                let count = operation.ranges.len() as u64;
                let given = [a[0], SCRATCH, count, a[1], a[2], 0];
                Outcome::Returned(core::call(self, operation.operation, given, buffer))
            }
            OperationKind::WriteAt => {
                for (index, byte) in buffer.iter_mut().enumerate() {
                    *byte = stamped(a[3], index);
                }
                Outcome::Returned(core::call(self, operation.operation, a, buffer))
            }
            OperationKind::Limit => self.limit(a[0], a[1]),
            OperationKind::SwapTo => {
                core::swap_to(self, a[0]);
                Outcome::Returned(0)
            }
            OperationKind::Reclaim => {
                self.memory.reclaim(a[0]);
                Outcome::Returned(0)
            }
            OperationKind::FreeWiped => {
                let advise = |at, length, advice| {
                    core::call(self, OperationKind::Madvise, [at, length, advice, 0, 0, 0], &mut [])
                };
                let wipe = |page| self.wipe(page);
                Outcome::Returned(free_wiped([a[0], a[1], a[2]], wipe, advise))
            }
            operation => Outcome::Returned(core::call(self, operation, a, buffer)),
        }
    }

    /// A call that may choose the address of a mapping: unmaps it if it lies outside the region.
    fn map(&self, operation: &Operation, length: u64) -> Outcome {
        let at = core::call(self, operation.operation, operation.arguments, &mut []);
        if at < 0 || in_region(at as u64) {
            return Outcome::Returned(at);
        }
        let length = length.next_multiple_of(PAGE);
        core::call(self, OperationKind::Munmap, [at as u64, length, 0, 0, 0, 0], &mut []);
        Outcome::Elsewhere
    }

    fn limit(&self, resource: u64, pages: u64) -> Outcome {
        let bytes = |used: u64| match pages {
            UNLIMITED => u64::MAX,
            NOTHING => 0,
            more => (used + more) * PAGE,
        };
        core::limit(self.space(), resource, pages, bytes, self.before.locked * PAGE);
        Outcome::Returned(0)
    }

    fn what_it_read(&self, operation: &Operation, outcome: Outcome, buffer: &[u8]) -> Vec<u64> {
        let mut data = Vec::new();
        if let Some((_, words @ 4..)) = operation.operation.userfault_request() {
            data.push(self.words[words - 1]);
        }
        let Outcome::Returned(value @ 0..) = outcome else { return data };
        let a = operation.arguments;
        match operation.operation {
            OperationKind::Mincore if a[2] == SCRATCH => {
                let bytes = a[1].div_ceil(PAGE);
                for at in (SCRATCH..SCRATCH + bytes).step_by(8) {
                    let word = self.program().load(VirtAddr(at)).unwrap_or_default();
                    data.push(significant(word, SCRATCH + bytes - at));
                }
            }
            OperationKind::ReadAt => put_bytes(&buffer[..value as usize], |word| data.push(word)),
            _ => {}
        }
        data
    }

    /// Panics with the violations.
    fn audit(&mut self) {
        self.machine.assert_clean();
        self.memory.wait_for_swap_writes().expect("nobody interrupts it");
        let spaces: Vec<_> = self.processes.iter().flatten().map(|p| &p.space).collect();
        if let Err(violation) = core::check(self.memory, &spaces, &mut self.scratch) {
            panic!("the audit found: {violation}");
        }
    }
}

impl<A: Walk> Drop for Theatre<'_, A> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The core failed in the middle of an operation, so dropping the processes would fail
            // again.
            std::mem::forget(std::mem::take(&mut self.processes));
            std::mem::forget(std::mem::take(&mut self.files));
        }
    }
}

fn signal(error: FaultError) -> Signal {
    match error {
        FaultError::NotMapped => Signal::NotMapped,
        FaultError::Protection => Signal::Denied,
        FaultError::Bus => Signal::Bus,
        other => panic!("a fault ended with {other:?}"),
    }
}
