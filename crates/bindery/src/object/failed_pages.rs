//! Pages that the pager has failed to store.
//!
//! Such a page stays in memory and dirty, because it has the only copy of its content.
//!
//! | the page | a `sync` | a limit, or [`crate::FileSystem::write_back`] |
//! |---|---|---|
//! | was written | stores it | store it |
//! | has failed once | tries once more | leave it |
//! | has failed twice | leaves it | leave it |
//!
//! A write marks the page as written again. So a failed device is not asked repeatedly for pages
//! that it cannot store, and a recovered device receives all pages written from then on. The pages
//! count against the limit of their file system. (Linux gives up the content: it marks the page
//! clean.)

use crate::addr::PageRange;
use crate::collections::page_tree::{PAGE_LIMIT, PageFlags};
use crate::error::Error;
use crate::platform::Platform;

use super::Object;
use super::dropping::{DropPiece, drop_pages};
use super::mappings::{MappingCopies, unmap};
use super::transfers::Reads;

impl<P: Platform> Object<'_, P> {
    /// Forgets the pages of a file that the pager has failed to store, and that were not written
    /// since then: their changes are lost, and the next access requests the pages from the pager.
    /// Returns the number of pages. Copies that private mappings have made stay, as in
    /// [`Object::discard`], which forgets the other dirty pages, too.
    ///
    /// Context: may sleep. Complexity: linear in the runs of dirty pages, plus that of
    /// [`Object::set_size`] for each failed stretch.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an object that is not a file; [`Error::OutOfMemory`].
    pub fn discard_failed(&self) -> Result<u64, Error> {
        discard_failed(self)
    }
}

fn discard_failed<P: Platform>(object: &Object<'_, P>) -> Result<u64, Error> {
    let (memory, state) = (object.memory, object.state());
    if !state.is_file() {
        return Err(Error::Invalid);
    }
    let (mut from, mut dropped) = (0, 0);
    loop {
        let next = state.pages.look(memory.platform(), |index| index.next_dirty(from, PAGE_LIMIT));
        let Some((run, flags)) = next else { return Ok(dropped) };
        let pages = PageRange::from_count(run.page, run.count.into());
        from = pages.end;
        if flags.contains(PageFlags::FAILED) {
            dropped += memory.outermost(|| {
                object.change_pages(pages, Reads::Canceled, || Ok(drop_failed(object, pages)))
            })?;
        }
    }
}

/// Drops the failed pages in the range. Returns their number. The changes are held.
fn drop_failed<P: Platform>(object: &Object<'_, P>, pages: PageRange) -> u64 {
    let (memory, state) = (object.memory, object.state());
    let mut piece = DropPiece::first_of(memory);
    state.invalidate_lock.with_write(memory.platform(), |proof| {
        let (mut from, mut dropped) = (pages.first, 0);
        // Another call may have written or stored some of the pages since they were found.
        while let Some((run, flags)) =
            state.pages.look(memory.platform(), |index| index.next_dirty(from, pages.end))
        {
            let failed = PageRange::from_count(run.page, run.count.into());
            from = failed.end;
            if flags.contains(PageFlags::FAILED) {
                unmap(memory, state, failed, MappingCopies::Kept, proof);
                drop_pages(memory, state, failed, &mut piece, proof);
                dropped += u64::from(run.count);
            }
        }
        dropped
    })
}
