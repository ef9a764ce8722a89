//! Folios whose content may be dropped (`MADV_FREE`), which need no slots unless they were written
//! since.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::arch::Level;
use crate::folio::{Folio, OwnerKind};
use crate::platform::Platform;

use super::super::cursor::Cursor;
use super::super::deposit::free_deposit;
use super::super::run::Run;
use super::{FlushTime, SwapOut};

impl<P: Platform> SwapOut<'_, '_, '_, '_, P> {
    /// Removes entries whose folio's content may be dropped (`MADV_FREE`). If the folio was written
    /// since, its entries are restored, and the folio is no longer lazy.
    #[cold]
    pub(super) fn drop_lazy(&mut self, run: &Run<P::Arch>, folio: Folio, pages: u32) {
        if self.batch.lazy.is_full() {
            if self.flush == FlushTime::Deferred {
                return;
            }
            self.unmap_lazy();
        }
        let memory = self.span.page_table.memory;
        let part = Run { count: pages >> run.node.level.order().0, ..*run };
        let suspended = self.span.suspend(&part);
        if suspended.dirty {
            memory.frames.folio(folio).mark_dirty();
            suspended.restore();
            return;
        }
        match self.flush {
            FlushTime::Here => suspended.clear_until_flush(),
            FlushTime::Deferred => suspended.clear(),
        }
        if self.flush == FlushTime::Deferred {
            self.span.counts.unmapped(OwnerKind::Anonymous, pages);
        }
        if run.node.level > Level::PTE {
            let Cursor { locks, counts, .. } = &mut **self.span;
            free_deposit(memory, locks, run.node.table, counts);
        }
        self.span.counts.entries_written += u64::from(part.count);
        // The batch has room, as checked above.
        let _ = self.batch.lazy.try_push((folio, pages));
    }

    /// Frees the lazy folios, after a flush.
    pub(super) fn unmap_lazy(&mut self) {
        let memory = self.span.page_table.memory;
        self.span.flush();
        let mut batch = memory.free_batch();
        for (folio, pages) in self.batch.lazy.drain(..) {
            self.span.counts.unmapped(OwnerKind::Anonymous, pages);
            // SAFETY: 1. the folios' entries were cleared, and each folio is visited once; 2.
            // flushed above.
            unsafe { memory.frames.folio(folio).unmap_into(&mut batch, pages, || false) };
        }
    }
}
