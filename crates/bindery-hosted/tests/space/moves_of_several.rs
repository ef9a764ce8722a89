//! Moves of several mappings at once, and moves that leave their source mapped.

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{
    Counts, Error, FaultError, LockPages, MapRequest, MappingFlags, Protection, Remap,
    SpaceOptions, Usage,
};
use bindery_hosted::{Program, Walk};

use crate::support::fixture::{Fixture, with_fixture};
use crate::support::{GIB, MIB, READ_WRITE, READ_WRITE_EXECUTE, audit, fixed, strict, use_order};

const PAGE: u64 = 4096;
const AT: u64 = GIB;
/// Another place, congruent with `AT` modulo every table that the scenarios fill.
const TO: u64 = 8 * GIB;

on_every_architecture! {
    several_mappings_move_with_the_gaps_between_them => gaps;
    mappings_that_fill_tables_take_their_tables_along => tables;
    what_was_moved_before_an_error_stays_there => error_midway;
    a_staying_source_reads_as_zeroes_unlocked => zeroes_without_locks;
    several_sources_that_stay_keep_their_protections => several_stay;
    whole_tables_leave_a_mapping_that_stays => leave_tables;
    a_gibibyte_leaves_a_mapping_by_one_entry => leave_one_entry;
    a_huge_leaf_leaves_a_mapping_that_stays => leave_huge;
    a_child_keeps_pages_its_parent_moved => child_keeps;
}

/// The protection of each of `pages` pages from `at`; `None` if not mapped.
fn allowed<A: Walk>(fixture: &Fixture<'_, '_, A>, at: u64, pages: u64) -> Vec<Option<Protection>> {
    let layout = fixture.layout();
    let of = |page: VirtAddr| layout.iter().find(|mapping| mapping.range.contains(page));
    let pages = (0..pages).map(|page| VirtAddr(at + page * PAGE));
    pages.map(|page| of(page).map(|mapping| mapping.protection)).collect()
}

fn map<A: Walk>(fixture: &Fixture<'_, '_, A>, first: u64, pages: u64, protection: Protection) {
    let at = VirtAddr(first);
    fixture.space.mmap(&fixed(at.0, pages * PAGE)).unwrap();
    fixture.fill(at.0, pages);
    fixture.space.mprotect(at, pages * PAGE, protection).unwrap();
}

/// Maps the following layout behind [`AT`] and writes all of it:
///
/// ```text
/// pages   0         8        12        16        20        24        28
///         | rw      |        | r       | rw      |         | none     |
/// ```
fn four_mappings<A: Walk>(fixture: &Fixture<'_, '_, A>) {
    map(fixture, AT, 8, READ_WRITE);
    map(fixture, AT + 12 * PAGE, 4, Protection::READ);
    map(fixture, AT + 16 * PAGE, 4, READ_WRITE);
    map(fixture, AT + 24 * PAGE, 4, Protection::empty());
}

fn pattern(stretches: &[(usize, Option<Protection>)]) -> Vec<Option<Protection>> {
    stretches.iter().flat_map(|(pages, protection)| vec![*protection; *pages]).collect()
}

