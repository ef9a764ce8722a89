//! Discards of free slots on devices (Linux: `SWAP_FLAG_DISCARD`).
//!
//! Slots are freed under spin locks, and a device may sleep. So a cluster without taken slots moves
//! to a separate list ([`crate::swap::cluster`]). A thread without locks takes it from that list,
//! calls the device, and puts it back. During the call, the cluster is on no list, so none of its
//! slots can be allocated, written and then discarded.
//!
//! Allocation does not wait for discards. If no other cluster is free, it uses a cluster that is
//! not discarded yet.

use core::ops::Range;
use core::sync::atomic::Ordering::{Acquire, Relaxed};

use super::SlotArea;
use crate::Memory;
use crate::platform::Platform;
use crate::swap::Swap;
use crate::swap::bitmap::CLUSTER_SLOTS;
use crate::swap::cluster::Cluster;
use crate::swap::cpu;

/// A cluster that is off all lists and has no taken slots.
pub(super) struct FreedCluster {
    number: u32,
    slots: u32,
}

impl FreedCluster {
    /// The cluster's slots on the device.
    pub(super) fn slots(&self) -> Range<u64> {
        let first = u64::from(self.number) * u64::from(CLUSTER_SLOTS);
        first..first + u64::from(self.slots)
    }
}

impl<P: Platform> Swap<P> {
    /// Discards free slots on the devices that request it. Returns their number.
    pub(in crate::swap) fn discard_free_slots(&self, memory: &Memory<P>) -> u64 {
        let areas = self.areas.iter().filter(|area| area.has_freed());
        areas.map(|area| area.discard_freed(memory)).sum()
    }
}

impl<P: Platform> SlotArea<P> {
    /// Whether the device may have free slots to discard.
    #[inline]
    fn has_freed(&self) -> bool {
        self.has_freed.load(Relaxed)
    }

    /// Removes from the lists a cluster whose free slots the device must discard. `None` if no
    /// cluster needs a discard or the area is stopped.
    fn take_freed(&self) -> Option<FreedCluster> {
        let mut locked = self.lock_lists();
        let (lists, clusters) = locked.parts();
        if !self.allocates.load(Acquire) {
            return None;
        }
        let Some(number) = lists.first_freed() else {
            self.has_freed.store(false, Relaxed);
            return None;
        };
        let mut state = clusters.get(number as usize)?.state.lock();
        state.discarding = true;
        self.take_off(lists, clusters, number);
        Some(FreedCluster { number, slots: state.size })
    }

    /// Makes a cluster usable again after the device has discarded its slots.
    fn put_back(&self, freed: &FreedCluster) {
        let mut locked = self.lock_lists();
        let (lists, clusters) = locked.parts();
        let Some(cluster) = clusters.get(freed.number as usize) else { return };
        let mut state = cluster.state.lock();
        state.stale = false;
        state.discarding = false;
        self.move_to(lists, clusters, freed.number, Cluster::<P>::list_of(&state));
    }

    #[cold]
    fn discard_freed(&self, memory: &Memory<P>) -> u64 {
        // An area is turned off once it is stopped and has no request:
        // 1. CPU A has a request, and finds under the lock of the lists that the area is not
        //    stopped.
        // 2. CPU B stops the area and waits for the request.
        let Some(request) = self.requests.take(cpu::own(memory)) else { return 0 };
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
