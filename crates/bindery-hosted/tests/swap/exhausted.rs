//! When nothing is left to reclaim, the first failing call scans all of memory once, and later
//! calls scan only one step until the state changes.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{Access, Limits, Locking, PinTime, Reclaimed};
use bindery_hosted::{Program, SwapService, Walk};

use super::fixture::{Swapping, device, with_device, with_little_memory, with_swap};
use crate::support::{GIB, MIB, fixed};

const AT: u64 = GIB;
const PAGE: u64 = 4096;
const BYTES: u64 = 8 * MIB;
const FRAMES: u64 = BYTES / PAGE;
/// Frames of one step of the clock.
const STEP: u64 = 64;
/// A number of pages that exceeds any memory.
const ALL: u64 = u64::MAX;

/// Stores values to pages from `at` on until memory runs out. Returns the number of pages.
fn fill_all<A: Walk>(
    swapping: &Swapping<'_, '_, A>,
    at: u64,
    bytes: impl Fn(u64) -> [u8; 64],
) -> u64 {
    swapping.space.mmap(&fixed(at, 4 * BYTES)).unwrap();
    let stores = |page: &u64| {
        let pages = [bytes(*page); PAGE as usize / 64];
        swapping.space.write_user(VirtAddr(at + page * PAGE), pages.as_flattened()).is_ok()
    };
    (0..4 * FRAMES).take_while(stores).count() as u64
}

fn equal_bytes(page: u64) -> [u8; 64] {
    [page as u8; 64]
}

/// A search that finds nothing ends after one turn, and the next search after one step.
#[track_caller]
fn assert_nothing_is_left<A: Walk>(swapping: &Swapping<'_, '_, A>) {
    let Reclaimed { freed, scanned } = swapping.memory.reclaim(ALL);
    assert!(freed == 0 && scanned <= FRAMES + STEP, "{freed} freed, {scanned} looked at");
    assert_eq!(swapping.memory.reclaim(ALL), Reclaimed { freed: 0, scanned: STEP });
}

fn swap_is_full<A: Walk>() {
    with_little_memory::<A>(BYTES, 0, 16, |swapping| {
        let pages = fill_all(swapping, AT, equal_bytes);
        assert_eq!(swapping.taken(), 16);
        // The calls that failed were the first ones; nothing has changed since.
        let asked = swapping.machine.ran_out_of_memory();
        assert_eq!(swapping.memory.reclaim(ALL), Reclaimed { freed: 0, scanned: STEP });
        assert!(swapping.space.fault(VirtAddr(AT + pages * PAGE), Access::Write).is_err());
        assert_eq!(swapping.machine.ran_out_of_memory(), asked + 1, "the embedder decides");
        // With one page fewer in memory, all of memory is scanned once more, again without result.
        swapping.space.munmap(VirtAddr(AT + (pages - 1) * PAGE), PAGE).unwrap();
        assert_nothing_is_left(swapping);
        // Slots are free again, so the same number of pages can be swapped out.
        let out = (0..pages).find(|page| swapping.swapped(AT + page * PAGE, 1) == 1).unwrap();
        swapping.space.munmap(VirtAddr(AT + out * PAGE), PAGE).unwrap();
        assert_eq!(swapping.memory.reclaim(ALL).freed, 1);
    });
}

on_every_architecture! {
    a_full_swap_area_is_looked_at_once => swap_is_full;
}

#[test]
fn a_full_store_is_tried_once() {
    with_little_memory::<X86_64<4>>(BYTES, 0, 1 << 14, |swapping| {
        swapping.memory.set_compressed_limit(32);
        let noise = |page: u64| {
            let mut state = page + 1;
            [(); 64].map(|()| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
        };
        let random = |page: u64| {
            // No two of the 64 pieces of a page are equal.
            let mut bytes = [0; PAGE as usize];
            for (piece, chunk) in (0..).zip(bytes.chunks_mut(64)) {
                chunk.copy_from_slice(&noise(page * 64 + piece));
            }
            bytes
        };
        swapping.space.mmap(&fixed(AT, 4 * BYTES)).unwrap();
        let store = |page: u64| {
            swapping.space.write_user(VirtAddr(AT + page * PAGE), &random(page)).is_ok()
        };
        let pages = (0..4 * FRAMES).take_while(|page| store(*page)).count() as u64;
        assert!(swapping.memory.compressed_usage().frames_used <= 32);
        assert!(swapping.taken() < pages, "slots are free");
        swapping.space.munmap(VirtAddr(AT + (pages - 1) * PAGE), PAGE).unwrap();
        assert_nothing_is_left(swapping);
        // Frames that the store frees can hold other pages.
        let out = (0..pages).find(|page| swapping.swapped(AT + page * PAGE, 1) == 1).unwrap();
        swapping.space.munmap(VirtAddr(AT + out * PAGE), PAGE).unwrap();
        assert!(swapping.memory.reclaim(ALL).freed > 0);
        // A different limit has the same effect.
        assert_nothing_is_left(swapping);
        swapping.memory.set_compressed_limit(64);
        assert!(swapping.memory.reclaim(ALL).freed > 0);
    });
}

#[test]
fn memory_that_is_unlocked_is_found() {
    with_little_memory::<X86_64<4>>(BYTES, 0, 1 << 14, |swapping| {
        let pages = FRAMES / 2;
        swapping.map(AT, pages);
        swapping.fill(AT, pages);
        let limits = Limits { locked: ALL, locking: Locking::Limited, ..Limits::default() };
        swapping.space.set_limits(&limits);
        swapping.space.mlock(VirtAddr(AT), pages * PAGE, Default::default()).unwrap();
        let searches = (0..8).map(|_| swapping.memory.reclaim(ALL));
        assert!(searches.collect::<Vec<_>>().contains(&Reclaimed { freed: 0, scanned: STEP }));
        swapping.space.munlock(VirtAddr(AT), pages * PAGE).unwrap();
        assert!(swapping.memory.reclaim(ALL).freed >= pages);
    });
}

#[test]
fn a_page_whose_pin_ends_is_found() {
    with_swap::<X86_64<4>>(0, 1 << 14, |swapping| {
        swapping.map(AT, 1);
        swapping.fill(AT, 1);
        let pinned = swapping.space.pin(VirtAddr(AT), 1, Access::Write, PinTime::Short).unwrap();
        let freed = || (0..8).map(|_| swapping.memory.reclaim(ALL).freed).sum::<u64>();
        freed();
        assert_eq!(freed(), 0);
        drop(pinned);
        assert_eq!(freed(), 1);
    });
}

/// The search does not wait endlessly for pages that others swap out.
#[test]
fn a_search_ends_despite_another_cpus_writes() {
    let device = device(1 << 12, SwapService::InOrder);
    with_device::<X86_64<4>>(64 * MIB, 0, device, |swapping| {
        swapping.map(AT, 64);
        let over = AtomicBool::new(false);
        swapping.served(device, || {
            thread::scope(|scope| {
                scope.spawn(|| {
                    swapping.machine.on_cpu(Cpu(1), || {
                        let program = Program::new(swapping.machine, swapping.space);
                        while !over.load(Relaxed) {
                            for page in 0..64 {
                                program.store(VirtAddr(AT + page * PAGE), page).unwrap();
                            }
                            swapping.page_out(AT, 64);
                        }
                    });
                });
                let reclaimed = swapping.memory.reclaim(ALL);
                over.store(true, Relaxed);
                assert!(reclaimed.scanned <= 4 * (64 * MIB / PAGE + STEP));
            });
        });
    });
}
