//! Invalidation: applies changes that the remote side of a file has made, and drops pages that the
//! embedder no longer wants cached. A network or cluster file system uses it to keep its pages
//! coherent.
//!
//! | call | clean pages | dirty pages | Linux |
//! |---|---|---|---|
//! | [`Object::evict`] | leave, unless they are in use | stay | `invalidate_mapping_pages` |
//! | [`Object::invalidate`] | leave | stay, and the call says so | `invalidate_inode_pages2_range` |
//! | [`Object::discard`] | leave | leave: their changes are lost | `truncate_inode_pages_range` |
//! | [`Object::size_changed`] | beyond the end, leave | beyond the end, leave | `truncate_pagecache` |

use crate::Memory;
use crate::addr::{PAGE_SHIFT, PageRange};
use crate::collections::page_tree::{PAGE_LIMIT, PageFlags};
use crate::error::Error;
use crate::platform::Platform;

use super::detached_batch::settle_written;
use super::dropping::{DropPiece, drop_pages};
use super::invalidate::PagesMayGo;
use super::mappings::{MappingCopies, unmap};
use super::reclaim::{ObjectFolio, Spare, reclaim_folio};
use super::state::pages_of;
use super::transfers::Reads;
use super::{MAX_SIZE, Object, ObjectState};

impl<P: Platform> Object<'_, P> {
    /// Drops the clean pages of a file in `length` bytes from `offset` on, whether recently used or
    /// not; the next access requests them from the pager again. Dirty, locked and pinned pages
    /// stay, as do pages that another thread uses and pages of a folio that extends beyond the
    /// range. Returns the number of freed pages; 0 for an object that is not a file. (Linux:
    /// `POSIX_FADV_DONTNEED` of `posix_fadvise(2)`, which leaves mapped pages.)
    /// `evict(0, u64::MAX)` is [`Memory::drop_clean_pages`] for one object.
    ///
    /// Context: may sleep. Complexity: O(log n) per folio, plus the folio's entries in each
    /// mapping.
    pub fn evict(&self, offset: u64, length: u64) -> u64 {
        evict(self.memory, self.state(), range_of(offset, length))
    }

    /// Forgets a file's content in `length` bytes from `offset` on, in whole pages, because the
    /// content in storage has changed: unmaps the pages everywhere and drops them. Results of reads
    /// that the pager started earlier are dropped too, so an access that begins after the call sees
    /// only content that the pager reads after the call. Copies that private mappings have made
    /// stay. Pinned pages are dropped as well; their pins keep the old content. A range that is
    /// pinned for writing must not be invalidated: at its end, the pin would mark dirty whichever
    /// page is then in that place.
    ///
    /// Context: may sleep. Complexity: as [`Object::set_size`], once for each stretch of pages
    /// between dirty ones.
    ///
    /// # Errors
    /// [`Error::Busy`] if pages in the range are dirty: the dirty pages stay, and the clean ones
    /// are forgotten. ([`Object::sync`] stores them, [`Object::discard`] drops them.)
    /// [`Error::Invalid`] for an object that is not a file; [`Error::OutOfMemory`].
    pub fn invalidate(&self, offset: u64, length: u64) -> Result<(), Error> {
        forget(self, range_of(offset, length), Dirty::Stay)
    }

    /// Like [`Object::invalidate`], but forgets dirty pages too: their changes are lost. Intended
    /// for a device that no longer exists, or for a file whose pages failed to be stored and would
    /// stay dirty forever. Waits for writes that the pager has started.
    ///
    /// Context: may sleep. Complexity: as [`Object::set_size`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for an object that is not a file; [`Error::OutOfMemory`].
    pub fn discard(&self, offset: u64, length: u64) -> Result<(), Error> {
        forget(self, range_of(offset, length), Dirty::Leave)
    }

    /// Adopts a file size that the storage already has: like [`Object::set_size`], but without a
    /// call of [`crate::Pager::resize`]. If the file has grown, its previous last page is
    /// forgotten, as by [`Object::invalidate`], since the storage may have more data in that page.
    ///
    /// Context: may sleep. Complexity: as [`Object::set_size`].
    ///
    /// # Errors
    /// [`Error::TooLarge`] above 2^63 - 1; [`Error::Busy`] if the file has grown and its previous
    /// last page is dirty; [`Error::Invalid`] for an object that is not a file;
    /// [`Error::OutOfMemory`]. An error changes nothing.
    pub fn size_changed(&self, bytes: u64) -> Result<(), Error> {
        if bytes > MAX_SIZE {
            return Err(Error::TooLarge);
        }
        take_over_size(self, bytes)
    }
}

