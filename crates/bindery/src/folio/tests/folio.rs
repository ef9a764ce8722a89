//! Folios: counts, anon-exclusive bits, splits.

extern crate std;

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::super::count::TooManyMappings;
use super::super::exclusive::ExclusiveRun;
use super::super::handle::{Folio, Freed, MAX_FOLIO_ORDER};
use super::super::mapping::unmap_shared_page;
use super::super::owner::FolioIndex;
use super::super::split::SplitError;
use super::{Machine, assert_all_free, blocks, free, fresh, new_frames, release, try_lock, unmap};
use crate::addr::{Frame, Order};
use crate::frame::meta::{EXCLUSIVE, FOLIO_LOCK, MetaKind, state_of};
use crate::frame::{AllocateFor, Frames};

#[test]
fn a_fresh_folio_is_wholly_exclusive_or_not() {
    for order in Order::PAGE.up_to(MAX_FOLIO_ORDER) {
        let frames = new_frames(2048);
        let folio = frames.new_exclusive_folio(order).unwrap().leave();
        assert_eq!((frames.folio(folio).references(), frames.folio(folio).mappings()), (0, 0));
        assert!(frames.try_hold(folio.head).is_none());
        assert!(frames.folio(folio).exclusive().contains_all(0, folio.pages()));
        let shared = frames.new_folio(order).unwrap().leave();
        let none = ExclusiveRun { exclusive: false, count: folio.pages() };
        assert_eq!(frames.folio(shared).exclusive().run(0, folio.pages()), none);
        fresh(&frames, shared).discard();
        assert!(!frames.folio(folio).is_dirty());
        for page in 0..folio.pages() {
            assert_eq!(frames.folio_of(folio.head.plus(page)), Some(folio));
        }
        fresh(&frames, folio).discard();
        assert_all_free(&frames);
        assert_eq!(frames.refused(), 0);
    }
    assert!(new_frames(4096).new_folio(MAX_FOLIO_ORDER.above()).is_none());
}

#[test]
fn the_last_mapping_or_reference_frees() {
    let frames = new_frames(64);
    let folio = frames.new_exclusive_folio(Order(4)).unwrap().leave();
    let counts = || (frames.folio(folio).references(), frames.folio(folio).mappings());
    fresh(&frames, folio).map(16);
    assert_eq!(counts(), (0, 16));
    frames.folio(folio).map(16).unwrap();
    assert!(frames.folio(folio).try_get());
    assert_eq!(counts(), (1, 32));
    assert_eq!(unmap(&frames, folio, 16), Freed::No);
    assert_eq!(unmap(&frames, folio, 16), Freed::No);
    assert_eq!(counts(), (1, 0));
    assert_eq!(release(&frames, folio), Freed::Yes);
    assert_eq!(*frames.platform().released.lock().unwrap(), [(folio.head, 16)]);

    let folio = frames.new_exclusive_folio(Order::PAGE).unwrap().leave();
    fresh(&frames, folio).map(1);
    assert_eq!(unmap(&frames, folio, 1), Freed::Yes);
    assert_all_free(&frames);
}

/// This path applies neither to the last mapping nor to a mapping of a larger folio; the dirty mark
/// is set first.
#[test]
fn a_shared_page_loses_one_mapping_at_once() {
    let frames = new_frames(64);
    // SAFETY: 1. and 2. no entries exist, and each of the test's mappings is dropped once.
    let drop_one = |frame, dirty| unsafe { unmap_shared_page(&frames, frame, dirty) };
    let page = frames.new_exclusive_folio(Order::PAGE).unwrap().leave();
    fresh(&frames, page).map(1);
    frames.folio(page).map(1).unwrap();
    frames.folio(page).map(1).unwrap();
    assert!(drop_one(page.head, false));
    assert_eq!((frames.folio(page).mappings(), frames.folio(page).is_dirty()), (2, false));
    assert!(drop_one(page.head, true));
    assert_eq!((frames.folio(page).mappings(), frames.folio(page).is_dirty()), (1, true));
    assert!(!drop_one(page.head, true));
    assert_eq!(unmap(&frames, page, 1), Freed::Yes);

    let large = frames.new_exclusive_folio(Order(4)).unwrap().leave();
    fresh(&frames, large).map(16);
    frames.folio(large).map(16).unwrap();
    assert!(!drop_one(large.head, true) && !drop_one(large.head.plus(1), true));
    assert_eq!((frames.folio(large).mappings(), frames.folio(large).is_dirty()), (32, false));
    assert_eq!(unmap(&frames, large, 32), Freed::Yes);
    assert!(!drop_one(Frame(u32::MAX), true));
    assert_all_free(&frames);
    assert_eq!(frames.refused(), 0);
}

