//! Tests of small objects.

extern crate std;

use core::ptr::NonNull;
use std::boxed::Box;
use std::sync::Arc;
use std::vec::Vec;

use proptest::prelude::*;

use super::super::slab::{MAX_OBJECT, Slab};
use super::super::{Frames, Magazines};
use super::{CPU, Machine, assert_all_free, blocks, new_frames};
use crate::frame::meta::MetaKind;
use crate::platform::{Cpu, MAX_CPUS};

/// An object that fills its slot and can verify its content.
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
    assert_eq!((slab.frames(), slab.objects(&frames)), (3, 3 * each as u64));
    assert_eq!(blocks(&frames, MetaKind::Slab).len(), 3);
    for (n, object) in objects.iter().enumerate() {
        assert!(object.is_aligned());
        // SAFETY: a live object that only this test uses.
        assert_eq!(unsafe { object.read() }, Block([n as u64; 30]));
    }
    for object in objects {
        // SAFETY: 1. allocated above, freed only once. 2. the object is unused.
        unsafe { slab.free(&frames, object) };
    }
    assert_eq!((slab.frames(), slab.objects(&frames)), (1, 0));
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
    frames.inject.fail_after(Some(0));
    assert!(slab.allocate(&frames, counted.clone()).is_none());
    assert_eq!(Arc::strong_count(&counted), 2);
    // SAFETY: 1. allocated above. 2. the object is unused.
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
    frames.inject.fail_after(Some(2));
    assert!([(); 2].iter().all(|()| slab.allocate(&frames, 1).is_some()));
    assert!(slab.allocate(&frames, 1).is_none());
    assert_eq!(frames.inject.failed(), 1);
}

