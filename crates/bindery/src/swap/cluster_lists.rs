//! The lists of an area's clusters, linked through the clusters by their numbers. The area's lock
//! guards them.

use core::sync::atomic::Ordering::Relaxed;

use super::cluster::{Cluster, List};
use crate::folio::MAX_FOLIO_ORDER;
use crate::frame::meta::{NONE, link};
use crate::platform::Platform;

/// The heads of the lists.
pub(super) struct ClusterLists {
    free: u32,
    freed: u32,
    holes: u32,
    owned: u32,
    room: [u32; MAX_FOLIO_ORDER.0 as usize + 1],
}

impl ClusterLists {
    pub(super) const EMPTY: Self = Self {
        free: NONE,
        freed: NONE,
        holes: NONE,
        owned: NONE,
        room: [NONE; MAX_FOLIO_ORDER.0 as usize + 1],
    };

    pub(super) fn head(&mut self, list: List) -> Option<&mut u32> {
        match list {
            List::Full => None,
            List::Free => Some(&mut self.free),
            List::Freed => Some(&mut self.freed),
            List::Holes => Some(&mut self.holes),
            List::Owned => Some(&mut self.owned),
            List::Room(order) => self.room.get_mut(usize::from(order.0)),
        }
    }

    /// The number of the first cluster without taken slots whose slots the device has not yet
    /// discarded.
    pub(super) fn first_freed(&self) -> Option<u32> {
        link(self.freed).map(|number| number.0)
    }

    /// Removes a cluster from its list, if it is on one, and returns that list.
    pub(super) fn take_off<P: Platform>(
        &mut self,
        clusters: &[Cluster<P>],
        number: u32,
    ) -> Option<List> {
        let cluster = clusters.get(number as usize)?;
        let list = List::of_number(cluster.list.load(Relaxed))?;
        let (next, previous) = (cluster.next.load(Relaxed), cluster.previous.load(Relaxed));
        match linked(clusters, previous) {
            Some(previous) => previous.next.store(next, Relaxed),
            None => {
                if let Some(head) = self.head(list) {
                    *head = next;
                }
            }
        }
        if let Some(next) = linked(clusters, next) {
            next.previous.store(previous, Relaxed);
        }
        cluster.list.store(List::NONE, Relaxed);
        Some(list)
    }
}

/// The cluster to which a link leads.
pub(super) fn linked<P: Platform>(clusters: &[Cluster<P>], next: u32) -> Option<&Cluster<P>> {
    clusters.get(link(next)?.0 as usize)
}
