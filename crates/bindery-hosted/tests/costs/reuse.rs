//! Writes to private base pages after the other sharer has exited: the number of faults, the number
//! of entries that the faults read, and the entries that stay read-only.

use std::thread;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::Permissions;
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, Advice, Inspection, Memory, PinTime, UserfaultFeatures, UserfaultModes,
    UserfaultScope,
};
use bindery_hosted::{Config, Machine, Program, Walk};
use bindery_linux::proc::{self, ClearRefs};

use crate::support::{GIB, MIB, audit, fixed, memory_with, options, use_order};

on_every_architecture! {
    a_single_write_changes_one_entry => single;
    writes_in_order_share_faults => in_order;
    a_huge_leaf_is_reused_with_one_lock => huge;
    contiguous_runs_are_reused_with_one_flush => contiguous;
    the_mapping_ends_the_pages_ahead => end_of_mapping;
    pages_of_other_processes_stay_read_only => shared_ahead;
    watched_pages_stay_read_only => watched;
    pinned_pages_are_not_written_ahead => pinned;
    pages_in_the_swap_cache_keep_their_content => swapped;
    writers_meet_forks => beside_forks;
}

const AT: u64 = GIB;
/// Two tables, and part of a third.
const PAGES: u64 = 1100;
/// The maximum batch. Linux needs no such limit, since each of its faults makes one page writable.
const MOST_AHEAD: u64 = 64;

type Space<'m, A> = AddressSpace<'m, Machine<A>>;

struct Scene<'s, 'm, A: Walk> {
    machine: &'m Machine<A>,
    memory: &'m Memory<Machine<A>>,
    space: &'s Space<'m, A>,
}

/// Runs a test with `PAGES` touched base pages whose sharer has exited.
fn after_a_fork<A: Walk>(test: impl FnOnce(&Scene<'_, '_, A>)) {
    after_a_fork_with::<A>(0, test);
}

/// As [`after_a_fork`], with folios of 2^`order` pages if they fit.
fn after_a_fork_with<A: Walk>(order: u8, test: impl FnOnce(&Scene<'_, '_, A>)) {
    let (machine, memory) =
        memory_with::<A>(Config { memory: 64 * MIB, cpus: 4, ..Config::default() });
    use_order(&memory, order);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT, PAGES * PAGE_SIZE)).unwrap();
    let scene = Scene { machine: &machine, memory: &memory, space: &space };
    (0..PAGES).for_each(|page| scene.store(page, page));
    drop(space.fork().unwrap());
    test(&scene);
    audit(&machine, &memory, &[&space]);
    drop(space);
    audit(&machine, &memory, &[]);
}

fn at(page: u64) -> VirtAddr {
    VirtAddr(AT + page * PAGE_SIZE)
}

impl<A: Walk> Scene<'_, '_, A> {
    fn store(&self, page: u64, value: u64) {
        Program::new(self.machine, self.space).store(at(page), value).unwrap();
    }

    fn load(&self, page: u64) -> u64 {
        Program::new(self.machine, self.space).load(at(page)).unwrap()
    }

    fn is_writable(&self, page: u64) -> bool {
        match self.space.inspect(at(page)) {
            Inspection::Page { attributes, .. } => {
                attributes.permissions.contains(Permissions::WRITE)
            }
            Inspection::Empty | Inspection::Absent(_) => false,
        }
    }

    /// The number of writable pages among these.
    fn writable(&self, pages: std::ops::Range<u64>) -> u64 {
        pages.filter(|page| self.is_writable(*page)).count() as u64
    }

    #[track_caller]
    fn assert_holds(&self, pages: std::ops::Range<u64>, of: impl Fn(u64) -> u64) {
        for page in pages {
            assert_eq!(self.load(page), of(page), "page {page}");
        }
    }
}

fn single<A: Walk>() {
    after_a_fork::<A>(|scene| {
        let (before, machine) = (scene.space.counts(), scene.machine.statistics());
        scene.store(7, 70);
        let cost = scene.space.counts() - before;
        let machine = scene.machine.statistics() - machine;
        assert_eq!((cost.entries_read, cost.entries_written), (1, 1), "{cost:?}");
        assert_eq!((cost.bytes_copied, cost.tables_locked), (0, 1), "{cost:?}");
        assert_eq!((cost.invalidations, machine.invalidations), (0, 0), "{cost:?}");
        // One invalidation, of this page, if a fault leaves the old entry in the TLB.
        assert_eq!(machine.local_invalidations, u64::from(!A::FAULTS_INVALIDATE));
        assert_eq!(scene.writable(0..PAGES), 1);
        scene.assert_holds(0..7, |page| page);
        scene.assert_holds(7..8, |_| 70);
        scene.assert_holds(8..PAGES, |page| page);
    });
}