#[test]
fn only_pages_of_live_folios_have_a_folio() {
    let frames = new_frames(64);
    let folio = frames.new_exclusive_folio(Order(4)).unwrap().leave();
    // From now on, the machine has no other memory.
    while frames.allocate(Order::PAGE, AllocateFor::Use).is_some() {}
    fresh(&frames, folio).discard();
    let nothing = |frame: Frame| assert_eq!(frames.folio_of(frame), None, "{frame:?}");
    (0..16).map(|page| folio.head.plus(page)).for_each(nothing);
    nothing(Frame(0));
    nothing(Frame(u32::MAX));
    nothing(Frame(0x100 + 63));

    let raw = frames.allocate(Order(4), AllocateFor::Use).unwrap();
    assert_eq!(raw, folio.head);
    (0..16).map(|page| folio.head.plus(page)).for_each(nothing);
    for kind in [MetaKind::Table, MetaKind::Slab, MetaKind::Zero] {
        frames.meta(raw).state.store(state_of(kind, Order::PAGE), Relaxed);
        nothing(raw);
    }
    frames.meta(raw).reset(MetaKind::Raw, Order(4));
    free(&frames, raw, Order(4));

    // A smaller folio at the same frame does not inherit the tails of the larger one.
    let small = frames.new_exclusive_folio(Order(2)).unwrap().leave();
    assert_eq!(small.head, folio.head);
    (4..16).map(|page| folio.head.plus(page)).for_each(nothing);
    (0..4).for_each(|page| assert_eq!(frames.folio_of(small.head.plus(page)), Some(small)));
}

#[test]
fn too_many_mappings_are_refused() {
    let frames = new_frames(64);
    let folio = frames.new_exclusive_folio(Order(4)).unwrap().leave();
    fresh(&frames, folio).map(16);
    frames.meta(folio.head).count.store(((1 << 31) - 17) << 32, Relaxed);
    assert_eq!(frames.folio(folio).map(16), Ok(()));
    assert_eq!(frames.folio(folio).map(1), Err(TooManyMappings));
    assert_eq!(frames.folio(folio).mappings(), (1 << 31) - 1);
}

#[test]
fn removing_absent_counts_is_counted_only() {
    let frames = new_frames(64);
    let folio = frames.new_exclusive_folio(Order(1)).unwrap().leave();
    fresh(&frames, folio).publish(1);
    assert_eq!(unmap(&frames, folio, 1), Freed::No);
    frames.folio(folio).map(2).unwrap();
    assert_eq!(release(&frames, folio), Freed::No);
    assert_eq!(release(&frames, folio), Freed::No);
    assert_eq!(frames.refused(), 2);
    assert_eq!((frames.folio(folio).references(), frames.folio(folio).mappings()), (0, 2));
    assert_eq!(unmap(&frames, folio, 2), Freed::Yes);
}

#[test]
fn of_many_threads_exactly_one_frees() {
    let frames = new_frames(64);
    for _ in 0..200 {
        let folio = frames.new_exclusive_folio(Order(3)).unwrap().leave();
        fresh(&frames, folio).map(8);
        (1..4).for_each(|_| frames.folio(folio).map(8).unwrap());
        let freed = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    assert!(frames.folio(folio).try_get());
                    let ends = [unmap(&frames, folio, 8), release(&frames, folio)];
                    freed.fetch_add(
                        ends.iter().filter(|e| **e == Freed::Yes).count() as u32,
                        Relaxed,
                    );
                });
            }
        });
        assert_eq!(freed.into_inner(), 1);
    }
    assert_all_free(&frames);
}

#[test]
fn dirty_and_the_lock_are_independent() {
    let frames = new_frames(64);
    let folio = frames.new_exclusive_folio(Order::PAGE).unwrap().leave();
    fresh(&frames, folio).publish(1);
    let lock = try_lock(&frames, folio).unwrap();
    assert!(try_lock(&frames, folio).is_none());
    frames.folio(folio).mark_dirty();
    frames.folio(folio).exclusive().clear(0, 1);
    drop(lock);
    let lock = try_lock(&frames, folio).unwrap();
    assert!(frames.folio(folio).is_dirty());
    frames.folio(folio).clear_dirty();
    assert!(!frames.folio(folio).is_dirty() && try_lock(&frames, folio).is_none());
    drop(lock);
    assert_eq!(
        frames.folio(folio).exclusive().run(0, 9),
        ExclusiveRun { exclusive: false, count: 1 }
    );
}

