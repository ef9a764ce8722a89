//! The allocator of blocks.

extern crate std;

use core::sync::atomic::Ordering::Relaxed;
use std::collections::BTreeMap;
use std::vec::Vec;

use proptest::prelude::*;

use super::super::meta::{NONE, state_of, state_of_table};
use super::super::{AllocateFor, FrameRange, Frames, FramesError, MAX_ORDER};
use super::{Machine, assert_all_free, blocks, free, new_frames};
use crate::addr::{Frame, Order};
use crate::arch::{Level, X86_64};
use crate::frame::meta::MetaKind;
use crate::platform::Platform;

fn range(first: u32, count: u32) -> FrameRange {
    FrameRange { first: Frame(first), count }
}

#[test]
fn every_frame_is_allocated_once_and_rejoins() {
    let frames = new_frames(3000);
    let before = blocks(&frames, MetaKind::Free);
    let mut got: Vec<Frame> =
        core::iter::from_fn(|| frames.allocate(Order::PAGE, AllocateFor::Use)).collect();
    assert_eq!(got.len() as u64, frames.total_frames());
    assert_eq!(frames.free_frame_count(), 0);
    got.sort();
    got.dedup();
    assert_eq!(got.len() as u64, frames.total_frames());
    for frame in got {
        free(&frames, frame, Order::PAGE);
    }
    frames.trim();
    assert_eq!(blocks(&frames, MetaKind::Free), before);
    assert_all_free(&frames);
}

#[test]
fn metadata_ends_the_largest_range_and_holes_stay() {
    let ranges = [range(1900, 100), range(3, 50), range(100, 1500), range(80, 0)];
    // SAFETY: 1. the machine has no other user.
    let frames = unsafe { Frames::new(Machine::new(0, 2000), &ranges) }.unwrap();
    assert_eq!(frames.span(), FrameRange { first: Frame(3), count: 1997 });
    let metadata = (1997u64 * 32).div_ceil(4096) as u32;
    assert_eq!(frames.total_frames(), u64::from(1650 - metadata));
    for frame in 0..2100 {
        let usable = (3..53).contains(&frame)
            || (100..1600 - metadata).contains(&frame)
            || (1900..2000).contains(&frame);
        assert_eq!(frames.manages(Frame(frame)), usable, "frame {frame}");
    }
    assert!(!frames.manages(Frame(NONE)));
    assert_eq!(frames.meta(Frame(60)).kind(), MetaKind::Reserved);
    assert_all_free(&frames);
    let mut got = 0;
    while let Some(frame) = frames.allocate(Order::PAGE, AllocateFor::Use) {
        assert!(frames.manages(frame));
        got += 1;
    }
    assert_eq!(got, frames.total_frames());
}

#[test]
fn unusable_ranges_are_refused_with_the_reason() {
    // SAFETY: 1. the machine has no other user.
    let new = |ranges: &[FrameRange]| unsafe { Frames::new(Machine::new(0, 100), ranges) }.err();
    assert_eq!(new(&[]), Some(FramesError::Empty));
    assert_eq!(new(&[range(5, 0)]), Some(FramesError::Empty));
    assert_eq!(new(&[range(0, 10), range(9, 1)]), Some(FramesError::Overlapping));
    assert_eq!(new(&[range(4, 1), range(0, 10)]), Some(FramesError::Overlapping));
    assert_eq!(new(&[range(7, 2), range(7, 2)]), Some(FramesError::Overlapping));
    assert_eq!(new(&[range(u32::MAX, 1)]), Some(FramesError::TooHigh));
    assert_eq!(new(&[range(u32::MAX - 5, 10)]), Some(FramesError::TooHigh));
    assert_eq!(new(&[range(7, 1)]), Some(FramesError::TooSmall));
    // Two single frames too far apart: the metadata of the hole does not fit.
    let wide = Machine::new(0, 1000);
    // SAFETY: 1. the machine has no other user.
    let far = unsafe { Frames::new(wide, &[range(0, 1), range(999, 1)]) }.err();
    assert_eq!(far, Some(FramesError::TooSmall));
    assert_eq!(new(&[range(7, 1), range(8, 1)]), None);
}

