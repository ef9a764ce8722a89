//! `/proc/self/clear_refs`: the pages that a program writes and the pages that it uses.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use bindery::addr::VirtAddr;
use bindery::platform::Cpu;
use bindery::{Advice, Errno, MapRequest, Protection, Remap, Sharing};
use bindery_hosted::{Config, Program, Walk};
use bindery_linux::proc::{self, ClearRefs};

use super::fixture::*;
use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, memory_with, options};

on_every_architecture! {
    only_known_numbers_mean_something => numbers;
    a_store_marks_exactly_its_page => exact;
    a_store_through_a_huge_leaf_marks_it => huge;
    protections_that_come_and_go_lose_no_mark => protections;
    both_sides_of_a_fork_are_watched => forks;
    pages_that_move_count_as_written => moves;
    contents_that_were_dropped_are_new => dropped;
    what_is_mapped_later_counts_as_written => later;
    a_mapping_merged_with_a_new_is_written => joined;
    files_are_watched_and_saved => files;
    pages_that_were_used_are_forgotten_by_kind => used;
    a_partly_used_block_counts_as_used => used_block;
    watching_splits_no_huge_leaf_and_flushes_once => costs;
    stores_of_other_cpus_are_seen => other_cpus;
}

const AT: u64 = GIB;
/// Congruent with `AT` modulo any table.
const TO: u64 = 4 * GIB;

/// The kinds of memory that a program may write.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Anonymous,
    SharedAnonymous,
    Memfd,
    File,
    PrivateFile,
}

const KINDS: [Kind; 5] =
    [Kind::Anonymous, Kind::SharedAnonymous, Kind::Memfd, Kind::File, Kind::PrivateFile];

const PAGES: u64 = 64;

/// Maps 64 pages of that kind at `AT`.
fn map<'m, A: Walk>(fixture: &Fixture<'m, A>, space: &Space<'m, A>, kind: Kind) {
    let length = PAGES * PAGE;
    match kind {
        Kind::Anonymous => drop(space.mmap(&fixed(AT, length)).unwrap()),
        Kind::SharedAnonymous => {
            space.mmap(&MapRequest { sharing: Sharing::Shared, ..fixed(AT, length) }).unwrap();
        }
        Kind::Memfd => {
            map_object(space, &fixture.memfd(length), AT, length, 0, Sharing::Shared);
        }
        Kind::File => map_object(space, &fixture.file(length), AT, length, 0, Sharing::Shared),
        Kind::PrivateFile => {
            map_object(space, &fixture.file(length), AT, length, 0, Sharing::Private);
        }
    }
}

/// Runs with all kinds of memory, in folios of 1, 4, 16 and 32 pages, all written before the marks
/// were cleared.
#[track_caller]
fn on_watched<A: Walk>(
    scenario: impl for<'m> Fn(&Fixture<'m, A>, &Space<'m, A>, &Program<'_, 'm, A>),
) {
    for order in [0, 2, 4, 5] {
        for kind in KINDS {
            with_fixture::<A>(order, |fixture| {
                let space = fixture.space();
                map(fixture, &space, kind);
                let program = fixture.program(&space);
                program.fill(VirtAddr(AT), PAGES * PAGE, 1).unwrap();
                assert_eq!(written(&space, AT, PAGES as usize).len(), PAGES as usize);
                watch(&space);
                assert_eq!(written(&space, AT, PAGES as usize), [0; 0], "{kind:?} {order}");
                scenario(fixture, &space, &program);
                fixture.audit(&[&space]);
            });
        }
    }
}

fn store<A: Walk>(program: &Program<'_, '_, A>, page: u64) {
    program.store(VirtAddr(AT + page * PAGE), page + 7).unwrap();
}

fn numbers<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        let all = [
            ClearRefs::All,
            ClearRefs::Anonymous,
            ClearRefs::Mapped,
            ClearRefs::SoftDirty,
            ClearRefs::PeakResident,
        ];
        for (number, what) in (1..).zip(all) {
            assert_eq!(ClearRefs::from_number(number), Ok(what));
            assert_eq!(ClearRefs::parse(&format!(" {number}\n")), Ok(what));
            assert_eq!(proc::clear_refs(&space, what), Ok(()));
        }
        for number in [0, 6, -1, i32::MAX, i32::MIN] {
            assert_eq!(ClearRefs::from_number(number), Err(Errno::EINVAL));
        }
        for text in ["", "\n", "four", "4 4", "4.0", "0x4", "-4", "6", "99999999999"] {
            assert_eq!(ClearRefs::parse(text), Err(Errno::EINVAL), "{text:?}");
        }
    });
}

