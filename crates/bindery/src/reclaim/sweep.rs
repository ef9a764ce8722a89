//! Sweeps before the clock moves: evicts folios that programs have passed on their way through
//! memory ([`crate::folio::Age::Passing`]).
//!
//! If such pages were missed, the hand first passes the same number of frames (`swap/passing.rs`).

use crate::Memory;
use crate::addr::Frame;
use crate::folio::{Age, OwnerKind, Turn};
use crate::object::reclaim::Spare;
use crate::platform::Platform;

use super::pressure::Batch;
use super::search::Search;

/// The folios to evict among those that reclaim reaches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Which {
    /// Those that were not used since the last turn, and not examined in this one. The others age.
    Cold(Turn),
    /// Those that are passing. The others do not change.
    Passing,
}

impl Which {
    /// The turn of the clock, if it moves.
    pub(super) fn turn(self) -> Option<Turn> {
        match self {
            Self::Cold(turn) => Some(turn),
            Self::Passing => None,
        }
    }
}

impl<P: Platform> Memory<P> {
    /// Swaps out passing folios, up to `target` pages. Returns the number of freed pages; the batch
    /// is finished.
    pub(super) fn sweep<'m>(
        &'m self,
        target: u64,
        search: &mut Search,
        batch: &mut Batch<'m, P>,
    ) -> u64 {
        let passing = &self.clock.passing;
        if passing.waiting() == 0 {
            return 0;
        }
        let missed = passing.take_missed();
        let mut freed = 0;
        if missed > 0 {
            let step = search.step_of(self, missed);
            freed += self.pass_over(&step, target, search, batch) + batch.finish();
        }
        self.clock.begin_sweep();
        while freed + batch.pages() < target {
            let left = (target - freed - batch.pages()).min(passing.waiting());
            let Some(head) = passing.take() else { break };
            freed += self.send_passing(head, left, batch);
            if batch.is_due(search.scanned) {
                freed += batch.finish();
            }
        }
        freed += batch.finish();
        self.clock.end_sweep();
        freed
    }

    /// Swaps out the folio of that frame, if it is passing, and others beside it. Returns the
    /// number of pages freed at once.
    fn send_passing<'m>(&'m self, head: Frame, target: u64, batch: &mut Batch<'m, P>) -> u64 {
        let found = self.frames.folio_of(head).filter(|folio| folio.head == head);
        let Some(folio) =
            found.filter(|folio| self.frames.folio(*folio).reclaim_state().age() == Age::Passing)
        else {
            return 0;
        };
        if !self.frames.folio(folio).is_anonymous() && !self.frames.folio(folio).is_of_object() {
            return 0;
        }
        match self.frames.folio(folio).owner_kind() {
            OwnerKind::File => batch.note(self.reclaim_of_file(head, Spare::Nothing)),
            OwnerKind::Anonymous | OwnerKind::SharedMemory if !self.has_room_in_swap() => 0,
            OwnerKind::Anonymous => self.reclaim_anonymous(head, Which::Passing, target, batch),
            OwnerKind::SharedMemory => {
                self.reclaim_shared_memory(head, Which::Passing, target, batch)
            }
        }
    }
}
