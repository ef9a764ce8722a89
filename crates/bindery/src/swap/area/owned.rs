//! Allocation of slots: from the cluster that the CPU owns, or else from a cluster on the lists.
//!
//! An online CPU owns the cluster from which it has allocated slots ([`crate::swap::cpu`]), and
//! allocates the next slots there with only the cluster's lock held. Before an allocation fails,
//! the owned clusters that could serve it return to the lists.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::{SlotArea, SlotRun};
use crate::Memory;
use crate::addr::Order;
use crate::folio::MAX_FOLIO_ORDER;
use crate::frame::meta::{NONE, link};
use crate::platform::{Cpu, Platform};
use crate::swap::bitmap::CLUSTER_SLOTS;
use crate::swap::cluster::{Cluster, ClusterState, List, LiveCluster};
use crate::swap::cluster_lists::ClusterLists;
use crate::swap::slots::{AreasStay, while_areas_stay};

/// The slots that an allocation requests.
struct SlotRequest {
    /// The number of the area.
    area: u8,
    order: Order,
    most: u32,
}

impl SlotRequest {
    /// The run of slots that were taken from a cluster, given the first slot and their number.
    fn run(&self, cluster: u32, (first, count): (u32, u32)) -> SlotRun {
        let base = u64::from(cluster) * u64::from(CLUSTER_SLOTS);
        SlotRun { area: self.area, first: base + u64::from(first), count }
    }
}

/// The cluster of one order from which a CPU has last allocated.
struct OwnCluster<'a> {
    cpu: Cpu,
    number: &'a AtomicU32,
}

impl<P: Platform> SlotArea<P> {
    /// Allocates 2^`order` consecutive slots, aligned to their number; with order 0, up to `most`
    /// consecutive slots.
    pub(in crate::swap) fn allocate(
        &self,
        memory: &Memory<P>,
        number: u8,
        order: Order,
        most: u32,
    ) -> Option<SlotRun> {
        let own = memory.cpus.own(memory.platform()).and_then(|record| {
            let clusters = record.swap.clusters.get(usize::from(number))?;
            Some(OwnCluster { cpu: record.swap.cpu, number: clusters.get(usize::from(order.0))? })
        });
        let wanted = SlotRequest { area: number, order, most };
        if let Some(own) = &own
            && let Some(run) =
                while_areas_stay(memory.platform(), |stay| self.take_own(stay, own, &wanted))
        {
            return Some(run);
        }
        self.take_listed(own.as_ref(), &wanted)
    }

    /// Takes slots from the cluster from which the CPU has last allocated, if the CPU owns it.
    fn take_own(
        &self,
        stay: &AreasStay,
        own: &OwnCluster<'_>,
        wanted: &SlotRequest,
    ) -> Option<SlotRun> {
        let clusters = self.clusters_in(stay);
        let number = link(own.number.load(Relaxed))?.0;
        let mut live = LiveCluster::lock(self, clusters.get(number as usize)?)?;
        if live.state().owner != Some(own.cpu) || live.state().order != wanted.order {
            return None;
        }
        let stale = self.discards.load(Relaxed);
        let taken = live.take(List::Owned, wanted.order, wanted.most, stale)?;
        Some(wanted.run(number, taken))
    }

    /// Takes slots from a cluster on the lists, which the CPU owns from then on. If no listed
    /// cluster has room, the CPUs lose the owned clusters that may have room.
    #[inline(never)]
    fn take_listed(&self, own: Option<&OwnCluster<'_>>, wanted: &SlotRequest) -> Option<SlotRun> {
        let mut locked = self.lock_lists();
        let (lists, clusters) = locked.parts();
        if let Some(own) = own
            && let Some(number) = link(own.number.swap(NONE, Relaxed))
        {
            self.disown_one(lists, clusters, number.0, |state| state.owner == Some(own.cpu));
        }
        // A block fits only into a cluster of its order, so the owners of other clusters keep them.
        let may_help = |state: &ClusterState| {
            let is_free = state.free == state.size;
            wanted.order == Order::PAGE || state.order == wanted.order || is_free
        };
        self.take_from_lists(lists, clusters, own, wanted).or_else(|| {
            self.disown_all(lists, clusters, may_help)
                .then(|| self.take_from_lists(lists, clusters, own, wanted))?
        })
    }

