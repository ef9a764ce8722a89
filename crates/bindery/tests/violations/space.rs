//! Calls without the required lock, without reclaim, or beyond a VMA's permissions, which must not
//! compile. A module of `space`, so that the private items behind the rules are visible.
//!
//! Each pair of lines is the same call, once correct and once wrong. `tests/locks.rs` builds the
//! crate with the wrong lines of one kind, and expects the error that the comment names at each,
//! and no other. (The compiler reports type errors before it checks moves and borrows: two builds.)
//! Nothing here ever runs.

use crate::Memory;
use crate::addr::{Frame, Order, VirtAddr, VirtRange};
use crate::arch::{Arch, Attributes, Entry, Level};
use crate::error::{Error, Failure, NoMemory};
use crate::folio::{FolioLock, FreshFolio, LockedFolio, SwapPlace};
use crate::frame::{AllocateFor, Frames};
use crate::object::{PagesStay, Wait};
use crate::platform::Platform;
use crate::rmap::{RmapGuard, TreeLock, TreeReadGuard};
use crate::stats::Counts;
use crate::swap::content::ClaimedFolio;
use crate::swap::page_set::PageSet;
use crate::swap::{CachedFolio, SlotRun};
use crate::sync::rw_lock::{RwLock, WriteGuard};
use crate::table::edit::Edit;
use crate::table::locking::Depth;
use crate::table::run::Run;
use crate::table::span::Span;
use crate::table::{PageTable, ReadSection};
use crate::userfault::{UserfaultFault, UserfaultState, WaitSignals};
use crate::vma::{MappingFlags, Vma, VmaReadGuard, VmaWriteGuard};
use crate::vmas::{NewVma, Removed, ReservedVma, VmaIndex, VmaSet, VmaView};

use super::fault::{Fault, wait_for_known};
use super::sleep::MaySleep;
use super::{Access, AddressSpace};

/// The set of VMAs is read with the mutex.
pub(crate) fn look_up<P: Platform>(vmas: &VmaIndex<P>) {
    #[cfg(not(lock_violations = "types"))]
    let _ = vmas.lock().view().first_ending_after(0).is_some();
    #[cfg(lock_violations = "types")]
    let _ = vmas.view().first_ending_after(0).is_some(); //~ E0599
}

/// A view does not change the set.
pub(crate) fn insert<'op, 'm, P: Platform>(
    view: VmaView<'_, P>,
    set: &mut VmaSet<'op, 'm, P>,
    new: NewVma<'op, 'm, P>,
) {
    #[cfg(not(lock_violations = "types"))]
    let _ = (view, set.insert(new));
    #[cfg(lock_violations = "types")]
    let _ = (set, view.insert(new)); //~ E0599
}

/// Flags change with the VMA locked for writing, not for reading.
pub(crate) fn change_flags<'op, P: Platform>(
    set: &mut VmaSet<'op, '_, P>,
    read: &VmaReadGuard<'op, P>,
    write: &VmaWriteGuard<'op, P>,
) {
    let flags = MappingFlags::empty();
    #[cfg(not(lock_violations = "types"))]
    let _ = (read, set.change_flags(write, flags));
    #[cfg(lock_violations = "types")]
    let _ = (write, set.change_flags(read, flags)); //~ E0308
}

/// Removing a VMA consumes its guard: it is not used as a locked one afterwards.
pub(crate) fn remove<'op, P: Platform>(set: &mut VmaSet<'op, '_, P>, vma: VmaWriteGuard<'op, P>) {
    #[cfg(not(lock_violations = "moves"))]
    set.change_flags(&vma, MappingFlags::empty());
    set.remove(vma);
    #[cfg(lock_violations = "moves")]
    set.change_flags(&vma, MappingFlags::empty()); //~ E0382
}

/// A new VMA borrows the records that it will hold, here from a VMA with the same records.
pub(crate) fn outlive_records<'op, 'm, P: Platform>(
    set: &mut VmaSet<'op, 'm, P>,
    reserved: ReservedVma<'m, P>,
    found: &'op Vma,
    any: &Vma,
) {
    let range = found.range();
    #[cfg(not(lock_violations = "moves"))]
    let new = (any, set.new_vma_in(reserved, range, found.purpose(), 0)).1;
    #[cfg(lock_violations = "moves")]
    let new = (found, set.new_vma_in(reserved, range, any.purpose(), 0)).1;
    #[cfg(not(lock_violations = "moves"))]
    set.insert(new);
    #[cfg(lock_violations = "moves")]
    set.insert(new); //~ E0621
}

