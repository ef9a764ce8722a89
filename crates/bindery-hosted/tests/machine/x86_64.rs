//! The MMU of x86-64, with handwritten table entries.

use bindery::arch::X86_64;
use bindery::platform::Tables;
use bindery_hosted::{Machine, Violation};

use super::hand::*;

/// Present, writable, user, accessed.
const TABLE: u64 = 0x27;
/// Present, writable, user, not executable.
const RW: u64 = 0x8000_0000_0000_0007;
/// Present, user.
const RX: u64 = 0x5;
const A: u64 = 0x20;
const D: u64 = 0x40;
const PS: u64 = 0x80;

fn four_levels() -> Machine<X86_64> {
    let machine = machine();
    set(&machine, L4, I4, 0x8_0003_000 | TABLE);
    set(&machine, L3, I3, 0x8_0002_000 | TABLE);
    set(&machine, L2, I2, 0x8_0001_000 | TABLE);
    machine
}

#[test]
fn a_page_is_found_through_four_levels() {
    let machine = four_levels();
    set(&machine, L1, I1, 0x8_0100_000 | RW);
    assert_eq!(go(&machine, L4, VA + 0x123, Read), Ok(0x8_0100_123));
    assert_eq!(get(&machine, L1, I1), 0x8_0100_000 | RW | A);
    assert_eq!(go(&machine, L4, VA + 0xfff, Write), Ok(0x8_0100_fff));
    assert_eq!(get(&machine, L1, I1), 0x8_0100_000 | RW | A | D);
    machine.assert_clean();
}

#[test]
fn a_page_is_found_through_five_levels() {
    let machine = machine::<X86_64<5>>();
    let addr = VA | 7 << 48;
    set(&machine, L5, 7, 0x8_0004_000 | TABLE);
    set(&machine, L4, I4, 0x8_0003_000 | TABLE);
    set(&machine, L3, I3, 0x8_0002_000 | TABLE);
    set(&machine, L2, I2, 0x8_0001_000 | TABLE);
    set(&machine, L1, I1, 0x8_0100_000 | RX);
    assert_eq!(go(&machine, L5, addr + 5, Execute), Ok(0x8_0100_005));
    assert_eq!(go(&machine, L5, VA, Read), Err(false));
    machine.assert_clean();
}

#[test]
fn large_leaves_map_two_mebibytes_and_a_gibibyte() {
    let machine = four_levels();
    set(&machine, L2, I2, 0x8_0200_000 | RW | PS);
    set(&machine, L3, I3 + 1, 0xc_0000_000 | RW | PS);
    assert_eq!(go(&machine, L4, VA, Write), Ok(0x8_0200_000 + (VA & (MIB2 - 1))));
    assert_eq!(go(&machine, L4, VA + GIB, Read), Ok(0xc_0000_000 + (VA & (GIB - 1))));
    assert_eq!(get(&machine, L2, I2), 0x8_0200_000 | RW | PS | A | D);
    let cached = machine.cached(bindery::platform::Cpu(0), L4);
    assert_eq!(cached.iter().map(|leaf| leaf.bytes()).collect::<Vec<_>>(), [MIB2, GIB]);
    machine.assert_clean();
}

#[test]
fn permissions_are_what_all_levels_allow() {
    let machine = four_levels();
    set(&machine, L1, I1, 0x8_0100_000 | RX | 2);
    for (table, index) in [(L4, I4), (L3, I3), (L2, I2)] {
        let whole = get(&machine, table, index);
        let everything = || {
            flush(&machine, L4, &[0], what(VA, PAGE, Tables::Changed));
            [Read, Write, Execute].map(|access| go(&machine, L4, VA, access).is_ok())
        };
        set(&machine, table, index, whole & !2);
        assert_eq!(everything(), [true, false, true]);
        set(&machine, table, index, whole & !4);
        assert_eq!(everything(), [false; 3]);
        set(&machine, table, index, whole | 1 << 63);
        assert_eq!(everything(), [true, true, false]);
        set(&machine, table, index, whole);
        assert_eq!(everything(), [true; 3]);
    }
    machine.assert_clean();
}

