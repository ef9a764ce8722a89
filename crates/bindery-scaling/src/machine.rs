//! The machine of the core: memory of the process, and a CPU for each worker.

use std::alloc::{Layout, alloc_zeroed};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use bindery::addr::{Frame, PAGE_SHIFT, PAGE_SIZE};
use bindery::arch::X86_64;
use bindery::platform::{Cpu, CpuSet, GracePeriod, Invalidation};
use bindery::sync::RawLock;
use bindery::{FrameRange, Memory, Overcommit, Platform, SizeMode};
use nix::sys::mman::{MmapAdvise, madvise};

use crate::Problem;
use crate::grace::Sections;

/// The CPUs that the core can address.
pub const MAX_CPUS: u16 = bindery::platform::MAX_CPUS as u16;

/// The first frame of a machine.
const FIRST: Frame = Frame(0x8_0000);
/// Frames for each CPU: 256 MiB. The core caches a 64th of the memory in front of the allocator,
/// with an upper limit of 1,024 frames per CPU, so each CPU reaches the limit as on any larger
/// machine. With fewer frames, the larger operations would exchange frames with the allocator.
const FRAMES_OF_A_CPU: u32 = 256 << 8;

thread_local! {
    static CPU: Cell<u16> = const { Cell::new(0) };
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// A machine whose locks are of type `L`. No code runs under its tables, so it has no TLBs.
pub struct Machine<L> {
    /// The address of the first frame.
    start: NonNull<u8>,
    cpus: u16,
    sections: Sections,
    locks: PhantomData<fn() -> L>,
}

// SAFETY: the pointer is the address of memory that is never freed; the core synchronizes its use.
unsafe impl<L> Send for Machine<L> {}
// SAFETY: as above.
unsafe impl<L> Sync for Machine<L> {}

/// A memory with these CPUs online and only base pages. It is never freed.
///
/// # Errors
/// If the host has too little memory.
pub fn memory<L: RawLock + 'static>(cpus: &[u16]) -> Result<&'static Memory<Machine<L>>, Problem> {
    let frames = FrameRange { first: FIRST, count: FRAMES_OF_A_CPU * cpus.len() as u32 };
    let end = cpus.iter().max().map_or(0, |last| last + 1);
    let machine = Machine::new(frames, end)?;
    // SAFETY: the frames are the machine's, and no other code uses them.
    let memory = unsafe { Memory::new(machine, &[frames]) };
    let memory = memory
        .map_err(|error| Problem(format!("the machine's memory cannot be set up: {error}")))?;
    let memory: &'static _ = Box::leak(Box::new(memory));
    for cpu in cpus {
        memory
            .cpu_online(Cpu(*cpu))
            .map_err(|error| Problem(format!("CPU {cpu} cannot be brought online: {error}")))?;
    }
    memory.commitment().set_mode(Overcommit::Always);
    memory.folio_policy().set_global(SizeMode::Never);
    Ok(memory)
}

/// Runs `work` on a CPU of the machine.
///
/// # Panics
/// If the machine lacks the CPU, or another thread occupies it.
pub fn on_cpu<L, R>(machine: &Machine<L>, cpu: u16, work: impl FnOnce() -> R) -> R {
    assert!(cpu < machine.cpus, "CPU {cpu} of {}", machine.cpus);
    let taken = machine.sections.set_running(cpu, true);
    assert!(!taken, "two threads run as CPU {cpu}");
    let before = CPU.replace(cpu);
    let result = work();
    CPU.set(before);
    machine.sections.set_running(cpu, false);
    result
}

impl<L> Machine<L> {
    /// Runs `wait` while the CPU counts as idle, so grace periods do not wait for the CPU.
    ///
    /// # Safety
    /// The caller is in no read section, and `wait` enters none.
    pub unsafe fn while_idle(&self, wait: impl FnOnce()) {
        let cpu = CPU.get();
        self.sections.set_running(cpu, false);
        wait();
        self.sections.set_running(cpu, true);
    }

    fn new(frames: FrameRange, cpus: u16) -> Result<Self, Problem> {
        let bytes = (frames.count as usize) << PAGE_SHIFT;
        let layout = Layout::from_size_align(bytes, 2 << 20);
        let layout = layout.map_err(|error| Problem(error.to_string()))?;
        // SAFETY: the size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).ok_or_else(|| {
            Problem(format!(
                "the host cannot allocate {bytes} bytes for the machine; give fewer CPUs"
            ))
        })?;
        // The control measurement has several memories. Without large pages of the host, they would
        // differ in misses of the host's TLBs. The host may have no large pages. SAFETY: the
        // content stays as it is.
        let _advised = unsafe { madvise(start.cast(), bytes, MmapAdvise::MADV_HUGEPAGE) };
        // Touches the memory here, because the host's first-touch cost would count as the core's.
        // SAFETY: these are the bytes of the allocation, which no other code knows.
        unsafe { start.write_bytes(1, bytes) };
        Ok(Self { start, cpus, sections: Sections::new(cpus), locks: PhantomData })
    }
}

// SAFETY: 1. each frame is 4,096 bytes of one allocation, which is never freed. 2. No code runs
// under the tables, so no TLB holds a translation. 3. `Sections` counts read sections. 4. `on_cpu`
// gives each worker its own CPU among those that `memory` puts online, and the main thread, as CPU
// 0, makes its calls before and after the workers run. 5. The kernel has no root.
unsafe impl<L: RawLock + 'static> Platform for Machine<L> {
    type Arch = X86_64<4>;
    type Mutex = L;
    type SpinLock = L;

    #[inline]
    fn direct_map(&self, frame: Frame) -> NonNull<u8> {
        let offset = (frame.0 - FIRST.0) as usize * PAGE_SIZE as usize;
        // SAFETY: the core passes only frames of the machine, and the allocation contains all of
        // them.
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

    #[inline]
    fn cpu(&self) -> Cpu {
        Cpu(CPU.get())
    }

    fn relax(&self) {
        std::hint::spin_loop();
    }

    #[inline]
    fn enter_read(&self) {
        DEPTH.set(DEPTH.get() + 1);
    }

    #[inline]
    fn leave_read(&self) {
        let depth = DEPTH.get() - 1;
        DEPTH.set(depth);
        if depth == 0 {
            self.sections.leave(CPU.get());
        }
    }

    /// The caller may wait for a thread that itself waits for a grace period. The caller spins on
    /// its CPU, because a sample in which a thread sleeps would be left out.
    fn park(&self, word: &AtomicU32, expected: u32) {
        let wait = || {
            while word.load(Ordering::Acquire) == expected {
                std::hint::spin_loop();
            }
        };
        // SAFETY: the core parks outside of read sections, and the loop enters none.
        unsafe { self.while_idle(wait) }
    }

    fn synchronize(&self) {
        let period = self.sections.period();
        let wait = || {
            while !self.sections.has_passed(period) {
                self.sections.advance();
                std::hint::spin_loop();
            }
        };
        // SAFETY: the core waits for sections outside of its own, and the loop enters none.
        unsafe { self.while_idle(wait) }
    }

    fn grace_period(&self) -> GracePeriod {
        GracePeriod(self.sections.period())
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        self.sections.has_passed(period.0)
    }
}