fn gaps<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        four_mappings(fixture);
        // At the destination: below it, in the first gap and in front of it, and beyond the end.
        let to = TO + 5 * PAGE;
        map(fixture, to - PAGE, 2, Protection::READ);
        map(fixture, to + 4 * PAGE, 4, READ_WRITE_EXECUTE);
        map(fixture, to + 24 * PAGE, 1, Protection::READ);
        // From the middle of the first mapping to the middle of the last.
        let (from, length) = (VirtAddr(AT + 2 * PAGE), 24 * PAGE);
        let moved = fixture.space.mremap(from, length, length, Remap::To(VirtAddr(to)));
        assert_eq!(moved, Ok(VirtAddr(to)));
        let (read, write) = (Some(Protection::READ), Some(READ_WRITE));
        let (none, all) = (Some(Protection::empty()), Some(READ_WRITE_EXECUTE));
        assert_eq!(
            allowed(fixture, to - PAGE, 26),
            pattern(&[
                (1, read),
                (6, write),
                // The content at the gap is unchanged.
                (2, all),
                (2, None),
                (4, read),
                (4, write),
                (4, None),
                (2, none),
                (1, read),
            ])
        );
        let rest = pattern(&[(2, write), (24, None), (2, none)]);
        assert_eq!(allowed(fixture, AT, 28), rest);
        let last = VirtAddr(to + 22 * PAGE);
        assert_eq!(fixture.program.load(last), Err(FaultError::Protection));
        fixture.space.mprotect(last, 2 * PAGE, Protection::READ).unwrap();
        fixture.space.mprotect(VirtAddr(AT + 26 * PAGE), 2 * PAGE, Protection::READ).unwrap();
        // Page n of each mapping holds the address of the mapping's first page plus n.
        fixture.assert_filled(to, 6, AT + 2);
        fixture.assert_filled(to + 10 * PAGE, 4, AT + 12 * PAGE);
        fixture.assert_filled(to + 14 * PAGE, 4, AT + 16 * PAGE);
        fixture.assert_filled(last.0, 2, AT + 24 * PAGE);
        fixture.assert_filled(AT, 2, AT);
        fixture.assert_filled(AT + 26 * PAGE, 2, AT + 24 * PAGE + 2);
        fixture.assert_filled(to - PAGE, 1, to - PAGE);
        fixture.assert_filled(to + 6 * PAGE, 2, to + 4 * PAGE + 2);
        assert_eq!(fixture.program.load(VirtAddr(to + 8 * PAGE)), Err(FaultError::NotMapped));
    });
}

/// Three mappings of two whole tables each, with a gap before the last and one touched page per
/// table. Returns the total length.
fn three_times_two_tables<A: Walk>(fixture: &Fixture<'_, '_, A>) -> u64 {
    for (first, protection) in
        [(0, READ_WRITE), (4 * MIB, READ_WRITE_EXECUTE), (10 * MIB, READ_WRITE)]
    {
        let at = AT + first;
        let length = 4 * MIB;
        fixture.space.mmap(&MapRequest { protection, ..fixed(at, length) }).unwrap();
        fixture.fill(at, 1);
        fixture.fill(at + 2 * MIB, 1);
    }
    14 * MIB
}

fn tables<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let length = three_times_two_tables(fixture);
        let to = VirtAddr(TO + 6 * MIB);
        let before = fixture.space.counts();
        assert_eq!(fixture.space.mremap(VirtAddr(AT), length, length, Remap::To(to)), Ok(to));
        let cost = fixture.space.counts() - before;
        assert_eq!((cost.tables_moved, cost.entries_read), (6, 6), "{cost:?}");
        // The same number as if each mapping had moved separately.
        assert_eq!(cost.invalidations, 3, "{cost:?}");
        for at in [0, 2, 4, 6, 10, 12].map(|mib| mib * MIB) {
            fixture.assert_filled(to.0 + at, 1, AT + at);
            assert_eq!(fixture.program.load(VirtAddr(AT + at)), Err(FaultError::NotMapped));
        }
    });
}

fn error_midway<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        four_mappings(fixture);
        let sealed = VirtAddr(AT + 12 * PAGE);
        fixture.space.mseal(sealed, 4 * PAGE).unwrap();
        for remap in [Remap::To, Remap::LeaveTo] {
            let to = VirtAddr(TO);
            let done = fixture.space.mremap(VirtAddr(AT), 28 * PAGE, 28 * PAGE, remap(to));
            assert_eq!(done, Err(Error::Sealed(sealed)));
            fixture.assert_filled(TO, 8, AT);
            fixture.assert_filled(sealed.0, 4, sealed.0);
            fixture.assert_filled(AT + 16 * PAGE, 4, AT + 16 * PAGE);
            assert_eq!(fixture.program.load(VirtAddr(TO + 12 * PAGE)), Err(FaultError::NotMapped));
            let behind = fixture.program.load(VirtAddr(AT));
            if remap(to) == Remap::To(to) {
                assert_eq!(behind, Err(FaultError::NotMapped));
                fixture.space.mremap(to, 8 * PAGE, 8 * PAGE, Remap::To(VirtAddr(AT))).unwrap();
            } else {
                assert_eq!(behind, Ok(0));
            }
            audit(fixture.machine, fixture.memory, &[fixture.space]);
        }
    });
}

