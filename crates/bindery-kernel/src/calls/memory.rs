//! The system calls about memory. The core implements them; the kernel looks up the descriptors.

use bindery::addr::VirtAddr;
use bindery::arch::{KeyRights, ProtectionKey};
use bindery::{Access, Error, FaultError, FileAccess, Object};
use bindery_linux::{self as linux, Call, Numbers, OpenFile};
use linux_raw_sys::general::{
    MADV_COLD, MADV_DODUMP, MADV_DOFORK, MADV_DONTDUMP, MADV_DONTFORK, MADV_DONTNEED,
    MADV_DONTNEED_LOCKED, MADV_FREE, MADV_GUARD_INSTALL, MADV_GUARD_REMOVE, MADV_HUGEPAGE,
    MADV_KEEPONFORK, MADV_NOHUGEPAGE, MADV_NORMAL, MADV_POPULATE_READ, MADV_POPULATE_WRITE,
    MADV_RANDOM, MADV_SEQUENTIAL, MADV_WIPEONFORK, MAP_ANONYMOUS, MAP_LOCKED, MAP_POPULATE,
    MS_SYNC,
};

use crate::arch;
use crate::errno::{Errno, Outcome, from_raw};
use crate::files::{Files, Mappable, disk};
use crate::memory::Space;
use crate::platform::Machine;
use crate::process;

/// The running process, in the form that the core needs.
struct Caller<'a> {
    space: &'a Space,
    file: Option<Mappable>,
    other: Option<&'a Space>,
}

impl linux::Process<'static, Machine> for Caller<'_> {
    fn space(&self) -> &Space {
        self.space
    }

    fn file(&self, _descriptor: i32) -> Option<OpenFile<'static, Machine>> {
        match &self.file {
            Some(Mappable::File(file)) => Some(file.clone()),
            _ => None,
        }
    }

    fn check_errors(&self, file: &Object<'static, Machine>, _: VirtAddr) -> Result<(), Error> {
        Files::current().check_errors(file)
    }

    fn zeroes(&self, _descriptor: i32) -> Option<FileAccess> {
        match &self.file {
            Some(Mappable::Zeroes(access)) => Some(*access),
            _ => None,
        }
    }

    fn set_key_rights(&self, key: ProtectionKey, forbidden: u32) {
        arch::set_key_rights(arch::key_rights().with(key, forbidden));
    }

    fn key_rights(&self) -> KeyRights {
        arch::key_rights()
    }

    fn process(&self, _descriptor: i32) -> Option<&Space> {
        self.other
    }

    fn may_advise_others(&self) -> bool {
        process::may_advise_others()
    }
}

/// Makes a call about memory; `None` if the number belongs to another call.
#[inline]
pub fn call(number: u64, arguments: &[u64; 6]) -> Option<Outcome> {
    let call = Call::from_number(const { numbers() }, number)?;
    let more = match call {
        Call::Mmap => !is_plain(arguments[3]),
        Call::ProcessMadvise => true,
        Call::Msync => arguments[2] as u32 & MS_SYNC != 0 && disk::is_mounted(),
        Call::Mprotect
        | Call::Munmap
        | Call::Brk
        | Call::Mremap
        | Call::Mincore
        | Call::Madvise
        | Call::Mlock
        | Call::Munlock
        | Call::Mlockall
        | Call::Munlockall
        | Call::Mlock2
        | Call::RemapFilePages
        | Call::PkeyMprotect
        | Call::PkeyAlloc
        | Call::PkeyFree
        | Call::Mseal => false,
    };
    Some(if more { with_more(call, *arguments) } else { make(call, *arguments, None, None) })
}

/// A call about memory of the running program that uses its address space, and nothing else of the
/// kernel. It needs no kernel's lock.
pub struct OfTheCore {
    call: Call,
    arguments: [u64; 6],
}

impl OfTheCore {
    /// The call with this number; `None` for all others: those that look up a descriptor or another
    /// process, and those that may begin to read, store or collapse pages for long.
    pub fn from_number(number: u64, arguments: [u64; 6]) -> Option<Self> {
        let call = Call::from_number(const { numbers() }, number)?;
        let is_one = match call {
            Call::Mmap => is_plain(arguments[3]),
            Call::Madvise => is_prompt(arguments[2], arguments[1]),
            Call::Mprotect
            | Call::Munmap
            | Call::Brk
            | Call::Mremap
            | Call::Mincore
            | Call::PkeyMprotect
            | Call::Mseal => true,
            Call::Msync
            | Call::Mlock
            | Call::Munlock
            | Call::Mlockall
            | Call::Munlockall
            | Call::Mlock2
            | Call::RemapFilePages
            | Call::PkeyAlloc
            | Call::PkeyFree
            | Call::ProcessMadvise => false,
        };
        is_one.then_some(Self { call, arguments })
    }

    /// Makes the call.
    pub fn make(self) -> Outcome {
        make(self.call, self.arguments, None, None)
    }
}

