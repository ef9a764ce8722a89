//! The promised costs, as counts: entries, tables, invalidations.

use bindery::addr::VirtAddr;
use bindery::arch::AArch64;
use bindery::{AddressSpace, Counts, Protection, Reach, Remap};
use bindery_hosted::{Program, Walk};

use crate::support::{self, GIB, KIB, MIB, audit, fixed, options, strict, use_order};

on_every_architecture! {
    moving_one_mebibyte_reads_each_entry_once => move_one_mebibyte;
    a_fully_congruent_gibibyte_moves_one_entry => move_one_gibibyte;
    a_gibibyte_congruent_by_tables_moves_512_entries => move_by_two_mebibytes;
    folios_without_access_are_unmapped_whole => unmap_prot_none;
}

/// Unmaps folios that allow no access: a few, a table, and with the address space.
fn unmap_prot_none<A: Walk>() {
    const SIZE: u64 = 2 * MIB;
    let (machine, memory) = strict::<A>(64 * MIB);
    use_order(&memory, 4);
    for length in [64 * KIB, SIZE] {
        let space = AddressSpace::new(&memory, options()).unwrap();
        let program = Program::new(&machine, &space);
        space.mmap(&fixed(GIB, SIZE)).unwrap();
        program.fill(VirtAddr(GIB), SIZE, 7).unwrap();
        space.mprotect(VirtAddr(GIB), SIZE, Protection::empty()).unwrap();
        let before = space.counts();
        space.munmap(VirtAddr(GIB), length).unwrap();
        let cost = space.counts() - before;
        assert_eq!(cost.folios_touched, length / (64 * KIB), "{cost:?}");
        audit(&machine, &memory, &[&space]);
        drop(space);
        audit(&machine, &memory, &[]);
    }
}

/// Moves `length` bytes of folios of 2^`order` pages, verifies the contents, and returns the cost.
fn move_touched<A: Walk>(length: u64, order: u8, from: u64, to: u64, touch: u64) -> Counts {
    let (machine, memory) = strict::<A>(64 * MIB);
    use_order(&memory, order);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let program = Program::new(&machine, &space);
    space.mmap(&fixed(from, length)).unwrap();
    for at in (0..length).step_by(touch as usize) {
        program.store(VirtAddr(from + at), at ^ 0x55).unwrap();
    }
    let before = space.counts();
    let moved = space.mremap(VirtAddr(from), length, length, Remap::To(VirtAddr(to))).unwrap();
    let cost = space.counts() - before;
    assert_eq!(moved, VirtAddr(to));
    for at in (0..length).step_by(touch as usize) {
        assert_eq!(program.load(VirtAddr(to + at)), Ok(at ^ 0x55));
        assert!(program.load(VirtAddr(from + at)).is_err());
    }
    audit(&machine, &memory, &[&space]);
    drop(space);
    audit(&machine, &memory, &[]);
    cost
}

fn move_one_mebibyte<A: Walk>() {
    for order in [0, 4] {
        let cost = move_touched::<A>(MIB, order, GIB, GIB + MIB, 4 * KIB);
        assert_eq!(cost.entries_read, 256, "{cost:?}");
        assert!(cost.entries_written <= 512, "{cost:?}");
        assert_eq!(cost.invalidations, 1, "{cost:?}");
    }
}

fn move_one_gibibyte<A: Walk>() {
    let cost = move_touched::<A>(GIB, 0, 4 * GIB, 8 * GIB, 32 * MIB);
    assert_eq!((cost.tables_moved, cost.entries_read), (1, 1), "{cost:?}");
    assert_eq!(cost.invalidations, 1, "{cost:?}");
    // The whole subtree of the root's child moves, without a table of level 2 or 1.
    assert!(cost.tables_locked <= u64::from(A::LEVELS), "{cost:?}");
}

fn move_by_two_mebibytes<A: Walk>() {
    let cost = move_touched::<A>(GIB, 0, 4 * GIB, 8 * GIB + 2 * MIB, 2 * MIB);
    assert_eq!(cost.tables_moved, 512, "{cost:?}");
    assert!(cost.invalidations <= 8, "{cost:?}");
    assert_eq!(cost.entries_read, 512, "{cost:?}");
}

#[test]
fn a_contiguous_block_stays_folded_after_16_reads() {
    let cost = move_touched::<AArch64>(64 * KIB, 4, GIB, GIB + MIB, 4 * KIB);
    assert_eq!((cost.entries_read, cost.entries_written), (16, 32), "{cost:?}");
    assert_eq!(cost.invalidations, 1, "{cost:?}");
}

#[test]
fn page_by_page_is_equal_work_in_pieces() {
    let (machine, memory) = strict::<AArch64>(64 * MIB);
    use_order(&memory, 4);
    let space = AddressSpace::with_reach(&memory, options(), Reach::Page).unwrap();
    let program = Program::new(&machine, &space);
    space.mmap(&fixed(GIB, MIB)).unwrap();
    program.fill(VirtAddr(GIB), MIB, 7).unwrap();
    let before = space.counts();
    space.mremap(VirtAddr(GIB), MIB, MIB, Remap::To(VirtAddr(GIB + MIB))).unwrap();
    let cost = space.counts() - before;
    // Each of the 16 blocks is unfolded first, with its own invalidation.
    assert_eq!(cost.invalidations, 17, "{cost:?}");
    audit(&machine, &memory, &[&space]);
}

#[test]
fn an_empty_reservation_costs_nothing_for_its_size() {
    let (machine, memory) = strict::<bindery::arch::X86_64>(64 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let program = Program::new(&machine, &space);
    let length = 64 << 40;
    let start = space.mmap(&support::anywhere(length)).unwrap();
    program.store(VirtAddr(start.0 + length / 2), 1).unwrap();
    let before = space.counts();
    space.mprotect(start, length, bindery::Protection::READ).unwrap();
    drop(space.fork().unwrap());
    let cost = space.counts() - before;
    assert!(cost.entries_read + cost.entries_descended < 10_000, "{cost:?}");
    audit(&machine, &memory, &[&space]);
}
