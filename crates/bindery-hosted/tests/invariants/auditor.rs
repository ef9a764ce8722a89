//! Every invariant of the design, broken on purpose: the auditor reports the invariant and the
//! place.
//!
//! Invariants that the auditor cannot check, about TLBs and the past, are broken in
//! `strict_tlb.rs`.

use bindery::addr::{Frame, VirtAddr};
use bindery::arch::{
    AArch64, Absent, Arch, Attributes, Entry, EntryIndex, Level, Marker, Riscv64, X86_64,
};
use bindery::arch::{AbsentFormat, Permissions};
use bindery::check::{self, Violation};
use bindery::testing::{self, FolioDamage, MappingDamage, MemoryDamage, TableDamage};
use bindery::{Advice, MapRequest, Protection, Sharing};
use bindery_hosted::Walk;

use crate::support::fixture::{Fixture, with_fixture};
use crate::support::{self, GIB, MIB, READ_WRITE, fixed};

type X86 = X86_64<4>;

const PAGE: u64 = 4096;
const AT: VirtAddr = VirtAddr(GIB);
const NEXT: VirtAddr = VirtAddr(GIB + PAGE);
const NEXT_TABLE: VirtAddr = VirtAddr(GIB + 2 * MIB);

/// 4 MiB at `AT`; the first page of each table is written.
fn two_tables<A: Walk>(order: u8, scenario: impl FnOnce(&Fixture<'_, '_, A>)) {
    with_fixture::<A>(order, |fixture| {
        fixture.space.mmap(&fixed(AT.0, 4 * MIB)).unwrap();
        fixture.fill(AT.0, 1);
        fixture.fill(NEXT_TABLE.0, 1);
        scenario(fixture);
    });
}

/// One contiguous run at `AT`.
fn one_block<A: Walk>(scenario: impl FnOnce(&Fixture<'_, '_, A>)) {
    two_tables::<A>(4, |fixture| {
        let entry = testing::raw_entry(fixture.space, AT, Level::PTE).unwrap();
        assert!(A::is_contig(entry));
        scenario(fixture);
    });
}

/// Damages a table, runs the auditor, and repairs the table. Returns the verdict.
fn table_damaged(damage: TableDamage, undo: TableDamage, level: Level<X86>) -> (Violation, Frame) {
    let mut found = None;
    two_tables::<X86>(if level == Level::PMD { 9 } else { 0 }, |fixture| {
        let table = testing::table_at(fixture.space, AT, level).unwrap();
        testing::damage_table(fixture.space, AT, level, damage);
        found = Some((fixture.broken(&[]), table));
        testing::damage_table(fixture.space, AT, level, undo);
    });
    found.unwrap()
}

/// Replaces the entry of `level` at `at` and runs the auditor.
fn entry_damaged<A: Walk>(
    fixture: &Fixture<'_, '_, A>,
    at: VirtAddr,
    level: Level<A>,
    change: impl FnOnce(Entry) -> Entry,
) -> Violation {
    let old = testing::raw_entry(fixture.space, at, level).unwrap();
    testing::set_raw_entry(fixture.space, at, level, change(old));
    let found = fixture.broken(&[]);
    testing::set_raw_entry(fixture.space, at, level, old);
    found
}

fn mapping_damaged<A: Walk>(fixture: &Fixture<'_, '_, A>, damage: MappingDamage) -> Violation {
    let whole = fixture.layout()[0];
    testing::damage_mapping(fixture.space, AT, damage);
    let found = fixture.broken(&[]);
    testing::damage_mapping(fixture.space, AT, MappingDamage::End(whole.range.end()));
    testing::damage_mapping(fixture.space, AT, MappingDamage::Protection(whole.protection));
    found
}

fn page<A: Arch>(frame: Frame, permissions: Permissions) -> Entry {
    A::page_entry(
        frame,
        Level::PTE,
        Attributes { permissions, accessed: true, ..Attributes::default() },
    )
}

#[test]
fn an_audit_with_little_scratch_reports_the_size() {
    with_fixture::<X86>(0, |fixture| {
        let needed = check::scratch_words(fixture.memory);
        let mut scratch = vec![0; needed - 1];
        let found = check::check(fixture.memory, &[fixture.space], &mut scratch);
        assert_eq!(found, Err(Violation::ScratchTooSmall { needed }));
    });
}

