//! Copy-on-write: a write to a private page that is not writable claims the page or copies it.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::Ordering;

use crate::addr::{Frame, Order, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Entry, Kind, Level, Permissions};
use crate::error::{Failure, FaultError, NoMemory};
use crate::folio::{Folio, FreshFolio, OwnerKind, OwnerMark};
use crate::frame::FrameRange;
use crate::memory::{before_execution, unmap_frames};
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::stats::Counts;
use crate::table::cursor::Cursor;
use crate::table::locking::Node;
use crate::table::publish::publish;
use crate::table::{EntryAt, Table, TableEntry, run};
use crate::vma::{MappingFlags, Vma};

use super::Resolved;
use super::first_touch::own_folio;
use super::slow::{Fault, Next, Stepped};

impl<P: Platform> Fault<'_, '_, P> {
    /// Claims a folio whose mappings all lie in `range`, so that no other process maps it. Marks
    /// the folio exclusive and moves it to this VMA's anon group, so that the reverse map no longer
    /// visits the groups above. Uses the folio's counts if they suffice; otherwise walks the
    /// entries, at most eight times without success (module `folio::alone`).
    pub(super) fn claim(&self, range: VirtRange, folio: Folio) -> bool {
        let frames = &self.memory().frames;
        if !frames.folio(folio).other_mappings().may_be_none(range.pages() as u32) {
            return false;
        }
        let section = self.read_section();
        let mut cursor = self.cursor_of(&section, range);
        let ours = mappings_of(&mut cursor, range, folio);
        let alone = ours > 0 && frames.folio(folio).is_mapped_and_held(ours, 0);
        if ours > 0 && !alone {
            frames.folio(folio).other_mappings().note(ours);
        }
        if alone {
            self.take_over(folio, OwnerMark::of(AnonGroup::as_owner(self.vma.group())));
        }
        alone
    }

    /// Marks a folio as exclusive and sets its owner to `owner`, the anon group of this VMA. The
    /// caller has found all of the folio's mappings in the VMA and has locked their tables.
    #[inline(always)]
    pub(super) fn take_over(&self, folio: Folio, owner: OwnerMark) {
        let pages = folio.pages();
        let folio = self.memory().frames.folio(folio);
        folio.other_mappings().forget();
        folio.exclusive().set(0, pages);
        // Usually the folio already belongs to the group, and did so when a child was forked, so
        // the lock is not needed.
        if folio.is_owned_by(owner) {
            return;
        }
        // The folio's lock is only tried, because the tables are locked. If the try fails, the
        // owner remains the anon group above, from which the reverse map also reaches this VMA.
        // SAFETY: 1. the page's mapping: the tables are locked.
        if let Some(lock) = unsafe { folio.try_lock() } {
            let first = lock.owner().first;
            lock.give_to(owner, first);
        }
    }

    /// Replaces the page by a copy, or the zero page by a newly zeroed page.
    pub(super) fn copy(&self) -> Stepped {
        let memory = self.memory();
        memory.may_wait();
        let copy = own_folio(memory, self.vma, self.page, Order::PAGE).ok_or(NoMemory)?;
        let range = self.range();
        let mut copy = Some(copy);
        let copied = {
            let section = self.read_section();
            let mut cursor = self.cursor(&section);
            replace_page(&mut cursor, self.vma, range, &mut copy)
        };
        if let Some(copy) = copy {
            copy.discard();
        }
        match copied {
            Ok(Some((old, dirty))) => {
                let (mut batch, mut counts) = (memory.free_batch(), Counts::default());
                let old = FrameRange { first: old, count: 1 };
                // SAFETY: 1. and 2. the page's entry was replaced above, by break, invalidate,
                // make.
                unsafe { unmap_frames(memory, old, dirty, &mut batch, &mut counts) };
                drop(batch);
                self.page_table().count(&counts);
                publish(self.page_table(), range);
                Ok(Next::Done(Resolved::Copied))
            }
            Ok(None) => Ok(Next::Again),
            Err(error) => Err(error),
        }
    }
}

/// The part of the VMA that maps `folio`, provided that `page` maps page `number` of the folio and
/// the pages are mapped in order.
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

