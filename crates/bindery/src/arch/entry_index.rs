//! The index of an entry in its table.

use core::fmt;
use core::iter;
use core::ops::{Add, AddAssign, Range, Sub};

use super::Arch;

/// The index of an entry in its table: from 0 to [`Arch::ENTRIES`] − 1, or one more at the end of a
/// stretch. Counts of entries are plain numbers.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::arch::{EntryIndex, Level, X86_64};
///
/// let index = Level::<X86_64>::PTE.index_of(VirtAddr(0x5000));
/// assert_eq!(index, EntryIndex::new(5));
/// assert_eq!(index + 3 - index, 3);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct EntryIndex(u32);

impl EntryIndex {
    /// The index of a table's first entry.
    pub const FIRST: Self = Self(0);

    /// The index with this number.
    #[inline]
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// The index's number: the number of entries before it.
    #[inline]
    pub const fn number(self) -> u32 {
        self.0
    }

    /// The position of the entry in the slice of its table's entries.
    #[inline]
    pub const fn position(self) -> usize {
        self.0 as usize
    }

    /// The positions of `count` entries from this one on.
    #[inline]
    pub(crate) const fn positions(self, count: u32) -> Range<usize> {
        self.0 as usize..(self.0 + count) as usize
    }

    /// The indexes from this one up to `end`, exclusive.
    #[inline]
    pub(crate) fn up_to(
        self,
        end: Self,
    ) -> iter::Map<Range<u32>, impl Fn(u32) -> Self + Clone + use<>> {
        (self.0..end.0).map(Self)
    }

    /// All indexes of a table.
    #[inline]
    pub(crate) fn all<A: Arch>() -> iter::Map<Range<u32>, impl Fn(u32) -> Self + Clone + use<A>> {
        (0..A::ENTRIES).map(Self)
    }

    /// This index and the following indexes, `count` in total.
    #[inline]
    pub(crate) fn stretch(
        self,
        count: u32,
    ) -> iter::Map<Range<u32>, impl Fn(u32) -> Self + Clone + use<>> {
        self.up_to(self + count)
    }

    /// The number of entries in its table from this one on.
    #[inline]
    pub(crate) const fn left<A: Arch>(self) -> u32 {
        A::ENTRIES - self.0
    }

    /// The number of entries before this one in its aligned stretch of `size`, a power of two.
    #[inline]
    pub(crate) const fn offset_in(self, size: u32) -> u32 {
        self.0 & (size - 1)
    }

    /// The start of the index's aligned stretch of `size`, a power of two.
    #[inline]
    pub(crate) const fn align_down(self, size: u32) -> Self {
        Self(self.0 & !(size - 1))
    }
}

impl Add<u32> for EntryIndex {
    type Output = Self;

    #[inline]
    fn add(self, count: u32) -> Self {
        Self(self.0 + count)
    }
}

impl AddAssign<u32> for EntryIndex {
    #[inline]
    fn add_assign(&mut self, count: u32) {
        self.0 += count;
    }
}

impl Sub<u32> for EntryIndex {
    type Output = Self;

    #[inline]
    fn sub(self, count: u32) -> Self {
        Self(self.0 - count)
    }
}

impl Sub for EntryIndex {
    type Output = u32;

    #[inline]
    fn sub(self, earlier: Self) -> u32 {
        self.0 - earlier.0
    }
}

impl From<EntryIndex> for u64 {
    #[inline]
    fn from(index: EntryIndex) -> Self {
        Self::from(index.0)
    }
}

impl fmt::Debug for EntryIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "entry {}", self.0)
    }
}

impl fmt::Display for EntryIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
