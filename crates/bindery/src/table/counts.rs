//! The counters of a tree, per CPU.
//!
//! Two threads that fault in one address space write no cache line of counters in common. Each CPU
//! that enters the address space has its own counters there ([`CpuStats`]): the counters of the
//! first CPU are in the tree's state, and those of every other CPU in a chunk, which is allocated
//! when the CPU first enters. The counters stay until the tree is freed.
//!
//! A CPU adds to its counters with plain loads and stores, in a read section. No addition is lost,
//! because within the section the thread stays on its CPU and no other thread of the CPU runs in a
//! section. Interrupt handlers count nothing here. A CPU without counters, for lack of memory or
//! because it never entered (a reclaimer, `fork` in the child), adds to the shared counters with
//! atomic additions.
//!
//! A sum over all counters is exact when no call runs. [`TreeCounts::approximate_resident`] is for
//! calls that must not read the cache lines of other CPUs: its result may miss fewer than
//! [`FOLD_PAGES`](crate::stats) pages of each of those CPUs.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::{self, NonNull};
use core::sync::atomic::{
    AtomicPtr, AtomicU32,
    Ordering::{AcqRel, Acquire, Relaxed},
};

use crate::Memory;
use crate::memory::{Record, RecordKind};
use crate::platform::{Cpu, MAX_CPUS, Platform};
use crate::stats::{Counts, CpuStats, Stats};

use super::{PageTable, ReadSection};

/// The CPUs of one chunk.
const CHUNK_CPUS: usize = 8;

/// The counters of CPUs with consecutive numbers.
#[derive(Default)]
pub(crate) struct Chunk([CpuStats; CHUNK_CPUS]);

/// The counters of a tree.
pub(crate) struct TreeCounts {
    shared: Stats,
    /// The counters of CPU `first`.
    of_first: CpuStats,
    /// The number of the CPU that entered first, or [`NO_CPU`].
    first: AtomicU32,
    chunks: [AtomicPtr<Chunk>; MAX_CPUS / CHUNK_CPUS],
    /// Bit n is set if chunk n was entered.
    entered: AtomicU32,
}

const _: () = assert!(MAX_CPUS / CHUNK_CPUS <= u32::BITS as usize);

const NO_CPU: u32 = u32::MAX;

impl TreeCounts {
    pub(super) fn new() -> Self {
        Self {
            shared: Stats::default(),
            of_first: CpuStats::default(),
            first: AtomicU32::new(NO_CPU),
            chunks: [const { AtomicPtr::new(ptr::null_mut()) }; MAX_CPUS / CHUNK_CPUS],
            entered: AtomicU32::new(0),
        }
    }

    #[inline(always)]
    fn of(&self, cpu: Cpu) -> Option<&CpuStats> {
        if u32::from(cpu.0) == self.first.load(Relaxed) {
            return Some(&self.of_first);
        }
        self.in_chunk(cpu)
    }

    #[inline(never)]
    fn in_chunk(&self, cpu: Cpu) -> Option<&CpuStats> {
        let cpu = usize::from(cpu.0);
        let chunk = self.chunks.get(cpu / CHUNK_CPUS)?.load(Acquire);
        // SAFETY: a chunk is initialized before its pointer is stored, and stays until the tree is
        // freed; all access is through shared references.
        let chunk = unsafe { chunk.as_ref() }?;
        Some(&chunk.0[cpu % CHUNK_CPUS])
    }

    fn all_chunks(&self) -> impl Iterator<Item = NonNull<Chunk>> {
        let mut left = self.entered.load(Acquire);
        core::iter::from_fn(move || {
            let number = left.trailing_zeros() as usize;
            let chunk = self.chunks.get(number)?.load(Acquire);
            left &= left - 1;
            NonNull::new(chunk)
        })
    }

