//! A machine of two CPUs that share nothing except memory, so each conflicting line belongs to the
//! core.

use std::alloc::{Layout, alloc_zeroed};
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bindery::addr::{Frame, PAGE_SHIFT, PAGE_SIZE};
use bindery::arch::X86_64;
use bindery::platform::{Cpu, CpuSet, GracePeriod, Invalidation};
use bindery::sync::SpinLock;
use bindery::{FrameRange, Platform};

/// The frames of the machine: 288 MiB, so that a 128th of them, without their metadata, is at least
/// 2 MiB, and each CPU may keep a block of that size.
pub const FRAMES: FrameRange = FrameRange { first: Frame(0x8_0000), count: 288 << 8 };

/// Data in its own pair of cache lines, since a CPU fetches lines in pairs.
#[repr(align(128))]
pub struct Apart<T>(pub T);

/// The number of completed steps. The CPUs alternate, and no read section lasts longer than a step,
/// so the number shows which grace periods have passed. It changes only between operations.
static STEPS: Apart<AtomicU64> = Apart(AtomicU64::new(0));
/// Whether the other CPU counts as a reader until the end of its next step.
static READERS: Apart<AtomicBool> = Apart(AtomicBool::new(false));

thread_local! {
    static CPU: Cell<u16> = const { Cell::new(0) };
}

/// Makes the running thread CPU 0 or 1.
pub fn become_cpu(number: u16) {
    CPU.set(number);
}

/// Ends a step of the running CPU.
pub fn end_step() {
    STEPS.0.fetch_add(1, Ordering::AcqRel);
}

/// Sets whether the other CPU counts as a reader until the end of its next step. If it does not,
/// every grace period ends at once.
pub fn set_readers(readers: bool) {
    READERS.0.store(readers, Ordering::Relaxed);
}

/// The machine. Its CPUs alternate, so no lock is ever contended.
pub struct TwoCpus {
    /// The address of the first frame.
    start: NonNull<u8>,
}

// SAFETY: `TwoCpus` holds only the address of memory that is never freed.
unsafe impl Send for TwoCpus {}
// SAFETY: as above.
unsafe impl Sync for TwoCpus {}

impl TwoCpus {
    /// A machine with its own memory, which is never freed.
    pub fn new() -> Self {
        let bytes = (FRAMES.count as usize) << PAGE_SHIFT;
        let layout = Layout::from_size_align(bytes, 2 << 20).expect("2 MiB is a power of two");
        // SAFETY: the size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        Self { start: NonNull::new(start).expect("288 MiB are available") }
    }

    /// The addresses of the frames: the first, and the one after the last.
    pub fn frames(&self) -> [usize; 2] {
        let start = self.start.as_ptr() as usize;
        [start, start + ((FRAMES.count as usize) << PAGE_SHIFT)]
    }
}

// SAFETY: 1. each frame is 4,096 bytes of one allocation, which is never freed. 2. No code runs by
// the tables, so no TLB holds a translation. 3. Steps alternate and a section ends in its step, so
// at most one section is open, the caller's own. 4. A thread is CPU 0 or 1. 5. The kernel has no
// root.
unsafe impl Platform for TwoCpus {
    type Arch = X86_64<4>;
    type Mutex = SpinLock;
    type SpinLock = SpinLock;

    #[inline]
    fn direct_map(&self, frame: Frame) -> NonNull<u8> {
        let offset = (frame.0 - FRAMES.first.0) as usize * PAGE_SIZE as usize;
        // SAFETY: the core asks for frames of the machine, which the allocation holds.
        unsafe { self.start.add(offset) }
    }

    fn zero(&self, first: Frame, count: u32) {
        // SAFETY: the core owns the frames, which are consecutive in the allocation.
        unsafe { self.direct_map(first).write_bytes(0, (count as usize) << PAGE_SHIFT) }
    }

    fn copy(&self, from: Frame, to: Frame, count: u32) {
        let bytes = (count as usize) << PAGE_SHIFT;
        // SAFETY: as above; the core's frames do not overlap.
        unsafe { self.direct_map(from).copy_to_nonoverlapping(self.direct_map(to), bytes) }
    }

    fn invalidate(&self, _: Frame, _: &CpuSet, _: &Invalidation) {}

    fn invalidate_local(&self, _: Frame, _: &Invalidation) {}

    fn invalidate_kernel(&self, _: Frame, _: &Invalidation) {}

    fn publish_entries(&self) {}

    fn cpu(&self) -> Cpu {
        Cpu(CPU.get())
    }

    fn relax(&self) {
        panic!("the CPUs take turns, and a lock is taken");
    }

    fn enter_read(&self) {}

    fn leave_read(&self) {}

    fn synchronize(&self) {}

    fn grace_period(&self) -> GracePeriod {
        // The caller's step and the other CPU's next step must complete.
        GracePeriod(STEPS.0.load(Ordering::Acquire) + 2)
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        !READERS.0.load(Ordering::Relaxed) || STEPS.0.load(Ordering::Acquire) >= period.0
    }
}
