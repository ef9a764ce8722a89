//! Sweeps before the clock moves: evicts folios that programs have passed on their way through
//! memory ([`crate::folio::Age::Passing`]).
//!
//! If such pages were missed, the hand first passes the same number of frames (`swap/passing.rs`).

use crate::Memory;
use crate::addr::Frame;
use crate::folio::{Age, OwnerKind, Turn};
use crate::object::reclaim::Spare;
use crate::platform::Platform;

use super::pressure::EvictionBatch;
use super::search::Search;

/// The kinds of folios to evict among those that reclaim reaches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Which {
    /// Folios that were not used since the last turn and not examined in this one. The other folios
    /// age.
    Cold(Turn),
    /// Passing folios. The other folios do not change.
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

impl<P: Platform> EvictionBatch<'_, P> {
    /// Swaps out passing folios, up to `target` pages. Returns the number of freed pages; the batch
    /// is finished.
    pub(super) fn sweep(&mut self, target: u64, search: &mut Search) -> u64 {
        let memory = self.memory;
        let passing = &memory.clock.passing;
        if passing.waiting() == 0 {
            return 0;
        }
        let missed = passing.take_missed();
        let mut freed = 0;
        if missed > 0 {
            let step = search.step_of(memory, missed);
            freed += self.pass_over(&step, target, search) + self.finish();
        }
        memory.clock.begin_sweep();
        while freed + self.pages() < target {
            let left = (target - freed - self.pages()).min(passing.waiting());
            let Some(head) = passing.take() else { break };
            freed += self.send_passing(head, left);
            if self.is_due(search.scanned) {
                freed += self.finish();
            }
        }
        freed += self.finish();
        memory.clock.end_sweep();
        freed
    }

    /// Swaps out the folio of that frame, if it is passing, and its passing neighbors. Returns the
    /// number of pages freed immediately.
    fn send_passing(&mut self, head: Frame, target: u64) -> u64 {
        let Memory { frames, swap, .. } = self.memory;
        let Some(folio) = frames.folio_of(head).filter(|folio| folio.head == head) else {
            return 0;
        };
        let handle = frames.folio(folio);
        if handle.reclaim_state().age() != Age::Passing
            || !handle.is_anonymous() && !handle.is_of_object()
        {
            return 0;
        }
        match handle.owner_kind() {
            OwnerKind::File => self.reclaim_of_file(head, Spare::Nothing),
            OwnerKind::Anonymous | OwnerKind::SharedMemory if !swap.has_room(frames) => 0,
            OwnerKind::Anonymous => self.reclaim_anonymous(head, Which::Passing, target),
            OwnerKind::SharedMemory => self.reclaim_shared_memory(head, Which::Passing, target),
        }
    }
}
