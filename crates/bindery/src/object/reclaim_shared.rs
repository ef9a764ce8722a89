//! Reclaim of shared memory: the folios around the one that the clock's hand has come to go with
//! it.
//!
//! Those are the pages after it in the object, as far as one table could map them. They share one
//! walk through the reverse map, and one flush for each VMA ([`super::swap_out`]).

use core::ptr::NonNull;

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::PageRange;
use crate::frame::{FolioOwner, Owner, Reference, Turn};
use crate::platform::Platform;
use crate::table::out_batch::OutBatch;

use super::ObjectState;
use super::reclaim::{Looked, ObjectFolio, Spare};
use super::swap_out::{Leaving, add_folios, swap_out};

/// Folios that lie in the same part of this many pages of an object go together: one table may map
/// them.
const WINDOW: u64 = 512;

/// Looks at a folio of shared memory, and at those after it that were not looked at in this turn of
/// the clock, up to `most` pages: those that were not used lately go to swap, by way of `batch`, which
/// is empty before and after. Without a turn, those of them go that are passing, and the others stay
/// as they are. Never waits for a sleeping lock; not in a read section.
///
/// Complexity: as [`swap_out`].
pub(crate) fn reclaim_around<P: Platform>(
    memory: &Memory<P>,
    held: Reference<'_, P>,
    turn: Option<Turn>,
    most: u64,
    batch: &mut OutBatch,
) -> Looked {
    let Some(lock) = memory.frames.try_lock_folio(&memory.platform, *held) else {
        return ObjectFolio::Busy.into();
    };
    let FolioOwner { owner: Owner::Memory(object), first } = lock.owner(&memory.platform) else {
        return Looked::NOTHING;
    };
    let (object, first): (NonNull<ObjectState>, u64) = (object.cast(), first.first());
    // SAFETY: the object owns the folio, whose lock is held: it lives until it has let the folio
    // go. Before it does, it waits for the invalidate lock, which `swap_out` releases after its last
    // use.
    let object = unsafe { object.as_ref() };
    if let Some(turn) = turn {
        memory.frames.note_look(*held, turn);
    }
    if !object.may_be_swapped() {
        memory.frames.mark_unevictable(*held);
        // Its neighbors stay as well. A look at them now would say that they may go later.
        return ObjectFolio::NotReclaimable.into();
    }
    let mut folios = ArrayVec::new();
    let leaving = Leaving::locked(lock, held, first);
    let end = (first + 1).next_multiple_of(WINDOW).min(first.saturating_add(most));
    let next = PageRange { first: leaving.end(), end };
    folios.push(leaving);
    add_folios(memory, object, next, u32::MAX, &mut folios, |leaving| {
        turn.map_or_else(|| leaving.is_passing(memory), |turn| !leaving.is_looked_at(memory, turn))
    });
    let spare = if turn.is_some() { Spare::Used } else { Spare::Nothing };
    let later = swap_out(memory, object, &mut folios, spare, batch).may_go_later();
    Looked { freed: batch.write_out(memory), later }
}
