//! Folios of objects: drops clean pages of files, swaps out shared memory.

use crate::Memory;
use crate::addr::Frame;
use crate::folio::OwnerKind;
use crate::frame::FrameRange;
use crate::object::reclaim::{Looked, ObjectFolio, Spare, reclaim_folio};
use crate::object::reclaim_shared::reclaim_around;
use crate::platform::Platform;

use super::pressure::Batch;
use super::sweep::Which;

impl<P: Platform> Memory<P> {
    /// Examines the folio of the frame, and those after it, up to `most` pages. They are swapped
    /// out through `batch`, which is finished before. Returns the number of freed pages.
    // Separate: the list is on the stack, where the paths of other folios do not need it.
    #[inline(never)]
    pub(super) fn reclaim_shared_memory<'m>(
        &'m self,
        frame: Frame,
        which: Which,
        most: u64,
        batch: &mut Batch<'m, P>,
    ) -> u64 {
        // Swapping out may wait for a device, which a batch must not.
        let finished = batch.finish();
        let Some(held) = self.frames.try_hold(frame) else { return finished };
        let looked = reclaim_around(self, held, which.turn(), most, batch.idle());
        finished + batch.note(looked)
    }

    /// Examines the folio of the frame.
    pub(super) fn reclaim_of_file(&self, frame: Frame, spare: Spare) -> Looked {
        let held = self.frames.try_hold(frame);
        held.map_or(Looked::NOTHING, |held| reclaim_folio(self, held, spare).into())
    }

    /// Drops the clean pages of all files, recently used or not (`/proc/sys/vm/drop_caches`).
    /// Dirty, locked and pinned pages stay, and those in use by another thread. Returns the number
    /// of freed pages.
    ///
    /// Context: may sleep. Complexity: linear in the frames, plus a reclaim of each file's folio.
    pub fn drop_clean_pages(&self) -> u64 {
        let FrameRange { first, count } = self.frames.span();
        let (mut at, mut freed) = (0, 0);
        while at < count {
            let frame = first.plus(at);
            at += crate::folio::pages_of_block(&self.frames, frame);
            let folio = self.frames.folio_of(frame).filter(|folio| folio.head == frame);
            let of_file = |folio: &_| {
                self.frames.folio(*folio).is_of_object()
                    && self.frames.folio(*folio).owner_kind() == OwnerKind::File
            };
            if folio.filter(of_file).is_some()
                && let Some(held) = self.frames.try_hold(frame)
                && let ObjectFolio::Freed(pages) = reclaim_folio(self, held, Spare::Nothing)
            {
                freed += u64::from(pages);
            }
        }
        freed
    }
}
