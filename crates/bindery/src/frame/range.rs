//! Ranges of frames.

use core::fmt;

use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE, PhysAddr};
use crate::platform::Platform;

use super::error::FramesError;
use super::meta::NONE;

/// Consecutive frames of memory, by number.
///
/// ```
/// use bindery::FrameRange;
/// use bindery::addr::{Frame, PhysAddr};
///
/// // The boot protocol says that 0x1234..0x9000 is free: whole frames of it.
/// let free = FrameRange::inside(PhysAddr(0x1234), PhysAddr(0x9000)).expect("below 16 TiB");
/// assert_eq!(free, FrameRange { first: Frame(2), count: 7 });
/// assert!(free.contains(Frame(8)) && !free.contains(Frame(9)));
/// assert_eq!(free.frames().next(), Some(Frame(2)));
/// assert_eq!(free.to_string(), "0x2..0x9");
/// ```
///
/// # Context
/// Context: any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameRange {
    /// The first frame.
    pub first: Frame,
    /// The number of frames, in units of [`PAGE_SIZE`]; an empty range is ignored.
    pub count: u32,
}

impl FrameRange {
    /// The whole frames between two physical addresses, perhaps none; `None` if the range extends
    /// above 16 TiB.
    pub const fn inside(start: PhysAddr, end: PhysAddr) -> Option<Self> {
        let Some(start) = start.align_up(PAGE_SIZE) else { return None };
        let (first, after) = (start.0 >> PAGE_SHIFT, end.0 >> PAGE_SHIFT);
        let count = after.saturating_sub(first);
        if first > u32::MAX as u64 || count > u32::MAX as u64 || first + count > 1 << 32 {
            return None;
        }
        Some(Self { first: Frame(first as u32), count: count as u32 })
    }

    /// Whether `frame` is in the range.
    #[inline]
    pub const fn contains(self, frame: Frame) -> bool {
        frame.0.wrapping_sub(self.first.0) < self.count
    }

    /// The frames, in rising order.
    pub fn frames(self) -> impl Iterator<Item = Frame> + use<> {
        (0..self.count).map(move |index| self.first.plus(index))
    }

    /// The frame number after the last one; it may not fit in 32 bits.
    pub(super) fn end(self) -> u64 {
        u64::from(self.first.0) + u64::from(self.count)
    }
}

impl fmt::Display for FrameRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.first.0, self.end())
    }
}

/// The span of the machine's `ranges`: its first frame and its length. Fails if the ranges cannot
/// be used.
pub(super) fn span_of<P: Platform>(
    platform: &P,
    ranges: &[FrameRange],
) -> Result<(Frame, u32), FramesError> {
    let used = || ranges.iter().copied().filter(|range| range.count > 0);
    let first = used().map(|range| range.first).min().ok_or(FramesError::Empty)?;
    let end = used().map(FrameRange::end).max().ok_or(FramesError::Empty)?;
    if end > u64::from(NONE) {
        return Err(FramesError::TooHigh);
    }
    for (index, range) in ranges.iter().enumerate().filter(|(_, range)| range.count > 0) {
        let start = u64::from(range.first.0);
        let shares =
            |other: FrameRange| start < other.end() && u64::from(other.first.0) < range.end();
        if ranges[index + 1..].iter().copied().filter(|range| range.count > 0).any(shares) {
            return Err(FramesError::Overlapping);
        }
    }
    for range in used() {
        let start = platform.direct_map(range.first).as_ptr();
        if !start.addr().is_multiple_of(PAGE_SIZE as usize) {
            return Err(FramesError::DirectMap);
        }
        let last = platform.direct_map(range.first.plus(range.count - 1)).as_ptr();
        let after = last.wrapping_add(PAGE_SIZE as usize);
        let mut touching = used().filter(|other| u64::from(other.first.0) == range.end());
        if touching.any(|other| platform.direct_map(other.first).as_ptr() != after) {
            return Err(FramesError::DirectMap);
        }
    }
    Ok((first, (end - u64::from(first.0)) as u32))
}
