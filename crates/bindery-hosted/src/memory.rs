//! Physical memory: one reserved region of the process.
//!
//! ```text
//! frame      first                                        first + frames
//!            |==============================================|
//! process    start (2 MiB aligned)                          start + frames * 4096
//! ```
//!
//! The region is reserved without swap space (`MAP_NORESERVE`), so a machine of 4 GiB costs nothing
//! until its memory is used. [`spare`] reuses regions of small machines for machines with arbitrary
//! initial content.
//!
//! **Access to bytes.** The core writes frames through its direct map while user programs on other
//! CPUs may access their own frames, and the MMU changes entries concurrently. So this crate
//! accesses the region, entries and user data alike, only by aligned 8-byte atomics; a store of
//! fewer bytes is a compare-exchange of the word around them and never changes its neighbors.

mod spare;

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use bindery::addr::{Frame, PAGE_SHIFT, PAGE_SIZE};
use spare::Region;

use crate::Contents;

/// Bytes in a word of the region.
const WORD: usize = size_of::<u64>();

/// Owner of the region.
#[derive(Debug)]
pub(crate) struct PhysicalMemory {
    /// `None` only during the drop.
    region: Option<Region>,
    contents: Contents,
    direct_map: DirectMap,
}

impl PhysicalMemory {
    /// Reserves `frames` frames, numbered from `first`, with this initial content.
    pub(crate) fn reserve(first: Frame, frames: u32, contents: Contents) -> Self {
        let bytes = (frames as usize) << PAGE_SHIFT;
        let region = match contents {
            Contents::Zeroes => Region::new(bytes),
            Contents::Anything => spare::take(bytes),
        };
        let direct_map = DirectMap { start: region.start(), first: first.0, frames };
        Self { region: Some(region), contents, direct_map }
    }

    pub(crate) fn direct_map(&self) -> DirectMap {
        self.direct_map
    }
}

impl Drop for PhysicalMemory {
    fn drop(&mut self) {
        // The machine owns the region and is being dropped, so no direct map into it is in use.
        if let Some(region) = self.region.take()
            && self.contents == Contents::Anything
        {
            spare::keep(region);
        }
    }
}

/// The position of the region, which suffices to reach any frame. Copied freely.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirectMap {
    start: NonNull<u8>,
    first: u32,
    frames: u32,
}

// SAFETY: the direct map is an address; every access of this crate through it is atomic (see the
// module's text), and the core's accesses are the core's obligation.
unsafe impl Send for DirectMap {}
// SAFETY: as above.
unsafe impl Sync for DirectMap {}

impl DirectMap {
    pub(crate) fn first(&self) -> Frame {
        Frame(self.first)
    }

    pub(crate) fn frames(&self) -> u32 {
        self.frames
    }

    /// Whether all of the `count` frames from number `first` on are memory.
    #[inline]
    pub(crate) fn holds(&self, first: u64, count: u64) -> bool {
        first
            .checked_sub(u64::from(self.first))
            .is_some_and(|offset| offset + count <= u64::from(self.frames))
    }

    /// The address of `frame`. Panics if it is not memory.
    #[inline]
    pub(crate) fn at(&self, frame: Frame) -> NonNull<u8> {
        let offset = frame.0.wrapping_sub(self.first);
        if offset >= self.frames {
            self.not_memory(frame, 1);
        }
        // SAFETY: the offset is below the region's length, which was just checked.
        unsafe { self.start.add((offset as usize) << PAGE_SHIFT) }
    }

    #[cold]
    fn not_memory(&self, frame: Frame, count: u32) -> ! {
        panic!(
            "{count} frame(s) from {frame:?} are not memory of this machine, which has {} frames from {:#x}",
            self.frames, self.first
        );
    }

    fn check(&self, first: Frame, count: u32) {
        if !self.holds(u64::from(first.0), u64::from(count)) {
            self.not_memory(first, count);
        }
    }

    /// Fills `count` frames with zeroes. No other thread uses them.
    pub(crate) fn zero(&self, first: Frame, count: u32) {
        self.check(first, count);
        // SAFETY: the frames are memory (just checked). No other thread uses them, as required
        // above: the core zeroes only frames that it has just allocated.
        unsafe { self.at(first).write_bytes(0, (count as usize) << PAGE_SHIFT) };
    }

