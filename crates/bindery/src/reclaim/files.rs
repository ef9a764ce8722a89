//! Folios of objects: clean pages of files are dropped, dirty ones stored, and shared memory is
//! swapped out.

use crate::Memory;
use crate::addr::Frame;
use crate::folio::OwnerKind;
use crate::frame::FrameRange;
use crate::object::reclaim::{ObjectFolio, Spare, reclaim_folio};
use crate::object::reclaim_shared::reclaim_around;
use crate::object::{settle_written, store_for_reclaim};
use crate::platform::Platform;

use super::pressure::EvictionBatch;
use super::sweep::Which;

impl<'m, P: Platform> EvictionBatch<'m, P> {
    /// Examines the folio of the frame and the folios after it, up to `most` pages. They are
    /// swapped out through the batch, which is finished first. Returns the number of freed pages.
    // A separate function, because the list is on the stack, and the paths of other folios do not
    // need it.
    #[inline(never)]
    pub(super) fn reclaim_shared_memory(&mut self, frame: Frame, which: Which, most: u64) -> u64 {
        // The swap-out may wait for a device, which a batch must not do.
        let finished = self.finish();
        let Some(held) = self.memory.frames.try_hold(frame) else { return finished };
        let looked = reclaim_around(self.memory, held, which.turn(), most, self.idle());
        finished + self.note(looked)
    }

    /// Examines the folio of the frame. Returns the number of freed pages.
    pub(super) fn reclaim_of_file(&mut self, frame: Frame, spare: Spare) -> u64 {
        let memory = self.memory;
        let Some(held) = memory.frames.try_hold(frame) else { return 0 };
        let folio = reclaim_folio(memory, held, spare);
        if folio == ObjectFolio::Storable {
            self.put_off(frame);
        }
        self.note(folio.into())
    }

    /// Remembers a folio to be stored when the batch has no lock.
    #[cold]
    fn put_off(&mut self, frame: Frame) {
        // A thread that does not work for a pager may store the folio.
        self.later |= self.memory.platform().works_for_pager() || self.dirty.is_full();
        let _ = self.dirty.try_push(frame);
    }

    /// Starts to store the dirty folios that were found. Called without locks.
    #[cold]
    pub(super) fn store_dirty(&mut self) {
        let is_allowed = !self.memory.platform().works_for_pager();
        for frame in self.dirty.take() {
            self.later |= is_allowed && store_for_reclaim(self.memory, frame);
        }
    }
}

/// Drops the clean pages of all files, whether recently used or not. Returns the number of freed
/// pages.
pub(super) fn drop_clean_pages<P: Platform>(memory: &Memory<P>) -> u64 {
    settle_written(memory);
    let FrameRange { first, count } = memory.frames.span();
    let (mut at, mut freed) = (0, 0);
    while at < count {
        let frame = first.plus(at);
        at += crate::folio::pages_of_block(&memory.frames, frame);
        let folio = memory.frames.folio_of(frame).filter(|folio| folio.head == frame);
        let of_file = |folio: &_| {
            let handle = memory.frames.folio(*folio);
            handle.is_of_object() && handle.owner_kind() == OwnerKind::File
        };
        if folio.filter(of_file).is_some()
            && let Some(held) = memory.frames.try_hold(frame)
            && let ObjectFolio::Freed(pages) = reclaim_folio(memory, held, Spare::Nothing)
        {
            freed += u64::from(pages);
        }
    }
    freed
}
