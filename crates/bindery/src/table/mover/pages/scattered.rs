//! A folio whose entries are not one run of one table on each side, because the folio crosses
//! tables or its entries differ. It moves page by page, which is rare.
//!
//! The entries of up to 512 pages must be kept until the pins are checked, and the stack has no
//! room for a copy. The entries therefore stay in place as `PROT_NONE` entries. Permissions and key
//! are lost; the target's VMA supplies them.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{Ordering, fence};

use crate::addr::{Frame, Order, PAGE_SIZE, VirtAddr};
use crate::arch::{Absent, AbsentFormat, Arch, Attributes, Entry, Level, Permissions};
use crate::folio::{Folio, FolioIndex};
use crate::platform::Platform;
use crate::table::mover::piece::Below;
use crate::table::{TableEntry, run};

use super::leaves::lock;
use super::{MoveStop, PagesPiece};

/// The content of a `PROT_NONE` entry of the source.
struct ProtNoneEntry<'s> {
    at: TableEntry<'s>,
    frame: Frame,
    attributes: Attributes,
}

impl<'s, P: Platform> PagesPiece<'_, 's, '_, '_, P> {
    /// Moves the folio whose page `number` is at page `at` of the piece, if the entries from there
    /// on are all of its mappings. Returns the number of entries.
    #[cold]
    #[inline(never)]
    pub(super) fn move_scattered(
        &mut self,
        at: u32,
        folio: Folio,
        number: u32,
    ) -> Result<u32, MoveStop> {
        let (memory, frames) = (self.page_table.memory, &self.page_table.memory.frames);
        let held = (self.piece.len / PAGE_SIZE) as u32 - at;
        let rest = folio.pages() - number;
        let count = (0..rest.min(held))
            .take_while(|page| self.may_come(at + page, folio.head.plus(number + page)))
            .count() as u32;
        if frames.folio(folio).mappings() != count {
            return Err(self.part_of_folio(at, folio, number, count));
        }
        if !frames.folio(folio).exclusive().contains_all(number, count) {
            return Err(MoveStop::Busy);
        }
        let Some(index) = self.index_of_folio(at, number) else {
            return Err(self.parts_of_folio(at, folio, number, count));
        };
        for page in at..at + count {
            // The target pages may lie in more than one table.
            self.target_table(self.target_at(page), Level::PTE)?;
        }
        // SAFETY: 1. the run at the source, whose table is locked.
        let lock = unsafe { lock(memory, folio) }?;
        for page in at..at + count {
            self.make_prot_none(page);
        }
        fence(Ordering::SeqCst);
        let range = self.source_pages(at, count);
        if frames.folio(folio).is_pinned_since() {
            if P::Arch::CONTIG_ENTRIES > 1 {
                // Contiguous runs become single pages.
                self.page_table.invalidate_now(range, Level::PTE, self.counts);
            }
            for page in at..at + count {
                self.restore_leaf(page);
            }
            return Err(MoveStop::Busy);
        }
        lock.give_to(self.policy.what.owner, index);
        self.keep_content(folio);
        let mut page = at;
        while page < at + count {
            page += self.restore_run(page, at + count - page);
        }
        self.gather.stale(range, P::Arch::PTE);
        self.counts.entries_read += u64::from(count);
        self.counts.entries_written += 3 * u64::from(count);
        Ok(count)
    }

    /// The reason to stop at a folio that cannot move as a whole. Only its `count` pages from page
    /// `number` on, which are at page `at` of the piece, could move.
    fn part_of_folio(&self, at: u32, folio: Folio, number: u32, count: u32) -> MoveStop {
        let after = number + count;
        let held = (self.piece.len / PAGE_SIZE) as u32 - at;
        let left = (self.policy.what.target.0 + self.policy.what.len - self.piece.target)
            / PAGE_SIZE
            - u64::from(at);
        if after < folio.pages() && count == held && u64::from(held) < left {
            let wanted = u64::from(folio.pages() - number).min(left);
            return MoveStop::Longer(wanted * PAGE_SIZE);
        }
        self.parts_of_folio(at, folio, number, count)
    }

    /// The target index of a folio whose page `number` is at page `at` of the piece. `None` if the
    /// index of the folio's first page would be negative.
    pub(super) fn index_of_folio(&self, at: u32, number: u32) -> Option<FolioIndex> {
        FolioIndex::for_folio(self.index_at(at), number)
    }

    /// The size of the parts into which a folio must be split. Only its `count` pages from page
    /// `number` on, at page `at` of the piece, can move.
    pub(super) fn parts_of_folio(
        &self,
        at: u32,
        folio: Folio,
        number: u32,
        count: u32,
    ) -> MoveStop {
        // The largest parts that do not straddle an end of the moved range.
        let ends = [number, (number + count) % folio.pages()];
        let ends = ends.iter().filter(|end| **end > 0);
        let order = ends.map(|end| Order(end.trailing_zeros() as u8)).min();
        match order {
            Some(order) if order < folio.order => {
                MoveStop::Split(VirtAddr(self.source_at(at)), order)
            }
            // The whole folio is mapped here, and also elsewhere.
            _ => MoveStop::Busy,
        }
    }

    /// The level-1 entry of the source for a page of the piece.
    fn source_entry(&mut self, page: u32) -> Option<TableEntry<'s>> {
        let at = self.source_at(page);
        match self.below(self.from, at, Level::PTE) {
            Below::Table(table) => {
                Some(TableEntry { table, index: P::Arch::PTE.index_of(VirtAddr(at)) })
            }
            Below::Nothing(_) | Below::Huge(..) => None,
        }
    }

    /// Whether a page of the piece has this frame and its new address is empty.
    fn may_come(&mut self, page: u32, frame: Frame) -> bool {
        let target = self.target_at(page);
        let vacant = match self.below(self.to, target, Level::PTE) {
            Below::Table(table) => {
                let index = P::Arch::PTE.index_of(VirtAddr(target));
                run::load(self.page_table.entries(table), index).is_empty()
            }
            Below::Nothing(_) => true,
            Below::Huge(..) => false,
        };
        let Some(at) = self.source_entry(page).filter(|_| vacant) else { return false };
        let TableEntry { table, index } = at;
        let entry = run::load(self.page_table.entries(table), index);
        entry.0 & P::Arch::PRESENT != 0
            && P::Arch::frame(P::Arch::clear_contig(entry, index)) == frame
    }

    /// Turns the page's leaf into a `PROT_NONE` entry, which retains the frame and the accessed,
    /// dirty, soft-dirty and userfault bits.
    fn make_prot_none(&mut self, page: u32) {
        let Some(TableEntry { table, index }) = self.source_entry(page) else { return };
        self.mark(table);
        // A contiguous run is hidden as a whole, since all pages of the folio are.
        let word = &self.page_table.entries(table)[index.position()];
        let entry = P::Arch::clear_contig(Entry(word.swap(0, Ordering::Relaxed)), index);
        let hidden = P::Arch::encode_prot_none(P::Arch::frame(entry), P::Arch::attributes(entry));
        word.store(hidden.0, Ordering::Relaxed);
    }

    /// A `PROT_NONE` entry of the source.
    fn prot_none_entry(&mut self, page: u32) -> Option<ProtNoneEntry<'s>> {
        let at = self.source_entry(page)?;
        let entry = run::load(self.page_table.entries(at.table), at.index);
        match P::Arch::decode_absent(entry)? {
            Absent::ProtNone { frame, accessed, dirty, soft_dirty, userfault, memory } => {
                let attributes = Attributes {
                    accessed,
                    dirty,
                    soft_dirty,
                    userfault,
                    memory,
                    ..self.policy.what.attributes
                };
                Some(ProtNoneEntry { at, frame, attributes })
            }
            Absent::Swap { .. } | Absent::Marker(_) => None,
        }
    }

    /// Turns the page's entry back into a leaf without write permission: the next store faults, and
    /// the fault checks whether the store is allowed.
    fn restore_leaf(&mut self, page: u32) {
        let Some(found) = self.prot_none_entry(page) else { return };
        let ProtNoneEntry { at: TableEntry { table, index }, frame, mut attributes } = found;
        attributes.permissions -= Permissions::WRITE;
        let leaf = P::Arch::page_entry(frame, Level::PTE, attributes);
        self.page_table.entries(table)[index.position()].store(leaf.0, Ordering::Release);
    }

    /// Moves up to `most` `PROT_NONE` pages from `page` on that have equal attributes and lie in
    /// one table of the target. Returns the number of moved pages.
    fn restore_run(&mut self, page: u32, most: u32) -> u32 {
        let target = self.target_at(page);
        let to = P::Arch::PTE.index_of(VirtAddr(target));
        let most = most.min(to.left::<P::Arch>());
        let Some(found) = self.prot_none_entry(page) else { return most };
        let ProtNoneEntry { frame, attributes, .. } = found;
        let mut count = 0;
        while count < most
            && let Some(next) = self.prot_none_entry(page + count)
            && next.attributes == attributes
        {
            let TableEntry { table, index } = next.at;
            self.page_table.entries(table)[index.position()].store(0, Ordering::Relaxed);
            self.page_table.change_entry_count(table, 0, 1);
            count += 1;
        }
        if let Ok(table) = self.target_table(target, Level::PTE) {
            self.mark(table);
            let mut restored = attributes;
            if restored.userfault {
                restored.permissions -= Permissions::WRITE;
            }
            let leaf = self.arrived(P::Arch::page_entry(frame, Level::PTE, restored));
            self.page_table.write_leaves(TableEntry { table, index: to }, leaf, count);
        }
        count
    }
}
