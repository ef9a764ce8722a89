//! Lists of VMAs: who maps an object, who belongs to a group of anonymous memory.

use core::marker::PhantomData;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::space::vma::Vma;

/// A VMA's place in one list.
pub(crate) struct ListLinks {
    next: AtomicPtr<Vma>,
    previous: AtomicPtr<Vma>,
}

impl ListLinks {
    pub(crate) const fn new() -> Self {
        Self { next: AtomicPtr::new(ptr::null_mut()), previous: AtomicPtr::new(ptr::null_mut()) }
    }
}

/// Which of a VMA's two places a list uses.
pub(crate) trait Membership {
    /// The place.
    fn links(vma: &Vma) -> &ListLinks;
}

/// In the list of an object.
pub(crate) struct OfObject;

impl Membership for OfObject {
    fn links(vma: &Vma) -> &ListLinks {
        &vma.object_links
    }
}

/// In the list of a group of anonymous memory.
pub(crate) struct OfGroup;

impl Membership for OfGroup {
    fn links(vma: &Vma) -> &ListLinks {
        &vma.group_links
    }
}

/// The VMAs that map an object.
pub(crate) type ObjectList = VmaList<OfObject>;
/// The VMAs of a group of anonymous memory.
pub(crate) type GroupList = VmaList<OfGroup>;

/// VMAs in the order in which they came. The lock of whoever has the list guards it and the VMAs'
/// places in it.
///
/// The order matters to `fork`, which copies entries while a walker may be on its way: a child's VMA
/// comes behind its parent's, so that the walker meets what is copied after it has passed it by. In
/// the other order:
/// 1. CPU A cuts an object off, and has found nothing in the child's VMA yet;
/// 2. CPU B copies a page of the parent's into the child;
/// 3. CPU A unmaps the page from the parent, and drops it. The child maps it still.
pub(crate) struct VmaList<M> {
    first: AtomicPtr<Vma>,
    last: AtomicPtr<Vma>,
    membership: PhantomData<M>,
}

impl<M: Membership> VmaList<M> {
    pub(crate) const fn new() -> Self {
        Self {
            first: AtomicPtr::new(ptr::null_mut()),
            last: AtomicPtr::new(ptr::null_mut()),
            membership: PhantomData,
        }
    }

    /// Adds a VMA that is in no list of this kind, behind all others. The lock is held.
    pub(crate) fn add(&self, vma: &Vma) {
        let node = ptr::from_ref(vma).cast_mut();
        let last = self.last.load(Ordering::Relaxed);
        let links = M::links(vma);
        links.next.store(ptr::null_mut(), Ordering::Relaxed);
        links.previous.store(last, Ordering::Relaxed);
        match self.vma(last) {
            Some(last) => M::links(last).next.store(node, Ordering::Relaxed),
            None => self.first.store(node, Ordering::Relaxed),
        }
        self.last.store(node, Ordering::Relaxed);
    }

    /// Takes out a VMA that is in the list. The lock is held.
    pub(crate) fn take(&self, vma: &Vma) {
        let links = M::links(vma);
        let next = links.next.load(Ordering::Relaxed);
        let previous = links.previous.load(Ordering::Relaxed);
        match self.vma(previous) {
            Some(previous) => M::links(previous).next.store(next, Ordering::Relaxed),
            None => self.first.store(next, Ordering::Relaxed),
        }
        match self.vma(next) {
            Some(next) => M::links(next).previous.store(previous, Ordering::Relaxed),
            None => self.last.store(previous, Ordering::Relaxed),
        }
    }

    /// The VMAs. The lock is held as long as the iterator and what it yields are used.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Vma> {
        let mut next = self.first.load(Ordering::Relaxed);
        core::iter::from_fn(move || {
            let vma = self.vma(next)?;
            next = M::links(vma).next.load(Ordering::Relaxed);
            Some(vma)
        })
    }

    /// Whether nobody is in the list.
    pub(crate) fn is_empty(&self) -> bool {
        self.first.load(Ordering::Relaxed).is_null()
    }

    fn vma(&self, node: *mut Vma) -> Option<&Vma> {
        // SAFETY: the list names only VMAs that are in it, which leave it before they are freed;
        // the list's lock, which the callers hold, keeps them from leaving now.
        NonNull::new(node).map(|node| unsafe { node.as_ref() })
    }
}
