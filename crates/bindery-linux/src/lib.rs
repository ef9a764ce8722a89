//! The Linux ABI of [Bindery](bindery): memory system calls, from raw numbers and flags to a result
//! or a negative errno.
//!
//! A kernel that runs Linux programs forwards the calls about memory unchanged:
//!
//! ```text
//! program   syscall(number, six arguments)
//! kernel    Call::from_number(table, number)     None: the kernel's own call
//!           bindery_linux::call(&process, call, arguments)
//! core      flags to types, the operation, its Error to the errno that Linux returns
//! ```
//!
//! The kernel answers questions about descriptors and other processes through [`Process`].
//! Constants come from `linux-raw-sys`; those used here are the same on all three architectures.
//!
//! | file | contents |
//! |---|---|
//! | `number` | [`Call`] and its numbers |
//! | `map` | `mmap`, `munmap`, `mremap`, `remap_file_pages`, `brk`, `mseal` |
//! | `protect` | `mprotect` and protection keys |
//! | `advice` | `madvise`, `process_madvise`, `process_mrelease` |
//! | `mlock` | `mlock`, `mlock2`, `munlock`, `mlockall`, `munlockall` |
//! | `mincore`, `msync` | these calls |
//! | `pending` | [`PendingCall`]: calls that stop where they would wait, and go on |
//! | `file` | calls on shared memory by descriptor |
//! | `prctl` | `prctl`: the options about memory |
//! | `vm_copy` | `process_vm_readv`, `process_vm_writev`, at once or in steps |
//! | `shm` | System V shared memory, and the users' accounts of locked segments; feature `sysv` |
//! | `userfault` | `ioctl_userfaultfd(2)` |
//! | `vector` | `struct iovec` |
//! | `proc` | the files of `/proc/self`; feature `procfs` |
//!
//! The crate uses only the public API of the core: listings read mappings by
//! [`AddressSpace::view_mapping`].

#![no_std]
#![deny(missing_debug_implementations)]
#![deny(
    clippy::wildcard_enum_match_arm,
    clippy::match_wildcard_for_single_variants,
    reason = "a new variant leads by errors to each place that must decide about it"
)]
#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")
)]

#[cfg(test)]
extern crate std;

mod advice;
mod file;
mod map;
mod mincore;
mod mlock;
mod msync;
mod number;
mod pending;
mod prctl;
#[cfg(feature = "procfs")]
pub mod proc;
mod protect;
#[cfg(feature = "sysv")]
mod shm;
mod userfault;
mod vector;
mod vm_copy;

use bindery::addr::VirtAddr;
use bindery::arch::{KeyRights, ProtectionKey};
use bindery::{
    AddressSpace, Errno, Error, FileAccess, Object, Operation, PendingEvents, Platform, Populate,
};

pub use advice::process_mrelease;
pub use file::{
    add_seals, fallocate, ftruncate, get_seals, memfd_create, memfd_secret, pread, pwrite,
};
pub use number::{Call, Numbers};
pub use pending::{CallStep, PendingCall};
pub use prctl::prctl;
#[cfg(feature = "sysv")]
pub use shm::{
    IpcClock, IpcUser, LockAccount, SegmentLocking, SegmentSlot, Segments, shmat, shmctl, shmdt,
    shmget,
};
pub use userfault::{
    USERFAULT_MESSAGE, UserMemory, UserfaultRequest, userfault_api, userfault_control,
    userfault_message, userfault_text,
};
pub use vector::IoRange;
pub use vm_copy::{CopyDirection, PendingProcessVm, process_vm, process_vm_ranges};

/// An open file that can be mapped.
#[derive(Debug)]
pub struct OpenFile<'m, P: Platform> {
    /// The file's object.
    pub object: Object<'m, P>,
    /// The access with which it was opened.
    pub access: FileAccess,
}

// A derived implementation would require the platform to be `Clone`.
impl<P: Platform> Clone for OpenFile<'_, P> {
    fn clone(&self) -> Self {
        Self { object: self.object.clone(), access: self.access }
    }
}

/// The process that makes a call: its memory, descriptors and rights.
///
/// # Context
/// Context: may sleep. [`call`] uses this trait on its caller's thread, without locks of the core.
pub trait Process<'m, P: Platform> {
    /// The process's memory.
    fn space(&self) -> &AddressSpace<'m, P>;

    /// The file behind a descriptor; `None` if the descriptor is not open (`EBADF`). The kernel
    /// itself refuses files that cannot be mapped (`ENODEV`) before it calls [`call`].
    fn file(&self, descriptor: i32) -> Option<OpenFile<'m, P>>;

    /// The access mode of a descriptor of `/dev/zero`; `None` for other descriptors and by default.
    /// Called before [`Process::file`].
    fn zeroes(&self, _descriptor: i32) -> Option<FileAccess> {
        None
    }

    /// The memory of the process behind a pidfd; `None` if the descriptor is not a pidfd. A call in
    /// steps looks up the memory in each step and compares addresses, so the storage of an
    /// [`AddressSpace`] that has ended must not be reused for another one while such a call is in
    /// progress.
    fn process(&self, descriptor: i32) -> Option<&AddressSpace<'m, P>>;

    /// Reports an error that is new to the open file that the process has mapped at `at`, by
    /// [`Object::check_errors`] with the mark of that open file. Called by `msync` when the pages
    /// there are stored. By default, nothing is reported: `msync` then returns only the errors of
    /// its own stores.
    ///
    /// # Errors
    /// The error.
    fn check_errors(&self, _file: &Object<'m, P>, _at: VirtAddr) -> Result<(), Error> {
        Ok(())
    }

    /// Whether the process may advise on the memory of other processes (Linux: `CAP_SYS_NICE`). The
    /// default is `true`.
    fn may_advise_others(&self) -> bool {
        true
    }

    /// Sets the calling thread's rights to a newly allocated key; `forbidden` holds the two bits of
    /// [`KeyRights`]. Called only if [`Platform::protection_keys`] reports keys.
    fn set_key_rights(&self, _key: ProtectionKey, _forbidden: u32) {}

    /// The calling thread's rights to the memory of each key; all rights by default.
    fn key_rights(&self) -> KeyRights {
        KeyRights::ALL
    }
}

