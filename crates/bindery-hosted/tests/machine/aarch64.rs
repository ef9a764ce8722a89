//! The MMU of AArch64, with handwritten table entries.

use bindery::arch::AArch64;
use bindery::platform::{Cpu, Tables};
use bindery_hosted::{Machine, Violation};

use super::hand::*;

/// Valid, table.
const TABLE: u64 = 0b11;
/// Valid, page; EL0, inner shareable, not global, PXN.
const PAGE_BASE: u64 = 0b11 | 0xb40 | 1 << 53;
/// The same, as a level-2 or level-3 block.
const BLOCK_BASE: u64 = PAGE_BASE & !2;
const AF: u64 = 1 << 10;
const RO: u64 = 1 << 7;
const DBM: u64 = 1 << 51;
const UXN: u64 = 1 << 54;
const CONT: u64 = 1 << 52;
/// Writable and clean.
const CLEAN: u64 = DBM | RO | UXN;

fn four_levels() -> Machine<AArch64> {
    let machine = machine();
    set(&machine, L4, I4, 0x8_0003_000 | TABLE);
    set(&machine, L3, I3, 0x8_0002_000 | TABLE);
    set(&machine, L2, I2, 0x8_0001_000 | TABLE);
    machine
}

/// Sixteen entries from `I1` that form a block.
fn block(machine: &Machine<AArch64>, attributes: u64) {
    for page in 0..16 {
        let address = 0x8_0100_000 + page as u64 * PAGE;
        set(machine, L1, I1 + page, address | PAGE_BASE | CONT | attributes);
    }
}

fn block_entries(machine: &Machine<AArch64>) -> Vec<u64> {
    (0..16).map(|page| get(machine, L1, I1 + page)).collect()
}

#[test]
fn a_first_write_sets_accessed_and_dirty_state() {
    let machine = four_levels();
    set(&machine, L1, I1, 0x8_0100_000 | PAGE_BASE | CLEAN);
    assert_eq!(go(&machine, L4, VA + 0x123, Read), Ok(0x8_0100_123));
    assert_eq!(get(&machine, L1, I1), 0x8_0100_000 | PAGE_BASE | CLEAN | AF);
    assert_eq!(go(&machine, L4, VA + 0x123, Write), Ok(0x8_0100_123));
    assert_eq!(get(&machine, L1, I1), 0x8_0100_000 | PAGE_BASE | DBM | UXN | AF);
    machine.assert_clean();
}

#[test]
fn blocks_of_levels_2_and_3_are_mapped() {
    let machine = four_levels();
    set(&machine, L2, I2, 0x8_0200_000 | BLOCK_BASE | CLEAN);
    set(&machine, L3, I3 + 1, 0xc_0000_000 | BLOCK_BASE | RO);
    assert_eq!(go(&machine, L4, VA, Write), Ok(0x8_0200_000 + (VA & (MIB2 - 1))));
    assert_eq!(go(&machine, L4, VA + GIB, Execute), Ok(0xc_0000_000 + (VA & (GIB - 1))));
    assert_eq!(get(&machine, L2, I2), 0x8_0200_000 | BLOCK_BASE | DBM | UXN | AF);
    machine.assert_clean();
}

#[test]
fn read_only_without_dbm_stays_read_only() {
    let machine = four_levels();
    set(&machine, L1, I1, 0x8_0100_000 | PAGE_BASE | RO | AF);
    assert_eq!(go(&machine, L4, VA, Write), Err(true));
    assert_eq!(go(&machine, L4, VA, Execute), Ok(0x8_0100_000));
    assert_eq!(get(&machine, L1, I1), 0x8_0100_000 | PAGE_BASE | RO | AF);
}

#[test]
fn the_kernel_and_execute_never_are_refused() {
    let machine = four_levels();
    set(&machine, L1, I1, 0x8_0100_000 | PAGE_BASE & !(1 << 6));
    assert_eq!(go(&machine, L4, VA, Read), Err(true));
    set(&machine, L1, I1, 0x8_0100_000 | PAGE_BASE | UXN);
    assert_eq!(go(&machine, L4, VA, Execute), Err(true));
    assert_eq!(go(&machine, L4, VA, Read), Ok(0x8_0100_000));
}

#[test]
fn limits_in_table_entries_hold_for_all_below() {
    for (limit, expected) in [
        (1 << 60, [true, true, false]),
        (1 << 61, [false, false, false]),
        (1 << 62, [true, false, true]),
    ] {
        let machine = four_levels();
        set(&machine, L3, I3, 0x8_0002_000 | TABLE | limit);
        set(&machine, L1, I1, 0x8_0100_000 | PAGE_BASE | DBM);
        let allowed = [Read, Write, Execute].map(|access| go(&machine, L4, VA, access).is_ok());
        assert_eq!(allowed, expected);
    }
}

#[test]
fn a_cached_denial_stays_until_it_is_invalidated() {
    let machine = four_levels();
    set(&machine, L1, I1, 0x8_0100_000 | PAGE_BASE | RO | AF);
    assert_eq!(go(&machine, L4, VA, Write), Err(true));
    set(&machine, L1, I1, 0x8_0100_000 | PAGE_BASE | DBM | AF);
    assert_eq!(go(&machine, L4, VA, Write), Err(true));
    flush(&machine, L4, &[0], what(VA, PAGE, Tables::Unchanged));
    assert_eq!(go(&machine, L4, VA, Write), Ok(0x8_0100_000));
    machine.assert_clean();
}

