//! A small machine on the heap, and the tests of this folder on it.
#![allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")]

extern crate std;

mod buddy;
mod front;
mod reserve;
mod slab;

use core::ptr::NonNull;
use std::alloc::{Layout, alloc, dealloc};
use std::sync::Mutex;
use std::vec::Vec;

use super::meta::MetaKind;
use super::{FrameRange, Frames};
use crate::addr::{Frame, Order, PAGE_SIZE};
use crate::arch::X86_64;
use crate::platform::{Cpu, CpuSet, Invalidation, Platform};
use crate::sync::{Interrupts, SpinLock};

std::thread_local! {
    /// The CPU of this thread.
    pub(crate) static CPU: core::cell::Cell<Cpu> = const { core::cell::Cell::new(Cpu(0)) };
}

/// A waiter for a spin lock lets other threads run.
pub(crate) enum Yielding {}

impl Interrupts for Yielding {
    type State = ();

    fn disable() {}

    fn restore((): ()) {}

    fn relax() {
        std::thread::yield_now();
    }
}

/// Memory of `count` frames from `first`, initially filled with garbage.
pub(crate) struct Machine {
    memory: NonNull<u8>,
    first: Frame,
    count: u32,
    /// The direct map shows frames from this number on one page too high.
    pub(crate) torn_at: Option<Frame>,
    /// The released blocks, in order.
    pub(crate) released: Mutex<Vec<(Frame, u32)>>,
}

// SAFETY: the tests use the memory as the platform's contract requires.
unsafe impl Send for Machine {}
// SAFETY: as above.
unsafe impl Sync for Machine {}

impl Machine {
    fn layout(count: u32) -> Layout {
        let page = PAGE_SIZE as usize;
        Layout::from_size_align((count as usize + 1) * page, page).unwrap()
    }

    pub(crate) fn new(first: u32, count: u32) -> Self {
        let layout = Self::layout(count);
        // SAFETY: the layout is not of size 0.
        let memory = NonNull::new(unsafe { alloc(layout) }).unwrap();
        // SAFETY: all of the memory was just allocated.
        unsafe { memory.write_bytes(0xa5, layout.size()) };
        Self { memory, first: Frame(first), count, torn_at: None, released: Mutex::default() }
    }

    /// All memory of the machine as one range.
    pub(crate) fn whole(&self) -> FrameRange {
        FrameRange { first: self.first, count: self.count }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.memory.as_ptr(), Self::layout(self.count)) };
    }
}

// SAFETY: 1. the direct map is one allocation that lives as long as the machine; if a test tears
// it, the core refuses it. 2. and 3. the machine has no TLB and no reader. 4. the tests use CPUs 0
// to 3. 5. The machine has no kernel root.
unsafe impl Platform for Machine {
    type Arch = X86_64;
    type Mutex = SpinLock<Yielding>;
    type SpinLock = SpinLock<Yielding>;

    fn direct_map(&self, frame: Frame) -> NonNull<u8> {
        assert!((self.first..self.first.plus(self.count)).contains(&frame), "{frame:?}");
        let torn = u32::from(self.torn_at.is_some_and(|at| frame >= at));
        let pages = (frame.0 - self.first.0 + torn) as usize;
        // SAFETY: the offset is at most `count` pages, and `layout` has one page more.
        unsafe { self.memory.add(pages * PAGE_SIZE as usize) }
    }

    fn zero(&self, first: Frame, count: u32) {
        // SAFETY: the frames are in the direct map (the last frame is requested only for its
        // check), and the caller owns them.
        unsafe { self.direct_map(first).write_bytes(0, count as usize * PAGE_SIZE as usize) };
        assert!(count == 0 || self.direct_map(first.plus(count - 1)) >= self.direct_map(first));
    }

    fn copy(&self, from: Frame, to: Frame, count: u32) {
        let (from, to) = (self.direct_map(from), self.direct_map(to));
        // SAFETY: the frames are in the direct map, and the caller owns them; they do not overlap.
        unsafe { from.copy_to_nonoverlapping(to, count as usize * PAGE_SIZE as usize) };
    }

    fn invalidate(&self, _root: Frame, _cpus: &CpuSet, _what: &Invalidation) {}

    fn invalidate_kernel(&self, _root: Frame, _what: &Invalidation) {}

    fn invalidate_local(&self, _root: Frame, _what: &Invalidation) {}

    fn publish_entries(&self) {}

    fn cpu(&self) -> Cpu {
        CPU.get()
    }

    fn relax(&self) {
        std::thread::yield_now();
    }

    fn enter_read(&self) {}

    fn leave_read(&self) {}

    fn synchronize(&self) {}

    fn frames_released(&self, first: Frame, count: u32) {
        self.released.lock().unwrap().push((first, count));
    }
}

/// The allocator of all `count` frames of a machine, from frame 0x100 on.
pub(crate) fn new_frames(count: u32) -> Frames<Machine> {
    let machine = Machine::new(0x100, count);
    let whole = machine.whole();
    // SAFETY: 1. the machine has no other user.
    unsafe { Frames::new(machine, &[whole]) }.unwrap()
}

/// All blocks of one kind.
pub(crate) fn blocks(frames: &Frames<Machine>, kind: MetaKind) -> Vec<(Frame, Order)> {
    let mut found = Vec::new();
    frames.for_each_block(|frame, order, is| {
        if is == kind {
            found.push((frame, order));
        }
    });
    found
}

/// Asserts that no block is allocated, lost or out of order.
#[track_caller]
pub(crate) fn assert_all_free(frames: &Frames<Machine>) {
    assert_eq!(frames.check_free_lists(), Ok(()));
    assert_eq!(frames.free_frame_count(), frames.total_frames());
    let free: u64 =
        blocks(frames, MetaKind::Free).iter().map(|(_, order)| u64::from(order.pages())).sum();
    assert_eq!(free, frames.total_frames());
    assert_eq!(frames.refused(), 0);
}

/// Frees a test's block.
pub(crate) fn free(frames: &Frames<Machine>, first: Frame, order: Order) {
    // SAFETY: 1. and 2. no code on the tests' machine uses the block, and the allocator refuses a
    // block that is not allocated.
    unsafe { frames.free(first, order) };
}
