//! Page faults: first touches, copies on write, and faults that were none.

use core::sync::atomic::Ordering;

use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{self, Absent, Arch, Attributes, Entry, Kind, Marker, Permissions, absent};
use crate::error::FaultError;
use crate::frame::{Folio, MAX_FOLIO_ORDER};
use crate::platform::{Invalidation, Platform, Tables};
use crate::stats::Counts;
use crate::table::cursor::{Cursor, Supply};
use crate::table::leaf::user_attributes;
use crate::table::lock::{Depth, Node};
use crate::table::{ReadSection, new_table, run};
use crate::tlb::Gather;

use super::AddressSpace;
use super::index::Indexed;
use super::vma::Vma;

/// What a program did at the address that faulted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch.
    Execute,
}

impl Access {
    fn permission(self) -> Permissions {
        match self {
            Self::Read => Permissions::READ,
            Self::Write => Permissions::WRITE,
            Self::Execute => Permissions::EXECUTE,
        }
    }
}

/// What a fault did, so that the access can be tried again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Resolved {
    /// New zeroed memory is mapped in this range, which holds the address.
    New(VirtRange),
    /// The shared page of zeroes is mapped.
    ZeroPage,
    /// The page was copied, since others see it too.
    Copied,
    /// The page is nobody else's, and may be written now.
    MadeWritable,
    /// The entry allows the access: the TLB remembered an older one, or another CPU was faster.
    Spurious,
}

/// What to do about an entry that stands there already.
enum Step {
    Done(Resolved),
    /// Nothing stands there any more: begin again.
    Again,
    /// Every page here that is exclusive may become writable.
    Reuse(VirtRange),
    /// The page must be copied.
    Copy,
}

/// A VMA that is locked for reading.
struct LockedVma<'a>(&'a Vma);

