//! The strict TLB reports each violation of the rules between tables and TLBs.

use bindery::addr::{Frame, VirtAddr};
use bindery::arch::{AArch64, X86_64};
use bindery::platform::{Cpu, Platform, Tables};
use bindery_hosted::{Machine, Violation};

use super::hand::*;

/// x86-64: tables and pages.
const TABLE: u64 = 0x27;
const RW: u64 = 0x8000_0000_0000_0027;
const RO: u64 = 0x8000_0000_0000_0025;
const D: u64 = 0x40;

/// One page at `VA`, accessed on CPU 0.
fn mapped() -> Machine<X86_64> {
    let machine = machine();
    set(&machine, L4, I4, 0x8_0003_000 | TABLE);
    set(&machine, L3, I3, 0x8_0002_000 | TABLE);
    set(&machine, L2, I2, 0x8_0001_000 | TABLE);
    set(&machine, L1, I1, 0x8_0100_000 | RW | D);
    go(&machine, L4, VA, Write).unwrap();
    machine.assert_clean();
    machine
}

fn stale(violation: Violation) -> &'static str {
    let text = violation.to_string();
    match violation {
        Violation::StaleLeaf { why, .. } | Violation::StaleTable { why, .. } => {
            assert!(text.contains("CPU 0, root 0x80004, address 0x80"), "{text}");
            why
        }
        other => panic!("{other}"),
    }
}

#[test]
fn the_audit_finds_an_unflushed_unmap() {
    let machine = mapped();
    set(&machine, L1, I1, 0);
    assert_eq!(go(&machine, L4, VA, Read), Ok(0x8_0100_000), "the TLB forgets nothing");
    machine.audit();
    assert_eq!(stale(only(&machine)), "the address is not mapped");
    flush(&machine, L4, &[0], what(VA, PAGE, Tables::Unchanged));
    assert_eq!(go(&machine, L4, VA, Read), Err(false));
    machine.assert_clean();
}

#[test]
fn the_audit_finds_an_unflushed_write_protection() {
    let machine = mapped();
    set(&machine, L1, I1, 0x8_0100_000 | RO);
    assert_eq!(go(&machine, L4, VA, Write), Ok(0x8_0100_000));
    machine.audit();
    assert_eq!(stale(only(&machine)), "the permissions shrank");
}

#[test]
fn the_audit_finds_an_unflushed_clean_entry() {
    let machine = mapped();
    set(&machine, L1, I1, 0x8_0100_000 | RW);
    machine.audit();
    assert!(stale(only(&machine)).contains("write would not be recorded"));
}

#[test]
fn the_audit_finds_an_unflushed_replacement() {
    let machine = mapped();
    set(&machine, L1, I1, 0x8_0200_000 | RW | D);
    machine.audit();
    assert_eq!(stale(only(&machine)), "the address is mapped elsewhere");
}

#[test]
fn accessed_bits_may_be_cleared_without_flush() {
    let machine = mapped();
    set(&machine, L1, I1, (0x8_0100_000 | RW | D) & !0x20);
    machine.assert_clean();
}

#[test]
fn a_wider_entry_needs_no_flush() {
    let machine = mapped();
    set(&machine, L1, I1, (0x8_0100_000 | RW | D) & !(1 << 63));
    machine.assert_clean();
    assert_eq!(go(&machine, L4, VA, Execute), Ok(0x8_0100_000));
    machine.assert_clean();
}

