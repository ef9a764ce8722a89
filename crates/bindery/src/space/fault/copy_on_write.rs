//! Copy on write: a write to a page that is not writable makes it exclusive, or copies it.

use core::sync::atomic::Ordering;

use crate::addr::{Frame, Order, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{self, Arch, Attributes, Entry, Kind, Level, Permissions};
use crate::error::{Failure, FaultError, NoMemory};
use crate::folio::{Folio, OwnerKind};
use crate::object::{Awaited, pages};
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::space::AddressSpace;
use crate::stats::Counts;
use crate::table::cursor::Cursor;
use crate::table::locking::{Depth, Node};
use crate::table::run::Slots;
use crate::table::{EntryAt, ReadSection, TablePool, run};
use crate::tlb::Gather;
use crate::vma::{Protection, Vma};

use super::{Access, Resolved, Step, Tries};

impl<P: Platform> AddressSpace<'_, P> {
    pub(super) fn exclusive_whole(&self, folio: Folio) -> bool {
        let pages = folio.pages();
        self.page_table.memory.frames.folio(folio).exclusive().contains_all(0, pages)
    }

    /// If all mappings of the folio are in `range`, no other process maps it: marks it exclusive,
    /// and lets it belong to this VMA's anon group, so that the reverse map need not look at those
    /// above any more. The folio's counts answer where they can; the entries are walked at most
    /// eight times without success ([`crate::frame`], `alone`).
    pub(super) fn claim(&self, vma: &Vma, range: VirtRange, folio: Folio) -> bool {
        let frames = &self.page_table.memory.frames;
        if !frames.folio(folio).may_be_mapped_by_one(range.pages() as u32) {
            return false;
        }
        let mut cursor = self.page_table.cursor(range, Depth::Floor(Level::PTE));
        let ours = mappings_of(&mut cursor, range, folio);
        let alone = ours > 0 && frames.folio(folio).is_mapped_and_held(ours, 0);
        if ours > 0 && !alone {
            frames.folio(folio).note_other_mappings(ours);
        }
        if alone {
            frames.folio(folio).forget_other_mappings();
            frames.folio(folio).exclusive().set(0, folio.pages());
            // The tables are locked, so the folio's lock is only tried. Where somebody has it, the
            // owner stays the anon group above, from where the reverse map comes by here too.
            if let group @ Some(_) = vma.group_pointer()
                && let Some(lock) = frames.folio(folio).try_lock(self.platform())
            {
                let first = lock.owner().first;
                lock.set_owner(AnonGroup::as_owner(group), first);
            }
        }
        alone
    }

    /// Gives the exclusive pages in `range` the permissions of the VMA, and records the write to
    /// `page`.
    pub(super) fn reuse(
        &self,
        vma: &Vma,
        page: VirtAddr,
        range: VirtRange,
    ) -> Result<Resolved, Failure<FaultError>> {
        let mut gather = Gather::new();
        let done = self.page_table.protect(range, &vma.entry_policy(), &mut gather);
        self.page_table.finish(&mut gather);
        done?;
        let mut cursor = self
            .page_table
            .cursor(VirtRange::raw(page.0, page.0 + PAGE_SIZE), Depth::Floor(Level::PTE));
        let EntryAt { node, index, entry: raw } = cursor.entry_at(page);
        let writable = P::Arch::attributes(raw).permissions.contains(Permissions::WRITE);
        if writable && node.level.kind(raw) == Kind::Leaf {
            self.record_access(&mut cursor, node, index, Access::Write);
        }
        drop(cursor);
        self.platform().publish_entries();
        self.forget_locally(range);
        Ok(Resolved::MadeWritable)
    }

    /// Lets one page be written, and notes that it is: somebody wants to know of each page's first
    /// write. A huge leaf is noted whole. Begins again where the page has changed in between.
    pub(super) fn note_write(&self, vma: &Vma, page: VirtAddr) -> Result<Step, FaultError> {
        let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
        let hint = {
            let section = ReadSection::enter(self.platform());
            self.page_table.peek(&section, page, &mut Counts::default()).node
        };
        let span = hint.level.span();
        if let Some(object) = vma.object().filter(|object| object.notices_writes()) {
            let first = vma.page_offset_of(page.align_down(span));
            let marked =
                pages::mark_dirty(self.page_table.memory, object, first, span >> PAGE_SHIFT);
            if let Err(ticket) = marked {
                return Ok(Step::Await(Awaited::End(ticket)));
            }
        }
        let mut cursor = self.page_table.cursor(range, Depth::Floor(Level::PTE));
        let EntryAt { node, index, entry: raw } = cursor.entry_at(page);
        if node.level != hint.level || node.level.kind(raw) != Kind::Leaf {
            return Ok(Step::Again);
        }
        if node.in_contig(raw) {
            self.page_table.unfold(node.table, index, page, &mut cursor.counts);
        }
        let slot = &self.page_table.slots(node.table)[index.slot()];
        let entry = Entry(slot.load(Ordering::Relaxed));
        P::Arch::replace_entry(slot, entry, |entry| {
            P::Arch::make_writable(entry, arch::Write::Now)
        });
        cursor.counts.entries_written += 1;
        drop(cursor);
        self.platform().publish_entries();
        self.forget_locally(VirtRange::raw(
            page.align_down(span).0,
            page.align_down(span).0 + span,
        ));
        Ok(Step::Done(Resolved::MadeWritable))
    }

    /// Puts a copy in the place of the page, or a new zero page in the place of the zero
    /// page. `None` if the page has changed in between.
    pub(super) fn copy(
        &self,
        vma: &Vma,
        page: VirtAddr,
    ) -> Result<Option<Resolved>, Failure<FaultError>> {
        let frames = &self.page_table.memory.frames;
        self.page_table.memory.may_wait();
        let copy = self.own_folio(vma, page, Order::PAGE).ok_or(NoMemory)?;
        let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
        let copied = {
            let mut cursor = self.page_table.cursor(range, Depth::Floor(Level::PTE));
            replace_page(&mut cursor, vma, range, copy)
        };
        match copied {
            Ok(Some((old, dirty))) => {
                let mut counts = Counts::default();
                self.page_table.memory.unmap_frames(old, 1, dirty, &mut counts);
                self.page_table.stats.add(&counts);
                self.published(range);
                Ok(Some(Resolved::Copied))
            }
            Ok(None) => {
                frames.fresh(copy).discard(self.platform());
                Ok(None)
            }
            Err(error) => {
                frames.fresh(copy).discard(self.platform());
                Err(error)
            }
        }
    }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Gives the program its own read-only copy of the page at `page`, in a private read-only
    /// mapping: a copy of the zero page, of the object's page, or of a page that other processes
    /// map. Does nothing if the page is the program's own already, or is not mapped any more.
    /// (Linux: `FAULT_FLAG_UNSHARE`.)
    pub(in crate::space) fn unshare(&self, page: VirtAddr) -> Result<(), Failure<FaultError>> {
        loop {
            let locked = self.lock_vma(page).ok_or(FaultError::NotMapped)?;
            let vma = locked.vma();
            if vma.is_shared() || vma.protection().contains(Protection::WRITE) {
                // It was changed meanwhile.
                return Ok(());
            }
            if vma.group_pointer().is_none() {
                drop(locked);
                self.prepare_group(page)?;
                continue;
            }
            let Some(object) = vma.object() else {
                return self.unshare_locked(vma, page);
            };
            // Keeps the object's pages where they are until they are copied.
            return object
                .invalidate_lock
                .with_read(self.platform(), |_| self.unshare_locked(vma, page));
        }
    }

    fn unshare_locked(&self, vma: &Vma, page: VirtAddr) -> Result<(), Failure<FaultError>> {
        let frames = &self.page_table.memory.frames;
        let shown = {
            let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
            let mut cursor = self.page_table.cursor(range, Depth::Floor(Level::PTE));
            let EntryAt { node, index, entry: raw } = cursor.entry_at(page);
            if node.level.kind(raw) != Kind::Leaf {
                return Ok(());
            }
            let entry = node.single(raw, index);
            let inside = (page.0 & (node.level.span() - 1)) >> PAGE_SHIFT;
            let frame = P::Arch::frame(entry).plus(inside as u32);
            if node.level == Level::PMD && self.page_table.memory.is_zero(frame) {
                drop(cursor);
                return self.fill_huge(vma, page, Tries::Last).map(|_| ());
            }
            frames.folio_of(frame).map(|folio| (folio, frame.0 - folio.head.0))
        };
        if let Some((folio, number)) =
            shown.filter(|(folio, _)| frames.folio(*folio).is_anonymous())
            && (frames.folio(folio).exclusive().contains(number)
                || self.claim(vma, folio_range(vma, page, number, folio), folio))
        {
            return Ok(());
        }
        self.copy(vma, page).map(|_| ())
    }

    /// A fresh folio of 2^`order` pages that belongs to the VMA's anon group, for the pages from
    /// `start`.
    pub(super) fn own_folio(&self, vma: &Vma, start: VirtAddr, order: Order) -> Option<Folio> {
        let frames = &self.page_table.memory.frames;
        let folio = frames.new_exclusive_folio(order)?;
        let owner = AnonGroup::as_owner(vma.group_pointer());
        frames.fresh(folio).set_owner(owner, vma.folio_index_at(start));
        Some(folio)
    }
}

