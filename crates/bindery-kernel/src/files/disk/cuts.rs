//! Pages that become holes, in truncations, removals and punched holes.
//!
//! The blocks of a cut become free only once the disk no longer names them. If that update fails,
//! the file is restored: the core has changed nothing, and a later write inside the old size must
//! not find a smaller size on the disk. The room for the extents is kept until then
//! ([`Volume::room_of_cut`]).

use alloc::vec::Vec;
use core::mem;
use core::ops::Range;

use bindery::PagerError;

use super::extents::{self, Extent};
use super::layout::EXTENTS_MAX;
use super::volume::Volume;

/// All pages of a file.
pub const ALL: Range<u64> = 0..u64::MAX;

/// Pages removed from a file while the disk still names their blocks.
pub struct Cut {
    /// The file.
    pub file: u64,
    pages: Range<u64>,
    freed: Vec<Extent>,
    /// The file's size before a truncation, in bytes.
    size: Option<u64>,
}

impl Cut {
    /// Whether the pages had blocks.
    pub fn has_blocks(&self) -> bool {
        !self.freed.is_empty()
    }
}

impl Volume {
    /// Removes the blocks of pages from a file. A `size` becomes the file's size in bytes. Only one
    /// cut may be in progress. It ends with [`Volume::release`] or [`Volume::put_back`]; until then
    /// the blocks still belong to the file on the disk.
    ///
    /// # Errors
    /// [`PagerError::NoSpace`] if the file would have too many extents;
    /// [`PagerError::OutOfMemory`]. Nothing is cut in these cases.
    pub fn cut(
        &mut self,
        file: u64,
        pages: Range<u64>,
        size: Option<u64>,
    ) -> Result<Cut, PagerError> {
        let new = self.placements.extents_of(file);
        let mut cut = Cut { file, pages, freed: Vec::new(), size: None };
        let Some(record) = self.record(file) else { return Ok(cut) };
        let list = &mut record.extents;
        let mut room = 0;
        if cut.pages == ALL {
            cut.freed = mem::take(list);
        } else {
            if list.len() + usize::from(extents::splits(list, &cut.pages)) > EXTENTS_MAX {
                return Err(PagerError::NoSpace);
            }
            let has_room = list.try_reserve(new + 1).is_ok();
            if !has_room || cut.freed.try_reserve_exact(list.len()).is_err() {
                return Err(PagerError::OutOfMemory);
            }
            let before = list.len();
            extents::cut(list, &cut.pages, &mut cut.freed);
            room = before.saturating_sub(list.len());
        }
        cut.size = size.map(|size| mem::replace(&mut record.size, size));
        self.room_of_cut = Some((file, room));
        Ok(cut)
    }

    /// The room for extents that a file keeps for a cut in progress.
    pub fn room_for_cut(&self, file: u64) -> usize {
        self.room_of_cut.filter(|(of, _)| *of == file).map_or(0, |(_, room)| room)
    }

    /// Ends a cut: frees its blocks, which no block on the disk names now, and cancels the
    /// reservations of its pages. A write in progress that may be about to dirty some of the pages
    /// relied on their blocks, so it gets reservations instead. A mapping's write of one of them
    /// waits for the end of the cut.
    pub fn release(&mut self, cut: &Cut) {
        self.room_of_cut = None;
        self.unreserve_beside_write(cut.file, &cut.pages);
        self.release_blocks(&cut.freed);
        let Some(Some(write)) = self.writes.get(cut.file as usize) else { return };
        let pages = write.pages.start.max(cut.pages.start)..write.pages.end.min(cut.pages.end);
        if cut.has_blocks() && !pages.is_empty() {
            let file = &mut self.reservations[cut.file as usize];
            let new = pages.end - pages.start - file.count(&pages);
            // Without memory for the reservation, the pages may later find the disk full.
            if file.add(pages) {
                self.reserved += new;
            }
        }
    }

    /// Ends a cut that has failed, and restores the file. The disk may have either state; the next
    /// commit writes the restored one.
    pub fn put_back(&mut self, cut: Cut) {
        self.room_of_cut = None;
        for extent in &cut.freed {
            // A write that found a hole since the cut has reserved a block.
            let first = u64::from(extent.page);
            self.unreserve(cut.file, &(first..first + u64::from(extent.count)));
        }
        self.has_changed(cut.file);
        let Some(record) = self.record(cut.file) else { return };
        if let Some(size) = cut.size {
            record.size = size;
        }
        if cut.pages == ALL {
            // Stores of the file's pages had ended, so no store has added an extent since the cut.
            record.extents = cut.freed;
        } else {
            cut.freed.iter().for_each(|extent| extents::insert(&mut record.extents, *extent));
        }
    }
}
