//! The addresses of the sequences: one region far from all other mappings of a process, with
//! prepared memory next to it.
//!
//! ```text
//! page   0         464   512   560              2048         2560         3072          4096
//!        |          | low (A)   |                 | high (B)                |             |
//!                   |     ^     |                 |            ^            |
//!                      table edge                          table edge
//! ```
//!
//! The low area is small and crosses the edge of two tables, so that calls overlap each other and
//! the edge. The high area is two whole tables. Calls that begin in either area end inside the
//! region.

/// The bytes of a page.
pub const PAGE: u64 = 4096;

/// The start of the region.
pub const REGION: u64 = 0x2000_0000_0000;

/// The pages of the region.
pub const REGION_PAGES: u64 = 4096;

/// The end of the region.
pub const REGION_END: u64 = REGION + REGION_PAGES * PAGE;

/// The first page and the size of the low area in pages.
pub const LOW: (u64, u64) = (464, 96);

/// The first page and the size of the high area in pages.
pub const HIGH: (u64, u64) = (2048, 1024);

/// The page at which the program break begins.
pub const BREAK: u64 = 536;

/// Memory for vectors next to the region, present on both sides. The memory is written before the
/// sequence begins, and no call changes it.
pub const SCRATCH: u64 = 0x1fff_0000_0000;

/// The pages of [`SCRATCH`].
pub const SCRATCH_PAGES: u64 = 4;

/// The address of a page of the region.
pub const fn page(number: u64) -> u64 {
    REGION + number * PAGE
}

/// The length of this number of pages.
pub const fn pages(count: u64) -> u64 {
    count * PAGE
}

/// Whether an address lies in the region.
pub fn in_region(at: u64) -> bool {
    (REGION..REGION_END).contains(&at)
}

/// No descriptor.
pub const NO_FILE: u64 = u64::MAX;

/// Three memory files, opened for reading and writing; the third cannot be sealed.
pub const FILES: [u64; 3] = [200, 201, 202];

/// A fourth file, opened for reading.
pub const READ_ONLY: u64 = 203;

/// The fourth file, opened for writing.
pub const WRITE_ONLY: u64 = 204;

/// Each file once, by a descriptor for reading.
pub const ALL_FILES: [u64; 4] = [FILES[0], FILES[1], FILES[2], READ_ONLY];

/// A descriptor that is not open.
pub const CLOSED: u64 = 205;

/// `/dev/zero`, opened for reading and writing, and for reading.
pub const ZEROES: [u64; 2] = [207, 208];

/// A userfaultfd of the first process, before `UFFDIO_API`.
pub const USERFAULTFD: u64 = 209;

/// The initial process of a sequence.
pub const FIRST_PROCESS: u64 = 206;
