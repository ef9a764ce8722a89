//! Reclaim of shared memory: the clock's hand takes neighboring folios together.
//!
//! The neighbors are the folios after it in the object that one table could map. They share one
//! walk through the reverse map, and one flush for each VMA ([`super::swap_out`]).

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

/// Folios in the same aligned window of this many pages of an object are taken together: one table
/// may map them.
const WINDOW: u64 = 512;

/// Reclaims from a folio of shared memory, and from those after it that were not examined in this
/// turn of the clock, up to `most` pages: swaps out those that were not used recently, through
/// `batch`, which is empty before and after. Without a turn, swaps out only the passing ones, and
/// leaves the others unchanged. Never waits for a sleeping lock; not in a read section.
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
    // SAFETY: the object owns the folio, whose lock is held: it lives until it has released the
    // folio. Before it does, it waits for the invalidate lock, which `swap_out` releases after its
    // last use.
    let object = unsafe { object.as_ref() };
    if let Some(turn) = turn {
        memory.frames.folio(locked.folio()).reclaim_state().note_look(turn);
    }
    if !object.may_be_swapped() {
        memory.frames.folio(locked.folio()).reclaim_state().mark_unevictable();
        // Its neighbors stay as well. An attempt on them now would report that they may be freed
        // later.
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
