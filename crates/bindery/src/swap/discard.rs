//! Devices learn which slots are free (Linux: `SWAP_FLAG_DISCARD`).
//!
//! Slots are freed under spin locks, and a device may sleep. So a cluster of which no slot is taken
//! any more goes to a list of its own ([`super::cluster`]). From there a thread without locks takes
//! it, tells the device, and puts it back. Meanwhile the cluster is on no list: nobody takes slots
//! of it, so none of them is written and then discarded.
//!
//! Allocation does not wait for that. Where no other cluster is free, it takes one that the device
//! was not told of.

use super::area::Area;
use crate::Memory;
use crate::platform::Platform;

impl<P: Platform> Memory<P> {
    /// Tells the devices that want to know ([`SwapDevice::discards`](crate::SwapDevice::discards))
    /// which slots are free, in runs of 512: those of a run of which some are taken are left for
    /// later. Reclaim does it too; an embedder may call it from a thread of its own after much was
    /// unmapped. Returns how many slots were told. The caller holds no lock of the core.
    ///
    /// Context: may sleep. Complexity: in the runs that are told.
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
