//! Blocks of pages whose store is in progress.
//!
//! A page's new block belongs to its file only once the device has the content; until then the
//! block holds old data of another file. So the blocks of a store are recorded apart from the
//! file's extents, and join them with the device's answer ([`Volume::settle`]). If the store fails
//! or the machine stops, the blocks are free again, because the disk does not name them yet.

use alloc::vec::Vec;
use core::ops::Range;

use bindery::PagerError;

use crate::heap;

use super::extents::{self, Extent, Run};
use super::layout::EXTENTS_MAX;
use super::volume::Volume;

/// The new blocks of a store.
struct Placement {
    file: u64,
    /// The new extents, by rising page.
    extents: Vec<Extent>,
    /// How many of the pages have a reservation, which lasts until the end of the store.
    promised: u64,
}

/// The stores in progress that have new blocks, each by its number.
#[derive(Default)]
pub struct Placements(Vec<Option<Placement>>);

impl Placements {
    /// An unused number.
    fn unused(&mut self) -> Result<usize, PagerError> {
        if let Some(number) = self.0.iter().position(Option::is_none) {
            return Ok(number);
        }
        self.0.try_reserve(1).map_err(|_| PagerError::OutOfMemory)?;
        self.0.push(None);
        Ok(self.0.len() - 1)
    }

    /// The number of new extents of a file.
    pub fn extents_of(&self, file: u64) -> usize {
        let own = self.0.iter().flatten().filter(|placement| placement.file == file);
        own.map(|placement| placement.extents.len()).sum()
    }

    /// The number of pages that have both a reservation and a new block.
    pub fn promised(&self) -> u64 {
        self.0.iter().flatten().map(|placement| placement.promised).sum()
    }
}

impl Volume {
    /// Starts the store of pages of a file by allocating a block for each hole among them. Returns
    /// the number of the store, which ends with [`Volume::settle`]; `None` if there is no hole.
    ///
    /// # Errors
    /// [`PagerError::NoSpace`] if no block is free, if all free blocks are reserved, or if the file
    /// has too many extents; [`PagerError::OutOfMemory`].
    pub fn place(&mut self, file: u64, pages: Range<u64>) -> Result<Option<usize>, PagerError> {
        let store = self.placements.unused()?;
        self.placements.0[store] = Some(Placement { file, extents: Vec::new(), promised: 0 });
        let placed = self.place_holes(store, file, pages);
        match placed {
            Ok(true) => Ok(Some(store)),
            Ok(false) | Err(_) => {
                self.settle(store, false);
                placed.map(|_| None)
            }
        }
    }

    /// Returns whether there are holes.
    fn place_holes(
        &mut self,
        store: usize,
        file: u64,
        pages: Range<u64>,
    ) -> Result<bool, PagerError> {
        let mut page = pages.start;
        while page < pages.end {
            let run = self.run(None, file, page..pages.end);
            let behind = page + run.pages;
            if run.block.is_none() {
                (page..behind).try_for_each(|page| self.place_page(store, file, page))?;
            }
            page = behind;
        }
        let Some(Some(placement)) = self.placements.0.get(store) else { return Ok(false) };
        let Some(first) = placement.extents.first().copied() else { return Ok(false) };
        let new = self.placements.extents_of(file) + self.room_for_cut(file);
        let extents = &mut self.record(file).ok_or(PagerError::InputOutput)?.extents;
        let continues = usize::from(extents::continues(extents, &first));
        if extents.len() + new - continues > EXTENTS_MAX {
            return Err(PagerError::NoSpace);
        }
        // The room suffices for all stores of the file, whichever ends first, because an answer
        // cannot fail.
        if extents.capacity() - extents.len() < new {
            let grown = 2 * (extents.len() + new) * size_of::<Extent>();
            heap::room(grown).map_err(|_| PagerError::OutOfMemory)?;
        }
        extents.try_reserve(new).map_err(|_| PagerError::OutOfMemory)?;
        Ok(true)
    }

    fn place_page(&mut self, store: usize, file: u64, page: u64) -> Result<(), PagerError> {
        let number = u32::try_from(page).ok().filter(|number| *number < u32::MAX);
        let number = number.ok_or(PagerError::NoSpace)?;
        let is_promised = self.is_reserved(file, page);
        if self.unreserved() == 0 && !is_promised {
            return Err(PagerError::NoSpace);
        }
        let run = |before| self.run(Some(store), file, before..page);
        let before = page.checked_sub(1).and_then(|before| run(before).block);
        let block = self.free_block(before.map(|block| block + 1)).ok_or(PagerError::NoSpace)?;
        let Some(Some(placement)) = self.placements.0.get_mut(store) else {
            return Err(PagerError::InputOutput);
        };
        placement.extents.try_reserve(1).map_err(|_| PagerError::OutOfMemory)?;
        extents::insert(
            &mut placement.extents,
            Extent { page: number, block: block as u32, count: 1 },
        );
        placement.promised += u64::from(is_promised);
        self.take(block);
        Ok(())
    }

    /// The new block of a page in a store, and the consecutive blocks of the pages after it.
    pub fn run_of_store(&self, store: usize, page: u64, pages: u64) -> Run {
        let placement = self.placements.0.get(store).and_then(Option::as_ref);
        extents::run(placement.map_or(&[], |placement| &placement.extents), page, pages)
    }

    /// Ends a store. If the device has the content, the new blocks become the file's; otherwise
    /// they are free again and the pages keep their reservations.
    pub fn settle(&mut self, store: usize, is_stored: bool) {
        let taken = self.placements.0.get_mut(store).and_then(Option::take);
        let Some(Placement { file, extents, .. }) = taken else { return };
        for new in extents {
            match self.record(file) {
                Some(record) if is_stored => {
                    extents::insert(&mut record.extents, new);
                    let first = u64::from(new.page);
                    self.unreserve(file, &(first..first + u64::from(new.count)));
                    self.has_changed(file);
                }
                _ => self.release_blocks(&[new]),
            }
        }
    }
}