#[test]
fn a_stale_index_of_mappings_is_found() {
    two_tables::<X86>(0, |fixture| {
        let shorter = MappingDamage::EndUnseen(VirtAddr(AT.0 + PAGE));
        assert_eq!(mapping_damaged(fixture, shorter), Violation::MappingIndex);
    });
}

#[test]
fn a_mapping_with_a_bad_end_is_found() {
    two_tables::<X86>(0, |fixture| {
        for end in [NEXT_TABLE.0 + 1, X86::USER_END + PAGE] {
            let found = mapping_damaged(fixture, MappingDamage::End(VirtAddr(end)));
            assert_eq!(found, Violation::MappingBounds(AT));
        }
    });
}

#[test]
fn a_table_of_the_wrong_level_is_found() {
    let (found, table) =
        table_damaged(TableDamage::ToggleLevel, TableDamage::ToggleLevel, Level::PTE);
    assert_eq!(found, Violation::NotATable { table, at: AT });
}

#[test]
fn pages_and_foreign_frames_are_no_tables() {
    two_tables::<X86>(0, |fixture| {
        for table in [fixture.frame(NEXT_TABLE.0), Frame(7), Frame(u32::MAX)] {
            let found = entry_damaged(fixture, AT, Level::PMD, |_| X86::table(table));
            assert_eq!(found, Violation::NotATable { table, at: AT });
        }
    });
}

#[test]
fn a_stray_table_in_the_tree_is_found() {
    let (found, table) =
        table_damaged(TableDamage::ToggleStray, TableDamage::ToggleStray, Level::PTE);
    assert_eq!(found, Violation::StrayTable { table, at: AT });
}

#[test]
fn a_table_left_locked_is_found() {
    let (found, table) =
        table_damaged(TableDamage::ToggleLock, TableDamage::ToggleLock, Level::PTE);
    assert_eq!(found, Violation::LockedTable { table, at: AT });
}

#[test]
fn a_table_whose_flush_was_forgotten_is_found() {
    let (found, table) =
        table_damaged(TableDamage::Pending(1), TableDamage::Pending(-1), Level::PTE);
    assert_eq!(found, Violation::PendingFlush { table, at: AT });
}

#[test]
fn a_guard_unknown_to_its_table_is_found() {
    two_tables::<X86>(0, |fixture| {
        let guard = VirtAddr(AT.0 + 9 * PAGE);
        fixture.space.madvise(guard, PAGE, Advice::GuardInstall).unwrap();
        testing::damage_table(fixture.space, AT, Level::PTE, TableDamage::ToggleGuards);
        assert_eq!(fixture.broken(&[]), Violation::UnknownGuard(guard));
        testing::damage_table(fixture.space, AT, Level::PTE, TableDamage::ToggleGuards);
    });
}

#[test]
fn a_table_linked_twice_is_found() {
    two_tables::<X86>(0, |fixture| {
        let first = testing::raw_entry(fixture.space, AT, Level::PMD).unwrap();
        let found = entry_damaged(fixture, NEXT_TABLE, Level::PMD, |_| first);
        assert_eq!(found, Violation::TableTwice { table: X86::frame(first), at: NEXT_TABLE });
    });
}

#[test]
fn a_table_without_a_mapping_is_found() {
    two_tables::<X86>(0, |fixture| {
        let table = testing::table_at(fixture.space, NEXT_TABLE, Level::PTE).unwrap();
        let found = mapping_damaged(fixture, MappingDamage::End(NEXT_TABLE));
        assert_eq!(found, Violation::TableOutsideMappings { table, at: NEXT_TABLE });
    });
}

#[test]
fn a_live_count_off_by_one_is_found() {
    for (by, says) in [(1, 2), (-1, 0)] {
        let damage = TableDamage::LiveCount(by);
        let (found, table) = table_damaged(damage, TableDamage::LiveCount(-by), Level::PTE);
        assert_eq!(found, Violation::LiveCount { table, says, holds: 1 });
    }
}

#[test]
fn an_entry_cleared_without_counting_is_found() {
    two_tables::<X86>(0, |fixture| {
        let table = testing::table_at(fixture.space, AT, Level::PTE).unwrap();
        let found = entry_damaged(fixture, AT, Level::PTE, |_| Entry::EMPTY);
        assert_eq!(found, Violation::LiveCount { table, says: 1, holds: 0 });
    });
}

