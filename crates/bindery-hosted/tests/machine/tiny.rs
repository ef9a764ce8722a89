//! The MMU of the tiny architecture, with handwritten table entries.

use bindery::arch::Tiny;
use bindery::platform::Cpu;
use bindery_hosted::Machine;

use super::hand::*;

const TABLE: u64 = 3;
/// Valid, user.
const R: u64 = 0x11;
const W: u64 = 4;
const A: u64 = 0x20;
const D: u64 = 0x40;
const CONT: u64 = 0x80;

/// Address 0x1_6000: indexes 1, 1 and 2 from the root down.
const AT: u64 = 0x1_6000;

fn three_levels() -> Machine<Tiny> {
    let machine = machine();
    set(&machine, L3, 1, 0x8_0002_000 | TABLE);
    set(&machine, L2, 1, 0x8_0001_000 | TABLE);
    machine
}

#[test]
fn a_page_is_found_through_three_levels() {
    let machine = three_levels();
    set(&machine, L1, 2, 0x8_0101_000 | R | W);
    assert_eq!(go(&machine, L3, AT + 5, Read), Ok(0x8_0101_005));
    assert_eq!(get(&machine, L1, 2), 0x8_0101_000 | R | W | A);
    assert_eq!(go(&machine, L3, AT + 5, Write), Ok(0x8_0101_005));
    assert_eq!(get(&machine, L1, 2), 0x8_0101_000 | R | W | A | D);
    assert_eq!(go(&machine, L3, AT, Execute), Err(true));
    assert_eq!(go(&machine, L3, 0x4_0000, Read), Err(false));
    machine.assert_clean();
}

#[test]
fn a_leaf_of_level_two_maps_four_pages() {
    let machine = three_levels();
    set(&machine, L2, 1, 0x8_0104_000 | R);
    assert_eq!(go(&machine, L3, AT, Read), Ok(0x8_0106_000));
    machine.assert_clean();
}

#[test]
fn two_entries_form_a_block() {
    let machine = three_levels();
    set(&machine, L1, 2, 0x8_0106_000 | R | CONT);
    set(&machine, L1, 3, 0x8_0107_000 | R | CONT);
    assert_eq!(go(&machine, L3, AT + PAGE, Read), Ok(0x8_0107_000));
    assert_eq!(machine.cached(Cpu(0), L3)[0].bytes(), 2 * PAGE);
    machine.assert_clean();
}

#[test]
fn what_has_no_meaning_is_reported() {
    for (table, index, entry, expected) in [
        (L3, 1, 0x8_0110_000 | R, "level 3"),
        (L2, 1, 0x8_0104_000 | R | CONT, "contiguous above"),
        (L1, 2, 0x8_0101_000 | R | CONT, "not aligned"),
        (L1, 2, 0x8_0101_000 | TABLE, "level 1"),
        (L1, 2, 0x8_0101_000 | R | 0x400, "without a meaning"),
    ] {
        let machine = three_levels();
        set(&machine, table, index, entry);
        assert_eq!(go(&machine, L3, AT, Read), Err(true));
        assert!(malformed(&machine).contains(expected));
    }
}