#[test]
fn rights_are_checked_before_marks_are_set() {
    let machine = four_levels();
    set(&machine, L1, I1, 0x8_0100_000 | RX);
    assert_eq!(go(&machine, L4, VA, Write), Err(true));
    assert_eq!(get(&machine, L1, I1), 0x8_0100_000 | RX);
}

#[test]
fn tables_are_marked_accessed_too() {
    let machine = four_levels();
    set(&machine, L3, I3, 0x8_0002_007);
    set(&machine, L1, I1, 0x8_0100_000 | RX);
    assert_eq!(go(&machine, L4, VA, Read), Ok(0x8_0100_000));
    assert_eq!(get(&machine, L3, I3), 0x8_0002_027);
}

#[test]
fn addresses_that_are_not_canonical_fault() {
    let machine = four_levels();
    set(&machine, L1, I1, 0x8_0100_000 | RX);
    assert_eq!(go(&machine, L4, VA | 1 << 48, Read), Err(false));
    assert_eq!(go(&machine, L4, VA | 1 << 63, Read), Err(false));
}

#[test]
fn a_cached_denial_ends_with_a_wider_entry() {
    let machine = four_levels();
    set(&machine, L1, I1, 0x8_0100_000 | RX | A);
    assert_eq!(go(&machine, L4, VA, Read), Ok(0x8_0100_000));
    set(&machine, L1, I1, 0x8_0100_000 | RX | A | 2);
    assert_eq!(go(&machine, L4, VA, Write), Ok(0x8_0100_000));
    machine.assert_clean();
}

#[test]
fn a_denied_access_drops_its_cached_tables() {
    let machine = four_levels();
    set(&machine, L2, I2, 0x8_0001_025);
    set(&machine, L1, I1, 0x8_0100_000 | RW | A);
    assert_eq!(go(&machine, L4, VA, Read), Ok(0x8_0100_000));
    set(&machine, L2, I2, 0x8_0001_027);
    assert_eq!(go(&machine, L4, VA, Write), Ok(0x8_0100_000));
    machine.assert_clean();
}

#[test]
fn reserved_bits_are_reported() {
    let machine = four_levels();
    let why = |table, index, entry| {
        let whole = get(&machine, table, index);
        set(&machine, table, index, entry);
        assert_eq!(go(&machine, L4, VA, Read), Err(true));
        set(&machine, table, index, whole);
        malformed(&machine)
    };
    assert!(why(L4, I4, 0x8_0000_000 | TABLE | PS).contains("PS"));
    assert!(why(L2, I2, 0x8_0010_000 | RW | PS).contains("below the size"));
    assert!(why(L1, I1, 0x8_0100_000 | RW | 1 << 51).contains("MAXPHYADDR"));
    assert!(why(L1, I1, 0x8_0100_000 | RX | D).contains("shadow-stack"));
    assert!(why(L1, I1, 0x8_0100_000 | RX | 0x100).contains("global"));
}

#[test]
fn bits_that_are_left_to_software_mean_nothing() {
    let machine = four_levels();
    set(&machine, L1, I1, 0x8_0100_000 | RX | A | 0xe00 | 0x07f0 << 48);
    assert_eq!(go(&machine, L4, VA, Read), Ok(0x8_0100_000));
    machine.assert_clean();
}

#[test]
fn frames_that_are_not_memory_are_reported() {
    let machine = four_levels();
    set(&machine, L1, I1, 0x0_0100_000 | RX);
    assert_eq!(go(&machine, L4, VA, Read), Err(true));
    assert!(matches!(only(&machine), Violation::NoMemory { frame: 0x100, level: 1, .. }));
    set(&machine, L3, I3, 0x7_ffff_000 | TABLE);
    assert_eq!(go(&machine, L4, VA, Read), Err(true));
    assert!(matches!(only(&machine), Violation::NoMemory { frame: 0x7_ffff, level: 3, .. }));
}