    fn take_from_lists(
        &self,
        lists: &mut ClusterLists,
        clusters: &[Cluster<P>],
        own: Option<&OwnCluster<'_>>,
        wanted: &SlotRequest,
    ) -> Option<SlotRun> {
        let order = wanted.order;
        let rooms = Order::PAGE.up_to(MAX_FOLIO_ORDER).map(List::Room);
        let of_order = [List::Room(order), List::Free, List::Freed, List::Holes];
        let all = of_order.into_iter().chain(rooms);
        // Blocks are taken from the first three lists, single slots from all lists.
        let choices = all.take(if order == Order::PAGE { usize::MAX } else { 3 });
        for list in choices {
            let mut next = lists.head(list).map_or(NONE, |head| *head);
            while let Some(found) = link(next) {
                let cluster = clusters.get(found.0 as usize)?;
                next = cluster.next.load(Relaxed);
                let mut live = LiveCluster::lock(self, cluster)?;
                let state = live.state();
                if state.free == state.size && state.size < order.pages() {
                    // This is the last, partial cluster of a device, which stays free for smaller
                    // blocks.
                    continue;
                }
                let stale = self.discards.load(Relaxed);
                let taken = live.take(list, order, wanted.most, stale);
                if taken.is_some() && live.state().order == order && list != List::Holes {
                    live.own(own.map(|own| own.cpu));
                }
                let state = live.state();
                let belongs = match taken {
                    None if state.free > 0 => List::Holes,
                    _ if list == List::Holes && state.free > 0 => List::Holes,
                    _ => Cluster::<P>::list_of(state),
                };
                self.move_to(lists, clusters, found.0, belongs);
                if let Some(taken) = taken {
                    if let Some(own) = own
                        && belongs == List::Owned
                    {
                        own.number.store(found.0, Relaxed);
                    }
                    return Some(wanted.run(found.0, taken));
                }
            }
        }
        None
    }

    /// Returns to the lists the clusters that a CPU owns, or those of all CPUs.
    pub(in crate::swap) fn disown(&self, cpu: Option<Cpu>) {
        let mut locked = self.lock_lists();
        let (lists, clusters) = locked.parts();
        self.disown_all(lists, clusters, |state| cpu.is_none() || state.owner == cpu);
    }

    /// Returns to the lists the owned clusters for which `which` returns true. Returns whether any
    /// was found.
    pub(super) fn disown_all(
        &self,
        lists: &mut ClusterLists,
        clusters: &[Cluster<P>],
        which: impl Fn(&ClusterState) -> bool,
    ) -> bool {
        let mut some = false;
        let mut next = lists.head(List::Owned).map_or(NONE, |head| *head);
        while let Some(found) = link(next) {
            let Some(cluster) = clusters.get(found.0 as usize) else { break };
            next = cluster.next.load(Relaxed);
            some |= self.disown_one(lists, clusters, found.0, &which);
        }
        some
    }

    /// Returns a cluster to the lists if a CPU owns it and `which` returns true. Returns whether it
    /// was moved.
    fn disown_one(
        &self,
        lists: &mut ClusterLists,
        clusters: &[Cluster<P>],
        number: u32,
        which: impl Fn(&ClusterState) -> bool,
    ) -> bool {
        let Some(cluster) = clusters.get(number as usize) else { return false };
        let mut state = cluster.state.lock();
        let is_owned = state.owner.is_some() && which(&state);
        if is_owned {
            state.owner = None;
            self.move_to(lists, clusters, number, Cluster::<P>::list_of(&state));
        }
        is_owned
    }
}
