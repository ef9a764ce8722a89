//! The kernel's own mappings as a workload (`workload=kernel-map`). Before the first program
//! starts, each operation runs many times between marks for a tool that counts instructions. The
//! mappings are verified through the MMU.

use alloc::vec::Vec;

use bindery::addr::{Frame, Order, PAGE_SIZE, PhysAddr, VirtAddr};
use bindery::arch::MemoryType;
use bindery::{UnmapTime, VmallocOptions, VmapOptions};

use crate::memory::kernel_map;
use crate::{arch, log, memory_functions, options, process};

/// The repetitions of each measured operation; large ones have fewer.
const ITERATIONS: usize = 100;
const ITERATIONS_OF_LARGE: usize = 10;

const MIB: u64 = 1 << 20;

/// Pages of most operations: 1 MiB.
const PAGES: usize = 256;

/// A physical address above the memory of all machines.
const NOWHERE: u64 = 0x3_0000_0000;

/// The expected mapping of a page.
#[derive(Clone, Copy)]
enum Expected<'a> {
    /// Any memory.
    Memory(u64),
    /// These frames.
    Frames(&'a [Frame]),
    /// Addresses without memory: the first, and the size in bytes.
    Nowhere(PhysAddr, u64),
}

/// Runs the workload that the command line asks for, if any.
///
/// # Panics
/// If the workload is unknown, or an operation fails or returns a wrong result.
pub fn run() {
    match options::value("workload") {
        None => {}
        Some("kernel-map") => kernel_mappings(),
        Some("memory-functions") => memory_functions::verify(),
        Some(other) => {
            panic!("`workload={other}` is unknown: give kernel-map or memory-functions")
        }
    }
}

fn kernel_mappings() {
    vmalloc::<64, 65>("vmalloc 1 MiB", MIB, VmallocOptions::default(), ITERATIONS);
    vmalloc::<66, 67>("vmalloc 1 MiB, huge pages allowed", MIB, VmallocOptions::huge(), ITERATIONS);

    let pool = Pool::new(2 * PAGES as u64 * PAGE_SIZE, VmallocOptions::default());
    let scattered: Vec<_> = pool.frames.iter().copied().step_by(2).collect();
    vmap::<68, 69>("vmap 1 MiB, order 0", &scattered, 1);
    drop(pool);

    let pool = Pool::new(4 * MIB, VmallocOptions::huge());
    vmap::<70, 71>("vmap 1 MiB, order 4", &pool.pieces(4), 1 << 4);
    vmap::<72, 73>("vmap 1 MiB, order 8", &pool.pieces(8), 1 << 8);
    drop(pool);

    ioremap::<74, 75>("ioremap 1 MiB", NOWHERE);
    ioremap::<76, 77>("ioremap 1 MiB off 64 KiB", NOWHERE + (64 << 10));

    let options = VmallocOptions::huge();
    vmalloc::<78, 79>("vmalloc 16 MiB, huge pages allowed", 16 * MIB, options, ITERATIONS_OF_LARGE);

    if options::CHECK_AT_EXIT.load(core::sync::atomic::Ordering::Relaxed) {
        process::audit();
    }
}

fn vmalloc<const MAKE: u32, const UNMAKE: u32>(
    name: &str,
    size: u64,
    options: VmallocOptions,
    iterations: usize,
) {
    let make = || good(kernel_map().vmalloc(size, &options));
    // SAFETY: 1. `make` made it; 2. and 3. `measure` verifies its writes before, and nothing else
    // uses the memory.
    let unmake = |at| good(unsafe { kernel_map().vfree(at) });
    measure::<MAKE, UNMAKE>(name, iterations, make, unmake, Expected::Memory(size));
}

fn vmap<const MAKE: u32, const UNMAKE: u32>(name: &str, frames: &[Frame], piece: usize) {
    let runs = frames.chunk_by(|one, next| one.0 + 1 == next.0);
    assert!(frames.len() == PAGES && runs.into_iter().all(|run| run.len() == piece));
    let make = || good(kernel_map().vmap(frames, &VmapOptions::default()));
    // SAFETY: 1. `make` made it; 2. nothing accesses it.
    let unmake = |at| good(unsafe { kernel_map().vunmap(at, UnmapTime::Later) });
    measure::<MAKE, UNMAKE>(name, ITERATIONS, make, unmake, Expected::Frames(frames));
}

