//! References by frame number.

use super::super::count::{ReferencesRefused, TOO_MANY_REFERENCES};
use super::super::handle::{Folio, Freed};
use super::{Machine, assert_all_free, free, fresh, new_frames, unmap};
use crate::addr::{Frame, Order};
use crate::frame::meta::MetaKind;
use crate::frame::slab::Slab;
use crate::frame::{AllocateFor, Frames, FreeBatch};
use crate::platform::Platform;

/// Freezes and frees the folio if these references are its only holders. Returns whether it was
/// freed.
fn free_last<P: Platform>(frames: &Frames<P>, folio: Folio, count: u32) -> bool {
    // SAFETY: 1. the tests own the references and do not use them afterwards.
    let frozen = unsafe { frames.folio(folio).freeze(count) };
    frozen.map(|folio| folio.free_into(&mut FreeBatch::new(frames))).is_some()
}

#[test]
fn only_known_folios_are_referenced_by_number() {
    let frames = new_frames(64);
    let folio = frames.new_folio(Order(2)).unwrap().leave();
    let raw = frames.allocate(Order::PAGE, AllocateFor::Use).unwrap();
    let slab: Slab<u64, Machine> = Slab::new();
    let object = slab.allocate(&frames, 7).unwrap();
    let holds = |frame| frames.try_hold(frame).map(|held| *held);
    assert!((0..64).all(|frame| holds(Frame(0x100 + frame)).is_none()));
    assert_eq!((holds(Frame(0)), holds(Frame(u32::MAX))), (None, None));

    fresh(&frames, folio).map(4);
    assert!((0..4).all(|page| holds(folio.head.plus(page)) == Some(folio)));
    let held = frames.try_hold(folio.head.plus(3)).unwrap();
    assert_eq!(unmap(&frames, folio, 4), Freed::No);
    assert_eq!(frames.meta(folio.head).kind(), MetaKind::Folio);
    drop(held);
    assert_eq!(holds(folio.head), None);

    // SAFETY: 1. allocated above. 2. the block has no user.
    unsafe { slab.free(&frames, object) };
    slab.trim(&frames);
    free(&frames, raw, Order::PAGE);
    assert_all_free(&frames);
}

#[test]
fn references_do_not_overflow_into_pins() {
    let frames = new_frames(64);
    let folio = frames.new_folio(Order::PAGE).unwrap().leave();
    fresh(&frames, folio).publish(1);
    (1..TOO_MANY_REFERENCES).for_each(|_| assert!(frames.folio(folio).try_get()));
    assert!(!frames.folio(folio).try_get() && frames.try_hold(folio.head).is_none());
    assert_eq!(
        (frames.folio(folio).references(), frames.folio(folio).pins()),
        (TOO_MANY_REFERENCES, 0)
    );
    assert!(!free_last(&frames, folio, 1));
    assert!(free_last(&frames, folio, TOO_MANY_REFERENCES));
    assert_all_free(&frames);
}

#[test]
fn a_much_held_folio_has_cache_room() {
    let frames = new_frames(64);
    let folio = frames.new_folio(Order::PAGE).unwrap().leave();
    fresh(&frames, folio).publish(1);
    (1..TOO_MANY_REFERENCES).for_each(|_| assert!(frames.folio(folio).try_get()));
    assert_eq!(frames.folio(folio).add_references(2), Ok(()));
    assert!(!frames.folio(folio).try_get());
    assert_eq!(
        (frames.folio(folio).references(), frames.folio(folio).pins()),
        (TOO_MANY_REFERENCES + 2, 0)
    );
    assert!(free_last(&frames, folio, TOO_MANY_REFERENCES + 2));
    assert_all_free(&frames);
}

#[test]
fn references_into_pins_or_freed_folios_are_refused() {
    let frames = new_frames(64);
    let folio = frames.new_folio(Order::PAGE).unwrap().leave();
    assert_eq!(frames.folio(folio).add_references(1), Err(ReferencesRefused));
    fresh(&frames, folio).publish(1);
    let room = (1 << 16) - 2;
    assert_eq!(frames.folio(folio).add_references(room + 1), Err(ReferencesRefused));
    assert_eq!((frames.folio(folio).references(), frames.refused()), (1, 2));
    assert_eq!(frames.folio(folio).add_references(room), Ok(()));
    assert_eq!(frames.folio(folio).add_references(1), Err(ReferencesRefused));
    assert_eq!((frames.folio(folio).references(), frames.folio(folio).pins()), (room + 1, 0));
    assert!(free_last(&frames, folio, room + 1));
    assert_eq!(frames.refused(), 3);
}

#[test]
fn a_folio_held_by_number_is_not_cut() {
    let frames = new_frames(64);
    let folio = frames.new_folio(Order(1)).unwrap().leave();
    fresh(&frames, folio).publish(1);
    let held = frames.try_hold(folio.head).unwrap();
    assert!(frames.folio(folio).split(Order::PAGE, |_| 0).is_err());
    drop(held);
    assert_eq!(frames.folio(folio).split(Order::PAGE, |_| 0), Ok(()));
}
