//! Readahead: the number and the size of requests by sequential, random and concurrent readers.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{Access, AddressSpace, Advice, Inspection, Memory, Object, ReadPattern, Sharing};
use bindery_hosted::{Config, DelayedFiles, Machine, MemoryFiles};

use crate::support::objects::{PAGE, memfd, use_object_order};
use crate::support::objects_fixture::{AT, map, with_fixture};
use crate::support::{MIB, audit, memory_with, options};

type A = X86_64<4>;
type File<'m> = Object<'m, Machine<A>>;

const PAGES: u64 = 1024;

/// Reads the pages, one after the other.
fn read(file: &File<'_>, pages: impl Iterator<Item = u64>) {
    for page in pages {
        assert_eq!(file.read(page * PAGE, &mut [0; 8]), Ok(8));
    }
}

/// The number of requests that `read` causes and of their pages, in a file that is not in memory.
fn requests(read: impl FnOnce(&AddressSpace<'_, Machine<A>>, &mut File<'_>)) -> (u64, u64) {
    let files = MemoryFiles::new();
    let mut counts = (0, 0);
    with_fixture::<A>(0, |fixture| {
        let mut file = fixture.memory.file(&files, 1, PAGES * PAGE).unwrap();
        let space = fixture.space();
        map(&space, &file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        read(&space, &mut file);
        fixture.audit(&[&space]);
        counts = (files.counts().reads, files.counts().pages_read);
    });
    counts
}

/// A permutation of the pages without neighbors in order.
fn at_random() -> impl Iterator<Item = u64> {
    (0..PAGES).map(|n| n * 389 % PAGES)
}

#[test]
fn a_reader_in_order_gets_windows_that_grow() {
    // Requests of 1, 4, 8, 16 and then 32 pages.
    assert_eq!(requests(|_, file| read(file, 0..PAGES)), (36, PAGES));
    let faults = requests(|space, _| {
        for page in 0..PAGES {
            space.fault(VirtAddr(AT + page * PAGE), Access::Read).unwrap();
        }
    });
    // A fault on the second page may still be random access, so windows start at the third.
    assert_eq!(faults, (37, PAGES));
}

#[test]
fn a_window_shrinks_with_the_pages_behind_it() {
    let after_eviction = |kept: u64| {
        requests(|_, file| {
            // Requests of 1, 4, 8, 16 and 32 pages.
            read(file, 0..61);
            let evicted = 61 - kept;
            assert_eq!(file.evict(0, evicted * PAGE), evicted);
            read(file, 61..62);
        })
    };
    assert_eq!(after_eviction(61), (6, 61 + 32), "none is evicted");
    assert_eq!(after_eviction(8), (6, 61 + 16));
    assert_eq!(after_eviction(4), (6, 61 + 8));
    assert_eq!(after_eviction(0), (6, 61 + 1), "the reader may be a random one");
}

#[test]
fn a_reader_that_jumps_reads_nothing_ahead() {
    // No page's predecessor is in memory.
    assert_eq!(requests(|_, file| read(file, at_random().take(256))), (256, 256));
    // By chance, half of the predecessors are in memory.
    let odd_pages_first = (0..PAGES / 2).map(|n| n * 389 % (PAGES / 2));
    let order = || odd_pages_first.clone().map(|n| 2 * n + 1).chain([2, 600, 34, 900, 12, 700]);
    assert_eq!(requests(|_, file| read(file, order())), (PAGES / 2 + 6, PAGES / 2 + 6));
}

#[test]
fn announced_patterns_decide() {
    let with = |pattern| {
        requests(|_, file| {
            file.set_read_pattern(pattern);
            read(file, 0..PAGES);
        })
    };
    assert_eq!(with(ReadPattern::Random), (PAGES, PAGES));
    // At most 32 folios are filled by one request.
    assert_eq!(with(ReadPattern::Sequential), (32, PAGES));
    let faults = |advice| {
        requests(|space, _| {
            space.madvise(VirtAddr(AT), PAGES * PAGE, advice).unwrap();
            for page in 0..PAGES {
                space.fault(VirtAddr(AT + page * PAGE), Access::Read).unwrap();
            }
        })
    };
    assert_eq!(faults(Advice::Random), (PAGES, PAGES));
    assert_eq!(faults(Advice::Sequential), (32, PAGES));
}

#[test]
fn concurrent_readers_have_their_own_windows() {
    let both = |_: &AddressSpace<'_, Machine<A>>, file: &mut File<'_>| {
        read(file, (0..PAGES / 2).flat_map(|page| [page, page + PAGES / 2]));
    };
    let (requests, pages) = requests(both);
    assert!(requests <= 44, "{requests} requests");
    assert_eq!(pages, PAGES);
}

/// Runs `scenario` with a pager whose requests the scenario answers.
fn with_delayed(scenario: impl FnOnce(&Machine<A>, &Memory<Machine<A>>, &DelayedFiles, File<'_>)) {
    let config = Config { memory: 64 * MIB, cpus: 3, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let pager = DelayedFiles::new();
    let file = memory.file(&pager, 1, PAGES * PAGE).unwrap();
    scenario(&machine, &memory, &pager, file);
    audit(&machine, &memory, &[]);
}

/// Answers all requests until `work` is done on another CPU.
fn serve(
    machine: &Machine<A>,
    memory: &Memory<Machine<A>>,
    pager: &DelayedFiles,
    work: impl FnOnce() + Send,
) {
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            machine.on_cpu(Cpu(1), work);
            is_done.store(true, Relaxed);
        });
        while !is_done.load(Relaxed) {
            pager.answer_all(memory);
            thread::yield_now();
        }
    });
}