#[test]
fn a_huge_leaf_without_its_deposit_is_found() {
    let (found, table) =
        table_damaged(TableDamage::LessDeposit, TableDamage::MoreDeposit, Level::PMD);
    assert_eq!(found, Violation::Deposit { table, says: 1, needs: 2 });
    let (found, table) =
        table_damaged(TableDamage::MoreDeposit, TableDamage::LessDeposit, Level::PMD);
    assert_eq!(found, Violation::Deposit { table, says: 3, needs: 2 });
}

#[test]
fn a_page_beyond_its_mapping_is_found() {
    with_fixture::<X86>(0, |fixture| {
        fixture.space.mmap(&fixed(AT.0, 2 * PAGE)).unwrap();
        fixture.fill(AT.0, 2);
        let found = mapping_damaged(fixture, MappingDamage::End(NEXT));
        assert_eq!(found, Violation::OutsideMappings(NEXT));
    });
}

#[test]
fn an_entry_wider_than_its_mapping_is_found() {
    two_tables::<X86>(0, |fixture| {
        let narrower = MappingDamage::Protection(Protection::READ);
        assert_eq!(mapping_damaged(fixture, narrower), Violation::TooWide(AT));
        fixture.space.mprotect(AT, PAGE, READ_WRITE | Protection::EXECUTE).unwrap();
        let narrower = MappingDamage::Protection(READ_WRITE);
        assert_eq!(mapping_damaged(fixture, narrower), Violation::TooWide(AT));
    });
}

#[test]
fn a_kernel_page_in_user_space_is_found() {
    two_tables::<X86>(0, |fixture| {
        let found = entry_damaged(fixture, AT, Level::PTE, |old| {
            page::<X86>(X86::frame(old), Permissions::READ)
        });
        assert_eq!(found, Violation::TooWide(AT));
    });
}

#[test]
fn a_leaf_that_allows_nothing_is_found() {
    // Only RISC-V has bits for this violation.
    two_tables::<Riscv64<3>>(0, |fixture| {
        let found = entry_damaged(fixture, AT, Level::PTE, |old| Entry(old.0 & !0b1110));
        assert_eq!(found, Violation::LeafWithoutAccess(AT));
    });
}

#[test]
fn a_visible_page_without_permissions_is_found() {
    two_tables::<X86>(0, |fixture| {
        let nothing = MappingDamage::Protection(Protection::empty());
        assert_eq!(mapping_damaged(fixture, nothing), Violation::WrongProtNone(AT));
    });
}

#[test]
fn a_hidden_page_with_permissions_is_found() {
    two_tables::<X86>(0, |fixture| {
        fixture.space.mprotect(AT, 4 * MIB, Protection::empty()).unwrap();
        let something = MappingDamage::Protection(READ_WRITE);
        assert_eq!(mapping_damaged(fixture, something), Violation::WrongProtNone(AT));
    });
}

#[test]
fn an_absent_entry_that_means_nothing_is_found() {
    two_tables::<X86>(0, |fixture| {
        let guard = X86::encode_absent(Absent::Marker(Marker::Guard));
        // No marker has this number, no entry has this bit, and 0 is not a kind.
        for wrong in [1 << 11, 1 << 60, 0b100] {
            let found = entry_damaged(fixture, AT, Level::PTE, |_| Entry(guard.0 ^ wrong));
            assert_eq!(found, Violation::BadAbsent(AT), "{wrong:#x}");
        }
    });
}

#[test]
fn a_leaf_that_names_no_folio_is_found() {
    two_tables::<X86>(0, |fixture| {
        let table = testing::table_at(fixture.space, AT, Level::PTE).unwrap();
        for frame in [table, Frame(7), Frame(u32::MAX)] {
            let user = Permissions::READ | Permissions::USER;
            let found = entry_damaged(fixture, AT, Level::PTE, |_| page::<X86>(frame, user));
            assert_eq!(found, Violation::NotAFolio { at: AT, frame });
        }
    });
}

#[test]
fn a_misaligned_huge_leaf_is_found() {
    two_tables::<X86>(9, |fixture| {
        let frame = fixture.frame(AT.0).plus(1);
        let found = entry_damaged(fixture, AT, Level::PMD, |old| Entry(old.0 + X86::STEP));
        assert_eq!(found, Violation::NotAFolio { at: AT, frame });
    });
}

