//! One file on a storage of few blocks. A block is reserved before a mapping writes to a page that
//! has none.

use std::collections::BTreeSet;
use std::sync::Mutex;

use bindery::{Pager, PagerError, Preparation, ReadBuffer, StoredBytes, WriteAccess};

use super::held_pager::{HeldFiles, Io};
use crate::support::objects::PAGE;

#[derive(Default)]
struct Blocks {
    all: usize,
    stored: BTreeSet<u64>,
    reserved: BTreeSet<u64>,
    /// Whether the pager reserves blocks only in [`Pager::prepare_write`].
    are_reserved_later: bool,
    /// Whether the pager prepares for tasks, and whether it is done.
    prepares: Option<bool>,
    /// The answer of [`Pager::make_writable`], whatever has room.
    refusal: Option<PagerError>,
}

impl Blocks {
    fn lacking(&self, pages: std::ops::Range<u64>) -> Vec<u64> {
        let has = |page: &u64| self.stored.contains(page) || self.reserved.contains(page);
        pages.filter(|page| !has(page)).collect()
    }

    fn reserve(&mut self, pages: std::ops::Range<u64>) -> Result<(), PagerError> {
        let lacking = self.lacking(pages);
        if lacking.len() > self.all - self.stored.len() - self.reserved.len() {
            return Err(PagerError::NoSpace);
        }
        self.reserved.extend(lacking);
        Ok(())
    }

    fn release(&mut self, from: u64, end: u64) {
        let is_kept = |page: &u64| !(from..end).contains(page);
        self.stored.retain(is_kept);
        self.reserved.retain(is_kept);
    }
}

/// The file, with number 1. One call can be held.
pub struct ReservingFiles {
    pub held: HeldFiles,
    blocks: Mutex<Blocks>,
}

impl ReservingFiles {
    /// An empty file on a storage of this number of blocks.
    pub fn new(blocks: usize) -> Self {
        let blocks = Mutex::new(Blocks { all: blocks, ..Blocks::default() });
        Self { held: HeldFiles::new(), blocks }
    }

    /// Reserves blocks only without locks from now on.
    pub fn reserve_later(&self) {
        self.blocks.lock().unwrap().are_reserved_later = true;
    }

    /// Prepares for tasks from now on.
    pub fn prepare_for_tasks(&self) {
        self.blocks.lock().unwrap().prepares = Some(false);
    }

    /// Ends the preparations for tasks, without a word to them.
    pub fn finish_preparations(&self) {
        self.blocks.lock().unwrap().prepares = Some(true);
    }

    /// Lets no page become writable from now on, with this error, or `None` to end that.
    pub fn refuse(&self, error: Option<PagerError>) {
        self.blocks.lock().unwrap().refusal = error;
    }

    /// The pages that have a reserved block.
    pub fn reserved(&self) -> Vec<u64> {
        self.blocks.lock().unwrap().reserved.iter().copied().collect()
    }

    /// The pages that have a block with content.
    pub fn stored(&self) -> Vec<u64> {
        self.blocks.lock().unwrap().stored.iter().copied().collect()
    }

    /// The first page and the number of pages of each request of this kind so far.
    pub fn asked(&self, io: Io) -> Vec<(u64, u64)> {
        let asked = self.held.asked.lock().unwrap();
        let of_kind = asked.iter().filter(|(what, ..)| *what == io);
        of_kind.map(|(_, first, pages)| (*first, *pages)).collect()
    }
}

impl Pager for ReservingFiles {
    fn read(&self, file: u64, page: u64, into: &mut ReadBuffer<'_>) -> Result<(), PagerError> {
        self.held.read(file, page, into)
    }

    fn write(&self, file: u64, page: u64, from: &[StoredBytes<'_>]) -> Result<(), PagerError> {
        let pages: u64 = from.iter().map(|piece| piece.len().div_ceil(PAGE as usize) as u64).sum();
        let blocks = || self.blocks.lock().unwrap();
        blocks().reserve(page..page + pages)?;
        self.held.write(file, page, from)?;
        blocks().reserved.retain(|reserved| !(page..page + pages).contains(reserved));
        blocks().stored.extend(page..page + pages);
        Ok(())
    }

    fn make_writable(&self, _: u64, first: u64, pages: u64) -> Result<WriteAccess, PagerError> {
        self.held.enter(Io::MakeWritable, first, pages);
        let mut blocks = self.blocks.lock().unwrap();
        if let Some(error) = blocks.refusal {
            return Err(error);
        }
        if blocks.are_reserved_later && !blocks.lacking(first..first + pages).is_empty() {
            return Ok(WriteAccess::Later);
        }
        blocks.reserve(first..first + pages).map(|()| WriteAccess::Granted)
    }

    fn prepare_write(&self, _: u64, first: u64, pages: u64) -> Result<(), PagerError> {
        self.held.enter(Io::PrepareWrite, first, pages);
        self.blocks.lock().unwrap().reserve(first..first + pages)
    }

    fn begin_prepare_write(
        &self,
        _: u64,
        first: u64,
        pages: u64,
    ) -> Result<Preparation, PagerError> {
        let mut blocks = self.blocks.lock().unwrap();
        let Some(is_done) = blocks.prepares else { return Ok(Preparation::InThread) };
        self.held.enter(Io::PrepareWrite, first, pages);
        if !is_done {
            return Ok(Preparation::Begun);
        }
        blocks.reserve(first..first + pages).map(|()| Preparation::Complete)
    }

    fn resize(&self, file: u64, size: u64) -> Result<(), PagerError> {
        self.held.enter(Io::Discard, size.div_ceil(PAGE), 1);
        self.blocks.lock().unwrap().release(size.div_ceil(PAGE), u64::MAX);
        self.held.resize(file, size)
    }

    fn discard(&self, file: u64, first: u64, pages: u64) -> Result<(), PagerError> {
        self.blocks.lock().unwrap().release(first, first + pages);
        // Held when the pager has freed the blocks.
        self.held.enter(Io::Discard, first, pages);
        self.held.discard(file, first, pages)
    }

    fn removed(&self, file: u64) {
        self.held.removed(file);
    }
}
