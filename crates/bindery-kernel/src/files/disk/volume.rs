//! The files and the free blocks of the mounted disk, in memory.

use alloc::vec::Vec;
use core::ops::Range;

use bindery::PagerError;

use super::layout::{CONTENT, EXTENTS_MAX, Extent, FILES, Record};
use super::reservations::Reservations;

/// The mounted disk.
pub struct Volume {
    /// Each file, by its number.
    pub records: Vec<Option<Record>>,
    /// A bit for each block in use.
    used: Vec<u64>,
    blocks: u64,
    free: u64,
    /// The holes of each file that have a right to a block.
    reservations: Vec<Reservations>,
    /// The number of all of them. That many free blocks are kept for them.
    reserved: u64,
    /// The write of each file that has one.
    writes: Vec<Option<Write>>,
    /// Files whose size or extents have grown since their block on the disk was written.
    grown: Vec<bool>,
    /// The last naming.
    pub sequence: u64,
}

/// A write that has reserved blocks, and has not ended.
struct Write {
    pages: Range<u64>,
    /// Those of them that had a reservation before, and have not lost it since: of pages that other
    /// writes have made dirty.
    before: Reservations,
}

/// A stretch of a file's pages.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// The first block; `None` in a hole.
    pub block: Option<u64>,
    /// How many pages.
    pub pages: u64,
}

impl Volume {
    /// An empty disk of `blocks` blocks.
    pub fn new(blocks: u64) -> Self {
        let mut volume = Self {
            records: (0..FILES).map(|_| None).collect(),
            used: alloc::vec![0; blocks.div_ceil(64) as usize],
            blocks,
            free: blocks,
            reservations: (0..FILES).map(|_| Reservations::new()).collect(),
            reserved: 0,
            writes: (0..FILES).map(|_| None).collect(),
            grown: alloc::vec![false; FILES],
            sequence: 0,
        };
        (0..CONTENT).for_each(|block| volume.take(block));
        volume
    }

    /// The number of blocks, and of those that are free and not reserved.
    pub fn size_and_free(&self) -> (u64, u64) {
        (self.blocks - CONTENT, self.unreserved())
    }

    fn unreserved(&self) -> u64 {
        self.free.saturating_sub(self.reserved)
    }

    fn is_used(&self, block: u64) -> bool {
        self.used[(block / 64) as usize] >> (block % 64) & 1 != 0
    }

    fn take(&mut self, block: u64) {
        self.used[(block / 64) as usize] |= 1 << (block % 64);
        self.free -= 1;
    }

    fn give(&mut self, block: u64) {
        self.used[(block / 64) as usize] &= !(1 << (block % 64));
        self.free += 1;
    }

    /// Adds a file that was found on the disk. Refuses one whose extents are impossible: the volume
    /// cannot be used then.
    pub fn adopt(&mut self, number: usize, record: Record) -> Result<(), Record> {
        let mut next = 0;
        for extent in &record.extents {
            let Some(end) = extent.page.checked_add(extent.count) else { return Err(record) };
            if extent.page < next || extent.count == 0 {
                return Err(record);
            }
            let first = u64::from(extent.block);
            for block in first..first + u64::from(extent.count) {
                // Blocks of the table are in use from the start.
                if block >= self.blocks || self.is_used(block) {
                    return Err(record);
                }
                self.take(block);
            }
            next = end;
        }
        self.sequence = self.sequence.max(record.sequence);
        self.records[number] = Some(record);
        Ok(())
    }

    /// The file of this number.
    pub fn record(&mut self, number: u64) -> Option<&mut Record> {
        self.records.get_mut(number as usize)?.as_mut()
    }

    /// Notes that the block of a file on the disk lacks a size or an extent.
    pub fn has_grown(&mut self, number: u64) {
        if let Some(grown) = self.grown.get_mut(number as usize) {
            *grown = true;
        }
    }

    /// Takes the note of [`Volume::has_grown`] back: the block is about to be written.
    pub fn take_grown(&mut self, number: u64) -> bool {
        self.grown.get_mut(number as usize).is_some_and(core::mem::take)
    }

    /// The first file from a number on whose block on the disk lacks a size or an extent.
    pub fn next_grown(&self, from: u64) -> Option<u64> {
        let grown = self.grown.get(from as usize..)?;
        Some(from + grown.iter().position(|grown| *grown)? as u64)
    }

    /// The place of pages of a file, at most `pages` of them.
    pub fn run(&self, number: u64, page: u64, pages: u64) -> Run {
        let record = self.records.get(number as usize).and_then(Option::as_ref);
        for extent in record.iter().flat_map(|record| &record.extents) {
            let (first, count) = (u64::from(extent.page), u64::from(extent.count));
            if page < first {
                return Run { block: None, pages: pages.min(first - page) };
            }
            if page < first + count {
                let block = u64::from(extent.block) + page - first;
                return Run { block: Some(block), pages: pages.min(first + count - page) };
            }
        }
        Run { block: None, pages }
    }

    /// Begins a write: reserves a block for each hole among pages of a file that are to be written.
    /// Returns the end of the pages for which there is room. [`Volume::end_write`] follows.
    ///
    /// # Errors
    /// [`PagerError::NoSpace`] if there is none for the first; [`PagerError::OutOfMemory`].
    pub fn reserve(&mut self, number: u64, pages: Range<u64>) -> Result<u64, PagerError> {
        let file = self.reservations.get(number as usize).ok_or(PagerError::InputOutput)?;
        let before = file.within(&pages).ok_or(PagerError::OutOfMemory)?;
        self.writes[number as usize] = Some(Write { pages: pages.clone(), before });
        let reserved = self.reserve_holes(number, &pages);
        if reserved.is_err() {
            self.end_write(number, pages.start);
        }
        reserved
    }