/// The result of a call: a value, or the errno.
type Outcome = Result<u64, Errno>;

/// The result of a call up to its waits: its value, and the pages that it must still map before it
/// returns.
type Begun = Result<(u64, Populate), Errno>;

/// The messages to userfaultfds that a call has caused. They are delivered after its change, before
/// its pages are mapped, and even if the call has failed.
#[derive(Debug)]
struct Events<'m, P: Platform>(Option<PendingEvents<'m, P>>);

impl<'m, P: Platform> Events<'m, P> {
    /// Keeps the messages of a call, which has at most one value with messages.
    #[inline(always)]
    fn keep(&mut self, caused: PendingEvents<'m, P>) {
        if !caused.is_empty() {
            self.0 = Some(caused);
        }
    }
}

/// Performs a call for a process. Takes raw arguments and returns the raw result, which is `-errno`
/// for an error. A kernel that must not block uses [`PendingCall`].
///
/// Context: may sleep. Complexity: that of the operation.
pub fn call<'m, P: Platform>(
    process: &impl Process<'m, P>,
    call: Call,
    arguments: [u64; 6],
) -> i64 {
    let mut events = Events(None);
    let begun = begin(process, call, arguments, &mut events);
    if let Some(events) = events.0 {
        events.finish();
    }
    let outcome = begun.and_then(|(value, populate)| {
        let populated = populate.finish(process.space());
        populated.map(|()| value).map_err(errno(populate_operation(call)))
    });
    raw(outcome)
}

/// Performs a call up to its waits.
#[inline(always)]
fn begin<'m, P: Platform>(
    process: &impl Process<'m, P>,
    call: Call,
    arguments: [u64; 6],
    events: &mut Events<'m, P>,
) -> Begun {
    let space = process.space();
    let [a, b, c, ..] = arguments;
    let outcome = match call {
        Call::Mmap => return map::mmap(process, arguments, events),
        Call::Mremap => return map::mremap(space, arguments, events),
        Call::RemapFilePages => return map::remap_file_pages(space, arguments),
        Call::Brk => {
            let ((end, populate), caused) = space.begin_set_break(VirtAddr(a));
            events.keep(caused);
            return Ok((end.0, populate));
        }
        Call::Madvise => advice::madvise(process, a, b, c as i32),
        Call::Mlock => return mlock::mlock(space, a, b, 0),
        Call::Mlock2 => return mlock::mlock(space, a, b, c as i32),
        Call::Mlockall => return mlock::mlockall(space, a as i32),
        Call::Munmap => map::munmap(space, a, b, events),
        Call::Mprotect => protect::mprotect(space, [a, b, c], protect::NO_KEY),
        Call::PkeyMprotect => protect::mprotect(space, [a, b, c], arguments[3] as i32),
        Call::PkeyAlloc => protect::pkey_alloc(process, a, b),
        Call::PkeyFree => protect::pkey_free(space, a as i32),
        Call::Mseal => map::mseal(space, a, b, c),
        Call::ProcessMadvise => advice::process_madvise(process, arguments),
        Call::Munlock => mlock::munlock(space, a, b),
        Call::Munlockall => {
            space.munlockall();
            Ok(0)
        }
        Call::Mincore => mincore::mincore(space, a, b, c),
        Call::Msync => msync::msync(process, a, b, c as i32),
    };
    outcome.map(|value| (value, Populate::default()))
}

/// The operation that determines the errno if mapping a call's pages fails.
fn populate_operation(call: Call) -> Operation {
    match call {
        Call::Mlock | Call::Mlock2 | Call::Mlockall => Operation::Mlock,
        Call::Mmap
        | Call::Munmap
        | Call::Mremap
        | Call::RemapFilePages
        | Call::Mprotect
        | Call::PkeyMprotect
        | Call::PkeyAlloc
        | Call::PkeyFree
        | Call::Brk
        | Call::Mseal
        | Call::Madvise
        | Call::ProcessMadvise
        | Call::Munlock
        | Call::Munlockall
        | Call::Mincore
        | Call::Msync => Operation::Madvise,
    }
}

/// The raw result of a call.
fn raw(outcome: Outcome) -> i64 {
    match outcome {
        Ok(value) => value as i64,
        Err(errno) => -i64::from(errno as i32),
    }
}

/// The errno of an operation's refusal.
fn errno(operation: Operation) -> impl Fn(Error) -> Errno {
    move |error| error.errno(operation)
}