fn ioremap<const MAKE: u32, const UNMAKE: u32>(name: &str, from: u64) {
    let from = PhysAddr(from);
    let make = || good(kernel_map().ioremap(from, MIB, MemoryType::Device));
    // SAFETY: 1. `make` made it; 2. nothing accesses it.
    let unmake = |at| good(unsafe { kernel_map().iounmap(at) });
    measure::<MAKE, UNMAKE>(name, ITERATIONS, make, unmake, Expected::Nowhere(from, MIB));
}

/// Makes and unmakes mappings: once as a warm-up with verification, then repeatedly for the
/// measurement.
fn measure<const MAKE: u32, const UNMAKE: u32>(
    name: &str,
    iterations: usize,
    make: impl Fn() -> VirtAddr,
    unmake: impl Fn(VirtAddr),
    expected: Expected<'_>,
) {
    let first = make();
    verify(first, expected);
    unmake(first);
    let mut last = first;
    for _ in 0..iterations {
        arch::mark_begin::<MAKE>();
        last = make();
        arch::mark_end::<MAKE>();
        arch::mark_begin::<UNMAKE>();
        unmake(last);
        arch::mark_end::<UNMAKE>();
    }
    kernel_map().purge();
    for at in [first, last] {
        assert!(
            kernel_map().physical(at).is_none(),
            "{name}: {at} is mapped after it was unmapped"
        );
    }
    // Once more, at addresses that other mappings had.
    let again = make();
    verify(again, expected);
    unmake(again);
    log!("kernel-map: {name}: ok");
}

/// Verifies the mappings from `at` on: the kernel map reports the expected frame of each page, and
/// a page has the same memory here and in the direct map.
fn verify(at: VirtAddr, expected: Expected<'_>) {
    let size = match expected {
        Expected::Memory(size) | Expected::Nowhere(_, size) => size,
        Expected::Frames(frames) => frames.len() as u64 * PAGE_SIZE,
    };
    for offset in (0..size).step_by(PAGE_SIZE as usize) {
        let page = VirtAddr(at.0 + offset);
        let Some(to) = kernel_map().physical(page) else { panic!("{page} is not mapped") };
        match expected {
            Expected::Memory(_) => {}
            Expected::Frames(frames) => {
                let frame = frames[(offset / PAGE_SIZE) as usize];
                assert!(to == frame.start(), "{page} leads to {to:?}, not to {frame:?}");
            }
            Expected::Nowhere(from, _) => {
                assert!(to.0 == from.0 + offset, "{page} leads to {to:?}");
                // No device responds there.
                continue;
            }
        }
        let pattern = page.0 ^ to.0.rotate_left(32);
        let here = core::ptr::with_exposed_provenance_mut::<u64>(page.0 as usize);
        let there = arch::direct_map(to.0).cast::<u64>();
        // SAFETY: the frame was allocated for this workload and is mapped at both addresses.
        let read = unsafe {
            here.write_volatile(pattern);
            there.read_volatile()
        };
        assert!(read == pattern, "{page}: {pattern:#x} was written and {read:#x} is in memory");
    }
}

/// Memory whose frames have a second mapping.
struct Pool {
    at: VirtAddr,
    frames: Vec<Frame>,
}

impl Pool {
    fn new(size: u64, options: VmallocOptions) -> Self {
        let at = good(kernel_map().vmalloc(size, &options));
        let physical = |offset| kernel_map().physical(VirtAddr(at.0 + offset));
        let frames = (0..size).step_by(PAGE_SIZE as usize).filter_map(physical);
        Self { at, frames: frames.map(|at| Frame((at.0 / PAGE_SIZE) as u32)).collect() }
    }

    /// 1 MiB of aligned pieces of 2^`order` frames, no two of them adjacent.
    fn pieces(&self, order: u8) -> Vec<Frame> {
        let length = 1_usize << order;
        let is_aligned = |place: &usize| self.frames[*place].is_aligned(Order(order));
        let first = (0..length).find(is_aligned).unwrap_or(0);
        let pieces = self.frames[first..].chunks_exact(length).take(PAGES / length);
        pieces.rev().flatten().copied().collect()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: 1. the pool made it; 2. nothing accesses it; 3. the areas that mapped its frames
        // are unmapped.
        good(unsafe { kernel_map().vfree(self.at) });
    }
}

fn good<T>(result: Result<T, bindery::KernelMapError>) -> T {
    match result {
        Ok(value) => value,
        Err(problem) => panic!("a call of the kernel map failed: {problem}"),
    }
}
