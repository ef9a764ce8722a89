//! A swap area: its clusters, their lists, and the allocation of slots.
//!
//! A cluster in use has blocks of one order ([`super::cluster`]). An allocation uses a cluster with
//! room for its order, or else a free one. Single slots also use the remaining slots of clusters of
//! other orders, so that a base page can use any slot. A cluster without a block of its order moves
//! to the list of *holes*, for single slots, until one of its slots is freed.
//!
//! A CPU owns the cluster from which it has last allocated slots ([`owned`]).
//!
//! The lock of the lists ranks before that of a cluster, and a cluster moves between lists under
//! both. A thread that frees slots holds the cluster's lock first. So it moves the cluster
//! afterwards, and chooses the list when it holds both locks.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod discard;
mod owned;
#[cfg(test)]
mod tests;

use core::ptr::{self, NonNull};
use core::slice;
use core::sync::atomic::{
    AtomicBool, AtomicI16, AtomicPtr, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use super::bitmap::CLUSTER_SLOTS;
use super::cluster::{Cluster, ClusterState, List};
use super::cluster_lists::{ClusterLists, linked};
use super::device::SwapDevice;
use super::requests::RequestTable;
use super::slots::{AreasStay, while_areas_stay};
use crate::Memory;
use crate::addr::{Frame, Order, PAGE_SIZE};
use crate::folio::SwapPlace;
use crate::frame::meta::{self, NONE};
use crate::frame::{AllocateFor, Frames, MAX_ORDER};
use crate::platform::Platform;
use crate::sync::{Mutex, MutexGuard};

/// Consecutive slots of one cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SlotRun {
    /// The area.
    pub(crate) area: u8,
    /// The first slot.
    pub(crate) first: u64,
    /// The number of slots.
    pub(crate) count: u32,
}

impl SlotRun {
    /// The place of a folio that occupies all of these slots.
    #[inline]
    pub(crate) const fn place(self) -> SwapPlace {
        SwapPlace { area: self.area, first: self.first, cached: self.count }
    }
}

/// The order of the block with a cluster's cells and values.
const CELLS: Order = Order(1);

/// The lists of an area, locked, and its clusters.
struct LockedLists<'a, P: Platform> {
    lists: MutexGuard<'a, P::SpinLock, ClusterLists>,
    /// The clusters; they may be freed once the lists are unlocked.
    clusters: &'a [Cluster<P>],
}

impl<P: Platform> LockedLists<'_, P> {
    /// The lists and the clusters, while the lists are locked.
    #[inline]
    fn parts(&mut self) -> (&mut ClusterLists, &[Cluster<P>]) {
        (&mut self.lists, self.clusters)
    }
}

/// One swap area. It is off while it has no clusters.
pub(crate) struct SlotArea<P: Platform> {
    clusters: AtomicPtr<Cluster<P>>,
    count: AtomicU32,
    /// The first frame of the block that holds the clusters.
    block: AtomicU32,
    /// The number of slots of the area.
    slots: AtomicU64,
    /// The number of clusters on lists from which all CPUs take slots. Changed under the lock of
    /// the lists.
    listed: AtomicU32,
    /// Whether slots may be allocated. Read under the lock of a cluster, by
    /// [`LiveCluster::lock`](super::cluster::LiveCluster::lock).
    pub(super) allocates: AtomicBool,
    priority: AtomicI16,
    lists: Mutex<P::SpinLock, ClusterLists>,
    /// Whether the area has a device; without one, the content is in compressed memory.
    on_device: AtomicBool,
    /// Whether the device accepts discards of free slots.
    discards: AtomicBool,
    /// Whether pages may change while the device writes them.
    lets_pages_change: AtomicBool,
    /// Whether the list of freed clusters may contain one to discard.
    has_freed: AtomicBool,
    /// Changed only while no slot is taken.
    device: Mutex<P::SpinLock, Option<&'static dyn SwapDevice<P>>>,
    /// Requests in flight on the device.
    pub(super) requests: RequestTable,
}

impl<P: Platform> SlotArea<P> {
    pub(super) const fn new() -> Self {
        Self {
            clusters: AtomicPtr::new(ptr::null_mut()),
            count: AtomicU32::new(0),
            block: AtomicU32::new(NONE),
            slots: AtomicU64::new(0),
            listed: AtomicU32::new(0),
            allocates: AtomicBool::new(false),
            priority: AtomicI16::new(0),
            lists: Mutex::new(ClusterLists::EMPTY),
            on_device: AtomicBool::new(false),
            discards: AtomicBool::new(false),
            lets_pages_change: AtomicBool::new(false),
            has_freed: AtomicBool::new(false),
            device: Mutex::new(None),
            requests: RequestTable::new(),
        }
    }

