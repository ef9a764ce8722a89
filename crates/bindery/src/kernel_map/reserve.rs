//! Reserves addresses for new areas.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::addr::PAGE_SIZE;
use crate::collections::range_skip_list::GapShape;
use crate::error::Failure;
use crate::platform::Platform;

use super::area::{Area, AreaTraits, Claim};
use super::{KernelMap, KernelMapError};

/// A constraint on an area's address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placement {
    /// Without the guard page.
    pub(super) pages: u64,
    /// The remainder of the start address modulo `align`, a power of two, is `congruent`.
    pub(super) align: u64,
    pub(super) congruent: u64,
}

/// One attempt of an operation that may be retried.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReserveAttempt {
    First,
    AfterPurge,
}

impl Placement {
    /// The gap that the area needs, including its guard page.
    pub(super) fn gap(&self) -> GapShape {
        let Self { pages, align, congruent } = *self;
        GapShape { len: (pages + 1) * PAGE_SIZE, align, congruent }
    }

    /// Reserves free addresses for a new area with this placement. If that fails, retries with an
    /// alignment of only `least` bytes, at any congruence. The new area is busy.
    pub(super) fn reserve_or_aligned<'k, P: Platform>(
        self,
        least: u64,
        map: &'k KernelMap<'_, P>,
        traits: AreaTraits,
    ) -> Result<Claim<'k>, Failure<KernelMapError>> {
        match self.reserve(map, traits) {
            Err(Failure::Refused(KernelMapError::OutOfAddresses)) if self.align > least => {
                Self { align: least, congruent: 0, ..self }.reserve(map, traits)
            }
            result => result,
        }
    }

    /// Reserves free addresses of this placement for a new area.
    fn reserve<'k, P: Platform>(
        &self,
        map: &'k KernelMap<'_, P>,
        traits: AreaTraits,
    ) -> Result<Claim<'k>, Failure<KernelMapError>> {
        let memory = map.memory;
        let mut area = None;
        // A purge of freed areas may make addresses or memory available.
        for attempt in [ReserveAttempt::First, ReserveAttempt::AfterPurge] {
            if attempt == ReserveAttempt::AfterPurge {
                map.purge_freed();
            }
            let slab = &memory.slab::<Area>();
            let allocate = || slab.allocate_with(&memory.frames, || Area::new(traits));
            area = area.or_else(allocate);
            if let Some(area) = area
                // SAFETY: 1. the area was just allocated, or refused by an earlier attempt; if no
                // place is found, the code below frees it.
                && unsafe { map.areas.insert(area, self) }
            {
                // SAFETY: 1. the area was created busy.
                return Ok(unsafe { Claim::new(area) });
            }
        }
        let Some(area) = area else { return Err(Failure::NoMemory) };
        // SAFETY: the area came from this slab and was never in an index, so no other reference
        // exists.
        unsafe { memory.slab::<Area>().free(&memory.frames, area) };
        Err(KernelMapError::OutOfAddresses.into())
    }
}
