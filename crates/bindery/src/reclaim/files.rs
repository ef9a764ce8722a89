//! Folios of objects: clean pages of files are dropped, shared memory goes to swap.

use crate::Memory;
use crate::addr::Frame;
use crate::object::reclaim::{ObjectFolio, Spare, reclaim_folio};
use crate::platform::Platform;

impl<P: Platform> Memory<P> {
    /// Looks at the folio of the frame. Returns how many pages were freed.
    pub(super) fn reclaim_of_object(&self, frame: Frame) -> u64 {
        let Some(held) = self.frames.try_hold(&self.platform, frame) else { return 0 };
        match reclaim_folio(self, held, Spare::Used) {
            ObjectFolio::Freed(pages) => u64::from(pages),
            _ => 0,
        }
    }
}
