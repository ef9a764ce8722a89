//! The state that the threads of the models share, and their steps.

use crate::sync::model::cell::UnsafeCell;
use crate::sync::model::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use crate::sync::model::sync::atomic::{AtomicU32, AtomicU64};
use crate::sync::model::sync::{Mutex, MutexGuard, RwLock};
use crate::sync::model::thread;

use crate::addr::{Frame, Order};
use crate::folio::{REFERENCE, lock_unless_writeback, publish, refer, unlock};
use crate::frame::meta::FOLIO_LOCK;
use crate::swap::slot_state::{ClaimError, SlotState, claim_all, hold_cached, name_all};
use crate::sync::parking::model::{SecondLook, Sleepers};

/// The number of pages of the run, and of its slots.
pub(super) const PAGES: usize = 2;
/// The content of page 0; that of page 1 is one more.
pub(super) const CONTENT: u32 = 10;
/// The value that the parent stores in page 0.
pub(super) const STORED: u32 = 20;
/// The value that the next user of a slot or a frame stores.
const OTHER: u32 = 99;

/// An entry that refers to the slot of its page. Bits 8 and up of a leaf are the number of its
/// frame.
const SWAPPED: u32 = 1;
/// An entry that maps a page.
const LEAF: u32 = 2;
/// The page is exclusive; a leaf may be writable.
const EXCLUSIVE: u32 = 4;
const FRAME_SHIFT: u32 = 8;

/// The rule that a model leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Omit {
    Nothing,
    /// Either all slots of a run are claimed or none.
    WholeClaim,
    /// Slots are claimed under the lock of their cluster.
    ClaimUnderLock,
    /// A fault that finds the page in the cache waits for the folio's lock.
    FolioLock,
    /// A fork adds references to slots under the lock of their cluster.
    NameUnderLock,
    /// A fork clears the exclusive bit of the entries whose slots it shares.
    Shared,
}

/// A folio of the run's pages.
struct Folio {
    state: AtomicU32,
    count: AtomicU64,
    /// The number of the folio's pages in the swap cache. Changed under the lock of the cluster.
    cached: AtomicU32,
    content: [UnsafeCell<u32>; PAGES],
}

/// An address space with one VMA and one table.
struct Space {
    vma: RwLock<()>,
    table: Mutex<()>,
    entries: [AtomicU32; PAGES],
}

pub(super) struct World {
    omit: Omit,
    sleepers: Sleepers,
    /// The lock of the cluster.
    cluster: Mutex<()>,
    cells: [AtomicU64; PAGES],
    /// The store's content of each slot.
    store: [UnsafeCell<u32>; PAGES],
    /// The number of times that each slot became free.
    freed: [AtomicU32; PAGES],
    folios: [Folio; 4],
    spaces: [Space; 3],
}

// SAFETY: the model tracks each access to the cells and reports races.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

/// A reference to a folio.
struct Held<'a> {
    world: &'a World,
    folio: usize,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.world.release(self.folio);
    }
}

/// An access by a thread to an address.
#[derive(Clone, Copy)]
pub(super) struct Access {
    pub(super) space: usize,
    pub(super) page: usize,
    /// The maximum number of pages of the folio that the thread reads.
    pub(super) most: usize,
    pub(super) write: bool,
}

impl World {
    /// A world in which the first `sharers` spaces have their pages in swap, shared if `sharers` is
    /// more than one.
    pub(super) fn new(omit: Omit, sharers: usize) -> Self {
        let exclusive = if sharers == 1 { EXCLUSIVE } else { 0 };
        let folio = |_| Folio {
            state: AtomicU32::new(0),
            count: AtomicU64::new(0),
            cached: AtomicU32::new(0),
            content: core::array::from_fn(|_| UnsafeCell::new(OTHER)),
        };
        let space = |number: usize| Space {
            vma: RwLock::new(()),
            table: Mutex::new(()),
            entries: core::array::from_fn(|_| {
                AtomicU32::new(if number < sharers { SWAPPED | exclusive } else { 0 })
            }),
        };
        let cell = SlotState::STORED | sharers as u64;
        Self {
            omit,
            sleepers: Sleepers::new(SecondLook::Taken),
            cluster: Mutex::new(()),
            cells: core::array::from_fn(|_| AtomicU64::new(cell)),
            store: core::array::from_fn(|page| UnsafeCell::new(CONTENT + page as u32)),
            freed: core::array::from_fn(|_| AtomicU32::new(0)),
            folios: core::array::from_fn(folio),
            spaces: core::array::from_fn(space),
        }
    }

    fn cell(&self, page: usize) -> SlotState {
        // Acquire: like `Swap::state_of`.
        SlotState(self.cells[page].load(Acquire))
    }

