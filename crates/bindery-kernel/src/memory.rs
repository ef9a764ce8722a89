//! The machine's [`Memory`] and [`KernelMap`], one each, and the kernel's own mappings.

use alloc::boxed::Box;
use core::fmt;
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::{AtomicU64, Ordering};

use bindery::addr::{Frame, PhysAddr, VirtAddr, VirtRange};
use bindery::arch::{MemoryType, Permissions};
use bindery::platform::Cpu;
use bindery::{
    AddressSpace, FrameRange, KernelAddress, KernelMap, Memory, Resolution, SizeMode,
    VmallocOptions,
};
use spin::Once;

use crate::arch;
use crate::boot::{Information, MAX_RANGES, Stretch};
use crate::errno::Errno;
use crate::platform::Machine;

/// An address space of a program.
pub type Space = AddressSpace<'static, Machine>;

/// The start of the kernel map on all architectures. The map covers exactly one entry of the root,
/// and no other mapping of the kernel is near.
pub const MAP_START: VirtAddr = VirtAddr(0xffff_c000_0000_0000);
/// The size of the kernel map in bytes.
const MAP_SIZE: u64 = 1 << 39;

/// Unmapped areas may hold one frame in this many before a purge flushes the TLBs.
const PURGE_SHARE: u64 = 256;

/// The number of free frames at the end of the boot.
static FREE_AT_BOOT: AtomicU64 = AtomicU64::new(0);

static MEMORY: Once<&'static Memory<Machine>> = Once::new();
static MAP: Once<&'static KernelMap<'static, Machine>> = Once::new();

/// Passes all free memory to the core and creates the kernel map.
pub fn begin(information: &Information, heap: Stretch) {
    let mut ranges = [FrameRange { first: Frame(0), count: 0 }; MAX_RANGES];
    let count = information.free_memory(heap, &mut ranges);
    // SAFETY: 1. the boot protocol calls this memory free, and the image, the heap and the
    // initramfs are excluded from it. 2. The boot tables reach it through only the direct map.
    let memory = match unsafe { Memory::new(Machine, &ranges[..count]) } {
        Ok(memory) => *MEMORY.call_once(|| Box::leak(Box::new(memory))),
        Err(problem) => panic!("the core cannot take the machine's memory: {problem}"),
    };
    // The initial value of `/sys/kernel/mm/transparent_hugepage/enabled`.
    memory.folio_policy().set_global(SizeMode::Never);
    let arena = VirtRange::from_len(MAP_START, MAP_SIZE).expect("the constants are a range");
    // SAFETY: 1. The root is the one that the CPUs have loaded for the kernel's addresses; the
    // direct map shows it, and it is never freed. 2. The boot code has left the entry of the arena
    // empty, no program has a root yet, and the root that other CPUs begin with (x86-64) is left
    // before they use anything in the arena. 3. The map is never dropped.
    let map = unsafe { KernelMap::with_root(memory, arch::own_root(), arena) };
    match map {
        Ok(map) => {
            let map = map.with_largest_leaf(arch::largest_leaf());
            map.set_purge_limit(memory.total_frames() / PURGE_SHARE);
            MAP.call_once(|| Box::leak(Box::new(map)))
        }
        Err(problem) => panic!("the kernel map cannot be made: {problem}"),
    };
}

/// Records the number of free frames. The same number must be free at the end, because the kernel
/// keeps the frames that it has taken until now.
pub fn boot_is_over() {
    FREE_AT_BOOT.store(free_frame_count(), Ordering::Relaxed);
}

/// Announces the first `count` CPUs to the core, so that each caches free frames and other
/// resources for itself. No other CPU is in the core yet. Their records are never freed, so they do
/// not count as leaked.
///
/// # Panics
/// If memory is short for the records, at boot.
pub fn announce_cpus(count: u16) {
    let before = free_frame_count();
    for cpu in 0..count {
        if let Err(problem) = memory().cpu_online(Cpu(cpu)) {
            panic!("CPU {cpu} cannot be announced to the core: {problem}");
        }
    }
    FREE_AT_BOOT.fetch_sub(before - free_frame_count(), Ordering::Relaxed);
}

/// The memory of the machine.
#[inline]
pub fn memory() -> &'static Memory<Machine> {
    // `begin` ran before anything else could use it.
    MEMORY.get().expect("memory is set up at boot")
}

/// The kernel's own mappings.
#[inline]
pub fn kernel_map() -> &'static KernelMap<'static, Machine> {
    MAP.get().expect("the kernel map is made at boot")
}

/// The number of leaked frames, once everything allocated after the boot is freed.
pub fn leaked_frames() -> i64 {
    FREE_AT_BOOT.load(Ordering::Relaxed) as i64 - free_frame_count() as i64
}

