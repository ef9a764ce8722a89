//! A cluster: 512 consecutive slots of an area, with their cells and values.
//!
//! The cells and the values are two frames of the area. The lock guards the bitmap and every change
//! of a cell that is referred to by an entry, the cache or a bit. A cell that was just allocated
//! belongs to the allocating thread, and the value of a `BUSY` cell belongs to the thread that
//! holds its folio's lock. Any thread may read a cell, but must read it again under the lock before
//! it relies on the value.

#[cfg(all(test, any(loom, shuttle)))]
mod loom_model;

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::area::SlotArea;
use super::bitmap::{Bitmap, CLUSTER_SLOTS};
use super::device::SwapDevice;
use crate::addr::Order;
use crate::frame::meta::NONE;
use crate::platform::{Cpu, Platform};
use crate::sync::{Mutex, MutexGuard};

/// A cluster's record. Two CPUs may own neighboring clusters, so each record has cache lines of its
/// own.
#[repr(align(64))]
pub(super) struct Cluster<P: Platform> {
    pub(super) state: Mutex<P::SpinLock, ClusterState>,
    /// The first of two frames: cells, then values. Never changes while the area is on.
    pub(super) frames: AtomicU32,
    /// The device that holds the content of the slots. Never changes while the area is on.
    pub(super) device: Option<&'static dyn SwapDevice<P>>,
    /// The list that the cluster is on, as [`List::number`]. Changed under both the lock of the
    /// area's lists and the cluster's.
    pub(super) list: AtomicU32,
    /// The cluster's neighbors on the list. Guarded by the lock of the area's lists.
    pub(super) next: AtomicU32,
    pub(super) previous: AtomicU32,
}

/// The state that the cluster's lock guards, in addition to the cells.
pub(super) struct ClusterState {
    taken: Bitmap,
    pub(super) free: u32,
    /// The number of the cluster's slots that exist on the device.
    pub(super) size: u32,
    /// The order of the blocks allocated here. A single order avoids fragmentation.
    pub(super) order: Order,
    /// Whether the device may hold unneeded content here, because slots were taken since the last
    /// discard.
    pub(super) stale: bool,
    /// Whether the device is discarding the cluster's slots. The cluster is on no list, and a late
    /// [`SlotArea::relist`](super::area::SlotArea) by a thread that freed slots does not put it on
    /// one.
    pub(super) discarding: bool,
    /// The CPU that takes slots here, while the cluster is on [`List::Owned`].
    pub(super) owner: Option<Cpu>,
}

/// The list that a cluster is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum List {
    /// No list: no slot is free, or the only free slots do not exist on the device or are being
    /// discarded.
    Full,
    /// No slot is taken.
    Free,
    /// No slot is taken any longer, but the device has not discarded the slots yet.
    Freed,
    /// Blocks of this order are taken, and some may be free.
    Room(Order),
    /// The free slots form no block of the cluster's order; single slots are allocated here.
    Holes,
    /// One CPU takes slots here ([`super::cpu`]).
    Owned,
}

impl List {
    pub(super) const NONE: u32 = NONE;

    pub(super) fn number(self) -> u32 {
        match self {
            Self::Full => Self::NONE,
            Self::Free => 0,
            Self::Holes => 1,
            Self::Freed => 2,
            Self::Owned => 3,
            Self::Room(order) => 4 + u32::from(order.0),
        }
    }

    /// The list with this number, or `None` for the number of no list.
    pub(super) fn of_number(number: u32) -> Option<Self> {
        match number {
            Self::NONE => None,
            0 => Some(Self::Free),
            1 => Some(Self::Holes),
            2 => Some(Self::Freed),
            3 => Some(Self::Owned),
            order => Some(Self::Room(Order((order - 4) as u8))),
        }
    }
}

impl<P: Platform> Cluster<P> {
    /// A cluster whose first `slots` slots exist on the device; the other slots are taken forever.
    pub(super) fn new(frames: u32, slots: u32, device: Option<&'static dyn SwapDevice<P>>) -> Self {
        Self {
            state: Mutex::new(ClusterState::new(slots)),
            frames: AtomicU32::new(frames),
            device,
            list: AtomicU32::new(List::NONE),
            next: AtomicU32::new(NONE),
            previous: AtomicU32::new(NONE),
        }
    }

