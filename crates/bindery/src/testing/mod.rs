//! Hooks for tests, which write entries that no operation writes yet and break every invariant on
//! purpose.
//!
//! A check is meaningful only if it has been seen to fail. So for each property that the auditor
//! ([`crate::check`]) or a strict TLB checks, a hook here breaks it behind the core's back. Each
//! damage can be undone (a toggle by itself, a sum by its negative), so a test leaves a system that
//! can be dropped and found clean.
//!
//! | hook | target |
//! |---|---|
//! | [`plant`], [`plant_huge`] | swap entries and markers in empty places: legal, but no operation makes them yet |
//! | [`raw_entry`], [`set_raw_entry`], [`clear_accessed_and_dirty`] | entries as in memory |
//! | [`table_at`], [`damage_table`] | a table's metadata and deposit |
//! | [`damage_mapping`] | a VMA without its tables |
//! | [`damage_folio`], [`damage_memory`], [`leak_frame`] | counts, free lists, lost frames |
//! | [`damage_slot`], [`with_pin`] | counts of swap slots; a folio pinned by a driver |
//! | [`walk_anonymous`], [`UnmapWalk`], [`anon_groups`] | walks of the reverse map |
//! | [`reclaim_page`], [`reclaim_frame`] | reclaim of a given folio of an object |
//! | [`is_vma_locked`] | the lock of a VMA |
//! | [`with_mutex`], [`with_vma_written`], [`with_vma_read`], [`with_family_locked`], [`with_pages_locked`] | locks, held while other calls run |
//! | [`fail_one_allocation`], [`failed_allocations`] | the failure of one allocation, and the number of failures |
//!
//! No other call may run on the address space at the same time, except while a hook holds a lock. The
//! hooks exist only with the feature `testing`.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod locks;
mod walks;

use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;

use crate::addr::{Frame, Order, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Attributes, Entry, Kind, Level};
use crate::frame::{AllocateFor, meta};
pub use crate::object::damage::{ObjectDamage, damage_object};
pub use crate::object::reclaim::{ObjectFolio, Spare, frame_of_page, reclaim_frame, reclaim_page};
use crate::platform::Platform;
use crate::rmap::{AnonGroup, Rekeyed};
pub use crate::space::move_pages::testing::{PageMove, lock_folio, move_pages};
use crate::stats::Counts;
use crate::swap::SlotRun;
pub use crate::swap::damage::{damage_slot, with_pin};
use crate::table::locking::{Depth, LockTree};
use crate::table::look;
use crate::table::look::MappedRun;
use crate::table::run::Entries;
use crate::table::{EntryAt, ReadSection, Table, TablePool, free_table, new_table, run};
use crate::vma::{MappingFlags, Purpose, Vma};
use crate::{AddressSpace, Memory, Protection};
pub use locks::{
    with_changes_held, with_family_locked, with_mutex, with_pages_locked, with_vma_read,
    with_vma_written,
};
pub use walks::{AnonymousWalk, UnmapWalk, walk_anonymous};

/// Writes `count` absent entries from `at` on: `first`, then the successor of each previous entry
/// (the next slot; markers are all equal).
///
/// ```text
/// plant(at, 3, Swap { slot: 7 })   | swap 7 | swap 8 | swap 9 |
/// plant(at, 3, Marker(Poison))     | poison | poison | poison |
/// ```
///
/// The slots of swap entries exist from then on, with lost content, so an access returns
/// [`FaultError::Bus`](crate::FaultError::Bus). [`forget_areas`] removes the slots when no entry
/// remains.
///
/// Panics if an entry is not empty, or if memory runs out. ProtNone leaves belong to folios and are
/// created by `mprotect` instead.
pub fn plant<P: Platform>(space: &AddressSpace<'_, P>, at: VirtAddr, count: u32, first: Absent) {
    assert!(!matches!(first, Absent::ProtNone { .. }), "PROT_NONE leaves cannot be planted");
    let first = P::Arch::encode_absent(first);
    for page in 0..count {
        let at = at.offset(u64::from(page) << PAGE_SHIFT);
        plant_one(space, at, Level::PTE, P::Arch::nth_absent(first, page));
    }
}

