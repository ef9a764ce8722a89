//! The kernel's own heap: a fixed share of memory, taken at boot.
//!
//! The collections of the Rust library cannot report that memory has run out. So every call that
//! allocates a lasting object calls [`room`] first, after its last sleep. The check keeps a margin
//! that no single call can exhaust and fails with `ENOMEM` when only the margin is left. A check
//! before a sleep would be useless, because other threads could take the same bytes before the
//! allocation.
//!
//! `recent` keeps the blocks that each CPU has freed last.

mod recent;

use core::alloc::{GlobalAlloc, Layout};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use talc::TalcLock;
use talc::base::Talc;
use talc::base::binning::DefaultBinning;
use talc::source::Manual;

use spin::RelaxStrategy;
use spin::mutex::SpinMutex;

use crate::boot::{Information, Stretch};
use crate::errno::Errno;
use crate::{arch, sync};
use recent::Block;

#[global_allocator]
static HEAP: Heap = Heap(TalcLock::new(Manual));

/// The allocator, with functions that are not inlined, because hundreds of places call them.
struct Heap(TalcLock<SpinMutex<(), Pause>, Manual>);

/// A wait for the heap, in which the CPU answers others.
struct Pause;

impl RelaxStrategy for Pause {
    fn relax() {
        sync::relax();
    }
}

/// The free bytes of the heap, without those in [`recent`], on a cache line that only changes of
/// the heap write: [`room`] reads it without the heap's lock.
static FREE: Free = Free(AtomicUsize::new(0));

#[repr(align(128))]
struct Free(AtomicUsize);

/// A free block of [`LARGEST_GROWTH`], for an allocation that would fail; null if it is used or was
/// never taken. With it, [`room`] need not search the heap.
static RESERVE: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());

impl Heap {
    fn with<T>(&self, work: impl FnOnce(&mut Talc<Manual, DefaultBinning>) -> T) -> T {
        let mut heap = self.0.lock();
        let outcome = work(&mut heap);
        FREE.0.store(heap.counters().available_bytes, Ordering::Relaxed);
        outcome
    }

    /// Returns the blocks that CPUs have kept to the heap. Returns whether there were any.
    fn collect(&self) -> bool {
        // SAFETY: each block came from this heap with its layout, and has no other owner.
        recent::drain(|block| unsafe { self.free(block) })
    }

    /// Returns the reserve to the heap. Returns whether there was one.
    fn use_reserve(&self) -> bool {
        let reserve = NonNull::new(RESERVE.swap(ptr::null_mut(), Ordering::Acquire));
        // SAFETY: the block came from this heap with the layout, and the exchange has taken it.
        reserve
            .inspect(|start| unsafe { self.free(Block { start: *start, layout: GROWTH }) })
            .is_some()
    }

    /// # Safety
    /// 1. As for [`GlobalAlloc::alloc`].
    unsafe fn allocate(&self, layout: Layout) -> Option<NonNull<u8>> {
        // SAFETY: obligation 1.
        let attempt = || self.with(|heap| unsafe { heap.allocate(layout) });
        attempt()
            .or_else(|| if self.collect() { attempt() } else { None })
            .or_else(|| if self.use_reserve() { attempt() } else { None })
    }

    /// # Safety
    /// 1. The block came from this heap with its layout, and has no other owner.
    unsafe fn free(&self, Block { start, layout }: Block) {
        // SAFETY: obligation 1.
        self.with(|heap| unsafe { heap.deallocate(start.as_ptr(), layout) });
    }
}

// SAFETY: each block comes from an allocator that obeys the trait, and is reused before it is freed
// only for the layout that it was allocated with.
unsafe impl GlobalAlloc for Heap {
    #[inline(never)]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match recent::take(layout) {
            Some(block) => block.as_ptr(),
            // SAFETY: 1. the caller's obligations are the same.
            None => unsafe { self.allocate(layout) }.map_or(ptr::null_mut(), NonNull::as_ptr),
        }
    }

    #[inline(never)]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller has the block from this allocator, so it is not null.
        let start = unsafe { NonNull::new_unchecked(block) };
        // SAFETY: 1. each block was allocated with its layout, and the caller that freed it has
        // given it up.
        recent::put(Block { start, layout }, |block| unsafe { self.free(block) });
    }

    #[inline(never)]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's obligations are the same.
        let block = unsafe { self.alloc(layout) };
        if !block.is_null() {
            // SAFETY: the block is new and has this size.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    #[inline(never)]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        loop {
            // SAFETY: the caller's obligations are the same; a failed attempt leaves the block as
            // it was.
            let grown = unsafe { self.0.realloc(block, layout, size) };
            self.with(|_| {});
            if !grown.is_null() || !self.collect() && !self.use_reserve() {
                return grown;
            }
        }
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
    let claimed = HEAP
        .with(|heap| unsafe { heap.claim(arch::direct_map(taken.start).as_ptr(), size as usize) });
    assert!(claimed.is_some(), "the allocator cannot take the kernel's heap");
    taken
}

/// The largest block that a growing collection requests, in bytes. Smaller free pieces do not count
/// as free memory.
const LARGEST_GROWTH: usize = 128 << 10;

const GROWTH: Layout = match Layout::from_size_align(LARGEST_GROWTH, 4096) {
    Ok(layout) => layout,
    Err(_) => unreachable!(),
};

/// Fails if the heap cannot allocate `bytes` more while it keeps the margin, or has no free block
/// of that size.
#[inline(never)]
pub fn room(bytes: usize) -> Result<(), Errno> {
    let has_bytes = || FREE.0.load(Ordering::Relaxed) >= bytes.saturating_add(MARGIN);
    let is_reserved = bytes <= LARGEST_GROWTH && !RESERVE.load(Ordering::Relaxed).is_null();
    if is_reserved && has_bytes() {
        return Ok(());
    }
    let found =
        || has_bytes() && if bytes <= LARGEST_GROWTH { reserve() } else { has_block(bytes) };
    if found() || HEAP.collect() && found() { Ok(()) } else { Err(Errno::ENOMEM) }
}

/// Takes the reserve, unless it is there. Returns whether it is.
#[cold]
fn reserve() -> bool {
    // SAFETY: a layout of some size.
    let taken = HEAP.with(|heap| unsafe { heap.allocate(GROWTH) });
    let Some(taken) = taken else { return !RESERVE.load(Ordering::Relaxed).is_null() };
    let null = ptr::null_mut();
    let (success, failure) = (Ordering::Release, Ordering::Relaxed);
    if RESERVE.compare_exchange(null, taken.as_ptr(), success, failure).is_err() {
        // SAFETY: 1. the block above, which no other code knows.
        unsafe { HEAP.free(Block { start: taken, layout: GROWTH }) };
    }
    true
}

/// Whether the heap has a free block of this size.
#[cold]
fn has_block(bytes: usize) -> bool {
    let Ok(layout) = Layout::from_size_align(bytes, 4096) else { return false };
    // SAFETY: a layout of some size; the block came from this allocator.
    HEAP.with(|heap| unsafe {
        let found = heap.allocate(layout);
        found.inspect(|found| heap.deallocate(found.as_ptr(), layout)).is_some()
    })
}