/// A VMA found through the set is used only while the mutex is held.
pub(crate) fn outlive<P: Platform>(vmas: &VmaIndex<P>) {
    let guard = vmas.lock();
    let found = guard.view().first_ending_after(0);
    #[cfg(not(lock_violations = "moves"))]
    let _ = found.map(Vma::start);
    #[cfg(not(lock_violations = "moves"))]
    drop(guard);
    #[cfg(lock_violations = "moves")]
    let _ = (drop(guard), found.map(Vma::start)); //~ E0505
}

/// A fault releases its VMA before it waits, and does not use the VMA afterwards.
pub(crate) fn fault_unlocked<P: Platform>(space: &AddressSpace<'_, P>, vma: VmaReadGuard<'_, P>) {
    let fault = Fault::new(space, vma.vma(), VirtAddr(0), Access::Read);
    #[cfg(not(lock_violations = "moves"))]
    let _ = (fault.vma.start(), drop(vma));
    #[cfg(lock_violations = "moves")]
    let _ = (drop(vma), fault.vma.start()); //~ E0505
}

/// A wait consumes the VMA's lock.
pub(crate) fn wait_locked<P: Platform>(
    space: &AddressSpace<'_, P>,
    vma: VmaReadGuard<'_, P>,
    wait: Wait,
) {
    #[cfg(not(lock_violations = "moves"))]
    let _ = (vma.vma().start(), wait_for_known(space, vma, wait));
    #[cfg(lock_violations = "moves")]
    let _ = (wait_for_known(space, vma, wait), vma.vma().start()); //~ E0382
}

/// No cursor and no read section of a fault outlives the start of its wait.
pub(crate) fn wait_in_section<P: Platform>(
    space: &AddressSpace<'_, P>,
    vma: VmaReadGuard<'_, P>,
    other: VmaReadGuard<'_, P>,
    waits: [Wait; 2],
) {
    let [first, second] = waits;
    let fault = Fault::new(space, vma.vma(), VirtAddr(0), Access::Read);
    let section = fault.read_section();
    #[cfg(not(lock_violations = "moves"))]
    let _ = (drop(section), wait_for_known(space, vma, first));
    #[cfg(lock_violations = "moves")]
    let _ = (wait_for_known(space, vma, first), drop(section)); //~ E0505
    let fault = Fault::new(space, other.vma(), VirtAddr(0), Access::Read);
    let section = fault.read_section();
    let cursor = fault.cursor(&section);
    #[cfg(not(lock_violations = "moves"))]
    let _ = (drop(cursor), drop(section), wait_for_known(space, other, second));
    #[cfg(lock_violations = "moves")]
    let _ = (wait_for_known(space, other, second), drop(cursor)); //~ E0505
}

/// A call waits without VMA locks, cursors, edits and read sections.
pub(crate) fn sleep<P: Platform>(space: &AddressSpace<'_, P>, waits: [Wait; 3]) {
    let [first, second, third] = waits;
    let range = VirtRange::raw(0, 0);
    let mut call = MaySleep::new(space);
    let locked = call.lock_vma(VirtAddr(0));
    #[cfg(not(lock_violations = "moves"))]
    let _ = (drop(locked), call.wait(first));
    #[cfg(lock_violations = "moves")]
    let _ = (call.wait(first), drop(locked)); //~ E0502
    let section = call.page_table.read_section();
    #[cfg(not(lock_violations = "moves"))]
    let _ = (drop(section), call.wait(second));
    #[cfg(lock_violations = "moves")]
    let _ = (call.wait(second), drop(section)); //~ E0502
    let section = call.page_table.read_section();
    let cursor = call.page_table.cursor(&section, range, Depth::Floor(Level::PTE));
    #[cfg(not(lock_violations = "moves"))]
    let _ = (drop(cursor), drop(section), call.wait(third));
    #[cfg(lock_violations = "moves")]
    let _ = (call.wait(third), drop(cursor)); //~ E0502
}

/// The wait for a handler does not outlive the message, which is in the stack frame of the call.
pub(crate) fn handler_outlived<P: Platform>(
    platform: &P,
    state: &UserfaultState,
    message: UserfaultFault,
) {
    let mut _kept = None;
    #[cfg(not(lock_violations = "moves"))]
    state.with_queued(platform, message, |queued| {
        _kept = Some(queued.wait(platform, WaitSignals::Signal));
    });
    #[cfg(lock_violations = "moves")]
    state.with_queued(platform, message, |queued| _kept = Some(queued)); //~ E0521
}

