//! Pages of an object, by number.

use core::fmt;

/// Pages of an object or of an anon group, by number: from `first` up to `end`, exclusive.
///
/// ```
/// use bindery::addr::PageRange;
///
/// let pages = PageRange::from_count(3, 2);
/// assert_eq!(pages, PageRange { first: 3, end: 5 });
/// assert_eq!(pages.to_string(), "3..5");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageRange {
    /// The first page.
    pub first: u64,
    /// The page after the last.
    pub end: u64,
}

impl PageRange {
    /// `count` pages from `first` on, at most up to the highest number.
    #[inline]
    pub const fn from_count(first: u64, count: u64) -> Self {
        Self { first, end: first.saturating_add(count) }
    }
}

impl fmt::Debug for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pages {self}")
    }
}

impl fmt::Display for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.first, self.end)
    }
}