fn zeroes_without_locks<A: Walk>() {
    for (pages, how) in [(8, LockPages::Now), (8, LockPages::OnFault), (3, LockPages::Now)] {
        with_fixture::<A>(0, |fixture| {
            map(fixture, AT, 8, READ_WRITE);
            fixture.space.mlock(VirtAddr(AT), 8 * PAGE, how).unwrap();
            let total = Usage { total: 8, data: 8, locked: 8, committed: 8, ..Usage::default() };
            assert_eq!(fixture.space.usage(), total);
            let (to, length) = (VirtAddr(TO), pages * PAGE);
            let remap = Remap::LeaveTo(to);
            assert_eq!(fixture.space.mremap(VirtAddr(AT), length, length, remap), Ok(to));
            // The whole mapping from which the contents moved is unlocked.
            let both = 8 + pages;
            let (locked, committed) = (pages, both);
            let usage = Usage { total: both, data: both, locked, committed, ..Usage::default() };
            assert_eq!(fixture.space.usage(), usage);
            fixture.assert_filled(TO, pages, AT);
            for page in 0..pages {
                assert_eq!(fixture.program.load(VirtAddr(AT + page * PAGE)), Ok(0));
            }
            for page in pages..8 {
                assert_eq!(fixture.program.load(VirtAddr(AT + page * PAGE)), Ok(AT + page));
            }
            // Source and destination diverge from here on.
            fixture.fill(AT, 8);
            fixture.program.store(VirtAddr(TO), 7).unwrap();
            fixture.assert_filled(AT, 8, AT);
            assert_eq!(fixture.program.load(VirtAddr(TO)), Ok(7));
            fixture.space.munlock(to, length).unwrap();
            assert_eq!(fixture.space.usage().locked, 0);
        });
    }
}

fn several_stay<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        four_mappings(fixture);
        let before = allowed(fixture, AT, 28);
        let (from, length) = (VirtAddr(AT), 28 * PAGE);
        fixture.space.mremap(from, length, length, Remap::LeaveTo(VirtAddr(TO))).unwrap();
        assert_eq!(allowed(fixture, AT, 28), before);
        assert_eq!(allowed(fixture, TO, 28), before);
        for (first, pages) in [(0, 8), (12, 4), (16, 4)] {
            fixture.assert_filled(TO + first * PAGE, pages, AT + first * PAGE);
            for page in first..first + pages {
                assert_eq!(fixture.program.load(VirtAddr(AT + page * PAGE)), Ok(0));
            }
        }
        for (at, expected) in [(AT, 0), (TO, AT + 24 * PAGE)] {
            let prot_none = VirtAddr(at + 24 * PAGE);
            assert_eq!(fixture.program.load(prot_none), Err(FaultError::Protection));
            fixture.space.mprotect(prot_none, PAGE, Protection::READ).unwrap();
            assert_eq!(fixture.program.load(prot_none), Ok(expected));
        }
        for at in [AT, TO] {
            let gap = VirtAddr(at + 8 * PAGE);
            assert_eq!(fixture.program.load(gap), Err(FaultError::NotMapped));
        }
    });
}