impl Drop for LockedVma<'_> {
    fn drop(&mut self) {
        self.0.end_read();
    }
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Resolves a fault at `addr`, so that the access can be tried again.
    ///
    /// A first write takes the largest folio that the policy, the mapping and its neighbours
    /// allow; a first read maps the page of zeroes. A write to a page that others see too copies
    /// it.
    ///
    /// # Errors
    /// As [`FaultError`] says; nothing is changed then. May sleep; not for interrupt context.
    ///
    /// Complexity: logarithmic in the mappings, linear in the pages of the folio.
    pub fn fault(&self, addr: VirtAddr, access: Access) -> Result<Resolved, FaultError> {
        if addr >= self.limit() {
            return Err(FaultError::NotMapped);
        }
        let page = addr.align_down(PAGE_SIZE);
        let locked = self.lock_vma(page).ok_or(FaultError::NotMapped)?;
        let vma = locked.0;
        let allowed = vma.protection();
        // What the entries of such a mapping say: they may imply more than was asked for.
        let implied = arch::implied::<P::Arch>(allowed.permissions() | Permissions::USER);
        if !implied.contains(access.permission()) {
            return Err(FaultError::Protection);
        }
        loop {
            let step = match self.vacant_orders(vma, page, access) {
                Some(orders) => self.first_touch(vma, page, access, orders)?,
                None => self.look_again(vma, page, access)?,
            };
            match step {
                Step::Done(resolved) => return Ok(resolved),
                Step::Again => {}
                Step::Reuse(window) => return self.reuse(vma, page, window),
                Step::Copy => {
                    if let Some(resolved) = self.copy(vma, page)? {
                        return Ok(resolved);
                    }
                }
            }
        }
    }

    /// The VMA that holds `addr`, locked for reading.
    fn lock_vma(&self, addr: VirtAddr) -> Option<LockedVma<'_>> {
        {
            let _section = ReadSection::enter(self.platform());
            if let Some(node) = self.vmas.find_at_or_before(addr.0) {
                // Reading locks the VMA into the index, so it outlives the section.
                let vma = self.vma(node);
                if vma.try_read() {
                    let locked = LockedVma(vma);
                    if vma.range().contains(addr) {
                        return Some(locked);
                    }
                }
            }
        }
        // A writer is at work, or there is really nothing: the mutex knows.
        let guard = self.mutex.lock();
        let vma = self.first_behind(addr.0).filter(|vma| vma.start() <= addr.0);
        let locked = vma.filter(|vma| vma.try_read()).map(LockedVma);
        drop(guard);
        locked
    }

    /// The sizes of folios, one bit for each order, that would fit around `page`: into the VMA,
    /// into one table, and where nothing seems to stand. `None` where something stands at `page`.
    /// Looks without locks, so whoever acts on it looks again.
    fn vacant_orders(&self, vma: &Vma, page: VirtAddr, access: Access) -> Option<u16> {
        let mut counts = Counts::default();
        let _section = ReadSection::enter(self.platform());
        let (node, _, hint) = self.table.peek(page, &mut counts);
        self.table.stats.add(&counts);
        if !hint.is_empty() {
            return None;
        }
        let wanted = match access {
            Access::Write => self.table.memory.folio_policy().orders() | 1,
            Access::Read | Access::Execute => 1,
        };
        let huge = arch::order_of_level::<P::Arch>(2);
        let fits = |order: u8| {
            let window = folio_place(page, order).filter(|window| vma.range().covers(*window));
            let Some(window) = window.filter(|_| order <= huge) else { return false };
            let first = arch::index_of::<P::Arch>(window.start(), 1);
            let slots = self.table.slots(node.table);
            // Above level 1, the empty entry stands for all of the window.
            node.level > 1 || order < huge && run::empty(slots, first, 1 << order) == 1 << order
        };
        let orders = (0..=MAX_FOLIO_ORDER).filter(|order| wanted & 1 << order != 0);
        Some(orders.filter(|order| fits(*order)).fold(0, |set, order| set | 1 << order))
    }

    /// Nothing stood at `page` when it was looked at; `orders` would fit.
    fn first_touch(
        &self,
        vma: &Vma,
        page: VirtAddr,
        access: Access,
        mut orders: u16,
    ) -> Result<Step, FaultError> {
        if access != Access::Write {
            return self.map_zero_page(vma, page);
        }
        if orders == 0 {
            return Ok(Step::Again);
        }
        while orders != 0 {
            let order = (u16::BITS - 1 - orders.leading_zeros()) as u8;
            orders &= !(1 << order);
            let Some(window) = folio_place(page, order) else { continue };
            let Some(folio) = self.table.memory.frames.new_folio(order) else { continue };
            self.platform().zero(folio.head, folio.pages());
            let step = self.map_folio(vma, window, folio);
            if !matches!(step, Ok(Step::Done(_))) {
                self.table.memory.frames.release(self.platform(), folio);
            }
            if matches!(step, Err(FaultError::OutOfMemory)) && order > 0 {
                // A smaller one needs no table in reserve.
                continue;
            }
            return step;
        }
        Err(FaultError::OutOfMemory)
    }

    fn map_folio(&self, vma: &Vma, window: VirtRange, folio: Folio) -> Result<Step, FaultError> {
        let memory = self.table.memory;
        let huge = folio.order == arch::order_of_level::<P::Arch>(2) && folio.order > 0;
        let level = if huge { 2 } else { 1 };
        let mut counts = Counts::default();
        let reserve = if huge {
            // Before the locks: whoever splits the leaf later must not fail.
            Some(new_table(memory, 1, &mut counts).ok_or(FaultError::OutOfMemory)?)
        } else {
            None
        };
        let mut cursor = self.table.cursor(window, Depth::Floor(1));
        let mapped = map_folio_locked(&mut cursor, vma, window, folio, level, reserve);
        counts.bytes_zeroed += window.len();
        if !matches!(mapped, Ok(Step::Done(_)))
            && let Some(reserve) = reserve
        {
            crate::table::free_table(memory, reserve, &mut counts);
        }
        cursor.counts += counts;
        self.published(window);
        mapped
    }

    fn map_zero_page(&self, vma: &Vma, page: VirtAddr) -> Result<Step, FaultError> {
        let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
        let mut cursor = self.table.cursor(range, Depth::Floor(1));
        if !cursor.entry_at(page).2.is_empty() {
            // Another CPU was faster; what it mapped may be huge and must not be cut.
            return Ok(Step::Again);
        }
        let supply = &mut Supply::Frames;
        let table = cursor.table_at(page, 1, supply).map_err(|_| FaultError::OutOfMemory)?;
        let index = arch::index_of::<P::Arch>(page, 1);
        let permissions = vma.protection().permissions() - Permissions::WRITE;
        let attributes = Attributes { accessed: true, ..user_attributes(permissions) };
        let entry = P::Arch::leaf(self.table.memory.zero_frame, 1, attributes);
        self.table.fill(table, index, entry, 1, &mut cursor.counts);
        self.published(range);
        Ok(Step::Done(Resolved::ZeroPage))
    }

    /// New entries are written: the walkers may see them now. Where the MMU may remember that
    /// there was nothing, this CPU is told at once; others fault once more.
    fn published(&self, range: VirtRange) {
        self.platform().publish_entries();
        if P::Arch::INVALID_MAY_BE_CACHED {
            self.forget_locally(range);
        }
    }

    fn forget_locally(&self, range: VirtRange) {
        // A remembered "nothing there" may stand for an entry of any level.
        let tables =
            if P::Arch::INVALID_MAY_BE_CACHED { Tables::Changed } else { Tables::Unchanged };
        let what = Invalidation { range, stride: PAGE_SIZE, tables };
        self.platform().invalidate_local(self.table.root, &what);
    }

    /// Something stood at `page`: decides, with the entry locked, what to do about it.
    fn look_again(&self, vma: &Vma, page: VirtAddr, access: Access) -> Result<Step, FaultError> {
        let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
        let mut cursor = self.table.cursor(range, Depth::Floor(1));
        let (node, index, raw) = cursor.entry_at(page);
        match arch::kind::<P::Arch>(raw, node.level) {
            Kind::Empty | Kind::Table => return Ok(Step::Again),
            Kind::Leaf => {}
            Kind::Absent => return self.absent(&mut cursor, node, index, raw),
        }
        let entry = if node.level == 1 { P::Arch::unblock(raw, index) } else { raw };
        if P::Arch::attributes(entry).permissions.contains(access.permission()) {
            self.record_access(&mut cursor, node, index, access);
            self.forget_locally(range);
            return Ok(Step::Done(Resolved::Spurious));
        }
        if access != Access::Write {
            // The VMA allows it and the entry does not, though `mprotect` rewrites entries.
            return Err(FaultError::Protection);
        }
        let frame = P::Arch::frame(entry);
        let offset = (page.0 & (arch::span::<P::Arch>(node.level) - 1)) >> PAGE_SHIFT;
        let frame = frame.plus(offset as u32);
        let Some(folio) = self.table.memory.frames.folio_of(frame) else {
            return Ok(Step::Copy);
        };
        let number = frame.0 - folio.head.0;
        let window = folio_window(vma, page, number, folio);
        let (exclusive, _) = self.table.memory.frames.exclusive_run(folio, number, 1);
        if exclusive && (node.level == 1 || self.exclusive_whole(folio)) {
            return Ok(Step::Reuse(window));
        }
        drop(cursor);
        if self.claim(window, folio) { Ok(Step::Reuse(window)) } else { Ok(Step::Copy) }
    }

    fn exclusive_whole(&self, folio: Folio) -> bool {
        let pages = folio.pages();
        self.table.memory.frames.exclusive_run(folio, 0, pages) == (true, pages)
    }

    /// An absent entry stands where the program went.
    fn absent(
        &self,
        cursor: &mut Cursor<'_, 'm, P>,
        node: Node,
        index: u32,
        raw: Entry,
    ) -> Result<Step, FaultError> {
        match absent::decode::<P::Arch>(raw) {
            Some(Absent::Hidden { .. }) => Err(FaultError::Protection),
            Some(Absent::Marker(Marker::Guard)) => Err(FaultError::NotMapped),
            Some(Absent::Marker(Marker::UserfaultWriteProtect)) => {
                // No userfaultfd watches: the marker means nothing any more.
                let slot = &self.table.slots(node.table)[index as usize];
                slot.store(0, Ordering::Relaxed);
                cursor.counts.entries_written += 1;
                self.table.change_live(node.table, 0, 1);
                Ok(Step::Again)
            }
            // There is no swap device yet that could bring the page back.
            Some(Absent::Swap { .. } | Absent::Marker(Marker::Poison)) | None => {
                Err(FaultError::Bus)
            }
        }
    }

    /// The entry allows the access, and the fault came all the same: the MMU may be one that
    /// leaves accessed and dirty to software. A contiguous block is answered from any of its
    /// entries, so all of them say it.
    fn record_access(
        &self,
        cursor: &mut Cursor<'_, 'm, P>,
        node: Node,
        index: u32,
        access: Access,
    ) {
        let slots = self.table.slots(node.table);
        let block = node.level == 1 && P::Arch::is_block(run::load(slots, index));
        let size = if block { P::Arch::BLOCK } else { 1 };
        let first = index & !(size - 1);
        for slot in &slots[first as usize..(first + size) as usize] {
            let old = Entry(slot.load(Ordering::Relaxed));
            let record = |entry| {
                if access == Access::Write {
                    P::Arch::make_writable(entry, arch::Write::Now)
                } else {
                    P::Arch::mark_accessed(entry)
                }
            };
            cursor.counts.entries_read += 1;
            if record(old) != old {
                crate::table::leaf::replace::<P::Arch>(slot, old, record);
                cursor.counts.entries_written += 1;
            }
        }
    }

    /// If all mappings of the folio are here, it is nobody else's: marks it exclusive.
    fn claim(&self, window: VirtRange, folio: Folio) -> bool {
        let frames = &self.table.memory.frames;
        let mut cursor = self.table.cursor(window, Depth::Floor(1));
        let mut ours = 0;
        let mut at = window.start();
        while at < window.end() {
            let (node, index, raw) = cursor.entry_at(at);
            let span = arch::span::<P::Arch>(node.level);
            if arch::kind::<P::Arch>(raw, node.level) == Kind::Leaf {
                let entry = if node.level == 1 { P::Arch::unblock(raw, index) } else { raw };
                // Asked again, now that the entry is locked and keeps its folio alive: the one
                // that was seen before may have been freed, and its frames be something else.
                if frames.folio_of(P::Arch::frame(entry)) == Some(folio) {
                    ours += 1 << arch::order_of_level::<P::Arch>(node.level);
                }
            }
            at = VirtAddr((at.0 & !(span - 1)).saturating_add(span));
        }
        let alone = ours > 0 && frames.is_mapped_only(folio, ours);
        if alone {
            frames.set_exclusive(folio, 0, folio.pages());
        }
        alone
    }

    /// Gives the exclusive pages in `window` the permissions of the VMA, and records the write to
    /// `page`.
    fn reuse(&self, vma: &Vma, page: VirtAddr, window: VirtRange) -> Result<Resolved, FaultError> {
        let mut gather = Gather::new();
        let permissions = vma.protection().permissions();
        let done = self.table.protect(window, permissions, &mut gather);
        self.table.finish(gather);
        done.map_err(|_| FaultError::OutOfMemory)?;
        let mut cursor =
            self.table.cursor(VirtRange::raw(page.0, page.0 + PAGE_SIZE), Depth::Floor(1));
        let (node, index, raw) = cursor.entry_at(page);
        let writable = P::Arch::attributes(raw).permissions.contains(Permissions::WRITE);
        if writable && arch::kind::<P::Arch>(raw, node.level) == Kind::Leaf {
            self.record_access(&mut cursor, node, index, Access::Write);
        }
        drop(cursor);
        self.platform().publish_entries();
        self.forget_locally(window);
        Ok(Resolved::MadeWritable)
    }

    /// Puts a copy in the place of the page, or a new page of zeroes in the place of the zero
    /// page. `None` where the page has changed in between.
    fn copy(&self, vma: &Vma, page: VirtAddr) -> Result<Option<Resolved>, FaultError> {
        let frames = &self.table.memory.frames;
        let copy = frames.new_folio(0).ok_or(FaultError::OutOfMemory)?;
        let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
        let copied = {
            let mut cursor = self.table.cursor(range, Depth::Floor(1));
            replace_page(&mut cursor, vma, range, copy)
        };
        match copied {
            Ok(Some((old, dirty))) => {
                let mut counts = Counts::default();
                self.table.memory.unmap_frames(old, 1, dirty, &mut counts);
                self.table.stats.add(&counts);
                self.published(range);
                Ok(Some(Resolved::Copied))
            }
            Ok(None) => {
                frames.release(self.platform(), copy);
                Ok(None)
            }
            Err(error) => {
                frames.release(self.platform(), copy);
                Err(error)
            }
        }
    }
}