/// Writes one absent level-2 entry (2 MiB) at `at`, which must be a multiple of 2 MiB, with the
/// deposited table that splits it. A swap entry refers to consecutive slots from its own on.
///
/// Panics like [`plant`].
pub fn plant_huge<P: Platform>(space: &AddressSpace<'_, P>, at: VirtAddr, first: Absent) {
    assert!(!matches!(first, Absent::ProtNone { .. }), "PROT_NONE leaves cannot be planted");
    assert!(at.is_aligned(P::Arch::PMD.span()), "{at} does not begin an entry of level 2");
    plant_one(space, at, Level::PMD, P::Arch::encode_absent(first));
}

fn plant_one<P: Platform>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
    level: Level<P::Arch>,
    entry: Entry,
) {
    let page_table = &space.page_table;
    let range = VirtRange::raw(at.0, at.0 + level.span());
    let section = page_table.read_section();
    let mut cursor = page_table.cursor(&section, range, Depth::Floor(Level::PTE));
    let pool = &mut TablePool::new(page_table.memory);
    let table = cursor.table_at(at, level, pool).expect("memory for the page_table");
    let index = level.index_of(at);
    let word = &page_table.entries(table)[index.position()];
    assert_eq!(word.load(Relaxed), 0, "the entry of {at} is not empty");
    if level > Level::PTE {
        let deposit = new_table(page_table.memory, level.below(), &mut cursor.counts);
        page_table.deposit_table(table, deposit.expect("memory for the deposit"));
    }
    page_table.meta(table).note_guards();
    if let Some(Absent::Swap { device, slot, .. }) = P::Arch::decode_absent(entry) {
        let pages = level.order().pages();
        SlotRun { area: device, first: slot, count: pages }.plant(page_table.memory);
        cursor.counts.swap_pages += u64::from(pages);
    }
    word.store(entry.0, Relaxed);
    page_table.change_entry_count(table, 1, 0);
}

/// Removes the swap areas of [`plant`]. Panics if entries refer to their slots.
pub fn forget_areas<P: Platform>(memory: &Memory<P>) {
    let areas: arrayvec::ArrayVec<_, { crate::MAX_SWAP_AREAS }> = memory.swap_areas().collect();
    for area in areas {
        memory.swap_off(&area).expect("no entry names a slot");
    }
}

/// The table of `level` that covers `at`, if it exists.
pub fn table_at<P: Platform>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
    level: Level<P::Arch>,
) -> Option<Frame> {
    let section = space.page_table.read_section();
    table_in(space, &section, at, level).map(Table::frame)
}

/// As [`table_at`], in a read section.
fn table_in<'s, P: Platform>(
    space: &'s AddressSpace<'_, P>,
    section: &'s ReadSection<'_, P>,
    at: VirtAddr,
    level: Level<P::Arch>,
) -> Option<Table<'s>> {
    let tables = space.page_table.tables(section);
    let node = tables.descend(at, |node| node.level > level);
    (node.level == level).then_some(node.table)
}

fn table_or_panic<P: Platform>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
    level: Level<P::Arch>,
) -> Frame {
    table_at(space, at, level).unwrap_or_else(|| panic!("no table of level {level} at {at}"))
}

/// Whether a thread has the VMA at `at` locked. Waits for no lock. Returns true if no VMA exists
/// there, as if a writer held it.
pub fn is_vma_locked<P: Platform>(space: &AddressSpace<'_, P>, at: VirtAddr) -> bool {
    space.vmas.try_read(space.platform(), at).is_none_or(|guard| guard.is_shared())
}

/// Whether a thread has the mutex of the address space. Waits for no lock.
pub fn is_mutex_locked<P: Platform>(space: &AddressSpace<'_, P>) -> bool {
    space.vmas.is_locked()
}

/// The entry of `level` for `at` as in memory (with the bits of a contiguous run), if its table
/// exists.
pub fn raw_entry<P: Platform>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
    level: Level<P::Arch>,
) -> Option<Entry> {
    let section = space.page_table.read_section();
    let table = table_in(space, &section, at, level)?;
    Some(run::load(space.page_table.entries(table), level.index_of(at)))
}