    /// Copies `count` frames. No thread writes the source or uses the target.
    pub(crate) fn copy(&self, from: Frame, to: Frame, count: u32) {
        self.check(from, count);
        self.check(to, count);
        assert!(from.0.abs_diff(to.0) >= count, "copying overlapping frames {from:?} and {to:?}");
        // SAFETY: both ranges are memory and do not overlap (just checked). No other thread uses
        // the target: the core has just allocated it.
        unsafe {
            self.at(from).copy_to_nonoverlapping(self.at(to), (count as usize) << PAGE_SHIFT);
        }
    }

    /// The word at `offset` bytes, a multiple of 8, of `frame`.
    #[inline]
    pub(crate) fn word(&self, frame: Frame, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(WORD) && offset < PAGE_SIZE as usize);
        // SAFETY: `at` returns a page-aligned pointer to a whole frame of the region and the offset
        // is aligned and inside it; the region lives as long as the machine, which the borrow of
        // `self` (a part of the machine) does not outlive; all other accesses of this crate to it
        // are atomic as well, and the core's are the core's obligation.
        unsafe { AtomicU64::from_ptr(self.at(frame).add(offset).cast().as_ptr()) }
    }

    /// Reads bytes of `frame` from `offset`; the bytes end inside the frame.
    pub(crate) fn read(&self, frame: Frame, offset: usize, into: &mut [u8]) {
        let cut = Cut::new(offset, into.len());
        let (head, rest) = into.split_at_mut(cut.head.len());
        load_part(self.word(frame, cut.first), cut.head, head);
        let mut chunks = rest.chunks_exact_mut(WORD);
        for (chunk, word) in chunks.by_ref().zip(self.words(frame, cut.body)) {
            chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        load_part(self.word(frame, cut.last), cut.tail, chunks.into_remainder());
    }

    /// Writes bytes of `frame` from `offset`; the bytes end inside the frame.
    pub(crate) fn write(&self, frame: Frame, offset: usize, from: &[u8]) {
        let cut = Cut::new(offset, from.len());
        let (head, rest) = from.split_at(cut.head.len());
        store_part(self.word(frame, cut.first), cut.head, |bytes| bytes.copy_from_slice(head));
        let (chunks, tail) = rest.as_chunks::<WORD>();
        for (chunk, word) in chunks.iter().zip(self.words(frame, cut.body)) {
            word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
        }
        store_part(self.word(frame, cut.last), cut.tail, |bytes| bytes.copy_from_slice(tail));
    }

    /// Fills `len` bytes of `frame` from `offset` with `byte`; the bytes end inside the frame.
    pub(crate) fn fill(&self, frame: Frame, offset: usize, len: usize, byte: u8) {
        let cut = Cut::new(offset, len);
        store_part(self.word(frame, cut.first), cut.head, |bytes| bytes.fill(byte));
        let value = u64::from_ne_bytes([byte; WORD]);
        for word in self.words(frame, cut.body) {
            word.store(value, Ordering::Relaxed);
        }
        store_part(self.word(frame, cut.last), cut.tail, |bytes| bytes.fill(byte));
    }

    /// The words at the offsets of the range, which is inside a frame.
    #[inline]
    fn words(&self, frame: Frame, offsets: Range<usize>) -> &[AtomicU64] {
        assert!(offsets.end <= PAGE_SIZE as usize && offsets.start.is_multiple_of(WORD));
        // SAFETY: as in `word`, for each of the words. The words are consecutive, and the range
        // ends inside the frame.
        unsafe {
            let start = self.at(frame).add(offsets.start).cast::<AtomicU64>();
            std::slice::from_raw_parts(start.as_ptr(), offsets.len() / WORD)
        }
    }
}

/// The division into words of the bytes from one offset to another in a frame.
///
/// ```text
/// words   |. . . . h h h h|b b b b b b b b|b b b b b b b b|t t . . . . . .|
///          first           body                            last
/// ```
struct Cut {
    /// The offset of the first, partly used word, and its used bytes.
    first: usize,
    head: Range<usize>,
    /// The offsets of the fully used words.
    body: Range<usize>,
    /// The offset of the last, partly used word, and its used bytes.
    last: usize,
    tail: Range<usize>,
}

