//! Addresses, frames and ranges: one type for each thing that is easily confused.
//!
//! | type | what it is | unit |
//! |---|---|---|
//! | [`VirtAddr`] | an address that a program uses; any 64-bit value, checked where it is used | bytes |
//! | [`PhysAddr`] | an address on the memory bus | bytes |
//! | [`Frame`] | a base page of physical memory, by number (32 bits: up to 16 TiB) | frames of [`PAGE_SIZE`] |
//! | [`VirtRange`] | a half-open range of virtual addresses | bytes |

use core::fmt;

/// Base-2 logarithm of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;

/// Bytes in a base page, the same on every architecture that Bindery supports.
pub const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;

/// A virtual address in bytes. It may hold any value: a system call passes on what the program
/// wrote, and the operation that receives it refuses what it cannot use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct VirtAddr(pub u64);

impl VirtAddr {
    /// Whether the address is a multiple of `size` bytes, a power of two.
    #[inline]
    pub const fn is_aligned(self, size: u64) -> bool {
        self.0 & (size - 1) == 0
    }

    /// The largest multiple of `size` bytes, a power of two, that is not above this address.
    #[inline]
    pub const fn align_down(self, size: u64) -> Self {
        Self(self.0 & !(size - 1))
    }

    /// The address `bytes` further on, or `None` if that does not fit in 64 bits.
    #[inline]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }

    /// The address `bytes` further on. Wraps around at 2^64; callers have checked their range.
    #[inline]
    pub(crate) const fn offset(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

impl fmt::Debug for VirtAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for VirtAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A physical address in bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PhysAddr(pub u64);

impl fmt::Debug for PhysAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "phys {:#x}", self.0)
    }
}

/// The number of a physical frame: its physical address divided by [`PAGE_SIZE`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Frame(pub u32);

impl Frame {
    /// The physical address of the frame's first byte.
    #[inline]
    pub const fn start(self) -> PhysAddr {
        PhysAddr((self.0 as u64) << PAGE_SHIFT)
    }

    /// The frame `count` frames further on. Wraps around; callers stay inside a folio.
    #[inline]
    pub const fn plus(self, count: u32) -> Self {
        Self(self.0.wrapping_add(count))
    }

    /// Whether the frame's number is a multiple of 2^`order`.
    #[inline]
    pub const fn is_aligned(self, order: u8) -> bool {
        self.0 & ((1 << order) - 1) == 0
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "frame {:#x}", self.0)
    }
}

/// A half-open range of virtual addresses, in bytes. `start <= end` always.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct VirtRange {
    start: VirtAddr,
    end: VirtAddr,
}

impl VirtRange {
    /// The range from `start` to `end`; `None` if `end` is before `start`.
    #[inline]
    pub const fn new(start: VirtAddr, end: VirtAddr) -> Option<Self> {
        if start.0 <= end.0 { Some(Self { start, end }) } else { None }
    }

    /// The range of `bytes` bytes that begins at `start`; `None` if it would leave 64 bits.
    #[inline]
    pub const fn from_len(start: VirtAddr, bytes: u64) -> Option<Self> {
        match start.checked_add(bytes) {
            Some(end) => Some(Self { start, end }),
            None => None,
        }
    }

    /// For ranges whose order the caller has established.
    #[inline]
    pub(crate) const fn raw(start: u64, end: u64) -> Self {
        debug_assert!(start <= end);
        Self { start: VirtAddr(start), end: VirtAddr(end) }
    }

    /// The first address.
    #[inline]
    pub const fn start(self) -> VirtAddr {
        self.start
    }

    /// The address behind the last one.
    #[inline]
    pub const fn end(self) -> VirtAddr {
        self.end
    }

    /// Length in bytes.
    #[inline]
    pub const fn len(self) -> u64 {
        self.end.0 - self.start.0
    }

    /// Whether the range holds no address.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.start.0 == self.end.0
    }

    /// Length in whole base pages.
    #[inline]
    pub const fn pages(self) -> u64 {
        self.len() >> PAGE_SHIFT
    }

    /// Whether `addr` lies in the range.
    #[inline]
    pub const fn contains(self, addr: VirtAddr) -> bool {
        self.start.0 <= addr.0 && addr.0 < self.end.0
    }

    /// Whether the two ranges share an address.
    #[inline]
    pub const fn overlaps(self, other: Self) -> bool {
        self.start.0 < other.end.0 && other.start.0 < self.end.0
    }

    /// Whether every address of `other` lies in this range.
    #[inline]
    pub const fn covers(self, other: Self) -> bool {
        self.start.0 <= other.start.0 && other.end.0 <= self.end.0
    }

    /// The addresses that both ranges share; empty (at an unspecified place) if they share none.
    #[inline]
    pub const fn intersection(self, other: Self) -> Self {
        let start = if self.start.0 > other.start.0 { self.start } else { other.start };
        let end = if self.end.0 < other.end.0 { self.end } else { other.end };
        if start.0 <= end.0 { Self { start, end } } else { Self { start, end: start } }
    }
}

impl fmt::Debug for VirtRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start.0, self.end.0)
    }
}

impl fmt::Display for VirtRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_would_wrap_is_refused() {
        assert_eq!(VirtRange::from_len(VirtAddr(u64::MAX - 10), 100), None);
        assert_eq!(VirtRange::new(VirtAddr(2), VirtAddr(1)), None);
    }

    #[test]
    fn ranges_that_only_touch_do_not_overlap() {
        let low = VirtRange::raw(0x1000, 0x2000);
        let high = VirtRange::raw(0x2000, 0x3000);
        assert!(!low.overlaps(high) && low.intersection(high).is_empty());
        assert!(VirtRange::raw(0x1000, 0x3000).covers(high));
    }
}
