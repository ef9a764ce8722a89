//! Making one huge leaf of a table of small ones, by copying what they name into one folio.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Frame, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{self, Arch, Attributes, Entry, Kind};
use crate::frame::Folio;
use crate::platform::Platform;
use crate::tlb::Gather;

use super::lock::Depth;
use super::{PageTable, run};

/// What becomes of a table of small leaves.
pub(crate) struct Replacement {
    /// Where the table's span begins.
    pub(crate) base: VirtAddr,
    /// A fresh folio of the table's size, with one reference: the caller's, which becomes the leaf's
    /// mappings.
    pub(crate) folio: Folio,
    /// What the new leaf says.
    pub(crate) attributes: Attributes,
    /// For whoever splits the leaf again.
    pub(crate) reserve: Frame,
}

impl<P: Platform> PageTable<'_, P> {
    /// Copies the pages that the table for `base` maps into the folio, zeroes the others, and puts
    /// one leaf into the table's place. The old table is in the gather, with all that it maps. Says
    /// whether there was such a table, with nothing in it but leaves; nothing has changed otherwise.
    ///
    /// The caller keeps faults and pins out of the range: nobody may write to a page while it is
    /// copied, and no translation of it is left by then:
    /// 1. the entry that names the table is cleared, and flushed;
    /// 2. the pages are copied; 3. the leaf is written.
    pub(crate) fn replace_by_copy(&self, what: &Replacement, gather: &mut Gather) -> bool {
        let memory = self.memory;
        let span = arch::table_span::<P::Arch>(1);
        let range = VirtRange::raw(what.base.0, what.base.0 + span);
        let mut cursor = self.cursor(range, Depth::Floor(1));
        let (node, _, _) = cursor.entry_at(what.base);
        let Some((parent, index)) = cursor.parent_of(what.base, 1) else { return false };
        let slots = self.slots(node.table);
        let entries = arch::entries::<P::Arch>();
        let leaf_or_empty = |index: u32| {
            matches!(arch::kind::<P::Arch>(run::load(slots, index), 1), Kind::Leaf | Kind::Empty)
        };
        if node.level != 1 || !(0..entries).all(leaf_or_empty) {
            return false;
        }
        let parent_slot = &self.slots(parent.table)[index as usize];
        // Release: who reads the entry as empty finds its table locked, or the flush done.
        parent_slot.store(0, Ordering::Release);
        gather.stale_tables(range);
        self.flush(gather, &mut cursor.counts);
        let mut index = 0;
        while index < entries {
            let raw = run::load(slots, index);
            let to = what.folio.head.plus(index);
            let count = if arch::kind::<P::Arch>(raw, 1) == Kind::Leaf {
                let first = P::Arch::frame(P::Arch::unblock(raw, index));
                let count = consecutive::<P>(slots, index, first, memory.zero_frame);
                memory.platform.copy(first, to, count);
                cursor.counts.bytes_copied += u64::from(count) * PAGE_SIZE;
                count
            } else {
                let count = run::empty(slots, index, entries - index);
                memory.platform.zero(to, count);
                cursor.counts.bytes_zeroed += u64::from(count) * PAGE_SIZE;
                count
            };
            cursor.counts.entries_read += u64::from(count);
            index += count;
        }
        memory.frames.first_map(what.folio, what.folio.pages());
        let leaf = P::Arch::leaf(what.folio.head, 2, what.attributes);
        parent_slot.store(leaf.0, Ordering::Release);
        self.push_reserve(parent.table, what.reserve);
        cursor.counts.entries_written += 2;
        cursor.counts.folios_touched += 1;
        self.gather_subtree(node, 1, gather, &mut cursor.counts);
        true
    }
}

/// How many leaves from `index` on name consecutive frames from `first` on; the zero page has no
/// successor.
fn consecutive<P: Platform>(slots: &[AtomicU64], index: u32, first: Frame, zero: Frame) -> u32 {
    let follows = |(offset, slot): &(usize, &AtomicU64)| {
        let raw = Entry(slot.load(Ordering::Relaxed));
        let at = index + *offset as u32;
        raw.0 & P::Arch::PRESENT != 0
            && P::Arch::frame(P::Arch::unblock(raw, at)) == first.plus(*offset as u32)
    };
    if first == zero {
        return 1;
    }
    slots[index as usize..].iter().enumerate().take_while(follows).count() as u32
}