/// The last mapping is dropped while the lock is held, before and after a device's request has the
/// lock.
#[test]
fn an_unmapped_folios_owner_goes_at_handover() {
    const GROUP: u64 = 1 << 62;
    let frames = new_frames(64);
    let folio = frames.new_exclusive_folio(Order::PAGE).unwrap().leave();
    let head = frames.meta(folio.head);
    head.word.store(GROUP, Relaxed);
    fresh(&frames, folio).map(1);
    let kept = frames.folio(folio).keep().unwrap();
    let leaving = kept.try_into_locked().unwrap();
    assert_eq!(unmap(&frames, folio, 1), Freed::Unmapped);
    assert!(frames.folio(folio).is_anonymous(), "it is left to the holder of the lock");
    leaving.into_request();
    assert!(!frames.folio(folio).is_anonymous() && frames.folio(folio).is_under_writeback());
    head.word.store(GROUP, Relaxed);
    frames.folio(folio).orphan();
    assert!(frames.folio(folio).is_anonymous());
    // SAFETY: 1. the reference of `kept`.
    let lock = unsafe { frames.folio(folio).lock_of_request() }.unwrap();
    assert!(!frames.folio(folio).is_anonymous() && !frames.folio(folio).is_under_writeback());
    // SAFETY: 1. as above.
    assert!(unsafe { frames.folio(folio).lock_of_request() }.is_none());
    assert!(try_lock(&frames, folio).is_none());
    // SAFETY: 1. the request has the reference of `kept`.
    drop(unsafe { lock.with_reference() });
    assert_all_free(&frames);
}

#[test]
fn a_folio_starting_below_zero_has_no_index() {
    let index = |page, number| FolioIndex::for_folio(page, number).map(FolioIndex::first);
    assert_eq!([index(24, 24), index(23, 24), index(0, 511)], [Some(0), None, None]);
    let last = FolioIndex::END - 1;
    assert_eq!([index(last, 0), index(last + 1, 0), index(u64::MAX, 0)], [Some(last), None, None]);
    assert_eq!(index(last + 1, 1), Some(last));
    // The pages after it need no room in the metadata.
    assert_eq!(FolioIndex::new(last).page(511), last + 511);
}

#[test]
fn a_refused_split_changes_nothing() {
    let frames = new_frames(64);
    let folio = frames.new_exclusive_folio(Order(3)).unwrap().leave();
    fresh(&frames, folio).publish(1);
    let split = |order, each| frames.folio(folio).split(order, |_| each);
    assert_eq!(split(Order(3), 0), Err(SplitError::Order));
    assert_eq!(split(Order::PAGE, 1), Err(SplitError::Mappings));
    assert!(frames.folio(folio).try_get());
    assert_eq!(split(Order::PAGE, 0), Err(SplitError::References));
    frames.meta(folio.head).count.store(8 << 32, Relaxed);
    assert_eq!(split(Order::PAGE, 1), Err(SplitError::References));
    frames.meta(folio.head).count.store(8 << 32 | 1, Relaxed);
    assert!((0..8).all(|page| frames.folio_of(folio.head.plus(page)) == Some(folio)));
    assert_eq!(
        frames.folio(folio).exclusive().run(0, 8),
        ExclusiveRun { exclusive: true, count: 8 }
    );
    assert_eq!(split(Order::PAGE, 1), Ok(()));
    assert_eq!(blocks(&frames, MetaKind::Folio).len(), 8);
}

/// All observable state of a folio's bits, page by page.
fn exclusive_pages(frames: &Frames<Machine>, folio: Folio) -> Vec<bool> {
    (0..folio.pages()).map(|page| frames.folio(folio).exclusive().contains(page)).collect()
}

