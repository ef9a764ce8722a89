//! [`Extent`]: consecutive chunks of a frame and the bytes that begin there, in one word.
//!
//! ```text
//! 63    57 56     44 43     38 37   32 31      0
//! | zero  | length  | chunks  | first | frame   |     chunks: less one; length: 1 to 4,096 bytes
//! ```

use core::num::NonZeroU64;

use crate::addr::{Frame, PAGE_SIZE};

/// The size of a chunk in bytes. A frame has 64 chunks, one for each bit of a word.
pub(super) const CHUNK: usize = PAGE_SIZE as usize / CHUNKS as usize;
/// The number of chunks in a frame.
pub(super) const CHUNKS: u32 = u64::BITS;
/// The size of the link at the head of an extent that does not contain the rest of the object.
pub(super) const LINK: usize = size_of::<u64>();

const FIRST: u32 = 32;
const COUNT: u32 = 38;
const LENGTH: u32 = 44;
const END: u32 = 57;

/// The identity of a stored page, for the owner of its swap slot. Not zero, so that a word may hold
/// either a handle or none. A thread that passes a handle on uses a release operation, and the
/// receiver an acquire operation.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Handle(NonZeroU64);

impl Handle {
    /// The handle as a word.
    pub(crate) fn to_raw(&self) -> u64 {
        self.0.get()
    }

    /// The inverse of [`Handle::to_raw`]. `None` for 0.
    pub(crate) fn from_raw(raw: u64) -> Option<Self> {
        Some(Self(NonZeroU64::new(raw)?))
    }

    /// The page's first extent; `None` if the handle is malformed.
    pub(super) fn extent(&self) -> Option<Extent> {
        Extent::unpack(self.0.get())
    }
}

/// Chunks of a frame, and the number of an object's bytes that begin there. If the chunks are too
/// few for the bytes, they begin with a link to the extent of the rest.
///
/// ```text
/// whole    | bytes ............. |
/// split    | link | bytes ...... |   ->   | bytes .... |
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Extent {
    pub frame: Frame,
    /// The first chunk.
    pub first: u32,
    /// The number of chunks: 1 to [`CHUNKS`].
    pub chunks: u32,
    /// The number of bytes of the object from here to its end.
    pub length: usize,
}

impl Extent {
    /// The handle of the object that begins with this extent.
    pub(super) fn handle(self) -> Option<Handle> {
        Handle::from_raw(self.pack())
    }

    pub(super) fn pack(self) -> u64 {
        u64::from(self.frame.0)
            | u64::from(self.first) << FIRST
            | u64::from(self.chunks - 1) << COUNT
            | (self.length as u64) << LENGTH
    }

    /// The inverse of [`Extent::pack`]. `None` if `pack` cannot have produced the word.
    pub(super) fn unpack(word: u64) -> Option<Self> {
        let field = |from: u32, to: u32| word >> from & ((1 << (to - from)) - 1);
        let extent = Self {
            frame: Frame(word as u32),
            first: field(FIRST, COUNT) as u32,
            chunks: field(COUNT, LENGTH) as u32 + 1,
            length: field(LENGTH, END) as usize,
        };
        let fits = word >> END == 0
            && extent.first + extent.chunks <= CHUNKS
            && (1..=PAGE_SIZE as usize).contains(&extent.length);
        fits.then_some(extent)
    }

    /// The extent's chunks, one bit each.
    pub(super) fn mask(self) -> u64 {
        u64::MAX >> (CHUNKS - self.chunks) << self.first
    }

    /// Whether the object ends here.
    pub(super) fn is_last(self) -> bool {
        self.length <= self.room()
    }

    /// Whether the extent is a raw page, in a frame of its own.
    pub(super) fn is_raw(self) -> bool {
        self.chunks == CHUNKS && self.length == PAGE_SIZE as usize
    }

    /// The number of the object's bytes in this extent.
    pub(super) fn bytes(self) -> usize {
        if self.is_last() { self.length } else { self.room() - LINK }
    }

    /// The offset of the chunks in the frame, in bytes.
    pub(super) fn start(self) -> usize {
        self.first as usize * CHUNK
    }

    /// The size of the chunks, in bytes.
    pub(super) fn room(self) -> usize {
        self.chunks as usize * CHUNK
    }
}