/// Writes only the entry of `level` for `at`, without a flush or a change of the entry count.
/// Returns the old entry. Panics if its table does not exist.
pub fn set_raw_entry<P: Platform>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
    level: Level<P::Arch>,
    entry: Entry,
) -> Entry {
    let section = space.page_table.read_section();
    let table = table_in(space, &section, at, level);
    let table = table.unwrap_or_else(|| panic!("no table of level {level} at {at}"));
    let word = &space.page_table.entries(table)[level.index_of(at).position()];
    Entry(word.swap(entry.0, Relaxed))
}

/// Clears the accessed and dirty state of all leaves, of any level, for `count` pages from `at` on,
/// as if they were not used or written since their content was saved; flushes TLBs. Other entries
/// do not change.
pub fn clear_accessed_and_dirty<P: Platform>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
    count: u32,
) {
    let page_table = &space.page_table;
    let frames = &page_table.memory.frames;
    let end = at.0 + (u64::from(count) << PAGE_SHIFT);
    for at in (at.0..end).step_by(PAGE_SIZE as usize).map(VirtAddr) {
        let section = page_table.read_section();
        let EntryAt { node, index, entry: raw } =
            page_table.peek(&section, at, &mut Counts::default());
        if node.level.kind(raw) != Kind::Leaf {
            continue;
        }
        let single = |entry| node.single(entry, index);
        let contig = node.in_contig(raw);
        P::Arch::replace_entry(&page_table.entries(node.table)[index.position()], raw, |entry| {
            let now = P::Arch::attributes(single(entry));
            let clean = Attributes { accessed: false, dirty: false, ..now };
            let clean = P::Arch::page_entry(P::Arch::frame(single(entry)), node.level, clean);
            if contig { P::Arch::set_contig(clean, index) } else { clean }
        });
        if let Some(folio) = frames.folio_of(P::Arch::frame(single(raw))) {
            frames.meta(folio.head).state.fetch_and(!meta::DIRTY, Relaxed);
        }
    }
    page_table.invalidate_now(VirtRange::raw(at.0, end), Level::PTE, &mut Counts::default());
}

/// Damage to a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TableDamage {
    /// Changes the entry count by this.
    LiveCount(i64),
    /// Flips the stray mark.
    ToggleStray,
    /// Flips the lock bit. Other threads wait for a locked table forever.
    ToggleLock,
    /// Flips the lowest bit of the level in the metadata.
    ToggleLevel,
    /// Changes the count of pending flushes by this.
    Pending(i32),
    /// Flips the mark that the table may have guards.
    ToggleGuards,
    /// Removes (and frees) one of the tables on deposit.
    LessDeposit,
    /// Adds one more table on deposit.
    MoreDeposit,
    /// Changes the address space's count of anonymous pages by this.
    AnonymousPages(i64),
}

/// Damages the table of `level` that covers `at`. Panics if it does not exist, or has no deposit to
/// remove.
pub fn damage_table<P: Platform>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
    level: Level<P::Arch>,
    damage: TableDamage,
) {
    let page_table = &space.page_table;
    let table = table_or_panic(space, at, level);
    let raw = page_table.memory.frames.meta(table);
    let state = &raw.state;
    let mut counts = Counts::default();
    match damage {
        TableDamage::LiveCount(by) => {
            let entry_count = i64::from(page_table.entry_count(table)) + by;
            raw.word.store(entry_count as u64, Relaxed);
        }
        TableDamage::ToggleStray => _ = state.fetch_xor(meta::STRAY, Relaxed),
        TableDamage::ToggleLock => _ = state.fetch_xor(meta::LOCK, Relaxed),
        TableDamage::ToggleLevel => _ = state.fetch_xor(1 << meta::ORDER_SHIFT, Relaxed),
        TableDamage::Pending(by) => {
            _ = raw.previous.fetch_add(by as u32, Relaxed);
        }
        TableDamage::ToggleGuards => _ = state.fetch_xor(meta::GUARDS, Relaxed),
        TableDamage::LessDeposit => {
            let deposit = page_table.withdraw_table(table).expect("a table on deposit");
            // SAFETY: 1. a table on deposit is a table; 2. it was just withdrawn.
            unsafe { free_table(page_table.memory, deposit, &mut counts) };
        }
        TableDamage::MoreDeposit => {
            let deposit = new_table(page_table.memory, Level::PTE, &mut counts);
            page_table.deposit_table(table, deposit.expect("memory for the deposit"));
        }
        // A level: the addition wraps.
        TableDamage::AnonymousPages(by) => {
            page_table.count(&Counts { anonymous_pages: by as u64, ..Counts::default() });
        }
    }
}

