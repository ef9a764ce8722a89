//! The resident memory of an address space.

use crate::platform::Platform;
use crate::stats::Counts;

use super::AddressSpace;

/// The resident memory of a process, in base pages. The zero page does not count.
///
/// ```
/// use bindery::{AddressSpace, Platform};
///
/// fn pages<P: Platform>(space: &AddressSpace<'_, P>) -> u64 {
///     space.resident().total()
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Resident {
    /// Anonymous memory, including copies of a file's pages (`RssAnon`).
    pub anonymous: u64,
    /// Pages of files (`RssFile`).
    pub file: u64,
    /// Pages of shared memory (`RssShmem`).
    pub shared: u64,
}

impl Resident {
    /// The numbers of mapped pages according to these counts.
    fn of(counts: &Counts) -> Self {
        // The thread that unmaps a page may count the page before the thread that mapped it does.
        let pages = |level: u64| (level as i64).max(0) as u64;
        Self {
            anonymous: pages(counts.anonymous_pages),
            file: pages(counts.file_pages),
            shared: pages(counts.shared_pages),
        }
    }

    /// The sum of all three (`VmRSS`).
    ///
    /// Context: any.
    pub fn total(&self) -> u64 {
        self.anonymous + self.file + self.shared
    }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// The resident memory of the address space. Operations count pages as they map and unmap them;
    /// the result may miss pages of running calls.
    ///
    /// Context: any. Complexity: linear in the number of CPUs that have entered. Acquires no lock.
    pub fn resident(&self) -> Resident {
        Resident::of(&self.counts())
    }
}
