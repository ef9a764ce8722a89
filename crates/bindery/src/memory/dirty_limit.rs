//! [`DirtyLimit`]: a limit for the dirty pages of files.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// The maximum number of batches of one limit's pages that reclaim has stored at the same time, so
/// that pagers that do not answer leave records to the others.
const BATCHES: u32 = 8;

/// A limit for the dirty pages of a set of files, including pages under writeback (Linux:
/// `vm.dirty_bytes`, and `max_bytes` of a `bdi`). One limit applies to all files
/// ([`crate::Memory::dirty_limit`]). Further limits each apply to the files of one file system
/// ([`crate::Memory::file_system_within`]), so a slow or failed device blocks only its own writers
/// and leaves memory to the others.
///
/// At the limit, a write or write fault that would make a page dirty first stores other pages of
/// the same file or the same file system, with no lock held. It waits for nothing else: if its file
/// system has no page that could be stored, it continues. So each writing thread may exceed the
/// limit by the pages of one call or one fault. Punched holes and pins are not limited.
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
    /// The number of batches that reclaim has begun and that have not ended.
    batches: AtomicU32,
}

impl DirtyLimit {
    /// A limit of `pages` pages; `u64::MAX` means no limit.
    #[must_use]
    pub const fn new(pages: u64) -> Self {
        let (limit, zero) = (AtomicU64::new(pages), AtomicU64::new(0));
        Self { limit, pages: zero, batches: AtomicU32::new(0) }
    }

    /// The number of pages that may be dirty. At least one may be dirty, whatever the limit.
    pub fn limit(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    /// Sets the limit. A lower limit does not store any pages.
    pub fn set_limit(&self, pages: u64) {
        self.limit.store(pages, Relaxed);
    }

    /// The number of pages that are dirty or being stored. Exact for each file with up to 32 such
    /// pages; for a file with more, rounded up to a multiple of 32.
    pub fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// Whether no further page should become dirty.
    pub(crate) fn is_full(&self) -> bool {
        let pages = self.pages();
        pages > 0 && pages >= self.limit()
    }

    /// Adds `by` to the number of pages; a wrapped value subtracts.
    pub(crate) fn charge(&self, by: u64) {
        self.pages.fetch_add(by, Relaxed);
    }

    /// Counts a batch that reclaim begins. Returns whether it may begin.
    pub(crate) fn begin_batch(&self) -> bool {
        let begun = self.batches.fetch_add(1, Relaxed) < BATCHES;
        if !begun {
            self.end_batch();
        }
        begun
    }

    /// Ends a batch that reclaim has begun.
    pub(crate) fn end_batch(&self) {
        self.batches.fetch_sub(1, Relaxed);
    }
}