    /// The list where the cluster belongs. The caller holds the cluster's lock.
    pub(super) fn list_of(state: &ClusterState) -> List {
        state.list()
    }

    pub(super) fn is_on(&self, list: List) -> bool {
        self.list.load(Relaxed) == list.number()
    }
}

impl ClusterState {
    /// The initial state: all slots of the device are free.
    fn new(slots: u32) -> Self {
        let mut taken = Bitmap::EMPTY;
        if slots < CLUSTER_SLOTS {
            // The first stretch is the device's slots, the second the rest.
            let _ = taken.take_stretch(slots);
            let _ = taken.take_stretch(CLUSTER_SLOTS);
            taken.free_run(0, slots);
        }
        let (free, size, order) = (slots, slots, Order::PAGE);
        Self { taken, free, size, order, stale: false, discarding: false, owner: None }
    }

    /// The list where the cluster belongs.
    fn list(&self) -> List {
        if self.discarding {
            List::Full
        } else if self.free == self.size && self.stale {
            // The owner loses the cluster, because the device must discard its slots.
            List::Freed
        } else if self.owner.is_some() {
            List::Owned
        } else if self.free == 0 {
            List::Full
        } else if self.free == self.size {
            List::Free
        } else {
            List::Room(self.order)
        }
    }

    /// The number of taken slots.
    pub(super) fn taken(&self) -> u32 {
        self.size - self.free
    }

    /// As [`LiveCluster::own`].
    fn own(&mut self, owner: Option<Cpu>) {
        self.owner = owner.filter(|_| self.free > 0);
    }

    /// As [`LiveCluster::take`].
    #[inline(always)]
    fn take(&mut self, list: List, order: Order, most: u32, stale: bool) -> Option<(u32, u32)> {
        if matches!(list, List::Free | List::Freed) {
            self.order = order;
        }
        let (first, count) = if order > Order::PAGE {
            (self.taken.take_block(order)?, order.pages())
        } else {
            self.taken.take_stretch(most)?
        };
        self.free -= count;
        self.stale = stale;
        Some((first, count))
    }

    /// Frees `count` slots from `first` on.
    pub(super) fn free_run(&mut self, first: u32, count: u32) {
        self.taken.free_run(first, count);
        self.free += count;
    }

    /// Takes these slots, even if the area is stopped.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn plant(&mut self, first: u32, count: u32) {
        self.taken.take(first, count);
        self.free -= count;
    }
}

/// A locked cluster of an area that allocates slots. The existence of this value proves:
///
/// 1. The area was not stopped when the cluster was locked.
/// 2. [`SlotArea::stop`] does not return before the lock is released.
///
/// So the slots that a thread takes through this value count as taken once the area is stopped.
/// Only this type can take slots, or add references of entries to the slots of a cached folio.
pub(super) struct LiveCluster<'a, P: Platform> {
    state: MutexGuard<'a, P::SpinLock, ClusterState>,
}

impl<'a, P: Platform> LiveCluster<'a, P> {
    /// Locks a cluster of `area`. `None` if the area is stopped.
    #[inline]
    pub(super) fn lock(area: &SlotArea<P>, cluster: &'a Cluster<P>) -> Option<Self> {
        let state = cluster.state.lock();
        // Checked after the lock is acquired: `SlotArea::stop` stores first and then waits for the
        // lock.
        area.may_allocate().then_some(Self { state })
    }

    /// The state that the lock guards.
    #[inline]
    pub(super) fn state(&self) -> &ClusterState {
        &self.state
    }

    /// Makes a CPU the owner of the cluster, if it has free slots left.
    pub(super) fn own(&mut self, owner: Option<Cpu>) {
        self.state.own(owner);
    }

    /// Takes slots of the cluster, which is on `list`: a block of 2^`order`, or up to `most` single
    /// slots. `stale` means that the device needs a discard after the slots are freed.
    pub(super) fn take(
        &mut self,
        list: List,
        order: Order,
        most: u32,
        stale: bool,
    ) -> Option<(u32, u32)> {
        self.state.take(list, order, most, stale)
    }
}
