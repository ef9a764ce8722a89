//! The calls of a program: functions on the core, system calls on Linux.

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::sync::RawLock;
use bindery::{
    Access, Accounting, AddressSpace, Advice, FileAccess, MapObject, MapRequest, Memory, Object,
    Place, Protection, Resolved, Sealing, Sharing, SpaceOptions,
};
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{
    MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap,
};
use nix::sys::prctl::set_thp_disable;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork, ftruncate};

use crate::Problem;
use crate::board::Board;
use crate::machine::Machine;

/// The bytes of the file that each worker has.
pub const FILE_BYTES: u64 = 1 << 20;
/// The start of the heap on the core.
const HEAP: u64 = 0x2800_0000_0000;

/// The content of a mapping.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// Private memory.
    Anonymous,
    /// A private mapping of the worker's file.
    PrivateFile,
    /// A shared mapping of the worker's file.
    SharedFile,
}

/// The calls of one program. Each call panics if it fails, because the operations make only valid
/// calls and a measurement with failed calls has no meaning.
pub trait Calls: Sync {
    /// The running thread starts to use the program's address space.
    fn enter(&self) {}

    /// The running thread stops using the program's address space.
    fn leave(&self) {}

    /// Sleeps until `workers` have arrived `times` times.
    fn rest(&self, board: &Board, workers: u16, times: u64) {
        board.sleep_until_all(workers, times);
    }

    /// mmap(2), readable and writable, at `at` or at an address that the kernel chooses. Returns
    /// the address.
    fn map(&self, worker: u16, at: Option<u64>, length: u64, backing: Backing) -> u64;

    /// munmap(2).
    fn unmap(&self, at: u64, length: u64);

    /// Writes to each page.
    fn touch(&self, at: u64, length: u64);

    /// madvise(2), `MADV_DONTNEED`.
    fn discard(&self, at: u64, length: u64);

    /// mprotect(2) to readable, plus writable if `writable` is set.
    fn protect(&self, at: u64, length: u64, writable: bool);

    /// brk(2): sets the heap to `pages` pages more than its initial size.
    fn grow_heap(&self, pages: u64);

    /// fork(2) of a child that ends at once, and wait(2).
    fn fork(&self);
}

/// A program on the core.
pub struct OnCore<L: RawLock + 'static> {
    pub space: AddressSpace<'static, Machine<L>>,
    files: Vec<Object<'static, Machine<L>>>,
}

impl<L: RawLock + 'static> OnCore<L> {
    /// A program with a file for each of `workers`.
    ///
    /// # Errors
    /// If memory is full.
    pub fn new(memory: &'static Memory<Machine<L>>, workers: u16) -> Result<Self, Problem> {
        let failed = |error| Problem(format!("cannot make an address space on the core: {error}"));
        let space = AddressSpace::new(memory, SpaceOptions::default()).map_err(failed)?;
        space.set_break_start(VirtAddr(HEAP));
        let file = |_| memory.shared_memory(FILE_BYTES, Sealing::Forbidden, Accounting::PerPage);
        let files = (0..workers).map(file).collect::<Result<_, _>>().map_err(failed)?;
        Ok(Self { space, files })
    }
}

impl<L: RawLock + 'static> Calls for OnCore<L> {
    fn enter(&self) {
        self.space.enter();
    }

    fn leave(&self) {
        // SAFETY: the machine of this program has no TLB.
        unsafe { self.space.leave() };
    }

    fn rest(&self, board: &Board, workers: u16, times: u64) {
        let wait = || board.sleep_until_all(workers, times);
        // SAFETY: no call of the program is in progress, and the board makes none.
        unsafe { self.space.memory().platform().while_idle(wait) }
    }

    fn map(&self, worker: u16, at: Option<u64>, length: u64, backing: Backing) -> u64 {
        let place = at.map_or(Place::Anywhere, |at| Place::Fixed(VirtAddr(at)));
        let protection = Protection::READ | Protection::WRITE;
        let sharing = match backing {
            Backing::Anonymous | Backing::PrivateFile => Sharing::Private,
            Backing::SharedFile => Sharing::Shared,
        };
        let request = MapRequest { length, protection, place, sharing, ..MapRequest::default() };
        let mapped = match backing {
            Backing::Anonymous => self.space.mmap(&request),
            Backing::PrivateFile | Backing::SharedFile => {
                let object = &self.files[usize::from(worker)];
                let access = FileAccess::READ | FileAccess::WRITE;
                self.space.mmap_object(&request, &MapObject { object, offset: 0, access })
            }
        };
        mapped.expect("addresses are free").0
    }

    fn unmap(&self, at: u64, length: u64) {
        self.space.munmap(VirtAddr(at), length).expect("the range is valid");
    }

    /// Faults wherever the MMU would find no entry, that is, after the pages that the last fault
    /// mapped.
    fn touch(&self, at: u64, length: u64) {
        let mut next = VirtAddr(at);
        while next.0 < at + length {
            let resolved = self.space.fault(next, Access::Write);
            next = if let Resolved::New(range) = resolved.expect("memory is mapped and free") {
                range.end()
            } else {
                VirtAddr(next.0 + PAGE_SIZE)
            };
        }
    }

    fn discard(&self, at: u64, length: u64) {
        let discarded = self.space.madvise(VirtAddr(at), length, Advice::DontNeed);
        discarded.expect("the range is mapped");
    }

    fn protect(&self, at: u64, length: u64, writable: bool) {
        let readable = Protection::READ;
        let protection = if writable { readable | Protection::WRITE } else { readable };
        self.space.mprotect(VirtAddr(at), length, protection).expect("the range is mapped");
    }

    fn grow_heap(&self, pages: u64) {
        let end = VirtAddr(HEAP + pages * PAGE_SIZE);
        assert!(self.space.set_break(end) == end, "the heap has room");
    }

    fn fork(&self) {
        drop(self.space.fork().expect("memory is free"));
    }
}

