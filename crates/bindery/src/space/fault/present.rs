//! A fault at a non-empty entry: decided under the table lock, carried out without it.

use core::sync::atomic::Ordering;

use crate::Memory;
use crate::addr::{Frame, PAGE_SHIFT, PageRange, VirtRange};
use crate::arch::{
    self, Absent, AbsentFormat, Arch, Entry, EntryIndex, Kind, Level, Marker, Permissions,
};
use crate::error::{Error, Failure};
use crate::events::Unchanged;
use crate::folio::Folio;
use crate::object::{Stop, mapped_write};
use crate::platform::Platform;
use crate::space::entry_policy::entry_policy;
use crate::space::userfault::{lift_protection, map_protected_page};
use crate::stats::Counts;
use crate::table::cursor::Cursor;
use crate::table::locking::Node;
use crate::table::protect::Writable;
use crate::table::publish::flush_local;
use crate::table::run::Entries;
use crate::table::{EntryAt, Table, run};
use crate::vma::{MappingFlags, Vma};

use super::copy_on_write::folio_range;
use super::decision::{Decision, FolioState, MappedPage, Present, Terms};
use super::object::stopped;
use super::slow::{Fault, Next, Stepped};
use super::{Access, Resolved};

impl<P: Platform> Fault<'_, '_, P> {
    /// Handles a page whose entry was not empty: decides with the table locked, then carries the
    /// decision out.
    // Never inlined: a fault on an empty entry or on a page in swap would pay for the registers.
    #[inline(never)]
    pub(super) fn handle_present_entry(&self) -> Stepped {
        let policy = entry_policy(self.vma);
        let (writable, watched) = (policy.writable, policy.watched);
        let terms = Terms { writable, watched, protects: is_write_protecting(self.vma) };
        let mut mapped = None;
        let mut decision = self.decide(terms, &mut mapped);
        let whole = || {
            mapped.map_or(self.range(), |(folio, number)| {
                folio_range(self.vma, self.page, number, folio)
            })
        };
        if decision == Decision::Claim {
            let claimed = mapped.is_some_and(|(folio, _)| self.claim(whole(), folio));
            decision = if claimed { terms.decide_exclusive() } else { Decision::Copy };
        }
        match decision {
            Decision::Again | Decision::Claim => Ok(Next::Again),
            Decision::Spurious => Ok(Next::Done(Resolved::Spurious)),
            Decision::Fail(error) => Err(error.into()),
            Decision::LiftProtection => lift_protection(self),
            Decision::MapProtected => map_protected_page(self),
            Decision::FillHuge => self.fill_huge(),
            Decision::Copy => self.copy(),
            Decision::NotifyWrite => self.notify_write(),
            Decision::Reuse => self.reuse(whole()),
        }
    }

    /// Decides with the table locked. Stores the folio and the page's number in it to `mapped`, if
    /// the decision depends on them. An access that the entry allows is recorded immediately.
    fn decide(&self, terms: Terms, mapped: &mut Option<(Folio, u32)>) -> Decision {
        let section = self.read_section();
        let mut cursor = self.cursor(&section);
        let EntryAt { node, index, entry: raw } = cursor.entry_at(self.page);
        let entry = node.single(raw, index);
        let present = match node.level.kind(raw) {
            Kind::Empty | Kind::Table => Present::Vacant,
            Kind::Absent => absent_entry(P::Arch::decode_absent(raw)),
            Kind::Leaf => {
                let attributes = P::Arch::attributes(entry);
                if attributes.permissions.contains(self.access.permission()) {
                    Present::Allowed
                } else if attributes.userfault {
                    Present::Protected
                } else {
                    Present::Refused
                }
            }
        };
        let (memory, frames) = (self.memory(), &self.memory().frames);
        let level = node.level;
        let page = || {
            let inside = (self.page.0 & (level.span() - 1)) >> PAGE_SHIFT;
            let frame = P::Arch::frame(entry).plus(inside as u32);
            let Some(folio) = frames.folio_of(frame) else {
                return content_without_folio(memory, level, frame);
            };
            let number = frame.0 - folio.head.0;
            *mapped = Some((folio, number));
            MappedPage::Folio(move || folio_state(memory, level, folio, number))
        };
        let decision = terms.decide(self.access, present, page);
        if decision == Decision::Spurious {
            self.note_spurious(&mut cursor, node, index);
        }
        decision
    }

