//! Folio locks that a device's request temporarily holds, and their next holders.

use std::sync::atomic::Ordering::Relaxed;

use super::world::{Omit, World, note};
use crate::folio::Folio;
use crate::folio::count::{self, mappings_in};
use crate::folio::lock_word;
use crate::sync::word::Word;

impl World {
    /// Hands the folio's lock to a device's request, takes it back, and calls `f` with it.
    pub(super) fn with_lock_of_request(&self, folio: Folio, f: impl FnOnce()) {
        let state = &self.meta(folio.head).state;
        if !lock_word::try_lock(state) {
            return note(&self.seen.busy);
        }
        let disown = || {
            if self.omit != Omit::SettleHandOver {
                self.disown(folio);
            }
        };
        lock_word::begin_writeback(state, &self.sleepers, disown);
        assert!(lock_word::take_from_request(state, disown));
        f();
        lock_word::unlock(state, &self.sleepers, || self.disown(folio));
    }

    /// Maps a page for anon group 2 under the folio's lock, unless the folio is mapped for another
    /// group.
    pub(super) fn map_again(&self, folio: Folio) {
        let count = &self.meta(folio.head).count;
        let may_come = match self.omit {
            Omit::LookAtMappings => true,
            _ => mappings_in(Word::load(count, Relaxed)) == 0,
        };
        if !may_come {
            return;
        }
        if self.omit != Omit::LookAtMappings || self.owner(folio) == 0 {
            self.set_owner(folio, 2);
        }
        count::map(count, 1).expect("there is room");
        note(&self.seen.mapped_again);
        // SAFETY: the cell panics if another access has not ended from this CPU's view.
        self.heir.with_mut(|heir| unsafe { *heir = 2 });
    }
}
