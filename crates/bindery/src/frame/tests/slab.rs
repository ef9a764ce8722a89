//! Small objects.

extern crate std;

use core::ptr::NonNull;
use std::sync::Arc;
use std::vec::Vec;

use proptest::prelude::*;

use super::super::Kind;
use super::super::slab::{MAX_OBJECT, Slab};
use super::{Machine, assert_all_free, blocks, new_frames};

/// An object that fills its slot and knows what it should hold.
#[derive(Clone, Copy, PartialEq, Debug)]
#[repr(C, align(16))]
struct Block([u64; 30]);

#[test]
fn objects_fill_frames_and_keep_one_empty() {
    let frames = new_frames(256);
    let slab: Slab<Block, Machine> = Slab::new();
    let each = usize::from(Slab::<Block, Machine>::PER_FRAME);
    assert_eq!(each, (4096 - 16) / 240);
    let allocate = |n: usize| slab.allocate(&frames, Block([n as u64; 30])).unwrap();
    let objects: Vec<_> = (0..3 * each).map(allocate).collect();
    assert_eq!((slab.frames(), slab.objects()), (3, 3 * each as u64));
    assert_eq!(blocks(&frames, Kind::Slab).len(), 3);
    for (n, object) in objects.iter().enumerate() {
        assert!(object.is_aligned());
        // SAFETY: a live object that only we know.
        assert_eq!(unsafe { object.read() }, Block([n as u64; 30]));
    }
    for object in objects {
        // SAFETY: 1. allocated above, once each. 2. nobody uses it.
        unsafe { slab.free(&frames, object) };
    }
    assert_eq!((slab.frames(), slab.objects()), (1, 0));
    allocate(0);
    assert_eq!(slab.frames(), 1, "the spare is used before a new frame");
}

#[test]
fn freed_and_refused_objects_are_dropped() {
    let frames = new_frames(16);
    let slab: Slab<Arc<()>, Machine> = Slab::new();
    let counted = Arc::new(());
    let object = slab.allocate(&frames, counted.clone()).unwrap();
    assert_eq!(Arc::strong_count(&counted), 2);
    frames.fail_after(Some(0));
    assert!(slab.allocate(&frames, counted.clone()).is_none());
    assert_eq!(Arc::strong_count(&counted), 2);
    // SAFETY: 1. allocated above. 2. nobody uses it.
    unsafe { slab.free(&frames, object) };
    assert_eq!(Arc::strong_count(&counted), 1);
    slab.trim(&frames);
    slab.trim(&frames);
    assert_all_free(&frames);
}

#[test]
fn a_slab_object_is_one_failing_allocation() {
    let frames = new_frames(64);
    let slab: Slab<u64, Machine> = Slab::new();
    frames.fail_after(Some(2));
    assert!([(); 2].iter().all(|()| slab.allocate(&frames, 1).is_some()));
    assert!(slab.allocate(&frames, 1).is_none());
    assert_eq!(frames.failed_on_purpose(), 1);
}

#[test]
fn memory_that_runs_out_leaves_the_slab_usable() {
    let frames = new_frames(4);
    let slab: Slab<[u8; MAX_OBJECT], Machine> = Slab::new();
    let mut objects = Vec::new();
    while let Some(object) = slab.allocate(&frames, [7; MAX_OBJECT]) {
        objects.push(object);
    }
    assert_eq!(objects.len() as u64, frames.total_frames() * 3);
    let last = objects.pop().unwrap();
    // SAFETY: 1. allocated above. 2. nobody uses it.
    unsafe { slab.free(&frames, last) };
    assert!(slab.allocate(&frames, [7; MAX_OBJECT]).is_some());
}

#[test]
fn tiny_and_empty_objects_have_own_addresses() {
    let frames = new_frames(16);
    let bytes: Slab<u8, Machine> = Slab::new();
    let empty: Slab<(), Machine> = Slab::new();
    let first: NonNull<u8> = bytes.allocate(&frames, 1).unwrap();
    assert_ne!(bytes.allocate(&frames, 2), Some(first));
    let first = empty.allocate(&frames, ()).unwrap();
    assert_ne!(empty.allocate(&frames, ()), Some(first));
}

#[test]
fn threads_share_a_slab() {
    let frames = new_frames(64);
    let slab: Slab<[u64; 20], Machine> = Slab::new();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (slab, frames) = (&slab, &frames);
            scope.spawn(move || {
                for round in 0..300 {
                    let value = [thread << 32 | round; 20];
                    let objects = [(); 40].map(|()| slab.allocate(frames, value).unwrap());
                    for object in objects {
                        // SAFETY: 1. allocated above, once each. 2. only this thread knows it.
                        unsafe {
                            assert_eq!(object.read(), value);
                            slab.free(frames, object);
                        }
                    }
                }
            });
        }
    });
    slab.trim(&frames);
    assert_all_free(&frames);
}

proptest! {
    #[test]
    fn any_sequence_keeps_objects_and_frames(
        steps in prop::collection::vec((0u8..5, any::<prop::sample::Index>()), 0..400),
    ) {
        let frames = new_frames(64);
        let slab: Slab<Block, Machine> = Slab::new();
        let mut live: Vec<(NonNull<Block>, Block)> = Vec::new();
        for (n, (what, index)) in steps.into_iter().enumerate() {
            if what < 3 || live.is_empty() {
                let value = Block([n as u64; 30]);
                let object = slab.allocate(&frames, value).unwrap();
                prop_assert!(live.iter().all(|(other, _)| *other != object));
                live.push((object, value));
            } else {
                let (object, value) = live.swap_remove(index.index(live.len()));
                // SAFETY: 1. allocated above, and taken off the list. 2. nobody uses it.
                unsafe {
                    prop_assert_eq!(object.read(), value);
                    slab.free(&frames, object);
                }
            }
            prop_assert_eq!(slab.objects(), live.len() as u64);
            prop_assert_eq!(slab.frames() + frames.free_frame_count(), frames.total_frames());
        }
        for (object, value) in live {
            // SAFETY: as above.
            unsafe {
                prop_assert_eq!(object.read(), value);
                slab.free(&frames, object);
            }
        }
        slab.trim(&frames);
        assert_all_free(&frames);
    }
}
