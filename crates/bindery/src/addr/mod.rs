//! Addresses, frames and ranges, with a separate type for each easily confused quantity.
//!
//! | type | what it is | unit |
//! |---|---|---|
//! | [`VirtAddr`] | an address that a program uses; any 64-bit value, checked where it is used | bytes |
//! | [`PhysAddr`] | an address on the memory bus | bytes |
//! | [`Frame`] | a base page of physical memory, by number (32 bits: up to 16 TiB) | frames of [`PAGE_SIZE`] |
//! | [`VirtRange`] | a half-open range of virtual addresses | bytes |
//! | [`PageRange`] | a half-open range of pages of an object, by number | pages |
//! | [`Order`] | the size of a block of frames | base-2 logarithm of pages |
//!
//! # Context
//! All functions are pure. Context: any.

mod order;
mod page_range;

use core::fmt;
use core::ops::{Add, Sub};

pub use order::Order;
pub(crate) use order::Orders;
pub use page_range::PageRange;

/// Base-2 logarithm of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;

/// Bytes in a base page, the same on every architecture that Bindery supports.
pub const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;

/// Methods that virtual and physical addresses share.
macro_rules! address_arithmetic {
    ($address:ident) => {
        impl $address {
            /// Whether the address is a multiple of `size` bytes, a power of two.
            #[inline]
            pub const fn is_aligned(self, size: u64) -> bool {
                self.0 & (size - 1) == 0
            }

            /// The largest multiple of `size` bytes, a power of two, that is not above this
            /// address.
            #[inline]
            pub const fn align_down(self, size: u64) -> Self {
                Self(self.0 & !(size - 1))
            }

            /// The smallest multiple of `size` bytes, a power of two, that is not below this
            /// address; `None` if that does not fit in 64 bits.
            #[inline]
            pub const fn align_up(self, size: u64) -> Option<Self> {
                match self.checked_add(size - 1) {
                    Some(above) => Some(above.align_down(size)),
                    None => None,
                }
            }

            /// The address `bytes` higher, or `None` if that does not fit in 64 bits.
            #[inline]
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// The address `bytes` lower, or `None` if that is below 0.
            #[inline]
            pub const fn checked_sub(self, bytes: u64) -> Option<Self> {
                match self.0.checked_sub(bytes) {
                    Some(difference) => Some(Self(difference)),
                    None => None,
                }
            }
        }

        /// Like integer addition: overflow panics if overflow checks are on.
        impl Add<u64> for $address {
            type Output = Self;

            #[inline]
            fn add(self, bytes: u64) -> Self {
                Self(self.0 + bytes)
            }
        }

        /// Like integer subtraction: overflow panics if overflow checks are on.
        impl Sub<u64> for $address {
            type Output = Self;

            #[inline]
            fn sub(self, bytes: u64) -> Self {
                Self(self.0 - bytes)
            }
        }

        /// The distance in bytes from the lower address `other`.
        impl Sub for $address {
            type Output = u64;

            #[inline]
            fn sub(self, other: Self) -> u64 {
                self.0 - other.0
            }
        }
    };
}

/// A virtual address in bytes. Any value is permitted: a system call passes the program's value,
/// and the operation that receives it refuses invalid values.
///
/// ```
/// use bindery::addr::{PAGE_SIZE, VirtAddr};
///
/// let at = VirtAddr(0x1234);
/// assert_eq!(at.align_down(PAGE_SIZE), VirtAddr(0x1000));
/// assert_eq!(at.align_up(PAGE_SIZE), Some(VirtAddr(0x2000)));
/// assert_eq!(at + 4 - VirtAddr(0x1000), 0x238);
/// assert_eq!(at.checked_sub(0x2000), None);
/// assert_eq!(at.to_string(), "0x1234");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct VirtAddr(pub u64);

impl VirtAddr {
    /// The address that `pointer` points to.
    #[inline]
    pub fn from_ptr<T: ?Sized>(pointer: *const T) -> Self {
        Self(pointer.addr() as u64)
    }

    /// The address `bytes` higher. Wraps around at 2^64; callers have checked their range.
    #[inline]
    pub(crate) const fn offset(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

address_arithmetic!(VirtAddr);
address_arithmetic!(PhysAddr);

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
///
/// ```
/// use bindery::addr::{Frame, PhysAddr};
///
/// let registers = PhysAddr(0xfee0_0040);
/// assert_eq!(registers.frame(), Some(Frame(0xfee00)));
/// assert_eq!(Frame(0xfee00).start() + 0x40, registers);
/// assert_eq!(registers.to_string(), "0xfee00040");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PhysAddr(pub u64);

impl PhysAddr {
    /// The frame of the address; `None` from 16 TiB on, where frames have no number.
    #[inline]
    pub const fn frame(self) -> Option<Frame> {
        let number = self.0 >> PAGE_SHIFT;
        if number <= u32::MAX as u64 { Some(Frame(number as u32)) } else { None }
    }
}

impl fmt::Debug for PhysAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "phys {:#x}", self.0)
    }
}