/// Where a folio of 2^`order` pages around `page` would stand.
fn folio_place(page: VirtAddr, order: u8) -> Option<VirtRange> {
    let size = PAGE_SIZE << order;
    VirtRange::from_len(page.align_down(size), size)
}

/// Where the pages of `folio` stand around `page`, its page `number`, as far as the VMA reaches.
pub(super) fn folio_window(vma: &Vma, page: VirtAddr, number: u32, folio: Folio) -> VirtRange {
    let start = page.0.saturating_sub(u64::from(number) << PAGE_SHIFT);
    let after = u64::from(folio.pages() - number) << PAGE_SHIFT;
    VirtRange::raw(start, page.0.saturating_add(after)).intersection(vma.range())
}

fn map_folio_locked<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    vma: &Vma,
    window: VirtRange,
    folio: Folio,
    level: u8,
    reserve: Option<Frame>,
) -> Result<Step, FaultError> {
    let tables = cursor.tables;
    let (node, _, entry) = cursor.entry_at(window.start());
    if node.level < level || !entry.is_empty() {
        // A table or a page has come between: the folio does not fit any more.
        return Ok(Step::Again);
    }
    let table = cursor
        .table_at(window.start(), level, &mut Supply::Frames)
        .map_err(|_| FaultError::OutOfMemory)?;
    let index = arch::index_of::<P::Arch>(window.start(), level);
    let count = if level == 1 { folio.pages() } else { 1 };
    let vacant = run::empty(tables.slots(table), index, count);
    cursor.counts.entries_read += u64::from(vacant);
    if vacant != count {
        return Ok(Step::Again);
    }
    let attributes = Attributes {
        accessed: true,
        dirty: true,
        soft_dirty: true,
        ..user_attributes(vma.protection().permissions())
    };
    let entry = P::Arch::leaf(folio.head, level, attributes);
    tables.memory.frames.first_map(folio, folio.pages());
    cursor.counts.folios_touched += 1;
    if level == 1 {
        tables.fill(table, index, entry, count, &mut cursor.counts);
    } else {
        let slot = &tables.slots(table)[index as usize];
        slot.store(entry.0, Ordering::Release);
        cursor.counts.entries_written += 1;
        tables.change_live(table, 1, 0);
        if let Some(reserve) = reserve {
            tables.push_reserve(table, reserve);
        }
    }
    Ok(Step::Done(Resolved::New(window)))
}

