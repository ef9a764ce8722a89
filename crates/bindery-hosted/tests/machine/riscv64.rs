//! The MMU of RISC-V, with handwritten table entries.

use bindery::addr::Frame;
use bindery::arch::Riscv64;
use bindery::platform::{Cpu, Tables};
use bindery_hosted::{Machine, Violation};

use super::hand::*;

const V: u64 = 0x1;
/// Valid, user, and the permissions in the name.
const RW: u64 = 0x17;
const R: u64 = 0x13;
const X: u64 = 0x19;
const A: u64 = 0x40;
const D: u64 = 0x80;
const N: u64 = 1 << 63;

fn ppn(frame: u64) -> u64 {
    frame << 10
}

fn sv48() -> Machine<Riscv64<4>> {
    let machine = machine();
    set(&machine, L4, I4, ppn(0x8_0003) | V);
    set(&machine, L3, I3, ppn(0x8_0002) | V);
    set(&machine, L2, I2, ppn(0x8_0001) | V);
    machine
}

/// Sixteen entries from `I1` that form a NAPOT region of frames from 0x8_0100.
fn napot(machine: &Machine<Riscv64<4>>, attributes: u64) {
    (0..16).for_each(|page| set(machine, L1, I1 + page, ppn(0x8_0108) | N | attributes));
}

#[test]
fn a_found_page_is_marked_accessed_then_dirty() {
    let machine = sv48();
    set(&machine, L1, I1, ppn(0x8_0100) | RW);
    assert_eq!(go(&machine, L4, VA + 0x123, Read), Ok(0x8_0100_123));
    assert_eq!(get(&machine, L1, I1), ppn(0x8_0100) | RW | A);
    assert_eq!(go(&machine, L4, VA + 0x123, Write), Ok(0x8_0100_123));
    assert_eq!(get(&machine, L1, I1), ppn(0x8_0100) | RW | A | D);
    machine.assert_clean();
}

#[test]
fn sv39_has_three_levels_and_repeats_bit_38() {
    let machine = machine::<Riscv64<3>>();
    let addr = VA & 0x7f_ffff_ffff;
    for root_index in [I3, I3 | 256] {
        set(&machine, L3, root_index, ppn(0x8_0002) | V);
    }
    set(&machine, L2, I2, ppn(0x8_0001) | V);
    set(&machine, L1, I1, ppn(0x8_0100) | R);
    assert_eq!(go(&machine, L3, addr, Read), Ok(0x8_0100_000));
    assert_eq!(go(&machine, L3, addr | 0xffff_ffc0_0000_0000, Read), Ok(0x8_0100_000));
    assert_eq!(go(&machine, L3, addr | 1 << 38, Read), Err(false));
    assert_eq!(go(&machine, L3, addr | 1 << 39, Read), Err(false));
    machine.assert_clean();
}

#[test]
fn superpages_map_two_mebibytes_and_a_gibibyte() {
    let machine = sv48();
    set(&machine, L2, I2, ppn(0x8_0200) | RW);
    set(&machine, L3, I3 + 1, ppn(0xc_0000) | R);
    assert_eq!(go(&machine, L4, VA, Write), Ok(0x8_0200_000 + (VA & (MIB2 - 1))));
    assert_eq!(go(&machine, L4, VA + GIB, Read), Ok(0xc_0000_000 + (VA & (GIB - 1))));
    assert_eq!(get(&machine, L2, I2), ppn(0x8_0200) | RW | A | D);
    machine.assert_clean();
}

#[test]
fn each_permission_is_its_own() {
    for (flags, expected) in [
        (R, [true, false, false]),
        (RW, [true, true, false]),
        (X, [false, false, true]),
        (RW & !0x10, [false; 3]),
    ] {
        let machine = sv48();
        set(&machine, L1, I1, ppn(0x8_0100) | flags | A | D);
        let allowed = [Read, Write, Execute].map(|access| go(&machine, L4, VA, access).is_ok());
        assert_eq!(allowed, expected, "{flags:#x}");
        machine.assert_clean();
    }
}

