//! `ioctl_userfaultfd(2)`: the structures of its requests, and the messages that programs read.
//!
//! Each structure is a few 64-bit words. The kernel copies the words in, makes the call, and copies
//! the result word out.

use core::fmt;

use linux_raw_sys::general as abi;

use bindery::addr::VirtAddr;
use bindery::{
    AddressSpace, Errno, Error, FaultError, FillMode, FillOrder, MoveMode, Operation, PartialFill,
    Platform, Userfault, UserfaultFeatures, UserfaultKind, UserfaultMessage, UserfaultModes,
    WaitingFaults, WriteProtectMode,
};

use super::Outcome;

/// The bytes of a message (`struct uffd_msg`).
pub const USERFAULT_MESSAGE: usize = 32;

/// Reads the caller's memory.
pub type UserMemory<'a> = dyn FnMut(VirtAddr, &mut [u8]) -> Result<(), FaultError> + 'a;

/// Features that are always on, besides those of [`UserfaultFeatures`]: kinds of memory and
/// requests. They include the hugetlbfs features although no huge-page pool exists, as on Linux
/// with an empty pool.
const ALWAYS: u64 = (abi::UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | abi::UFFD_FEATURE_MISSING_HUGETLBFS
    | abi::UFFD_FEATURE_MISSING_SHMEM
    | abi::UFFD_FEATURE_MINOR_HUGETLBFS
    | abi::UFFD_FEATURE_MINOR_SHMEM
    | abi::UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | abi::UFFD_FEATURE_POISON
    | abi::UFFD_FEATURE_MOVE) as u64;

/// A request of `ioctl(2)` on a userfaultfd.
///
/// ```
/// use bindery_linux::UserfaultRequest;
///
/// // UFFDIO_API of asm-generic/ioctl.h: _IOWR(0xAA, 0x3F, 24 bytes).
/// assert_eq!(UserfaultRequest::from_number(0xc018_aa3f), Some(UserfaultRequest::Api));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UserfaultRequest {
    /// `UFFDIO_API`: [`userfault_api`].
    Api,
    /// `UFFDIO_REGISTER`.
    Register,
    /// `UFFDIO_UNREGISTER`.
    Unregister,
    /// `UFFDIO_WAKE`.
    Wake,
    /// `UFFDIO_COPY`.
    Copy,
    /// `UFFDIO_ZEROPAGE`.
    ZeroPage,
    /// `UFFDIO_MOVE`.
    Move,
    /// `UFFDIO_WRITEPROTECT`.
    WriteProtect,
    /// `UFFDIO_CONTINUE`.
    Continue,
    /// `UFFDIO_POISON`.
    Poison,
}

/// The type of the requests.
const LETTER: u32 = abi::UFFDIO;

const fn number(direction: u32, size: u32, number: u32) -> u32 {
    direction << 30 | size << 16 | LETTER << 8 | number
}

/// `_IOC_READ`, and `_IOC_READ | _IOC_WRITE`.
const READ: u32 = 2;
const BOTH: u32 = 3;

/// Every request: its number, the count of argument words, and the index of the result word, if
/// any.
const REQUESTS: [(u32, UserfaultRequest, usize, Option<usize>); 10] = [
    (number(BOTH, 24, abi::_UFFDIO_API), UserfaultRequest::Api, 3, None),
    (number(BOTH, 32, abi::_UFFDIO_REGISTER), UserfaultRequest::Register, 3, Some(3)),
    (number(READ, 16, abi::_UFFDIO_UNREGISTER), UserfaultRequest::Unregister, 2, None),
    (number(READ, 16, abi::_UFFDIO_WAKE), UserfaultRequest::Wake, 2, None),
    (number(BOTH, 40, abi::_UFFDIO_COPY), UserfaultRequest::Copy, 4, Some(4)),
    (number(BOTH, 32, abi::_UFFDIO_ZEROPAGE), UserfaultRequest::ZeroPage, 3, Some(3)),
    (number(BOTH, 40, abi::_UFFDIO_MOVE), UserfaultRequest::Move, 4, Some(4)),
    (number(BOTH, 24, abi::_UFFDIO_WRITEPROTECT), UserfaultRequest::WriteProtect, 3, None),
    (number(BOTH, 32, abi::_UFFDIO_CONTINUE), UserfaultRequest::Continue, 3, Some(3)),
    (number(BOTH, 32, abi::_UFFDIO_POISON), UserfaultRequest::Poison, 3, Some(3)),
];

