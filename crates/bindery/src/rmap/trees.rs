//! Trees of VMAs: those of the VMAs that map an object, and those of an anon group.
//!
//! A VMA's interval, in pages, begins at the VMA's offset. It is the mapped part of the object, or
//! the indexes of the VMA's anonymous pages.

use crate::addr::PAGE_SHIFT;
use crate::vma::Vma;

use crate::collections::interval_tree::{Interval, IntervalLinks, IntervalTree, Member};

/// A VMA's position in one tree.
pub(crate) type TreeLinks = IntervalLinks<Vma>;

/// The position in the tree of an object.
pub(crate) struct OfObject;

impl Member<Vma> for OfObject {
    fn links(vma: &Vma) -> &TreeLinks {
        &vma.object_links
    }

    #[inline]
    fn interval(vma: &Vma) -> Interval {
        pages_of(vma)
    }
}

/// The position in the tree of an anon group.
pub(crate) struct OfGroup;

impl Member<Vma> for OfGroup {
    fn links(vma: &Vma) -> &TreeLinks {
        &vma.group_links
    }

    #[inline]
    fn interval(vma: &Vma) -> Interval {
        pages_of(vma)
    }
}

/// The VMAs that map an object.
pub(crate) type ObjectTree = IntervalTree<Vma, OfObject>;
/// The VMAs of an anon group of anonymous memory.
pub(crate) type GroupTree = IntervalTree<Vma, OfGroup>;

/// The indexes of the first and the last page of a VMA.
#[inline]
fn pages_of(vma: &Vma) -> Interval {
    let first = vma.page_offset();
    let more = (vma.end() - vma.start()).saturating_sub(1) >> PAGE_SHIFT;
    Interval { first, last: first.saturating_add(more) }
}
