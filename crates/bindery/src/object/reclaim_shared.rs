//! Reclaim of shared memory: the clock's hand reclaims neighboring folios together.
//!
//! The neighbors are those folios after the found one that lie in the same object and that one
//! table could map. They share one walk of the reverse map and one flush for each VMA
//! ([`super::swap_out`]).

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::PageRange;
use crate::folio::{FolioOwner, FolioRef, Owner, Turn};
use crate::platform::Platform;
use crate::table::out_batch::OutBatch;

use super::ObjectState;
use super::reclaim::{LookedAt, ObjectFolio, Spare};
use super::swap_out::{Leaving, add_folios, swap_out};

/// Folios in the same aligned window of this many pages of an object are reclaimed together,
/// because one table may map them.
const WINDOW: u64 = 512;

/// Reclaims up to `most` pages from a folio of shared memory and from the folios after it that were
/// not examined in this turn of the clock: swaps out those that were not used recently, through
/// `batch`, which is empty before and after. Without a turn, swaps out only the passing folios and
/// leaves the others unchanged. Never waits for a sleeping lock; not called in a read section.
///
/// Complexity: as [`swap_out`].
pub(crate) fn reclaim_around<P: Platform>(
    memory: &Memory<P>,
    held: FolioRef<'_, P>,
    turn: Option<Turn>,
    most: u64,
    batch: &mut OutBatch,
) -> LookedAt {
    let Some(locked) = held.try_into_locked() else { return ObjectFolio::Busy.into() };
    let FolioOwner { owner: Owner::Memory(object), first } = locked.owner() else {
        return LookedAt::NOTHING;
    };
    let (object, first): (NonNull<ObjectState>, u64) = (object.cast(), first.first());
    // SAFETY: the object owns the folio, whose lock is held, so the object lives until it has
    // released the folio. Before that, it waits for the invalidate lock, which `swap_out` releases
    // after its last use.
    let object = unsafe { object.as_ref() };
    if let Some(turn) = turn {
        memory.frames.folio(locked.folio()).reclaim_state().note_look(turn);
    }
    if !object.may_be_swapped() {
        memory.frames.folio(locked.folio()).reclaim_state().mark_unevictable();
        // The folio's neighbors stay as well. An attempt on them now would report that they may be
        // freed later.
        return ObjectFolio::NotReclaimable.into();
    }
    let mut folios = ArrayVec::new();
    let leaving = Leaving::locked(locked, first);
    let end = (first + 1).next_multiple_of(WINDOW).min(first.saturating_add(most));
    let next = PageRange { first: leaving.end(), end };
    folios.push(leaving);
    add_folios(memory, object, next, &mut folios, |leaving| {
        turn.map_or_else(|| leaving.is_passing(memory), |turn| !leaving.is_looked_at(memory, turn))
    });
    let spare = if turn.is_some() { Spare::Used } else { Spare::Nothing };
    let later = swap_out(memory, object, &mut folios, spare, batch).may_go_later();
    LookedAt { freed: batch.write_out(memory), later }
}