#[test]
fn the_next_window_is_read_in_time() {
    with_delayed(|machine, memory, pager, file| {
        serve(machine, memory, pager, || read(&file, 0..2));
        let before = pager.log();
        assert_eq!(before.iter().map(|asked| asked.pages).collect::<Vec<_>>(), [1, 4]);
        assert!(before.iter().all(|asked| !asked.ahead));
        // At the first page of the last window, a window of twice the length starts. No thread
        // waits for this window although the pager does not answer.
        read(&file, 2..5);
        let after = pager.log();
        let [asked] = after[before.len()..] else { panic!("{after:?}") };
        assert_eq!((asked.first, asked.pages, asked.ahead), (5, 6, true));
        pager.answer_all(memory);
        read(&file, 5..11);
        let asked = *pager.log().last().unwrap();
        assert_eq!((asked.first, asked.pages, asked.ahead), (11, 12, true));
        assert_eq!(pager.answer_all(memory), 1);
    });
}

#[test]
fn a_program_reaches_marks_too() {
    with_delayed(|machine, memory, pager, file| {
        let space = AddressSpace::new(memory, options()).unwrap();
        map(&space, &file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        let touch = |page| space.fault(VirtAddr(AT + page * PAGE), Access::Read).unwrap();
        serve(machine, memory, pager, || {
            for page in 0..PAGES {
                touch(page);
            }
        });
        let asked = pager.log();
        assert!(asked.len() <= 40, "{asked:?}");
        assert!(asked.iter().filter(|asked| asked.ahead).count() >= 28, "{asked:?}");
        assert_eq!(file.resident_pages(), PAGES);
        audit(machine, memory, &[&space]);
    });
}

#[test]
fn a_large_folio_has_no_mark_inside() {
    with_delayed(|machine, memory, pager, file| {
        use_object_order(memory, 4);
        let space = AddressSpace::new(memory, options()).unwrap();
        map(&space, &file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        let mapped = |page: u64| {
            let is_mapped = |page: &u64| {
                matches!(space.inspect(VirtAddr(AT + page * PAGE)), Inspection::Page { .. })
            };
            (page..page + 16).filter(is_mapped).count()
        };
        serve(machine, memory, pager, || {
            // Random access reads the folio around the page and maps it completely.
            space.fault(VirtAddr(AT + 100 * PAGE), Access::Read).unwrap();
            assert_eq!(mapped(96), 16);
            // The next folio continues the sequence. The window and its mark end at folio
            // boundaries.
            space.fault(VirtAddr(AT + 112 * PAGE), Access::Read).unwrap();
            assert_eq!(mapped(112), 16);
        });
        let before = pager.log().len();
        space.fault(VirtAddr(AT + 128 * PAGE), Access::Read).unwrap();
        assert_eq!(mapped(128), 16);
        let asked = pager.log();
        assert_eq!(asked.len(), before + 1, "{asked:?}");
        assert!(asked[before].ahead && asked[before].first % 16 == 0, "{asked:?}");
        pager.answer_all(memory);
        audit(machine, memory, &[&space]);
    });
}

#[test]
fn short_memory_ends_readahead() {
    with_delayed(|machine, memory, pager, file| {
        // Fewer frames are free than a 64th of all plus a window.
        let memfd = memfd(memory, 64 * MIB);
        let most = memory.free_frame_count() - memory.total_frames() / 64 - 3;
        memfd.allocate(0, most * PAGE, bindery::Growth::Forbidden).unwrap();
        file.read_ahead(0, 64 * PAGE);
        serve(machine, memory, pager, || read(&file, 0..16));
        let asked = pager.log();
        assert!(asked.iter().all(|asked| asked.pages == 1 && !asked.ahead), "{asked:?}");
        drop(memfd);
        serve(machine, memory, pager, || read(&file, 16..24));
        assert!(pager.log()[asked.len()..].iter().any(|asked| asked.pages > 1));
        pager.answer_all(memory);
    });
}