    /// The sum of the counters of all CPUs, which is exact when no call runs. Reads cache lines
    /// that other CPUs write.
    pub(crate) fn read(&self) -> Counts {
        let mut sum = self.shared.read();
        sum += self.of_first.read();
        for chunk in self.all_chunks() {
            // SAFETY: as in `in_chunk`.
            for stats in unsafe { &chunk.as_ref().0 } {
                sum += stats.read();
            }
        }
        sum
    }

    #[cold]
    #[inline(never)]
    fn add_to_shared(&self, counts: &Counts) {
        self.shared.add(counts);
    }

    /// The number of mapped base pages, as CPU `cpu` sees it. Another CPU that has entered may have
    /// mapped or unmapped up to 31 pages that are missing here; with a single such CPU, the number
    /// is exact. Reads no cache line that only another CPU writes.
    #[inline]
    pub(crate) fn approximate_resident(&self, cpu: Cpu) -> i64 {
        // If the thread was preempted after it read the number, the result misses the pages of a
        // different CPU.
        self.shared.mapped_pages() + self.of(cpu).map_or(0, CpuStats::unfolded_pages)
    }

    /// Gives `cpu`, which enters the address space, its own counters. If memory is short, `cpu`
    /// gets no counters. Does not sleep.
    #[inline]
    pub(super) fn enter<P: Platform>(&self, memory: &Memory<P>, cpu: Cpu) {
        if self.of(cpu).is_none() {
            self.make_for(memory, cpu);
        }
    }

    #[cold]
    #[inline(never)]
    fn make_for<P: Platform>(&self, memory: &Memory<P>, cpu: Cpu) {
        let is_first = self.first.compare_exchange(NO_CPU, cpu.0.into(), Relaxed, Relaxed).is_ok();
        let place = self.chunks.get(usize::from(cpu.0) / CHUNK_CPUS);
        let Some(place) = place.filter(|_| !is_first) else { return };
        let slab = memory.slab::<Chunk>();
        let made = slab.allocate_with(&memory.frames, Chunk::default);
        let Some(made) = made else { return };
        let entered = place.compare_exchange(ptr::null_mut(), made.as_ptr(), AcqRel, Relaxed);
        if entered.is_ok() {
            self.entered.fetch_or(1 << (usize::from(cpu.0) / CHUNK_CPUS), AcqRel);
        } else {
            // SAFETY: the chunk was allocated from this slab, and no other thread has seen it.
            unsafe { slab.free(&memory.frames, made) };
        }
    }

    /// Frees the counters of all CPUs except the first.
    ///
    /// # Safety
    /// 1. No other call uses the tree now or later.
    /// 2. All counters were allocated from this memory.
    pub(super) unsafe fn free<P: Platform>(&self, memory: &Memory<P>) {
        for chunk in self.all_chunks() {
            // SAFETY: the chunk was allocated from this slab (2.); it no longer has readers (1.),
            // and the caller frees the pointer to it.
            unsafe { memory.slab::<Chunk>().free(&memory.frames, chunk) };
        }
    }
}

impl<P: Platform> PageTable<'_, P> {
    /// Adds the counts of one operation, kept in registers.
    #[inline(always)]
    pub(crate) fn count(&self, counts: &Counts) {
        let section = self.read_section();
        self.count_in(&section, counts);
    }

    /// As [`PageTable::count`], for a caller in a read section.
    #[inline(always)]
    pub(crate) fn count_in(&self, _section: &ReadSection<'_, P>, counts: &Counts) {
        let own: &TreeCounts = &self.counts;
        match own.of(self.memory.platform().cpu()) {
            Some(stats) => stats.add(&own.shared, counts),
            None => {
                // Copied, so that the caller's counts stay in registers.
                let counts = *counts;
                own.add_to_shared(&counts);
            }
        }
    }
}

// SAFETY: 1. No other type has this kind.
unsafe impl Record for Chunk {
    const KIND: RecordKind = RecordKind::CpuCounts;
}