/// Whether `mmap` with these flags maps anonymous memory, and maps no pages itself.
#[inline]
fn is_plain(flags: u64) -> bool {
    flags as u32 & (MAP_ANONYMOUS | MAP_POPULATE | MAP_LOCKED) == MAP_ANONYMOUS
}

/// The most bytes that a call without the kernel's lock populates, since nothing interrupts it.
const POPULATED: u64 = 1 << 20;

/// Whether advice needs neither a pager nor a swap device, or only for as many pages as a few page
/// faults do.
fn is_prompt(advice: u64, length: u64) -> bool {
    if matches!(advice as u32, MADV_POPULATE_READ | MADV_POPULATE_WRITE) {
        return length <= POPULATED;
    }
    matches!(
        advice as u32,
        MADV_NORMAL
            | MADV_RANDOM
            | MADV_SEQUENTIAL
            | MADV_DONTNEED
            | MADV_DONTNEED_LOCKED
            | MADV_FREE
            | MADV_COLD
            | MADV_DONTFORK
            | MADV_DOFORK
            | MADV_WIPEONFORK
            | MADV_KEEPONFORK
            | MADV_DONTDUMP
            | MADV_DODUMP
            | MADV_HUGEPAGE
            | MADV_NOHUGEPAGE
            | MADV_GUARD_INSTALL
            | MADV_GUARD_REMOVE
    )
}

#[inline]
fn make(call: Call, arguments: [u64; 6], file: Option<Mappable>, other: Option<&Space>) -> Outcome {
    process::with_space(|space| {
        from_raw(linux::call(&Caller { space, file, other }, call, arguments))
    })
}

/// A call that needs a descriptor or the disk, or may run out of memory without reporting it. Out
/// of line, so that the other calls stay fast.
#[inline(never)]
fn with_more(call: Call, arguments: [u64; 6]) -> Outcome {
    let (mut file, mut other) = (None, None);
    let mut refused = Errno::EBADF;
    match call {
        Call::Mmap if arguments[3] as u32 & MAP_ANONYMOUS == 0 => {
            match Files::current().mappable(arguments[4] as i32) {
                Ok(open) => file = Some(open),
                // The core's own checks of the arguments come first, as on Linux.
                Err(Errno::EBADF) => {}
                Err(errno) => return Err(errno),
            }
        }
        Call::ProcessMadvise => match process::space_behind(arguments[0] as i32) {
            Ok(space) => other = Some(space),
            // As above, whatever the reason.
            Err(errno) => refused = errno,
        },
        Call::Mmap
        | Call::Mprotect
        | Call::Munmap
        | Call::Brk
        | Call::Mremap
        | Call::Msync
        | Call::Mincore
        | Call::Madvise
        | Call::Mlock
        | Call::Munlock
        | Call::Mlockall
        | Call::Munlockall
        | Call::Mlock2
        | Call::RemapFilePages
        | Call::PkeyMprotect
        | Call::PkeyAlloc
        | Call::PkeyFree
        | Call::Mseal => {}
    }
    // Looked up before the call, so that anonymous memory does not wait for the disk.
    let is_on_disk = call == Call::Msync && maps_files(arguments[0], arguments[1]);
    let outcome = make(call, arguments, file, other.as_deref());
    if is_on_disk {
        // The pages are stored. The disk also has to store the places of their blocks.
        let kept = disk::commit();
        return outcome.and_then(|done| kept.map(|()| done));
    }
    if call == Call::ProcessMadvise && outcome == Err(Errno::EBADF) {
        return Err(refused);
    }
    // As on Linux, `mmap` does not report that its population ran out of memory, but memory has to
    // be freed.
    if call == Call::Mmap
        && arguments[3] as u32 & (MAP_POPULATE | MAP_LOCKED) != 0
        && let Ok(start) = outcome
    {
        let last = VirtAddr(start.saturating_add(arguments[1].saturating_sub(1)));
        let missing = process::with_space(|space| space.fault(last, Access::Read));
        if missing == Err(FaultError::OutOfMemory) {
            process::memory_ran_out();
        }
    }
    outcome
}

/// Whether a mapping of a file overlaps the range.
fn maps_files(start: u64, length: u64) -> bool {
    let end = start.saturating_add(length);
    let mut at = start;
    process::with_space(|space| {
        loop {
            let mapping = space.view_mapping(VirtAddr(at), |mapping| {
                let is_file = mapping.object().is_some_and(|object| object.is_file());
                (mapping.range(), is_file)
            });
            match mapping {
                Some((range, is_file)) if range.start().0 < end && range.end().0 > at => {
                    if is_file {
                        return true;
                    }
                    at = range.end().0;
                }
                _ => return false,
            }
        }
    })
}

const fn numbers() -> Numbers {
    if cfg!(target_arch = "x86_64") { Numbers::X86_64 } else { Numbers::Generic }
}
