//! The records of a layer: the list of all records, and those that an embedder has named.

use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use crate::collections::interval_tree::{
    Asked, Interval, IntervalLinks, IntervalTree, LockedTree, Member,
};

use super::Opaque;

/// A name given by an embedder: a number in one of its number spaces. 0 is not a number space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Name {
    pub(crate) space: u64,
    pub(crate) number: u64,
}

impl Name {
    /// A hash of the name. Different names may have the same hash, so names with equal hashes are
    /// compared.
    fn mixed(self) -> u64 {
        /// 2^64 divided by the golden ratio, odd (Knuth, volume 3, 6.4).
        const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
        self.number ^ self.space.wrapping_mul(SPREAD)
    }
}

/// A record's name, and its position among the named records. Part of the record.
pub(crate) struct NameLinks {
    links: IntervalLinks<Self>,
    name: Name,
    /// The record, once it is among the named records.
    record: AtomicPtr<Opaque>,
}

impl NameLinks {
    /// The links of a record that has no name.
    pub(crate) const fn new(name: Name) -> Self {
        Self { links: IntervalLinks::new(), name, record: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The name; `None` if the record has none.
    pub(crate) fn name(&self) -> Option<Name> {
        (self.name.space != 0).then_some(self.name)
    }

    /// Sets the record that contains these links.
    pub(crate) fn set_record(&self, record: NonNull<Opaque>) {
        self.record.store(record.as_ptr(), Relaxed);
    }

    /// The record that contains these links.
    pub(crate) fn record(&self) -> Option<NonNull<Opaque>> {
        NonNull::new(self.record.load(Relaxed))
    }
}

/// Orders named records by a hash of number space and number, because the number spaces have small
/// numbers in common.
pub(crate) struct ByNumber;

impl Member<NameLinks> for ByNumber {
    fn links(node: &NameLinks) -> &IntervalLinks<NameLinks> {
        &node.links
    }

    fn interval(node: &NameLinks) -> Interval {
        Interval { first: node.name.mixed(), last: node.name.mixed() }
    }
}

/// The named records.
pub(crate) type NamedTree = IntervalTree<NameLinks, ByNumber>;

/// The record of that name. O(log n) of n named records.
pub(crate) fn find_named<'t>(
    tree: LockedTree<'t, NameLinks, ByNumber>,
    name: Name,
) -> Option<&'t NameLinks> {
    let asked = Asked { first: name.mixed(), last: name.mixed(), ..Asked::ALL };
    tree.iter(asked).find(|found| found.name == name)
}

/// The records of a layer, guarded by the lock of their [`Anchor`](super::Anchor).
pub(crate) struct Records {
    /// The first of the list of all.
    pub(crate) first: AtomicPtr<Opaque>,
    /// Records with a name.
    pub(crate) named: NamedTree,
    /// Records with pages that should be stored.
    pub(crate) unsaved: ListEnds,
}

/// The ends of a list of records, which the layer links.
pub(crate) struct ListEnds {
    pub(crate) first: AtomicPtr<Opaque>,
    pub(crate) last: AtomicPtr<Opaque>,
}

impl Records {
    pub(super) const fn new() -> Self {
        Self {
            first: AtomicPtr::new(ptr::null_mut()),
            named: IntervalTree::new(),
            unsaved: ListEnds {
                first: AtomicPtr::new(ptr::null_mut()),
                last: AtomicPtr::new(ptr::null_mut()),
            },
        }
    }
}
