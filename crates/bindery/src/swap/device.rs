//! [`SwapDevice`]: the embedder's storage for the content of slots.
//!
//! ```text
//! thread    lock the folio, make its slots busy, take a request
//!           writeback bit, SwapDevice::submit --------------> transfer
//! interrupt                    Memory::complete_swap_request <----'
//! thread    Memory::finish_swap_writes: evict the folio, or keep it
//! ```
//!
//! A completion stores a few words of the core and wakes the waiting threads ([`super::requests`]).
//! It acquires no lock and enters no read section, so it may run in an interrupt handler. The rest
//! is done by a thread: one that waits for the device, one that reclaims, or one of the embedder's.

use crate::Memory;
use crate::addr::Frame;
use crate::platform::Platform;

/// A device that stores pages: a disk, a partition, a file.
///
/// The core submits runs of pages: consecutive frames of one folio and the same number of
/// consecutive slots. A page that is filled with one repeated word never reaches the device. A slot
/// is written before it is read, and is not submitted again before its request is complete.
///
/// ```
/// use std::sync::Mutex;
///
/// use bindery::addr::PAGE_SIZE;
/// use bindery::{Memory, Platform, SwapDevice, SwapOperation, SwapRequest};
///
/// /// A disk in the memory of the embedder, which is done at once.
/// struct RamDisk(Mutex<Vec<u8>>);
///
/// impl<P: Platform> SwapDevice<P> for RamDisk {
///     fn slots(&self) -> u64 {
///         self.0.lock().unwrap().len() as u64 / PAGE_SIZE
///     }
///
///     fn submit(&self, memory: &Memory<P>, request: SwapRequest) {
///         let mut disk = self.0.lock().unwrap();
///         for page in 0..request.pages() {
///             let at = (request.slot() + u64::from(page)) * PAGE_SIZE;
///             let bytes = &mut disk[at as usize..(at + PAGE_SIZE) as usize];
///             let frame = memory.platform().direct_map(request.frame().plus(page));
///             match request.operation() {
///                 // SAFETY: the frame is the request's until it is complete.
///                 SwapOperation::Read => unsafe { memory.platform().write_bytes(frame, bytes) },
///                 // SAFETY: as above.
///                 SwapOperation::Write => unsafe { memory.platform().read_bytes(frame, bytes) },
///             }
///         }
///         drop(disk);
///         memory.complete_swap_request(request, Ok(()));
///     }
/// }
/// ```
///
/// # Stable pages
/// The frames do not change while a request is in flight: no entry maps the folio, and its lock is
/// held. So a device may compress, encrypt or checksum the data, and every read or write access to
/// the page waits for the device. A device that tolerates changes while it reads the frames reports
/// this ([`SwapDevice::needs_stable_pages`]), and then no access waits.
///
/// # Context
/// Context: may sleep. [`SwapDevice::submit`] is called with the locks of folios held, perhaps also
/// with the mutex of an address space or an object, or a VMA for a read that no thread waits for.
/// So it must not allocate from the [`Memory`] or access a program's memory.
pub trait SwapDevice<P: Platform>: Send + Sync {
    /// The number of the device's slots, of one page each. Called once, by
    /// [`Memory::swap_on_device`].
    fn slots(&self) -> u64;

    /// Whether a read takes about as long as a page fault, as from memory. If so, a fault reads
    /// only the pages that it needs, and none around them ([`Memory::set_page_cluster`]).
    fn is_synchronous(&self) -> bool {
        false
    }

    /// Whether the frames of a write request must not change before it is complete (Linux:
    /// `SWP_STABLE_WRITES`). If they may change, a page that is needed again can be used
    /// immediately, perhaps while the device is reading it. The content of its slot is then never
    /// read: the slot stays taken until the request is complete, and has no content afterwards.
    /// Called once, by [`Memory::swap_on_device`].
    fn needs_stable_pages(&self) -> bool {
        true
    }

    /// Whether the device wants discards of free slots. Called once, by [`Memory::swap_on_device`].
    fn discards(&self) -> bool {
        false
    }

    /// Discards the content of `count` slots from `first` on: no slot is read before it is written
    /// again (Linux: `SWAP_FLAG_DISCARD`; an SSD's TRIM). Each run has 512 slots; the device's last
    /// run may be shorter. No transfer of these slots is in flight, and none begins before the call
    /// returns. A failure need not be reported. Called by [`Memory::discard_free_slots`] and
    /// reclaim, perhaps by several threads, without locks.
    fn discard(&self, _memory: &Memory<P>, _first: u64, _count: u64) {}

    /// Starts a transfer. The device calls [`Memory::complete_swap_request`] for it exactly once:
    /// during the call, or later from any thread or interrupt handler. Requests may complete in any
    /// order. At most 32 folios of an area are in flight at once.
    fn submit(&self, memory: &Memory<P>, request: SwapRequest);
}

/// The direction of a transfer.
///
/// ```
/// use bindery::SwapOperation;
///
/// /// The command of a virtio block device.
/// fn command(operation: SwapOperation) -> u32 {
///     match operation {
///         SwapOperation::Read => 0,
///         SwapOperation::Write => 1,
///     }
/// }
/// assert_eq!(command(SwapOperation::Write), 1);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SwapOperation {
    /// From the device to the frames.
    Read,
    /// From the frames to the device.
    Write,
}

/// The device could not complete a transfer (`EIO`).
///
/// ```
/// use bindery::SwapDeviceError;
///
/// /// From the status byte of a virtio block request.
/// fn result(status: u8) -> Result<(), SwapDeviceError> {
///     if status == 0 { Ok(()) } else { Err(SwapDeviceError) }
/// }
/// assert!(result(1).is_err());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SwapDeviceError;

/// A transfer between consecutive frames and the same number of consecutive slots.
///
/// The frames belong to the device until the transfer is complete. A dropped request never
/// completes: its folio stays locked, and its area cannot be removed.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "it is complete when Memory::complete_swap_request has it"]
pub struct SwapRequest {
    pub(super) operation: SwapOperation,
    pub(super) area: u8,
    /// The request's number in the area's table of requests.
    pub(super) number: u32,
    pub(super) slot: u64,
    pub(super) frame: Frame,
    pub(super) pages: u32,
}

impl SwapRequest {
    /// The direction.
    ///
    /// Context: any.
    pub fn operation(&self) -> SwapOperation {
        self.operation
    }

    /// The area's number ([`SwapArea::number`](crate::SwapArea::number)).
    ///
    /// Context: any.
    pub fn area(&self) -> u8 {
        self.area
    }

    /// The first slot: its position on the device, in pages.
    ///
    /// Context: any.
    pub fn slot(&self) -> u64 {
        self.slot
    }

    /// The first frame.
    ///
    /// Context: any.
    pub fn frame(&self) -> Frame {
        self.frame
    }

    /// The number of pages: 1 to 512.
    ///
    /// Context: any.
    pub fn pages(&self) -> u32 {
        self.pages
    }
}
