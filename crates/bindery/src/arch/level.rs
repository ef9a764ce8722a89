//! The levels of a tree of tables, and what each of them covers.

use core::fmt;

use crate::addr::{Order, PAGE_SHIFT, VirtAddr};

use super::Arch;

/// A level of a tree of tables: the number of steps from its entries to memory. The levels of an
/// architecture are [`Level::PTE`] to [`Arch::ROOT`].
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::arch::{Arch, Level, X86_64};
///
/// assert_eq!(Level::PMD.span::<X86_64>(), 2 << 20);
/// assert_eq!(Level::PMD.index_of::<X86_64>(VirtAddr(0x60_0000)), 3);
/// assert_eq!(Level::PMD.below(), Level::PTE);
/// assert_eq!(X86_64::<4>::ROOT.to_string(), "4");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Level(pub u8);

impl Level {
    /// No level: below them all.
    pub const NONE: Self = Self(0);
    /// Tables of base pages, level 1 (Arm: level 3).
    pub const PTE: Self = Self(1);
    /// The level above, of 2 MiB an entry on most architectures (Arm: level 2).
    pub const PMD: Self = Self(2);
    /// The next, of 1 GiB an entry on most architectures (Arm: level 1).
    pub const PUD: Self = Self(3);

    /// The next lower level: that of the tables that entries of this one name.
    #[inline]
    pub const fn below(self) -> Self {
        Self(self.0 - 1)
    }

    /// The next higher level: that of the table in which a table of this one hangs.
    #[inline]
    pub const fn above(self) -> Self {
        Self(self.0 + 1)
    }

    /// How many tables a walker passes from a table of this level to one of `lower`.
    #[inline]
    pub(crate) const fn steps_to(self, lower: Self) -> u64 {
        (self.0 - lower.0) as u64
    }

    /// The levels from this one up to `highest`, in rising order.
    #[inline]
    pub fn up_to(self, highest: Self) -> impl DoubleEndedIterator<Item = Self> + Clone {
        (self.0..=highest.0).map(Self)
    }

    /// Base-2 logarithm of the bytes that one entry covers.
    #[inline]
    pub const fn span_shift<A: Arch>(self) -> u32 {
        PAGE_SHIFT + A::INDEX_BITS * (self.0 as u32 - 1)
    }

    /// Bytes that one entry covers.
    #[inline]
    pub const fn span<A: Arch>(self) -> u64 {
        1 << self.span_shift::<A>()
    }

    /// Bytes that a whole table covers; of the root of a full 64-bit tree, 2^63.
    #[inline]
    pub const fn table_span<A: Arch>(self) -> u64 {
        let shift = self.span_shift::<A>() + A::INDEX_BITS;
        1 << if shift < 63 { shift } else { 63 }
    }

    /// The folio order of a leaf.
    #[inline]
    pub const fn order<A: Arch>(self) -> Order {
        Order((A::INDEX_BITS * (self.0 as u32 - 1)) as u8)
    }

    /// The index of `addr` in a table.
    #[inline]
    pub const fn index_of<A: Arch>(self, addr: VirtAddr) -> u32 {
        ((addr.0 >> self.span_shift::<A>()) & ((1 << A::INDEX_BITS) - 1)) as u32
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
