//! The choice of victims among file pages: how often working sets larger than memory need the
//! pager, compared with the optimal choice.
//!
//! The patterns are those of `bindery compare working-set`.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{AddressSpace, Sharing};
use bindery_hosted::{MemoryFiles, Pattern, Program, fewest_moved};

use super::reclaim::X;
use crate::support::objects::use_object_order;
use crate::support::objects_fixture::{AT, map};
use crate::support::{MIB, audit, options, strict};

/// Pages of the file: some 3,900 of them are in memory.
const PAGES: u64 = 6_000;
const PASSES: u64 = 5;

/// The way in which a program accesses a page.
#[derive(Clone, Copy, Debug)]
enum Use {
    /// Through a mapping, so that the machine's MMU sets its accessed bit.
    Load,
    /// By a call that copies from it.
    Read,
}

/// The additional reads per thousand visits, compared with the optimal choice.
fn reads_too_many(trace: &[u64], how: Use) -> u64 {
    let files = MemoryFiles::new();
    files.put(1, &vec![1; (PAGES * PAGE_SIZE) as usize]);
    let (machine, memory) = strict::<X>(16 * MIB);
    use_object_order(&memory, 0);
    let file = memory.file(&files, 1, PAGES * PAGE_SIZE).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &file, AT, PAGES * PAGE_SIZE, Sharing::Shared).unwrap();
    let program = Program::new(&machine, &space);
    let (mut frames, mut samples) = (0, 0);
    for (visit, page) in trace.iter().enumerate() {
        let offset = page * PAGE_SIZE;
        match how {
            Use::Load => drop(program.load(VirtAddr(AT + offset)).unwrap()),
            Use::Read => assert_eq!(file.read(offset, &mut [0; 8]), Ok(8)),
        }
        if visit as u64 > PAGES && visit % 1_000 == 0 {
            frames += memory.total_frames() - memory.free_frame_count();
            samples += 1;
        }
    }
    audit(&machine, &memory, &[&space]);
    let (again, frames) = (files.counts().pages_read - PAGES, frames / samples);
    let fewest = fewest_moved(trace, frames).into_memory;
    println!("{how:?}: {again} pages read again in {frames} frames, {fewest} at the least");
    (again - fewest) * 1_000 / trace.len() as u64
}

/// Each pattern, and the maximum of additional reads per thousand visits: through a mapping, and by
/// calls.
const BOUNDS: [(Pattern, [u64; 2]); 5] = [
    (Pattern::Random, [205, 205]),
    (Pattern::Hot80, [58, 58]),
    (Pattern::Hot95, [20, 20]),
    (Pattern::Zipf, [70, 70]),
    (Pattern::Scan, [20, 160]),
];

#[test]
fn patterns_read_few_pages_again() {
    for (pattern, bounds) in BOUNDS {
        let visits = (0..PASSES * PAGES).map(|visit| pattern.page(PAGES, 16, visit));
        let trace: Vec<u64> = (0..PAGES).chain(visits).collect();
        for (how, bound) in [Use::Load, Use::Read].into_iter().zip(bounds) {
            let too_many = reads_too_many(&trace, how);
            assert!(too_many < bound, "{pattern:?}, {how:?}: {too_many} too many of 1,000");
        }
    }
}