#[test]
fn one_access_caches_a_whole_contiguous_block() {
    let machine = four_levels();
    block(&machine, RO | AF);
    assert_eq!(go(&machine, L4, VA + 5 * PAGE, Read), Ok(0x8_0105_000));
    let cached = machine.cached(Cpu(0), L4);
    assert_eq!((cached[0].start, cached[0].bytes(), cached[0].frame), (VA, KIB64, 0x8_0100));
    let before = machine.statistics();
    assert_eq!(go(&machine, L4, VA + 15 * PAGE, Read), Ok(0x8_010f_000));
    assert_eq!((machine.statistics() - before).hits, 1);
    machine.assert_clean();
}

#[test]
fn a_block_records_uses_in_any_entry() {
    let mut elsewhere = 0;
    for accessed in 0..16 {
        let machine = four_levels();
        block(&machine, CLEAN);
        for _ in 0..accessed {
            // Advances the choice of the entry.
            let _ = go(&machine, L4, 0, Read);
        }
        go(&machine, L4, VA + accessed * PAGE, Write).unwrap();
        let entries = block_entries(&machine);
        let written: Vec<_> = (0..16).filter(|i| entries[*i] & RO == 0).collect();
        assert_eq!(written.len(), 1);
        assert_eq!(entries.iter().filter(|entry| **entry & AF != 0).count(), 1);
        elsewhere += u32::from(written[0] != accessed as usize);
        machine.assert_clean();
    }
    assert!(elsewhere > 8, "{elsewhere}");
}

#[test]
fn a_partly_dirty_block_is_not_marked_again() {
    let machine = four_levels();
    block(&machine, CLEAN | AF);
    set(&machine, L1, I1 + 9, 0x8_0109_000 | PAGE_BASE | CONT | DBM | UXN | AF);
    let before = block_entries(&machine);
    assert_eq!(go(&machine, L4, VA + 2 * PAGE, Write), Ok(0x8_0102_000));
    assert_eq!(block_entries(&machine), before);
    machine.assert_clean();
}

#[test]
fn a_partly_accessed_block_is_not_marked_again() {
    let machine = four_levels();
    block(&machine, CLEAN);
    set(&machine, L1, I1 + 9, 0x8_0109_000 | PAGE_BASE | CONT | CLEAN | AF);
    let before = block_entries(&machine);
    assert_eq!(go(&machine, L4, VA + 2 * PAGE, Read), Ok(0x8_0102_000));
    assert_eq!(block_entries(&machine), before);
    machine.assert_clean();
}

#[test]
fn the_contiguous_bit_works_above_level_one_too() {
    let machine = four_levels();
    let addr = VA & !(32 * MIB2 - 1);
    for index in 0..16 {
        set(
            &machine,
            L2,
            index,
            (0x8_2000_000 + index as u64 * MIB2) | BLOCK_BASE | CONT | RO | AF,
        );
    }
    assert_eq!(go(&machine, L4, addr + 3 * MIB2, Read), Ok(0x8_2600_000));
    assert_eq!(machine.cached(Cpu(0), L4)[0].bytes(), 16 * MIB2);
    machine.assert_clean();
}

#[test]
fn a_block_with_a_foreign_entry_is_reported() {
    for (entry, expected) in [
        (0x8_0107_000 | PAGE_BASE | RO | AF, "not in the block"),
        (0x8_0117_000 | PAGE_BASE | CONT | RO | AF, "frame is not the next"),
        (0x8_0107_000 | PAGE_BASE | CONT | RO | AF | 1 << 2, "attributes differ"),
    ] {
        let machine = four_levels();
        block(&machine, RO | AF);
        set(&machine, L1, I1 + 7, entry);
        assert_eq!(go(&machine, L4, VA, Read), Err(true));
        match only(&machine) {
            Violation::BrokenBlock { position: 7, why, .. } => assert!(why.contains(expected)),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_holed_block_waits_for_the_audit() {
    for (entry, expected) in
        [(0, "invalid"), (0x8_0107_000 | PAGE_BASE | CONT | CLEAN | AF, "permissions differ")]
    {
        let machine = four_levels();
        block(&machine, RO | UXN | AF);
        set(&machine, L1, I1 + 7, entry);
        assert_eq!(go(&machine, L4, VA, Read), Ok(0x8_0100_000));
        assert!(machine.violations().is_empty());
        machine.audit();
        let found = machine.take_violations();
        let broken = |violation: &Violation| match violation {
            Violation::BrokenBlock { why, .. } => why.contains(expected),
            _ => false,
        };
        assert!(found.iter().any(broken), "{found:#?}");
    }
}

#[test]
fn reserved_descriptors_are_reported() {
    let why = |table, index, entry| {
        let machine = four_levels();
        set(&machine, table, index, entry);
        assert_eq!(go(&machine, L4, VA, Read), Err(true));
        malformed(&machine)
    };
    assert!(why(L1, I1, 0x8_0100_000 | BLOCK_BASE).contains("level that has none"));
    assert!(why(L4, I4, 0x8_0000_000 | BLOCK_BASE).contains("level that has none"));
    assert!(why(L2, I2, 0x8_0201_000 | BLOCK_BASE).contains("below the size"));
    assert!(why(L1, I1, 0x8_0100_000 | PAGE_BASE | 1 << 48).contains("above 47"));
    assert!(why(L1, I1, 0x8_0100_000 | PAGE_BASE & !(1 << 9)).contains("SH"));
    assert!(why(L1, I1, 0x8_0100_000 | PAGE_BASE & !(1 << 11)).contains("global"));
    assert!(why(L1, I1, 0x8_0101_000 | PAGE_BASE | CONT).contains("not aligned"));
}

#[test]
fn the_upper_half_has_another_root() {
    let machine = four_levels();
    set(&machine, L1, I1, 0x8_0100_000 | PAGE_BASE | AF);
    assert_eq!(go(&machine, L4, VA | 0xffff << 48, Read), Err(false));
}
