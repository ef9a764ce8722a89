//! Absent entries: swap entries move in runs; no others move.
//!
//! A swap entry refers to a slot, and neither records the page's address. So entries move without a
//! check of their folio, whether it is in the swap cache or not. A fault at the new address that
//! finds it mapped elsewhere maps a copy (`space::fault::swap_in`).

use core::sync::atomic::{AtomicU64, Ordering};

use crate::arch::{Absent, AbsentFormat, Entry};
use crate::platform::Platform;
use crate::table::run::{self, Entries};

use super::{MoveStop, PagesPiece};

impl<'s, P: Platform> PagesPiece<'_, 's, '_, '_, P> {
    /// Whether the entry may move: a page in swap whose slot has no other entry.
    pub(super) fn may_move_absent(&self, entry: Entry) -> Result<(), MoveStop> {
        match P::Arch::decode_absent(entry) {
            Some(Absent::Swap { exclusive: true, .. }) => Ok(()),
            Some(Absent::Swap { .. }) => Err(MoveStop::Busy),
            Some(Absent::Marker(_) | Absent::ProtNone { .. }) | None => Err(MoveStop::Marked),
        }
    }

    /// Moves the run of swap entries at the beginning of `slots`, as far as the entries are empty
    /// in `there`. No TLB holds them. Returns the number of entries.
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