/// Moves `length` bytes with a touched page every `step` bytes, leaves the source, and returns the
/// cost.
fn leave_touched<A: Walk>(order: u8, from: u64, to: u64, length: u64, step: u64) -> Counts {
    let (machine, memory) = strict::<A>(64 * MIB);
    use_order(&memory, order);
    let space = bindery::AddressSpace::new(&memory, SpaceOptions::default()).unwrap();
    let program = Program::new(&machine, &space);
    space.mmap(&fixed(from, length)).unwrap();
    let touched: Vec<u64> = (0..length).step_by(step as usize).collect();
    for at in &touched {
        program.store(VirtAddr(from + at), at ^ 0x55).unwrap();
    }
    let before = space.counts();
    let moved = space.mremap(VirtAddr(from), length, length, Remap::LeaveTo(VirtAddr(to)));
    let cost = space.counts() - before;
    assert_eq!(moved, Ok(VirtAddr(to)));
    audit(&machine, &memory, &[&space]);
    for at in &touched {
        assert_eq!(program.load(VirtAddr(to + at)), Ok(at ^ 0x55));
        assert_eq!(program.load(VirtAddr(from + at)), Ok(0));
        program.store(VirtAddr(from + at), 1).unwrap();
        assert_eq!(program.load(VirtAddr(to + at)), Ok(at ^ 0x55));
    }
    audit(&machine, &memory, &[&space]);
    // No remaining mapping obstructs the reverse move.
    space.mremap(VirtAddr(to), length, length, Remap::To(VirtAddr(from))).unwrap();
    for at in &touched {
        assert_eq!(program.load(VirtAddr(from + at)), Ok(at ^ 0x55));
    }
    audit(&machine, &memory, &[&space]);
    drop(space);
    audit(&machine, &memory, &[]);
    cost
}

fn leave_tables<A: Walk>() {
    let cost = leave_touched::<A>(0, AT, TO + 2 * MIB, 64 * MIB, MIB);
    assert_eq!((cost.tables_moved, cost.entries_read), (32, 32), "{cost:?}");
    assert_eq!(cost.entries_written - cost.tables_allocated, 64, "{cost:?}");
    assert_eq!(cost.invalidations, 1, "{cost:?}");
    assert_eq!((cost.bytes_copied, cost.folios_touched), (0, 0), "{cost:?}");
    // The edges move page by page, the tables between them as a whole. The source is read once more
    // to find empty tables; a single flush covers everything.
    let edges = 2 * 3 * PAGE;
    let cost = leave_touched::<A>(
        0,
        AT + 2 * MIB - edges / 2,
        TO + 4 * MIB - edges / 2,
        8 * MIB + edges,
        PAGE,
    );
    assert_eq!((cost.tables_moved, cost.entries_read), (4, 4 + 6 + 4), "{cost:?}");
    assert_eq!(cost.invalidations, 1, "{cost:?}");
}

fn leave_one_entry<A: Walk>() {
    let cost = leave_touched::<A>(0, 4 * GIB, TO, GIB, 32 * MIB);
    assert_eq!((cost.tables_moved, cost.entries_read), (1, 1), "{cost:?}");
    assert_eq!(cost.invalidations, 1, "{cost:?}");
}

fn leave_huge<A: Walk>() {
    let cost = leave_touched::<A>(9, AT, TO + 2 * MIB, 4 * MIB, MIB);
    assert_eq!((cost.tables_moved, cost.entries_read), (0, 2), "{cost:?}");
    assert_eq!((cost.bytes_copied, cost.invalidations), (0, 1), "{cost:?}");
}

fn child_keeps<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        map(fixture, AT, 16, READ_WRITE);
        let child = fixture.space.fork().unwrap();
        let of_child = Program::new(fixture.machine, &child);
        let remap = Remap::LeaveTo(VirtAddr(TO));
        fixture.space.mremap(VirtAddr(AT), 16 * PAGE, 16 * PAGE, remap).unwrap();
        child.mremap(VirtAddr(AT), 8 * PAGE, 8 * PAGE, remap).unwrap();
        audit(fixture.machine, fixture.memory, &[fixture.space, &child]);
        // Parent and child do not see each other's writes, wherever the pages are.
        fixture.program.fill(VirtAddr(AT), 16 * PAGE, 1).unwrap();
        fixture.program.fill(VirtAddr(TO + 8 * PAGE), 4 * PAGE, 2).unwrap();
        of_child.fill(VirtAddr(TO), 4 * PAGE, 3).unwrap();
        fixture.assert_filled(TO, 8, AT);
        for page in 0..16 {
            let words = |byte: u8| Ok(u64::from_ne_bytes([byte; 8]));
            let (here, there) = (VirtAddr(AT + page * PAGE), VirtAddr(TO + page * PAGE));
            assert_eq!(fixture.program.load(here), words(1));
            let childs = if page < 8 { Ok(0) } else { Ok(AT + page) };
            assert_eq!(of_child.load(here), childs);
            let childs = match page {
                0..4 => words(3),
                4..8 => Ok(AT + page),
                _ => Err(FaultError::NotMapped),
            };
            assert_eq!(of_child.load(there), childs);
        }
        audit(fixture.machine, fixture.memory, &[fixture.space, &child]);
    });
}