/// Replaces the read-only page of `range` by `copy`, by break-before-make, and returns the old
/// frame and whether it is known to be dirty; `None` where no read-only page stands there any more.
fn replace_page<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    vma: &Vma,
    range: VirtRange,
    copy: Folio,
) -> Result<Option<(Frame, bool)>, FaultError> {
    let tables = cursor.tables;
    let (node, _, raw) = cursor.entry_at(range.start());
    if arch::kind::<P::Arch>(raw, node.level) != Kind::Leaf
        || P::Arch::attributes(raw).permissions.contains(Permissions::WRITE)
    {
        return Ok(None);
    }
    // Splits a huge leaf.
    let table = cursor
        .table_at(range.start(), 1, &mut Supply::Frames)
        .map_err(|_| FaultError::OutOfMemory)?;
    let index = arch::index_of::<P::Arch>(range.start(), 1);
    if P::Arch::is_block(run::load(tables.slots(table), index)) {
        tables.unfold(table, index, range.start(), &mut cursor.counts);
    }
    let slot = &tables.slots(table)[index as usize];
    let entry = run::load(tables.slots(table), index);
    let old = P::Arch::frame(entry);
    if old == tables.memory.zero_frame {
        tables.memory.platform.zero(copy.head, 1);
        cursor.counts.bytes_zeroed += PAGE_SIZE;
    } else {
        tables.memory.platform.copy(old, copy.head, 1);
        cursor.counts.bytes_copied += PAGE_SIZE;
    }
    // Read-only, so nothing but accessed can come in between, and the new entry has that anyway.
    slot.store(0, Ordering::Relaxed);
    tables.invalidate_now(range, 1, &mut cursor.counts);
    let attributes = Attributes {
        accessed: true,
        dirty: true,
        soft_dirty: true,
        ..user_attributes(vma.protection().permissions())
    };
    tables.memory.frames.first_map(copy, 1);
    slot.store(P::Arch::leaf(copy.head, 1, attributes).0, Ordering::Release);
    cursor.counts.entries_written += 2;
    Ok(Some((old, P::Arch::attributes(entry).dirty)))
}

const _: () = assert!(MAX_FOLIO_ORDER < u16::BITS as u8, "orders fit into a bit set");