/// This process, on the host's Linux.
pub struct OnLinux {
    files: Vec<OwnedFd>,
    /// The end of the heap when the program began.
    heap: u64,
}

/// Forbids large folios to this process and its children, because the core is measured with base
/// pages.
///
/// # Errors
/// The errors of prctl(2).
pub fn only_base_pages() -> Result<(), Problem> {
    Ok(set_thp_disable(true)?)
}

impl OnLinux {
    /// A program with a file for each of `workers`.
    ///
    /// # Errors
    /// The errors of the system calls.
    pub fn new(workers: u16) -> Result<Self, Problem> {
        let file = |_| -> Result<OwnedFd, nix::Error> {
            let file = memfd_create(c"bindery-scaling", MFdFlags::MFD_CLOEXEC)?;
            ftruncate(&file, FILE_BYTES as libc::off_t)?;
            Ok(file)
        };
        Ok(Self { files: (0..workers).map(file).collect::<Result<_, _>>()?, heap: set_break(0) })
    }
}

/// brk(2): moves the end of the heap and returns the new end.
fn set_break(end: u64) -> u64 {
    // SAFETY: the heap only grows beyond the part that the C library uses and shrinks to that size
    // again.
    unsafe { libc::syscall(libc::SYS_brk, end) as u64 }
}

/// An address of a mapping.
fn pointer(at: u64) -> NonNull<libc::c_void> {
    NonNull::new(at as *mut _).expect("no mapping is at 0")
}

fn bytes(length: u64) -> NonZeroUsize {
    NonZeroUsize::new(length as usize).expect("no mapping is empty")
}

const READ_WRITE: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);

impl Calls for OnLinux {
    fn map(&self, worker: u16, at: Option<u64>, length: u64, backing: Backing) -> u64 {
        let sharing = match backing {
            Backing::Anonymous | Backing::PrivateFile => MapFlags::MAP_PRIVATE,
            Backing::SharedFile => MapFlags::MAP_SHARED,
        };
        let fixed = at.map_or(MapFlags::empty(), |_| MapFlags::MAP_FIXED_NOREPLACE);
        let at = at.and_then(|at| std::num::NonZeroUsize::new(at as usize));
        let flags = sharing | fixed;
        let length = bytes(length);
        let mapped = match backing {
            // SAFETY: FIXED_NOREPLACE replaces no mapping.
            Backing::Anonymous => unsafe { mmap_anonymous(at, length, READ_WRITE, flags) },
            Backing::PrivateFile | Backing::SharedFile => {
                let file = self.files[usize::from(worker)].as_fd();
                // SAFETY: as above.
                unsafe { mmap(at, length, READ_WRITE, flags, file, 0) }
            }
        };
        mapped.expect("addresses are free").as_ptr() as u64
    }

    fn unmap(&self, at: u64, length: u64) {
        // SAFETY: the operation owns the range, and no reference points into it.
        let unmapped = unsafe { munmap(pointer(at), length as usize) };
        unmapped.expect("the range is valid");
    }

    fn touch(&self, at: u64, length: u64) {
        for page in (at..at + length).step_by(PAGE_SIZE as usize) {
            // SAFETY: the operation has mapped the range writable, and only this thread uses it.
            unsafe { pointer(page).cast::<u8>().write_volatile(1) };
        }
    }

    fn discard(&self, at: u64, length: u64) {
        // SAFETY: the operation owns the range, and its content has no meaning.
        let discarded = unsafe { madvise(pointer(at), length as usize, MmapAdvise::MADV_DONTNEED) };
        discarded.expect("the range is mapped");
    }

    fn protect(&self, at: u64, length: u64, writable: bool) {
        let protection = if writable { READ_WRITE } else { ProtFlags::PROT_READ };
        // SAFETY: the operation owns the range, and no thread writes it now.
        let protected = unsafe { mprotect(pointer(at), length as usize, protection) };
        protected.expect("the range is mapped");
    }

    fn grow_heap(&self, pages: u64) {
        let end = self.heap + pages * PAGE_SIZE;
        assert!(set_break(end) == end, "the heap has room");
    }

    fn fork(&self) {
        // SAFETY: the child makes one system call, which is allowed after the fork of a
        // multithreaded process.
        match unsafe { fork() }.expect("the host has processes left") {
            // SAFETY: `_exit` ends the child at once; no state of the parent is dropped or flushed.
            ForkResult::Child => unsafe { libc::_exit(0) },
            ForkResult::Parent { child } => {
                waitpid(child, None).expect("the child is this process's");
            }
        }
    }
}
