//! The core's calls, by name: the only file of this test that a change of the core's interface
//! affects.

use std::time::Duration;

use bindery::addr::{Order, VirtAddr};
use bindery::check::Violation;
use bindery::{
    AddressSpace, FileAccess, Limits, Locking, MapRequest, Memory, Object, Overcommit, Place,
    Protection, SizeMode, SpaceOptions, UserfaultScope,
};
use bindery_hosted::{Machine, SwapFile, SwapService, Walk};
use bindery_linux::{self as linux, OpenFile, UserfaultRequest};

use super::super::names::{
    COMPRESSED_MEMORY, F_SEAL_EXEC, F_SEAL_FUTURE_WRITE, F_SEAL_GROW, F_SEAL_SHRINK, F_SEAL_WRITE,
    FEW_SLOTS, RLIMIT_AS, RLIMIT_DATA, SWAP_DEVICE, UNLIMITED,
};
use super::super::operation::OperationKind;
use super::super::place::{BREAK, FILES, FIRST_PROCESS, READ_ONLY, WRITE_ONLY, ZEROES, page};
use super::{Process, Theatre};

type Space<'m, A> = AddressSpace<'m, Machine<A>>;

/// The purpose of a mapping outside of the region.
pub enum Use {
    ReadWrite,
    None,
}

/// The number of slots of a swap area, enough for everything that a sequence can touch.
const SLOTS: u64 = 8192;

/// The order of a folio of 2 MiB.
const HUGE: u8 = 9;

/// Applies the settings of the host's Linux: large folios on request, and the huge zero page.
pub fn prepare<A: Walk>(memory: &Memory<Machine<A>>) {
    memory.folio_policy().set(Order(HUGE), SizeMode::Madvise);
    memory.set_huge_zero_page(true);
    // The machine is small, and the sequences test limits.
    memory.commitment().set_mode(Overcommit::Always);
}

/// The four files; the third cannot be sealed.
pub fn files<A: Walk>(memory: &Memory<Machine<A>>) -> Vec<Object<'_, Machine<A>>> {
    const MFD_ALLOW_SEALING: u32 = 2;
    [MFD_ALLOW_SEALING, MFD_ALLOW_SEALING, 0, MFD_ALLOW_SEALING]
        .map(|flags| linux::memfd_create(memory, flags).expect("memory for a file"))
        .into()
}

/// The first process, which may lock memory without limit until a sequence limits it.
pub fn space<A: Walk>(memory: &Memory<Machine<A>>, most_locked: u64) -> Space<'_, A> {
    let space = AddressSpace::new(memory, SpaceOptions::default()).expect("an address space");
    space.set_break_start(VirtAddr(page(BREAK)));
    space.set_limits(&Limits {
        locked: most_locked,
        locking: Locking::Privileged,
        ..Limits::default()
    });
    space
}

/// Maps private anonymous memory.
pub fn map_private<A: Walk>(space: &Space<'_, A>, at: u64, length: u64, purpose: Use) {
    let protection = match purpose {
        Use::ReadWrite => Protection::READ | Protection::WRITE,
        Use::None => Protection::empty(),
    };
    let place = Place::Fixed(VirtAddr(at));
    let request = MapRequest { length, protection, place, ..MapRequest::default() };
    space.mmap(&request).expect("room outside of the region");
}

/// Sets a limit. `bytes` computes it from the present usage; `most_locked` is the maximum limit of
/// locked memory.
pub fn limit<A: Walk>(
    space: &Space<'_, A>,
    resource: u64,
    pages: u64,
    bytes: impl Fn(u64) -> u64,
    most_locked: u64,
) {
    let (mut limits, usage) = (space.limits(), space.usage());
    match resource {
        RLIMIT_AS => limits.address_space = bytes(usage.total),
        RLIMIT_DATA => limits.data = bytes(usage.data),
        _ => {
            let unlimited = pages == UNLIMITED;
            limits.locking = if unlimited { Locking::Privileged } else { Locking::Limited };
            limits.locked = bytes(usage.locked).min(most_locked);
        }
    }
    space.set_limits(&limits);
}

