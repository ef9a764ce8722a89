//! Counts of work done: the currency in which Bindery compares itself.

use core::sync::atomic::{AtomicU64, Ordering};

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// How much an address space's page table was worked on. Differences between two readings
        /// are the cost of what happened in between.
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

        /// The counters themselves, shared by all CPUs.
        #[derive(Default)]
        pub(crate) struct Stats {
            $($name: AtomicU64,)*
        }

        impl Stats {
            /// Adds what one operation counted in registers; zeroes cost nothing, and those that
            /// the compiler knows not even a look.
            #[inline(always)]
            pub(crate) fn add(&self, counts: &Counts) {
                $(if counts.$name != 0 {
                    self.$name.fetch_add(counts.$name, Ordering::Relaxed);
                })*
            }

            pub(crate) fn read(&self) -> Counts {
                Counts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counts! {
    /// Entries examined at the level where the operation works: leaves, empty and absent entries,
    /// and entries of tables that are moved or removed whole.
    entries_read,
    /// Entries written, at any level.
    entries_written,
    /// Entries read only to find the way down from the root.
    entries_descended,
    /// Tables taken from the frame allocator.
    tables_allocated,
    /// Tables given back to it.
    tables_freed,
    /// Tables moved to another place by moving the one entry that names them.
    tables_moved,
    /// Table locks taken.
    tables_locked,
    /// Invalidations asked of the platform.
    invalidations,
    /// Base pages that those covered.
    pages_invalidated,
    /// Invalidations that were not needed: no CPU has loaded the address space, or an entry only
    /// allows more than before.
    invalidations_saved,
    /// Folios whose mappings were counted up or down.
    folios_touched,
    /// Bytes zeroed for new folios.
    bytes_zeroed,
    /// Bytes copied.
    bytes_copied,
}
