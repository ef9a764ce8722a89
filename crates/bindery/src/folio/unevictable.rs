//! Folios that reclaim has found locked into memory (`mlock`, `SHM_LOCK`) and therefore skips.
//!
//! Only a reverse map walk can detect the lock, and a program may lock nearly all of memory. So the
//! folio is marked. (Linux keeps such folios on a list of their own.) Nothing else depends on the
//! mark, and an unlocked folio may remain marked for a while. The clock hand clears all marks
//! during one turn (`swap/clock.rs`, `look_at_all`) when a locked mapping is removed or unlocked,
//! and before a search fails.

use core::sync::atomic::Ordering::Relaxed;

use super::aging::{ReclaimState, Turn};
use super::handle::change_flag;
use crate::frame::meta::{LOOKED, MetaKind, UNEVICTABLE, is_kind};

impl ReclaimState<'_> {
    /// Whether the folio has the mark.
    #[inline]
    pub(crate) fn is_unevictable(self) -> bool {
        self.0.load(Relaxed) & UNEVICTABLE != 0
    }

    /// Marks the folio, which the caller holds.
    pub(crate) fn mark_unevictable(self) {
        change_flag(self.0, UNEVICTABLE, true);
    }

    /// Clears the mark.
    #[cold]
    pub(crate) fn clear_unevictable(self) {
        self.change_marked(|state| state & !UNEVICTABLE);
    }

    /// Records that the clock hand has passed the folio in this turn; without this, the next turn
    /// would consider the folio examined.
    pub(crate) fn note_pass(self, turn: Turn) {
        let looked = if turn == Turn::Odd { LOOKED } else { 0 };
        self.change_marked(|state| state & !LOOKED | looked);
    }

    /// Changes the state of a marked folio. The hand holds no reference, so each change is
    /// conditional. Otherwise:
    /// 1. CPU A reads the state of a folio with the mark.
    /// 2. CPU B frees the folio, which becomes a block of the allocator.
    /// 3. CPU A sets a bit in the block's state, and the block never joins its neighbor again.
    fn change_marked(self, change: impl Fn(u32) -> u32) {
        let marked = |state: u32| is_kind(state, MetaKind::Folio) && state & UNEVICTABLE != 0;
        let change = |state: u32| marked(state).then(|| change(state));
        // A folio that has been freed since needs no change.
        let _ = self.0.fetch_update(Relaxed, Relaxed, change);
    }
}
