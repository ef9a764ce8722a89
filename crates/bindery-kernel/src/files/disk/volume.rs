//! The files and the free blocks of the mounted disk, in memory.

use alloc::vec::Vec;
use core::ops::Range;

use bindery::PagerError;
use bindery::addr::PAGE_SIZE;

use super::extents::{self, Extent, Run};
use super::layout::{self, Block, CONTENT, FILES, IN_LIST, Record, WITHIN};
use super::page_set::PageSet;
use super::placements::Placements;

/// The highest sequence number accepted from a disk. It leaves more numbers than any machine can
/// use up.
const SEQUENCE_MAX: u64 = 1 << 62;

/// The mounted disk.
pub struct Volume {
    /// Each file, by its number.
    pub records: Vec<Option<Record>>,
    /// A bit for each block in use.
    used: Vec<u64>,
    blocks: u64,
    free: u64,
    /// The holes of each file for which a block is reserved.
    pub(super) reservations: Vec<PageSet>,
    /// The total number of reservations, which is the number of free blocks kept for them.
    pub(super) reserved: u64,
    /// The write in progress of each file, if any.
    pub(super) writes: Vec<Option<Write>>,
    /// The blocks of extents of all files.
    listed: u64,
    /// The stores in progress.
    pub(super) placements: Placements,
    /// The room for extents that a cut in progress may need again, with the file's number; `None`
    /// without a cut.
    pub(super) room_of_cut: Option<(u64, usize)>,
    /// The time of the last change of each file's content that its node has not seen yet.
    news: Vec<Option<u64>>,
    /// The number of nodes of each file, including removed files.
    pub(super) holders: Vec<u32>,
    /// Files without a name that wait to be removed.
    orphans: Vec<bool>,
    /// Files whose record has changed since their block on the disk was written.
    changed: Vec<bool>,
    /// The last naming.
    pub sequence: u64,
    /// Whether the device may still have a block with a name that its file has lost by a rename.
    pub has_old_names: bool,
}

/// A write that has reserved blocks and has not ended.
pub(super) struct Write {
    pub(super) pages: Range<u64>,
    /// Those of the pages that already had a reservation, because another write had dirtied them,
    /// and still have it; and those that a mapping has written since.
    pub(super) before: PageSet,
}

/// A file's block that is about to be written, and the blocks of extents that it names.
pub struct NewRecord {
    /// The extents of those blocks.
    pub extents: Vec<Extent>,
    /// The blocks, which are new.
    pub lists: Vec<u32>,
    /// Whether the block on the disk lacks a change.
    pub has_changed: bool,
}

/// The outcome of the write of a file's block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RecordEnd {
    /// The disk has the new block.
    Written,
    /// The disk has the old block.
    NotWritten,
    /// The device has failed, so the disk may hold either block.
    Unknown,
}

impl Volume {
    /// An empty disk of `blocks` blocks.
    pub fn new(blocks: u64) -> Self {
        let mut volume = Self {
            records: (0..FILES).map(|_| None).collect(),
            used: alloc::vec![0; blocks.div_ceil(64) as usize],
            blocks,
            free: blocks,
            reservations: (0..FILES).map(|_| PageSet::new()).collect(),
            reserved: 0,
            writes: (0..FILES).map(|_| None).collect(),
            listed: 0,
            placements: Placements::default(),
            room_of_cut: None,
            news: alloc::vec![None; FILES],
            holders: alloc::vec![0; FILES],
            orphans: alloc::vec![false; FILES],
            changed: alloc::vec![false; FILES],
            sequence: 0,
            has_old_names: false,
        };
        (0..CONTENT).for_each(|block| volume.take(block));
        volume
    }

    /// The number of all blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The number of blocks, and the number of free blocks that are not reserved.
    pub fn size_and_free(&self) -> (u64, u64) {
        (self.blocks - CONTENT, self.unreserved())
    }

    /// The free blocks minus those that are kept for reservations. A page whose store is in
    /// progress has both a block and its reservation.
    pub(super) fn unreserved(&self) -> u64 {
        let kept = self.reserved + self.kept_for_lists();
        (self.free + self.placements.promised()).saturating_sub(kept)
    }

    /// The free blocks that are kept for extents: enough for all files together, plus the longest
    /// list once more, because each change writes new blocks before it frees the old ones.
    fn kept_for_lists(&self) -> u64 {
        let content = self.blocks - CONTENT;
        if content <= WITHIN as u64 {
            return 0;
        }
        // A list has a block for every `IN_LIST` extents and one for the rest, and only files with
        // more than `WITHIN` extents have a list.
        let most = content * 2 / WITHIN as u64 + content / IN_LIST as u64 + 1;
        most.saturating_sub(self.listed)
    }

    /// Whether a page of a file has a reservation.
    pub(super) fn is_reserved(&self, number: u64, page: u64) -> bool {
        let file = self.reservations.get(number as usize);
        file.is_some_and(|file| file.count(&(page..page + 1)) > 0)
    }