/// The treatment of dirty pages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Dirty {
    Stay,
    Leave,
}

/// The pages that the bytes touch; none for a length of 0.
fn range_of(offset: u64, length: u64) -> PageRange {
    let first = offset >> PAGE_SHIFT;
    let end = if length == 0 { first } else { pages_of(offset.saturating_add(length)) };
    PageRange { first, end }
}

fn evict<P: Platform>(memory: &Memory<P>, object: &ObjectState, pages: PageRange) -> u64 {
    if !object.is_file() {
        return 0;
    }
    settle_written(memory);
    let (mut from, mut freed) = (pages.first, 0);
    let mut piece = DropPiece::first_of(memory);
    loop {
        // A page in the index holds a reference to its folio, so the folio belongs to the object
        // until the index is unlocked; after that, the reference taken here keeps it.
        let found = object.pages.look(memory.platform(), |index| {
            let run = index.next_run(from, pages.end)?;
            Some((run, memory.frames.try_hold(run.frame)))
        });
        let Some((run, held)) = found else { return freed };
        let Some(held) = held else {
            from = run.page + 1;
            continue;
        };
        let first = run.page - u64::from(run.frame.0 - held.head.0);
        let end = first + u64::from(held.pages());
        piece.add(held.pages());
        from = end;
        if first >= pages.first
            && end <= pages.end
            && let ObjectFolio::Freed(count) = reclaim_folio(memory, held, Spare::Nothing)
        {
            freed += u64::from(count);
        }
    }
}

fn forget<P: Platform>(
    object: &Object<'_, P>,
    pages: PageRange,
    dirty: Dirty,
) -> Result<(), Error> {
    let (memory, state) = (object.memory, object.state());
    if !state.is_file() {
        return Err(Error::Invalid);
    }
    memory.outermost(|| {
        object.change_pages(pages, Reads::Canceled, || {
            let done = state.invalidate_lock.with_write(memory.platform(), |proof| match dirty {
                Dirty::Stay => drop_clean(memory, state, pages, proof),
                Dirty::Leave => {
                    unmap(memory, state, pages, MappingCopies::Kept, proof);
                    drop_pages(memory, state, pages, &mut DropPiece::first_of(memory), proof);
                    true
                }
            });
            if done { Ok(()) } else { Err(Error::Busy.into()) }
        })
    })
}

/// Drops the clean pages in the range. Returns whether all were clean. The lock is held for
/// writing, so no page becomes dirty.
fn drop_clean<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
    proof: &PagesMayGo,
) -> bool {
    let (mut from, mut all) = (pages.first, true);
    let mut piece = DropPiece::first_of(memory);
    while from < pages.end {
        let dirty = object
            .pages
            .look(memory.platform(), |index| index.next_run_with(PageFlags::DIRTY, from, pages.end))
            .map(|run| PageRange::from_count(run.page, run.count.into()));
        let clean = PageRange { first: from, end: dirty.map_or(pages.end, |dirty| dirty.first) };
        if clean.first < clean.end {
            unmap(memory, object, clean, MappingCopies::Kept, proof);
            drop_pages(memory, object, clean, &mut piece, proof);
        }
        all &= dirty.is_none();
        from = dirty.map_or(pages.end, |dirty| dirty.end);
    }
    all
}

fn take_over_size<P: Platform>(object: &Object<'_, P>, bytes: u64) -> Result<(), Error> {
    let (memory, state) = (object.memory, object.state());
    if !state.is_file() {
        return Err(Error::Invalid);
    }
    loop {
        let known = state.size();
        // From the page that the smaller of the two ends cuts in two, if it cuts one.
        let beyond = PageRange { first: bytes.min(known) >> PAGE_SHIFT, end: PAGE_LIMIT };
        let taken = memory.outermost(|| {
            object.change_pages(beyond, Reads::Canceled, || {
                let old = state.size();
                if old < known {
                    // The range of the change is too short.
                    return Ok(false);
                }
                if bytes < old {
                    object.cut_pages(bytes);
                } else if bytes > old {
                    grow(memory, state, old)?;
                    state.set_size(bytes);
                }
                Ok(true)
            })
        })?;
        if taken {
            return Ok(());
        }
    }
}

/// Forgets the page that the old end, at `old` bytes, cuts in two, and any page after it.
fn grow<P: Platform>(memory: &Memory<P>, object: &ObjectState, old: u64) -> Result<(), Error> {
    let last = PageRange { first: old >> PAGE_SHIFT, end: PAGE_LIMIT };
    let clean = object
        .invalidate_lock
        .with_write(memory.platform(), |proof| drop_clean(memory, object, last, proof));
    if clean { Ok(()) } else { Err(Error::Busy) }
}
