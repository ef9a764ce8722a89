//! What goes before the clock moves: folios that programs on their way through memory have behind them
//! ([`crate::frame::Age::Passing`]).
//!
//! The clock has its share where such pages were missed: the hand passes as many frames first
//! (`swap/passing.rs`).

use crate::Memory;
use crate::addr::Frame;
use crate::frame::{Age, OwnerKind, Turn};
use crate::object::reclaim::Spare;
use crate::platform::Platform;

use super::pressure::Batch;
use super::search::Search;

/// Which folios go of those that reclaim comes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Which {
    /// Those that were not used since the last turn, and were not looked at in this one. The others
    /// get older.
    Cold(Turn),
    /// Those that are passing. The others stay as they are.
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
    /// Sends out passing folios, up to `target` pages. Returns how many pages were freed; the batch is
    /// finished.
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

    /// Sends out the folio of that frame, if it is passing, and others beside it. Returns how many
    /// pages were freed at once.
    fn send_passing<'m>(&'m self, head: Frame, target: u64, batch: &mut Batch<'m, P>) -> u64 {
        let found = self.frames.folio_of(head).filter(|folio| folio.head == head);
        let Some(folio) = found.filter(|folio| self.frames.age(*folio) == Age::Passing) else {
            return 0;
        };
        if !self.frames.is_anonymous(folio) && !self.frames.is_of_object(folio) {
            return 0;
        }
        match self.frames.owner_kind(folio) {
            OwnerKind::File => batch.note(self.reclaim_of_file(head, Spare::Nothing)),
            OwnerKind::Anonymous | OwnerKind::SharedMemory if !self.has_room_in_swap() => 0,
            OwnerKind::Anonymous => self.reclaim_anonymous(head, Which::Passing, target, batch),
            OwnerKind::SharedMemory => {
                self.reclaim_shared_memory(head, Which::Passing, target, batch)
            }
        }
    }
}
