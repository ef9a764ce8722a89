//! Pools of several CPUs: no room is lost, and the limit is exact.

use core::ptr::NonNull;
use std::boxed::Box;
use std::vec::Vec;

use super::*;
use crate::cpu::SLOTS_SIZE;
use crate::frame::tests::CPU;
use crate::swap::compressed::pools::StorePart;
use crate::swap::compressed::quota::BATCH;

/// A store of `limit` frames, with the parts of CPUs 0 to 3.
fn with_cpus(limit: u64) -> Fixture {
    let fixture = Fixture::new(1024, limit);
    let slots = Box::leak(Box::new([0_u64; SLOTS_SIZE / 8]));
    let parts = fixture.store.parts();
    // SAFETY: 1. the slots are leaked and zero; 2. this is the only thread.
    unsafe { parts.give_slots(NonNull::from(slots).cast()) };
    for cpu in 0..4 {
        let part = Box::leak(Box::new(StorePart::new(Cpu(cpu))));
        // SAFETY: 1. the part is leaked; 2. the table has slots; 3. this is the only thread.
        unsafe { parts.enter(Cpu(cpu), NonNull::from(part)) };
    }
    fixture
}

fn on<T>(cpu: u16, work: impl FnOnce() -> T) -> T {
    let before = CPU.replace(Cpu(cpu));
    let result = work();
    CPU.set(before);
    result
}

#[test]
fn each_cpu_stores_in_frames_of_its_own() {
    let fixture = with_cpus(100);
    let mut handles = Vec::new();
    for seed in 0..24 {
        let cpu = seed as u16 % 3;
        handles.push(on(cpu, || fixture.store(&page_of(600, seed))).unwrap());
    }
    let frames = |cpu: usize| {
        let own = handles.iter().skip(cpu).step_by(3);
        own.map(|handle| handle.extent().unwrap().frame.0).collect::<Vec<_>>()
    };
    for (one, other) in [(0, 1), (1, 2), (0, 2)] {
        assert!(frames(one).iter().all(|frame| !frames(other).contains(frame)));
    }
    fixture.check();
    // Any CPU can load and free the pages.
    for (seed, handle) in handles.into_iter().enumerate() {
        on(3, || {
            assert!(fixture.load(&handle) == Ok(page_of(600, seed as u64)));
            fixture.free(handle);
        });
    }
    fixture.finish();
}

#[test]
fn the_last_room_is_found_in_any_pool() {
    let fixture = with_cpus(40);
    let raw = |cpu, seed| on(cpu, || fixture.store(&page_of(PAGE, seed)));
    // CPU 1 takes a batch from the quota for its first page.
    let first = raw(1, 1).unwrap();
    let small = on(1, || fixture.store(&page_of(100, 2))).unwrap();
    let mut handles: Vec<_> = (0..38).map(|seed| raw(0, seed).unwrap()).collect();
    assert_eq!(fixture.store.usage().frames_used, 40, "all credit was found");
    fixture.check();
    assert!(fixture.store.may_take(&fixture.frames), "no page was refused yet");
    // Holes in other pools are found, too.
    handles.push(on(2, || fixture.store(&page_of(1_000, 7))).unwrap());
    assert_eq!(raw(2, 3), Err(StoreError::Limit));
    assert!(!fixture.store.may_take(&fixture.frames));
    // A frame freed by any CPU is available to all.
    on(3, || fixture.free(first));
    assert!(fixture.store.may_take(&fixture.frames));
    handles.push(raw(2, 4).unwrap());
    assert_eq!(raw(2, 5), Err(StoreError::Limit));
    assert_eq!(fixture.store.usage().frames_used, 40);
    fixture.check();
    on(2, || fixture.free(small));
    handles.into_iter().for_each(|handle| fixture.free(handle));
    fixture.finish();
}