/// The calling process in the form that the core needs.
struct Caller<'t, 'm, A: Walk>(&'t Theatre<'m, A>);

impl<'m, A: Walk> Caller<'_, 'm, A> {
    fn open_file(&self, descriptor: u64) -> Option<OpenFile<'m, Machine<A>>> {
        let both = FileAccess::READ | FileAccess::WRITE;
        let (index, access) = match descriptor {
            READ_ONLY => (3, FileAccess::READ),
            WRITE_ONLY => (3, FileAccess::WRITE),
            other => (FILES.iter().position(|file| *file == other)?, both),
        };
        Some(OpenFile { object: self.0.files[index].clone(), access })
    }
}

impl<'m, A: Walk> linux::Process<'m, Machine<A>> for Caller<'_, 'm, A> {
    fn space(&self) -> &Space<'m, A> {
        self.0.space()
    }

    fn file(&self, descriptor: i32) -> Option<OpenFile<'m, Machine<A>>> {
        self.open_file(i64::from(descriptor) as u64)
    }

    fn zeroes(&self, descriptor: i32) -> Option<FileAccess> {
        let both = FileAccess::READ | FileAccess::WRITE;
        let mut opened = [both, FileAccess::READ].into_iter().zip(ZEROES);
        opened.find_map(|(access, file)| (descriptor == file as i32).then_some(access))
    }

    fn process(&self, descriptor: i32) -> Option<&Space<'m, A>> {
        let first = self.0.processes[0].as_ref().map(|process| &process.space);
        first.filter(|_| descriptor == FIRST_PROCESS as i32)
    }
}

const EBADF: i64 = -9;
const EINVAL: i64 = -22;

/// Makes a call with raw arguments.
pub fn call<A: Walk>(
    theatre: &Theatre<'_, A>,
    operation: OperationKind,
    a: [u64; 6],
    buffer: &mut [u8],
) -> i64 {
    let caller = Caller(theatre);
    let call = match operation {
        OperationKind::Mmap => linux::Call::Mmap,
        OperationKind::Munmap => linux::Call::Munmap,
        OperationKind::Mremap => linux::Call::Mremap,
        OperationKind::Mprotect => linux::Call::Mprotect,
        OperationKind::Madvise => linux::Call::Madvise,
        OperationKind::ProcessMadvise => linux::Call::ProcessMadvise,
        OperationKind::Brk => linux::Call::Brk,
        OperationKind::Mlock => linux::Call::Mlock,
        OperationKind::Mlock2 => linux::Call::Mlock2,
        OperationKind::Munlock => linux::Call::Munlock,
        OperationKind::Mlockall => linux::Call::Mlockall,
        OperationKind::Munlockall => linux::Call::Munlockall,
        OperationKind::Mincore => linux::Call::Mincore,
        OperationKind::Msync => linux::Call::Msync,
        OperationKind::Mseal => linux::Call::Mseal,
        _ => return file_call(caller.open_file(a[0]), operation, a, buffer),
    };
    linux::call(&caller, call, a)
}

/// A request on the userfaultfd by any process.
pub fn userfault_request<'m, A: Walk>(
    theatre: &mut Theatre<'m, A>,
    request: u32,
    words: &mut [u64; 5],
) -> i64 {
    let request = UserfaultRequest::from_number(request).expect("a request");
    let Some(Process { space }) = &theatre.processes[0] else { unreachable!("it lives longest") };
    if request == UserfaultRequest::Api {
        if theatre.userfault.is_some() {
            return EINVAL;
        }
        let mut given = [words[0], words[1], words[2]];
        let features = match linux::userfault_api(&mut given, true) {
            Ok(features) => features,
            Err(errno) => return -i64::from(errno as i32),
        };
        let made = space.userfault(features, UserfaultScope::All).expect("memory for a handle");
        theatre.userfault = Some(made);
        return 0;
    }
    let Some(userfault) = &theatre.userfault else { return EINVAL };
    let program = theatre.program();
    let mut read = |at, bytes: &mut [u8]| program.read(at, bytes);
    match linux::userfault_control(space, theatre.space(), userfault, request, words, &mut read) {
        Ok(value) => value as i64,
        Err(errno) => -i64::from(errno as i32),
    }
}

