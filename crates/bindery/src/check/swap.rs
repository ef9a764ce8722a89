//! Verifies swap: slots, the entries that refer to them, and the pages in the swap cache.

use crate::addr::VirtAddr;
use crate::frame::meta::MetaKind;
use crate::platform::Platform;
use crate::swap;
use crate::swap::SlotRun;
use crate::swap::slot_state::SlotState;

use super::{Audit, Violation};

impl<P: Platform> Audit<'_, '_, P> {
    /// Verifies an entry at `at` that refers to these slots.
    pub(super) fn swap_entry(
        &mut self,
        at: VirtAddr,
        slots: SlotRun,
        exclusive: bool,
    ) -> Result<(), Violation> {
        let SlotRun { area, first, count } = slots;
        for slot in first..first + u64::from(count) {
            let cell = swap::state_of(self.memory, area, slot).ok_or(Violation::NoSlot(at))?;
            let content = cell.0 & SlotState::CONTENT != 0 || self.cached(cell, area, slot);
            let named = cell.entries() == 1 || cell.entries() > 1 && !exclusive;
            if !content || !named || cell.has(SlotState::BUSY) {
                return Err(Violation::WrongSlot { at, area, slot });
            }
        }
        self.swap_entries += u64::from(count);
        Ok(())
    }

    /// Whether the folio of the cell's page has the slot in its metadata.
    fn cached(&self, cell: SlotState, area: u8, slot: u64) -> bool {
        let frames = &self.memory.frames;
        let Some(frame) = cell.frame() else { return false };
        let Some(folio) = frames.folio_of(frame) else { return false };
        frames.folio(folio).swap_place().is_some_and(|place| {
            let number = u64::from(frame.0 - folio.head.0);
            (place.area, place.first + number) == (area, slot) && place.cached <= folio.pages()
        })
    }

    /// Verifies the totals: entries that refer to slots, used slots, frames of the slot records and
    /// of the store.
    pub(super) fn swap(&mut self) -> Result<(), Violation> {
        let memory = self.memory;
        let (mut named, mut taken) = (0, 0);
        for area in memory.swap_areas() {
            for slot in 0..area.slots {
                let Some(cell) = swap::state_of(memory, area.number, slot) else {
                    continue;
                };
                named += u64::from(cell.entries());
                taken += u64::from(cell != SlotState::FREE);
                if cell.has(SlotState::CACHED) && !self.cached(cell, area.number, slot) {
                    let at = VirtAddr(0);
                    return Err(Violation::WrongSlot { at, area: area.number, slot });
                }
            }
        }
        let says: u64 = memory.swap_areas().map(|area| area.taken).sum();
        if named != self.swap_entries || taken != says {
            let holds = self.swap_entries;
            return Err(Violation::SwapSlots { named, holds, taken, says });
        }
        let (mut compressed, mut account) = (0, 0);
        memory.frames.for_each_block(|_, order, kind| match kind {
            MetaKind::Compressed => compressed += u64::from(order.pages()),
            MetaKind::Swap => account += u64::from(order.pages()),
            MetaKind::Reserved
            | MetaKind::Free
            | MetaKind::Raw
            | MetaKind::Table
            | MetaKind::Folio
            | MetaKind::Tail
            | MetaKind::Slab
            | MetaKind::Zero
            | MetaKind::Kernel
            | MetaKind::Embedder
            | MetaKind::Cpu
            | MetaKind::Front => {}
        });
        let store = &memory.swap.store;
        store.check(&memory.frames).map_err(Violation::Leaked)?;
        let held = (store.frames_held(), memory.swap.account(&memory.frames));
        if (compressed, account) != held {
            return Err(Violation::SwapFrames { compressed, account, held });
        }
        Ok(())
    }
}
