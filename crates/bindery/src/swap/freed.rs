//! Slots that are freed together.

use core::sync::atomic::Ordering::Release;

use super::area::Area;
use super::cluster::{Cluster, ClusterState};
use crate::platform::Platform;

/// Slots of one cluster whose cells are free, to be freed in the bitmap by stretches.
pub(super) struct FreedSlots<'a, P: Platform> {
    pub(super) area: &'a Area<P>,
    pub(super) cluster: &'a Cluster<P>,
    pub(super) first: u32,
    pub(super) count: u32,
    pub(super) relist: bool,
}

impl<'a, P: Platform> FreedSlots<'a, P> {
    pub(super) fn new(area: &'a Area<P>, cluster: &'a Cluster<P>) -> Self {
        Self { area, cluster, first: 0, count: 0, relist: false }
    }

    #[inline]
    pub(super) fn add(&mut self, state: &mut ClusterState, slot: u32) {
        if self.first + self.count != slot {
            self.give_back(state);
            self.first = slot;
        }
        self.count += 1;
    }

    // Once for each stretch, so that `add`, once for each slot, stays small.
    #[inline(never)]
    pub(super) fn give_back(&mut self, state: &mut ClusterState) {
        if self.count == 0 {
            return;
        }
        state.give_back(self.first, self.count);
        self.relist = !self.cluster.is_on(Cluster::<P>::list_of(state));
        // Release: all accesses to the slots come before the area is turned off.
        self.area.taken.fetch_sub(u64::from(self.count), Release);
        self.count = 0;
    }

    /// Moves the cluster to the list where it belongs now. Its lock is not held.
    pub(super) fn relist(&self, slot: u64) {
        if self.relist {
            self.area.relist(slot);
        }
    }
}
