//! Discards of free slots on devices (Linux: `SWAP_FLAG_DISCARD`).
//!
//! Slots are freed under spin locks, and a device may sleep. So a cluster without taken slots moves
//! to a separate list ([`super::cluster`]). From there a thread without locks takes it, calls the
//! device, and puts it back. During the call the cluster is on no list, so no slot of it can be
//! allocated, written and then discarded.
//!
//! Allocation does not wait for discards. If no other cluster is free, it takes one that is not
//! discarded yet.

use super::Swap;
use super::area::Area;
use crate::Memory;
use crate::platform::Platform;

impl<P: Platform> Swap<P> {
    /// Discards free slots on the devices that want it. Returns their number.
    pub(super) fn discard_free_slots(&self, memory: &Memory<P>) -> u64 {
        let areas = self.areas.iter().filter(|area| area.has_freed());
        areas.map(|area| area.discard_freed(memory)).sum()
    }
}

impl<P: Platform> Area<P> {
    #[cold]
    fn discard_freed(&self, memory: &Memory<P>) -> u64 {
        // An area is turned off when it is stopped and has no request:
        // 1. CPU A has a request, and finds the area not stopped, under the lock of its lists.
        // 2. CPU B stops the area, and waits for the request.
        let Some(request) = self.requests.take() else { return 0 };
        let mut discarded = 0;
        while let Some(freed) = self.take_freed() {
            let slots = freed.slots();
            if let Some(device) = self.device() {
                discarded += slots.end - slots.start;
                device.discard(memory, slots.start, slots.end - slots.start);
            }
            self.put_back(&freed);
        }
        self.free_request(memory, request);
        discarded
    }
}