#[test]
fn a_frame_released_before_the_flush_is_reported() {
    let machine = mapped();
    set(&machine, L1, I1, 0);
    machine.frames_released(Frame(0x8_00f0), 0x10);
    machine.frames_released(Frame(0x8_0101), 0x10);
    assert!(machine.violations().is_empty());
    machine.frames_released(Frame(0x8_00f0), 0x20);
    match only(&machine) {
        Violation::ReleasedLeaf { place, cached, .. } => {
            assert_eq!((place.cpu, place.root, place.addr), (Cpu(0), L4, VA));
            assert_eq!(cached.frame, 0x8_0100);
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_frame_inside_a_huge_translation_is_reported() {
    let machine = mapped();
    set(&machine, L2, I2 + 1, 0x8_0200_000 | RW | 0x80);
    go(&machine, L4, VA + MIB2, Read).unwrap();
    machine.frames_released(Frame(0x8_0234), 1);
    assert!(matches!(only(&machine), Violation::ReleasedLeaf { .. }));
}

#[test]
fn a_table_released_before_the_flush_is_reported() {
    let machine = mapped();
    set(&machine, L1, I1, 0);
    set(&machine, L2, I2, 0);
    // Sufficient for the leaves, not for the table.
    flush(&machine, L4, &[0], what(VA, MIB2, Tables::Unchanged));
    machine.frames_released(L1, 1);
    match only(&machine) {
        Violation::ReleasedTable { level, cached, .. } => assert_eq!((level, cached), (2, L1)),
        other => panic!("{other}"),
    }
}

#[test]
fn a_root_released_before_its_flush_is_reported() {
    let machine = mapped();
    machine.frames_released(L4, 1);
    assert!(matches!(only(&machine), Violation::ReleasedRoot { leaves: 1, tables: 3, .. }));
}

#[test]
fn the_audit_finds_a_detached_table_in_use() {
    let machine = mapped();
    set(&machine, L1, I1 + 1, 0x8_0101_000 | RW);
    set(&machine, L2, I2, 0);
    flush(&machine, L4, &[0], what(VA, PAGE, Tables::Unchanged));
    assert_eq!(go(&machine, L4, VA + PAGE, Read), Ok(0x8_0101_000), "through the stale table");
    machine.audit();
    let found = machine.take_violations();
    assert_eq!(found.len(), 2, "{found:#?}");
    assert!(found.iter().any(|v| matches!(v, Violation::StaleTable { level: 2, now: None, .. })));
    flush(&machine, L4, &[0], what(VA, MIB2, Tables::Changed));
    assert_eq!(go(&machine, L4, VA + PAGE, Read), Err(false));
    machine.assert_clean();
}

#[test]
fn a_moved_table_is_stale_at_its_source() {
    let machine = mapped();
    set(&machine, L2, I2 + 1, get(&machine, L2, I2));
    set(&machine, L2, I2, 0);
    go(&machine, L4, VA + MIB2, Read).unwrap();
    machine.audit();
    let found = machine.take_violations();
    assert!(found.iter().any(|v| matches!(v, Violation::StaleTable { level: 2, .. })));
    assert!(found.iter().any(|v| matches!(v, Violation::StaleLeaf { .. })));
    flush(&machine, L4, &[0], what(VA, MIB2, Tables::Changed));
    machine.assert_clean();
}

#[test]
fn the_audit_finds_a_forgotten_cpu() {
    let machine = mapped();
    machine.on_cpu(Cpu(1), || go(&machine, L4, VA, Read)).unwrap();
    set(&machine, L1, I1, 0);
    flush(&machine, L4, &[0], what(VA, PAGE, Tables::Unchanged));
    machine.audit();
    match only(&machine) {
        Violation::StaleLeaf { place, .. } => assert_eq!(place.cpu, Cpu(1)),
        other => panic!("{other}"),
    }
    flush(&machine, L4, &[1], what(VA, PAGE, Tables::Unchanged));
    machine.assert_clean();
}

#[test]
fn an_invalidation_has_one_space_and_range() {
    let machine = mapped();
    let other = Frame(0x8_0044);
    set(&machine, other, I4, 0x8_0003_000 | TABLE);
    set(&machine, L1, I1 + 1, 0x8_0101_000 | RW);
    go(&machine, other, VA, Read).unwrap();
    go(&machine, L4, VA + PAGE, Read).unwrap();
    flush(&machine, L4, &[0], what(VA, PAGE, Tables::Unchanged));
    let starts = |root| machine.cached(Cpu(0), root).iter().map(|leaf| leaf.start).collect();
    let (mine, others): (Vec<_>, Vec<_>) = (starts(L4), starts(other));
    assert_eq!((mine, others), (vec![VA + PAGE], vec![VA]));
}

#[test]
fn a_partial_invalidation_removes_a_huge_translation() {
    let machine = mapped();
    set(&machine, L2, I2 + 1, 0x8_0200_000 | RW | 0x80);
    go(&machine, L4, VA + MIB2, Read).unwrap();
    flush(&machine, L4, &[0], what(VA + MIB2 + 7 * PAGE, PAGE, Tables::Unchanged));
    assert_eq!(machine.cached(Cpu(0), L4).len(), 1);
}

#[test]
fn a_too_large_stride_skips_translations() {
    let machine = mapped();
    let mut coarse = what(VA, KIB64, Tables::Unchanged);
    set(&machine, L1, I1 + 1, 0x8_0101_000 | RW);
    go(&machine, L4, VA + PAGE, Read).unwrap();
    coarse.stride = KIB64;
    flush(&machine, L4, &[0], coarse);
    assert_eq!(machine.cached(Cpu(0), L4).len(), 1, "the page at VA alone was named");
}

#[test]
fn a_fold_without_a_break_is_a_conflict() {
    const PAGE_BITS: u64 = 0x0060_0000_0000_0fc3;
    const CONT: u64 = 1 << 52;
    let machine = machine::<AArch64>();
    set(&machine, L4, I4, 0x8_0003_003);
    set(&machine, L3, I3, 0x8_0002_003);
    set(&machine, L2, I2, 0x8_0001_003);
    let pages = |bits| {
        for page in 0..16 {
            set(&machine, L1, I1 + page, (0x8_0100_000 + page as u64 * PAGE) | bits);
        }
    };
    pages(PAGE_BITS);
    go(&machine, L4, VA, Read).unwrap();
    machine.assert_clean();
    pages(PAGE_BITS | CONT);
    go(&machine, L4, VA + PAGE, Read).unwrap();
    match only(&machine) {
        Violation::Conflict { cached, now, .. } => {
            assert_eq!((cached.bytes(), now.bytes()), (PAGE, KIB64));
        }
        other => panic!("{other}"),
    }
    pages(PAGE_BITS);
    machine.audit();
    assert!(stale(only(&machine)).contains("size"));
}

#[test]
fn a_break_before_make_is_no_conflict() {
    let machine = mapped();
    set(&machine, L1, I1, 0);
    flush(&machine, L4, &[0], what(VA, PAGE, Tables::Unchanged));
    set(&machine, L1, I1, 0x8_0101_000 | RW);
    go(&machine, L4, VA, Write).unwrap();
    machine.assert_clean();
}

#[test]
fn a_collapse_over_cached_pages_is_a_conflict() {
    let machine = mapped();
    set(&machine, L2, I2, 0x8_0200_000 | RW | 0x80);
    // The old upper levels are still cached.
    flush(&machine, L4, &[0], what(VA + PAGE, PAGE, Tables::Changed));
    go(&machine, L4, VA + PAGE, Read).unwrap();
    match only(&machine) {
        Violation::Conflict { cached, now, .. } => {
            assert_eq!((cached.bytes(), now.bytes()), (PAGE, MIB2));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn the_first_write_reads_the_table_again() {
    let machine = mapped();
    set(&machine, L1, I1 + 1, 0x8_0101_000 | RW);
    go(&machine, L4, VA + PAGE, Read).unwrap();
    set(&machine, L1, I1 + 1, 0x8_0101_000 | RO);
    assert_eq!(go(&machine, L4, VA + PAGE, Write), Err(true), "the table has the last word");
    assert_eq!(get(&machine, L1, I1 + 1), 0x8_0101_000 | RO);
}

#[test]
fn counts_tell_hits_walks_and_messages() {
    let machine = mapped();
    let before = machine.statistics();
    go(&machine, L4, VA, Read).unwrap();
    flush(&machine, L4, &[0, 1], what(VA, 3 * PAGE, Tables::Unchanged));
    machine.invalidate_local(L4, &what(VA, PAGE, Tables::Unchanged));
    machine.translate(L4, VirtAddr(0), Read).unwrap_err();
    let counts = machine.statistics() - before;
    assert_eq!((counts.hits, counts.walks, counts.fills, counts.faults), (1, 1, 0, 1));
    assert_eq!((counts.invalidations, counts.local_invalidations), (1, 1));
    assert_eq!((counts.messages, counts.pages_invalidated), (1, 4));
}

#[test]
#[should_panic(expected = "stale translation: CPU 0, root 0x80004, address 0x8080610000: \
    the address is not mapped: cached 0x8080610000..0x8080611000 -> frame 0x80100 rw-u accessed \
    dirty; the tables say nothing")]
fn a_report_has_cpu_place_and_both_states() {
    let machine = mapped();
    set(&machine, L1, I1, 0);
    machine.assert_clean();
}