/// Damage to a VMA.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MappingDamage {
    /// Sets its protection, without its tables.
    Protection(Protection),
    /// Sets its end, without its tables.
    End(VirtAddr),
    /// Sets its end, without updating the index of VMAs.
    EndUnseen(VirtAddr),
}

/// Damages the VMA that contains `at`. Panics if no VMA exists there.
pub fn damage_mapping<P: Platform>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
    damage: MappingDamage,
) {
    let vmas = space.vmas.lock();
    let vma = vmas.view().at(at);
    let vma: &Vma = vma.unwrap_or_else(|| panic!("no mapping at {at}"));
    match damage {
        MappingDamage::Protection(protection) => {
            vma.set_flags(vma.flags().with_protection(protection));
        }
        MappingDamage::End(end) => {
            vma.set_end(end.0, &Rekeyed::unseen());
            vmas.bounds_changed(vma);
        }
        MappingDamage::EndUnseen(end) => vma.set_end(end.0, &Rekeyed::unseen()),
    }
}

/// Whether the content of the folio that is mapped at `at` may be dropped (`MADV_FREE`). Panics if
/// no folio is mapped there.
pub fn is_lazy<P: Platform>(space: &AddressSpace<'_, P>, at: VirtAddr) -> bool {
    let page = VirtRange::raw(at.0, at.0 + PAGE_SIZE);
    let mut lazy = None;
    look::survey(&space.page_table, page, |stretch| {
        if let MappedRun::Pages { folio: Some(folio), .. } = stretch.what {
            lazy = Some(space.memory().frames.folio(folio).is_lazy());
        }
    });
    lazy.unwrap_or_else(|| panic!("no folio at {at}"))
}

/// Damage to a folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FolioDamage {
    /// Changes the count of mappings by this.
    Mappings(i32),
    /// Changes the count of references by this.
    References(i32),
    /// Flips the page's anon-exclusive bit.
    ToggleExclusive,
}

/// Damages the folio that contains `page`. Panics if no folio contains it.
pub fn damage_folio<P: Platform>(memory: &Memory<P>, page: Frame, damage: FolioDamage) {
    let frames = &memory.frames;
    let folio = frames.folio_of(page).unwrap_or_else(|| panic!("{page:?} is in no folio"));
    let count = &frames.meta(folio.head).count;
    match damage {
        FolioDamage::Mappings(by) => {
            count.fetch_add((i64::from(by) << 32) as u64, Relaxed);
        }
        FolioDamage::References(by) => {
            count.fetch_add(i64::from(by) as u64, Relaxed);
        }
        FolioDamage::ToggleExclusive => {
            let number = page.0 - folio.head.0;
            if frames.folio(folio).exclusive().contains(number) {
                frames.folio(folio).exclusive().clear(number, 1);
            } else {
                frames.folio(folio).exclusive().set(number, 1);
            }
        }
    }
}

/// Takes a reference to the folio around `frame`, regardless of the frame's current use, like a
/// walker that has found the number in a list. Calls `f` with the folio's first frame and its
/// number of pages, and releases the reference. If the folio's lock is free, calls `f` with it
/// held, after reading the owner under it. `None` if the frame has no folio.
pub fn with_reference<P: Platform, R>(
    memory: &Memory<P>,
    frame: Frame,
    f: impl FnOnce(Frame, u32) -> R,
) -> Option<R> {
    let reference = memory.frames.try_hold(frame)?;
    let lock = reference.try_lock();
    if let Some(lock) = &lock {
        core::hint::black_box(lock.owner());
    }
    Some(f(reference.head, reference.pages()))
}

