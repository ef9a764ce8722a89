//! The storage of the disk's files: their [`Pager`], and the blocks that describe them.

use alloc::boxed::Box;
use core::ops::Range;

use bindery::addr::{Frame, PAGE_SIZE};
use bindery::{
    DirtyLimit, FileSystem, Pager, PagerError, Platform, ReadRequest, WriteAccess, WriteRequest,
};
use spin::Once;

use crate::arch;
use crate::disk::{self, Answer, BLOCK_SIZE, Direction, Ended, NewJob};
use crate::kernel_lock;
use crate::memory::memory;
use crate::platform::Machine;
use crate::sync::{Mutex, SleepingMutex};
use crate::time;

use super::cuts::{self, Cut};
use super::layout::{self, Block, FILES, Superblock, TABLE};
use super::volume::{NewRecord, RecordEnd, Volume};

/// The limit for dirty pages of the disk.
static LIMIT: DirtyLimit = DirtyLimit::new(u64::MAX);

/// The dirty share of memory, as a divisor; smaller than the share for all files.
const DIRTY_SHARE: u64 = 10;

/// The mounted disk.
pub struct Storage {
    /// The disk's files and blocks.
    pub volume: Mutex<Volume>,
    /// Memory for the storage's own transfers.
    own: SleepingMutex<Own>,
}

/// Memory of the storage's own.
struct Own {
    /// The physical address of a page.
    page: u64,
    /// A file's block, prepared while its blocks of extents are written.
    record: Box<Block>,
}

static STORAGE: Once<Storage> = Once::new();

/// The disk, if one is mounted.
pub fn storage() -> Option<&'static Storage> {
    STORAGE.get()
}

/// The disk as the core sees it.
pub fn file_system() -> Option<FileSystem<'static, Machine>> {
    static SYSTEM: Once<FileSystem<'static, Machine>> = Once::new();
    let storage = storage()?;
    Some(*SYSTEM.call_once(|| {
        LIMIT.set_limit(memory().total_frames() / DIRTY_SHARE);
        memory().file_system_within(storage, &LIMIT)
    }))
}

/// The number of dirty pages of the disk, and their limit.
pub fn dirty_and_limit() -> (u64, u64) {
    (LIMIT.pages(), LIMIT.limit())
}

/// The bytes of the page at a physical address.
fn bytes(page: &mut u64) -> &mut Block {
    // SAFETY: the page belongs to the storage, the lock around its address is held, and no transfer
    // of the page is in flight, since the storage waits for each transfer.
    unsafe { arch::direct_map(*page).cast::<Block>().as_mut() }
}

/// Reads the disk's files. A disk without a file system gets one.
///
/// # Errors
/// A message.
pub fn mount() -> Result<&'static Storage, &'static str> {
    const DAMAGED: &str = "the disk cannot be read or written";
    const UNUSABLE: &str = "its file system is damaged; use a new image";
    const NO_MEMORY: &str = "there is no memory for the extents of its files";
    let blocks = disk::blocks().ok_or("there is no disk")?;
    if blocks <= layout::CONTENT || blocks > u64::from(u32::MAX) {
        return Err("the disk must be larger than 1 MiB, and smaller than 16 TiB");
    }
    let mut page = disk::own_page().ok_or("there is no memory for the disk")?;
    let move_block = |direction, block, page: &mut u64| {
        disk::transfer(direction, block, *page, BLOCK_SIZE).map_err(|_| DAMAGED)
    };
    move_block(Direction::Read, 0, &mut page)?;
    let mut is_old = false;
    let mut volume = match layout::read_superblock(bytes(&mut page)) {
        Superblock::Ours(size, _) if size > blocks => {
            return Err("the disk is shorter than its file system; restore the image's size");
        }
        Superblock::Ours(size, _) if size <= layout::CONTENT => {
            return Err(UNUSABLE);
        }
        Superblock::Ours(size, of_before) => {
            is_old = of_before;
            Volume::new(size)
        }
        Superblock::Unknown => {
            return Err("the disk has a file system of another version; use a new image");
        }
        Superblock::None => {
            bytes(&mut page).fill(0);
            for block in 0..FILES as u64 {
                move_block(Direction::Write, TABLE + block, &mut page)?;
            }
            layout::write_superblock(bytes(&mut page), blocks);
            move_block(Direction::Write, 0, &mut page)?;
            Volume::new(blocks)
        }
    };
    for number in 0..FILES {
        move_block(Direction::Read, TABLE + number as u64, &mut page)?;
        let Some((mut record, mut left)) = layout::read_record(bytes(&mut page)) else { continue };
        record.extents.try_reserve_exact(left).map_err(|_| NO_MEMORY)?;
        for list in &record.lists {
            let list = u64::from(*list);
            // Adopted before the block is read, because a block that occurs twice could form an
            // endless list.
            if !volume.adopt_list(list) {
                return Err(UNUSABLE);
            }
            move_block(Direction::Read, list, &mut page)?;
            let count = left.min(layout::IN_LIST);
            let extents = layout::read_list(bytes(&mut page), number as u64, count);
            record.extents.extend(extents.ok_or(UNUSABLE)?);
            left -= count;
        }
        volume.adopt(number, record).map_err(|_| UNUSABLE)?;
    }
    if is_old {
        layout::write_superblock(bytes(&mut page), volume.blocks());
        move_block(Direction::Write, 0, &mut page)?;
    }
    // The machine may have stopped during a truncation, before it zeroed the rest of the last
    // block.
    for (block, length) in volume.parts() {
        move_block(Direction::Read, block, &mut page)?;
        let rest = &mut bytes(&mut page)[length..];
        if rest.iter().any(|byte| *byte != 0) {
            rest.fill(0);
            move_block(Direction::Write, block, &mut page)?;
        }
    }
    let own = Own { page, record: Box::new([0; BLOCK_SIZE]) };
    let storage = Storage { volume: Mutex::new(volume), own: SleepingMutex::new(own) };
    Ok(STORAGE.call_once(|| storage))
}