fn in_order<A: Walk>() {
    after_a_fork::<A>(|scene| {
        let (before, mut faults) = (scene.space.counts(), 0);
        let machine = scene.machine.statistics();
        for page in 0..PAGES {
            let before = scene.space.counts();
            scene.store(page, page + 5);
            let written = (scene.space.counts() - before).entries_written;
            assert!(written <= 1 + MOST_AHEAD, "page {page}: {written}");
            faults += u64::from(written > 0);
        }
        let cost = scene.space.counts() - before;
        let machine = scene.machine.statistics() - machine;
        // Batches of 1, 1, 2, 4, 8, 16 and 32 pages in each table, and of 64 from then on.
        let entries = u64::from(A::ENTRIES);
        let most = PAGES.div_ceil(entries) * 7 + PAGES / MOST_AHEAD + 1;
        assert!(faults <= most, "{faults} faults, {most} allowed");
        assert_eq!((cost.bytes_copied, cost.invalidations), (0, 0), "{cost:?}");
        assert_eq!((cost.entries_written, machine.invalidations), (PAGES, 0), "{cost:?}");
        scene.assert_holds(0..PAGES, |page| page + 5);
    });
}

fn huge<A: Walk>() {
    after_a_fork_with::<A>(9, |scene| {
        let (before, machine) = (scene.space.counts(), scene.machine.statistics());
        scene.store(100, 70);
        let cost = scene.space.counts() - before;
        let machine = scene.machine.statistics() - machine;
        assert_eq!((cost.entries_read, cost.entries_written), (1, 1), "{cost:?}");
        assert_eq!((cost.bytes_copied, cost.tables_locked), (0, 1), "{cost:?}");
        assert_eq!((cost.invalidations, machine.invalidations), (0, 0), "{cost:?}");
        assert_eq!(machine.local_invalidations, u64::from(!A::FAULTS_INVALIDATE));
        assert_eq!((scene.writable(0..512), scene.writable(512..PAGES)), (512, 0));
        scene.assert_holds(0..100, |page| page);
        scene.assert_holds(100..101, |_| 70);
        scene.assert_holds(101..PAGES, |page| page);
    });
    after_a_fork_with::<A>(9, |scene| {
        let child = scene.space.fork().unwrap();
        scene.store(100, 70);
        assert_eq!(scene.writable(0..PAGES), 1, "another process maps the others");
        assert_eq!(Program::new(scene.machine, &child).load(at(100)), Ok(100));
        audit(scene.machine, scene.memory, &[scene.space, &child]);
    });
}

fn contiguous<A: Walk>() {
    for order in [4, 6] {
        after_a_fork_with::<A>(order, |scene| {
            let contiguous = |pages: std::ops::Range<u64>| {
                let is_contiguous = |page: &u64| {
                    let found = scene.space.inspect(at(*page));
                    matches!(found, Inspection::Page { contiguous: true, .. })
                };
                pages.filter(is_contiguous).count()
            };
            let before_the_write = contiguous(0..PAGES);
            let (before, machine) = (scene.space.counts(), scene.machine.statistics());
            scene.store(100, 70);
            let cost = scene.space.counts() - before;
            let machine = scene.machine.statistics() - machine;
            let flushes = u64::from(A::CONTIG_ENTRIES > 1);
            assert_eq!((cost.bytes_copied, cost.tables_locked), (0, 1), "{cost:?}");
            assert_eq!((cost.invalidations, machine.invalidations), (flushes, flushes));
            let first = 100 >> order << order;
            let folio = first..first + (1 << order);
            assert_eq!(scene.writable(folio.clone()), 1 << order);
            assert_eq!(scene.writable(0..PAGES), 1 << order);
            assert_eq!(contiguous(0..PAGES), before_the_write, "no run was cut");
            folio.clone().filter(|page| *page != 100).for_each(|page| scene.store(page, page));
            let cost = scene.space.counts() - before;
            assert_eq!((cost.invalidations, cost.bytes_copied), (flushes, 0), "{cost:?}");
            scene.assert_holds(0..100, |page| page);
            scene.assert_holds(100..101, |_| 70);
            scene.assert_holds(101..PAGES, |page| page);
        });
    }
}

/// The entries of another mapping in the same table do not change.
fn end_of_mapping<A: Walk>() {
    after_a_fork::<A>(|scene| {
        scene.space.mprotect(at(12), PAGE_SIZE, bindery::Protection::READ).unwrap();
        (0..12).for_each(|page| scene.store(page, page));
        assert_eq!(scene.writable(0..PAGES), 12);
        assert!(Program::new(scene.machine, scene.space).store(at(12), 1).is_err());
        scene.assert_holds(0..PAGES, |page| page);
    });
}

