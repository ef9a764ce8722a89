//! Folios of objects: clean pages of files are dropped, shared memory goes to swap.

use crate::Memory;
use crate::addr::Frame;
use crate::frame::{FrameRange, OwnerKind, Turn};
use crate::object::reclaim::{ObjectFolio, Spare, reclaim_folio};
use crate::object::reclaim_shared::reclaim_around;
use crate::platform::Platform;

impl<P: Platform> Memory<P> {
    /// Looks at the folio of the frame, and at those after it, up to `most` pages. Returns how many pages were freed.
    pub(super) fn reclaim_shared_memory(&self, frame: Frame, turn: Turn, most: u64) -> u64 {
        let held = self.frames.try_hold(&self.platform, frame);
        held.map_or(0, |held| reclaim_around(self, held, turn, most))
    }

    /// Looks at the folio of the frame. Returns how many pages were freed.
    pub(super) fn reclaim_of_file(&self, frame: Frame) -> u64 {
        let Some(held) = self.frames.try_hold(&self.platform, frame) else { return 0 };
        match reclaim_folio(self, held, Spare::Used) {
            ObjectFolio::Freed(pages) => u64::from(pages),
            _ => 0,
        }
    }

    /// Drops the clean pages of all files, used lately or not (`/proc/sys/vm/drop_caches`). Dirty,
    /// locked and pinned ones stay, and those that somebody works with. Returns how many pages were
    /// freed.
    ///
    /// Context: may sleep. Complexity: in the frames, and as a reclaim of each file's folio.
    pub fn drop_clean_pages(&self) -> u64 {
        let FrameRange { first, count } = self.frames.span();
        let (mut at, mut freed) = (0, 0);
        while at < count {
            let frame = first.plus(at);
            at += self.frames.pages_of_block(frame);
            let folio = self.frames.folio_of(frame).filter(|folio| folio.head == frame);
            let of_file = |folio: &_| {
                self.frames.is_of_object(*folio)
                    && self.frames.owner_kind(*folio) == OwnerKind::File
            };
            if folio.filter(of_file).is_some()
                && let Some(held) = self.frames.try_hold(&self.platform, frame)
                && let ObjectFolio::Freed(pages) = reclaim_folio(self, held, Spare::Nothing)
            {
                freed += u64::from(pages);
            }
        }
        freed
    }
}
