//! Drops the mappings of zapped entries that map folios of one page, which come in sequences.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{AtomicU64, Ordering};

use crate::Memory;
use crate::addr::Order;
use crate::arch::{Arch, Entry};
use crate::folio::unmap_shared_page;
use crate::frame::FreeBatch;
use crate::platform::Platform;

/// Drops the mappings of single anonymous pages without other mappings or references. Stops at the
/// first entry of another kind. The stored entries lack the bits `missing`. Returns the number of
/// mappings. This is a separate function so that its state stays in registers.
///
/// # Safety
/// 1. The caller removes the entries before other threads see the table again.
/// 2. No TLB still holds translations of the entries.
#[inline(never)]
pub(super) unsafe fn drop_single_pages<P: Platform>(
    memory: &Memory<P>,
    entries: &[AtomicU64],
    missing: u64,
    batch: &mut FreeBatch<'_, P>,
) -> u32 {
    let mut dropped = 0;
    for word in entries {
        let raw = word.load(Ordering::Relaxed);
        let entry = Entry(raw | missing);
        // The pages of a contiguous run belong to a large folio.
        if raw == 0 || entry.0 & P::Arch::PRESENT == 0 || P::Arch::is_contig(entry) {
            break;
        }
        let folio = memory.frames.folio_of(P::Arch::frame(entry));
        let Some(folio) = folio.filter(|folio| folio.order == Order::PAGE) else { break };
        // SAFETY: 1. and 2. the caller's obligations 1 and 2.
        if !unsafe { memory.frames.folio(folio).free_anonymous_into(batch, 1) } {
            break;
        }
        dropped += 1;
    }
    dropped
}

/// As [`drop_single_pages`], for single anonymous pages with other mappings.
///
/// # Safety
/// 1. and 2. As for [`drop_single_pages`].
#[inline(never)]
pub(super) unsafe fn drop_shared_pages<P: Platform>(
    memory: &Memory<P>,
    entries: &[AtomicU64],
    missing: u64,
) -> u32 {
    let mut dropped = 0;
    for word in entries {
        let raw = word.load(Ordering::Relaxed);
        let entry = Entry(raw | missing);
        if raw == 0 || entry.0 & P::Arch::PRESENT == 0 || P::Arch::is_contig(entry) {
            break;
        }
        let (frame, dirty) = (P::Arch::frame(entry), P::Arch::attributes(entry).dirty);
        // SAFETY: 1. and 2. the caller's obligations 1 and 2.
        if !unsafe { unmap_shared_page(&memory.frames, frame, dirty) } {
            break;
        }
        dropped += 1;
    }
    dropped
}