/// Where the pages of `folio` are mapped around `page`, its page `number`, as far as the VMA
/// reaches.
pub(in crate::space) fn folio_range(
    vma: &Vma,
    page: VirtAddr,
    number: u32,
    folio: Folio,
) -> VirtRange {
    let start = page.0.saturating_sub(u64::from(number) << PAGE_SHIFT);
    let after = u64::from(folio.pages() - number) << PAGE_SHIFT;
    VirtRange::raw(start, page.0.saturating_add(after)).intersection(vma.range())
}

/// How many mappings of the folio the entries of `range` are, which the cursor has locked.
fn mappings_of<P: Platform>(cursor: &mut Cursor<'_, '_, P>, range: VirtRange, folio: Folio) -> u32 {
    let page_table = cursor.page_table;
    let (mut ours, mut one_of_them) = (0, None);
    let mut add = |node: Node<P::Arch>, index, raw| {
        let frame = P::Arch::frame(node.single(raw, index));
        let offset = frame.0.wrapping_sub(folio.head.0);
        if node.level.kind(raw) == Kind::Leaf && offset < folio.pages() {
            ours += node.level.order().pages();
            one_of_them = Some(frame);
        }
    };
    let mut at = range.start();
    while at < range.end() {
        let EntryAt { node, index, entry } = cursor.entry_at(at);
        let span = node.level.span();
        let mut next = (at.0 & !(span - 1)).saturating_add(span);
        if node.level == Level::PTE {
            let left = (range.end().0 - at.0) >> PAGE_SHIFT;
            let count = u64::from(index.left::<P::Arch>()).min(left) as u32;
            for index in index.stretch(count) {
                let raw = run::load(page_table.slots(node.table), index);
                add(node, index, raw);
            }
            cursor.counts.entries_read += u64::from(count) - 1;
            page_table.memory.worked(u64::from(count) - 1, 0);
            next = at.0.saturating_add(u64::from(count) << PAGE_SHIFT);
        } else {
            add(node, index, entry);
        }
        at = VirtAddr(next);
    }
    // Asked again, now that a locked entry keeps its folio alive and whole: the one that was seen
    // before may have been freed, and its frames be several other folios.
    let locked = one_of_them.and_then(|frame| page_table.memory.frames.folio_of(frame));
    if locked == Some(folio) { ours } else { 0 }
}