/// The free frames, including those in caches and those that wait for readers or a purge. The
/// kernel map's tables count as free, because the map may keep an empty table for the guard page
/// behind a lasting area. So does the huge zero page, which is never freed once it exists.
fn free_frame_count() -> u64 {
    kernel_map().purge();
    memory().drain_deferred();
    memory().trim();
    let counts = kernel_map().counts();
    let zeroes = memory().huge_zero_page().map_or(0, |frames| u64::from(frames.count));
    memory().free_frame_count() + counts.tables_allocated - counts.tables_freed + zeroes
}

/// Maps the registers of a device, permanently.
///
/// # Panics
/// If memory for the mapping is short, since boot cannot continue without the device.
pub fn map_device(from: u64, length: u64) -> *mut u8 {
    match kernel_map().ioremap(PhysAddr(from), length, MemoryType::Device) {
        Ok(at) => core::ptr::with_exposed_provenance_mut(at.0 as usize),
        Err(problem) => panic!("the device at {from:#x} cannot be mapped: {problem}"),
    }
}

/// As [`map_device`], for registers at any offset in a page.
pub fn map_registers(from: u64, length: u64) -> *mut u8 {
    let (start, end) = (from & !4095, (from + length).next_multiple_of(4096));
    map_device(start, end - start).wrapping_add((from - start) as usize)
}

/// Whether an access of the kernel that faulted at `address` may be repeated because the mapping
/// was changing.
pub fn is_resolved(address: u64, needed: Permissions) -> bool {
    let resolve = |map: &&KernelMap<'_, Machine>| map.resolve(VirtAddr(address), needed);
    MAP.get().map(resolve) == Some(Resolution::Retry)
}

/// A description of an address in the kernel map, for a message.
pub struct Explained(pub u64);

impl fmt::Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(address) = self;
        match MAP.get().map(|map| map.explain(VirtAddr(*address))) {
            None | Some(KernelAddress::Outside) => Ok(()),
            Some(KernelAddress::Free) => write!(f, "; {address:#x} belongs to no area"),
            Some(KernelAddress::Mapped { area, .. }) => write!(f, "; {address:#x} is in {area}"),
            Some(KernelAddress::Unmapped { area }) => {
                write!(f, "; {address:#x} is in {area}, which is not finished")
            }
            Some(KernelAddress::Guard { area }) => {
                write!(f, "; {address:#x} is in the guard page behind {area}")
            }
            Some(KernelAddress::Freed { area }) => {
                write!(f, "; {address:#x} is in {area}, which was freed")
            }
        }
    }
}

/// Memory of the kernel in whole pages (`vmalloc`). The pages directly before and after it are
/// unmapped.
///
/// The page in front is unmapped because each area of the kernel map, live or freed, ends with a
/// guard page. So the page in front of an area is another area's guard page, or free, or in front
/// of the arena. Nothing is mapped at free addresses, nor in the range of the preceding root entry.
pub struct Pages {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the value owns the memory, which is mapped on all CPUs.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Memory of `length` bytes, a multiple of the page size.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new(length: usize, options: &VmallocOptions) -> Result<Self, Errno> {
        let start = kernel_map().vmalloc(length as u64, options).map_err(|_| Errno::ENOMEM)?;
        let start = core::ptr::with_exposed_provenance_mut(start.0 as usize);
        NonNull::new(start).map(|start| Self { start, length }).ok_or(Errno::ENOMEM)
    }

    /// The address behind the last byte.
    pub fn end(&self) -> *mut u8 {
        // SAFETY: one past the end of the area.
        unsafe { self.start.as_ptr().add(self.length) }
    }

    /// Whether an address is in the unmapped page in front.
    pub fn is_right_in_front(&self, address: u64) -> bool {
        let start = self.start.as_ptr().addr() as u64;
        (start - 4096..start).contains(&address)
    }

    /// The bytes. Their initial content is undefined.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped to read and write until the drop, owned by the value, and any byte is a
        // valid `u8`.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }

    /// The same, as words.
    pub fn words(&mut self) -> &mut [u32] {
        // SAFETY: as for the bytes; pages are aligned, and all bits are words.
        unsafe { slice::from_raw_parts_mut(self.start.cast().as_ptr(), self.length / 4) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let start = VirtAddr(self.start.as_ptr().expose_provenance() as u64);
        // SAFETY: 1. made in `new`; 2. owned by the value, which is being dropped; 3. nothing else
        // refers to its frames.
        if let Err(problem) = unsafe { kernel_map().vfree(start) } {
            panic!("an area of the kernel map cannot be freed: {problem}");
        }
    }
}