/// The pages of a transfer.
struct Pieces {
    direction: Direction,
    file: u64,
    /// The number of the store, if it has new blocks.
    store: Option<usize>,
}

/// Ends a store whose pages have new blocks.
fn settle(store: usize, is_stored: bool) {
    if let Some(storage) = storage() {
        storage.volume.lock().settle(store, is_stored);
    }
}

impl Storage {
    /// Writes a file's block. A file without a name gets an empty block.
    ///
    /// # Errors
    /// The device's failure; the errors of [`Volume::begin_record`].
    pub fn write_record(&self, number: u64) -> Result<(), PagerError> {
        // The lock is held until the block is written, so the last caller writes the latest state.
        self.write_record_from(number, &mut self.own.lock())
    }

    fn write_record_from(&self, number: u64, own: &mut Own) -> Result<(), PagerError> {
        let new = {
            let mut volume = self.volume.lock();
            let begun = volume.begin_record(number, &mut own.record);
            if begun.is_err() {
                volume.has_changed(number);
            }
            begun?
        };
        let lists = self.write_lists(number, &new, &mut own.page);
        // The device may make blocks durable in any order, so the blocks that the file's block
        // names are flushed first.
        let has_new = new.has_changed || !new.lists.is_empty();
        let kept = lists.and_then(|()| if has_new { disk::flush() } else { Ok(()) });
        let (outcome, end) = match kept {
            Err(_) => (kept, RecordEnd::NotWritten),
            Ok(()) => {
                let Own { page, record } = own;
                bytes(page).copy_from_slice(&record[..]);
                let at = TABLE + number;
                let mut written = disk::transfer(Direction::Write, at, *page, BLOCK_SIZE);
                if self.has_lists(number) {
                    // Before they are used again.
                    written = written.and_then(|()| disk::flush());
                }
                (written, if written.is_ok() { RecordEnd::Written } else { RecordEnd::Unknown })
            }
        };
        self.volume.lock().end_record(number, new, end);
        outcome
    }

    /// Whether the file's block on the disk names blocks of extents.
    fn has_lists(&self, number: u64) -> bool {
        self.volume.lock().record(number).is_some_and(|record| !record.lists.is_empty())
    }

    /// Writes new blocks of extents.
    fn write_lists(&self, number: u64, new: &NewRecord, page: &mut u64) -> Result<(), PagerError> {
        for (list, extents) in new.lists.iter().zip(new.extents.chunks(layout::IN_LIST)) {
            layout::write_list(bytes(page), number, extents);
            disk::transfer(Direction::Write, u64::from(*list), *page, BLOCK_SIZE)?;
        }
        Ok(())
    }

    /// Writes the blocks of the files that have changed and flushes the device.
    ///
    /// # Errors
    /// The device's failure.
    pub fn commit(&self) -> Result<(), PagerError> {
        self.remove_orphans();
        let mut outcome = self.write_changed();
        // Another thread may be about to write a block after it has cleared the block's mark. If
        // the write fails, the mark is set again.
        drop(self.own.lock());
        outcome = outcome.and(self.write_changed());
        outcome.and(disk::flush())
    }