#[test]
fn pooled_objects_need_no_memory() {
    let frames = new_frames(16);
    let slab: Slab<[u8; MAX_OBJECT], Machine> = Slab::new();
    let allocate = |n: u8| slab.allocate_pooled(&frames, || [n; MAX_OBJECT]);
    assert_eq!((allocate(0), slab.frames()), (None, 0), "nothing is pooled");
    let each = u64::from(Slab::<[u8; MAX_OBJECT], Machine>::PER_FRAME);
    assert!(slab.pool(&frames, 8));
    let pooled = slab.frames();
    assert_eq!(pooled, 8_u64.div_ceil(each));
    for _ in 0..3 {
        slab.trim(&frames);
        frames.inject.fail_after(Some(0));
        let objects: Vec<_> = (0..8).map(|n| allocate(n).unwrap()).collect();
        frames.inject.fail_after(None);
        for object in objects {
            // SAFETY: 1. allocated above, freed only once. 2. the object is unused.
            unsafe { slab.free(&frames, object) };
        }
        assert_eq!(slab.frames(), pooled);
    }
    assert!(slab.pool(&frames, 8));
    assert_eq!(slab.frames(), pooled, "it was done before");
    slab.unpool();
    slab.trim(&frames);
    assert_eq!(slab.frames(), pooled);
    slab.unpool();
    slab.trim(&frames);
    assert_all_free(&frames);
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
    // SAFETY: 1. allocated above. 2. the object is unused.
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
                        // SAFETY: 1. allocated above, freed only once. 2. only this thread uses it.
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

/// Announces CPUs 0 to `cpus` - 1; the records are never freed.
fn announce(frames: &Frames<Machine>, cpus: u16) {
    let slots = Box::leak(Box::new([0_u64; MAX_CPUS]));
    // SAFETY: 1. the slots are leaked and zero; 2. this is the only thread.
    unsafe { frames.magazines().give_slots(NonNull::from(slots).cast()) };
    for cpu in 0..cpus {
        let magazines = Box::leak(Box::new(Magazines::new()));
        // SAFETY: 1. the record is leaked; 2. it has slots, and tests use few CPUs; 3. the only
        // thread.
        unsafe { frames.magazines().enter(Cpu(cpu), NonNull::from(magazines)) };
    }
}

/// Frees an object of a test.
fn free<T>(slab: &Slab<T, Machine>, frames: &Frames<Machine>, object: NonNull<T>) {
    // SAFETY: 1. each test frees its objects once. 2. they are unused.
    unsafe { slab.free(frames, object) };
}

#[test]
fn a_cpu_allocates_what_it_freed_last() {
    let frames = new_frames(64);
    announce(&frames, 2);
    let slab: Slab<Block, Machine> = Slab::with_magazine(0);
    let allocate = || slab.allocate(&frames, Block([1; 30])).unwrap();
    let (first, second) = (allocate(), allocate());
    assert_eq!((slab.frames(), slab.objects(&frames)), (1, 2));
    free(&slab, &frames, first);
    free(&slab, &frames, second);
    assert_eq!((slab.frames(), slab.objects(&frames)), (1, 0));
    CPU.set(Cpu(1));
    let other = allocate();
    assert!(other != first && other != second, "another CPU has its own");
    CPU.set(Cpu(0));
    assert_eq!((allocate(), allocate()), (second, first));
    [first, second, other].into_iter().for_each(|object| free(&slab, &frames, object));
    assert_eq!(slab.objects(&frames), 0);
    slab.trim(&frames);
    assert_all_free(&frames);
}

#[test]
fn a_magazine_is_filled_and_emptied_by_batches() {
    let frames = new_frames(64);
    announce(&frames, 1);
    let slab: Slab<Block, Machine> = Slab::with_magazine(3);
    let each = usize::from(Slab::<Block, Machine>::PER_FRAME);
    let objects: Vec<_> =
        (0..5 * each).map(|n| slab.allocate(&frames, Block([n as u64; 30])).unwrap()).collect();
    assert_eq!((slab.frames(), slab.objects(&frames)), (5, 5 * each as u64));
    for (n, object) in objects.iter().enumerate() {
        // SAFETY: a live object that only this test uses.
        assert_eq!(unsafe { object.read() }, Block([n as u64; 30]));
        assert!(!objects[..n].contains(object));
    }
    for (n, object) in objects.into_iter().enumerate() {
        free(&slab, &frames, object);
        assert_eq!(slab.objects(&frames), (5 * each - n - 1) as u64);
    }
    // The spare frame, and the frames of the last 32 objects.
    assert!((2..=3).contains(&slab.frames()), "{}", slab.frames());
    slab.trim(&frames);
    assert_eq!(slab.frames(), 0);
    assert_all_free(&frames);
}

#[test]
fn the_last_object_is_found_in_any_magazine() {
    let frames = new_frames(4);
    announce(&frames, 2);
    let slab: Slab<[u8; MAX_OBJECT], Machine> = Slab::with_magazine(1);
    let allocate = || slab.allocate(&frames, [7; MAX_OBJECT]);
    let mut objects: Vec<_> = core::iter::from_fn(allocate).collect();
    assert_eq!(objects.len() as u64, frames.total_frames() * 3);
    free(&slab, &frames, objects.pop().unwrap());
    CPU.set(Cpu(1));
    objects.push(allocate().expect("the object in the other CPU's magazine"));
    assert!(allocate().is_none());
    CPU.set(Cpu(0));
    assert!(allocate().is_none());
    objects.into_iter().for_each(|object| free(&slab, &frames, object));
    slab.trim(&frames);
    assert_all_free(&frames);
}

#[test]
fn a_cpu_that_goes_offline_keeps_no_object() {
    let frames = new_frames(64);
    announce(&frames, 2);
    let slab: Slab<u64, Machine> = Slab::with_magazine(2);
    let other: Slab<u32, Machine> = Slab::with_magazine(0);
    let objects = [(); 12].map(|()| slab.allocate(&frames, 1).unwrap());
    objects.into_iter().for_each(|object| free(&slab, &frames, object));
    free(&other, &frames, other.allocate(&frames, 2).unwrap());
    slab.empty_magazine(&frames, Cpu(1));
    slab.empty_magazine(&frames, Cpu(0));
    assert_eq!((slab.frames(), slab.objects(&frames)), (1, 0), "its frame is the spare");
    CPU.set(Cpu(1));
    let object = slab.allocate(&frames, 1).unwrap();
    assert!(objects.contains(&object));
    free(&slab, &frames, object);
    slab.trim(&frames);
    assert_eq!((slab.frames(), other.frames()), (0, 1), "of this slab only");
    other.trim(&frames);
    assert_all_free(&frames);
}

/// [`crate::Memory`] trims slabs and takes CPUs offline without knowing the object types.
#[test]
fn a_magazine_empties_without_its_objects_type() {
    let frames = new_frames(64);
    announce(&frames, 1);
    let slab: Slab<Block, Machine> = Slab::with_magazine(0);
    // SAFETY: a slab has the same memory layout for every type, and no object is accessed through
    // this reference.
    let opaque = unsafe { &*core::ptr::from_ref(&slab).cast::<Slab<u8, Machine>>() };
    for empty in [Slab::trim as fn(&Slab<u8, Machine>, &Frames<Machine>), |slab, frames| {
        slab.empty_magazine(frames, Cpu(0));
    }] {
        let objects: Vec<_> = (0..3 * usize::from(Slab::<Block, Machine>::PER_FRAME))
            .map(|n| slab.allocate(&frames, Block([n as u64; 30])).unwrap())
            .collect();
        let (kept, freed) = objects.split_at(10);
        freed.iter().rev().for_each(|object| free(&slab, &frames, *object));
        empty(opaque, &frames);
        assert_eq!(slab.objects(&frames), 10);
        for (n, object) in kept.iter().enumerate() {
            // SAFETY: a live object that only this test uses.
            assert_eq!(unsafe { object.read() }, Block([n as u64; 30]));
        }
        let again = freed.iter().map(|_| slab.allocate(&frames, Block([0; 30])).unwrap());
        let again: Vec<_> = again.collect();
        assert!(again.iter().all(|object| !kept.contains(object)));
        kept.iter().chain(&again).for_each(|object| free(&slab, &frames, *object));
    }
    slab.trim(&frames);
    assert_all_free(&frames);
}

#[test]
fn a_magazine_allocation_can_be_made_to_fail() {
    let frames = new_frames(64);
    announce(&frames, 1);
    let slab: Slab<u64, Machine> = Slab::with_magazine(0);
    free(&slab, &frames, slab.allocate(&frames, 1).unwrap());
    frames.inject.fail_after(Some(1));
    assert!(slab.reserve(&frames).is_some() && slab.reserve(&frames).is_none());
    assert_eq!(frames.inject.failed(), 1);
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "freed twice")]
fn a_double_free_in_a_magazine_is_found() {
    let frames = new_frames(64);
    announce(&frames, 1);
    let slab: Slab<u64, Machine> = Slab::with_magazine(0);
    let object = slab.allocate(&frames, 1).unwrap();
    free(&slab, &frames, object);
    free(&slab, &frames, object);
}