#[test]
fn touching_ranges_join_only_with_their_windows() {
    let ranges = [range(32, 32), range(0, 32)];
    // SAFETY: 1. the machine has no other user.
    let joined = unsafe { Frames::new(Machine::new(0, 64), &ranges) }.unwrap();
    assert!(joined.allocate(Order(5), AllocateFor::Use).is_some());
    let torn = || {
        let mut machine = Machine::new(0, 64);
        machine.torn_at = Some(Frame(32));
        machine
    };
    // SAFETY: 1. the machine has no other user.
    assert_eq!(unsafe { Frames::new(torn(), &ranges) }.err(), Some(FramesError::DirectMap));
    // SAFETY: 1. the machine has no other user.
    assert!(unsafe { Frames::new(torn(), &[range(0, 20), range(32, 32)]) }.is_ok());
}

#[test]
fn orders_above_the_largest_are_not_given_out() {
    let frames = new_frames(4096);
    assert!(frames.allocate(MAX_ORDER, AllocateFor::Use).is_some());
    assert_eq!(frames.allocate(MAX_ORDER.above(), AllocateFor::Use), None);
    assert_eq!(frames.allocate(Order(u8::MAX), AllocateFor::Use), None);
}

#[test]
fn the_platform_hears_of_every_release() {
    let frames = new_frames(64);
    let block = frames.allocate(Order(3), AllocateFor::Use).unwrap();
    free(&frames, block, Order(3));
    assert_eq!(*frames.platform().released.lock().unwrap(), [(block, 8)]);
}

#[test]
fn freeing_free_frames_is_counted_only() {
    let frames = new_frames(256);
    let block = frames.allocate(Order(3), AllocateFor::Use).unwrap();
    let count = frames.free_frame_count();
    free(&frames, block, Order(2)); // too small
    free(&frames, block, Order(4)); // too large
    free(&frames, block, Order(200)); // no order at all
    free(&frames, block.plus(1), Order::PAGE); // inside
    free(&frames, Frame(0), Order::PAGE); // below
    free(&frames, Frame(NONE), Order::PAGE); // above
    free(&frames, Frame(0x100 + 255), Order::PAGE); // metadata
    assert_eq!((frames.refused(), frames.free_frame_count()), (7, count));
    free(&frames, block, Order(3));
    assert_eq!(frames.refused(), 7);
    free(&frames, block, Order(3)); // again
    assert_eq!((frames.refused(), frames.free_frame_count()), (8, frames.total_frames()));
    assert_eq!(frames.check_free_lists(), Ok(()));
}

#[test]
fn a_table_of_any_level_is_one_frame() {
    let frames = new_frames(64);
    let table = frames.allocate(Order::PAGE, AllocateFor::Use).unwrap();
    frames.meta(table).state.store(state_of_table(Level::<X86_64>::PUD), Relaxed);
    assert_eq!(blocks(&frames, MetaKind::Table), [(table, Order::PAGE)]);
    free(&frames, table, Order::PAGE);
    assert_all_free(&frames);
}

#[test]
fn allocations_fail_when_they_are_told_to() {
    let frames = new_frames(64);
    let tries = || [(); 4].map(|()| frames.allocate(Order::PAGE, AllocateFor::Use).is_some());
    frames.inject.fail_after(Some(2));
    assert_eq!(tries(), [true, true, false, false]);
    assert_eq!(frames.inject.failed(), 2);
    frames.inject.fail_after(None);
    assert_eq!(tries(), [true; 4]);
    assert_eq!(frames.inject.failed(), 2);
    frames.inject.fail_once_after(Some(1));
    assert_eq!(tries(), [true, false, true, true]);
    assert_eq!(frames.inject.failed(), 1);
    frames.inject.fail_after(Some(0));
    assert!(frames.new_folio(Order::PAGE).is_none());
}