    fn is_used(&self, block: u64) -> bool {
        self.used[(block / 64) as usize] >> (block % 64) & 1 != 0
    }

    /// A free block: `wanted` if free, otherwise the next one after it, otherwise any.
    pub(super) fn free_block(&self, wanted: Option<u64>) -> Option<u64> {
        let after = |from: u64| (from..self.blocks).find(|block| !self.is_used(*block));
        wanted.and_then(after).or_else(|| after(CONTENT))
    }

    pub(super) fn take(&mut self, block: u64) {
        self.used[(block / 64) as usize] |= 1 << (block % 64);
        self.free -= 1;
    }

    fn give(&mut self, block: u64) {
        self.used[(block / 64) as usize] &= !(1 << (block % 64));
        self.free += 1;
    }

    /// Claims a block of extents that a file on the disk names; `false` if the block cannot be one
    /// or has another use.
    pub fn adopt_list(&mut self, list: u64) -> bool {
        let is_free = list < self.blocks && !self.is_used(list);
        if is_free {
            self.take(list);
        }
        is_free
    }

    /// Adds a file that was found on the disk, whose blocks of extents were adopted. Refuses one
    /// whose extents or whose sequence are impossible: the volume then cannot be used.
    pub fn adopt(&mut self, number: usize, record: Record) -> Result<(), Record> {
        if record.sequence > SEQUENCE_MAX {
            return Err(record);
        }
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
        self.listed += record.lists.len() as u64;
        self.sequence = self.sequence.max(record.sequence);
        self.records[number] = Some(record);
        Ok(())
    }

    /// The partly filled last blocks of files, each with the length of the filled part in bytes.
    pub fn parts(&self) -> Vec<(u64, usize)> {
        let part = |(number, record): (usize, &Option<Record>)| {
            let size = record.as_ref()?.size;
            let (last, length) = (size / PAGE_SIZE, size % PAGE_SIZE);
            let block = self.run(None, number as u64, last..last + 1).block?;
            (length > 0).then_some((block, length as usize))
        };
        self.records.iter().enumerate().filter_map(part).collect()
    }

    /// Makes the block of a file that is about to be written and takes new blocks for its extents
    /// if they have no room there. [`Volume::end_record`] follows.
    ///
    /// # Errors
    /// [`PagerError::OutOfMemory`]; [`PagerError::NoSpace`].
    pub fn begin_record(
        &mut self,
        number: u64,
        block: &mut Block,
    ) -> Result<NewRecord, PagerError> {
        let mut new = NewRecord { extents: Vec::new(), lists: Vec::new(), has_changed: false };
        let named = self.records.get(number as usize).and_then(Option::as_ref);
        let named = named.filter(|record| record.name.is_some());
        let count = named.map_or(0, |record| layout::lists_of(record.extents.len()));
        if let Some(record) = named.filter(|_| count > 0) {
            let extents = &record.extents;
            let has_room = new.extents.try_reserve_exact(extents.len()).is_ok();
            if !has_room || new.lists.try_reserve_exact(count).is_err() {
                return Err(PagerError::OutOfMemory);
            }
            new.extents.extend_from_slice(extents);
        }
        for _ in 0..count {
            let Some(list) = self.free_block(None) else {
                self.release_lists(&new.lists);
                return Err(PagerError::NoSpace);
            };
            self.take(list);
            self.listed += 1;
            new.lists.push(list as u32);
        }
        match self.records.get(number as usize).and_then(Option::as_ref) {
            Some(record) => layout::write_record(block, record, &record.extents, &new.lists),
            None => block.fill(0),
        }
        new.has_changed = self.take_changed(number);
        Ok(new)
    }

    /// Ends the write of a file's block: the blocks of extents that the old version named are free.
    /// If the block was not written, the new blocks of extents are free instead. If the outcome is
    /// unknown, the new blocks stay out of use until the next mount.
    pub fn end_record(&mut self, number: u64, new: NewRecord, end: RecordEnd) {
        match (end, self.record(number)) {
            (RecordEnd::Written, Some(record)) => {
                let old = core::mem::replace(&mut record.lists, new.lists);
                self.release_lists(&old);
            }
            (RecordEnd::NotWritten, _) | (_, None) => self.release_lists(&new.lists),
            (RecordEnd::Unknown, Some(_)) => {}
        }
        if end != RecordEnd::Written {
            self.has_changed(number);
        }
    }

    fn release_lists(&mut self, lists: &[u32]) {
        lists.iter().for_each(|list| self.give(u64::from(*list)));
        self.listed -= lists.len() as u64;
    }

    /// The file of this number.
    pub fn record(&mut self, number: u64) -> Option<&mut Record> {
        self.records.get_mut(number as usize)?.as_mut()
    }

    /// Records that a file's block on the disk lacks a change.
    pub fn has_changed(&mut self, number: u64) {
        if let Some(changed) = self.changed.get_mut(number as usize) {
            *changed = true;
        }
    }