impl Cut {
    #[inline]
    fn new(offset: usize, len: usize) -> Self {
        let end = offset + len;
        assert!(len > 0 && end <= PAGE_SIZE as usize, "an access of {len} bytes at {offset}");
        let first = offset & !(WORD - 1);
        let head = if offset == first { 0..0 } else { offset - first..WORD.min(end - first) };
        let start = offset + head.len();
        let whole = (end - start) & !(WORD - 1);
        let tail = 0..end - start - whole;
        // If no byte is left, any offset is valid here.
        let last = if tail.is_empty() { first } else { start + whole };
        let body = if whole == 0 { first..first } else { start..start + whole };
        Self { first, head, body, last, tail }
    }
}

/// Reads the bytes `within` of a word.
#[inline]
fn load_part(word: &AtomicU64, within: Range<usize>, into: &mut [u8]) {
    if !within.is_empty() {
        into.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes()[within]);
    }
}

/// Applies `change` only to the bytes `within` of a word.
#[inline]
fn store_part(word: &AtomicU64, within: Range<usize>, change: impl Fn(&mut [u8])) {
    if !within.is_empty() {
        word.update(Ordering::Relaxed, Ordering::Relaxed, |old| {
            let mut bytes = old.to_ne_bytes();
            change(&mut bytes[within.clone()]);
            u64::from_ne_bytes(bytes)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_store_does_not_change_its_neighbors() {
        let memory = PhysicalMemory::reserve(Frame(100), 2, Contents::Zeroes);
        let direct_map = memory.direct_map();
        direct_map.fill(Frame(101), 0, 32, 0xaa);
        direct_map.write(Frame(101), 5, b"twelve bytes");
        let mut bytes = [0; 20];
        direct_map.read(Frame(101), 3, &mut bytes);
        assert_eq!(&bytes, b"\xaa\xaatwelve bytes\xaa\xaa\xaa\xaa\xaa\xaa");
    }

    #[test]
    fn bytes_are_cut_into_words() {
        let memory = PhysicalMemory::reserve(Frame(100), 1, Contents::Zeroes);
        let direct_map = memory.direct_map();
        let pattern: Vec<u8> = (1..=40).collect();
        for (offset, len) in (0..24).flat_map(|offset| (1..40).map(move |len| (offset, len))) {
            direct_map.fill(Frame(100), 0, 64, 0xff);
            direct_map.write(Frame(100), offset, &pattern[..len]);
            let mut all = [0; 64];
            direct_map.read(Frame(100), 0, &mut all);
            let mut expected = [0xff; 64];
            expected[offset..offset + len].copy_from_slice(&pattern[..len]);
            assert_eq!(all, expected, "{len} bytes at {offset}");
            let mut part = vec![0; len];
            direct_map.read(Frame(100), offset, &mut part);
            assert_eq!(part, pattern[..len]);
            direct_map.fill(Frame(100), offset, len, 0xff);
            direct_map.read(Frame(100), 0, &mut all);
            assert_eq!(all, [0xff; 64]);
        }
    }

    #[test]
    fn the_window_of_frames_is_consecutive_and_aligned() {
        let memory = PhysicalMemory::reserve(Frame(512), 1024, Contents::Zeroes);
        let direct_map = memory.direct_map();
        let first = direct_map.at(Frame(512)).as_ptr() as usize;
        assert!(first.is_multiple_of(2 << 20));
        assert_eq!(direct_map.at(Frame(513)).as_ptr() as usize, first + 4096);
        assert!(
            direct_map.holds(512, 1024) && !direct_map.holds(512, 1025) && !direct_map.holds(0, 1)
        );
    }

    #[test]
    #[should_panic(expected = "not memory of this machine")]
    fn frame_zero_is_not_memory() {
        PhysicalMemory::reserve(Frame(512), 1, Contents::Zeroes).direct_map().at(Frame(0));
    }
}
