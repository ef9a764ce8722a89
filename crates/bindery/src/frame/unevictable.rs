//! Folios that reclaim has found locked into memory (`mlock`, `SHM_LOCK`): it passes over them.
//!
//! To find that out takes a walk through the reverse map, and a program may lock nearly all of memory.
//! So the folio remembers it. (Linux keeps such folios on a list of their own.) Nothing else depends
//! on the note, and a folio that is unlocked may keep it for a while:
//!
//! - When pages are unlocked, reclaim looks at all folios for a turn of its clock
//!   ([`crate::swap::clock::Clock::note_unlocked`]).
//! - A search that finds nothing else looks at them again before it gives up. That finds those of
//!   which the mapping that was locked has gone, and another is left.

use core::sync::atomic::Ordering::Relaxed;

use super::meta::UNEVICTABLE;
use super::{Folio, Frames};
use crate::platform::Platform;

impl<P: Platform> Frames<P> {
    /// Whether the last look found the folio locked into memory.
    #[inline]
    pub(crate) fn is_unevictable(&self, folio: Folio) -> bool {
        self.meta(folio.head).state.load(Relaxed) & UNEVICTABLE != 0
    }

    /// Notes what a look at the folio has found.
    pub(crate) fn set_unevictable(&self, folio: Folio, locked: bool) {
        self.change_state_flag(folio, UNEVICTABLE, locked);
    }
}