/// An operation in a VMA does not outlive the closure that borrows it while the VMA is locked.
pub(crate) fn vma_op_outlived<P: Platform>(space: &AddressSpace<'_, P>, vma: VmaReadGuard<'_, P>) {
    let mut _kept = None;
    #[cfg(not(lock_violations = "moves"))]
    space.operate_in(vma, |op| _kept = Some(op.vma.end()));
    #[cfg(lock_violations = "moves")]
    space.operate_in(vma, |op| _kept = Some(op.vma)); //~ E0521
}

/// Items that an operation removes are freed after the operation.
pub(crate) fn free_too_early<P: Platform>(space: &AddressSpace<'_, P>, mut removed: Removed) {
    let mut guard = space.vmas.lock();
    // SAFETY: 1. both belong to this address space.
    let set = unsafe { guard.set(&space.page_table, &mut removed) };
    let found = set.first_ending_after(0);
    #[cfg(not(lock_violations = "moves"))]
    let _ = (found.map(Vma::start), removed.is_empty());
    #[cfg(lock_violations = "moves")]
    let _ = (core::mem::take(&mut removed), found.map(Vma::start)); //~ E0499
}

/// Tables are found without locks only in a read section.
pub(crate) fn peek<P: Platform>(page_table: &PageTable<'_, P>, section: &ReadSection<'_, P>) {
    let mut counts = Counts::default();
    #[cfg(not(lock_violations = "types"))]
    let _ = (section, page_table.peek(section, VirtAddr(0), &mut counts));
    #[cfg(lock_violations = "types")]
    let _ = (section, page_table.peek(VirtAddr(0), &mut counts)); //~ E0061
}

/// A read section that has ended proves nothing.
pub(crate) fn leave<P: Platform>(page_table: &PageTable<'_, P>, section: ReadSection<'_, P>) {
    #[cfg(not(lock_violations = "moves"))]
    let _ = (page_table.leaf_table(&section, VirtAddr(0)).is_some(), drop(section));
    #[cfg(lock_violations = "moves")]
    let _ = (drop(section), page_table.leaf_table(&section, VirtAddr(0)).is_some()); //~ E0382
}

/// The entries of a locked range are not used after the section, although the tree still exists.
pub(crate) fn use_entry_later<P: Platform>(
    page_table: &PageTable<'_, P>,
    section: ReadSection<'_, P>,
) {
    let range = VirtRange::raw(0, 0);
    let found = page_table.cursor(&section, range, Depth::Floor(Level::PTE)).entry_at(VirtAddr(0));
    #[cfg(not(lock_violations = "moves"))]
    let _ = (page_table.entries(found.node.table).len(), drop(section));
    #[cfg(lock_violations = "moves")]
    let _ = (drop(section), page_table.entries(found.node.table).len()); //~ E0505
}

/// The entries of a table are reached only from a found table: a number proves nothing.
pub(crate) fn use_number<P: Platform>(page_table: &PageTable<'_, P>, section: &ReadSection<'_, P>) {
    let Some(found) = page_table.leaf_table(section, VirtAddr(0)) else { return };
    #[cfg(not(lock_violations = "types"))]
    let _ = page_table.entries(found.table).len();
    #[cfg(lock_violations = "types")]
    let _ = page_table.entries(found.table.frame()).len(); //~ E0308
}

/// A found table is not used after the section.
pub(crate) fn use_later<P: Platform>(page_table: &PageTable<'_, P>, section: ReadSection<'_, P>) {
    let Some(found) = page_table.leaf_table(&section, VirtAddr(0)) else { return };
    #[cfg(not(lock_violations = "moves"))]
    let _ = (page_table.entries(found.table).len(), drop(section));
    #[cfg(lock_violations = "moves")]
    let _ = (drop(section), page_table.entries(found.table).len()); //~ E0505
}

/// A page of an object is mapped only while the object's pages cannot be dropped.
pub(crate) fn map_object<P: Platform>(
    space: &AddressSpace<'_, P>,
    vma: &Vma,
    at: VirtAddr,
    stay: &PagesStay,
) {
    let Some(object) = vma.object() else { return };
    #[cfg(not(lock_violations = "types"))]
    let _ = Fault::new(space, vma, at, Access::Read).map_object(object, stay);
    #[cfg(lock_violations = "types")]
    let _ = (stay, Fault::new(space, vma, at, Access::Read).map_object(object)); //~ E0061
}

