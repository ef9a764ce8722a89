//! Pages and holes of an object (`lseek(2)` with `SEEK_DATA` and `SEEK_HOLE`).

use crate::addr::PAGE_SHIFT;
use crate::platform::Platform;

use super::Object;

impl<P: Platform> Object<'_, P> {
    /// The first byte at or after `offset`, in bytes, that is in an existing page; `None` if only a
    /// hole follows. File pages that are not in memory may be data in the file's storage, so all of
    /// a file is data.
    ///
    /// Context: spins; not in interrupt handlers: the lock of the page index leaves interrupts on.
    /// Complexity: the height of the page index.
    pub fn next_data(&self, offset: u64) -> Option<u64> {
        let (memory, object) = (self.memory, self.state());
        let size = object.size();
        if offset >= size || object.is_file() {
            return Some(offset).filter(|offset| *offset < size);
        }
        let (page, end) = (offset >> PAGE_SHIFT, object.size_in_pages());
        let run = object.pages.look(&memory.platform, |index| index.next_run(page, end))?;
        Some(offset.max(run.page << PAGE_SHIFT))
    }

    /// The first byte at or after `offset`, in bytes, that is in no existing page; the size if
    /// there is none before it, and `None` if `offset` is not below the size.
    ///
    /// Context: spins; not in interrupt handlers: the lock of the page index leaves interrupts on.
    /// Complexity: in the runs up to there.
    pub fn next_hole(&self, offset: u64) -> Option<u64> {
        let (memory, object) = (self.memory, self.state());
        let size = object.size();
        if offset >= size {
            return None;
        }
        if object.is_file() {
            return Some(size);
        }
        let (mut page, end) = (offset >> PAGE_SHIFT, object.size_in_pages());
        let next = |page| object.pages.look(&memory.platform, |index| index.next_run(page, end));
        while let Some(run) = next(page).filter(|run| run.page == page) {
            page += u64::from(run.count);
        }
        Some(offset.max(page << PAGE_SHIFT).min(size))
    }
}
