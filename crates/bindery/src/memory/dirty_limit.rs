//! [`DirtyLimit`]: a limit for the pages that pagers have yet to store.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A limit for the dirty pages of a set of files, those that their pagers are storing included
/// (Linux: `vm.dirty_bytes`, and `max_bytes` of a `bdi`). One is for all files
/// ([`crate::Memory::dirty_limit`]). Further ones are for the files of a file system each
/// ([`crate::Memory::file_system_within`]): a device that is slow or gone stops its own writers,
/// and leaves memory to the others.
///
/// A write or a write fault that would make a page dirty at the limit stores others first, of the
/// same file or the same file system, with no lock held. It waits for nothing else: if its file
/// system has no page that could be stored, it continues. So the limit may be passed by the pages
/// of one call or one fault for each thread that writes. Punched holes and pins pass it.
///
/// ```
/// use bindery::{DirtyLimit, FileSystem, Memory, Pager, Platform};
///
/// static DISK: DirtyLimit = DirtyLimit::new(1024);
///
/// /// A disk of which at most 4 MiB are dirty.
/// fn mount<'m, P: Platform>(memory: &'m Memory<P>, disk: &'m dyn Pager) -> FileSystem<'m, P> {
///     memory.file_system_within(disk, &DISK)
/// }
/// assert_eq!(DISK.pages(), 0);
/// ```
///
/// # Context
/// Context: any.
#[derive(Debug)]
pub struct DirtyLimit {
    limit: AtomicU64,
    pages: AtomicU64,
}

impl DirtyLimit {
    /// A limit of `pages` pages; `u64::MAX` means no limit.
    #[must_use]
    pub const fn new(pages: u64) -> Self {
        Self { limit: AtomicU64::new(pages), pages: AtomicU64::new(0) }
    }

    /// The number of pages that may be dirty. At least one may, whatever the limit.
    pub fn limit(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    /// Sets the limit. A lower limit does not store any pages.
    pub fn set_limit(&self, pages: u64) {
        self.limit.store(pages, Relaxed);
    }

    /// The number of pages that are dirty or being stored. Exact for each file with up to 32 of
    /// them; for a file with more, rounded up to a multiple of 32.
    pub fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// Whether no further page should become dirty.
    pub(crate) fn is_full(&self) -> bool {
        let pages = self.pages();
        pages > 0 && pages >= self.limit()
    }

    /// Adds `by` to the pages; wraps for a difference.
    pub(crate) fn charge(&self, by: u64) {
        self.pages.fetch_add(by, Relaxed);
    }
}
