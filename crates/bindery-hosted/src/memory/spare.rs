//! Regions for physical memory, including those of dropped machines.
//!
//! A test creates thousands of small machines. The host would clear the memory of each machine page
//! by page at the first access and free it at the end, which takes a third of a short test's time.
//! So small regions are kept and reused uncleared.

use std::ptr::{self, NonNull};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// The alignment of a region, which allows the host to use huge pages for huge folios, too.
const ALIGNMENT: usize = 2 << 20;

/// The size of the largest region that is kept, in bytes.
const LARGEST: usize = 64 << 20;

/// The number of regions that are kept: a few for each thread of a test program.
const MOST: usize = 8;

static SPARE: Mutex<Vec<Region>> = Mutex::new(Vec::new());

/// A mapping of the process, readable and writable, private and anonymous.
#[derive(Debug)]
pub(super) struct Region {
    mapping: *mut u8,
    mapping_len: usize,
    /// Aligned to [`ALIGNMENT`], inside the mapping.
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the fields are addresses and numbers; only `DirectMap` accesses the memory behind them,
// and documents how it is shared.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// A new region of zeroes.
    pub(super) fn new(bytes: usize) -> Self {
        let mapping_len = bytes + ALIGNMENT;
        // SAFETY: a null hint lets the kernel choose unmapped addresses.
        let mapping = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                mapping_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let mapping = mapping.expect("reserving the machine's physical memory").cast::<u8>();
        let start = mapping.wrapping_add(mapping.align_offset(ALIGNMENT));
        let start = NonNull::new(start).expect("mmap never maps address 0 without a hint");
        Self { mapping, mapping_len, start, bytes }
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this address and length and is unmapped once,
        // here, by its only owner.
        let unmapped = unsafe { munmap(self.mapping.cast(), self.mapping_len) };
        unmapped.expect("unmapping the machine's physical memory");
    }
}

/// A region of `bytes` bytes with undefined content: the one kept last, or a new one.
pub(super) fn take(bytes: usize) -> Region {
    let mut kept = kept();
    let found = kept.iter().rposition(|region| region.bytes == bytes);
    let found = found.map(|at| kept.remove(at));
    drop(kept);
    found.unwrap_or_else(|| Region::new(bytes))
}

/// Keeps a region that no machine uses. If the list is full, it replaces the oldest region.
pub(super) fn keep(region: Region) {
    if region.bytes > LARGEST {
        return;
    }
    let mut kept = kept();
    let oldest = (kept.len() == MOST).then(|| kept.remove(0));
    kept.push(region);
    drop(kept);
    drop(oldest);
}

fn kept() -> MutexGuard<'static, Vec<Region>> {
    // A panic leaves the list consistent, because only single calls of `Vec` change it.
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A length that no other test uses.
    const BYTES: usize = 3 * 4096;

    #[test]
    fn a_region_of_equal_length_is_reused_unchanged() {
        let first = take(BYTES);
        let start = first.start();
        // SAFETY: the region is readable and writable, and this test owns it.
        unsafe { start.write(7) };
        keep(first);
        let again = take(BYTES);
        assert_eq!(again.start(), start);
        // SAFETY: as above.
        assert_eq!(unsafe { again.start().read() }, 7);
        assert_ne!(take(BYTES + 4096).start(), start);
    }

    #[test]
    fn a_large_region_is_given_back() {
        keep(Region::new(LARGEST + 4096));
        assert!(kept().iter().all(|region| region.bytes <= LARGEST));
    }
}