/// Replaces the read-only page of `range` by `copy`, by break-before-make, and returns the old
/// frame and whether it is known to be dirty; `None` if no read-only page is mapped there any more.
fn replace_page<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    vma: &Vma,
    range: VirtRange,
    copy: Folio,
) -> Result<Option<(Frame, bool)>, Failure<FaultError>> {
    let page_table = cursor.page_table;
    let EntryAt { node, entry: raw, .. } = cursor.entry_at(range.start());
    if node.level.kind(raw) != Kind::Leaf
        || P::Arch::attributes(raw).permissions.contains(Permissions::WRITE)
    {
        return Ok(None);
    }
    // Splits a huge leaf, whose deposit is the table.
    let table =
        cursor.table_at(range.start(), Level::PTE, &mut TablePool::new(page_table.memory))?;
    let index = P::Arch::PTE.index_of(range.start());
    if P::Arch::is_contig(run::load(page_table.slots(table), index)) {
        page_table.unfold(table, index, range.start(), &mut cursor.counts);
    }
    let slot = &page_table.slots(table)[index.slot()];
    let entry = run::load(page_table.slots(table), index);
    let old = P::Arch::frame(entry);
    if old == page_table.memory.zero_frame {
        page_table.memory.platform.zero(copy.head, 1);
        cursor.counts.bytes_zeroed += PAGE_SIZE;
    } else {
        page_table.memory.platform.copy(old, copy.head, 1);
        cursor.counts.bytes_copied += PAGE_SIZE;
    }
    let userfault = P::Arch::attributes(entry).userfault;
    let mut attributes = Attributes {
        accessed: true,
        dirty: true,
        soft_dirty: true,
        userfault,
        ..vma.flags().attributes()
    };
    if userfault {
        // The page that is the program's own from now on is as protected as the other was.
        attributes.permissions -= Permissions::WRITE;
    }
    page_table.memory.before_execution(attributes.permissions, copy);
    // Read-only, so nothing but accessed can come in between, and the new entry has that anyway.
    slot.store(0, Ordering::Relaxed);
    page_table.invalidate_now(range, Level::PTE, &mut cursor.counts);
    page_table.memory.frames.fresh(copy).map(1);
    slot.store(P::Arch::page_entry(copy.head, Level::PTE, attributes).0, Ordering::Release);
    cursor.counts.entries_written += 2;
    cursor.counts.mapped(OwnerKind::Anonymous, 1);
    Ok(Some((old, P::Arch::attributes(entry).dirty)))
}
