//! Counts mappings of folios for runs of leaves.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use super::Memory;
use super::shown::{map_shown, shown_limit, unmap_shown};
use crate::addr::Frame;
use crate::arch::{Absent, AbsentFormat, Arch, Entry};
use crate::error::NoMemory;
use crate::frame::{FrameRange, FreeBatch};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::swap::after_unmapping;

/// The length of the run that begins with `frame`, at most `limit` pages, and the frame difference
/// between neighbors. A run is the rest of the folio; adjacent leaves of the zero page also form a
/// run.
#[inline]
pub(crate) fn folio_limit<P: Platform>(memory: &Memory<P>, frame: Frame, limit: u32) -> (u32, u64) {
    if frame == memory.zero_frame {
        return (limit, 0);
    }
    match memory.frames.folio_of(frame) {
        Some(folio) => {
            let left = folio.head.0 + folio.pages() - frame.0;
            (limit.min(left), P::Arch::STEP)
        }
        None => match memory.huge_zero.pages_from(frame, memory.huge_order()) {
            0 => (shown_limit(memory, frame, limit), P::Arch::STEP),
            left => (limit.min(left), P::Arch::STEP),
        },
    }
}

/// The length of the longest run that the absent entry `first` can begin, at most `limit` entries.
/// `PROT_NONE` pages of one folio form a run. Frames count up in such a run, so zero pages form
/// none: the frame after the zero page belongs to another folio.
#[inline]
pub(crate) fn absent_limit<P: Platform>(memory: &Memory<P>, first: Entry, limit: u32) -> u32 {
    match P::Arch::decode_absent(first) {
        Some(Absent::ProtNone { frame, .. }) => match folio_limit(memory, frame, limit) {
            (_, 0) => 1,
            (limit, _) => limit,
        },
        Some(Absent::Swap { .. } | Absent::Marker(_)) | None => limit,
    }
}

/// Drops the mappings of `pages` pages of one folio, starting with the page of `first`, which has
/// the combined accessed and dirty bits of all pages.
///
/// # Safety
/// 1. The caller has removed their entries and drops the mappings only here.
/// 2. No TLB has translations from these entries.
pub(crate) unsafe fn unmap_pages<P: Platform>(
    memory: &Memory<P>,
    first: Entry,
    pages: u32,
    batch: &mut FreeBatch<'_, P>,
    counts: &mut Counts,
) {
    let Some(folio) = memory.frames.folio_of(P::Arch::frame(first)) else {
        return unmap_shown(memory, FrameRange { first: P::Arch::frame(first), count: pages });
    };
    counts.folios_touched += 1;
    counts.unmapped(memory.frames.folio(folio).owner_kind(), pages);
    let dirty = || P::Arch::attributes(first).dirty;
    // SAFETY: 1. and 2. the caller's obligations 1 and 2.
    let freed = unsafe { memory.frames.folio(folio).unmap_into(batch, pages, dirty) };
    after_unmapping(memory, batch, folio, freed);
}

/// As [`unmap_pages`], for frames that are known to be dirty or clean.
///
/// # Safety
/// 1. and 2. As for [`unmap_pages`].
pub(crate) unsafe fn unmap_frames<P: Platform>(
    memory: &Memory<P>,
    frames: FrameRange,
    dirty: bool,
    batch: &mut FreeBatch<'_, P>,
    counts: &mut Counts,
) {
    let Some(folio) = memory.frames.folio_of(frames.first) else {
        return unmap_shown(memory, frames);
    };
    counts.folios_touched += 1;
    counts.unmapped(memory.frames.folio(folio).owner_kind(), frames.count);
    // SAFETY: 1. and 2. the caller's obligations 1 and 2.
    let freed = unsafe { memory.frames.folio(folio).unmap_into(batch, frames.count, || dirty) };
    after_unmapping(memory, batch, folio, freed);
}

/// Adds mappings of `pages` pages of one folio to another address space with the counts `theirs`.
/// The pages are no longer exclusive.
pub(crate) fn share_frames<P: Platform>(
    memory: &Memory<P>,
    first: Frame,
    pages: u32,
    counts: &mut Counts,
    theirs: &mut Counts,
) -> Result<(), NoMemory> {
    let Some(folio) = memory.frames.folio_of(first) else {
        if !memory.is_zero(first) {
            map_shown(memory, FrameRange { first, count: pages });
        }
        return Ok(());
    };
    memory.frames.folio(folio).map(pages).map_err(|_| NoMemory)?;
    memory.frames.folio(folio).exclusive().clear(first.0 - folio.head.0, pages);
    counts.folios_touched += 1;
    theirs.mapped(memory.frames.folio(folio).owner_kind(), pages);
    Ok(())
}
