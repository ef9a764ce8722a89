//! Counts of work: entries read and written, tables moved, invalidations sent and saved.

use core::sync::atomic::{AtomicU64, Ordering};

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
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
        }

        impl core::ops::Sub for Counts {
            type Output = Self;
            fn sub(self, earlier: Self) -> Self {
                Self { $($name: self.$name.wrapping_sub(earlier.$name),)* }
            }
        }

        impl core::ops::AddAssign for Counts {
            fn add_assign(&mut self, other: Self) {
                $(self.$name = self.$name.wrapping_add(other.$name);)*
            }
        }

        /// The counters themselves, shared by all CPUs, in the order of [`Counts`] on lines of their
        /// own.
        #[derive(Default)]
        #[repr(C, align(128))]
        pub(crate) struct Stats {
            $($name: AtomicU64,)*
        }

        impl Stats {
            /// Adds the counts of one operation, kept in registers. A zero costs no store; if the
            /// compiler knows it, not even a test.
            #[inline(always)]
            pub(crate) fn add(&self, counts: &Counts) {
                $(if counts.$name != 0 {
                    self.$name.fetch_add(counts.$name, Ordering::Relaxed);
                })*
            }

            /// The number of mapped base pages; negative if an unmapping was counted before the
            /// mapping that it undid.
            #[inline]
            pub(crate) fn mapped_pages(&self) -> i64 {
                let levels = [&self.anonymous_pages, &self.file_pages, &self.shared_pages];
                let sum = levels.map(|level| level.load(Ordering::Relaxed));
                sum.into_iter().fold(0, u64::wrapping_add) as i64
            }

            pub(crate) fn read(&self) -> Counts {
                Counts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

// The first eight are those of a first touch, in one cache line.
counts! {
    /// Entries examined at the level where the operation works: leaves, empty and absent entries,
    /// and entries of tables that are moved or removed whole.
    entries_read,
    /// Entries written, at any level.
    entries_written,
    /// Entries read only on the way down from the root: those that refer to tables. An empty or
    /// huge entry that ends the way early is counted by most look-ups, but not by the moves of
    /// `mremap` and `UFFDIO_MOVE`.
    entries_descended,
    /// Table locks taken.
    tables_locked,
    /// Tables taken from the frame allocator.
    tables_allocated,
    /// Folios whose mappings were counted up or down.
    folios_touched,
    /// Bytes zeroed for new folios.
    bytes_zeroed,
    /// Mapped base pages of anonymous memory. This is a level, which unmapping lowers, so the
    /// difference of two readings wraps if it has fallen. So are the next two.
    anonymous_pages,
    /// Mapped base pages of files.
    file_pages,
    /// Mapped base pages of shared memory.
    shared_pages,
    /// Entries that refer to swap slots, in base pages. A level, too.
    swap_pages,
    /// Bytes copied.
    bytes_copied,
    /// Tables freed.
    tables_freed,
    /// Tables moved by moving the one entry that points to them.
    tables_moved,
    /// Invalidations requested from the platform.
    invalidations,
    /// Base pages that these invalidations covered.
    pages_invalidated,
    /// Invalidations that were not needed: no CPU has loaded the address space, or an entry only
    /// allows more than before.
    invalidations_saved,
}

/// Adds to a counter that measurements read. Avoids an atomic addition, which would dominate the
/// measured cost: concurrent additions may be lost.
#[cfg(any(test, feature = "measure"))]
#[inline]
pub(crate) fn count_roughly(counter: &core::sync::atomic::AtomicU64, by: u64) {
    use core::sync::atomic::Ordering::Relaxed;
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
}
