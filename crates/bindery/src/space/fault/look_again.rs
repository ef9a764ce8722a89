//! A fault at an entry that is not empty.

use core::sync::atomic::Ordering;

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{self, Absent, AbsentFormat, Arch, Entry, EntryIndex, Kind, Level, Marker};
use crate::error::FaultError;
use crate::events::Unchanged;
use crate::platform::Platform;
use crate::table::cursor::Cursor;
use crate::table::locking::{Depth, Node};
use crate::table::protect::{Watched, Writable};
use crate::table::run::Slots;
use crate::table::{EntryAt, run};

use super::copy_on_write::folio_range;
use super::{Access, AddressSpace, MappingFlags, Resolved, Step, Vma};

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// The entry of `page` was not empty: decides, with the entry locked, what to do about it.
    pub(super) fn look_again(
        &self,
        vma: &Vma,
        page: VirtAddr,
        access: Access,
    ) -> Result<Step, FaultError> {
        let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
        let mut cursor = self.page_table.cursor(range, Depth::Floor(Level::PTE));
        let EntryAt { node, index, entry: raw } = cursor.entry_at(page);
        match node.level.kind(raw) {
            Kind::Empty | Kind::Table => return Ok(Step::Again),
            Kind::Leaf => {}
            Kind::Absent => return absent_step(vma, P::Arch::decode_absent(raw), access),
        }
        let entry = node.single(raw, index);
        if P::Arch::attributes(entry).permissions.contains(access.permission()) {
            let written = cursor.counts.entries_written;
            self.record_access(&mut cursor, node, index, access);
            if cursor.counts.entries_written == written {
                let written = self.page_table.stats.read().entries_written;
                let fault = Unchanged { root: self.page_table.root, page, written };
                self.page_table.memory.rare.repeats.note::<P::Arch>(&fault);
            }
            self.forget_locally(range);
            return Ok(Step::Done(Resolved::Spurious));
        }
        if access != Access::Write {
            // The VMA allows it and the entry does not, though `mprotect` rewrites entries.
            return Err(FaultError::Protection);
        }
        if P::Arch::attributes(entry).userfault {
            return Ok(Step::Lift);
        }
        let frame = P::Arch::frame(entry);
        let offset = (page.0 & (node.level.span() - 1)) >> PAGE_SHIFT;
        let frame = frame.plus(offset as u32);
        let Some(folio) = self.page_table.memory.frames.folio_of(frame) else {
            let huge = node.level == Level::PMD && self.page_table.memory.is_zero(frame);
            return Ok(if huge { Step::FillHuge } else { Step::Copy });
        };
        let number = frame.0 - folio.head.0;
        let range = folio_range(vma, page, number, folio);
        let change = vma.entry_policy();
        match change.writable {
            Writable::Noticed => return Ok(Step::Note),
            Writable::All if change.watched == Watched::SoftDirty => return Ok(Step::Note),
            Writable::All => return Ok(Step::Reuse(range)),
            // What an object has is never a private mapping's to write to.
            Writable::Exclusive if !self.page_table.memory.frames.folio(folio).is_anonymous() => {
                return Ok(Step::Copy);
            }
            Writable::Exclusive => {}
        }
        let reuse =
            if change.watched == Watched::SoftDirty { Step::Note } else { Step::Reuse(range) };
        let exclusive = self.page_table.memory.frames.folio(folio).exclusive().contains(number);
        if exclusive && (node.level == Level::PTE || self.exclusive_whole(folio)) {
            return Ok(reuse);
        }
        drop(cursor);
        if self.claim(vma, range, folio) { Ok(reuse) } else { Ok(Step::Copy) }
    }

    /// The entry allows the access, and the fault came all the same: the MMU may be one that
    /// leaves accessed and dirty to software. A contiguous run is answered from any of its
    /// entries, so all of them say it.
    pub(in crate::space) fn record_access(
        &self,
        cursor: &mut Cursor<'_, 'm, P>,
        node: Node<P::Arch>,
        index: EntryIndex,
        access: Access,
    ) {
        let slots = self.page_table.slots(node.table);
        let contig = node.in_contig(run::load(slots, index));
        let size = if contig { P::Arch::CONTIG_ENTRIES } else { 1 };
        let first = index.align_down(size);
        for slot in &slots[first.slots(size)] {
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
                P::Arch::replace_entry(slot, old, record);
                cursor.counts.entries_written += 1;
            }
        }
    }
}

/// An absent entry stands where the program went.
fn absent_step(vma: &Vma, entry: Option<Absent>, access: Access) -> Result<Step, FaultError> {
    match entry {
        Some(Absent::ProtNone { .. }) => Err(FaultError::Protection),
        Some(Absent::Marker(Marker::Guard)) => Err(FaultError::NotMapped),
        Some(Absent::Marker(Marker::UserfaultWriteProtect)) => {
            let protects = vma.has(MappingFlags::USERFAULT_WRITE_PROTECT)
                && vma.userfault().is_some_and(|userfault| !userfault.is_closed());
            // A write comes here only where nobody is to be told of it.
            Ok(if protects && access != Access::Write { Step::MapProtected } else { Step::Lift })
        }
        // Swapped out meanwhile.
        Some(Absent::Swap { .. }) => Ok(Step::Again),
        Some(Absent::Marker(Marker::Poison)) | None => Err(FaultError::Bus),
    }
}
