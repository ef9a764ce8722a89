//! The kernel's own heap: a fixed share of memory, taken at boot.
//!
//! The collections of the Rust library cannot report that memory has run out. So every call that
//! allocates a lasting object calls [`room`] first, after its last sleep. The check keeps a margin
//! that no single call can exhaust and fails with `ENOMEM` when only the margin is left. A check
//! before a sleep would be useless, because other threads could take the same bytes before the
//! allocation.

use core::alloc::{GlobalAlloc, Layout};

use talc::TalcLock;
use talc::source::Manual;

use crate::arch;
use crate::boot::{Information, Stretch};
use crate::errno::Errno;

#[global_allocator]
static HEAP: Heap = Heap(TalcLock::new(Manual));

/// The allocator, with functions that are not inlined, because hundreds of places call them.
struct Heap(TalcLock<spin::Mutex<()>, Manual>);

// SAFETY: each call is forwarded, unchanged, to an allocator that obeys the trait.
unsafe impl GlobalAlloc for Heap {
    #[inline(never)]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's obligations are the same.
        unsafe { self.0.alloc(layout) }
    }

    #[inline(never)]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's obligations are the same.
        unsafe { self.0.dealloc(block, layout) }
    }

    #[inline(never)]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's obligations are the same.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    #[inline(never)]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's obligations are the same.
        unsafe { self.0.realloc(block, layout, size) }
    }
}

/// Bytes kept free for calls in progress.
const MARGIN: usize = 1 << 20;

/// The heap's share of memory, as a divisor; the result is between 8 and 64 MiB.
const SHARE: u64 = 16;

/// Takes the heap from the end of the largest free range. Returns the heap's range.
pub fn begin(information: &Information) -> Stretch {
    let mut ranges =
        [bindery::FrameRange { first: bindery::addr::Frame(0), count: 0 }; crate::boot::MAX_RANGES];
    let count = information.free_memory(Stretch::default(), &mut ranges);
    let all: u64 = ranges[..count].iter().map(|range| u64::from(range.count) << 12).sum();
    let size = (all / SHARE).clamp(8 << 20, 64 << 20) & !0xfff;
    let Some(largest) = ranges[..count].iter().max_by_key(|range| range.count) else {
        panic!("the boot loader reports no free memory");
    };
    let end = (u64::from(largest.first.0) + u64::from(largest.count)) << 12;
    assert!(
        u64::from(largest.count) << 12 > size,
        "the machine has too little memory for the kernel's heap: give it more (`--memory`)"
    );
    let taken = Stretch { start: end - size, end };
    // SAFETY: the stretch is free memory by the boot information, in the direct map, and kept out
    // of the core's memory (`memory::begin`).
    let claimed =
        unsafe { HEAP.0.lock().claim(arch::direct_map(taken.start).as_ptr(), size as usize) };
    assert!(claimed.is_some(), "the allocator cannot take the kernel's heap");
    taken
}

/// The largest block that a growing collection requests, in bytes. Smaller free pieces do not count
/// as free memory.
const LARGEST_GROWTH: usize = 128 << 10;

/// Fails if the heap cannot allocate `bytes` more while it keeps the margin, or has no free block
/// of that size.
#[inline(never)]
pub fn room(bytes: usize) -> Result<(), Errno> {
    let mut heap = HEAP.0.lock();
    if heap.counters().available_bytes < bytes.saturating_add(MARGIN) {
        return Err(Errno::ENOMEM);
    }
    let block = Layout::from_size_align(bytes.max(LARGEST_GROWTH), 4096);
    let block = block.map_err(|_| Errno::ENOMEM)?;
    // SAFETY: a layout of some size; the block came from this allocator.
    unsafe {
        let found = heap.allocate(block).ok_or(Errno::ENOMEM)?;
        heap.deallocate(found.as_ptr(), block);
    }
    Ok(())
}