    /// Whether a device holds the content of the slots. The caller has a busy slot, so the answer
    /// does not change.
    #[inline]
    pub(super) fn has_device(&self) -> bool {
        self.on_device.load(Relaxed)
    }

    /// The device. The caller prevents the area from being turned off.
    pub(super) fn device(&self) -> Option<&'static dyn SwapDevice<P>> {
        *self.device.lock()
    }

    /// The device that holds the content of a slot, which is busy for the caller.
    pub(super) fn device_of(
        &self,
        memory: &Memory<P>,
        slot: u64,
    ) -> Option<&'static dyn SwapDevice<P>> {
        while_areas_stay(memory.platform(), |stay| self.cluster(stay, slot)?.device)
    }

    /// Whether pages may change while the device writes them.
    pub(super) fn lets_pages_change(&self) -> bool {
        self.lets_pages_change.load(Relaxed)
    }

    fn set_device(&self, device: Option<&'static dyn SwapDevice<P>>) {
        self.on_device.store(device.is_some(), Relaxed);
        self.discards.store(device.is_some_and(SwapDevice::discards), Relaxed);
        let changes = device.is_some_and(|device| !device.needs_stable_pages());
        self.lets_pages_change.store(changes, Relaxed);
        self.has_freed.store(false, Relaxed);
        *self.device.lock() = device;
    }

    /// The number of slots of the area; 0 while it is off.
    pub(crate) fn slots(&self) -> u64 {
        self.slots.load(Relaxed)
    }

    /// The number of taken slots. O(n) in the clusters.
    pub(crate) fn taken(&self) -> u64 {
        let taken = |number| {
            // The area may be turned off concurrently, but not while its lists are locked.
            let mut locked = self.lock_lists();
            let (_, clusters) = locked.parts();
            Some(u64::from(clusters.get(number as usize)?.state.lock().taken()))
        };
        (0..self.count.load(Relaxed)).map_while(taken).sum()
    }

    /// Stops the allocation of slots and the use of taken slots for further pages or entries. O(n)
    /// in the clusters. Without the locking below, this could happen:
    ///
    /// 1. A thread locks a cluster and finds that the area allocates slots.
    /// 2. The area is stopped.
    /// 3. The thread takes slots of the cluster.
    ///
    /// So this function locks each cluster once between the store and the return. A thread that
    /// held the lock before has taken its slots, and they count as taken; a thread that acquires
    /// the lock later sees the store.
    pub(super) fn stop(&self) {
        self.allocates.store(false, Release);
        for number in 0..self.count.load(Relaxed) {
            // The area may be turned off concurrently, but not while its lists are locked.
            let mut locked = self.lock_lists();
            let (_, clusters) = locked.parts();
            let Some(cluster) = clusters.get(number as usize) else { return };
            drop(cluster.state.lock());
        }
    }

    /// Resumes the allocation of slots.
    pub(super) fn resume(&self) {
        // Under the lock, because an area that is being turned off would otherwise allocate
        // forever.
        let _lists = self.lock_lists();
        self.allocates.store(self.is_on(), Release);
    }

    /// The number of frames that account for the slots.
    pub(super) fn account(&self, frames: &Frames<P>) -> u64 {
        if !self.is_on() {
            return 0;
        }
        let block = frames.meta(Frame(self.block.load(Relaxed)));
        let cells = u64::from(CELLS.pages()) * u64::from(self.count.load(Relaxed));
        u64::from(block.order().pages()) + cells
    }

    /// Whether slots may be allocated.
    pub(super) fn may_allocate(&self) -> bool {
        self.allocates.load(Acquire)
    }

    /// Whether a slot could be allocated.
    pub(super) fn has_free_slot(&self) -> bool {
        self.may_allocate() && (self.listed.load(Relaxed) > 0 || self.has_free_owned_slot())
    }

    /// Whether a cluster that a CPU owns has a free slot, or a cluster was listed in the meantime.
    #[cold]
    fn has_free_owned_slot(&self) -> bool {
        let mut locked = self.lock_lists();
        let (lists, clusters) = locked.parts();
        let mut next = lists.head(List::Owned).map_or(NONE, |head| *head);
        while let Some(cluster) = linked(clusters, next) {
            if cluster.state.lock().free > 0 {
                return true;
            }
            next = cluster.next.load(Relaxed);
        }
        self.listed.load(Relaxed) > 0
    }

    /// Areas of higher priority are used first.
    pub(crate) fn priority(&self) -> i16 {
        self.priority.load(Relaxed)
    }

    pub(super) fn is_on(&self) -> bool {
        !self.clusters.load(Acquire).is_null()
    }

    /// The clusters; an empty slice while the area is off.
    ///
    /// # Safety
    /// 1. The clusters are not freed while the result is used: the area is not turned off, or the
    ///    caller is in a read section.
    #[inline]
    unsafe fn clusters(&self) -> &[Cluster<P>] {
        // Acquire: the clusters and their number were written before the pointer.
        let Some(base) = NonNull::new(self.clusters.load(Acquire)) else { return &[] };
        // SAFETY: `turn_on` stored a pointer to `count` clusters, which stay until `turn_off` frees
        // them (obligation 1).
        unsafe { slice::from_raw_parts(base.as_ptr(), self.count.load(Relaxed) as usize) }
    }

    /// The clusters, in a read section.
    #[inline]
    fn clusters_in<'s>(&'s self, _stay: &'s AreasStay) -> &'s [Cluster<P>] {
        // SAFETY: 1. `turn_off` waits for the read section before it frees the clusters, and the
        // result is not used after the section.
        unsafe { self.clusters() }
    }

    /// Locks the lists.
    #[inline]
    fn lock_lists(&self) -> LockedLists<'_, P> {
        let lists = self.lists.lock();
        // SAFETY: 1. `turn_off` removes the clusters with the lists locked, and `LockedLists` lends
        // them only while it holds the lock.
        LockedLists { lists, clusters: unsafe { self.clusters() } }
    }

    /// The cluster of a slot.
    #[inline]
    pub(super) fn cluster<'s>(&'s self, stay: &'s AreasStay, slot: u64) -> Option<&'s Cluster<P>> {
        self.clusters_in(stay).get(usize::try_from(slot / u64::from(CLUSTER_SLOTS)).ok()?)
    }

    /// Allocates the clusters for `slots` slots. Fails if memory is short or the area would have
    /// too many slots. A device for their content must have at least `slots` slots.
    pub(super) fn turn_on(
        &self,
        frames: &Frames<P>,
        slots: u64,
        priority: i16,
        device: Option<&'static dyn SwapDevice<P>>,
    ) -> Option<()> {
        let (count, order) = account_of::<P>(slots)?;
        let base = frames.allocate(order, AllocateFor::Use)?;
        frames.meta(base).state.store(meta::state_of(meta::MetaKind::Swap, order), Relaxed);
        let clusters = frames.platform().direct_map(base).cast::<Cluster<P>>();
        for number in 0..count {
            let Some(cells) = frames.allocate(CELLS, AllocateFor::Use) else {
                self.free_clusters(frames, clusters, number, base);
                return None;
            };
            let state = meta::state_of(meta::MetaKind::Swap, CELLS);
            frames.meta(cells).state.store(state, Relaxed);
            frames.platform().zero(cells, CELLS.pages());
            let left = slots - u64::from(number) * u64::from(CLUSTER_SLOTS);
            let size = left.min(u64::from(CLUSTER_SLOTS)) as u32;
            // SAFETY: the block has room for `count` clusters (`account_of`) and is page-aligned,
            // and no other thread knows it yet.
            unsafe { clusters.add(number as usize).write(Cluster::new(cells.0, size, device)) };
        }
        self.count.store(count, Relaxed);
        self.block.store(base.0, Relaxed);
        self.slots.store(slots, Relaxed);
        self.priority.store(priority, Relaxed);
        self.set_device(device);
        // Release: a thread that finds the pointer finds the clusters.
        self.clusters.store(clusters.as_ptr(), Release);
        let mut locked = self.lock_lists();
        let (lists, clusters) = locked.parts();
        // A thread that freed the last slots of the area before it was last turned off may have
        // listed a cluster until now.
        *lists = ClusterLists::EMPTY;
        self.listed.store(0, Relaxed);
        for number in (0..count).rev() {
            self.put_on(lists, clusters, number, List::Free);
        }
        drop(locked);
        self.allocates.store(true, Release);
        Some(())
    }

    /// Frees the clusters if no slot is taken, in which case nothing refers to a cluster any
    /// longer. Returns whether the clusters were freed; otherwise nothing has changed.
    pub(super) fn turn_off(&self, frames: &Frames<P>) -> bool {
        let clusters = {
            let mut locked = self.lock_lists();
            let (lists, clusters) = locked.parts();
            // Slots of a cluster without an owner are taken only under this lock. The lists do not
            // decide: a thread that has freed the last slots of a cluster may list it later, and
            // then finds the area off.
            self.disown_all(lists, clusters, |_| true);
            let is_used = |state: &ClusterState| state.taken() > 0 || state.discarding;
            if clusters.iter().any(|cluster| is_used(&cluster.state.lock())) {
                return false;
            }
            self.allocates.store(false, Release);
            *lists = ClusterLists::EMPTY;
            self.listed.store(0, Relaxed);
            self.clusters.swap(ptr::null_mut(), Acquire)
        };
        let Some(clusters) = NonNull::new(clusters) else { return true };
        let count = self.count.swap(0, Relaxed);
        self.slots.store(0, Relaxed);
        for number in 0..count {
            // SAFETY: `turn_on` has written `count` clusters, which are freed below.
            let cluster = unsafe { clusters.add(number as usize).as_ref() };
            // The thread that freed the last slots held this lock and may be about to release it.
            drop(cluster.state.lock());
        }
        // All other users of the clusters are in a read section (`AreasStay`).
        frames.platform().synchronize();
        self.free_clusters(frames, clusters, count, Frame(self.block.load(Relaxed)));
        true
    }

    fn free_clusters(
        &self,
        frames: &Frames<P>,
        clusters: NonNull<Cluster<P>>,
        count: u32,
        base: Frame,
    ) {
        for number in 0..count {
            // SAFETY: `turn_on` has written `count` clusters, and no thread uses them any longer.
            let cells = unsafe { clusters.add(number as usize).as_ref() }.frames.load(Relaxed);
            // SAFETY: 1. `turn_on` allocated the frames for this cluster. 2. No thread uses the
            // cells any longer.
            unsafe { frames.free(Frame(cells), CELLS) };
        }
        self.set_device(None);
        let order = frames.meta(base).order();
        // SAFETY: 1. `turn_on` allocated the block. 2. No thread uses the clusters any longer.
        unsafe { frames.free(base, order) };
    }

    /// Moves the cluster of `slot` to the list where it belongs, after some of its slots were
    /// freed. No lock of a cluster is held.
    pub(super) fn relist(&self, slot: u64) {
        let number = (slot / u64::from(CLUSTER_SLOTS)) as u32;
        let mut locked = self.lock_lists();
        let (lists, clusters) = locked.parts();
        // Looked up under the lock: after the slots are freed, the area may be turned off.
        let Some(cluster) = clusters.get(number as usize) else { return };
        let mut state = cluster.state.lock();
        let list = Cluster::<P>::list_of(&state);
        if list != List::Owned {
            state.owner = None;
        }
        self.move_to(lists, clusters, number, list);
    }

    /// Moves a cluster to the list where it belongs. The cluster's lock is held, too.
    fn move_to(&self, lists: &mut ClusterLists, clusters: &[Cluster<P>], number: u32, list: List) {
        if clusters.get(number as usize).is_some_and(|cluster| !cluster.is_on(list)) {
            self.take_off(lists, clusters, number);
            self.put_on(lists, clusters, number, list);
        }
    }

    fn take_off(&self, lists: &mut ClusterLists, clusters: &[Cluster<P>], number: u32) {
        if let Some(list) = lists.take_off(clusters, number) {
            self.listed.fetch_sub(u32::from(list != List::Owned), Relaxed);
        }
    }

    fn put_on(&self, lists: &mut ClusterLists, clusters: &[Cluster<P>], number: u32, list: List) {
        let (Some(head), Some(cluster)) = (lists.head(list), clusters.get(number as usize)) else {
            return;
        };
        let next = core::mem::replace(head, number);
        self.listed.fetch_add(u32::from(list != List::Owned), Relaxed);
        if list == List::Freed {
            self.has_freed.store(true, Relaxed);
        }
        cluster.next.store(next, Relaxed);
        cluster.previous.store(NONE, Relaxed);
        cluster.list.store(list.number(), Relaxed);
        if let Some(next) = linked(clusters, next) {
            next.previous.store(number, Relaxed);
        }
    }
}

/// The number of clusters of an area with `slots` slots, and the order of a block with room for
/// their records. `None` if no block is large enough.
pub(super) fn account_of<P: Platform>(slots: u64) -> Option<(u32, Order)> {
    let count = u32::try_from(slots.div_ceil(u64::from(CLUSTER_SLOTS))).ok()?;
    let bytes = u64::from(count) * size_of::<Cluster<P>>() as u64;
    let order = Order(bytes.div_ceil(PAGE_SIZE).next_power_of_two().trailing_zeros() as u8);
    (order <= MAX_ORDER).then_some((count, order))
}