    /// Writes the blocks of the files that have changed, each once.
    fn write_changed(&self) -> Result<(), PagerError> {
        let mut outcome = Ok(());
        let mut from = 0;
        loop {
            let next = self.volume.lock().next_changed(from);
            let Some(number) = next else { return outcome };
            outcome = outcome.and(self.write_record(number));
            from = number + 1;
        }
    }

    /// Frees a file without a name.
    pub fn remove(&self, number: u64) -> Result<(), PagerError> {
        self.cut(number, cuts::ALL, None)?;
        let mut volume = self.volume.lock();
        volume.records[number as usize] = None;
        // The next file with this number has its own news.
        volume.take_news(number);
        volume.set_orphan(number, false);
        Ok(())
    }

    /// Turns pages of a file into holes; a `size` becomes the file's size.
    ///
    /// # Errors
    /// The device's failure; the errors of [`Volume::cut`] and [`Volume::begin_record`]. The file
    /// is then unchanged.
    fn cut(&self, number: u64, pages: Range<u64>, size: Option<u64>) -> Result<(), PagerError> {
        // The lock is held throughout, so no other thread writes the file's block before the
        // outcome is known.
        let mut own = self.own.lock();
        let cut = self.volume.lock().cut(number, pages, size)?;
        let stored = self.store_cut(&cut, size, &mut own);
        let mut volume = self.volume.lock();
        match stored {
            Ok(()) => volume.release(&cut),
            Err(_) => volume.put_back(cut),
        }
        stored
    }

    fn store_cut(&self, cut: &Cut, size: Option<u64>, own: &mut Own) -> Result<(), PagerError> {
        self.write_record_from(cut.file, own)?;
        if cut.has_blocks() {
            // The disk must have dropped the name of a block before the block is reused.
            disk::flush()?;
        }
        size.map_or(Ok(()), |size| self.clear_end(cut.file, size, &mut own.page))
    }

    /// Adds the transfers of pages that are contiguous in memory to a job. Holes are zeroed.
    fn add_pieces(&self, job: &NewJob, pieces: &Pieces, pages: Range<u64>, at: u64) {
        let (mut page, mut at) = (pages.start, at);
        while page < pages.end {
            let run = self.volume.lock().run(pieces.store, pieces.file, page..pages.end);
            let length = (run.pages * PAGE_SIZE) as usize;
            match run.block {
                Some(block) => job.add(pieces.direction, block, at, length),
                None => Machine.zero(Frame((at / PAGE_SIZE) as u32), run.pages as u32),
            }
            page += run.pages;
            at += length as u64;
        }
    }

    /// Stores the beginning of a block, followed by zeroes, because bytes that a program has
    /// written beyond the end of the file must not reappear if the file grows.
    fn write_last(
        &self,
        request: &WriteRequest<'_>,
        store: Option<usize>,
    ) -> Result<(), PagerError> {
        let length = request.length() % PAGE_SIZE;
        let last = request.first_page() + request.pages() - 1;
        let mut own = self.own.lock();
        let page = &mut own.page;
        let into = bytes(page);
        into.fill(0);
        request.with_bytes(|pieces| {
            if let Some(piece) = pieces.last() {
                let offset = piece.len() - length as usize;
                piece.copy_to(offset, &mut into[..length as usize]);
            }
        });
        let run = self.volume.lock().run(store, request.file(), last..last + 1);
        let block = run.block.ok_or(PagerError::InputOutput)?;
        disk::transfer(Direction::Write, block, *page, BLOCK_SIZE)
    }

    fn store(
        &self,
        request: &WriteRequest<'_>,
        store: Option<usize>,
    ) -> Result<NewJob, PagerError> {
        let first = request.first_page();
        let end = first + request.pages();
        let has_part = !request.length().is_multiple_of(PAGE_SIZE);
        if has_part {
            self.write_last(request, store)?;
        }
        let whole = if has_part { end - 1 } else { end };
        let pieces = Pieces { direction: Direction::Write, file: request.file(), store };
        let job = NewJob::of_content();
        let mut page = first;
        for frames in request.frames() {
            let behind = page + u64::from(frames.count);
            let at = u64::from(frames.first.0) * PAGE_SIZE;
            self.add_pieces(&job, &pieces, page..behind.min(whole), at);
            page = behind;
        }
        Ok(job)
    }

