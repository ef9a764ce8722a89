//! Hooks for tests: slots with a wrong count of entries, and folios with a pin.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::Ordering::Relaxed;

use super::area::SlotRun;
use super::slots::while_areas_stay;
use crate::Memory;
use crate::addr::Frame;
use crate::folio::PinRoom;
use crate::platform::Platform;

/// Changes the count of the entries that refer to a slot by `by`. Panics if the area has no such
/// slot.
pub fn damage_slot<P: Platform>(memory: &Memory<P>, area: u8, slot: u64, by: i16) {
    let run = SlotRun { area, first: slot, count: 1 };
    while_areas_stay(memory.platform(), |stay| {
        let (cluster, cells, _) = run.cells(stay, memory).expect("a slot");
        let _state = cluster.state.lock();
        let cell = cells[0].load(Relaxed);
        cells[0].store(cell.wrapping_add_signed(i64::from(by)), Relaxed);
    });
}

/// Calls `f` while the folio around `frame` is pinned, as by a driver that found the page just
/// before its entry was cleared. Panics if the frame has no folio.
pub fn with_pin<P: Platform, R>(memory: &Memory<P>, frame: Frame, f: impl FnOnce() -> R) -> R {
    let reference = memory.frames.try_hold(frame).expect("a folio");
    let folio = *reference;
    assert!(memory.frames.folio(folio).pin(PinRoom::All), "too many pins");
    drop(reference);
    let result = f();
    // SAFETY: 1. the pin was taken above.
    unsafe { memory.frames.folio(folio).unpin() };
    result
}
