//! Discards of free slots on devices (Linux: `SWAP_FLAG_DISCARD`).
//!
//! Slots are freed under spin locks, and a device may sleep. So a cluster without taken slots moves
//! to a separate list ([`super::cluster`]). From there a thread without locks takes it, calls the
//! device, and puts it back. During the call the cluster is on no list, so no slot of it can be
//! allocated, written and then discarded.
//!
//! Allocation does not wait for discards. If no other cluster is free, it takes one that is not
//! discarded yet.

use super::area::Area;
use crate::Memory;
use crate::platform::Platform;

impl<P: Platform> Memory<P> {
    /// Discards free slots on the devices that want it
    /// ([`SwapDevice::discards`](crate::SwapDevice::discards)), in runs of 512. A run with a taken
    /// slot is left for later. Reclaim does it too; an embedder may call it from a thread of its
    /// own after large unmappings. Returns the number of discarded slots. The caller holds no lock
    /// of the core.
    ///
    /// Context: may sleep. Complexity: linear in the discarded runs.
    pub fn discard_free_slots(&self) -> u64 {
        let areas = self.swap.areas.iter().filter(|area| area.has_freed());
        areas.map(|area| self.discard_in(area)).sum()
    }

    #[cold]
    fn discard_in(&self, area: &Area<P>) -> u64 {
        // An area is turned off when it is stopped and has no request:
        // 1. CPU A has a request, and finds the area not stopped, under the lock of its lists.
        // 2. CPU B stops the area, and waits for the request.
        let Some(request) = area.requests.take() else { return 0 };
        let mut told = 0;
        while let Some(freed) = area.take_freed() {
            let slots = freed.slots();
            if let Some(device) = area.device() {
                told += slots.end - slots.start;
                device.discard(self, slots.start, slots.end - slots.start);
            }
            area.put_back(&freed);
        }
        self.free_request(area, request);
        told
    }
}