#[test]
fn an_invalid_leaf_is_cached_until_invalidated() {
    let machine = sv48();
    assert_eq!(go(&machine, L4, VA, Read), Err(false));
    set(&machine, L1, I1, ppn(0x8_0100) | R);
    assert_eq!(go(&machine, L4, VA, Read), Err(false));
    machine.assert_clean();
    flush(&machine, L4, &[0], what(VA, PAGE, Tables::Unchanged));
    assert_eq!(go(&machine, L4, VA, Read), Ok(0x8_0100_000));
    machine.assert_clean();
}

#[test]
fn an_invalid_table_entry_goes_with_the_tables() {
    let machine = sv48();
    set(&machine, L2, I2, 0);
    assert_eq!(go(&machine, L4, VA, Read), Err(false));
    set(&machine, L2, I2, ppn(0x8_0001) | V);
    set(&machine, L1, I1, ppn(0x8_0100) | R);
    flush(&machine, L4, &[0], what(VA, PAGE, Tables::Unchanged));
    assert_eq!(go(&machine, L4, VA, Read), Err(false));
    flush(&machine, L4, &[0], what(VA, PAGE, Tables::Changed));
    assert_eq!(go(&machine, L4, VA, Read), Ok(0x8_0100_000));
}

#[test]
fn an_invalid_superpage_entry_goes_with_the_leaf() {
    let machine = sv48();
    set(&machine, L2, I2, 0);
    assert_eq!(go(&machine, L4, VA, Read), Err(false));
    set(&machine, L2, I2, ppn(0x8_0200) | R);
    flush(&machine, L4, &[0], what(VA, PAGE, Tables::Unchanged));
    assert_eq!(go(&machine, L4, VA, Read), Ok(0x8_0200_000 + (VA & (MIB2 - 1))));
}

#[test]
fn a_napot_region_is_cached_and_marked_once() {
    let machine = sv48();
    napot(&machine, RW);
    assert_eq!(go(&machine, L4, VA + 5 * PAGE + 7, Write), Ok(0x8_0105_007));
    let cached = machine.cached(Cpu(0), L4);
    assert_eq!((cached[0].start, cached[0].bytes(), cached[0].frame), (VA, KIB64, 0x8_0100));
    let marked = |bit| (0..16).filter(|page| get(&machine, L1, I1 + page) & bit != 0).count();
    assert_eq!((marked(A), marked(D)), (1, 1));
    machine.assert_clean();
}

#[test]
fn a_region_with_a_foreign_entry_is_reported() {
    let machine = sv48();
    napot(&machine, R | A);
    set(&machine, L1, I1 + 3, ppn(0x8_0103) | R | A);
    assert_eq!(go(&machine, L4, VA, Read), Err(true));
    assert!(matches!(only(&machine), Violation::BrokenBlock { position: 3, .. }));
}

#[test]
fn reserved_encodings_are_reported() {
    let why = |table: Frame, index, entry| {
        let machine = sv48();
        set(&machine, table, index, entry);
        assert_eq!(go(&machine, L4, VA, Read), Err(true));
        malformed(&machine)
    };
    assert!(why(L1, I1, ppn(0x8_0100) | 0x15).contains("not readable"));
    assert!(why(L1, I1, ppn(0x8_0100) | R | 1 << 60).contains("62:54"));
    assert!(why(L1, I1, ppn(0x8_0100) | V).contains("level 1"));
    assert!(why(L2, I2, ppn(0x8_0208) | R).contains("misaligned"));
    assert!(why(L1, I1, ppn(0x8_0104) | R | N).contains("64 KiB"));
    assert!(why(L2, I2, ppn(0x8_0200) | R | N).contains("N above"));
    assert!(why(L2, I2, ppn(0x8_0001) | V | A).contains("A, D or U"));
    assert!(why(L2, I2, ppn(0x8_0001) | V | D).contains("A, D or U"));
    assert!(why(L2, I2, ppn(0x8_0001) | V | 0x10).contains("A, D or U"));
    assert!(why(L2, I2, ppn(0x8_0001) | V | N).contains("N in a pointer"));
    assert!(why(L1, I1, ppn(0x8_0100) | R | 0x20).contains("global"));
}

#[test]
fn bits_that_are_left_to_software_mean_nothing() {
    let machine = sv48();
    set(&machine, L1, I1, ppn(0x8_0100) | R | 0x300);
    assert_eq!(go(&machine, L4, VA, Read), Ok(0x8_0100_000));
    machine.assert_clean();
}