/// Damage to the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryDamage {
    /// Flips the order in a free block's metadata, so that it differs from its list's. A second
    /// call undoes it.
    ToggleFreeOrder,
    /// Frees a frame twice. Cannot be undone: refusals remain counted.
    DoubleFree,
    /// Allocates a VMA that is in no address space. Cannot be undone.
    LeakMapping,
}

/// Damages the memory. Panics if no free block or frame exists.
pub fn damage_memory<P: Platform>(memory: &Memory<P>, damage: MemoryDamage) {
    let frames = &memory.frames;
    match damage {
        MemoryDamage::ToggleFreeOrder => {
            // The damaged contiguous run itself may no longer appear free, or may be skipped.
            let mut found = None;
            frames.for_each_block(|frame, _, kind| {
                let listed = kind == meta::MetaKind::Free && frames.meta(frame).kind() == kind;
                found = found.or(listed.then_some(frame));
            });
            let block = found.expect("a free block");
            frames.meta(block).state.fetch_xor(1 << meta::ORDER_SHIFT, Relaxed);
        }
        MemoryDamage::DoubleFree => {
            let frame = leak_frame(memory);
            // SAFETY: 1. and 2. no other code uses the frame; at the second free, the frame is no
            // longer allocated.
            unsafe {
                frames.free(frame, Order::PAGE);
                frames.free(frame, Order::PAGE);
            }
        }
        MemoryDamage::LeakMapping => {
            let range = VirtRange::raw(0, PAGE_SIZE);
            // SAFETY: 1. the purpose contains no record.
            let vma = unsafe {
                Vma::new(range, Purpose::anonymous(MappingFlags::empty()), 0, NonNull::dangling())
            };
            memory.slab::<Vma>().allocate(frames, vma).expect("memory for a VMA");
        }
    }
}

/// Allocates a frame without a reference to it. Panics if no frame is free.
pub fn leak_frame<P: Platform>(memory: &Memory<P>) -> Frame {
    memory.frames.allocate(Order::PAGE, AllocateFor::Use).expect("a free frame")
}

/// Frees a frame, regardless of its use: a leaked frame to repair the memory, any other frame to
/// damage it.
///
/// # Safety
/// 1. No code reads or writes the frame until it is allocated again.
pub unsafe fn free_frame<P: Platform>(memory: &Memory<P>, frame: Frame) {
    // SAFETY: 1. and 2. the caller's obligation 1; a test may free a frame wrongly on purpose.
    unsafe { memory.frames.free(frame, Order::PAGE) };
}

/// The number of anon groups, including those that wait to be freed.
pub fn anon_groups<P: Platform>(memory: &Memory<P>) -> u64 {
    memory.slab::<AnonGroup>().objects(&memory.frames)
}

/// Runs `work` with the lock held of the folio that contains `page`. Panics if no folio contains it
/// or the lock is held.
pub fn with_folio_locked<P: Platform, R>(
    memory: &Memory<P>,
    page: Frame,
    work: impl FnOnce() -> R,
) -> R {
    let folio = memory.frames.folio_of(page).unwrap_or_else(|| panic!("{page:?} is in no folio"));
    let kept = memory.frames.folio(folio).keep().expect("room for a reference");
    let _lock = kept.try_lock().expect("a folio whose lock is free");
    work()
}

/// Makes only one allocation fail, after the next `after` allocations (frames, folios, VMAs; each
/// counts as one). With `None`, no allocation fails.
pub fn fail_one_allocation<P: Platform>(memory: &Memory<P>, after: Option<u64>) {
    memory.frames.inject.fail_once_after(after);
}

/// The number of allocations that have failed on purpose since the last request for failures.
pub fn failed_allocations<P: Platform>(memory: &Memory<P>) -> u64 {
    memory.frames.inject.failed()
}
