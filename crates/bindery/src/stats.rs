//! Counts of work: entries read and written, tables moved, invalidations sent and saved. Each
//! address space has one set of counters that all CPUs share ([`Stats`]) and one set for each CPU
//! that has entered the address space ([`CpuStats`]); `table::counts` chooses between them.

use core::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

macro_rules! counts {
    (by_cpu { $($(#[$doc:meta])* $name:ident,)* } shared { $($(#[$shared_doc:meta])* $shared:ident,)* }) => {
        /// Work done on an address space's page table. The difference between two readings is the
        /// cost of the work in between.
        ///
        /// ```
        /// use bindery::{AddressSpace, Platform};
        ///
        /// fn tables<P: Platform>(space: &AddressSpace<'_, P>) -> u64 {
        ///     let counts = space.counts();
        ///     counts.tables_allocated - counts.tables_freed
        /// }
        /// ```
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct Counts {
            $($(#[$doc])* pub $name: u64,)*
            $($(#[$shared_doc])* pub $shared: u64,)*
        }

        impl core::ops::Sub for Counts {
            type Output = Self;
            fn sub(self, earlier: Self) -> Self {
                Self {
                    $($name: self.$name.wrapping_sub(earlier.$name),)*
                    $($shared: self.$shared.wrapping_sub(earlier.$shared),)*
                }
            }
        }

        impl core::ops::AddAssign for Counts {
            fn add_assign(&mut self, other: Self) {
                $(self.$name = self.$name.wrapping_add(other.$name);)*
                $(self.$shared = self.$shared.wrapping_add(other.$shared);)*
            }
        }

        /// Counters that all CPUs share, in the order of [`Counts`], on separate cache lines.
        #[derive(Default)]
        #[repr(C, align(128))]
        pub(crate) struct Stats {
            $($name: AtomicU64,)*
            $($shared: AtomicU64,)*
            /// The net number of mapped pages that CPUs have counted in their own counters and
            /// folded into this counter.
            folded_pages: AtomicI64,
        }

        impl Stats {
            /// Adds the counts of one operation, kept in registers. A zero count costs no store,
            /// and no test if the compiler can tell that it is zero.
            #[inline(always)]
            pub(crate) fn add(&self, counts: &Counts) {
                $(add(&self.$name, counts.$name);)*
                $(add(&self.$shared, counts.$shared);)*
            }

            pub(crate) fn read(&self) -> Counts {
                Counts {
                    $($name: self.$name.load(Relaxed),)*
                    $($shared: self.$shared.load(Relaxed),)*
                }
            }
        }

        /// The counters of one CPU. The CPU changes them without atomic additions, and only in a
        /// read section, because no other thread of the CPU is then in a section.
        #[derive(Default)]
        #[repr(C, align(128))]
        pub(crate) struct CpuStats {
            /// Mapped pages that are not in [`Stats::folded_pages`] yet; less than [`FOLD_PAGES`]
            /// in either direction.
            unfolded_pages: AtomicI64,
            $($name: AtomicU64,)*
        }

        impl CpuStats {
            /// Adds the counts of one operation on the caller's CPU; the rarest counts are added to
            /// `shared`. The caller is in a read section on that CPU.
            #[inline(always)]
            pub(crate) fn add(&self, shared: &Stats, counts: &Counts) {
                $(if counts.$name != 0 {
                    self.$name.store(self.$name.load(Relaxed).wrapping_add(counts.$name), Relaxed);
                })*
                $(add(&shared.$shared, counts.$shared);)*
                let mapped = counts.mapped_pages();
                if mapped != 0 {
                    let unfolded = self.unfolded_pages.load(Relaxed).wrapping_add(mapped);
                    self.unfolded_pages.store(unfolded, Relaxed);
                    // One comparison checks both directions.
                    if unfolded.wrapping_add(FOLD_PAGES as i64 - 1) as u64 >= 2 * FOLD_PAGES - 1 {
                        self.fold(shared);
                    }
                }
            }

            pub(crate) fn read(&self) -> Counts {
                Counts { $($name: self.$name.load(Relaxed),)* ..Counts::default() }
            }
        }
    };
}

/// The number of mapped pages after which a CPU publishes them ([`CpuStats::add`]).
pub(crate) const FOLD_PAGES: u64 = 32;

#[inline(always)]
fn add(counter: &AtomicU64, count: u64) {
    if count != 0 {
        counter.fetch_add(count, Relaxed);
    }
}

impl Counts {
    /// The change of mapped base pages.
    #[inline(always)]
    fn mapped_pages(&self) -> i64 {
        self.anonymous_pages.wrapping_add(self.file_pages).wrapping_add(self.shared_pages) as i64
    }
}

impl Stats {
    /// The number of mapped base pages, without pages that CPUs have not folded yet. Negative if an
    /// unmapping was counted before the mapping that it reversed.
    #[inline]
    pub(crate) fn mapped_pages(&self) -> i64 {
        let levels = [&self.anonymous_pages, &self.file_pages, &self.shared_pages];
        let levels = levels.map(|level| level.load(Relaxed) as i64);
        levels.into_iter().fold(self.folded_pages.load(Relaxed), i64::wrapping_add)
    }
}

impl CpuStats {
    /// The mapped pages that [`Stats::mapped_pages`] does not include yet.
    #[inline]
    pub(crate) fn unfolded_pages(&self) -> i64 {
        self.unfolded_pages.load(Relaxed)
    }

    #[cold]
    #[inline(never)]
    fn fold(&self, shared: &Stats) {
        shared.folded_pages.fetch_add(self.unfolded_pages.load(Relaxed), Relaxed);
        self.unfolded_pages.store(0, Relaxed);
    }
}

// A first touch changes the first seven counters, which share a cache line with the pages to fold.
// The others fill a CPU's second line, except the rarest two, which do not fit.
counts! {
    by_cpu {
        /// Entries examined at the level where the operation works: leaves, empty and absent
        /// entries, and entries of tables that are moved or removed as a whole.
        entries_read,
        /// Entries written, at any level.
        entries_written,
        /// Entries read only during the descent from the root: those that refer to tables. Most
        /// look-ups also count an empty or huge entry that ends the walk above level 0, but the
        /// moves of `mremap` and `UFFDIO_MOVE` do not.
        entries_descended,
        /// Table locks taken.
        tables_locked,
        /// Folios whose mappings were counted up or down.
        folios_touched,
        /// Bytes zeroed for new folios.
        bytes_zeroed,
        /// Mapped base pages of anonymous memory. This value falls with unmappings, so the
        /// difference of two readings wraps if it has fallen. The same applies to `file_pages`,
        /// `shared_pages` and `swap_pages`.
        anonymous_pages,
        /// Tables taken from the frame allocator.
        tables_allocated,
        /// Mapped base pages of files.
        file_pages,
        /// Mapped base pages of shared memory.
        shared_pages,
        /// Bytes copied.
        bytes_copied,
        /// Tables freed.
        tables_freed,
        /// Invalidations requested from the platform.
        invalidations,
        /// Base pages that these invalidations covered.
        pages_invalidated,
        /// Invalidations that were not needed: no CPU has loaded the address space, or an entry
        /// only allows more than before.
        invalidations_saved,
    }
    shared {
        /// Entries that refer to swap slots, in base pages.
        swap_pages,
        /// Tables moved by moving the one entry that points to them.
        tables_moved,
    }
}

/// Adds to a counter that measurements read. Avoids an atomic addition, which would dominate the
/// measured cost; concurrent additions may be lost.
#[cfg(any(test, feature = "measure"))]
#[inline]
pub(crate) fn count_roughly(counter: &core::sync::atomic::AtomicU64, by: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(by), Relaxed);
}

#[cfg(test)]
mod tests {
    use core::mem::offset_of;

    use super::*;

    #[test]
    fn a_first_touch_counts_in_one_line() {
        let offsets = [
            offset_of!(Stats, entries_read),
            offset_of!(Stats, entries_written),
            offset_of!(Stats, entries_descended),
            offset_of!(Stats, tables_locked),
            offset_of!(Stats, tables_allocated),
            offset_of!(Stats, folios_touched),
            offset_of!(Stats, bytes_zeroed),
            offset_of!(Stats, anonymous_pages),
        ];
        assert!(offsets.iter().all(|offset| offset / 64 == 0), "{offsets:?}");
    }

    #[test]
    fn a_touch_counts_in_its_cpus_line() {
        let offsets = [
            offset_of!(CpuStats, unfolded_pages),
            offset_of!(CpuStats, entries_read),
            offset_of!(CpuStats, entries_written),
            offset_of!(CpuStats, entries_descended),
            offset_of!(CpuStats, tables_locked),
            offset_of!(CpuStats, folios_touched),
            offset_of!(CpuStats, bytes_zeroed),
            offset_of!(CpuStats, anonymous_pages),
        ];
        assert!(offsets.iter().all(|offset| offset / 64 == 0), "{offsets:?}");
        assert_eq!((size_of::<CpuStats>(), align_of::<CpuStats>()), (128, 128));
    }

    #[test]
    fn mapped_pages_are_folded_in_by_32() {
        let (shared, own) = (Stats::default(), CpuStats::default());
        let anonymous = |pages: i64| Counts { anonymous_pages: pages as u64, ..Counts::default() };
        own.add(&shared, &anonymous(31));
        assert_eq!((shared.mapped_pages(), own.unfolded_pages()), (0, 31));
        own.add(&shared, &Counts { file_pages: 1, ..Counts::default() });
        assert_eq!((shared.mapped_pages(), own.unfolded_pages()), (32, 0));
        own.add(&shared, &anonymous(-31));
        shared.add(&anonymous(4));
        assert_eq!((shared.mapped_pages(), own.unfolded_pages()), (36, -31));
        own.add(&shared, &anonymous(-600));
        assert_eq!((shared.mapped_pages(), own.unfolded_pages()), (36 - 631, 0));
        assert_eq!((own.read().anonymous_pages as i64, own.read().file_pages), (-600, 1));
    }

    #[test]
    fn every_counter_is_kept() {
        let (shared, own) = (Stats::default(), CpuStats::default());
        let counts =
            Counts { tables_moved: 3, swap_pages: 4, bytes_copied: 5, ..Counts::default() };
        own.add(&shared, &counts);
        let mut sum = shared.read();
        sum += own.read();
        assert_eq!(sum, counts);
    }
}