    fn lock_cluster_unless(&self, omit: Omit) -> Option<MutexGuard<'_, ()>> {
        (self.omit != omit).then(|| self.cluster.lock().unwrap())
    }

    fn content(&self, frame: Frame) -> &UnsafeCell<u32> {
        &self.folios[frame.0 as usize / PAGES].content[frame.0 as usize % PAGES]
    }

    /// Drops a reference or a mapping. Dropping the last one frees the folio, and another page gets
    /// its frames.
    fn release(&self, folio: usize) {
        let folio = &self.folios[folio];
        if folio.count.fetch_sub(REFERENCE, AcqRel) == REFERENCE {
            for content in &folio.content {
                // SAFETY: as for `Sync`.
                content.with_mut(|content| unsafe { content.write(OTHER) });
            }
        }
    }

    /// An access: faults until it succeeds, and then loads or stores. Returns the value loaded or
    /// stored. The folio `own` and the one after it belong to the thread and are fresh.
    pub(super) fn access(&self, what: Access, own: usize) -> u32 {
        let space = &self.spaces[what.space];
        loop {
            let vma = space.vma.read().unwrap();
            let entry = space.entries[what.page].load(Acquire);
            let done = if entry & LEAF == 0 {
                self.swap_in(what, own)
            } else if what.write && entry & EXCLUSIVE == 0 {
                self.copy_on_write(what, own + 1)
            } else {
                let content = self.content(Frame(entry >> FRAME_SHIFT));
                if what.write {
                    // SAFETY: as for `Sync`.
                    content.with_mut(|content| unsafe { content.write(STORED) });
                    return STORED;
                }
                // SAFETY: as for `Sync`.
                return content.with(|content| unsafe { content.read() });
            };
            drop(vma);
            if !done {
                thread::yield_now();
            }
        }
    }

    /// `AddressSpace::swap_in`. Returns whether something has changed.
    fn swap_in(&self, what: Access, own: usize) -> bool {
        if self.cell(what.page).frame().is_none() {
            return self.read_in(what, own);
        }
        let look = || self.cell(what.page).frame();
        let found = hold_cached(look, |frame| {
            let folio = frame.0 as usize / PAGES;
            refer(&self.folios[folio].count).then(|| Held { world: self, folio })
        });
        let Some(found) = found else { return false };
        let state = &self.folios[found.folio].state;
        let locked = self.omit != Omit::FolioLock;
        if locked {
            assert!(lock_unless_writeback(state, &self.sleepers), "no device writes here");
        }
        self.map(what.space, found.folio);
        if locked {
            unlock(state, &self.sleepers, || ());
        }
        true
    }

    /// `AddressSpace::read_in`: the largest folio whose slots can be claimed.
    fn read_in(&self, what: Access, own: usize) -> bool {
        if what.most == PAGES && self.read_folio(what.space, own, 0, PAGES).is_ok() {
            return true;
        }
        match self.read_folio(what.space, own, what.page, 1) {
            Ok(()) => true,
            Err(ClaimError::Cached) => false,
            Err(ClaimError::Gone) => {
                let entry = self.spaces[what.space].entries[what.page].load(Acquire);
                assert_ne!(entry & LEAF, 0, "an entry names a slot that is free");
                true
            }
        }
    }

    /// `AddressSpace::read_folio` for `pages` pages from `first` on.
    fn read_folio(
        &self,
        space: usize,
        own: usize,
        first: usize,
        pages: usize,
    ) -> Result<(), ClaimError> {
        let folio = &self.folios[own];
        folio.state.store(FOLIO_LOCK, Relaxed);
        publish(&folio.count, 2 * REFERENCE);
        if let Err(error) = self.claim(own, first, pages) {
            folio.state.store(0, Relaxed);
            folio.count.store(0, Release);
            return Err(error);
        }
        for page in first..first + pages {
            // SAFETY: as for `Sync`.
            let stored = self.store[page].with(|stored| unsafe { stored.read() });
            // SAFETY: as for `Sync`.
            folio.content[page].with_mut(|content| unsafe { content.write(stored) });
        }
        self.map(space, own);
        unlock(&folio.state, &self.sleepers, || ());
        self.release(own);
        Ok(())
    }

    /// `claim_slots`.
    fn claim(&self, own: usize, first: usize, pages: usize) -> Result<(), ClaimError> {
        let head = Frame((own * PAGES + first) as u32);
        let cluster = self.lock_cluster_unless(Omit::ClaimUnderLock);
        let cells = &self.cells[first..first + pages];
        match self.omit {
            Omit::WholeClaim => {
                claim_all(&cells[..1], head, Order(1))?;
                for (page, cell) in (1..).zip(&cells[1..]) {
                    cell.store(
                        SlotState(cell.load(Relaxed)).coming_in(head.plus(page), Order(1)).0,
                        Relaxed,
                    );
                }
            }
            _ => claim_all(cells, head, Order(1))?,
        }
        self.folios[own].cached.store(pages as u32, Relaxed);
        drop(cluster);
        Ok(())
    }

    /// `AddressSpace::map_swapped`: replaces the entries that refer to the folio's slots by leaves,
    /// and drops their references.
    fn map(&self, space: usize, folio: usize) {
        let space = &self.spaces[space];
        let ours =
            |page: usize| self.cell(page).frame() == Some(Frame((folio * PAGES + page) as u32));
        let mut put = [false; PAGES];
        let table = space.table.lock().unwrap();
        for page in 0..PAGES {
            let entry = space.entries[page].load(Relaxed);
            if entry & SWAPPED != 0 && ours(page) {
                self.folios[folio].count.fetch_add(REFERENCE, Relaxed);
                let frame = ((folio * PAGES + page) as u32) << FRAME_SHIFT;
                space.entries[page].store(frame | LEAF | entry & EXCLUSIVE, Release);
                put[page] = true;
            }
        }
        drop(table);
        self.settle(folio, put);
    }

    /// `CachedFolio::unlock`.
    fn settle(&self, folio: usize, put: [bool; PAGES]) {
        let cluster = self.cluster.lock().unwrap();
        let before = self.folios[folio].cached.load(Relaxed);
        let mut cached = before;
        for page in 0..PAGES {
            let old = self.cell(page);
            if old.frame() != Some(Frame((folio * PAGES + page) as u32)) {
                continue;
            }
            let mut now = SlotState((old.0 & !SlotState::BUSY) - u64::from(put[page]));
            if now.entries() == 0 {
                now = SlotState::FREE;
                cached -= 1;
                self.reuse(page);
            }
            self.cells[page].store(now.0, Relaxed);
        }
        self.folios[folio].cached.store(cached, Relaxed);
        drop(cluster);
        if before > 0 && cached == 0 {
            self.release(folio);
        }
    }

    /// The slot is free: another page is stored there.
    fn reuse(&self, slot: usize) {
        self.freed[slot].fetch_add(1, Relaxed);
        // SAFETY: as for `Sync`.
        self.store[slot].with_mut(|stored| unsafe { stored.write(OTHER) });
    }

    /// A write fault on a leaf that does not allow writes: the space gets a copy. The VMA is
    /// locked.
    fn copy_on_write(&self, what: Access, own: usize) -> bool {
        let space = &self.spaces[what.space];
        let _table = space.table.lock().unwrap();
        let shared = Frame(space.entries[what.page].load(Relaxed) >> FRAME_SHIFT);
        // SAFETY: as for `Sync`.
        let found = self.content(shared).with(|content| unsafe { content.read() });
        let copy = Frame((own * PAGES + what.page) as u32);
        // SAFETY: as for `Sync`.
        self.content(copy).with_mut(|content| unsafe { content.write(found) });
        publish(&self.folios[own].count, REFERENCE);
        space.entries[what.page].store(copy.0 << FRAME_SHIFT | LEAF | EXCLUSIVE, Release);
        self.release(shared.0 as usize / PAGES);
        true
    }

    /// `copy::copy_to` for page 0: the child shares the parent's page. A store holds the VMA
    /// locked, which replaces the flush.
    pub(super) fn fork(&self, parent: usize, child: usize) {
        let [parent, child] = [parent, child].map(|space| &self.spaces[space]);
        let _vma = parent.vma.write().unwrap();
        let _table = parent.table.lock().unwrap();
        let entry = parent.entries[0].load(Relaxed);
        if entry & SWAPPED != 0 {
            let cluster = self.lock_cluster_unless(Omit::NameUnderLock);
            assert!(name_all(&self.cells[..1]));
            drop(cluster);
        } else {
            let folio = (entry >> FRAME_SHIFT) as usize / PAGES;
            self.folios[folio].count.fetch_add(REFERENCE, Relaxed);
        }
        let shared = entry & !EXCLUSIVE;
        child.entries[0].store(shared, Relaxed);
        let keeps = self.omit == Omit::Shared && entry & SWAPPED != 0;
        parent.entries[0].store(if keeps { entry } else { shared }, Relaxed);
    }

    /// Asserts that swap is empty and nothing has leaked: each folio has one reference for each
    /// entry that maps it.
    pub(super) fn assert_all_is_back(&self, pages: usize) {
        for slot in 0..pages {
            assert_eq!(
                self.cell(slot),
                SlotState::FREE,
                "a slot is named by nothing, and not free"
            );
            assert_eq!(self.freed[slot].load(Acquire), 1, "a slot was freed more than once");
        }
        let entries = self.spaces.iter().flat_map(|space| &space.entries[..pages]);
        let entries: std::vec::Vec<_> = entries.map(|entry| entry.load(Acquire)).collect();
        for (number, folio) in self.folios.iter().enumerate() {
            let maps = |entry: &&u32| {
                **entry & LEAF != 0 && (**entry >> FRAME_SHIFT) as usize / PAGES == number
            };
            let mappings = entries.iter().filter(maps).count() as u64;
            assert_eq!(
                folio.count.load(Acquire),
                mappings * REFERENCE,
                "the count of a folio is wrong"
            );
            assert_eq!(folio.state.load(Acquire), 0, "a folio stays locked");
        }
    }

    /// The number of referenced folios.
    pub(super) fn folios_in_use(&self) -> usize {
        self.folios.iter().filter(|folio| folio.count.load(Acquire) > 0).count()
    }

    /// Removes page 1, for the models of one page.
    pub(super) fn take_second_page_away(&self) {
        self.cells[1].store(SlotState::FREE.0, Relaxed);
        self.spaces.iter().for_each(|space| space.entries[1].store(0, Relaxed));
    }
}
