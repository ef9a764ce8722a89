//! Pages and holes of an object (`lseek(2)` with `SEEK_DATA` and `SEEK_HOLE`).

use crate::addr::PAGE_SHIFT;
use crate::collections::page_tree::PageStretch;
use crate::platform::Platform;

use super::Object;

impl<P: Platform> Object<'_, P> {
    /// The first byte at or after `offset`, in bytes, that is in an existing page; `None` if only a
    /// hole follows. File pages that are not in memory may be data in the file's storage, so a
    /// whole file counts as data.
    ///
    /// Context: spins; not in interrupt handlers, because the lock of the page index leaves
    /// interrupts enabled. Complexity: the height of the page index.
    pub fn next_data(&self, offset: u64) -> Option<u64> {
        let (memory, object) = (self.memory, self.state());
        let size = object.size();
        if offset >= size || !object.is_shared_memory() {
            return Some(offset).filter(|offset| *offset < size);
        }
        let (page, end) = (offset >> PAGE_SHIFT, object.size_in_pages());
        let page = object.pages.look(memory.platform(), |index| index.next_used(page, end))?;
        Some(offset.max(page << PAGE_SHIFT))
    }

    /// The first byte at or after `offset`, in bytes, that is in no existing page. The size if no
    /// hole precedes it; `None` if `offset` is not below the size.
    ///
    /// Context: spins; not in interrupt handlers, because the lock of the page index leaves
    /// interrupts enabled. Complexity: linear in the runs up to the result.
    pub fn next_hole(&self, offset: u64) -> Option<u64> {
        let (memory, object) = (self.memory, self.state());
        let size = object.size();
        if offset >= size {
            return None;
        }
        if !object.is_shared_memory() {
            return Some(size);
        }
        let (mut page, end) = (offset >> PAGE_SHIFT, object.size_in_pages());
        let look = |page| object.pages.look(memory.platform(), |index| index.run(page, end - page));
        while page < end
            && let PageStretch::Frames(_, count) | PageStretch::Swapped(_, count) = look(page)
        {
            page += u64::from(count);
        }
        Some(offset.max(page << PAGE_SHIFT).min(size))
    }
}