#[test]
fn a_never_written_mapping_merges_where_it_moves() {
    for written in [false, true] {
        with_fixture::<X86_64<4>>(0, |fixture| {
            for at in [AT, TO] {
                fixture.space.mmap(&fixed(at, 4 * PAGE)).unwrap();
            }
            if written {
                fixture.fill(AT, 4);
            }
            let to = VirtAddr(TO + 4 * PAGE);
            fixture.space.mremap(VirtAddr(AT), 4 * PAGE, 4 * PAGE, Remap::To(to)).unwrap();
            // The pages of a written mapping have indices, which must not change.
            let layout = fixture.layout();
            assert_eq!(layout.len(), if written { 2 } else { 1 }, "{layout:?}");
            let expected = if written { Ok(AT) } else { Ok(0) };
            assert_eq!(fixture.program.load(to), expected);
        });
    }
}

#[test]
fn an_unmoved_staying_source_is_never_written() {
    with_fixture::<X86_64<4>>(0, |fixture| {
        map(fixture, AT, 4, READ_WRITE);
        let remap = Remap::LeaveTo(VirtAddr(TO));
        fixture.space.mremap(VirtAddr(AT), 4 * PAGE, 4 * PAGE, remap).unwrap();
        // Without pages, the mapping needs no fixed index, so it may merge with any neighbor.
        let to = VirtAddr(2 * AT + 4 * PAGE);
        fixture.space.mmap(&fixed(2 * AT, 4 * PAGE)).unwrap();
        fixture.space.mremap(VirtAddr(AT), 4 * PAGE, 4 * PAGE, Remap::To(to)).unwrap();
        assert_eq!(fixture.layout().len(), 2, "{:?}", fixture.layout());
        assert_eq!(fixture.program.load(to), Ok(0));
        fixture.assert_filled(TO, 4, AT);
    });
}

#[test]
fn a_staying_source_merges_with_no_new_likeness() {
    with_fixture::<X86_64<4>>(0, |fixture| {
        fixture.space.mmap(&fixed(AT, 8 * PAGE)).unwrap();
        // Only the lock distinguishes the two mappings, and it moves with the contents.
        fixture.space.mlock(VirtAddr(AT), 4 * PAGE, LockPages::OnFault).unwrap();
        fixture.fill(AT + 4 * PAGE, 4);
        let remap = Remap::LeaveTo(VirtAddr(TO));
        fixture.space.mremap(VirtAddr(AT), 8 * PAGE, 8 * PAGE, remap).unwrap();
        let starts: Vec<u64> = fixture.layout().iter().map(|part| part.range.start().0).collect();
        assert_eq!(starts, [AT, AT + 4 * PAGE, TO, TO + 4 * PAGE]);
        let flags: Vec<_> = fixture.layout().iter().map(|part| part.flags).collect();
        assert_eq!(flags[0], flags[1]);
        assert_eq!(flags[2] - flags[3], MappingFlags::LOCKED | MappingFlags::LOCK_ON_FAULT);
        // So each source is left in the state of a never-written mapping.
        let to = VirtAddr(2 * TO);
        fixture.space.mremap(VirtAddr(AT + 4 * PAGE), PAGE, PAGE, Remap::To(to)).unwrap();
        let last = fixture.layout().pop().unwrap();
        assert_eq!((last.range.start(), last.page_offset), (to, to.0 / PAGE));
    });
}
