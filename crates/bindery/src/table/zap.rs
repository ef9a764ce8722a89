//! Unmapping.
//!
//! A table that the range covers completely is detached by clearing the single entry that refers to
//! it. The table's contents are dropped after the flush, when no walker can reach the table.
//! Unmapping 1 GiB therefore writes one entry under locks, and needs no room to remember 262,144
//! pages.
//!
//! ```text
//! range      |  edge  |        whole tables        | edge |
//! phase 1    | suspend|  detach: one entry each    |suspend    under the locks
//! flush      |---------------- once ----------------------|    under the locks
//! phase 2    |  drop  |                            | drop |    under the locks
//! finish              |       drop and free        |           without locks
//! ```
//!
//! At the edges, where the table stays, entries are *suspended*: they lose their valid bit and
//! retain all other bits. The MMU then no longer sees the entries, no memory is needed to remember
//! them, and the second phase finds the pages in the entries. The table's lock excludes all other
//! threads throughout.
//!
//! One lock span covers a bounded number of entries ([`super::locking`]). A longer range, or a
//! range with many tables at its edges, takes several spans, each with its own flush.
//!
//! The flush precedes the release of the locks, with or without edges ([`crate::tlb`]), because a
//! detached table leaves an empty entry, from which other threads conclude that nothing is mapped.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::Ordering;

use crate::addr::VirtRange;
use crate::arch::{Absent, AbsentFormat, Arch, Entry, Equal, Level, Marker};
use crate::frame::FrameRange;
use crate::memory::unmap_frames;
use crate::platform::Platform;

use super::NoMemory;
use super::cursor::{Chunks, Cursor, WholeTables};
use super::deposit::free_deposit;
use super::edit::Edit;
use super::locking::Depth;
use super::run::{Run, What};
use super::span::Span;
use super::zap_few::zap_few;
use super::zap_rmap::{drop_suspended, release_absent};

/// The time of the flush after an unmapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flush {
    /// Before the table locks are released.
    BeforeUnlock,
    /// Once for everything, when the gather is finished: no CPU has the root loaded or will load
    /// it, and the reverse map no longer leads to these tables.
    AtEnd,
}

/// Unmaps everything in `range` and frees the tables that `freeable` covers. `freeable` is the
/// range together with the free addresses around it. The tables enter the gather flushed, with
/// their pages and slots already released. The caller excludes faults from the range.
///
/// Reads the runs of the edges and one entry per whole table. Fails only if a huge leaf that must
/// be split has no deposit; the runs before that leaf are unmapped in that case.
#[inline]
pub(super) fn zap<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    range: VirtRange,
    freeable: VirtRange,
    flush: Flush,
) -> Result<(), NoMemory> {
    if flush == Flush::BeforeUnlock && zap_few(edit, range, freeable) {
        return Ok(());
    }
    zap_any(edit, range, freeable, flush)
}

#[inline(never)]
fn zap_any<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    range: VirtRange,
    freeable: VirtRange,
    flush: Flush,
) -> Result<(), NoMemory> {
    if !edit.reach.takes_tables() {
        // The baseline reads every leaf first and then finds the tables empty.
        let mut chunks = Chunks::of(range);
        while let Some(part) = edit.next_part(&mut chunks) {
            let section = edit.table().read_section();
            let mut span = edit.chunk_span(&section, &mut chunks, part, Depth::Floor(Level::PTE));
            zap_locked(&mut span, range, WholeTables::Entered, flush)?;
        }
    }
    let mut left = freeable;
    loop {
        // Usually the whole span: one entry detaches a table with all tables below it. The edit's
        // own marks are flushed together with the rest.
        let section = edit.table().read_section();
        let mut span = edit.unlocked_span(&section, left);
        span.lock(&section, Depth::Edges);
        zap_locked(&mut span, range, WholeTables::Yielded, flush)?;
        left = VirtRange::raw(span.range().end().0, freeable.end().0);
        if left.is_empty() {
            return Ok(());
        }
    }
}