impl fmt::Display for PhysAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// The number of a physical frame: its physical address divided by [`PAGE_SIZE`].
///
/// ```
/// use bindery::addr::{Frame, Order, PhysAddr};
///
/// assert_eq!(Frame(3).start(), PhysAddr(0x3000));
/// assert_eq!(Frame(3).plus(2), Frame(5));
/// assert!(Frame(8).is_aligned(Order(3)));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Frame(pub u32);

impl Frame {
    /// The physical address of the frame's first byte.
    #[inline]
    pub const fn start(self) -> PhysAddr {
        PhysAddr((self.0 as u64) << PAGE_SHIFT)
    }

    /// The frame `count` frames later. Wraps around; callers stay inside a folio.
    #[inline]
    pub const fn plus(self, count: u32) -> Self {
        Self(self.0.wrapping_add(count))
    }

    /// Whether the frame's number is a multiple of 2^`order`.
    #[inline]
    pub const fn is_aligned(self, order: Order) -> bool {
        self.0 & (order.pages() - 1) == 0
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "frame {:#x}", self.0)
    }
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A half-open range of virtual addresses, in bytes. `start <= end` always.
///
/// ```
/// use bindery::addr::{VirtAddr, VirtRange};
///
/// let range = VirtRange::from_len(VirtAddr(0x1000), 0x3000).expect("it fits");
/// assert_eq!((range.end(), range.pages()), (VirtAddr(0x4000), 3));
/// assert!(range.contains(VirtAddr(0x3fff)) && !range.contains(VirtAddr(0x4000)));
/// assert_eq!(range.each_page().last(), Some(VirtAddr(0x3000)));
/// assert_eq!(range.to_string(), "0x1000..0x4000");
/// ```
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

    /// The range of `bytes` bytes from `start` on; `None` if it exceeds 64 bits.
    #[inline]
    pub const fn from_len(start: VirtAddr, bytes: u64) -> Option<Self> {
        match start.checked_add(bytes) {
            Some(end) => Some(Self { start, end }),
            None => None,
        }
    }

    /// A range whose order the caller has checked.
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

    /// The address after the last one.
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

    /// The addresses of the whole base pages from the range's start on, in ascending order.
    pub fn each_page(self) -> impl Iterator<Item = VirtAddr> + use<> {
        (0..self.pages()).map(move |page| VirtAddr(self.start.0 + (page << PAGE_SHIFT)))
    }

    /// Whether `addr` is in the range.
    #[inline]
    pub const fn contains(self, addr: VirtAddr) -> bool {
        self.start.0 <= addr.0 && addr.0 < self.end.0
    }

    /// Whether the two ranges share an address.
    #[inline]
    pub const fn overlaps(self, other: Self) -> bool {
        self.start.0 < other.end.0 && other.start.0 < self.end.0
    }

    /// Whether every address of `other` is in this range.
    #[inline]
    pub const fn covers(self, other: Self) -> bool {
        self.start.0 <= other.start.0 && other.end.0 <= self.end.0
    }

    /// The addresses that both ranges share; empty (at an unspecified address) if they share none.
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
    fn addresses_at_the_ends_have_no_neighbors() {
        assert_eq!(VirtAddr(u64::MAX).align_up(PAGE_SIZE), None);
        assert_eq!(VirtAddr(0x1000).align_up(PAGE_SIZE), Some(VirtAddr(0x1000)));
        assert_eq!(PhysAddr(1 << 44).frame(), None);
        assert_eq!(PhysAddr((1 << 44) - 1).frame(), Some(Frame(u32::MAX)));
        assert_eq!(PhysAddr(u64::MAX).checked_add(1), None);
        let word = 0u64;
        assert_eq!(VirtAddr::from_ptr(&word).0, (&raw const word).addr() as u64);
    }

    #[test]
    fn ranges_that_only_touch_do_not_overlap() {
        let low = VirtRange::raw(0x1000, 0x2000);
        let high = VirtRange::raw(0x2000, 0x3000);
        assert!(!low.overlaps(high) && low.intersection(high).is_empty());
        assert!(VirtRange::raw(0x1000, 0x3000).covers(high));
    }
}