fn exact<A: Walk>() {
    on_watched::<A>(|_, space, program| {
        for page in 0..PAGES {
            // Reading is not writing.
            program.load(VirtAddr(AT + page * PAGE)).unwrap();
        }
        assert_eq!(written(space, AT, 64), [0; 0]);
        store(program, 17);
        assert_eq!(written(space, AT, 64), [17]);
        for page in [63, 0, 18, 17] {
            store(program, page);
        }
        assert_eq!(written(space, AT, 64), [0, 17, 18, 63]);
        watch(space);
        assert_eq!(written(space, AT, 64), [0; 0]);
        store(program, 17);
        assert_eq!(written(space, AT, 64), [17]);
        assert_eq!(program.load(VirtAddr(AT + 17 * PAGE)), Ok(24));
    });
}

fn huge<A: Walk>() {
    with_fixture::<A>(9, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 4 * MIB)).unwrap();
        let program = fixture.program(&space);
        program.fill(VirtAddr(AT), 4 * MIB, 1).unwrap();
        watch(&space);
        assert_eq!(written(&space, AT, 1024), [0; 0]);
        program.store(VirtAddr(AT + 100 * PAGE), 2).unwrap();
        assert!(written(&space, AT, 1024).into_iter().eq(0..512));
        assert_eq!(area(&space, AT).kib("AnonHugePages"), 4096);
        // Both parts of a split mapping inherit its marks.
        space.munmap(VirtAddr(AT + 7 * PAGE), PAGE).unwrap();
        watch(&space);
        program.store(VirtAddr(AT + 100 * PAGE), 2).unwrap();
        assert_eq!(written(&space, AT, 1024), [100]);
        fixture.audit(&[&space]);
    });
}

fn protections<A: Walk>() {
    on_watched::<A>(|_, space, program| {
        let all = PAGES * PAGE;
        store(program, 20);
        for other in [Protection::READ, Protection::empty(), READ_WRITE | Protection::EXECUTE] {
            space.mprotect(VirtAddr(AT), all, other).unwrap();
            assert_eq!(written(space, AT, 64), [20]);
            space.mprotect(VirtAddr(AT), all, READ_WRITE).unwrap();
            assert_eq!(written(space, AT, 64), [20]);
        }
        // Pages made accessible again may be one contiguous run, with a mark in its middle.
        for other in [Protection::empty(), READ_WRITE, Protection::empty(), READ_WRITE] {
            space.mprotect(VirtAddr(AT), all, other).unwrap();
            assert_eq!(written(space, AT, 64), [20]);
        }
        store(program, 21);
        assert_eq!(written(space, AT, 64), [20, 21]);
        // A part of the run, with marks on either side.
        for other in [Protection::READ, Protection::empty()] {
            space.mprotect(VirtAddr(AT + 21 * PAGE), 11 * PAGE, other).unwrap();
            store(program, 40);
            space.mprotect(VirtAddr(AT + 21 * PAGE), 11 * PAGE, READ_WRITE).unwrap();
            assert_eq!(written(space, AT, 64), [20, 21, 40]);
        }
        store(program, 22);
        assert_eq!(written(space, AT, 64), [20, 21, 22, 40]);
        // `PROT_NONE` pages are cleared too and are tracked once they are accessible again.
        space.mprotect(VirtAddr(AT), all, Protection::empty()).unwrap();
        watch(space);
        assert_eq!(written(space, AT, 64), [0; 0]);
        space.mprotect(VirtAddr(AT), all, READ_WRITE).unwrap();
        store(program, 5);
        assert_eq!(written(space, AT, 64), [5]);
    });
}

fn forks<A: Walk>() {
    on_watched::<A>(|fixture, space, program| {
        store(program, 3);
        let child = space.fork().unwrap();
        let young = fixture.program(&child);
        for page in 0..PAGES {
            // Shared memory is mapped by touching it.
            young.load(VirtAddr(AT + page * PAGE)).unwrap();
        }
        assert_eq!(written(space, AT, 64), [3]);
        let mut marks = written(&child, AT, 64);
        marks.retain(|page| *page != 3);
        assert_eq!(marks, [0; 0]);
        store(&young, 30);
        store(program, 40);
        assert_eq!(written(space, AT, 64), [3, 40]);
        assert!(written(&child, AT, 64).contains(&30) && !written(&child, AT, 64).contains(&40));
        watch(&child);
        store(&young, 40);
        assert_eq!(written(&child, AT, 64), [40]);
        fixture.audit(&[space, &child]);
        drop(child);
        // Pages that only this process still maps are tracked as well.
        store(program, 41);
        assert_eq!(written(space, AT, 64), [3, 40, 41]);
    });
}

