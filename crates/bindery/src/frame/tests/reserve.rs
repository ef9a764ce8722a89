//! The frames that are reserved for reclaim: the number is exact, and every frame allocation
//! respects it.

use std::boxed::Box;
use std::thread;
use std::vec::Vec;

use super::super::slab::{MAX_OBJECT, Slab};
use super::super::{AllocateFor, Frames, MAX_ORDER};
use super::{Machine, new_frames};
use crate::addr::Order;

const RESERVE: u64 = 40;

/// A way to allocate frames. Returns whether it succeeded.
type Way<'a> = Box<dyn FnMut() -> bool + 'a>;

/// Every way to allocate frames for ordinary use.
fn ordinary_ways<'a>(
    frames: &'a Frames<Machine>,
    slab: &'a Slab<[u8; MAX_OBJECT], Machine>,
) -> [Way<'a>; 6] {
    let block = |order| frames.allocate(order, AllocateFor::Use).is_some();
    let up_to = |order| frames.allocate_up_to(order, AllocateFor::Use).is_some();
    [
        Box::new(move || block(Order::PAGE)),
        Box::new(move || block(Order(3))),
        Box::new(move || up_to(MAX_ORDER)),
        Box::new(move || frames.new_folio(Order(2)).is_some()),
        Box::new(move || slab.allocate(frames, [0; MAX_OBJECT]).is_some()),
        Box::new(move || slab.stock(frames, 1)),
    ]
}

#[test]
fn only_reclaim_takes_its_reserved_frames() {
    for first in 0..6 {
        let frames = new_frames(512);
        let slab = Slab::new();
        frames.set_reserve(RESERVE);
        let mut ways = ordinary_ways(&frames, &slab);
        // The first takes as many frames as possible, the others take the rest.
        ways.rotate_left(first);
        for way in &mut ways {
            while way() {}
            assert!(frames.free_frame_count() >= RESERVE, "way {first}");
        }
        assert_eq!(frames.free_frame_count(), RESERVE, "all that may be taken is taken");
        let kept =
            (0..RESERVE).filter(|_| frames.allocate(Order::PAGE, AllocateFor::Reclaim).is_some());
        assert_eq!(kept.count() as u64, RESERVE);
    }
}

#[test]
fn a_large_request_gets_what_the_reserve_leaves() {
    let frames = new_frames(512);
    frames.set_reserve(frames.free_frame_count() - 11);
    let mut got = Vec::new();
    while let Some((_, order)) = frames.allocate_up_to(MAX_ORDER, AllocateFor::Use) {
        got.push(order);
    }
    assert_eq!(got, [Order(3), Order(1), Order(0)]);
    let (_, order) = frames.allocate_up_to(Order(4), AllocateFor::Reclaim).unwrap();
    assert_eq!(order, Order(4));
}

#[test]
fn concurrent_allocations_leave_the_reserve_whole() {
    let frames = new_frames(2048);
    frames.set_reserve(RESERVE);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| while frames.allocate(Order::PAGE, AllocateFor::Use).is_some() {});
        }
    });
    assert_eq!(frames.free_frame_count(), RESERVE);
}