proptest! {
    #[test]
    fn exclusive_bits_behave_like_an_array(
        order in (0..=MAX_FOLIO_ORDER.0).prop_map(Order),
        steps in prop::collection::vec((any::<bool>(), 0u32..520, 0u32..520), 0..30),
        from in 0u32..520,
        count in 0u32..520,
    ) {
        let frames = new_frames(1200);
        let folio = frames.new_exclusive_folio(order).unwrap().leave();
        let mut model = vec![true; folio.pages() as usize];
        for (set, page, count) in steps {
            let end = (page + count).min(folio.pages());
            model.get_mut(page as usize..end as usize).into_iter().flatten().for_each(|b| *b = set);
            if set {
                frames.folio(folio).exclusive().set(page, count);
            } else {
                frames.folio(folio).exclusive().clear(page, count);
            }
        }
        prop_assert_eq!(exclusive_pages(&frames, folio), model.clone());
        let rest = model.get(from as usize..).unwrap_or_default();
        let rest = &rest[..rest.len().min(count as usize)];
        let first = rest.first().copied().unwrap_or(false);
        let count = rest.iter().take_while(|bit| **bit == first).count() as u32;
        let expected = ExclusiveRun { exclusive: first, count };
        prop_assert_eq!(frames.folio(folio).exclusive().run(from, count), expected);
    }

    #[test]
    fn a_split_hands_everything_down(
        whole in 1..=MAX_FOLIO_ORDER.0,
        part in 0..MAX_FOLIO_ORDER.0,
        dirty in any::<bool>(),
        locked in any::<bool>(),
        mapped in prop::collection::vec(0u32..3, 512),
        shared in prop::collection::vec((0u32..512, 0u32..100), 0..12),
    ) {
        let (part, whole) = (Order(part % whole), Order(whole));
        let frames = new_frames(1200);
        let folio = frames.new_exclusive_folio(whole).unwrap().leave();
        let pages = folio.pages();
        for (page, count) in shared {
            frames.folio(folio).exclusive().clear(page, count);
        }
        let exclusive = exclusive_pages(&frames, folio);
        let mapped = &mapped[..pages as usize];
        fresh(&frames, folio).publish(1);
        mapped.iter().for_each(|entries| frames.folio(folio).map(*entries).unwrap());
        let head = frames.meta(folio.head);
        head.owner.store(77, Relaxed);
        head.word.store(1000, Relaxed);
        head.next.store(5, Relaxed);
        if dirty {
            frames.folio(folio).mark_dirty();
        }
        // Held until the parts are released.
        let lock = locked.then(|| try_lock(&frames, folio).unwrap());

        prop_assert_eq!(frames.folio(folio).split(part, |page| mapped[page as usize]), Ok(()));

        prop_assert_eq!(head.next.load(Relaxed), 5);
        let parts: Vec<Folio> = (0..pages)
            .step_by(part.pages() as usize)
            .map(|first| frames.folio_of(folio.head.plus(first)).unwrap())
            .collect();
        for (n, piece) in parts.iter().enumerate() {
            let first = (n as u32) << part.0;
            let range = first as usize..(first + piece.pages()) as usize;
            prop_assert_eq!((piece.head, piece.order), (folio.head.plus(first), part));
            for page in 0..piece.pages() {
                prop_assert_eq!(frames.folio_of(piece.head.plus(page)), Some(*piece));
            }
            prop_assert_eq!(exclusive_pages(&frames, *piece), &exclusive[range.clone()]);
            let flag = frames.meta(piece.head).state.load(Relaxed) & EXCLUSIVE != 0;
            prop_assert_eq!(flag, part == Order::PAGE && exclusive[first as usize]);
            prop_assert_eq!(frames.folio(*piece).mappings(), mapped[range].iter().sum::<u32>());
            prop_assert_eq!(frames.folio(*piece).references(), 1);
            prop_assert_eq!(frames.folio(*piece).is_dirty(), dirty);
            let is_locked = frames.meta(piece.head).state.load(Relaxed) & FOLIO_LOCK != 0;
            prop_assert_eq!(is_locked, locked && n == 0);
            prop_assert_eq!(frames.meta(piece.head).owner.load(Relaxed), 77);
            prop_assert_eq!(frames.meta(piece.head).word.load(Relaxed), 1000 + u64::from(first));
        }
        drop(lock);
        for piece in parts {
            let mapped = frames.folio(piece).mappings();
            let kept = release(&frames, piece);
            prop_assert_eq!(kept, if mapped == 0 { Freed::Yes } else { Freed::No });
            if mapped > 0 {
                prop_assert_eq!(unmap(&frames, piece, mapped), Freed::Yes);
            }
        }
        assert_all_free(&frames);
    }
}