/// A fault maps a page with permissions that its mapping has.
pub(crate) fn map_folio<P: Platform>(
    fault: &Fault<'_, '_, P>,
    at: VirtRange,
    page: &mut Option<FreshFolio<'_, P>>,
    flags: MappingFlags,
) {
    #[cfg(not(lock_violations = "types"))]
    let _ = fault.map_folio(at, page, flags.attributes().written());
    #[cfg(lock_violations = "types")]
    let _ = (flags, fault.map_folio(at, page, Attributes::default())); //~ E0308
}

/// A VMA changes its place only with its trees locked.
pub(crate) fn resize<'op, P: Platform>(
    set: &mut VmaSet<'op, '_, P>,
    vma: &VmaWriteGuard<'op, P>,
    held: &RmapGuard<'_, P>,
) {
    #[cfg(not(lock_violations = "types"))]
    set.resize_held(vma, 0, 0, held);
    #[cfg(lock_violations = "types")]
    let _ = (held, set.resize_held(vma, 0, 0)); //~ E0061
}

/// A read lock of a tree does not suffice where a write lock is required.
pub(crate) fn tree<'a, P: Platform>(platform: &'a P, lock: &'a TreeLock) {
    #[cfg(not(lock_violations = "types"))]
    let _guard: TreeReadGuard<'a, P> = lock.read(platform);
    #[cfg(lock_violations = "types")]
    let _guard: TreeReadGuard<'a, P> = lock.write(platform); //~ E0308
}

/// Every frame allocation states a purpose: only reclaim may consume the reserve.
pub(crate) fn allocate<P: Platform>(frames: &Frames<P>) {
    #[cfg(not(lock_violations = "types"))]
    let _ = frames.allocate(Order::PAGE, AllocateFor::Use);
    #[cfg(lock_violations = "types")]
    let _ = frames.allocate(Order::PAGE); //~ E0061
}

/// Work on a folio's slots requires the locked folio: its number does not prove the lock.
pub(crate) fn settle<P: Platform>(memory: &Memory<P>, lock: &FolioLock<'_, P>, place: SwapPlace) {
    #[cfg(not(lock_violations = "types"))]
    CachedFolio::new(memory, lock.locked(), place).unlock(&PageSet::EMPTY);
    #[cfg(lock_violations = "types")]
    CachedFolio::new(memory, lock.folio(), place).unlock(&PageSet::EMPTY); //~ E0308
}

/// Content is read into a folio for which the slots are claimed.
pub(crate) fn load<P: Platform>(
    memory: &Memory<P>,
    claimed: ClaimedFolio<'_, P>,
    locked: LockedFolio<'_, P>,
) {
    #[cfg(not(lock_violations = "types"))]
    let _ = (locked, claimed.load(memory));
    #[cfg(lock_violations = "types")]
    let _ = (claimed, locked.load(memory)); //~ E0599
}

/// The proof that a folio is locked ends before the lock does.
pub(crate) fn settle_unlocked<P: Platform>(
    memory: &Memory<P>,
    lock: FolioLock<'_, P>,
    place: SwapPlace,
) {
    let cached = CachedFolio::new(memory, lock.locked(), place);
    #[cfg(not(lock_violations = "moves"))]
    let _ = (cached.unlock(&PageSet::EMPTY), drop(lock));
    #[cfg(lock_violations = "moves")]
    let _ = (drop(lock), cached.unlock(&PageSet::EMPTY)); //~ E0505
}

/// Closing a lock consumes its guard.
pub(crate) fn close<'a, P: Platform>(platform: &'a P, lock: &'a RwLock) {
    let guard: WriteGuard<'a, P> = lock.write(platform);
    #[cfg(not(lock_violations = "moves"))]
    guard.close();
    #[cfg(lock_violations = "moves")]
    let _ = (guard.close(), guard.leave_locked()); //~ E0382
}

/// A call that finds no memory reclaims before it fails.
pub(crate) fn fail<P: Platform>(
    memory: &Memory<P>,
    attempt: impl Fn() -> Result<(), NoMemory>,
) -> Result<(), Error> {
    #[cfg(not(lock_violations = "types"))]
    memory.retry(|| Ok(attempt()?))?;
    #[cfg(lock_violations = "types")]
    let _ = (memory, attempt()?); //~ E0277
    Ok(())
}

