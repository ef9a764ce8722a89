//! The levels of a tree of tables, and the size that each covers.

use core::cmp::Ordering;
use core::fmt;
use core::hash::{Hash, Hasher};
use core::marker::PhantomData;

use crate::addr::{Order, PAGE_SHIFT, VirtAddr};

use super::{Arch, Entry, EntryIndex, Kind};

/// A level of a tree of tables of one architecture: the number of steps from its entries to memory.
/// The levels are [`Level::PTE`] to [`Arch::ROOT`].
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::arch::{Arch, Entry, Kind, Level, X86_64};
///
/// assert_eq!(Level::<X86_64>::PMD.span(), 2 << 20);
/// assert_eq!(Level::<X86_64>::PMD.index_of(VirtAddr(0x60_0000)).number(), 3);
/// assert_eq!(Level::<X86_64>::PMD.below(), Level::PTE);
/// assert_eq!(Level::<X86_64>::PTE.kind(Entry::EMPTY), Kind::Empty);
/// assert_eq!(X86_64::<4>::ROOT.to_string(), "4");
/// ```
pub struct Level<A> {
    number: u8,
    arch: PhantomData<fn() -> A>,
}

impl<A> Level<A> {
    /// No level, below all levels.
    pub const NONE: Self = Self::new(0);
    /// Tables of base pages, level 1 (Arm: level 3).
    pub const PTE: Self = Self::new(1);
    /// The level above, of 2 MiB an entry on most architectures (Arm: level 2).
    pub const PMD: Self = Self::new(2);
    /// The level of 1 GiB an entry on most architectures (Arm: level 1).
    pub const PUD: Self = Self::new(3);

    /// The level with this number: 1 for base pages, [`Arch::LEVELS`] for the root.
    #[inline]
    pub const fn new(number: u8) -> Self {
        Self { number, arch: PhantomData }
    }

    /// The level's number.
    #[inline]
    pub const fn number(self) -> u8 {
        self.number
    }

    /// The next lower level: that of the tables to which entries of this level point.
    #[inline]
    pub const fn below(self) -> Self {
        Self::new(self.number - 1)
    }

    /// The next higher level: that of the tables that point to tables of this level.
    #[inline]
    pub const fn above(self) -> Self {
        Self::new(self.number + 1)
    }

    /// The number of tables that a walk passes from a table of this level to one of `lower`.
    #[inline]
    pub(crate) const fn steps_to(self, lower: Self) -> u64 {
        (self.number - lower.number) as u64
    }

    /// The levels from this one up to `highest`, in ascending order.
    #[inline]
    pub fn up_to(self, highest: Self) -> impl DoubleEndedIterator<Item = Self> + Clone {
        (self.number..=highest.number).map(Self::new)
    }
}

impl<A: Arch> Level<A> {
    /// Base-2 logarithm of the bytes that one entry covers.
    #[inline]
    pub const fn span_shift(self) -> u32 {
        PAGE_SHIFT + A::INDEX_BITS * (self.number as u32 - 1)
    }

    /// Bytes that one entry covers.
    #[inline]
    pub const fn span(self) -> u64 {
        1 << self.span_shift()
    }

    /// Bytes that a whole table covers; for the root of a full 64-bit tree, 2^63.
    #[inline]
    pub const fn table_span(self) -> u64 {
        let shift = self.span_shift() + A::INDEX_BITS;
        1 << if shift < 63 { shift } else { 63 }
    }

    /// The folio order of a leaf.
    #[inline]
    pub const fn order(self) -> Order {
        Order((A::INDEX_BITS * (self.number as u32 - 1)) as u8)
    }

    /// The index of `addr` in a table.
    #[inline]
    pub const fn index_of(self, addr: VirtAddr) -> EntryIndex {
        EntryIndex::new(((addr.0 >> self.span_shift()) & ((1 << A::INDEX_BITS) - 1)) as u32)
    }

    /// The kind of an entry in a table of this level.
    #[inline]
    pub fn kind(self, entry: Entry) -> Kind {
        if entry.0 & A::PRESENT != 0 {
            if self > Self::PTE && A::is_table(entry, self) { Kind::Table } else { Kind::Leaf }
        } else if entry.is_empty() {
            Kind::Empty
        } else {
            Kind::Absent
        }
    }
}

// Implemented by hand: a derived implementation would require the same trait of the architecture.

impl<A> Clone for Level<A> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Level<A> {}

impl<A> PartialEq for Level<A> {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl<A> Eq for Level<A> {}

impl<A> PartialOrd for Level<A> {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<A> Ord for Level<A> {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        self.number.cmp(&other.number)
    }
}

impl<A> Hash for Level<A> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.number.hash(state);
    }
}

impl<A> fmt::Debug for Level<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "level {}", self.number)
    }
}

impl<A> fmt::Display for Level<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number.fmt(f)
    }
}
