//! The operations: six whose ratios have targets, and reimplementations of those in will-it-scale.

use bindery::addr::PAGE_SIZE;

use crate::calls::{Backing, Calls, FILE_BYTES};
use crate::crew::Sharing;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Pages that a sample touches for the first time. The last page of their table is kept.
const PAGES: u64 = 448;
/// Addresses that all workers of one address space use: 4 MiB for each.
const COMMON: u64 = 0x3000_0000_0000;
/// The size of a mapping in which at most the first page is touched.
const LARGE: u64 = 128 * MIB;

/// One of the threads or processes that perform an operation concurrently.
pub struct Worker<'c> {
    /// The worker's number, which is also its CPU's number.
    pub number: u16,
    /// The number of workers.
    pub count: u16,
    /// Whether all workers use the same address space.
    pub shares_space: bool,
    pub calls: &'c dyn Calls,
}

/// An operation. Only `run` is timed.
pub struct Operation {
    pub name: &'static str,
    /// Runs before the first sample, one worker after the other.
    pub start: fn(&Worker<'_>),
    /// A sample.
    pub run: fn(&Worker<'_>),
    /// The number of operations in a sample.
    pub count: u64,
    /// Runs after each sample.
    pub reset: fn(&Worker<'_>),
    /// Runs after the last sample, one worker after the other.
    pub end: fn(&Worker<'_>),
}

impl Operation {
    const fn named(name: &'static str, count: u64, run: fn(&Worker<'_>)) -> Self {
        Self { name, start: |_| {}, run, count, reset: |_| {}, end: |_| {} }
    }

    /// Whether the operation has a meaning in this setting.
    pub fn works(&self, sharing: Sharing) -> bool {
        self.name != ONE_VMA || sharing != Sharing::Processes
    }
}

impl Worker<'_> {
    /// The first address that only this worker uses. No other worker has entries in the tables of
    /// these addresses.
    fn own(&self) -> u64 {
        0x1000_0000_0000 + u64::from(self.number) * 64 * GIB
    }

    /// 64 KiB that some operations map and unmap; a page at [`Worker::own`] keeps their table.
    fn piece(&self) -> u64 {
        self.own() + 128 * KIB
    }

    fn common(&self) -> u64 {
        COMMON + u64::from(self.number) * 4 * MIB
    }

    fn is_in_charge(&self) -> bool {
        self.number == 0 || !self.shares_space
    }

    fn map(&self, at: u64, length: u64) {
        self.calls.map(self.number, Some(at), length, Backing::Anonymous);
    }

    /// Maps and touches a page, so that its table stays allocated.
    fn keep_table(&self) {
        self.map(self.own(), PAGE_SIZE);
        self.calls.touch(self.own(), PAGE_SIZE);
    }

    fn keep_piece(&self) {
        self.keep_table();
        self.map(self.piece(), 64 * KIB);
        self.calls.touch(self.piece(), 64 * KIB);
    }

    fn unmap_piece(&self) {
        self.calls.unmap(self.own(), 128 * KIB + 64 * KIB);
    }

    /// Maps memory of a kind at an address that the kernel chooses, writes to each page and unmaps
    /// the memory.
    fn map_touch_unmap(&self, backing: Backing) {
        for _ in 0..2 {
            let at = self.calls.map(self.number, None, FILE_BYTES, backing);
            self.calls.touch(at, FILE_BYTES);
            self.calls.unmap(at, FILE_BYTES);
        }
    }
}

/// Pages that [`Worker::map_touch_unmap`] touches.
const TOUCHED: u64 = 2 * FILE_BYTES / PAGE_SIZE;

/// The only operation that has no meaning in two processes.
const ONE_VMA: &str = "first touch, one VMA";

/// The operations in the order of the tables.
pub const OPERATIONS: &[Operation] = &[
    Operation {
        start: |worker| {
            worker.map(worker.own(), 2 * MIB);
            worker.calls.touch(worker.own() + 2 * MIB - PAGE_SIZE, PAGE_SIZE);
        },
        reset: |worker| worker.calls.discard(worker.own(), PAGES * PAGE_SIZE),
        end: |worker| worker.calls.unmap(worker.own(), 2 * MIB),
        ..Operation::named("first touch, own VMA", PAGES, |worker| {
            worker.calls.touch(worker.own(), PAGES * PAGE_SIZE);
        })
    },
    Operation {
        start: |worker| {
            if worker.is_in_charge() {
                worker.map(COMMON, u64::from(worker.count) * 4 * MIB);
            }
            worker.calls.touch(worker.common() + 2 * MIB - PAGE_SIZE, PAGE_SIZE);
        },
        reset: |worker| worker.calls.discard(worker.common(), PAGES * PAGE_SIZE),
        end: |worker| {
            if worker.is_in_charge() {
                worker.calls.unmap(COMMON, u64::from(worker.count) * 4 * MIB);
            }
        },
        ..Operation::named(ONE_VMA, PAGES, |worker| {
            worker.calls.touch(worker.common(), PAGES * PAGE_SIZE);
        })
    },
    Operation {
        start: |worker| worker.keep_piece(),
        end: |worker| worker.unmap_piece(),
        ..Operation::named("DONTNEED, touch", 60, |worker| {
            for _ in 0..60 {
                worker.calls.discard(worker.piece(), 64 * KIB);
                worker.calls.touch(worker.piece(), 64 * KIB);
            }
        })
    },
    Operation {
        start: |worker| worker.keep_table(),
        end: |worker| worker.unmap_piece(),
        ..Operation::named("mmap, touch, munmap", 60, |worker| {
            for _ in 0..60 {
                worker.map(worker.piece(), 64 * KIB);
                worker.calls.touch(worker.piece(), 64 * KIB);
                worker.calls.unmap(worker.piece(), 64 * KIB);
            }
        })
    },
    Operation {
        start: |worker| worker.keep_table(),
        end: |worker| worker.unmap_piece(),
        ..Operation::named("mmap, munmap", 400, |worker| {
            for _ in 0..400 {
                worker.map(worker.piece(), 64 * KIB);
                worker.calls.unmap(worker.piece(), 64 * KIB);
            }
        })
    },
    Operation {
        start: |worker| worker.keep_piece(),
        end: |worker| worker.unmap_piece(),
        ..Operation::named("mprotect", 600, |worker| {
            for _ in 0..300 {
                worker.calls.protect(worker.piece(), 64 * KIB, false);
                worker.calls.protect(worker.piece(), 64 * KIB, true);
            }
        })
    },
    Operation::named("page_fault1: memory", TOUCHED, |worker| {
        worker.map_touch_unmap(Backing::Anonymous);
    }),
    Operation::named("page_fault2: private file", TOUCHED, |worker| {
        worker.map_touch_unmap(Backing::PrivateFile);
    }),
    Operation::named("page_fault3: shared file", TOUCHED, |worker| {
        worker.map_touch_unmap(Backing::SharedFile);
    }),
    Operation::named("mmap1: memory", 200, |worker| {
        for _ in 0..200 {
            let at = worker.calls.map(worker.number, None, LARGE, Backing::Anonymous);
            worker.calls.unmap(at, LARGE);
        }
    }),
    Operation::named("mmap2: private file", 200, |worker| {
        for _ in 0..200 {
            let at = worker.calls.map(worker.number, None, LARGE, Backing::PrivateFile);
            worker.calls.unmap(at, LARGE);
        }
    }),
    Operation::named("malloc: map, one touch, unmap", 100, |worker| {
        for _ in 0..100 {
            let at = worker.calls.map(worker.number, None, LARGE, Backing::Anonymous);
            worker.calls.touch(at, PAGE_SIZE);
            worker.calls.unmap(at, LARGE);
        }
    }),
    Operation::named("brk: a page more and less", 400, |worker| {
        for _ in 0..400 {
            worker.calls.grow_heap(u64::from(worker.number) + 1);
            worker.calls.grow_heap(0);
        }
    }),
    Operation::named("fork: a child that ends", 5, |worker| {
        (0..5).for_each(|_| worker.calls.fork());
    }),
];