fn zap_locked<P: Platform>(
    span: &mut Span<'_, '_, P>,
    mapped: VirtRange,
    whole: WholeTables,
    flush: Flush,
) -> Result<(), NoMemory> {
    let mut suspended = false;
    let mut failed = Ok(());
    loop {
        let run = match span.next_run_or_table(Equal::empty(), whole) {
            Ok(Some(run)) => run,
            Ok(None) => break,
            Err(error) => {
                failed = Err(error);
                break;
            }
        };
        match run.what {
            What::Empty => {}
            What::Table(table) => span.detach(&run, table, mapped),
            What::Leaf(_) => {
                suspend(span, &run);
                suspended = true;
            }
            What::Absent(first) => clear_absent(span, &run, first),
        }
    }
    if suspended || flush == Flush::BeforeUnlock {
        span.flush();
    } else {
        span.flush_at_end();
    }
    if suspended {
        // Entries that the span has not reached were not suspended.
        let passed = span.passed();
        // SAFETY: 1. flushed above, with the span's locks held.
        unsafe { drop_suspended(span, passed) };
    }
    failed
}

/// Phase 1: clears the valid bit of the run's leaves.
pub(super) fn suspend<P: Platform>(span: &mut Span<'_, '_, P>, run: &Run<P::Arch>) {
    span.narrow_until_flush(run).suspend_each();
    span.counts.entries_written += u64::from(run.count);
}

/// Clears the run's absent entries, which no TLB holds, and releases the slots or pages to which
/// they refer.
pub(super) fn clear_absent<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    first: Entry,
) {
    let page_table = cursor.page_table;
    let Cursor { locks, counts, .. } = &mut *cursor;
    // SAFETY: 1. the cursor holds the lock of the table; the entries are cleared below. 2. an
    // absent entry was flushed when it was made, or it is under a mark, which the cursor's locking
    // honors.
    unsafe { release_absent(page_table.memory, run.node.level, first, run.count, counts) };
    if run.node.level > Level::PTE {
        free_deposit(page_table.memory, locks, run.node.table, counts);
    }
    for word in page_table.entries_of(run) {
        word.store(0, Ordering::Relaxed);
    }
    cursor.counts.entries_written += u64::from(run.count);
    page_table.change_entry_count(run.node.table, 0, run.count);
}

/// Drops a run of pages that a userfaultfd has write-protected and leaves markers in place of the
/// pages.
pub(super) fn leave_markers<P: Platform>(span: &mut Span<'_, '_, P>, run: &Run<P::Arch>) {
    let page_table = span.page_table;
    let entries = page_table.entries_of(run);
    let marker = P::Arch::encode_absent(Absent::Marker(Marker::UserfaultWriteProtect));
    match run.what {
        What::Leaf(first) => {
            suspend(span, run);
            span.flush();
            // Read after the flush, because the MMU may have recorded a write until then.
            let dirty = entries.iter().any(|word| {
                let entry = Entry(word.load(Ordering::Relaxed) | P::Arch::PRESENT);
                P::Arch::attributes(entry).dirty
            });
            let frames = FrameRange { first: P::Arch::frame(first), count: run.pages() };
            let memory = page_table.memory;
            let (mut batch, counts) = (memory.free_batch(), &mut span.counts);
            // SAFETY: 1. the span holds the lock of the table; markers replace the entries below.
            // 2. flushed above.
            unsafe { unmap_frames(memory, frames, dirty, &mut batch, counts) };
        }
        What::Absent(first) => {
            let (level, counts) = (run.node.level, &mut span.counts);
            // SAFETY: 1. as above; 2. an absent entry was flushed when it was made, or it is under
            // a mark, which the span's locking honors.
            unsafe { release_absent(page_table.memory, level, first, run.count, counts) };
        }
        What::Empty | What::Table(_) => return,
    }
    for word in entries {
        word.store(marker.0, Ordering::Relaxed);
    }
    span.counts.entries_written += u64::from(run.count);
}