#[test]
fn threads_of_several_cpus_share_a_slab() {
    let frames = new_frames(64);
    announce(&frames, 3);
    let slab: Slab<[u64; 20], Machine> = Slab::with_magazine(0);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (slab, frames) = (&slab, &frames);
            scope.spawn(move || {
                for round in 0..300 {
                    let value = [thread << 32 | round; 20];
                    // Two threads use each magazine, and objects are freed by other CPUs.
                    CPU.set(Cpu((thread / 2) as u16));
                    let objects = [(); 40].map(|()| slab.allocate(frames, value).unwrap());
                    CPU.set(Cpu((round % 3) as u16));
                    for object in objects {
                        // SAFETY: only this thread uses it.
                        assert_eq!(unsafe { object.read() }, value);
                        free(slab, frames, object);
                    }
                    if round % 64 == thread {
                        slab.trim(frames);
                    }
                }
            });
        }
    });
    assert_eq!(slab.objects(&frames), 0);
    slab.trim(&frames);
    assert_all_free(&frames);
}

proptest! {
    #[test]
    fn any_sequence_keeps_objects_and_frames(
        announced: bool,
        steps in prop::collection::vec((0u8..5, 0u16..3, any::<prop::sample::Index>()), 0..400),
    ) {
        let frames = new_frames(64);
        let slab: Slab<Block, Machine> = Slab::with_magazine(0);
        if announced {
            announce(&frames, 3);
        }
        let mut live: Vec<(NonNull<Block>, Block)> = Vec::new();
        for (n, (what, cpu, index)) in steps.into_iter().enumerate() {
            CPU.set(Cpu(cpu));
            if what < 3 || live.is_empty() {
                let value = Block([n as u64; 30]);
                let object = slab.allocate(&frames, value).unwrap();
                prop_assert!(live.iter().all(|(other, _)| *other != object));
                live.push((object, value));
            } else {
                let (object, value) = live.swap_remove(index.index(live.len()));
                // SAFETY: 1. allocated above and removed from the list. 2. the object is unused.
                unsafe {
                    prop_assert_eq!(object.read(), value);
                    slab.free(&frames, object);
                }
            }
            prop_assert_eq!(slab.objects(&frames), live.len() as u64);
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
