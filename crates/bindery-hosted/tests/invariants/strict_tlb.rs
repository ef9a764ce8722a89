//! Invariants whose violation only a TLB reveals: a translation that outlives its revocation, a
//! frame or a table that is reused under one, a write that would be lost, a block that was changed
//! without a break. The tests break each invariant behind the core's back, and the strict TLB
//! reports the violation.

use bindery::addr::VirtAddr;
use bindery::arch::{AArch64, Arch, Attributes, Entry, EntryIndex, Level, Riscv64};
use bindery::{Protection, testing};
use bindery_hosted::{AccessKind, Program, Violation, Walk};

use crate::support::fixture::{Fixture, with_fixture};
use crate::support::{GIB, MIB, READ_WRITE, fixed};

const PAGE: u64 = 4096;
const AT: VirtAddr = VirtAddr(GIB);

on_every_architecture! {
    a_page_revoked_without_flush_is_stale => revoke;
    a_page_cleaned_without_flush_loses_a_write => clean;
    a_frame_in_a_tlb_is_not_free => free_pages_early;
    a_table_in_a_tlb_is_not_free => free_tables_early;
    a_root_in_a_tlb_is_not_free => free_a_root_early;
}

/// 4 MiB at `AT`, with some written pages.
fn written<A: Walk>(order: u8, scenario: impl FnOnce(&Fixture<'_, '_, A>)) {
    with_fixture::<A>(order, |fixture| {
        fixture.space.mmap(&fixed(AT.0, 4 * MIB)).unwrap();
        fixture.fill(AT.0, 16);
        scenario(fixture);
    });
}

fn revoke<A: Walk>() {
    written::<A>(0, |fixture| {
        let old = testing::set_raw_entry(fixture.space, AT, Level::PTE, Entry::EMPTY);
        fixture.machine.audit();
        let found = fixture.machine.take_violations();
        assert!(matches!(found[..], [Violation::StaleLeaf { now: None, .. }]), "{found:?}");
        testing::set_raw_entry(fixture.space, AT, Level::PTE, old);
    });
}

fn clean<A: Walk>() {
    written::<A>(0, |fixture| {
        let old = testing::raw_entry(fixture.space, AT, Level::PTE).unwrap();
        let attributes = Attributes { dirty: false, ..A::attributes(old) };
        testing::set_raw_entry(
            fixture.space,
            AT,
            Level::PTE,
            A::page_entry(A::frame(old), Level::PTE, attributes),
        );
        fixture.machine.audit();
        let found = fixture.machine.take_violations();
        assert!(found[0].to_string().contains("a write would not be recorded"), "{found:?}");
        assert_eq!(found.len(), 1);
        testing::set_raw_entry(fixture.space, AT, Level::PTE, old);
    });
}

/// Makes the core believe that no TLB holds anything while `work` runs. Returns the violations that
/// the TLB reported.
fn unflushed<A: Walk>(fixture: &Fixture<'_, '_, A>, work: impl FnOnce()) -> Vec<Violation> {
    // SAFETY: not met, on purpose. The hosted machine reports each use of a freed frame.
    unsafe { fixture.space.leave() };
    work();
    fixture.space.enter();
    fixture.machine.take_violations()
}

fn free_pages_early<A: Walk>() {
    written::<A>(0, |fixture| {
        let frame = fixture.frame(AT.0);
        let found = unflushed(fixture, || fixture.space.munmap(AT, PAGE).unwrap());
        match found[..] {
            [Violation::ReleasedLeaf { first, count: 1, .. }] => assert_eq!(first, frame),
            _ => panic!("{found:?}"),
        }
    });
}

fn free_tables_early<A: Walk>() {
    written::<A>(0, |fixture| {
        let table = testing::table_at(fixture.space, AT, Level::PTE).unwrap();
        let found = unflushed(fixture, || fixture.space.munmap(AT, 2 * MIB).unwrap());
        let released = |seen: &Violation| matches!(seen, Violation::ReleasedTable { cached, .. } if *cached == table);
        assert!(found.iter().any(released), "{found:?}");
        let leaves = found.iter().filter(|seen| matches!(seen, Violation::ReleasedLeaf { .. }));
        assert_eq!(leaves.count(), 16);
        // The cached entries of the upper levels are stale, too.
        fixture.machine.audit();
        fixture.machine.take_violations();
        testing::clear_accessed_and_dirty(fixture.space, AT, 1);
    });
}

fn free_a_root_early<A: Walk>() {
    written::<A>(0, |fixture| {
        let child = fixture.space.fork().unwrap();
        let root = child.root();
        let program = Program::new(fixture.machine, &child);
        assert_eq!(program.load(AT), Ok(AT.0));
        // SAFETY: as in `unflushed`.
        unsafe { child.leave() };
        drop(child);
        let found = fixture.machine.take_violations();
        let released = |seen: &Violation| matches!(seen, Violation::ReleasedRoot { place, .. } if place.root == root);
        assert!(found.iter().any(released), "{found:?}");
    });
}

#[test]
fn a_block_folded_without_break_is_a_conflict() {
    fold_without_break::<AArch64>();
    fold_without_break::<Riscv64<3>>();
}

fn fold_without_break<A: Walk>() {
    written::<A>(4, |fixture| {
        // Single pages that could form a block again.
        fixture.space.mprotect(AT, PAGE, Protection::READ).unwrap();
        fixture.space.mprotect(AT, PAGE, READ_WRITE).unwrap();
        let pages = || (0..16).map(|page| VirtAddr(AT.0 + page * PAGE));
        testing::clear_accessed_and_dirty(fixture.space, AT, 16);
        fixture.assert_filled(AT.0, 2, AT.0);
        let entries: Vec<_> = pages()
            .zip(0..)
            .map(|(at, index)| {
                let old = testing::raw_entry(fixture.space, at, Level::PTE).unwrap();
                assert!(!A::is_contig(old));
                testing::set_raw_entry(
                    fixture.space,
                    at,
                    Level::PTE,
                    A::set_contig(old, EntryIndex::new(index)),
                );
                old
            })
            .collect();
        fixture.assert_filled(AT.0 + 5 * PAGE, 1, AT.0 + 5);
        let found = fixture.machine.take_violations();
        assert!(matches!(found[0], Violation::Conflict { .. }), "{found:?}");
        for (at, old) in pages().zip(entries) {
            testing::set_raw_entry(fixture.space, at, Level::PTE, old);
        }
        testing::clear_accessed_and_dirty(fixture.space, AT, 16);
    });
}

#[test]
fn the_mmu_meets_a_block_with_differing_entries() {
    written::<AArch64>(4, |fixture| {
        let seventh = VirtAddr(AT.0 + 7 * PAGE);
        testing::clear_accessed_and_dirty(fixture.space, AT, 16);
        let old = testing::raw_entry(fixture.space, seventh, Level::PTE).unwrap();
        testing::set_raw_entry(
            fixture.space,
            seventh,
            Level::PTE,
            AArch64::clear_contig(old, EntryIndex::new(7)),
        );
        let denied = fixture.machine.translate(fixture.space.root(), AT, AccessKind::Read);
        assert!(denied.is_err());
        let found = fixture.machine.take_violations();
        assert!(matches!(found[..], [Violation::BrokenBlock { position: 7, .. }]), "{found:?}");
        testing::set_raw_entry(fixture.space, seventh, Level::PTE, old);
    });
}
