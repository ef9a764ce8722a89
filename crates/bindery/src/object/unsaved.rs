//! The pages of a file that its pager has yet to store: counting them, limiting them, and finding
//! them again.
//!
//! A page is *unsaved* from the time when it is marked dirty until the pager has stored it or it is
//! dropped. Each object counts its own unsaved pages, under its index lock. The counts that all
//! CPUs share ([`DirtyLimit`]) are exact for the first 32 pages of a file and then change in steps
//! of 32, so a program that writes a large file seldom touches them.
//!
//! Objects with unsaved pages are in a list, in the order in which they got their first unsaved
//! page. So a call that stores pages of a file system finds the files without visiting clean ones.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed};

use crate::Memory;
use crate::collections::page_tree::PageIndex;
use crate::memory::DirtyLimit;
use crate::platform::Platform;

use super::ObjectState;
use super::in_flight::InFlight;
use super::lent::Lent;
use super::registry::Registry;

/// The number of unsaved pages of a file up to which the shared counts are exact, and the step
/// beyond it.
const STEP: u64 = 32;

/// The number of pages that the shared counts contain for `pages` unsaved pages of a file.
fn counted(pages: u64) -> u64 {
    if pages > STEP { pages.next_multiple_of(STEP) } else { pages }
}

/// The pages of an object that its pager has yet to store.
#[derive(Clone, Copy)]
pub(super) struct UnsavedPages {
    /// The number of pages that are dirty or being stored.
    all: u64,
    /// The number of the object's pages that the pager has failed to store.
    failed: u64,
}

impl UnsavedPages {
    pub(super) fn of(index: &PageIndex, in_flight: &InFlight) -> Self {
        let all = index.dirty_count() + in_flight.pages_being_stored();
        Self { all, failed: index.failed_count() }
    }
}

/// The unsaved pages of an object.
pub(super) struct Unsaved {
    /// The limit of the object's file system, if it has one.
    limit: Option<Lent<DirtyLimit>>,
    /// The object that this belongs to, once it is in the registry.
    object: AtomicPtr<ObjectState>,
    /// The number of the object's pages in the shared counts. Like `storable`, changes only with
    /// the index lock held for writing.
    charged: AtomicU64,
    /// The number of the object's pages that are being stored or that a limit may cause to be
    /// stored: all except the failed ones. Too low while a `sync` retries a failed page.
    storable: AtomicU64,
    /// The links in the registry's list, under its lock.
    pub(super) next: AtomicPtr<ObjectState>,
    pub(super) previous: AtomicPtr<ObjectState>,
}

impl Unsaved {
    pub(super) const fn new(limit: Option<Lent<DirtyLimit>>) -> Self {
        Self {
            limit,
            object: AtomicPtr::new(ptr::null_mut()),
            charged: AtomicU64::new(0),
            storable: AtomicU64::new(0),
            next: AtomicPtr::new(ptr::null_mut()),
            previous: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Sets the object that this belongs to.
    pub(super) fn set_object(&self, object: NonNull<ObjectState>) {
        self.object.store(object.as_ptr(), Relaxed);
    }

    /// Whether pages are being stored or may be stored; may be outdated.
    pub(super) fn has_storable(&self) -> bool {
        self.storable.load(Relaxed) > 0
    }

    /// The number of the object's pages in the shared counts; may be outdated.
    pub(super) fn counted(&self) -> u64 {
        self.charged.load(Relaxed)
    }

    /// Whether the object has unsaved pages; may be outdated.
    pub(super) fn has_any(&self) -> bool {
        self.charged.load(Relaxed) > 0
    }

    /// The limit of the object's file system, if it has one.
    pub(super) fn limit(&self) -> Option<&DirtyLimit> {
        self.limit.as_ref().map(Lent::get)
    }

    /// Changes the recorded number of the object's pages in the shared counts, but not the counts
    /// themselves.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn damage(&self, by: i64) {
        self.charged.fetch_add(by as u64, Relaxed);
    }

    /// Updates the counts and the list for these pages. The index lock is held for writing.
    #[cold]
    pub(super) fn set<P: Platform>(&self, memory: &Memory<P>, pages: UnsavedPages) {
        self.storable.store(pages.all - pages.failed, Relaxed);
        let now = counted(pages.all);
        let before = self.charged.load(Relaxed);
        if now == before {
            return;
        }
        self.charged.store(now, Relaxed);
        let by = now.wrapping_sub(before);
        memory.dirty_limit().charge(by);
        if let Some(limit) = self.limit() {
            limit.charge(by);
        }
        let Some(object) = NonNull::new(self.object.load(Relaxed)) else { return };
        let registry = Registry::of(memory);
        if before == 0 {
            // SAFETY: 1. the object has pages, so it lives; it is in the list exactly when
            // `charged` is not 0, which the index lock guards.
            unsafe { registry.add_unsaved(object) };
        } else if now == 0 {
            // SAFETY: 1. as above.
            unsafe { registry.remove_unsaved(object) };
        }
    }
}

impl ObjectState {
    /// The number of the object's pages in the shared counts, for the auditor.
    pub(crate) fn counted_unsaved(&self) -> u64 {
        self.pages.unsaved.charged.load(Relaxed)
    }

    /// Whether that number is correct, while no page is being stored; for the auditor.
    pub(crate) fn has_counted_unsaved<P: Platform>(&self, platform: &P) -> bool {
        let dirty = self.pages.look(platform, |index| index.dirty_count());
        counted(dirty) == self.counted_unsaved()
    }

    /// Whether another page of the file may become dirty. A writer waits only for pages that its
    /// own pager may still store, so a limit that the pages of others fill does not block it.
    #[inline]
    pub(super) fn room_for_dirty<P: Platform>(&self, memory: &Memory<P>) -> Room {
        let own = self.pages.unsaved.limit();
        if own.is_some_and(DirtyLimit::is_full) || memory.dirty_limit().is_full() {
            self.room_at_limit(memory)
        } else {
            Room::Yes
        }
    }

    #[cold]
    fn room_at_limit<P: Platform>(&self, memory: &Memory<P>) -> Room {
        if memory.platform().works_for_pager() {
            // The store that would make room may need the page that this thread writes.
            return Room::Yes;
        }
        let files = match self.name.name() {
            Some(name) => Registry::of(memory).unsaved_files(name.space),
            None => {
                let unsaved = &self.pages.unsaved;
                UnsavedFiles { storable: unsaved.has_storable().into(), pages: unsaved.counted() }
            }
        };
        let limit = self.pages.unsaved.limit().unwrap_or(memory.dirty_limit());
        if files.storable > 0 {
            Room::AfterStores
        } else if files.pages > 0 && files.pages >= limit.limit() {
            Room::No
        } else {
            Room::Yes
        }
    }
}

/// Whether another page may become dirty.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    Yes,
    /// Yes, once other pages are stored, which the writer can do.
    AfterStores,
    /// No: the pager has failed to store all pages that fill the limit.
    No,
}

/// The unsaved pages of a set of files.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct UnsavedFiles {
    /// The number of files with pages that are being stored or may be stored.
    pub(super) storable: u64,
    /// The number of the files' pages in the shared counts.
    pub(super) pages: u64,
}
