//! A swap device without a queue: each slot has bytes of its own, which a transfer copies at once.

use std::ptr::NonNull;

use bindery::addr::PAGE_SIZE;
use bindery::platform::Platform as _;
use bindery::{Memory, SwapDevice, SwapOperation, SwapRequest};

use crate::platform::TwoCpus;

/// The number of slots.
const SLOTS: usize = 4096;

/// The bytes of all slots.
pub struct Copies {
    start: NonNull<u8>,
}

// SAFETY: `Copies` holds only the address of memory that is never freed.
unsafe impl Send for Copies {}
// SAFETY: as above; the core has at most one transfer of a slot at a time.
unsafe impl Sync for Copies {}

impl Copies {
    /// A device whose slots are all free; the device itself is leaked.
    pub fn leaked() -> &'static Self {
        let slots = Vec::leak(vec![0_u8; SLOTS * PAGE_SIZE as usize]);
        Box::leak(Box::new(Self { start: NonNull::from(slots).cast() }))
    }
}

impl SwapDevice<TwoCpus> for Copies {
    fn slots(&self) -> u64 {
        SLOTS as u64
    }

    fn is_synchronous(&self) -> bool {
        true
    }

    fn submit(&self, memory: &Memory<TwoCpus>, request: SwapRequest) {
        let bytes = request.pages() as usize * PAGE_SIZE as usize;
        let frames = memory.platform().direct_map(request.frame());
        let first = request.slot() as usize * PAGE_SIZE as usize;
        assert!(first + bytes <= SLOTS * PAGE_SIZE as usize);
        // SAFETY: the slots were tested; the device owns the frames until the request completes.
        unsafe {
            let slots = self.start.add(first);
            match request.operation() {
                SwapOperation::Read => slots.copy_to_nonoverlapping(frames, bytes),
                SwapOperation::Write => frames.copy_to_nonoverlapping(slots, bytes),
            }
        }
        memory.complete_swap_request(request, Ok(()));
    }
}