/// A call on a file by its descriptor.
fn file_call<A: Walk>(
    file: Option<OpenFile<'_, Machine<A>>>,
    operation: OperationKind,
    a: [u64; 6],
    buffer: &mut [u8],
) -> i64 {
    let negative = matches!(
        operation,
        OperationKind::Ftruncate | OperationKind::ReadAt | OperationKind::WriteAt
    ) && a[1] >> 63 == 1;
    if negative {
        // Linux checks these arguments before the descriptor, and so must a kernel.
        return EINVAL;
    }
    let Some(file) = file else { return EBADF };
    let length = (a[2] as usize).min(buffer.len());
    match operation {
        OperationKind::Ftruncate => linux::ftruncate(&file, a[1] as i64),
        OperationKind::Fallocate => linux::fallocate(&file, a[1] as i32, a[2] as i64, a[3] as i64),
        OperationKind::AddSeals => linux::add_seals(&file, with_all_that_follow(a[1] as u32)),
        OperationKind::GetSeals => linux::get_seals(&file),
        OperationKind::ReadAt => linux::pread(&file, &mut buffer[..length], a[1] as i64),
        OperationKind::WriteAt => linux::pwrite(&file, &buffer[..length], a[1] as i64),
        other => unreachable!("{other:?} is no call about files"),
    }
}

/// The seals plus those that a kernel derives from the file's mode, which only the kernel knows. An
/// executable file, like those of `memfd_create`, can no longer be written.
fn with_all_that_follow(seals: u32) -> u32 {
    let follows = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_FUTURE_WRITE;
    if u64::from(seals) & F_SEAL_EXEC != 0 { seals | follows as u32 } else { seals }
}

/// Removes the swap area and adds another.
pub fn swap_to<A: Walk>(theatre: &mut Theatre<'_, A>, area: u64) {
    let memory = theatre.memory;
    if let Some(area) = theatre.area.take() {
        memory.stop_swapping_to(&area);
        for process in theatre.processes.iter().flatten() {
            process.space.swap_in_area(&area).expect("memory for all of it");
        }
        memory.swap_in_objects(&area).expect("memory for all of it");
        assert_eq!(memory.swap_off(&area), Ok(()), "everything is back");
    }
    let area = match area {
        COMPRESSED_MEMORY => Some(memory.swap_on(SLOTS, 0)),
        SWAP_DEVICE => Some(memory.swap_on_device(theatre.device, 0)),
        FEW_SLOTS => Some(memory.swap_on(16, 0)),
        _ => None,
    };
    theatre.area = area.map(|area| area.expect("memory for an area"));
}

/// A swap device that completes requests at any time.
pub fn device() -> &'static SwapFile {
    let service = SwapService::Shuffled(1, Duration::ZERO);
    Box::leak(Box::new(SwapFile::new(SLOTS, service).expect("a temporary file")))
}

/// Reads an object without any checks. Returns the number of bytes read.
pub fn read_object<A: Walk>(object: &Object<'_, Machine<A>>, at: u64, into: &mut [u8]) -> usize {
    object.read(at, into).expect("shared memory can be read")
}

/// Verifies every invariant.
pub fn check<A: Walk>(
    memory: &Memory<Machine<A>>,
    spaces: &[&Space<'_, A>],
    scratch: &mut [u32],
) -> Result<(), Violation> {
    bindery::check::check(memory, spaces, scratch).map(|_| ())
}