fn moves<A: Walk>() {
    on_watched::<A>(|fixture, space, program| {
        store(program, 3);
        let length = 24 * PAGE;
        for to in [TO, TO + 5 * PAGE, TO + MIB + 16 * PAGE] {
            let (from, target) = (VirtAddr(AT + 16 * PAGE), VirtAddr(to));
            space.mremap(from, length, length, Remap::To(target)).unwrap();
            assert!(written(space, to, 24).into_iter().eq(0..24));
            assert_eq!(written(space, AT, 64), [3]);
            fixture.audit(&[space]);
            space.mremap(target, length, length, Remap::To(from)).unwrap();
            watch(space);
            store(program, 3);
        }
        store(program, 16);
        store(program, 39);
        assert_eq!(written(space, AT, 64), [3, 16, 39]);
    });
}

#[test]
fn tables_that_move_whole_count_as_written() {
    table_moves::<bindery::arch::X86_64<4>>();
    table_moves::<bindery::arch::AArch64>();
    table_moves::<bindery::arch::Riscv64<3>>();
}

fn table_moves<A: Walk>() {
    for order in [0, 9] {
        with_fixture::<A>(order, |fixture| {
            let space = fixture.space();
            space.mmap(&fixed(AT, 4 * MIB)).unwrap();
            let program = fixture.program(&space);
            program.fill(VirtAddr(AT), 4 * MIB, 1).unwrap();
            watch(&space);
            space.mremap(VirtAddr(AT), 4 * MIB, 4 * MIB, Remap::To(VirtAddr(TO))).unwrap();
            assert_eq!(written(&space, TO, 1024).len(), 1024);
            fixture.audit(&[&space]);
        });
    }
}

fn dropped<A: Walk>() {
    on_watched::<A>(|_, space, program| {
        space.madvise(VirtAddr(AT + 8 * PAGE), 32 * PAGE, Advice::DontNeed).unwrap();
        assert_eq!(written(space, AT, 64), [0; 0]);
        program.load(VirtAddr(AT + 9 * PAGE)).unwrap();
        assert_eq!(written(space, AT, 64), [0; 0]);
        store(program, 9);
        // A fault may map more than the page, and new pages count as written.
        assert!(written(space, AT, 64).contains(&9));
        store(program, 50);
        assert!(written(space, AT, 64).contains(&50) && !written(space, AT, 64).contains(&51));
    });
}

fn later<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 16 * PAGE)).unwrap();
        fixture.program(&space).fill(VirtAddr(AT), 16 * PAGE, 1).unwrap();
        watch(&space);
        // The same address with another mapping.
        space.mmap(&fixed(AT + 4 * PAGE, 4 * PAGE)).unwrap();
        let flags = |at| area(&space, at).field("VmFlags").contains(" sd");
        let marked = written(&space, AT, 16);
        assert!((4..8).all(|page| marked.contains(&page)));
        space.mmap(&fixed(AT + MIB, PAGE)).unwrap();
        assert!(flags(AT + MIB));
        assert_eq!(written(&space, AT + MIB, 1), [0]);
        watch(&space);
        assert!(!flags(AT + MIB));
        assert_eq!(written(&space, AT, 16), [0; 0]);
        // Also covers the growing heap.
        space.set_break_start(VirtAddr(TO));
        space.set_break(VirtAddr(TO + PAGE));
        fixture.program(&space).store(VirtAddr(TO), 1).unwrap();
        watch(&space);
        space.set_break(VirtAddr(TO + 2 * PAGE));
        assert!(written(&space, TO, 2).contains(&1));
    });
}

fn joined<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        let program = fixture.program(&space);
        space.mmap(&fixed(AT, 4 * PAGE)).unwrap();
        program.fill(VirtAddr(AT), 4 * PAGE, 1).unwrap();
        watch(&space);
        // As on Linux, a mapping is marked as a whole and no mark may be lost.
        space.mmap(&fixed(AT + 4 * PAGE, 4 * PAGE)).unwrap();
        assert_eq!(space.mapping_count(), 1);
        assert_eq!(written(&space, AT, 8).len(), 8);
        // The mapping's entries were write-protected and may become writable.
        store(&program, 2);
        watch(&space);
        store(&program, 1);
        assert_eq!(written(&space, AT, 8), [1]);
        fixture.audit(&[&space]);
    });
}

fn files<A: Walk>() {
    with_fixture::<A>(2, |fixture| {
        let (space, file) = (fixture.space(), fixture.file(16 * PAGE));
        map_object(&space, &file, AT, 16 * PAGE, 0, Sharing::Shared);
        let program = fixture.program(&space);
        store(&program, 1);
        watch(&space);
        // A sync also write-protects the pages; both mechanisms record each store.
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(written(&space, AT, 16), [0; 0]);
        store(&program, 1);
        assert_eq!(written(&space, AT, 16), [1]);
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(written(&space, AT, 16), [1]);
        assert_eq!(fixture.files.content(1)[PAGE as usize], 8);
        watch(&space);
        program.store(VirtAddr(AT + PAGE), 9).unwrap();
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(fixture.files.content(1)[PAGE as usize], 9);
        assert_eq!(written(&space, AT, 16), [1]);
        fixture.audit(&[&space]);
    });
}

