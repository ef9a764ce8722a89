//! A CPU's part of swap: the clusters from which it allocates slots, and its counts.
//!
//! A CPU *owns* a cluster: other CPUs allocate no slots from it, so two CPUs that swap pages out
//! share neither a cluster nor the lists of an area. For each area and order of blocks, a CPU's
//! part has the number of the cluster from which the CPU has last allocated, and the cluster has
//! the number of its owner. Only the owner recorded in the cluster, under the cluster's lock, is
//! authoritative.
//!
//! Before an allocation fails, all clusters that could serve it return to the lists; the clusters
//! of one CPU return when it goes offline. So a free slot can be allocated by any CPU, whichever
//! CPU owns the cluster. A thread that was preempted after it had read the number of its CPU may
//! make that CPU an owner after it went offline. Such a cluster returns by the first rule.
//!
//! All words are changed by atomic instructions, so access to another CPU's part, by a stale CPU
//! number, is harmless.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::MAX_SWAP_AREAS;
use super::clock::Evictions;
use super::read_around::LastWindows;
use super::requests::RequestTable;
use super::streak::Streak;
use crate::Memory;
use crate::events::FrequentEvents;
use crate::folio::{Age, MAX_FOLIO_ORDER};
use crate::frame::meta::NONE;
use crate::platform::{Cpu, Platform};

/// The clusters of one area from which a CPU has last allocated, by the order of their blocks, or
/// [`NONE`].
pub(super) type OwnClusters = [AtomicU32; ORDERS];

const ORDERS: usize = MAX_FOLIO_ORDER.0 as usize + 1;

/// The record of the last faults that read pages, from which the size of the next reads follows.
pub(super) struct SwapFaults {
    pub(super) streak: Streak,
    pub(super) windows: LastWindows,
}

impl SwapFaults {
    pub(super) const fn new() -> Self {
        Self { streak: Streak::new(), windows: LastWindows::new() }
    }
}

/// A CPU's part of swap.
pub(crate) struct SwapPart {
    pub(super) cpu: Cpu,
    pub(super) clusters: [OwnClusters; MAX_SWAP_AREAS],
    /// The counts of calls and faults on this CPU.
    pub(crate) events: FrequentEvents,
    evictions: Evictions,
    faults: SwapFaults,
}

impl SwapPart {
    pub(crate) const fn new(cpu: Cpu) -> Self {
        Self {
            cpu,
            clusters: [const { [const { AtomicU32::new(NONE) }; ORDERS] }; MAX_SWAP_AREAS],
            events: FrequentEvents::new(),
            evictions: Evictions::new(),
            faults: SwapFaults::new(),
        }
    }
}

/// The running CPU, if it was ever online. The answer may be stale.
#[inline]
pub(super) fn own<P: Platform>(memory: &Memory<P>) -> Option<Cpu> {
    Some(memory.cpus.own(memory.platform())?.swap.cpu)
}

/// The counts of the running CPU, or the counts shared by all CPUs without a part.
#[inline]
pub(crate) fn frequent_events<P: Platform>(memory: &Memory<P>) -> &FrequentEvents {
    memory.cpus.own(memory.platform()).map_or(&memory.rare.frequent, |own| &own.swap.events)
}

/// The record of the faults on the running CPU, or the record shared by all CPUs without a part.
#[inline]
pub(super) fn faults<P: Platform>(memory: &Memory<P>) -> &SwapFaults {
    memory.cpus.own(memory.platform()).map_or(&memory.swap.faults, |own| &own.swap.faults)
}

/// Counts pages whose content was read.
#[inline]
pub(super) fn note_swapped_in<P: Platform>(memory: &Memory<P>, pages: u32) {
    frequent_events(memory).swapped_in.fetch_add(u64::from(pages), Relaxed);
}

/// Counts pages whose content was written.
#[inline]
pub(super) fn note_swapped_out<P: Platform>(memory: &Memory<P>, pages: u32) {
    frequent_events(memory).swapped_out.fetch_add(u64::from(pages), Relaxed);
}

/// The evictions of the running CPU.
#[inline]
fn evictions<P: Platform>(memory: &Memory<P>) -> Option<&Evictions> {
    Some(&memory.cpus.own(memory.platform())?.swap.evictions)
}

/// Adds evicted pages to the clock.
#[inline]
pub(crate) fn note_evicted<P: Platform>(memory: &Memory<P>, pages: u32) {
    memory.clock.note_evicted(evictions(memory), pages);
}

/// The shadow for the slot of an evicted page.
#[inline]
pub(crate) fn shadow<P: Platform>(memory: &Memory<P>) -> u32 {
    memory.clock.shadow(evictions(memory))
}

/// Records that `pages` pages with this shadow are in memory again. Returns their age.
pub(crate) fn note_return<P: Platform>(memory: &Memory<P>, shadow: u32, pages: u32) -> Age {
    memory.clock.note_return(evictions(memory), shadow, pages)
}

/// Makes a CPU that comes online check its requests. The changes of CPUs are serialized.
pub(crate) fn adopt<P: Platform>(memory: &Memory<P>, part: &SwapPart) {
    memory.swap.areas.iter().for_each(|area| area.requests.adopt_group(part.cpu));
}

/// Returns the clusters and the evictions of a CPU that is taken offline, and leaves its requests
/// to the online CPUs. Its other counts stay in its part, which is still read with all others. The
/// changes of CPUs are serialized.
pub(crate) fn hand_over<'a, P: Platform>(
    memory: &Memory<P>,
    part: &SwapPart,
    mut online: impl Iterator<Item = &'a SwapPart>,
) {
    let is_alone = !online.any(|other| RequestTable::share_a_group(other.cpu, part.cpu));
    for area in &memory.swap.areas {
        area.disown(Some(part.cpu));
        if is_alone {
            area.requests.share_group(part.cpu);
        }
    }
    memory.swap.store.hand_over(&memory.frames, part.cpu);
    memory.clock.fold(&part.evictions);
}
