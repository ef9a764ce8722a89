//! Absent entries: swap entries move in runs; other absent entries do not move.
//!
//! A swap entry refers to a slot, and neither the entry nor the slot records the page's address.
//! Swap entries therefore move without a check of their folio, whether or not the folio is in the
//! swap cache. A fault at the new address that finds the folio mapped elsewhere maps a copy
//! (`space::fault::swap_in`).

use core::sync::atomic::{AtomicU64, Ordering};

use crate::arch::{Absent, AbsentFormat, Entry};
use crate::platform::Platform;
use crate::table::run::{self, Entries};

use super::{MoveStop, PagesPiece};

impl<'s, P: Platform> PagesPiece<'_, 's, '_, '_, P> {
    /// Whether the entry may move: it must be a swapped-out page whose slot has no other entry.
    pub(super) fn may_move_absent(&self, entry: Entry) -> Result<(), MoveStop> {
        match P::Arch::decode_absent(entry) {
            Some(Absent::Swap { exclusive: true, .. }) => Ok(()),
            Some(Absent::Swap { .. }) => Err(MoveStop::Busy),
            Some(Absent::Marker(_) | Absent::ProtNone { .. }) | None => Err(MoveStop::Marked),
        }
    }

    /// Moves the run of swap entries at the beginning of `slots`, up to the first non-empty entry
    /// in `there`. No TLB holds the entries. Returns the number of moved entries.
    #[inline(never)]
    pub(super) fn move_absents(
        &mut self,
        entries: &[AtomicU64],
        there: &[AtomicU64],
    ) -> Result<u32, MoveStop> {
        let (count, first) = P::Arch::match_absent(entries);
        self.may_move_absent(first)?;
        let count = run::count_empty(&there[..count as usize]);
        for (word, there) in entries[..count as usize].iter().zip(there) {
            let entry = Entry(word.load(Ordering::Relaxed));
            word.store(0, Ordering::Relaxed);
            there.store(self.arrived_absent(entry).0, Ordering::Relaxed);
        }
        Ok(count)
    }

    /// The entry at the target for a swap entry.
    pub(super) fn arrived_absent(&self, entry: Entry) -> Entry {
        let entry = P::Arch::mark_absent_soft_dirty(entry);
        if self.policy.what.keeps_protection {
            entry
        } else {
            P::Arch::strip_absent_userfault(entry)
        }
    }
}
