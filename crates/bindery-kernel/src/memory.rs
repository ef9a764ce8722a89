//! The one [`Memory`] of the machine.

use alloc::boxed::Box;
use core::sync::atomic::{AtomicU64, Ordering};

use bindery::addr::Frame;
use bindery::{AddressSpace, FrameRange, Memory};
use spin::Once;

use crate::boot::{Information, MAX_RANGES, Stretch};
use crate::platform::Machine;

/// An address space of a program.
pub type Space = AddressSpace<'static, Machine>;

/// Frames that were free before anything was made of them.
static FREE_AT_BOOT: AtomicU64 = AtomicU64::new(0);

static MEMORY: Once<&'static Memory<Machine>> = Once::new();

/// Hands all free memory to the core.
pub fn begin(information: &Information, heap: Stretch) {
    let mut ranges = [FrameRange { first: Frame(0), count: 0 }; MAX_RANGES];
    let count = information.free_memory(heap, &mut ranges);
    match Memory::new(Machine, &ranges[..count]) {
        Ok(memory) => {
            FREE_AT_BOOT.store(memory.free_frames(), Ordering::Relaxed);
            MEMORY.call_once(|| Box::leak(Box::new(memory)))
        }
        Err(problem) => panic!("the core refuses the machine's memory: {problem}"),
    };
}

/// The memory of the machine.
#[inline]
pub fn memory() -> &'static Memory<Machine> {
    // `begin` ran before anything else could ask.
    MEMORY.get().expect("memory is set up at boot")
}

/// Frames that were free before anything was made of them: as many must be free at the end.
pub fn free_at_boot() -> u64 {
    FREE_AT_BOOT.load(Ordering::Relaxed)
}
