//! The fronts of several CPUs.

use core::ptr::NonNull;
use std::boxed::Box;
use std::collections::HashSet;
use std::sync::Barrier;
use std::thread;
use std::vec::Vec;

use super::{CPU, Machine, free, new_frames};
use crate::addr::{Frame, Order};
use crate::cpu::SLOTS_SIZE;
use crate::frame::front::{Front, HUGE};
use crate::frame::meta::MetaKind;
use crate::frame::{AllocateFor, Frames, FreeBatch};
use crate::platform::Cpu;

/// 2^12 frames, and CPUs 0 to 3 with fronts of at most `limit` frames.
fn with_fronts(limit: u32) -> Frames<Machine> {
    let frames = new_frames(1 << 12);
    let slots = Box::leak(Box::new([0_u64; SLOTS_SIZE / 8]));
    // SAFETY: 1. the slots are leaked and zero; 2. this is the only thread.
    unsafe { frames.fronts().give_slots(NonNull::from(slots).cast()) };
    for cpu in 0..4 {
        let front = Box::leak(Box::new(Front::new()));
        // SAFETY: 1. the front is leaked; 2. the table has slots; 3. the only thread.
        unsafe { frames.fronts().enter(Cpu(cpu), NonNull::from(front)) };
    }
    frames.set_front_limit(limit);
    frames
}

fn on<T>(cpu: u16, work: impl FnOnce() -> T) -> T {
    let before = CPU.replace(Cpu(cpu));
    let result = work();
    CPU.set(before);
    result
}

fn take(frames: &Frames<Machine>, order: Order) -> Option<Frame> {
    frames.allocate(order, AllocateFor::Use)
}

/// Frees frames together, as an unmapping does.
fn free_run(frames: &Frames<Machine>, first: Frame, count: u32) {
    for frame in 0..count {
        frames.meta(first.plus(frame)).reset(MetaKind::Tail, Order::PAGE);
    }
    // SAFETY: 1. the frames just became tails. 2. the test allocated them and frees them once.
    unsafe { FreeBatch::new(frames).push(first, count) };
}

#[test]
fn a_cpu_reuses_the_frames_freed_last() {
    let frames = with_fronts(256);
    let all = frames.free_frame_count();
    let mine: Vec<_> = (0..32).map(|_| take(&frames, Order::PAGE).unwrap()).collect();
    assert!(mine.windows(2).all(|pair| pair[1].0 == pair[0].0 + 1), "{mine:?}");
    let other = on(1, || take(&frames, Order::PAGE)).unwrap();
    free_run(&frames, mine[8], 16);
    on(1, || free(&frames, other, Order::PAGE));
    frames.check_free_lists().unwrap();
    let again: Vec<_> = (0..16).map(|_| take(&frames, Order::PAGE).unwrap()).collect();
    assert_eq!(again, mine[8..24], "the run is used from its lowest frame on");
    assert_eq!(on(1, || take(&frames, Order::PAGE)), Some(other));
    let used = all - frames.free_frame_count();
    assert_eq!(used, 33);
    let traffic = frames.traffic();
    assert_eq!((traffic.taken, traffic.returned), (50, 17));
}

#[test]
fn blocks_of_a_front_are_aligned() {
    let frames = with_fronts(256);
    let mut blocks = Vec::new();
    for order in (0..=4).cycle().take(40).map(Order) {
        let block = take(&frames, order).unwrap();
        assert!(block.is_aligned(order) && frames.meta(block).order() == order);
        blocks.push((block, order));
        frames.check_free_lists().unwrap();
    }
    let mut seen = HashSet::new();
    for (block, order) in &blocks {
        assert!((0..order.pages()).all(|page| seen.insert(block.plus(page))), "{block:?}");
    }
    for (block, order) in blocks {
        free(&frames, block, order);
        frames.check_free_lists().unwrap();
    }
}

#[test]
fn a_front_holds_no_more_than_its_limit() {
    let frames = with_fronts(64);
    let mut taken: Vec<_> = (0..1024).map(|_| take(&frames, Order::PAGE).unwrap()).collect();
    // Every second frame, so that no two of them join.
    taken.sort_by_key(|frame| (frame.0 % 2, frame.0));
    for frame in taken {
        free(&frames, frame, Order::PAGE);
        let held = frames.frames_in_fronts();
        assert!(held <= 64, "{held} frames in a front");
    }
    frames.check_free_lists().unwrap();
    let run = take(&frames, Order(6)).unwrap();
    let held = frames.frames_in_fronts();
    free_run(&frames, run, 64);
    assert_eq!(frames.frames_in_fronts(), held, "a run of the whole limit goes to the lists");
}

