//! `/proc/self/clear_refs`: clears the record of the pages that were used or written.
//!
//! A program tracks its writes with two files:
//!
//! ```text
//! clear_refs <- 4    clears the soft-dirty bit of every page and mapping, and write-protects pages
//! (the program runs) the first store to each page faults; the fault records it and allows writes
//! pagemap            bit 55: written since
//! ```
//!
//! A write to a huge leaf marks the whole leaf; a write to a contiguous run marks one page. New
//! mappings, and pages created by a fault, count as written.

use bindery::{AddressSpace, Errno, Operation, Platform};

/// A request written to `/proc/self/clear_refs`.
///
/// ```
/// use bindery_linux::proc::ClearRefs;
///
/// assert_eq!(ClearRefs::parse("4\n"), Ok(ClearRefs::SoftDirty));
/// assert!(ClearRefs::parse("6").is_err());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub enum ClearRefs {
    /// All pages count as not used (1).
    All = 1,
    /// Pages of anonymous mappings count as not used (2).
    Anonymous = 2,
    /// Pages of mappings with an object count as not used: files and shared memory (3).
    Mapped = 3,
    /// All pages count as not written (4).
    SoftDirty = 4,
    /// The peak of resident memory becomes the current value (5).
    PeakResident = 5,
}

impl ClearRefs {
    /// Parses the text that a program wrote to the file: a number, optionally surrounded by white
    /// space.
    ///
    /// Context: any.
    ///
    /// # Errors
    /// [`Errno::EINVAL`] for text that is not a number from 1 to 5.
    pub fn parse(text: &str) -> Result<Self, Errno> {
        match text.trim().parse() {
            Ok(number) => Self::from_number(number),
            Err(_) => Err(Errno::EINVAL),
        }
    }

    /// The request with this number.
    ///
    /// Context: any.
    ///
    /// # Errors
    /// [`Errno::EINVAL`] for numbers other than 1 to 5.
    pub fn from_number(number: i32) -> Result<Self, Errno> {
        match number {
            1 => Ok(Self::All),
            2 => Ok(Self::Anonymous),
            3 => Ok(Self::Mapped),
            4 => Ok(Self::SoftDirty),
            5 => Ok(Self::PeakResident),
            _ => Err(Errno::EINVAL),
        }
    }
}

/// Performs a write to `/proc/self/clear_refs`. A concurrent store of another thread may count as a
/// store before the call.
///
/// Context: may sleep. Complexity: linear in the entries of all affected mappings, with the address
/// space's mutex held, as on Linux; one invalidation.
///
/// # Errors
/// [`Errno::ENOMEM`] if a huge leaf that two mappings share cannot be split. The mappings before
/// the leaf are cleared.
pub fn clear_refs<P: Platform>(space: &AddressSpace<'_, P>, what: ClearRefs) -> Result<(), Errno> {
    let done = match what {
        ClearRefs::All => space.clear_accessed(|_| true),
        ClearRefs::Anonymous => space.clear_accessed(|mapping| mapping.object.is_none()),
        ClearRefs::Mapped => space.clear_accessed(|mapping| mapping.object.is_some()),
        ClearRefs::SoftDirty => space.clear_soft_dirty(),
        ClearRefs::PeakResident => {
            space.reset_resident_peak();
            Ok(())
        }
    };
    done.map_err(|error| error.errno(Operation::Madvise))
}