fn used<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 16 * PAGE)).unwrap();
        space.mmap(&MapRequest { sharing: Sharing::Shared, ..fixed(TO, 16 * PAGE) }).unwrap();
        let program = fixture.program(&space);
        let use_all = || {
            program.fill(VirtAddr(AT), 16 * PAGE, 1).unwrap();
            program.fill(VirtAddr(TO), 16 * PAGE, 1).unwrap();
        };
        let used = || [AT, TO].map(|at| area(&space, at).kib("Referenced"));
        use_all();
        for (what, left) in [
            (ClearRefs::Anonymous, [0, 64]),
            (ClearRefs::Mapped, [64, 0]),
            (ClearRefs::All, [0, 0]),
            (ClearRefs::PeakResident, [64, 64]),
        ] {
            assert_eq!(used(), [64, 64]);
            proc::clear_refs(&space, what).unwrap();
            assert_eq!(used(), left, "{what:?}");
            // Written pages stay marked.
            assert_eq!(written(&space, AT, 16).len(), 16);
            assert_eq!(area(&space, AT).kib("Private_Dirty"), 64);
            use_all();
        }
        proc::clear_refs(&space, ClearRefs::All).unwrap();
        program.load(VirtAddr(AT + 3 * PAGE)).unwrap();
        assert_eq!(used(), [4, 0]);
        fixture.audit(&[&space]);
    });
}

fn used_block<A: Walk>() {
    with_fixture::<A>(4, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 32 * PAGE)).unwrap();
        let program = fixture.program(&space);
        program.fill(VirtAddr(AT), 32 * PAGE, 1).unwrap();
        proc::clear_refs(&space, ClearRefs::All).unwrap();
        assert_eq!(area(&space, AT).kib("Referenced"), 0);
        program.load(VirtAddr(AT + 9 * PAGE)).unwrap();
        // The MMU may record an access in any entry of a block.
        let block = u64::from(A::CONTIG_ENTRIES) * 4;
        assert_eq!(area(&space, AT).kib("Referenced"), block);
    });
}

fn costs<A: Walk>() {
    with_fixture::<A>(9, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 4 * MIB)).unwrap();
        space.mmap(&fixed(TO, 4 * MIB)).unwrap();
        let program = fixture.program(&space);
        program.fill(VirtAddr(AT), 4 * MIB, 1).unwrap();
        program.fill(VirtAddr(TO), 4 * MIB, 1).unwrap();
        let before = space.counts();
        watch(&space);
        let watched = space.counts();
        assert_eq!(watched.entries_written - before.entries_written, 4);
        assert_eq!(watched.invalidations - before.invalidations, 1);
        smaps(&space, &bindery_linux::proc::Unnamed);
        pagemap(&space, AT, 1024);
        resident(&space);
        let after = space.counts();
        assert_eq!(after.entries_written, watched.entries_written);
        assert_eq!(after.invalidations, watched.invalidations);
        assert_eq!(area(&space, AT).kib("AnonHugePages"), 4096);
    });
}

fn other_cpus<A: Walk>() {
    let (machine, memory) =
        memory_with::<A>(Config { memory: 16 << 20, cpus: 2, ..Config::default() });
    let space = bindery::AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT, PAGES * PAGE)).unwrap();
    machine.on_cpu(Cpu(1), || {
        Program::new(&machine, &space).fill(VirtAddr(AT), PAGES * PAGE, 1).unwrap();
    });
    // Odd: the writer's turn.
    let turn = AtomicU64::new(0);
    const ROUNDS: u64 = 200;
    let wait = |wanted: u64| {
        while turn.load(Ordering::Acquire) != wanted {
            std::thread::yield_now();
        }
    };
    let page_of = |round: u64| round * 29 % PAGES;
    // Failures are reported afterwards, because a panic here would make the writer wait forever.
    let mut marks = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            let _on_cpu = machine.bind(Cpu(1));
            let program = Program::new(&machine, &space);
            for round in 0..ROUNDS {
                wait(2 * round + 1);
                store(&program, page_of(round));
                turn.store(2 * round + 2, Ordering::Release);
            }
        });
        let _on_cpu = machine.bind(Cpu(0));
        for round in 0..ROUNDS {
            watch(&space);
            turn.store(2 * round + 1, Ordering::Release);
            wait(2 * round + 2);
            marks.push(written(&space, AT, PAGES as usize));
        }
    });
    let expected: Vec<_> = (0..ROUNDS).map(|round| vec![page_of(round) as usize]).collect();
    assert_eq!(marks, expected);
    audit(&machine, &memory, &[&space]);
}