    fn reserve_holes(&mut self, number: u64, pages: &Range<u64>) -> Result<u64, PagerError> {
        let mut at = pages.start;
        while at < pages.end {
            let run = self.run(number, at, pages.end - at);
            let behind = at + run.pages;
            let mut end = behind;
            if run.block.is_none() {
                let room = self.unreserved();
                let file = self.reservations.get_mut(number as usize);
                let file = file.ok_or(PagerError::InputOutput)?;
                end = file.end_with(&(at..behind), room);
                let new = end - at - file.count(&(at..end));
                if end > at && !file.add(at..end) {
                    return Err(PagerError::OutOfMemory);
                }
                self.reserved += new;
            }
            at = end;
            if end < behind {
                break;
            }
        }
        if at == pages.start { Err(PagerError::NoSpace) } else { Ok(at) }
    }

    /// Ends the write of a file, which has written its pages before `end`: takes the reservations
    /// of the others back, except those of pages that were dirty before.
    pub fn end_write(&mut self, number: u64, end: u64) {
        let write = self.writes.get_mut(number as usize).and_then(Option::take);
        let Some(Write { pages, before }) = write else { return };
        let mut rest = end.max(pages.start)..pages.end;
        while let Some(gap) = before.first_gap(&rest) {
            self.unreserve(number, &gap);
            rest.start = gap.end;
        }
    }

    /// As [`Volume::unreserve`], of pages that are dirty no more. A write may be about to make some
    /// of them dirty, which needs their reservations: its end takes back those that it does not
    /// use.
    fn unreserve_beside_write(&mut self, number: u64, pages: &Range<u64>) {
        let mut rest = pages.start;
        if let Some(Some(write)) = self.writes.get_mut(number as usize) {
            write.before.remove(pages);
            let kept = write.pages.clone();
            self.unreserve(number, &(rest..pages.end.min(kept.start)));
            rest = rest.max(kept.end);
        }
        self.unreserve(number, &(rest..pages.end));
    }

    /// Takes the reservations of pages of a file back.
    pub fn unreserve(&mut self, number: u64, pages: &Range<u64>) {
        if let Some(file) = self.reservations.get_mut(number as usize) {
            self.reserved -= file.remove(pages);
        }
    }

    /// Gives a page of a file a block, unless it has one.
    ///
    /// # Errors
    /// [`PagerError::NoSpace`] if no block is free, or only reserved ones are, or the file has too
    /// many extents.
    pub fn allocate(&mut self, number: u64, page: u64) -> Result<(), PagerError> {
        if self.run(number, page, 1).block.is_some() {
            return Ok(());
        }
        let page = u32::try_from(page).map_err(|_| PagerError::NoSpace)?;
        let place = u64::from(page)..u64::from(page) + 1;
        let record = self.records[number as usize].as_ref().ok_or(PagerError::InputOutput)?;
        if self.unreserved() == 0 && self.reservations[number as usize].count(&place) == 0 {
            return Err(PagerError::NoSpace);
        }
        let index = record.extents.partition_point(|extent| extent.page < page);
        let before = index.checked_sub(1).map(|index| record.extents[index]);
        let before = before.filter(|extent| extent.page + extent.count == page);
        let wanted = before.map_or(CONTENT, |extent| u64::from(extent.block + extent.count));
        let after = |from: u64| (from..self.blocks).find(|block| !self.is_used(*block));
        let block = after(wanted).or_else(|| after(CONTENT)).ok_or(PagerError::NoSpace)?;
        let grows = before.is_some() && block == wanted;
        if !grows && record.extents.len() >= EXTENTS_MAX {
            return Err(PagerError::NoSpace);
        }
        self.take(block);
        let extents = &mut self.record(number).ok_or(PagerError::InputOutput)?.extents;
        if grows {
            extents[index - 1].count += 1;
        } else {
            extents.insert(index, Extent { page, block: block as u32, count: 1 });
        }
        self.has_grown(number);
        self.unreserve(number, &place);
        Ok(())
    }

    /// Takes the blocks of `pages` pages from `first` on out of a file. They are free only after
    /// [`Volume::release`]: until then the disk says that they are the file's.
    ///
    /// # Errors
    /// [`PagerError::NoSpace`] if the file would have too many extents.
    pub fn cut(&mut self, number: u64, first: u64, end: u64) -> Result<Vec<Extent>, PagerError> {
        let Some(record) = self.record(number) else { return Ok(Vec::new()) };
        let (mut kept, mut freed) = (Vec::with_capacity(EXTENTS_MAX), Vec::new());
        for extent in &record.extents {
            let (start, behind) = (u64::from(extent.page), u64::from(extent.page + extent.count));
            let part = |from: u64, to: u64| {
                let (from, to) = (from.clamp(start, behind), to.clamp(start, behind));
                let block = extent.block + (from - start) as u32;
                (from < to).then(|| Extent { page: from as u32, block, count: (to - from) as u32 })
            };
            kept.extend(part(start, first));
            freed.extend(part(first, end));
            kept.extend(part(end.max(first), behind));
        }
        if kept.len() > EXTENTS_MAX {
            return Err(PagerError::NoSpace);
        }
        record.extents = kept;
        self.unreserve_beside_write(number, &(first..end));
        Ok(freed)
    }

    /// Frees blocks that no block on the disk names any more.
    pub fn release(&mut self, extents: &[Extent]) {
        for extent in extents {
            let first = u64::from(extent.block);
            (first..first + u64::from(extent.count)).for_each(|block| self.give(block));
        }
    }
}
