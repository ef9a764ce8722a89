//! Changes that the other side of a file has made, and pages that the embedder wants to leave: a
//! network or cluster file system keeps its pages true with them.
//!
//! | call | clean pages | dirty pages | Linux |
//! |---|---|---|---|
//! | [`Object::evict`] | leave, unless they are in use | stay | `invalidate_mapping_pages` |
//! | [`Object::invalidate`] | leave | stay, and the call says so | `invalidate_inode_pages2_range` |
//! | [`Object::discard`] | leave | leave: their changes are lost | `truncate_inode_pages_range` |
//! | [`Object::size_changed`] | beyond the end, leave | beyond the end, leave | `truncate_pagecache` |

use crate::Memory;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE, PageRange};
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
    /// Drops the clean pages of a file in `length` bytes from `offset` on, recently used or not:
    /// the next access asks the pager again. Dirty, locked and pinned pages stay, as do pages that
    /// another thread uses and those of a folio that extends beyond the range. Returns the number
    /// of freed pages; 0 for an object that is not a file. (Linux: `POSIX_FADV_DONTNEED` of
    /// `posix_fadvise(2)`, which leaves mapped pages.) `evict(0, u64::MAX)` is
    /// [`Memory::drop_clean_pages`] of one object.
    ///
    /// Context: may sleep. Complexity: O(log n) for each folio, and its entries in each mapping.
    pub fn evict(&self, offset: u64, length: u64) -> u64 {
        evict(self.memory, self.state(), range_of(offset, length))
    }

    /// Forgets the content of a file in `length` bytes from `offset` on, in whole pages, because
    /// the storage has another one now: unmaps the pages everywhere and drops them. Results of
    /// reads that the pager has begun before are dropped too. So an access that begins after the
    /// call sees what the pager reads after it. Copies that private mappings have made stay. Pinned
    /// pages leave as well; their pins keep the old content. A range that is pinned for writing
    /// must not be invalidated: the end of the pin marks the page dirty that has its place then.
    ///
    /// Context: may sleep. Complexity: as [`Object::set_size`], once for each stretch of pages
    /// between dirty ones.
    ///
    /// # Errors
    /// [`Error::Busy`] if pages in the range are dirty: they stay, and the others are forgotten.
    /// ([`Object::sync`] stores them, [`Object::discard`] drops them.) [`Error::Invalid`] for an
    /// object that is not a file; [`Error::OutOfMemory`].
    pub fn invalidate(&self, offset: u64, length: u64) -> Result<(), Error> {
        forget(self, range_of(offset, length), Dirty::Stay)
    }

    /// As [`Object::invalidate`], of dirty pages too: their changes are lost. For a device that is
    /// gone, or a file whose pages failed to be stored and would be dirty for ever. Waits for
    /// writes that the pager has begun.
    ///
    /// Context: may sleep. Complexity: as [`Object::set_size`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for an object that is not a file; [`Error::OutOfMemory`].
    pub fn discard(&self, offset: u64, length: u64) -> Result<(), Error> {
        forget(self, range_of(offset, length), Dirty::Leave)
    }

    /// Takes over a size of a file that the storage has already: like [`Object::set_size`], but
    /// [`crate::Pager::resize`] is not called. If the file has grown, its last page of before is
    /// forgotten, as by [`Object::invalidate`], since the storage may have more of it.
    ///
    /// Context: may sleep. Complexity: as [`Object::set_size`].
    ///
    /// # Errors
    /// [`Error::TooLarge`] above 2^63 - 1; [`Error::Busy`] if the file has grown and the last page
    /// of before is dirty; [`Error::Invalid`] for an object that is not a file;
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
        // A page in the index has a reference to its folio, so it is the object's until the index
        // is unlocked; then the reference keeps it.
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

/// Drops those of the pages that are clean. Returns whether all were. The lock is held for writing,
/// so no page becomes dirty.
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
        // From the page that holds the smaller of the two ends, if one does.
        let beyond = PageRange { first: bytes.min(known) >> PAGE_SHIFT, end: PAGE_LIMIT };
        let taken = memory.outermost(|| {
            object.change_pages(beyond, Reads::Canceled, || {
                let old = state.size();
                if old < known {
                    // The range is too short.
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

/// Forgets the page that the old end of `old` bytes cuts in two.
fn grow<P: Platform>(memory: &Memory<P>, object: &ObjectState, old: u64) -> Result<(), Error> {
    if old.is_multiple_of(PAGE_SIZE) {
        return Ok(());
    }
    let last = PageRange::from_count(old >> PAGE_SHIFT, 1);
    let clean = object
        .invalidate_lock
        .with_write(memory.platform(), |proof| drop_clean(memory, object, last, proof));
    if clean { Ok(()) } else { Err(Error::Busy) }
}
