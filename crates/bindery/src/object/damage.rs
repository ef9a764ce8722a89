//! Damaged objects, for tests of the auditor.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::Ordering::Relaxed;

use crate::platform::Platform;

use super::{Accounting, Object};

/// Damage to an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ObjectDamage {
    /// Changes by this value the number of pages that count as committed for the object.
    Committed(i64),
    /// Changes by this value the number of pages that count as dirty in all files.
    Unsaved(i64),
    /// Changes by this value the number of the object's pages that count as dirty.
    UnsavedOf(i64),
    /// Counts one more writable shared mapping than exist.
    MoreWriters,
    /// Counts one writable shared mapping fewer than exist.
    FewerWriters,
    /// Swaps the frames of two pages. A second call undoes the swap.
    Swap(u64, u64),
    /// Drops the page, even if it is mapped.
    Drop(u64),
    /// Pretends that this many runs of pages are being stored, indefinitely; 0 ends the pretense.
    Saving(u32),
}

/// Damages an object. Panics if pages to be swapped are not in memory.
pub fn damage_object<P: Platform>(object: &Object<'_, P>, damage: ObjectDamage) {
    let (memory, state) = (object.memory, object.state());
    match damage {
        ObjectDamage::Committed(by) => {
            let committed = state.committed().wrapping_add_signed(by);
            state.committed.store(committed, Relaxed);
        }
        ObjectDamage::Unsaved(by) => memory.dirty_limit().charge(by as u64),
        ObjectDamage::UnsavedOf(by) => state.pages.unsaved.damage(by),
        ObjectDamage::MoreWriters => state.seals.writable_added(),
        ObjectDamage::FewerWriters => state.seals.writable_removed(),
        ObjectDamage::Swap(first, second) => state.pages.change(memory, |index, _| {
            let frame = |page| index.get(page).expect("a page").frame;
            let (one, two) = (frame(first), frame(second));
            index.replace(first, two, 1);
            index.replace(second, one, 1);
            ((), 0)
        }),
        ObjectDamage::Drop(page) => {
            let frame = state.pages.look(memory.platform(), |index| index.get(page));
            let frame = frame.expect("a page").frame;
            let folio = memory.frames.folio_of(frame).expect("a folio");
            state.pages.change(memory, |index, nodes| {
                let run = index.take_run(page, page + 1, nodes);
                ((), run.map_or(0, |run| -i64::from(run.count)))
            });
            if state.accounting() == Accounting::PerPage {
                state.uncommit(memory, 1);
            }
            // SAFETY: 1. the index held the reference for the page that was removed.
            unsafe { memory.frames.folio(folio).release_pages(1) };
        }
        ObjectDamage::Saving(runs) => state.pages.ends.set_writes(runs),
    }
}