    /// Handles an entry that allows the access: the TLB had an older entry, or the MMU leaves
    /// accessed and dirty to software.
    fn note_spurious(
        &self,
        cursor: &mut Cursor<'_, '_, P>,
        node: Node<P::Arch, Table<'_>>,
        index: EntryIndex,
    ) {
        let page_table = self.page_table();
        let written = cursor.counts.entries_written;
        record_access(cursor, node, index, self.access);
        if cursor.counts.entries_written == written {
            let written = page_table.counts.read().entries_written;
            let fault = Unchanged { root: page_table.root, page: self.page, written };
            self.memory().rare.repeats.note::<P::Arch>(&fault);
        }
        flush_local(page_table, self.range());
    }

    /// Sets the entries of the exclusive pages in `range` to the permissions of the VMA, and
    /// records the write to the page.
    fn reuse(&self, range: VirtRange) -> Stepped {
        let page_table = self.page_table();
        page_table.edit(|edit| edit.protect(range, &entry_policy(self.vma)))?;
        let section = self.read_section();
        let mut cursor = self.cursor(&section);
        let EntryAt { node, index, entry: raw } = cursor.entry_at(self.page);
        let writable = P::Arch::attributes(raw).permissions.contains(Permissions::WRITE);
        if writable && node.level.kind(raw) == Kind::Leaf {
            record_access(&mut cursor, node, index, Access::Write);
        }
        drop(cursor);
        drop(section);
        self.memory().platform().publish_entries();
        flush_local(page_table, range);
        Ok(Next::Done(Resolved::MadeWritable))
    }

    /// Makes one page writable and records the change: the object or a soft-dirty tracker must
    /// record the first write to each page. A huge leaf is recorded as a whole, unless the storage
    /// has no room for all of its pages.
    fn notify_write(&self) -> Stepped {
        let (memory, page_table, page) = (self.memory(), self.page_table(), self.page);
        let writable = entry_policy(self.vma).writable;
        let hint = {
            let section = self.read_section();
            page_table.peek(&section, page, &mut Counts::default()).node.level
        };
        let span = hint.span();
        let start = page.align_down(span);
        // A private mapping writes to copies, of which the object knows nothing.
        if let Some(object) = self.vma.object().filter(|_| writable == Writable::Noticed) {
            let first = self.vma.page_offset_of(start);
            let pages = PageRange::from_count(first, span >> PAGE_SHIFT);
            match mapped_write::begin(memory, object, pages) {
                Ok(()) => {}
                Err(Stop::Failed(Failure::Refused(Error::NoSpace))) if hint > Level::PTE => {
                    return split_leaf(self);
                }
                Err(stop) => return stopped(stop),
            }
        }
        let section = self.read_section();
        let mut cursor = self.cursor(&section);
        let EntryAt { node, index, entry: raw } = cursor.entry_at(page);
        if node.level != hint || node.level.kind(raw) != Kind::Leaf {
            return Ok(Next::Again);
        }
        // Since the decision, `UFFDIO_MOVE` or reclaim may have taken the page, and a read may have
        // mapped a zero page: both lock the VMA for reading only.
        if writable == Writable::Exclusive
            && !maps_exclusively(memory, node.level, node.single(raw, index))
        {
            return Ok(Next::Again);
        }
        if node.in_contig(raw) {
            page_table.unfold(node.place(index), page, &mut cursor.counts);
        }
        let word = &page_table.entries(node.table)[index.position()];
        let entry = Entry(word.load(Ordering::Relaxed));
        P::Arch::replace_entry(word, entry, |entry| {
            P::Arch::make_writable(entry, arch::Write::Now)
        });
        cursor.counts.entries_written += 1;
        drop(cursor);
        drop(section);
        memory.platform().publish_entries();
        flush_local(page_table, VirtRange::raw(start.0, start.0 + span));
        Ok(Next::Done(Resolved::MadeWritable))
    }
}