#[test]
fn a_writable_shared_page_is_found() {
    for order in [0, 4, 9] {
        two_tables::<X86>(order, |fixture| {
            let frame = fixture.frame(AT.0);
            testing::damage_folio(fixture.memory, frame, FolioDamage::ToggleExclusive);
            assert_eq!(fixture.broken(&[]), Violation::WritableButShared(AT));
            testing::damage_folio(fixture.memory, frame, FolioDamage::ToggleExclusive);
        });
    }
}

#[test]
fn an_incomplete_contiguous_block_is_found() {
    incomplete_blocks::<AArch64>();
    incomplete_blocks::<Riscv64<3>>();
}

fn incomplete_blocks<A: Walk>() {
    one_block::<A>(|fixture| {
        let seventh = VirtAddr(AT.0 + 7 * PAGE);
        let broken =
            |change: fn(Entry) -> Entry| entry_damaged(fixture, seventh, Level::PTE, change);
        assert_eq!(broken(|_| Entry::EMPTY), Violation::BrokenBlock(AT), "a hole");
        assert_eq!(
            broken(|old| A::clear_contig(old, EntryIndex::new(7))),
            Violation::BrokenBlock(AT),
            "a single page"
        );
        assert_eq!(broken(|old| A::write_protect(old)), Violation::BrokenBlock(AT), "unequal");
        let other = |old| {
            let index = EntryIndex::new(7);
            A::set_contig(Entry(A::clear_contig(old, index).0 + 16 * A::STEP), index)
        };
        assert_eq!(broken(other), Violation::BrokenBlock(AT), "another frame");
    });
}

#[test]
fn a_misaligned_contiguous_block_is_found() {
    two_tables::<AArch64>(5, |fixture| {
        // All pages move up by eight frames. The frames are still consecutive and in one folio,
        // with equal attributes, but the block is not aligned.
        let shifted: Vec<_> = (0..16)
            .map(|page| {
                let at = VirtAddr(AT.0 + page * PAGE);
                let old = testing::raw_entry(fixture.space, at, Level::PTE).unwrap();
                let new = Entry(old.0 + 8 * AArch64::STEP);
                (at, testing::set_raw_entry(fixture.space, at, Level::PTE, new))
            })
            .collect();
        assert_eq!(fixture.broken(&[]), Violation::BrokenBlock(AT));
        for (at, old) in shifted {
            testing::set_raw_entry(fixture.space, at, Level::PTE, old);
        }
    });
}

#[test]
fn a_folios_wrong_mapping_count_is_found() {
    two_tables::<X86>(4, |fixture| {
        let folio = fixture.frame(AT.0);
        for (by, says) in [(1, 17), (-1, 15)] {
            testing::damage_folio(fixture.memory, folio, FolioDamage::Mappings(by));
            assert_eq!(fixture.broken(&[]), Violation::Mappings { folio, says, holds: 16 });
            testing::damage_folio(fixture.memory, folio, FolioDamage::Mappings(-by));
        }
    });
}

#[test]
fn a_reference_that_nobody_holds_is_found() {
    two_tables::<X86>(4, |fixture| {
        let folio = fixture.frame(AT.0);
        testing::damage_folio(fixture.memory, folio, FolioDamage::References(1));
        assert_eq!(fixture.broken(&[]), Violation::References { folio, says: 1 });
        testing::damage_folio(fixture.memory, folio, FolioDamage::References(-1));
    });
}

#[test]
fn a_shared_page_marked_exclusive_is_found() {
    two_tables::<X86>(4, |fixture| {
        let child = fixture.space.fork().unwrap();
        let frame = fixture.frame(AT.0).plus(3);
        testing::damage_folio(fixture.memory, frame, FolioDamage::ToggleExclusive);
        let found = fixture.broken(&[&child]);
        assert_eq!(found, Violation::ExclusiveButShared { frame, mappings: 2 });
        testing::damage_folio(fixture.memory, frame, FolioDamage::ToggleExclusive);
    });
}

