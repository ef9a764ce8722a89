//! The size of a block of frames, as a power of two.

use core::fmt;
use core::ops::{BitAnd, BitOr};

use super::PAGE_SIZE;

/// The order of a block or of a folio: the base-2 logarithm of its base pages.
///
/// ```
/// use bindery::addr::Order;
///
/// assert_eq!((Order(4).pages(), Order(4).bytes()), (16, 64 << 10));
/// assert_eq!(Order(4).align_down(0x1235), 0x1230);
/// assert_eq!(Order::PAGE.up_to(Order(2)).count(), 3);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Order(pub u8);

impl Order {
    /// A single base page.
    pub const PAGE: Self = Self(0);

    /// The number of base pages in the block. Up to order 31.
    #[inline]
    pub const fn pages(self) -> u32 {
        1 << self.0
    }

    /// The number of bytes in the block. Up to order 51.
    #[inline]
    pub const fn bytes(self) -> u64 {
        PAGE_SIZE << self.0
    }

    /// The first page of the block in which `page` lies, if blocks of this order are aligned to
    /// their size.
    #[inline]
    pub const fn align_down(self, page: u64) -> u64 {
        page >> self.0 << self.0
    }

    /// The next larger order: two blocks of this order.
    #[inline]
    pub const fn above(self) -> Self {
        Self(self.0 + 1)
    }

    /// The next smaller order: half a block of this one.
    #[inline]
    pub const fn below(self) -> Self {
        Self(self.0 - 1)
    }

    /// The orders from this one up to `largest`, in rising order.
    #[inline]
    pub fn up_to(self, largest: Self) -> impl DoubleEndedIterator<Item = Self> + Clone {
        (self.0..=largest.0).map(Self)
    }
}

impl fmt::Debug for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "order {}", self.0)
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A set of orders, each below 16.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Orders(u16);

impl Orders {
    /// Only order 0.
    pub(crate) const PAGE: Self = Self::of(Order::PAGE);

    /// The set of one order.
    #[inline]
    pub(crate) const fn of(order: Order) -> Self {
        Self(1 << order.0)
    }

    /// All orders up to `largest`.
    pub(crate) const fn up_to(largest: Order) -> Self {
        Self((2 << largest.0) - 1)
    }

    /// Converts the set to bits, bit n for order n, and back.
    #[inline]
    pub(crate) const fn bits(self) -> u16 {
        self.0
    }

    #[inline]
    pub(crate) const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    #[inline]
    pub(crate) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether the set has an order above that of a page.
    #[inline]
    pub(crate) const fn has_large(self) -> bool {
        self.0 > 1
    }

    #[inline]
    pub(crate) const fn contains(self, order: Order) -> bool {
        self.0 & 1 << order.0 != 0
    }

    /// The largest order; order 0 if the set is empty.
    pub(crate) const fn largest(self) -> Order {
        Order((u16::BITS - 1 - (self.0 | 1).leading_zeros()) as u8)
    }

    /// Removes the largest order from the set.
    #[inline]
    pub(crate) const fn take_largest(&mut self) -> Option<Order> {
        if self.0 == 0 {
            return None;
        }
        let order = (u16::BITS - 1 - self.0.leading_zeros()) as u8;
        self.0 &= !(1 << order);
        Some(Order(order))
    }
}

impl BitOr for Orders {
    type Output = Self;

    #[inline]
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitAnd for Orders {
    type Output = Self;

    #[inline]
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}
