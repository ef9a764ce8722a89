//! A swap device whose requests complete on the test's command.

use std::collections::HashMap;
use std::sync::Mutex;

use bindery::addr::PAGE_SIZE;
use bindery::{Memory, Platform, SwapDevice, SwapOperation, SwapRequest};
use bindery_hosted::Walk;

use super::stepped::Stepped;

const PAGE: usize = PAGE_SIZE as usize;

/// Slots of the device.
const SLOTS: u64 = 1024;

/// The device. Pages may change during a write, so a write fault can reuse a folio under writeback.
#[derive(Default)]
pub struct LateDevice {
    waiting: Mutex<Vec<SwapRequest>>,
    slots: Mutex<HashMap<u64, Vec<u8>>>,
}

impl LateDevice {
    /// Completes all pending requests. Returns whether there were any.
    pub fn complete<A: Walk>(&self, memory: &Memory<Stepped<A>>) -> bool {
        let requests = std::mem::take(&mut *self.waiting.lock().unwrap());
        let any = !requests.is_empty();
        for request in requests {
            let mut slots = self.slots.lock().unwrap();
            for page in 0..request.pages() {
                let slot = request.slot() + u64::from(page);
                let frame = memory.platform().direct_map(request.frame().plus(page));
                let bytes = slots.entry(slot).or_insert_with(|| vec![0; PAGE]);
                match request.operation() {
                    // SAFETY: the request owns the frame until it completes; a concurrent program
                    // writes to the frame only by atomics, and this read is atomic too.
                    SwapOperation::Write => unsafe {
                        memory.platform().read_bytes(frame, bytes);
                    },
                    // SAFETY: as above, and no other code accesses the frame before the read
                    // completes.
                    SwapOperation::Read => unsafe {
                        memory.platform().write_bytes(frame, bytes);
                    },
                }
            }
            drop(slots);
            memory.complete_swap_request(request, Ok(()));
        }
        any
    }
}

impl<A: Walk> SwapDevice<Stepped<A>> for LateDevice {
    fn slots(&self) -> u64 {
        SLOTS
    }

    fn needs_stable_pages(&self) -> bool {
        false
    }

    fn submit(&self, _memory: &Memory<Stepped<A>>, request: SwapRequest) {
        self.waiting.lock().unwrap().push(request);
    }
}