#[test]
fn a_lowered_limit_holds_for_credit() {
    let fixture = with_cpus(100);
    let raw = |cpu, seed| on(cpu, || fixture.store(&page_of(PAGE, seed)));
    let mut handles: Vec<_> = (0..4).map(|cpu| raw(cpu, 0).unwrap()).collect();
    fixture.store.set_limit(5);
    handles.push(raw(2, 1).unwrap());
    for cpu in 0..4 {
        assert_eq!(raw(cpu, 2), Err(StoreError::Limit));
    }
    assert_eq!(fixture.store.usage().frames_used, 5);
    fixture.check();
    fixture.store.set_limit(6);
    handles.push(raw(3, 3).unwrap());
    assert_eq!(raw(0, 3), Err(StoreError::Limit));
    handles.into_iter().for_each(|handle| on(1, || fixture.free(handle)));
    fixture.finish();
}

#[test]
fn an_offline_cpu_leaves_pages_but_no_credit() {
    let fixture = with_cpus(100);
    let handle = on(1, || fixture.store(&page_of(700, 1))).unwrap();
    let held = fixture.store.frames_held();
    fixture.store.hand_over(&fixture.frames, Cpu(1));
    assert!(fixture.store.frames_held() < held, "its compressor's memory is free");
    fixture.check();
    fixture.store.set_limit(BATCH);
    // The other CPUs have the whole limit minus the one frame in use.
    let raw = |seed| on(0, || fixture.store(&page_of(PAGE, seed)));
    let handles: Vec<_> = (1..BATCH).map(|seed| raw(seed).unwrap()).collect();
    assert_eq!(raw(99), Err(StoreError::Limit));
    assert!(on(0, || fixture.load(&handle)) == Ok(page_of(700, 1)));
    on(2, || fixture.free(handle));
    handles.into_iter().for_each(|handle| on(0, || fixture.free(handle)));
    fixture.finish();
}

#[test]
fn memory_that_is_free_again_ends_a_refusal() {
    let fixture = with_cpus(900);
    let raw = |cpu, seed| on(cpu, || fixture.store(&page_of(PAGE, seed)));
    let kept = raw(1, 1).unwrap();
    fixture.frames.inject.fail_after(Some(0));
    assert_eq!(raw(1, 2), Err(StoreError::NoMemory));
    fixture.frames.inject.fail_after(None);
    assert!(fixture.store.may_take(&fixture.frames), "memory is free");
    let again = raw(0, 2).unwrap();
    fixture.check();
    fixture.free(kept);
    fixture.free(again);
    fixture.finish();
}

#[test]
fn threads_of_several_cpus_keep_to_the_limit() {
    const LIMIT: u64 = 48;
    let fixture = with_cpus(LIMIT);
    std::thread::scope(|scope| {
        for thread in 0..4_u16 {
            let Fixture { frames, store, .. } = &fixture;
            scope.spawn(move || {
                CPU.set(Cpu(thread));
                let page = frames.allocate(Order::PAGE, AllocateFor::Use).unwrap();
                let mut live: Vec<(Handle, u64)> = Vec::new();
                for round in 0..1_500_u64 {
                    let seed = round * 4 + u64::from(thread);
                    super::write(frames, page, 0, &super::any_page(seed));
                    // SAFETY: 1. and 2. the page belongs to this thread.
                    if let Ok(handle) = unsafe { store.store(frames, page) } {
                        live.push((handle, seed));
                    }
                    assert!(store.pools.granted() <= LIMIT);
                    if live.len() > 12 || round % 3 == 0 && !live.is_empty() {
                        let (handle, seed) = live.swap_remove(round as usize % live.len());
                        // Sometimes a CPU frees a page that another CPU has stored.
                        CPU.set(Cpu((thread + round as u16 % 2) % 4));
                        // SAFETY: 1. the page was stored above and is freed below. 2. the target
                        // page belongs to this thread.
                        unsafe { store.load(frames, &handle, page) }.unwrap();
                        let there = super::read(frames, page);
                        assert!(there == super::any_page(seed));
                        // SAFETY: 1. the page was stored above and is removed from the list. 2. The
                        // load has finished.
                        unsafe { store.free(frames, handle) };
                        CPU.set(Cpu(thread));
                    }
                }
                for (handle, _) in live {
                    // SAFETY: as above.
                    unsafe { store.free(frames, handle) };
                }
                super::free(frames, page);
            });
        }
    });
    fixture.finish();
}
