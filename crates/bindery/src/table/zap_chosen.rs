//! Unmaps the runs that the caller chooses, with one flush for all of them.
//!
//! As in [`super::zap`], leaves are suspended under the lock, flushed, and dropped. Entries that
//! stay may lie between them, so a set per table records the suspended entries.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::Memory;
use crate::addr::{PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Equal, Level};
use crate::folio::Folio;
use crate::platform::Platform;
use crate::swap::page_set::PageSet;

use super::cursor::Chunks;
use super::edit::Edit;
use super::locking::{Depth, Node};
use super::rewrite::clear_accessed;
use super::rewrite::write_protect::is_protected;
use super::run::{Run, What};
use super::span::Span;
use super::zap::{clear_absent, leave_markers, suspend};
use super::zap_except::Protected;
use super::zap_rmap::drop_suspended;
use super::{NoMemory, Table};

/// A run of entries that map pages of one folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MappedFolio {
    /// The folio.
    pub(crate) folio: Folio,
    /// The start of the run, in pages from the start of the range.
    pub(crate) number: u32,
    /// Whether one of the entries was used recently.
    pub(crate) used: bool,
}

/// The decision about a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ZapChoice {
    /// The run stays.
    Stays,
    /// The run stays, and its accessed bits are cleared.
    Ages,
    /// The run is unmapped.
    Goes,
}

/// Entries of a table that are suspended.
struct SuspendedEntries<'s, A: Arch> {
    node: Node<A, Table<'s>>,
    /// The address of the table's first entry.
    start: u64,
    entries: PageSet,
}

/// Unmaps the runs of `range` that `fate` chooses. `fate` is called for each run that maps pages of
/// one folio. Flushes at most once per table; the ranges of runs that only age enter the gather.
#[inline]
pub(super) fn zap_chosen<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    range: VirtRange,
    protected: Protected,
    mut fate: impl FnMut(MappedFolio) -> ZapChoice,
) -> Result<(), NoMemory> {
    let memory = edit.memory;
    let mut chunks = Chunks::of(range);
    while let Some(part) = edit.next_part(&mut chunks) {
        let section = edit.table().read_section();
        let mut span = edit.chunk_span(&section, &mut chunks, part, Depth::Floor(Level::PTE));
        let mut suspended = None;
        let done = loop {
            let run = match span.next_run(Equal::empty()) {
                Ok(Some(run)) => run,
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            };
            let Some(mapped) = mapped_by(memory, &run, range.start()) else { continue };
            match (fate(mapped), run.what) {
                (ZapChoice::Goes, _) if protected == Protected::Marked && is_protected(&run) => {
                    leave_markers(&mut span, &run);
                }
                (ZapChoice::Goes, What::Leaf(_)) => {
                    suspend_one_of_many(&mut span, &run, &mut suspended);
                }
                (ZapChoice::Goes, What::Absent(first)) => clear_absent(&mut span, &run, first),
                (ZapChoice::Ages, What::Leaf(_)) => clear_accessed(&mut span, &run),
                (ZapChoice::Goes | ZapChoice::Ages, What::Empty | What::Table(_))
                | (ZapChoice::Ages, What::Absent(_))
                | (ZapChoice::Stays, _) => {}
            }
        };
        drop_all(&mut span, suspended.take());
        done?;
    }
    Ok(())
}

/// The folio that the run maps, as leaves or as `PROT_NONE` entries.
fn mapped_by<P: Platform>(
    memory: &Memory<P>,
    run: &Run<P::Arch>,
    start: VirtAddr,
) -> Option<MappedFolio> {
    let of = |frame, used| {
        let number = ((run.at.0 - start.0) >> PAGE_SHIFT) as u32;
        Some(MappedFolio { folio: memory.frames.folio_of(frame)?, number, used })
    };
    match run.what {
        What::Leaf(first) => of(P::Arch::frame(first), P::Arch::attributes(first).accessed),
        What::Absent(first) => match P::Arch::decode_absent(first)? {
            Absent::ProtNone { frame, .. } => of(frame, false),
            Absent::Swap { .. } | Absent::Marker(_) => None,
        },
        What::Empty | What::Table(_) => None,
    }
}

/// Suspends the run. Suspended entries of another table are dropped first.
fn suspend_one_of_many<'s, P: Platform>(
    span: &mut Span<'_, '_, P>,
    run: &Run<'s, P::Arch>,
    suspended: &mut Option<SuspendedEntries<'s, P::Arch>>,
) {
    if suspended.as_ref().is_some_and(|before| before.node.table != run.node.table) {
        drop_all(span, suspended.take());
    }
    let start = run.at.0 - (u64::from(run.index.number()) << run.node.level.span_shift());
    let new = || SuspendedEntries { node: run.node, start, entries: PageSet::EMPTY };
    suspended.get_or_insert_with(new).entries.add(run.index.number(), run.count);
    suspend(span, run);
}

/// Flushes, then drops the suspended entries.
fn drop_all<P: Platform>(span: &mut Span<'_, '_, P>, suspended: Option<SuspendedEntries<P::Arch>>) {
    let Some(SuspendedEntries { node, start, entries }) = suspended else { return };
    span.flush();
    let at = |index: u32| start + (u64::from(index) << node.level.span_shift());
    let mut next = entries.next_run(0);
    while let Some(run) = next {
        // SAFETY: 1. flushed above, with the span's locks held.
        unsafe { drop_suspended(span, VirtRange::raw(at(run.first), at(run.end()))) };
        next = entries.next_run(run.end());
    }
}