#[test]
fn an_exclusive_page_of_an_object_is_found() {
    two_tables::<X86>(0, |fixture| {
        let at = VirtAddr(2 * GIB);
        let request = MapRequest { sharing: Sharing::Shared, ..fixed(at.0, PAGE) };
        fixture.space.mmap(&request).unwrap();
        fixture.fill(at.0, 1);
        let frame = fixture.frame(at.0);
        testing::damage_folio(fixture.memory, frame, FolioDamage::ToggleExclusive);
        assert_eq!(fixture.broken(&[]), Violation::ExclusiveButOfObject(frame));
        testing::damage_folio(fixture.memory, frame, FolioDamage::ToggleExclusive);
    });
}

#[test]
fn an_unreachable_frame_is_found() {
    two_tables::<X86>(0, |fixture| {
        let frame = testing::leak_frame(fixture.memory);
        assert_eq!(fixture.broken(&[]), Violation::Leaked(frame));
        // SAFETY: 1. the frame was leaked above, and no other code knows it.
        unsafe { testing::free_frame(fixture.memory, frame) };
    });
}

#[test]
fn a_removed_page_not_freed_is_found() {
    two_tables::<X86>(0, |fixture| {
        let folio = fixture.frame(AT.0);
        testing::damage_table(fixture.space, AT, Level::PTE, TableDamage::LiveCount(-1));
        testing::damage_table(fixture.space, AT, Level::PTE, TableDamage::AnonymousPages(-1));
        testing::damage_folio(fixture.memory, folio, FolioDamage::Mappings(-1));
        let found = entry_damaged(fixture, AT, Level::PTE, |_| Entry::EMPTY);
        assert_eq!(found, Violation::Leaked(folio));
        testing::damage_folio(fixture.memory, folio, FolioDamage::Mappings(1));
        testing::damage_table(fixture.space, AT, Level::PTE, TableDamage::AnonymousPages(1));
        testing::damage_table(fixture.space, AT, Level::PTE, TableDamage::LiveCount(1));
    });
}

#[test]
fn a_wrong_count_of_resident_pages_is_found() {
    two_tables::<X86>(0, |fixture| {
        testing::damage_table(fixture.space, AT, Level::PTE, TableDamage::AnonymousPages(1));
        let found = fixture.broken(&[]);
        assert!(matches!(found, Violation::Resident { .. }), "{found}");
        testing::damage_table(fixture.space, AT, Level::PTE, TableDamage::AnonymousPages(-1));
    });
}

#[test]
fn a_detached_table_not_freed_is_found() {
    with_fixture::<X86>(0, |fixture| {
        fixture.space.mmap(&fixed(AT.0, 2 * MIB)).unwrap();
        // The zero page has no count, so only the table leaks.
        assert_eq!(fixture.program.load(AT), Ok(0));
        let table = testing::table_at(fixture.space, AT, Level::PTE).unwrap();
        testing::damage_table(fixture.space, AT, Level::PMD, TableDamage::LiveCount(-1));
        let found = entry_damaged(fixture, AT, Level::PMD, |_| Entry::EMPTY);
        assert_eq!(found, Violation::Leaked(table));
        testing::damage_table(fixture.space, AT, Level::PMD, TableDamage::LiveCount(1));
    });
}

#[test]
fn free_lists_that_contradict_the_metadata_are_found() {
    with_fixture::<X86>(0, |fixture| {
        testing::damage_memory(fixture.memory, MemoryDamage::ToggleFreeOrder);
        assert!(matches!(fixture.broken(&[]), Violation::FreeLists(_)));
        testing::damage_memory(fixture.memory, MemoryDamage::ToggleFreeOrder);
    });
}

/// Damage that cannot be repaired, so the fixture stays damaged and is never dropped.
fn beyond_repair(damage: MemoryDamage) -> Violation {
    let (machine, memory) = support::strict::<X86>(16 * MIB);
    testing::damage_memory(&memory, damage);
    let mut scratch = vec![0; check::scratch_words(&memory)];
    machine.assert_clean();
    check::check(&memory, &[], &mut scratch).unwrap_err()
}

#[test]
fn a_double_free_is_refused_and_found() {
    assert_eq!(beyond_repair(MemoryDamage::DoubleFree), Violation::Refused(1));
}

#[test]
fn a_mapping_without_address_space_is_found() {
    let found = beyond_repair(MemoryDamage::LeakMapping);
    assert_eq!(found, Violation::LeakedMappings { allocated: 1, used: 0 });
}
