//! Estimates the number of entries that map a page from its folio's count of mappings.
//!
//! The count is the number of (page, entry) pairs, for all pages of the folio together:
//!
//! ```text
//! folio of 4 pages             f0 f1 f2 f3      mappings  a page has, on average
//! one process maps all          1  1  1  1         4       1        private
//! after a fork                  2  2  2  2         8       2        shared
//! the child has copied f0, f1   1  1  2  2         6       1.5      shared, each a part of 4/6
//! ```
//!
//! The estimate is exact for folios of one page, for folios whose pages have the same number of
//! mappings, and for anon-exclusive pages, which have one mapping. Otherwise every page gets the
//! average. The shares of all processes still add up to the folio if each of its pages is mapped.
//! An average of at most one counts as private, although a few pages may be shared while others are
//! unmapped. (Linux does the same if it counts per folio: `CONFIG_NO_PAGE_MAPCOUNT`.)

use bindery::addr::{Frame, PAGE_SIZE};
use bindery::{FolioView, Platform};

/// The binary places of a share in bytes (Linux: `PSS_SHIFT`).
pub(super) const PART_SHIFT: u32 = 12;

/// Consecutive pages of a folio with the same number of mappings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shared {
    /// The first page, counted from the `first` of [`for_each_shared`].
    pub(super) first: u64,
    /// The number of pages.
    pub(super) pages: u64,
    mappings: u64,
    /// The folio's size in pages.
    folio: u64,
}

impl Shared {
    /// Whether no other entry maps the pages.
    pub(super) fn is_private(&self) -> bool {
        self.mappings <= self.folio
    }

    /// The bytes of the pages, divided by the number of sharers, times 2^[`PART_SHIFT`].
    pub(super) fn part(&self) -> u64 {
        let page = PAGE_SIZE << PART_SHIFT;
        let each = if self.is_private() { page } else { page * self.folio / self.mappings };
        self.pages * each
    }
}

/// Calls `f` for each run of pages with the same number of mappings, among the `pages` pages of
/// `folio` from `first` on. O(1); for anonymous memory, linear in the words of exclusive bits.
pub(super) fn for_each_shared<P: Platform>(
    folio: FolioView<'_, P>,
    first: Frame,
    pages: u64,
    mut f: impl FnMut(Shared),
) {
    let mappings = u64::from(folio.mappings());
    let size = u64::from(folio.pages());
    if folio.is_of_object() {
        return f(Shared { first: 0, pages, mappings, folio: size });
    }
    let number = first.0.wrapping_sub(folio.first().0);
    let mut at = 0;
    while at < pages {
        let left = (pages - at) as u32;
        let (exclusive, count) = folio.exclusive_run(number.wrapping_add(at as u32), left);
        let alike = u64::from(count.max(1));
        let mappings = if exclusive { size } else { mappings };
        f(Shared { first: at, pages: alike, mappings, folio: size });
        at += alike;
    }
}