#[test]
fn the_last_frame_is_found_in_any_front() {
    let frames = with_fronts(1024);
    let all = frames.free_frame_count();
    for cpu in 0..4 {
        on(cpu, || free(&frames, take(&frames, Order::PAGE).unwrap(), Order::PAGE));
    }
    assert!(frames.frames_in_fronts() > 128);
    let taken: HashSet<_> = core::iter::from_fn(|| take(&frames, Order::PAGE)).collect();
    assert_eq!(taken.len() as u64, all);
    assert_eq!((frames.free_frame_count(), frames.frames_in_fronts()), (0, 0));
    // An empty drain is not repeated until any CPU frees a frame.
    let frame = *taken.iter().next().unwrap();
    on(2, || free(&frames, frame, Order::PAGE));
    assert_eq!(frames.frames_in_fronts(), 1);
    assert_eq!(take(&frames, Order(1)), None);
    assert_eq!(on(3, || take(&frames, Order::PAGE)), Some(frame));
    frames.check_free_lists().unwrap();
}

#[test]
fn large_blocks_take_frames_from_all_fronts() {
    let frames = with_fronts(1024);
    let taken: Vec<_> = core::iter::from_fn(|| take(&frames, Order::PAGE)).collect();
    for (number, frame) in taken.iter().enumerate() {
        on(number as u16 / 64 % 4, || free(&frames, *frame, Order::PAGE));
    }
    assert!(frames.frames_in_fronts() > 512);
    let mut blocks = 0;
    while frames.allocate(Order(9), AllocateFor::Use).is_some() {
        blocks += 1;
    }
    assert!(blocks >= (taken.len() as u32 / 512) - 1, "{blocks} blocks of 512 frames");
}

#[test]
fn reclaim_bypasses_the_fronts_and_finds_their_frames() {
    let frames = with_fronts(1024);
    frames.set_reserve(32);
    let taken: Vec<_> = core::iter::from_fn(|| take(&frames, Order::PAGE)).collect();
    assert_eq!(frames.free_frame_count(), 32, "the reserve is exact");
    // Memory is low, so a freed frame is returned to the lists.
    for frame in &taken[..8] {
        free(&frames, *frame, Order::PAGE);
    }
    assert_eq!(frames.frames_in_fronts(), 0);
    for _ in 0..40 {
        assert!(frames.allocate(Order::PAGE, AllocateFor::Reclaim).is_some());
    }
    assert!(frames.allocate(Order::PAGE, AllocateFor::Reclaim).is_none());
    frames.set_reserve(0);
    on(1, || free(&frames, taken[8], Order::PAGE));
    assert_eq!(frames.frames_in_fronts(), 1);
    assert!(frames.allocate(Order::PAGE, AllocateFor::Reclaim).is_some());
}

#[test]
fn a_double_free_in_a_front_is_found() {
    let frames = with_fronts(256);
    let run = take(&frames, Order(3)).unwrap();
    free(&frames, run, Order(3));
    for (frame, order) in [(run, Order(3)), (run, Order::PAGE), (run.plus(3), Order::PAGE)] {
        let refused = frames.refused();
        free(&frames, frame, order);
        assert_eq!(frames.refused(), refused + 1);
    }
    assert!(frames.is_kept_free(run.plus(7)));
    frames.check_free_lists().unwrap();
    frames.trim();
    assert_eq!(frames.frames_in_fronts(), 0);
    frames.check_free_lists().unwrap();
}

/// The block of 2 MiB that CPU 0 uses repeatedly.
fn with_huge_block(frames: &Frames<Machine>) -> Frame {
    let block = take(frames, HUGE).unwrap();
    free_run(frames, block, HUGE.pages());
    assert_eq!(frames.frames_in_fronts(), 512);
    assert_eq!(frames.meta(block).kind(), MetaKind::Front);
    frames.check_free_lists().unwrap();
    block
}