#[test]
fn the_check_finds_what_is_broken() {
    type Damage = fn(&Frames<Machine>, Frame);
    let breaks: [(&str, Damage); 6] = [
        ("a kind", |frames, f| frames.meta(f).reset(MetaKind::Raw, Order::PAGE)),
        ("an order", |frames, f| {
            frames.meta(f).state.store(state_of(MetaKind::Free, Order(3)), Relaxed)
        }),
        ("a link back", |frames, f| frames.meta(f).previous.store(f.0, Relaxed)),
        ("a link out of the memory", |frames, f| frames.meta(f).next.store(7, Relaxed)),
        ("a link that loops", |frames, f| frames.meta(f).next.store(f.0, Relaxed)),
        ("a free frame on no list", |frames, f| {
            frames.meta(f.plus(1)).state.store(state_of(MetaKind::Free, Order::PAGE), Relaxed)
        }),
    ];
    for (what, damage) in breaks {
        let frames = new_frames(1024);
        assert_eq!(frames.check_free_lists(), Ok(()));
        let (block, _) = *blocks(&frames, MetaKind::Free).iter().max_by_key(|(_, o)| *o).unwrap();
        damage(&frames, block);
        assert!(frames.check_free_lists().is_err(), "{what}");
    }
}

#[test]
fn threads_never_get_the_same_frame() {
    let frames = new_frames(600);
    std::thread::scope(|scope| {
        for thread in 1..=4u8 {
            let frames = &frames;
            scope.spawn(move || {
                for round in 0..2000u32 {
                    let order = Order((round % 5) as u8);
                    let Some(block) = frames.allocate(order, AllocateFor::Use) else {
                        continue;
                    };
                    let bytes = 4096 << order.0;
                    // SAFETY: the test owns the block, whose direct map is consecutive.
                    unsafe {
                        frames.platform().direct_map(block).as_ptr().write_bytes(thread, bytes)
                    };
                    std::thread::yield_now();
                    // SAFETY: as above.
                    let seen = unsafe {
                        core::slice::from_raw_parts(
                            frames.platform().direct_map(block).as_ptr(),
                            bytes,
                        )
                    };
                    assert!(seen.iter().all(|byte| *byte == thread));
                    free(frames, block, order);
                }
            });
        }
    });
    assert_all_free(&frames);
}

proptest! {
    /// Steps: allocate a block of an order, or free the n-th allocated block.
    #[test]
    fn any_sequence_keeps_blocks_and_lists(
        first in 0u32..40,
        holes in prop::collection::vec((1u32..400, 0u32..40), 1..5),
        steps in prop::collection::vec((any::<bool>(), (0u8..7).prop_map(Order), any::<prop::sample::Index>()), 0..200),
    ) {
        let end = first + holes.iter().map(|(size, hole)| size + hole).sum::<u32>();
        let machine = Machine::new(first, end - first);
        let mut at = first;
        let ranges: Vec<_> = holes.iter().map(|(size, hole)| {
            let range = range(at, *size);
            at += size + hole;
            range
        }).collect();
        // SAFETY: 1. the machine has no other user.
        let frames = unsafe { Frames::new(machine, &ranges) };
        let Ok(frames) = frames else { return Ok(()) };
        let before = blocks(&frames, MetaKind::Free);
        let mut model: BTreeMap<Frame, Order> = BTreeMap::new();
        for (allocate, order, index) in steps {
            if allocate || model.is_empty() {
                match frames.allocate(order, AllocateFor::Use) {
                    Some(block) => {
                        prop_assert!(block.is_aligned(order));
                        let end = block.plus(order.pages());
                        prop_assert!((block.0..end.0).all(|frame| frames.manages(Frame(frame))));
                        if let Some((below, order)) = model.range(..end).next_back() {
                            prop_assert!(below.plus(order.pages()) <= block, "overlap");
                        }
                        model.insert(block, order);
                    }
                    None => {
                        let largest = blocks(&frames, MetaKind::Free).iter().map(|(_, o)| *o).max();
                        prop_assert!(largest < Some(order));
                    }
                }
            } else {
                let block = *index.get(&model.keys().copied().collect::<Vec<_>>());
                let order = model.remove(&block).unwrap();
                free(&frames, block, order);
            }
            prop_assert_eq!(frames.check_free_lists(), Ok(()));
            let used: u64 = model.values().map(|order| u64::from(order.pages())).sum();
            prop_assert_eq!(frames.free_frame_count() + used, frames.total_frames());
            let raw = blocks(&frames, MetaKind::Raw);
            prop_assert!(raw.into_iter().eq(model.iter().map(|(block, order)| (*block, *order))));
            prop_assert!(blocks(&frames, MetaKind::Tail).is_empty());
        }
        for (block, order) in model {
            free(&frames, block, order);
        }
        frames.trim();
        prop_assert_eq!(blocks(&frames, MetaKind::Free), before);
        assert_all_free(&frames);
    }
}
