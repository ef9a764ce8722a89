//! Contiguous runs: of 2 MiB leaves on AArch64 at the end of all addresses, and of pages with a
//! memory type.

use super::*;

/// The start of the last 32 MiB.
const LAST_BLOCK: u64 = 0u64.wrapping_sub(16 * MIB2);

const CONTIGUOUS: u64 = 1 << 52;

/// Sixteen 2 MiB leaves in the last 32 MiB of the address space.
fn block(bits: u64) -> Machine<AArch64> {
    let machine = fixture::<AArch64>();
    for index in 0..16 {
        set(&machine, L2, 496 + index, block_leaf(index, bits));
    }
    machine
}

fn block_leaf(index: usize, bits: u64) -> u64 {
    AArch64::maps(0x8_2000 + index as u64 * 512, 2, bits | CONTIGUOUS)
}

#[test]
fn a_block_of_huge_leaves_is_one_translation() {
    let machine = block(AArch64::KERNEL);
    let addr = LAST_BLOCK + 15 * MIB2 + 5 * PAGE;
    assert_eq!(kernel(&machine, addr, Write), Ok(0x8_2000_000 + 15 * MIB2 + 5 * PAGE));
    let cached = machine.cached(Cpu(0), L4);
    assert_eq!((cached.len(), cached[0].start, cached[0].bytes()), (1, LAST_BLOCK, 16 * MIB2));
    machine.assert_clean();
    machine.frames_released(Frame(0x8_4000), 0x100);
    machine.frames_released(Frame(0x8_1fff), 1);
    machine.assert_clean();
    for (index, page) in [(0, LAST_BLOCK), (7, LAST_BLOCK + 7 * MIB2), (15, NEXT_TO_LAST)] {
        kernel(&machine, addr, Write).unwrap();
        flush_kernel(&machine, page, Tables::Unchanged);
        assert!(machine.cached(Cpu(0), L4).is_empty(), "leaf {index}");
    }
}

#[test]
fn a_released_frame_in_a_block_is_seen() {
    for frame in [0x8_2000, 0x8_2fff, 0x8_3fff] {
        let machine = block(AArch64::KERNEL);
        kernel(&machine, LAST_BLOCK, Read).unwrap();
        machine.frames_released(Frame(frame), 1);
        match only(&machine) {
            Violation::ReleasedLeaf { cached, .. } => assert_eq!(cached.order, 13),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_block_formed_without_break_is_in_conflict() {
    let machine = block(AArch64::KERNEL);
    let alone = |index| AArch64::maps(0x8_2000 + index as u64 * 512, 2, AArch64::KERNEL);
    (0..16).for_each(|index| set(&machine, L2, 496 + index, alone(index)));
    kernel(&machine, LAST_MIB2, Read).unwrap();
    machine.assert_clean();
    (0..16).for_each(|index| set(&machine, L2, 496 + index, block_leaf(index, AArch64::KERNEL)));
    machine.audit();
    match only(&machine) {
        Violation::StaleLeaf { why, .. } => assert!(why.contains("size"), "{why}"),
        other => panic!("{other}"),
    }
    kernel(&machine, LAST_BLOCK, Read).unwrap();
    match only(&machine) {
        Violation::Conflict { cached, now, .. } => {
            assert_eq!((cached.bytes(), now.bytes()), (MIB2, 16 * MIB2));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_block_of_huge_leaves_marks_one() {
    let machine = block((AArch64::CLEAN)(AArch64::KERNEL));
    kernel(&machine, LAST_BLOCK, Write).unwrap();
    let dirty = (0..16).filter(|index| get(&machine, L2, 496 + index) & 1 << 7 == 0).count();
    assert_eq!(dirty, 1);
    machine.assert_clean();
}

#[test]
fn a_huge_block_with_foreign_leaf_is_reported() {
    let kernel_bits = AArch64::KERNEL;
    for (entry, expected) in [
        (AArch64::names(L1), "a table"),
        (AArch64::maps(0x8_2000 + 3 * 512, 2, kernel_bits), "not in the block"),
        (block_leaf(3 + 16, kernel_bits), "not the next"),
        (block_leaf(3, kernel_bits | AArch64::WRITE_COMBINING), "attributes differ"),
    ] {
        let machine = block(kernel_bits);
        set(&machine, L2, 496 + 3, entry);
        assert_eq!(kernel(&machine, LAST_BLOCK, Read), Err(true));
        match only(&machine) {
            Violation::BrokenBlock { position: 3, why, .. } => assert!(why.contains(expected)),
            other => panic!("{other}"),
        }
    }
    let machine = fixture::<AArch64>();
    let shifted = AArch64::maps(0x8_2200, 2, kernel_bits | CONTIGUOUS);
    set(&machine, L2, 511, shifted);
    assert_eq!(kernel(&machine, LAST, Read), Err(true));
    assert!(malformed(&machine).contains("not aligned"));
}

#[test]
fn a_device_may_be_a_huge_block() {
    let machine = fixture::<AArch64>();
    let bits = AArch64::KERNEL | AArch64::DEVICE | CONTIGUOUS;
    for index in 0..16 {
        set(&machine, L2, 496 + index, AArch64::maps(0x20_0000 + index as u64 * 512, 2, bits));
    }
    assert_eq!(kernel(&machine, LAST_BLOCK + 5, Read), Ok(0x20_0000_005));
    assert_eq!(machine.cached(Cpu(0), L4)[0].bytes(), 16 * MIB2);
    machine.assert_clean();
}

#[test]
fn a_region_of_two_memory_types_is_reported() {
    type Sv48 = Riscv64<4>;
    let machine = fixture::<Sv48>();
    let region = |bits| Sv48::maps(0x8_0108, 1, Sv48::KERNEL | 1 << 63 | bits);
    (480..496).for_each(|page| set(&machine, L1, page, region(Sv48::WRITE_COMBINING)));
    set(&machine, L1, 483, region(0));
    assert_eq!(kernel(&machine, LAST - 31 * PAGE, Read), Err(true));
    match only(&machine) {
        Violation::BrokenBlock { position: 3, why, .. } => assert_eq!(why, "its attributes differ"),
        other => panic!("{other}"),
    }
}
