//! Moves whose shape once caused a failure, or whose cost easily regresses: sparse, huge, shifted.

use bindery::addr::VirtAddr;
use bindery::arch::{AArch64, X86_64};
use bindery::{AddressSpace, Remap};
use bindery_hosted::{Program, Walk};

use crate::support::{self, GIB, KIB, MIB, anywhere, audit, fixed, options, strict, use_order};

/// Touches a page every `step` bytes of `length` bytes at `from`, and the last page. Moves
/// everything to `to` and verifies the stamps there.
fn move_sparse<A: Walk>(from: u64, to: u64, length: u64, step: u64) {
    let (machine, memory) = strict::<A>(256 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let program = Program::new(&machine, &space);
    space.mmap(&fixed(from, length)).unwrap();
    let touched: Vec<u64> = (0..length).step_by(step as usize).chain([length - 4 * KIB]).collect();
    for at in &touched {
        program.store(VirtAddr(from + at), at ^ 0xabc).unwrap();
    }
    assert_eq!(
        space.mremap(VirtAddr(from), length, length, Remap::To(VirtAddr(to))),
        Ok(VirtAddr(to))
    );
    audit(&machine, &memory, &[&space]);
    for at in &touched {
        assert_eq!(program.load(VirtAddr(to + at)), Ok(at ^ 0xabc));
    }
    audit(&machine, &memory, &[&space]);
}

#[test]
fn a_huge_sparse_move_locks_few_tables() {
    // One level-2 table in each GiB; together they exceeded the capacity of a lock set.
    move_sparse::<X86_64<4>>(64 * GIB, 1024 * GIB + 2 * MIB, 200 * GIB, GIB);
    move_sparse::<X86_64<4>>(64 * GIB, 1024 * GIB + 4 * KIB, 200 * GIB, GIB);
    move_sparse::<AArch64>(64 * GIB, 1024 * GIB + 64 * KIB, 200 * GIB, GIB);
}

#[test]
fn a_move_leaves_no_empty_source_table() {
    let (machine, memory) = strict::<X86_64<4>>(64 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let program = Program::new(&machine, &space);
    // Neighbors bound the source on both sides, so its hull is the source itself.
    for (at, length) in [(GIB, 2 * GIB), (3 * GIB, 2 * GIB), (5 * GIB, GIB)] {
        space.mmap(&fixed(at, length)).unwrap();
        space.mprotect(VirtAddr(at), length, bindery::Protection::READ).unwrap();
    }
    let (from, length) = (VirtAddr(3 * GIB), 2 * GIB);
    space.mprotect(from, length, support::READ_WRITE).unwrap();
    program.store(from, 7).unwrap();
    let to = VirtAddr(64 * GIB + 2 * MIB);
    assert_eq!(space.mremap(from, length, length, Remap::To(to)), Ok(to));
    assert_eq!(program.load(to), Ok(7));
    audit(&machine, &memory, &[&space]);
}

#[test]
fn a_move_ending_in_a_gibibyte_frees_tables() {
    let (machine, memory) = strict::<AArch64>(64 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let program = Program::new(&machine, &space);
    // Moves by leaves, then by level-1 tables, then by one level-2 table.
    let from = 2 * GIB - 4 * MIB - 4 * KIB;
    let length = 3 * GIB - from;
    space.mmap(&fixed(from, length)).unwrap();
    for at in [from, 2 * GIB - 4 * MIB, 2 * GIB, 3 * GIB - 4 * KIB] {
        program.store(VirtAddr(at), at).unwrap();
    }
    let to = VirtAddr(from + 8 * GIB);
    assert_eq!(space.mremap(VirtAddr(from), length, length, Remap::To(to)), Ok(to));
    audit(&machine, &memory, &[&space]);
    // Any leftover at the source would now be an obstacle.
    let whole = VirtAddr(64 * GIB);
    space.mmap(&fixed(whole.0, GIB)).unwrap();
    program.store(whole, 5).unwrap();
    let there = VirtAddr(GIB);
    assert_eq!(space.mremap(whole, GIB, GIB, Remap::To(there)), Ok(there));
    assert_eq!(program.load(there), Ok(5));
    assert_eq!(program.load(VirtAddr(2 * GIB + 8 * GIB)), Ok(2 * GIB));
    audit(&machine, &memory, &[&space]);
}

#[test]
fn discarding_leaves_tables_that_it_covers_in_part() {
    let (machine, memory) = strict::<AArch64>(64 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let program = Program::new(&machine, &space);
    space.mmap(&fixed(GIB, 64 * KIB)).unwrap();
    space.mmap(&fixed(GIB + MIB, 64 * KIB)).unwrap();
    program.fill(VirtAddr(GIB), 64 * KIB, 1).unwrap();
    let before = space.counts();
    space.discard(VirtAddr(GIB), 64 * KIB).unwrap();
    let cost = space.counts() - before;
    assert_eq!((cost.tables_freed, cost.invalidations), (0, 1), "{cost:?}");
    let before = space.counts();
    program.store(VirtAddr(GIB + MIB), 2).unwrap();
    assert_eq!(program.load(VirtAddr(GIB)), Ok(0));
    let cost = space.counts() - before;
    assert_eq!(cost.tables_allocated, 0, "{cost:?}");
    // The tables are freed with the last mapping in their span.
    space.munmap(VirtAddr(GIB + MIB), 64 * KIB).unwrap();
    let before = space.counts();
    space.munmap(VirtAddr(GIB), 64 * KIB).unwrap();
    let cost = space.counts() - before;
    assert_eq!((cost.tables_freed, cost.invalidations), (3, 1), "{cost:?}");
    audit(&machine, &memory, &[&space]);
}

#[test]
fn discarding_untouched_memory_locks_no_table() {
    let (machine, memory) = strict::<AArch64>(64 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let program = Program::new(&machine, &space);
    space.mmap(&fixed(GIB, 2 * GIB)).unwrap();
    program.store(VirtAddr(2 * GIB), 1).unwrap();
    let before = space.counts();
    space.discard(VirtAddr(GIB), GIB).unwrap();
    let cost = space.counts() - before;
    assert_eq!((cost.tables_locked, cost.invalidations), (0, 0), "{cost:?}");
    assert_eq!(program.load(VirtAddr(2 * GIB)), Ok(1));
    // One empty entry does not cover this range.
    space.discard(VirtAddr(GIB), 2 * GIB).unwrap();
    assert_eq!(program.load(VirtAddr(2 * GIB)), Ok(0));
    audit(&machine, &memory, &[&space]);
}

fn shift_huge<A: Walk>() {
    let (machine, memory) = strict::<A>(128 * MIB);
    use_order(&memory, 9);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let program = Program::new(&machine, &space);
    let length = 32 * MIB;
    space.mmap(&fixed(GIB, length)).unwrap();
    for at in (0..length).step_by(64 * KIB as usize) {
        program.store(VirtAddr(GIB + at), at | 1).unwrap();
    }
    let to = VirtAddr(8 * GIB + 64 * KIB);
    let before = space.counts();
    space.mremap(VirtAddr(GIB), length, length, Remap::To(to)).unwrap();
    let cost = space.counts() - before;
    // Each huge leaf is cleared once, and its 512 pages are written at their new addresses. At the
    // end, the entry that refers to the source's table is read.
    assert_eq!(cost.entries_read, 16 + 1, "{cost:?}");
    assert_eq!(cost.entries_written - cost.tables_allocated, 16 + 16 * 512 + 1, "{cost:?}");
    assert_eq!(cost.invalidations, 1, "{cost:?}");
    audit(&machine, &memory, &[&space]);
    for at in (0..length).step_by(64 * KIB as usize) {
        assert_eq!(program.load(to.checked_add(at).unwrap()), Ok(at | 1));
    }
    drop(space);
    audit(&machine, &memory, &[]);
}

on_every_architecture! {
    a_shifted_huge_leaf_is_written_as_pages => shift_huge;
    our_choice_of_destination_moves_whole_tables => choose;
    parting_huge_leaves_take_a_deposit_each => part_huge;
}

/// Moves leaves from one table to two. Each half then splits its leaves without memory for tables.
fn part_huge<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    use_order(&memory, 9);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let program = Program::new(&machine, &space);
    let (from, huge, leaves) = (GIB, 2 * MIB, 12);
    let to = 4 * GIB - 5 * huge;
    space.mmap(&fixed(from, leaves * huge)).unwrap();
    for leaf in (0..leaves).filter(|leaf| *leaf != 7) {
        program.store(VirtAddr(from + leaf * huge), leaf).unwrap();
    }
    let before = space.counts();
    space.mremap(VirtAddr(from), leaves * huge, leaves * huge, Remap::To(VirtAddr(to))).unwrap();
    let cost = space.counts() - before;
    assert_eq!(cost.invalidations, 1, "{cost:?}");
    assert!(cost.entries_written - cost.tables_allocated <= 2 * 11 + 3, "{cost:?}");
    audit(&machine, &memory, &[&space]);
    memory.fail_allocations_after(Some(0));
    for leaf in (0..leaves).filter(|leaf| *leaf != 7) {
        let at = VirtAddr(to + leaf * huge);
        space.discard(VirtAddr(at.0 + 4 * KIB), 4 * KIB).unwrap();
        assert_eq!(program.load(at), Ok(leaf));
    }
    memory.fail_allocations_after(None);
    audit(&machine, &memory, &[&space]);
    drop(space);
    audit(&machine, &memory, &[]);
}

fn choose<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let program = Program::new(&machine, &space);
    // An obstacle prevents growth in place, so the mapping has to move to an odd address.
    let from = VirtAddr(4 * GIB + 3 * MIB + 12 * KIB);
    let length = 64 * MIB;
    space.mmap(&fixed(from.0, length)).unwrap();
    space.mmap(&fixed(from.0 + length + 4 * KIB, 4 * KIB)).unwrap();
    for at in (0..length).step_by(MIB as usize) {
        program.store(VirtAddr(from.0 + at), at).unwrap();
    }
    let before = space.counts();
    let to = space.mremap(from, length, 2 * length, Remap::MayMove).unwrap();
    let cost = space.counts() - before;
    assert_ne!(to, from);
    assert_eq!(to.0 % (2 * MIB), from.0 % (2 * MIB));
    assert_eq!(cost.tables_moved, 31, "{cost:?}");
    for at in (0..length).step_by(MIB as usize) {
        assert_eq!(program.load(VirtAddr(to.0 + at)), Ok(at));
    }
    audit(&machine, &memory, &[&space]);
}

#[test]
fn continuing_mappings_merge_without_memory() {
    let (machine, memory) = strict::<X86_64<4>>(16 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&anywhere(64 * KIB)).unwrap();
    memory.fail_allocations_after(Some(0));
    for _ in 0..10 {
        space.mmap(&anywhere(64 * KIB)).unwrap();
    }
    memory.fail_allocations_after(None);
    assert_eq!(space.mapping_count(), 1);
    audit(&machine, &memory, &[&space]);
}
