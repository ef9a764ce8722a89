//! The choice of victims: the number of pages that working sets larger than memory move, compared
//! with the minimum.
//!
//! The traces are those of `bindery compare working-set`. A page that is visited is written, so
//! that the machine's MMU sets its accessed bit.

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{Accounting, Sealing, Sharing};
use bindery_hosted::{Pattern, fewest_moved};

use super::fixture::{Swapping, with_little_memory};
use crate::support::objects_fixture::map;
use crate::support::{GIB, MIB, fixed};

const AT: u64 = GIB;
const PAGE: u64 = 4096;
/// The memory of the machine.
const BYTES: u64 = 16 * MIB;
/// The pages of the working set: some 3,900 of them are in memory.
const PAGES: u64 = 6_000;

/// The pages that a program has moved, and its number of frames.
struct Moved {
    pages: u64,
    frames: u64,
}

/// Visits the pages and counts the moved pages.
fn moved(swapping: &Swapping<'_, '_, X86_64<4>>, trace: &[u64]) -> Moved {
    let events = swapping.memory.events();
    let (mut frames, mut samples) = (0, 0);
    for (visit, page) in trace.iter().enumerate() {
        let at = AT + page * PAGE;
        swapping.program.store(VirtAddr(at), at).unwrap();
        if visit as u64 > PAGES && visit % 1_000 == 0 {
            frames += swapping.memory.total_frames() - swapping.memory.free_frame_count();
            samples += 1;
        }
    }
    let now = swapping.memory.events();
    let pages = now.pages_swapped_in - events.pages_swapped_in + now.pages_swapped_out
        - events.pages_swapped_out;
    Moved { pages, frames: frames / samples }
}

fn ratio_of(trace: &[u64], shared: bool) -> f64 {
    let mut ratio = 0.0;
    with_little_memory::<X86_64<4>>(BYTES, 0, 1 << 14, |swapping| {
        if shared {
            let object = swapping
                .memory
                .shared_memory(PAGES * PAGE, Sealing::Allowed, Accounting::PerPage)
                .unwrap();
            map(swapping.space, &object, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        } else {
            swapping.space.mmap(&fixed(AT, PAGES * PAGE)).unwrap();
        }
        let Moved { pages, frames } = moved(swapping, trace);
        let fewest = fewest_moved(trace, frames).all();
        ratio = pages as f64 / fewest as f64;
        println!("{pages} pages moved in {frames} frames, {fewest} at the least: {ratio:.3}");
        swapping.space.munmap(VirtAddr(AT), PAGES * PAGE).unwrap();
    });
    ratio
}

/// Each pattern, and the factor by which it may exceed the minimum in one pass and in three.
const BOUNDS: [(Pattern, [f64; 2]); 6] = [
    (Pattern::Sequential, [1.45, 1.45]),
    (Pattern::Random, [1.95, 2.2]),
    (Pattern::Hot80, [1.6, 1.95]),
    (Pattern::Hot95, [1.5, 1.55]),
    (Pattern::Zipf, [1.55, 1.9]),
    (Pattern::Scan, [2.15, 1.55]),
];

fn patterns_move_few_pages(shared: bool) {
    for (pattern, bounds) in BOUNDS {
        for (passes, bound) in [1, 3].into_iter().zip(bounds) {
            let trace: Vec<u64> = pattern.trace(PAGES, passes, 16).collect();
            let ratio = ratio_of(&trace, shared);
            assert!(ratio < bound, "{pattern:?} in {passes} passes: {ratio:.3}");
        }
    }
}

#[test]
fn anonymous_memory() {
    patterns_move_few_pages(false);
}

#[test]
fn shared_memory() {
    patterns_move_few_pages(true);
}

/// Pages that a program has passed are evicted first, but not forever: unused pages of others are
/// evicted in the end, and then the loop has enough memory.
#[test]
fn a_loop_gets_the_frames_of_unused_pages() {
    let loops = (0..10).flat_map(|_| 0..PAGES / 2);
    let trace: Vec<u64> = (0..PAGES).chain(loops).collect();
    // Evicting the least recently used page would move three times the minimum.
    let ratio = ratio_of(&trace, false);
    assert!(ratio < 6.0, "{ratio:.3}");
}

/// Each page is needed again after a hundred other pages.
#[test]
fn a_page_needed_again_soon_stays() {
    let visits = (0..5 * PAGES).flat_map(|at| [at % PAGES, (at + PAGES - 100) % PAGES]);
    let trace: Vec<u64> = (0..PAGES).chain(visits).collect();
    let ratio = ratio_of(&trace, false);
    assert!(ratio < 1.8, "{ratio:.3}");
}