#[test]
fn a_user_of_large_folios_keeps_one_block() {
    let frames = with_fronts(1024);
    let all = frames.free_frame_count();
    let block = with_huge_block(&frames);
    assert_eq!(frames.free_frame_count(), all);
    // Small allocations leave the block whole, and another CPU has no such block.
    let small = take(&frames, Order(3)).unwrap();
    assert_ne!(on(1, || take(&frames, HUGE)), Some(block));
    assert_eq!(take(&frames, HUGE), Some(block));
    assert!(frames.meta(block).kind() == MetaKind::Raw && frames.meta(block).order() == HUGE);
    // A whole block is reused like a run; a second block is returned to the lists.
    let second = take(&frames, HUGE).unwrap();
    let held = frames.frames_in_fronts();
    free(&frames, second, HUGE);
    assert_eq!(frames.frames_in_fronts(), held + 512);
    free(&frames, block, HUGE);
    assert_eq!(frames.frames_in_fronts(), held + 512);
    assert_eq!(take(&frames, HUGE), Some(second));
    let (taken, refused) = (frames.traffic().taken, frames.refused());
    free(&frames, second, HUGE);
    for (frame, order) in [(second, HUGE), (second.plus(7), Order::PAGE), (second, Order::PAGE)] {
        free(&frames, frame, order);
    }
    assert_eq!((frames.traffic().taken, frames.refused()), (taken, refused + 3));
    free(&frames, small, Order(3));
    frames.check_free_lists().unwrap();
}

#[test]
fn a_cpu_without_large_folios_keeps_no_block() {
    let frames = with_fronts(1024);
    let block = on(1, || take(&frames, HUGE)).unwrap();
    on(0, || free(&frames, block, HUGE));
    assert_eq!(frames.frames_in_fronts(), 0);
    // A front whose limit is below the block size keeps no block.
    frames.set_front_limit(511);
    let block = on(1, || take(&frames, HUGE)).unwrap();
    on(1, || free(&frames, block, HUGE));
    assert_eq!(frames.frames_in_fronts(), 0);
}

#[test]
fn the_last_large_block_goes_to_any_cpu() {
    let frames = with_fronts(1024);
    let block = with_huge_block(&frames);
    let taken: Vec<_> = core::iter::from_fn(|| on(1, || take(&frames, HUGE))).collect();
    assert!(taken.contains(&block));
    assert_eq!(frames.frames_in_fronts(), 0);
    taken.into_iter().for_each(|block| free(&frames, block, HUGE));
    // Freed as single pages, before reclaim or a failure.
    let all = frames.free_frame_count();
    with_huge_block(&frames);
    assert_eq!(core::iter::from_fn(|| on(1, || take(&frames, Order::PAGE))).count() as u64, all);
}

#[test]
fn reclaim_gets_a_large_block_handed_over() {
    let frames = with_fronts(1024);
    with_huge_block(&frames);
    frames.empty_front(Cpu(0));
    assert_eq!(frames.frames_in_fronts(), 0);
    frames.check_free_lists().unwrap();
    with_huge_block(&frames);
    frames.trim();
    assert_eq!(frames.frames_in_fronts(), 0);
    // Memory is low, so the block is returned to the lists.
    let taken = take(&frames, HUGE).unwrap();
    frames.set_reserve(frames.free_frame_count());
    free(&frames, taken, HUGE);
    assert_eq!(frames.frames_in_fronts(), 0);
    frames.set_reserve(0);
    frames.check_free_lists().unwrap();
}

#[test]
fn no_frame_is_lost_whatever_four_cpus_do() {
    let frames = with_fronts(128);
    let all = frames.free_frame_count();
    let (frames, barrier) = (&frames, &Barrier::new(4));
    thread::scope(|scope| {
        for cpu in 0..4 {
            scope.spawn(move || {
                CPU.set(Cpu(cpu));
                barrier.wait();
                let mut random = u64::from(cpu) + 1;
                let mut held = Vec::new();
                for _ in 0..4000 {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    // At times the tests request more than all memory, so fronts are drained.
                    if held.len() < 900 && random % 8 < 5 {
                        let order = Order((random >> 8) as u8 % 3);
                        held.extend(take(frames, order).map(|block| (block, order)));
                    } else if !held.is_empty() {
                        let (block, order) = held.swap_remove(random as usize % held.len());
                        free(frames, block, order);
                    }
                }
                for (block, order) in held {
                    free(frames, block, order);
                }
            });
        }
    });
    assert_eq!((frames.free_frame_count(), frames.refused()), (all, 0));
    frames.check_free_lists().unwrap();
    let taken = core::iter::from_fn(|| take(frames, Order::PAGE)).count();
    assert_eq!(taken as u64, all);
}