    /// Clears and returns the mark of [`Volume::has_changed`], because the block is about to be
    /// written.
    pub fn take_changed(&mut self, number: u64) -> bool {
        self.changed.get_mut(number as usize).is_some_and(core::mem::take)
    }

    /// The first file from a number on whose block on the disk is out of date.
    pub fn next_changed(&self, from: u64) -> Option<u64> {
        let changed = self.changed.get(from as usize..)?;
        Some(from + changed.iter().position(|changed| *changed)? as u64)
    }

    /// The place of the first of these pages of a file and of the consecutive pages after it. For a
    /// store, its new blocks count too.
    pub fn run(&self, store: Option<usize>, number: u64, pages: Range<u64>) -> Run {
        let record = self.records.get(number as usize).and_then(Option::as_ref);
        let extents = record.map_or(&[][..], |record| &record.extents);
        let run = extents::run(extents, pages.start, pages.end - pages.start);
        match store {
            Some(store) if run.block.is_none() => self.run_of_store(store, pages.start, run.pages),
            _ => run,
        }
    }

    /// Begins a write: reserves a block for each hole among the pages to be written. Returns the
    /// end of the pages for which there is room. [`Volume::end_write`] follows.
    ///
    /// # Errors
    /// [`PagerError::NoSpace`] if there is no room for the first page; [`PagerError::OutOfMemory`].
    pub fn reserve(&mut self, number: u64, pages: Range<u64>) -> Result<u64, PagerError> {
        let file = self.reservations.get(number as usize).ok_or(PagerError::InputOutput)?;
        let before = file.within(&pages).ok_or(PagerError::OutOfMemory)?;
        self.writes[number as usize] = Some(Write { pages: pages.clone(), before });
        let reserved = self.reserve_holes(number, &pages);
        match &reserved {
            Ok(end) => {
                if let Some(Some(write)) = self.writes.get_mut(number as usize) {
                    write.pages.end = *end;
                }
            }
            Err(_) => self.end_write(number, pages.start),
        }
        reserved
    }

    fn reserve_holes(&mut self, number: u64, pages: &Range<u64>) -> Result<u64, PagerError> {
        let mut at = pages.start;
        while at < pages.end {
            let run = self.run(None, number, at..pages.end);
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

    /// Ends the write of a file, which has written its pages before `end`. Cancels the reservations
    /// of the other pages, except those of pages that were already dirty.
    pub fn end_write(&mut self, number: u64, end: u64) {
        let write = self.writes.get_mut(number as usize).and_then(Option::take);
        let Some(Write { pages, before }) = write else { return };
        let mut rest = end.max(pages.start)..pages.end;
        while let Some(gap) = before.first_gap(&rest) {
            self.unreserve(number, &gap);
            rest.start = gap.end;
        }
    }

    /// Records a change of a file's content for its record and its node.
    pub fn note_change(&mut self, number: u64, now: u64) {
        if let Some(record) = self.records.get_mut(number as usize).and_then(Option::as_mut) {
            record.modified = now;
            self.news[number as usize] = Some(now);
            self.has_changed(number);
        }
    }

    /// The time of the last change recorded by [`Volume::note_change`] that has not been taken yet.
    pub fn take_news(&mut self, number: u64) -> Option<u64> {
        self.news.get_mut(number as usize)?.take()
    }

    /// Notes whether a file without a name waits to be removed.
    pub fn set_orphan(&mut self, number: u64, is_orphan: bool) {
        if let Some(orphan) = self.orphans.get_mut(number as usize) {
            *orphan = is_orphan;
        }
    }

    /// The first file from a number on that waits to be removed.
    pub fn next_orphan(&self, from: u64) -> Option<u64> {
        let orphans = self.orphans.get(from as usize..)?;
        Some(from + orphans.iter().position(|orphan| *orphan)? as u64)
    }

    /// As [`Volume::unreserve`], for pages that are no longer dirty. A write in progress may be
    /// about to dirty some of them and needs their reservations; the end of the write cancels those
    /// that it does not use.
    pub(super) fn unreserve_beside_write(&mut self, number: u64, pages: &Range<u64>) {
        let mut rest = pages.start;
        if let Some(Some(write)) = self.writes.get_mut(number as usize) {
            write.before.remove(pages);
            let kept = write.pages.clone();
            self.unreserve(number, &(rest..pages.end.min(kept.start)));
            rest = rest.max(kept.end);
        }
        self.unreserve(number, &(rest..pages.end));
    }

    /// Cancels the reservations of pages of a file.
    pub fn unreserve(&mut self, number: u64, pages: &Range<u64>) {
        if let Some(file) = self.reservations.get_mut(number as usize) {
            self.reserved -= file.remove(pages);
        }
    }

    /// Frees blocks.
    pub(super) fn release_blocks(&mut self, extents: &[Extent]) {
        for extent in extents {
            let first = u64::from(extent.block);
            (first..first + u64::from(extent.count)).for_each(|block| self.give(block));
        }
    }
}