/// The state of the folio, of which a leaf of this level maps page `number`, or all pages.
#[inline(always)]
fn folio_state<P: Platform>(
    memory: &Memory<P>,
    level: Level<P::Arch>,
    folio: Folio,
    number: u32,
) -> FolioState {
    let handle = memory.frames.folio(folio);
    if !handle.is_anonymous() {
        FolioState::OfObject
    } else if handle.exclusive().contains(number)
        && (level == Level::PTE || handle.exclusive().contains_all(0, folio.pages()))
    {
        FolioState::Exclusive
    } else {
        FolioState::Shared
    }
}

/// Whether the leaf, whose table is locked, maps anonymous pages of this process alone.
fn maps_exclusively<P: Platform>(memory: &Memory<P>, level: Level<P::Arch>, leaf: Entry) -> bool {
    let frame = P::Arch::frame(leaf);
    memory.frames.folio_of(frame).is_some_and(|folio| {
        let number = frame.0 - folio.head.0;
        folio_state(memory, level, folio, number) == FolioState::Exclusive
    })
}

/// Splits the huge leaf that maps the page, so that the storage is asked for one page.
#[cold]
fn split_leaf<P: Platform>(fault: &Fault<'_, '_, P>) -> Stepped {
    let section = fault.read_section();
    let mut cursor = fault.cursor(&section);
    let EntryAt { node, entry, .. } = cursor.entry_at(fault.page);
    if node.level > Level::PTE && node.level.kind(entry) == Kind::Leaf {
        cursor.split_table_at(fault.page)?;
    }
    Ok(Next::Again)
}

/// Records an access that the entry permits, for an MMU that leaves accessed and dirty to software.
/// The MMU may read any entry of a contiguous run, so the access is recorded in all of them.
pub(in crate::space) fn record_access<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    node: Node<P::Arch, Table<'_>>,
    index: EntryIndex,
    access: Access,
) {
    update_leaves(cursor, node, index, |entry| {
        if access == Access::Write {
            P::Arch::make_writable(entry, arch::Write::Now)
        } else {
            P::Arch::mark_accessed(entry)
        }
    });
}

/// Records a write that the mapping does not permit, to a leaf that stays read-only.
pub(in crate::space) fn record_forced_write<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    node: Node<P::Arch, Table<'_>>,
    index: EntryIndex,
) {
    update_leaves(cursor, node, index, P::Arch::mark_written);
}

/// Replaces the leaf by `update` of it, and with it those of its contiguous run.
#[inline(always)]
fn update_leaves<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    node: Node<P::Arch, Table<'_>>,
    index: EntryIndex,
    update: impl Fn(Entry) -> Entry,
) {
    let entries = cursor.page_table.entries(node.table);
    let contig = node.in_contig(run::load(entries, index));
    let size = if contig { P::Arch::CONTIG_ENTRIES } else { 1 };
    let first = index.align_down(size);
    for word in &entries[first.positions(size)] {
        let old = Entry(word.load(Ordering::Relaxed));
        cursor.counts.entries_read += 1;
        if update(old) != old {
            P::Arch::replace_entry(word, old, &update);
            cursor.counts.entries_written += 1;
        }
    }
}

/// The content of a leaf whose frame belongs to no folio. `F`, the type of folio states, is chosen
/// by the caller.
fn content_without_folio<P: Platform, F>(
    memory: &Memory<P>,
    level: Level<P::Arch>,
    frame: Frame,
) -> MappedPage<F> {
    match memory.is_zero(frame) {
        // Frames of the memory are in the direct map.
        false => MappedPage::Shown { readable: memory.frames.manages(frame) },
        true if level == Level::PMD => MappedPage::HugeZero,
        true => MappedPage::Zero,
    }
}

/// The kind of an absent entry.
fn absent_entry(entry: Option<Absent>) -> Present {
    match entry {
        Some(Absent::ProtNone { .. }) => Present::ProtNone,
        Some(Absent::Marker(Marker::Guard)) => Present::Guard,
        Some(Absent::Marker(Marker::UserfaultWriteProtect)) => Present::ProtectedVacant,
        Some(Absent::Swap { .. }) => Present::Swap,
        Some(Absent::Marker(Marker::Poison)) | None => Present::Poison,
    }
}

/// Whether an open userfaultfd write-protects pages of the VMA.
pub(in crate::space) fn is_write_protecting(vma: &Vma) -> bool {
    vma.has(MappingFlags::USERFAULT_WRITE_PROTECT)
        && vma.userfault().is_some_and(|userfault| !userfault.is_closed())
}