fn shared_ahead<A: Walk>() {
    after_a_fork::<A>(|scene| {
        let child = scene.space.fork().unwrap();
        let program = Program::new(scene.machine, &child);
        let own = |page: u64| page < 20 || page.is_multiple_of(3);
        // The child has copied these pages, so only the parent maps them.
        for page in (0..PAGES).filter(|page| own(*page)) {
            program.store(at(page), page + 9).unwrap();
        }
        for page in 0..PAGES {
            scene.store(page, page + 7);
            for ahead in (page + 1..PAGES.min(page + 2 * MOST_AHEAD)).filter(|page| !own(*page)) {
                assert!(!scene.is_writable(ahead), "page {ahead} is written ahead of {page}");
            }
        }
        for page in 0..PAGES {
            let expected = if own(page) { page + 9 } else { page };
            assert_eq!(program.load(at(page)), Ok(expected), "page {page} of the child");
        }
        scene.assert_holds(0..PAGES, |page| page + 7);
        audit(scene.machine, scene.memory, &[scene.space, &child]);
    });
}

fn watched<A: Walk>() {
    // With soft-dirty tracking, each page's first write is recorded in its entry.
    after_a_fork::<A>(|scene| {
        proc::clear_refs(scene.space, ClearRefs::SoftDirty).unwrap();
        drop(scene.space.fork().unwrap());
        for page in 0..32 {
            scene.store(page, page + 1);
            assert_eq!(scene.writable(page + 1..PAGES), 0, "ahead of page {page}");
        }
        scene.assert_holds(0..32, |page| page + 1);
    });
    // With a userfaultfd, its handler may protect any page.
    after_a_fork::<A>(|scene| {
        let features = UserfaultFeatures::empty();
        let fd = scene.space.userfault(features, UserfaultScope::All).unwrap();
        let modes = UserfaultModes::WRITE_PROTECT;
        scene.space.register_userfault(&fd, at(0), PAGES * PAGE_SIZE, modes).unwrap();
        for page in 0..32 {
            scene.store(page, page + 1);
            assert_eq!(scene.writable(page + 1..PAGES), 0, "ahead of page {page}");
        }
        scene.assert_holds(0..32, |page| page + 1);
        scene.space.close_userfault(fd);
    });
}

fn pinned<A: Walk>() {
    after_a_fork::<A>(|scene| {
        let pinned = scene.space.pin(at(10), 1, Access::Read, PinTime::Long).unwrap();
        (0..10).for_each(|page| scene.store(page, page + 1));
        assert_eq!(scene.writable(11..PAGES), 0);
        (10..64).for_each(|page| scene.store(page, page + 1));
        let Inspection::Page { frame, .. } = scene.space.inspect(at(10)) else { panic!("no page") };
        assert_eq!(frame, pinned.first());
        scene.assert_holds(0..64, |page| page + 1);
    });
}

fn swapped<A: Walk>() {
    after_a_fork::<A>(|scene| {
        scene.memory.swap_on(4 * PAGES, 0).unwrap();
        scene.space.madvise(at(0), PAGES * PAGE_SIZE, Advice::PageOut).unwrap();
        // Reads leave the content in swap. A child shares the pages for a while.
        scene.assert_holds(0..PAGES, |page| page);
        drop(scene.space.fork().unwrap());
        for page in 0..PAGES {
            scene.store(page, page + 3);
        }
        scene.space.madvise(at(0), PAGES * PAGE_SIZE, Advice::PageOut).unwrap();
        scene.assert_holds(0..PAGES, |page| page + 3);
    });
}

/// Three threads write in order, each every third page, while the process forks repeatedly. A child
/// sees none of the writes after its fork.
fn beside_forks<A: Walk>() {
    after_a_fork::<A>(|scene| {
        let write = |thread: u64| {
            let _on_cpu = scene.machine.bind(Cpu(thread as u16));
            for round in 1..=40 {
                for page in (thread - 1..PAGES).step_by(3) {
                    scene.store(page, round << 32 | page);
                }
            }
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (1..4).map(|thread| scope.spawn(move || write(thread))).collect();
            while threads.iter().any(|thread| !thread.is_finished()) {
                let child = scene.space.fork().unwrap();
                let program = Program::new(scene.machine, &child);
                let read = || (0..PAGES).map(|page| program.load(at(page)).unwrap());
                let first: Vec<_> = read().collect();
                assert!((0..).zip(&first).all(|(page, word)| *word as u32 == page), "a wrong page");
                assert!(read().eq(first), "a write of the parent came through");
            }
        });
        scene.assert_holds(0..PAGES, |page| 40 << 32 | page);
    });
}