/// An entry is narrowed only in a span of an edit, whose gather records the flush. A cursor has no
/// gather.
pub(crate) fn narrow<P: Platform>(span: &mut Span<'_, '_, P>, run: &Run<P::Arch>) {
    #[cfg(not(lock_violations = "types"))]
    span.narrow(run).suspend_each();
    #[cfg(lock_violations = "types")]
    let cursor: &mut crate::table::cursor::Cursor<'_, '_, P> = span;
    #[cfg(lock_violations = "types")]
    cursor.narrow(run).suspend_each(); //~ E0599
}

/// The pages of detached tables are freed after the flush.
pub(crate) fn free_unflushed<P: Platform>(edit: &mut Edit<'_, '_, P>) {
    #[cfg(not(lock_violations = "types"))]
    let _ = edit.flushed().take_detached();
    #[cfg(lock_violations = "types")]
    let _ = edit.take_detached(); //~ E0599
}

/// Between that flush and the free, the edit narrows no entry.
pub(crate) fn narrow_flushed<P: Platform>(edit: &mut Edit<'_, '_, P>) {
    let flushed = edit.flushed();
    #[cfg(not(lock_violations = "moves"))]
    let _ = (flushed.take_detached(), edit.prune(VirtAddr(0)));
    #[cfg(lock_violations = "moves")]
    let _ = (edit.prune(VirtAddr(0)), flushed.take_detached()); //~ E0499
}

/// The folio determines the number of its slots: a caller names only the first slot.
pub(crate) fn claim<P: Platform>(memory: &Memory<P>, fresh: FreshFolio<'_, P>, slots: SlotRun) {
    #[cfg(not(lock_violations = "types"))]
    let _ = ClaimedFolio::claim(memory, fresh, slots.area, slots.first).is_some();
    #[cfg(lock_violations = "types")]
    let _ = ClaimedFolio::claim(memory, fresh, slots).is_some(); //~ E0061
}

/// An entry that is only widened is not suspended: no flush would follow.
pub(crate) fn widen<P: Platform>(span: &mut Span<'_, '_, P>, run: &Run<P::Arch>) {
    #[cfg(not(lock_violations = "types"))]
    span.narrow_until_flush(run).suspend_each();
    #[cfg(lock_violations = "types")]
    span.widen(run).suspend_each(); //~ E0599
    span.flush();
}

/// No entry is narrowed after the table's lock was released.
pub(crate) fn narrow_unlocked<P: Platform>(mut span: Span<'_, '_, P>, run: &Run<P::Arch>) {
    let narrowing = span.narrow(run);
    #[cfg(not(lock_violations = "moves"))]
    narrowing.suspend_each();
    #[cfg(not(lock_violations = "moves"))]
    drop(span);
    #[cfg(lock_violations = "moves")]
    let _ = (drop(span), narrowing.suspend_each()); //~ E0505
}

/// The error of an attempt that ran out of memory cannot be the result of a call.
pub(crate) fn give_up<P: Platform>(
    memory: &Memory<P>,
    attempt: impl Fn() -> Result<(), Failure>,
) -> Result<(), Error> {
    #[cfg(not(lock_violations = "types"))]
    return memory.retry(attempt);
    #[cfg(lock_violations = "types")]
    return attempt(); //~ E0308
}

/// The attributes of a VMA without access cannot form a leaf: only `Arch::page_entry` turns
/// attributes into an entry, and checks whether they permit something.
pub(crate) fn leaf<P: Platform>(frame: Frame, attributes: Attributes) -> Entry {
    #[cfg(not(lock_violations = "types"))]
    return P::Arch::page_entry(frame, Level::PTE, attributes);
    #[cfg(lock_violations = "types")]
    return P::Arch::leaf(frame, Level::PTE, attributes); //~ E0308
}

/// The index of an entry is made from an address or another index. Counts and addresses have other
/// types.
pub(crate) fn index<P: Platform>(entry: Entry, at: VirtAddr) -> Entry {
    #[cfg(not(lock_violations = "types"))]
    return P::Arch::clear_contig(entry, Level::<P::Arch>::PTE.index_of(at));
    #[cfg(lock_violations = "types")]
    return P::Arch::clear_contig(entry, (at.0 >> 12) as u32); //~ E0308
}
