//! Pages that programs write through mappings: room for their store, and the time of the change.

use core::ops::Range;

use bindery::PagerError;

use super::volume::Volume;

/// The part of pages that is in another range.
fn common(pages: &Range<u64>, other: &Range<u64>) -> Range<u64> {
    pages.start.max(other.start)..pages.end.min(other.end)
}

impl Volume {
    /// Prepares for the store of pages that a mapping is about to write: reserves a block for each
    /// hole among them that has none, and notes the change at the time `now`. Only pages of which
    /// no store and no cut is in progress.
    ///
    /// # Errors
    /// [`PagerError::NoSpace`]; [`PagerError::OutOfMemory`]. Nothing is reserved then.
    pub fn make_writable(
        &mut self,
        number: u64,
        pages: &Range<u64>,
        now: u64,
    ) -> Result<(), PagerError> {
        let (mut new, mut holes) = (0, 0);
        let mut at = pages.start;
        while let Some(hole) = self.next_hole(number, &(at..pages.end)) {
            let file = self.reservations.get(number as usize).ok_or(PagerError::InputOutput)?;
            new += hole.end - hole.start - file.count(&hole);
            holes += 1;
            at = hole.end;
        }
        if new > self.unreserved() {
            return Err(PagerError::NoSpace);
        }
        if new > 0 && !self.reservations[number as usize].make_room(holes) {
            return Err(PagerError::OutOfMemory);
        }
        if holes > 0 {
            self.keep_beside_write(number, pages)?;
        }
        if new > 0 {
            self.reserve_all(number, pages);
            self.reserved += new;
        }
        self.note_change(number, now);
        Ok(())
    }

    /// The first hole among pages of a file.
    fn next_hole(&self, number: u64, pages: &Range<u64>) -> Option<Range<u64>> {
        let mut at = pages.start;
        while at < pages.end {
            let run = self.run(None, number, at..pages.end);
            if run.block.is_none() {
                return Some(at..at + run.pages);
            }
            at += run.pages;
        }
        None
    }

    /// Lets a write in progress leave the pages their reservations if it ends before them.
    fn keep_beside_write(&mut self, number: u64, pages: &Range<u64>) -> Result<(), PagerError> {
        let Some(Some(write)) = self.writes.get_mut(number as usize) else { return Ok(()) };
        let met = common(pages, &write.pages);
        let kept = met.is_empty() || write.before.add(met);
        if kept { Ok(()) } else { Err(PagerError::OutOfMemory) }
    }

    /// Reserves a block for each hole among the pages. There is memory for the ranges.
    fn reserve_all(&mut self, number: u64, pages: &Range<u64>) {
        let mut at = pages.start;
        while let Some(hole) = self.next_hole(number, &(at..pages.end)) {
            at = hole.end;
            self.reservations[number as usize].add(hole);
        }
    }
}
