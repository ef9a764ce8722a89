//! Folios that cannot be swapped out after all, so that their entries map them again.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::Ordering;

use crate::addr::{PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Attributes, Entry, Permissions};
use crate::events::RareEvents;
use crate::folio::Folio;
use crate::folio::SwapPlace;
use crate::platform::Platform;
use crate::swap::{CachedFolio, frequent_events};

use super::{EntryAt, SwapOut};

impl<P: Platform> SwapOut<'_, '_, '_, '_, P> {
    /// Restores the entries of a folio whose first page belongs at `start`.
    #[cold]
    pub(super) fn restore(&mut self, folio: Folio, start: VirtAddr) {
        let page_table = self.span.page_table;
        let memory = page_table.memory;
        let Some(place) = memory.frames.folio(folio).swap_place() else { return };
        RareEvents::note(&frequent_events(memory).swap_out_busy);
        let end = start.0.wrapping_add(u64::from(folio.pages()) << PAGE_SHIFT);
        // The first page may belong below address zero, where no page is mapped.
        let first = if start.0 < end { start.0 } else { 0 };
        let part = VirtRange::raw(first, end).intersection(self.span.range());
        let mut at = part.start();
        while at < part.end() {
            let EntryAt { node, index, entry: raw } = self.span.entry_at(at);
            let page = (at.0.wrapping_sub(start.0) >> PAGE_SHIFT) as u32;
            if let Some(attributes) = self.attributes_of(raw, place, page) {
                let frame = folio.head.plus(page);
                let leaf = P::Arch::page_entry(frame, node.level, attributes);
                page_table.entries(node.table)[index.position()].store(leaf.0, Ordering::Release);
                self.span.counts.entries_written += 1;
            }
            at = VirtAddr(at.0 + node.level.span());
        }
        match self.scan.held {
            Some(held) if *held == folio => {
                CachedFolio::new(memory, held, place).call_back();
                self.scan.swapped_held = false;
            }
            _ => {
                // SAFETY: 1. `store_run` left the lock to the batch, which omits the folio from now
                // on.
                let lock = unsafe { memory.frames.folio(folio).lock_of_batch() };
                CachedFolio::new(memory, lock.locked(), place).call_back();
            }
        }
    }

    /// The attributes of the leaf that replaces the entry, if the entry refers to the slot of the
    /// folio's page.
    fn attributes_of(&self, raw: Entry, place: SwapPlace, page: u32) -> Option<Attributes> {
        let slot = place.first + u64::from(page);
        match P::Arch::decode_absent(raw) {
            Some(Absent::Swap { device, slot: named, soft_dirty, userfault, .. })
                if device == place.area && named == slot =>
            {
                let mut attributes = Attributes {
                    accessed: true,
                    dirty: true,
                    soft_dirty,
                    userfault,
                    ..self.attributes
                };
                // The next store checks whether the page may be written.
                attributes.permissions -= Permissions::WRITE;
                Some(attributes)
            }
            Some(Absent::Swap { .. } | Absent::Marker(_) | Absent::ProtNone { .. }) | None => None,
        }
    }
}