    /// Zeroes the rest of a file's last block, so that it reads as zeroes if the file grows.
    fn clear_end(&self, file: u64, size: u64, page: &mut u64) -> Result<(), PagerError> {
        let run = self.volume.lock().run(None, file, size / PAGE_SIZE..size / PAGE_SIZE + 1);
        let (Some(block), true) = (run.block, !size.is_multiple_of(PAGE_SIZE)) else {
            return Ok(());
        };
        disk::transfer(Direction::Read, block, *page, BLOCK_SIZE)?;
        let rest = &mut bytes(page)[(size % PAGE_SIZE) as usize..];
        if rest.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        rest.fill(0);
        // Otherwise the disk could have the zeroes but the old size.
        disk::flush()?;
        disk::transfer(Direction::Write, block, *page, BLOCK_SIZE)
    }

    /// As [`Pager::begin_read`].
    fn read_in(&self, request: ReadRequest<'_>) {
        let job = NewJob::of_content();
        let pieces = Pieces { direction: Direction::Read, file: request.file(), store: None };
        let mut page = request.first_page();
        for frames in request.frames() {
            let end = page + u64::from(frames.count);
            let at = u64::from(frames.first.0) * PAGE_SIZE;
            self.add_pieces(&job, &pieces, page..end, at);
            page = end;
        }
        let bytes = (request.pages() * PAGE_SIZE) as usize;
        job.answer(Answer::Read(request.keep(), bytes));
    }

    /// As [`Pager::begin_write`].
    fn write_out(&self, request: WriteRequest<'_>) {
        let pages = request.first_page()..request.first_page() + request.pages();
        let placed = self.volume.lock().place(request.file(), pages);
        let stored = placed.and_then(|store| {
            let end = store.map(|store| Ended { call: settle, with: store });
            // The blocks of the store are freed before the request fails.
            let failed = |_: &PagerError| {
                if let Some(end) = &end {
                    (end.call)(end.with, false);
                }
            };
            let job = self.store(&request, store).inspect_err(failed)?;
            Ok((job, end))
        });
        match stored {
            Ok((job, end)) => job.answer(Answer::Write(request.keep(), end)),
            Err(error) => request.fail(error),
        }
    }

    /// As [`Pager::resize`].
    fn set_size(&self, file: u64, size: u64) -> Result<(), PagerError> {
        {
            let mut volume = self.volume.lock();
            volume.note_change(file, time::real_time());
            let record = volume.record(file).ok_or(PagerError::InputOutput)?;
            if size >= record.size {
                // The file's block is written later: when the file is synchronized or closed, by
                // `msync`, or by the thread that stores pages early.
                record.size = size;
                return Ok(());
            }
        }
        self.cut(file, size.div_ceil(PAGE_SIZE)..u64::MAX, Some(size))
    }

    /// As [`Pager::removed`].
    fn object_ended(&self, file: u64) {
        let has_name = match self.volume.lock().record(file) {
            Some(record) => record.name.is_some(),
            None => return,
        };
        // These reservations are of pages that no write has dirtied after all.
        self.volume.lock().unreserve(file, &(0..u64::MAX));
        // No reader is left for an error. The next commit continues the removal.
        if has_name {
            let _ = self.write_record(file);
        } else if self.remove(file).is_err() {
            self.volume.lock().set_orphan(file, true);
        }
    }
}

impl Pager for Storage {
    fn begin_read(&self, request: ReadRequest<'_>) {
        kernel_lock::inside(|| self.read_in(request));
    }

    fn begin_write(&self, request: WriteRequest<'_>) {
        kernel_lock::inside(|| self.write_out(request));
    }

    /// Without the kernel's lock in a fault: only the volume's lock guards it.
    fn make_writable(
        &self,
        file: u64,
        first_page: u64,
        pages: u64,
    ) -> Result<WriteAccess, PagerError> {
        let pages = first_page..first_page + pages;
        self.volume.lock().make_writable(file, &pages, time::real_time())?;
        Ok(WriteAccess::Granted)
    }

    fn resize(&self, file: u64, size: u64) -> Result<(), PagerError> {
        kernel_lock::inside(|| self.set_size(file, size))
    }

    fn discard(&self, file: u64, first_page: u64, pages: u64) -> Result<(), PagerError> {
        let pages = first_page..first_page.saturating_add(pages);
        kernel_lock::inside(|| self.cut(file, pages, None))
    }

    fn removed(&self, file: u64) {
        kernel_lock::inside(|| self.object_ended(file));
    }
}