impl UserfaultRequest {
    /// The request with this number.
    ///
    /// Context: any.
    pub fn from_number(number: u32) -> Option<Self> {
        REQUESTS.iter().find(|known| known.0 == number).map(|known| known.1)
    }

    fn layout(self) -> (usize, Option<usize>) {
        let known = REQUESTS.iter().find(|known| known.1 == self);
        known.map_or((0, None), |known| (known.2, known.3))
    }

    /// The number of argument words (64 bits each) in the structure.
    ///
    /// Context: any.
    pub fn arguments(self) -> usize {
        self.layout().0
    }

    /// The index of the word that receives the result, if any.
    ///
    /// Context: any.
    pub fn result(self) -> Option<usize> {
        self.layout().1
    }
}

/// A mask with the bit of each request in `numbers`.
const fn bits(numbers: &[u32]) -> u64 {
    let (mut bits, mut index) = (0, 0);
    while index < numbers.len() {
        bits |= 1 << numbers[index];
        index += 1;
    }
    bits
}

/// `UFFDIO_API`: returns the requested features and stores the supported features and requests in
/// the structure. On an error, zeroes the structure, which the embedder must still copy to the
/// caller. `may_follow_forks` is whether the caller may receive the userfaultfds of children
/// (`CAP_SYS_PTRACE`).
///
/// Context: any.
///
/// # Errors
/// `EINVAL` for another version or unknown features; `EPERM` for `UFFD_FEATURE_EVENT_FORK` without
/// `may_follow_forks`.
pub fn userfault_api(
    words: &mut [u64; 3],
    may_follow_forks: bool,
) -> Result<UserfaultFeatures, Errno> {
    let [version, wanted, _] = *words;
    let all = ALWAYS | u64::from(UserfaultFeatures::all().bits());
    *words = [0; 3];
    if version != u64::from(abi::UFFD_API) || wanted & !all != 0 {
        return Err(Errno::EINVAL);
    }
    let mut features = UserfaultFeatures::from_bits_truncate(wanted as u32);
    if features.contains(UserfaultFeatures::EVENT_FORK) && !may_follow_forks {
        return Err(Errno::EPERM);
    }
    // Asynchronous protection is resolved without a message, so it must cover empty entries too.
    // Otherwise the first write to an empty entry would go unnoticed. Linux implies the feature
    // likewise.
    if features.contains(UserfaultFeatures::WP_ASYNC) {
        features |= UserfaultFeatures::WP_UNPOPULATED;
    }
    let requests = bits(&[abi::_UFFDIO_API, abi::_UFFDIO_REGISTER, abi::_UFFDIO_UNREGISTER]);
    *words = [version, all, requests];
    Ok(features)
}

fn refused(error: Error) -> Errno {
    error.errno(Operation::Userfault)
}

