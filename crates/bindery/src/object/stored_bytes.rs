//! [`StoredBytes`]: bytes of pages that a pager stores.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;

use crate::platform::Platform;

/// The bytes of consecutive pages that [`Pager::write`](super::Pager::write) stores, in the direct
/// map.
///
/// No program and no call changes them while the pager stores them, but a device that has pinned
/// the pages may ([`AddressSpace::pin`](crate::AddressSpace::pin)). A `&[u8]` would promise that
/// they do not change. So the pager copies the bytes, or passes their address to its device.
///
/// ```
/// use bindery::StoredBytes;
///
/// /// Stores the pieces one after the other.
/// fn store(disk: &mut Vec<u8>, pieces: &[StoredBytes<'_>]) {
///     for piece in pieces {
///         let start = disk.len();
///         disk.resize(start + piece.len(), 0);
///         piece.copy_to(0, &mut disk[start..]);
///     }
/// }
///
/// let mut disk = Vec::new();
/// store(&mut disk, &[StoredBytes::from(&b"page"[..])]);
/// assert_eq!(disk, b"page");
/// ```
///
/// A pager copies the bytes during the call that lends them. It may pass the pieces on:
///
/// ```
/// # use bindery::StoredBytes;
/// fn pass(pieces: Vec<StoredBytes<'_>>) -> Vec<StoredBytes<'_>> {
///     pieces
/// }
/// ```
///
/// but cannot keep them:
///
/// ```compile_fail
/// # use bindery::StoredBytes;
/// fn keep(pieces: Vec<StoredBytes<'_>>) -> Vec<StoredBytes<'static>> {
///     pieces
/// }
/// ```
///
/// # Context
/// Context: any.
pub struct StoredBytes<'a> {
    start: NonNull<u8>,
    length: usize,
    source: &'a dyn Source,
    /// The bytes stay in place during the pager's call.
    bytes: PhantomData<&'a ()>,
}

/// A source that reads the bytes; every platform implements it.
trait Source {
    /// # Safety
    /// As [`Platform::read_bytes`].
    unsafe fn read(&self, from: NonNull<u8>, into: &mut [u8]);
}

impl<P: Platform> Source for P {
    unsafe fn read(&self, from: NonNull<u8>, into: &mut [u8]) {
        // SAFETY: the caller's obligation.
        unsafe { self.read_bytes(from, into) }
    }
}

/// The source of a slice, for tests of pagers.
struct Slice;

impl Source for Slice {
    unsafe fn read(&self, from: NonNull<u8>, into: &mut [u8]) {
        // SAFETY: the caller's obligation; a borrowed slice does not change.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut *into).cast(), into.len()) }
    }
}

impl<'a> From<&'a [u8]> for StoredBytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        let start = NonNull::from(bytes).cast();
        Self { start, length: bytes.len(), source: &Slice, bytes: PhantomData }
    }
}

impl<'a> StoredBytes<'a> {
    /// The `length` bytes from `start` on.
    ///
    /// # Safety
    /// 1. The bytes lie in the direct maps of consecutive frames of an object, which keeps the
    ///    frames for `'a`.
    /// 2. No reference forbids reading them.
    pub(super) unsafe fn new<P: Platform>(
        platform: &'a P,
        start: NonNull<u8>,
        length: usize,
    ) -> Self {
        Self { start, length, source: platform, bytes: PhantomData }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether the length is 0. The core never passes an empty piece.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The address of the first byte in the direct map, for a device or for the caller's own
    /// instructions. The bytes may be read until [`Pager::write`](super::Pager::write) returns; no
    /// code may assume that the bytes stay the same between two reads.
    pub fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// Copies bytes from `offset` on with the platform's functions. Returns the number of bytes
    /// copied, which is below the size of `into` only at the end of the piece. Does not sleep.
    /// Complexity: linear in the bytes.
    pub fn copy_to(&self, offset: usize, into: &mut [u8]) -> usize {
        let left = self.length.saturating_sub(offset);
        let count = left.min(into.len());
        if count > 0 {
            // SAFETY: `offset` is within the bytes (1 of `new`).
            let from = unsafe { self.start.add(offset) };
            // SAFETY: by 1 and 2 of `new`, `count` bytes from there may be read; `into` belongs to
            // the caller.
            unsafe { self.source.read(from, &mut into[..count]) };
        }
        count
    }
}

impl fmt::Debug for StoredBytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoredBytes({:p}, {} bytes)", self.start, self.length)
    }
}

#[cfg(test)]
mod tests {
    use super::StoredBytes;

    #[test]
    fn bytes_are_copied_up_to_the_end() {
        let bytes = StoredBytes::from(&b"stored"[..]);
        let copy = |offset, room| {
            let mut into = [0; 8];
            let count = bytes.copy_to(offset, &mut into[..room]);
            (count, into)
        };
        assert_eq!(copy(0, 8), (6, *b"stored\0\0"));
        assert_eq!(copy(4, 8), (2, *b"ed\0\0\0\0\0\0"));
        assert_eq!(copy(1, 2), (2, *b"to\0\0\0\0\0\0"));
        assert_eq!((copy(6, 8).0, copy(usize::MAX, 8).0), (0, 0));
    }
}