/// The number of the folio's mappings in `range`, which the cursor has locked.
fn mappings_of<P: Platform>(cursor: &mut Cursor<'_, '_, P>, range: VirtRange, folio: Folio) -> u32 {
    let page_table = cursor.page_table;
    let (mut ours, mut one_of_them) = (0, None);
    let mut add = |node: Node<P::Arch, Table<'_>>, index, raw| {
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
                let raw = run::load(page_table.entries(node.table), index);
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
    // Looked up again, now that a locked entry keeps its folio from being freed and split: the
    // folio that was seen before may have been freed since, and its frames may belong to other
    // folios.
    let locked = one_of_them.and_then(|frame| page_table.memory.frames.folio_of(frame));
    if locked == Some(folio) { ours } else { 0 }
}

/// A page that a copy is to replace.
struct OldPage {
    frame: Frame,
    /// Whether the page is known to be dirty.
    dirty: bool,
    /// Whether a userfaultfd has write-protected the page.
    userfault: bool,
}

impl OldPage {
    /// The page of this entry, unless the entry allows writes or maps no page.
    #[inline(always)]
    fn of<A: Arch>(kind: Kind, entry: Entry) -> Option<Self> {
        if kind != Kind::Leaf {
            return Self::without_access::<A>(kind, entry);
        }
        let attributes = A::attributes(entry);
        let (dirty, userfault) = (attributes.dirty, attributes.userfault);
        let read_only = !attributes.permissions.contains(Permissions::WRITE);
        read_only.then_some(Self { frame: A::frame(entry), dirty, userfault })
    }

    /// The page of a `PROT_NONE` entry. Only a debugger writes to such a page.
    #[cold]
    fn without_access<A: Arch>(kind: Kind, entry: Entry) -> Option<Self> {
        match A::decode_absent(entry).filter(|_| kind == Kind::Absent)? {
            Absent::ProtNone { frame, dirty, userfault, .. } => {
                Some(Self { frame, dirty, userfault })
            }
            Absent::Swap { .. } | Absent::Marker(_) => None,
        }
    }
}

/// Replaces the read-only page of `range` by `copy`, by break-before-make. Returns the old frame
/// and whether the old page is known to be dirty; `None` if a read-only page is no longer mapped
/// there. In that case, and on an error, the caller keeps the copy.
fn replace_page<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    vma: &Vma,
    range: VirtRange,
    fresh: &mut Option<FreshFolio<'_, P>>,
) -> Result<Option<(Frame, bool)>, Failure<FaultError>> {
    let page_table = cursor.page_table;
    let Some(copy) = fresh.as_deref().copied() else { return Ok(None) };
    let EntryAt { node, entry: raw, .. } = cursor.entry_at(range.start());
    if OldPage::of::<P::Arch>(node.level.kind(raw), raw).is_none() {
        return Ok(None);
    }
    let table = cursor.split_table_at(range.start())?;
    let index = P::Arch::PTE.index_of(range.start());
    if P::Arch::is_contig(run::load(page_table.entries(table), index)) {
        page_table.unfold(TableEntry { table, index }, range.start(), &mut cursor.counts);
    }
    let word = &page_table.entries(table)[index.position()];
    let entry = run::load(page_table.entries(table), index);
    let page = OldPage::of::<P::Arch>(Level::<P::Arch>::PTE.kind(entry), entry);
    let Some(OldPage { frame: old, dirty, userfault }) = page else { return Ok(None) };
    if old == page_table.memory.zero_frame {
        page_table.memory.platform().zero(copy.head, 1);
        cursor.counts.bytes_zeroed += PAGE_SIZE;
    } else if vma.has(MappingFlags::FRAMES) && !page_table.memory.frames.manages(old) {
        // The direct map may lack the frame.
        return Err(FaultError::Bus.into());
    } else {
        page_table.memory.platform().copy(old, copy.head, 1);
        cursor.counts.bytes_copied += PAGE_SIZE;
    }
    let written = vma.flags().attributes().written();
    // The copy keeps the write-protection of the page.
    let attributes = if userfault { written.write_protected() } else { written };
    before_execution(page_table.memory, attributes.permissions(), copy);
    // The entry is read-only, so the MMU can only set accessed in the interim, which the new entry
    // has anyway.
    word.store(0, Ordering::Relaxed);
    page_table.invalidate_now(range, Level::PTE, &mut cursor.counts);
    if let Some(fresh) = fresh.take() {
        fresh.map(1);
    }
    word.store(attributes.entry(copy.head, Level::<P::Arch>::PTE).0, Ordering::Release);
    cursor.counts.entries_written += 2;
    cursor.counts.mapped(OwnerKind::Anonymous, 1);
    Ok(Some((old, dirty)))
}