/// Performs any other request for `caller`. Takes the words of the request's structure and stores
/// the result in the word [`UserfaultRequest::result`], if the request has one. `space` is the
/// address space of the userfaultfd, which may be a child's or a parent's. `source` reads the
/// caller's memory, for `UFFDIO_COPY`.
///
/// Context: may sleep.
///
/// # Errors
/// As ioctl_userfaultfd(2).
pub fn userfault_control<P: Platform>(
    space: &AddressSpace<'_, P>,
    caller: &AddressSpace<'_, P>,
    userfault: &Userfault<'_, P>,
    request: UserfaultRequest,
    words: &mut [u64; 5],
    source: &mut UserMemory<'_>,
) -> Outcome {
    let [start, length, mode, ..] = *words;
    let at = VirtAddr(start);
    match request {
        UserfaultRequest::Api => Err(Errno::EINVAL),
        UserfaultRequest::Register => register(space, userfault, words),
        UserfaultRequest::Unregister => {
            space.unregister_userfault(userfault, at, length).map(|()| 0).map_err(refused)
        }
        UserfaultRequest::Wake => {
            space.wake_userfaults(userfault, at, length).map(|()| 0).map_err(refused)
        }
        UserfaultRequest::Copy => copy(space, userfault, words, source),
        UserfaultRequest::Continue => {
            let done = match u8::try_from(mode).ok().and_then(FillMode::from_bits) {
                Some(mode) => space.handler(userfault).fill_present(at, length, mode),
                None => Err(Error::Invalid.into()),
            };
            report(done, length, &mut words[3])
        }
        UserfaultRequest::Poison => {
            let done = match mode {
                0 => space.handler(userfault).fill_poison(at, length, FillMode::empty()),
                1 => space.handler(userfault).fill_poison(at, length, FillMode::DONT_WAKE),
                _ => Err(Error::Invalid.into()),
            };
            report(done, length, &mut words[3])
        }
        UserfaultRequest::ZeroPage => {
            let known = u64::from(abi::UFFDIO_ZEROPAGE_MODE_DONTWAKE);
            let mode = if mode & !known == 0 { FillMode::from_bits(mode as u8) } else { None };
            let done = match mode {
                Some(mode) => space.handler(userfault).fill_zeroes(at, length, mode),
                None => Err(Error::Invalid.into()),
            };
            report(done, length, &mut words[3])
        }
        // Linux moves pages only within the caller's own address space.
        UserfaultRequest::Move if !core::ptr::addr_eq(space, caller) => Err(Errno::EINVAL),
        UserfaultRequest::Move => move_pages(space, userfault, words),
        UserfaultRequest::WriteProtect => {
            let mode = u8::try_from(mode).ok().and_then(WriteProtectMode::from_bits);
            let mode = mode.ok_or(Errno::EINVAL)?;
            space.handler(userfault).write_protect(at, length, mode).map(|()| 0).map_err(refused)
        }
    }
}

fn register<P: Platform>(
    space: &AddressSpace<'_, P>,
    userfault: &Userfault<'_, P>,
    words: &mut [u64; 5],
) -> Outcome {
    let [start, length, mode, ..] = *words;
    let modes = u32::try_from(mode).ok().and_then(UserfaultModes::from_bits);
    let modes = modes.filter(|modes| !modes.is_empty()).ok_or(Errno::EINVAL)?;
    space.register_userfault(userfault, VirtAddr(start), length, modes).map_err(refused)?;
    let mut requests = bits(&[
        abi::_UFFDIO_WAKE,
        abi::_UFFDIO_COPY,
        abi::_UFFDIO_ZEROPAGE,
        abi::_UFFDIO_MOVE,
        abi::_UFFDIO_POISON,
    ]);
    if modes.contains(UserfaultModes::MINOR) {
        requests |= bits(&[abi::_UFFDIO_CONTINUE]);
    }
    if modes.contains(UserfaultModes::WRITE_PROTECT) {
        requests |= bits(&[abi::_UFFDIO_WRITEPROTECT]);
    }
    words[3] = requests;
    Ok(0)
}

fn copy<P: Platform>(
    space: &AddressSpace<'_, P>,
    userfault: &Userfault<'_, P>,
    words: &mut [u64; 5],
    source: &mut UserMemory<'_>,
) -> Outcome {
    let [to, from, length, mode, _] = *words;
    let mode = u8::try_from(mode).ok().and_then(FillMode::from_bits);
    let done = match (mode, from.checked_add(length)) {
        (Some(mode), Some(end)) => {
            let mut read = |offset, piece: &mut [u8]| source(VirtAddr(from + offset), piece);
            let overlaps = from < to && to < end;
            // If the ranges overlap, a copied page may be the source of a later page. Both orders
            // share one call, so that the compiler calls the source directly.
            let order = if overlaps { FillOrder::PageByPage } else { FillOrder::Together };
            space.handler(userfault).fill_copy_by(VirtAddr(to), length, mode, (order, &mut read))
        }
        _ => Err(Error::Invalid.into()),
    };
    report(done, length, &mut words[4])
}

fn move_pages<P: Platform>(
    space: &AddressSpace<'_, P>,
    userfault: &Userfault<'_, P>,
    words: &mut [u64; 5],
) -> Outcome {
    let [to, from, length, mode, _] = *words;
    let mode = u8::try_from(mode).ok().and_then(MoveMode::from_bits);
    let done = match mode {
        Some(mode) => {
            space.handler(userfault).move_pages(VirtAddr(to), VirtAddr(from), length, mode)
        }
        None => Err(Error::Invalid.into()),
    };
    report(done, length, &mut words[4])
}

/// The result of a call that may be partial. Stores the bytes or the errno in the structure.
/// Returns `EAGAIN` if only a part was completed.
fn report(done: Result<(), PartialFill>, length: u64, word: &mut u64) -> Outcome {
    match done {
        Ok(()) => {
            *word = length;
            Ok(0)
        }
        Err(partial) if partial.done > 0 => {
            *word = partial.done;
            Err(Errno::EAGAIN)
        }
        Err(partial) => {
            let errno = refused(partial.error);
            // Linux validates the arguments before it writes the result word.
            if errno != Errno::EINVAL {
                *word = (errno as i64).wrapping_neg() as u64;
            }
            Err(errno)
        }
    }
}

/// Writes the lines of a userfaultfd in `/proc/PID/fdinfo`. `userfault` is `None` before
/// `UFFDIO_API`.
///
/// Context: may sleep. Complexity: linear in the waiting faults.
///
/// # Errors
/// Only errors of `out`.
pub fn userfault_text<P: Platform>(
    userfault: Option<&Userfault<'_, P>>,
    out: &mut dyn fmt::Write,
) -> fmt::Result {
    // As on Linux, the top bit is set once `UFFDIO_API` has succeeded.
    let agreed = |handle: &Userfault<'_, P>| 1 << 31 | handle.features().bits();
    let features = userfault.map_or(0, agreed);
    let WaitingFaults { unread, all } = userfault.map_or_else(Default::default, Userfault::waiting);
    let mut requests = 0u64;
    for (number, ..) in REQUESTS {
        requests |= 1 << (number & 0xff);
    }
    writeln!(out, "pending:\t{unread}\ntotal:\t{all}")?;
    writeln!(out, "API:\t{:x}:{features:x}:{requests:x}", abi::UFFD_API)
}

/// Encodes a message as `struct uffd_msg`. `fork` makes a descriptor for a child's userfaultfd.
///
/// Context: any that `fork` allows.
///
/// # Errors
/// Only errors of `fork`.
pub fn userfault_message<'m, P: Platform, E>(
    message: UserfaultMessage<'m, P>,
    fork: impl FnOnce(Userfault<'m, P>) -> Result<u32, E>,
) -> Result<[u8; USERFAULT_MESSAGE], E> {
    let (event, words) = match message {
        UserfaultMessage::Fault(fault) => {
            let mut flags = if fault.is_write { abi::UFFD_PAGEFAULT_FLAG_WRITE } else { 0 };
            flags |= match fault.kind {
                UserfaultKind::Missing => 0,
                UserfaultKind::WriteProtected => abi::UFFD_PAGEFAULT_FLAG_WP,
                UserfaultKind::Minor => abi::UFFD_PAGEFAULT_FLAG_MINOR,
            };
            let words = [flags.into(), fault.address.0, fault.thread.into()];
            (abi::UFFD_EVENT_PAGEFAULT, words)
        }
        UserfaultMessage::Fork(child) => (abi::UFFD_EVENT_FORK, [fork(child)?.into(), 0, 0]),
        UserfaultMessage::Remap { from, to, length } => {
            (abi::UFFD_EVENT_REMAP, [from.0, to.0, length])
        }
        UserfaultMessage::Remove(range) => {
            (abi::UFFD_EVENT_REMOVE, [range.start().0, range.end().0, 0])
        }
        UserfaultMessage::Unmap(range) => {
            (abi::UFFD_EVENT_UNMAP, [range.start().0, range.end().0, 0])
        }
    };
    let mut bytes = [0; USERFAULT_MESSAGE];
    bytes[0] = event as u8;
    for (slot, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
        slot.copy_from_slice(&word.to_le_bytes());
    }
    Ok(bytes)
}
