//! Unmapping with exceptions: entries in the middle of the range that stay.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::Memory;
use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Equal, Level, Marker};
use crate::folio::Folio;
use crate::platform::Platform;

use super::cursor::{Chunks, WholeTables};
use super::edit::Edit;
use super::locking::Depth;
use super::rewrite::write_protect::is_protected;
use super::run::{Run, What};
use super::span::Span;
use super::stray::{Keep, try_mark_stray};
use super::zap::{clear_absent, leave_markers, suspend};
use super::zap_rmap::drop_suspended;
use super::{NoMemory, PageTable};

/// The entries that stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Spared {
    /// Guard markers.
    Guards,
    /// Guard markers, and anonymous pages: private copies of an object's pages.
    GuardsAndCopies,
    /// Everything except the pages of this folio.
    AllBut(Folio),
}

/// The fate of unmapped pages' write-protection (`userfaultfd(2)`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Protected {
    /// The write-protection is dropped.
    Forgotten,
    /// Markers preserve the write-protection.
    Marked,
}

/// The exceptions of an unmapping.
#[derive(Clone, Copy)]
pub(crate) struct Exceptions {
    pub(crate) spared: Spared,
    pub(crate) protected: Protected,
}

/// Whether a pass may detach whole tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pass {
    /// Tables that the range covers and that cannot have guard markers are detached as a whole;
    /// other tables are left.
    Tables,
    /// Each entry is read.
    Entries,
}

/// As [`zap`](super::zap::zap), with exceptions. Makes one invalidation per chunk of tables without
/// exceptions, and one per stretch between two exceptions.
///
/// Whether a table has a guard is checked under that table's lock: the flag of the VMA
/// ([`crate::space::MappingFlags::MAYBE_GUARDS`]) may be set after the caller has checked it.
pub(super) fn zap_sparing<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    range: VirtRange,
    except: Exceptions,
) -> Result<(), NoMemory> {
    let tables = except.allow_whole_tables(edit.table());
    if tables && !zap_sparing_in(edit, range, except, Pass::Tables)? {
        return Ok(());
    }
    zap_sparing_in(edit, range, except, Pass::Entries).map(|_| ())
}

impl Exceptions {
    /// Whether tables may be detached as a whole. They may not while a move brings entries into
    /// this tree, because the move needs the tables that it has preallocated (`mover::range`).
    pub(crate) fn allow_whole_tables<P: Platform>(self, page_table: &PageTable<'_, P>) -> bool {
        let moving = page_table.moving.source().is_some();
        let all = self.spared == Spared::Guards && self.protected == Protected::Forgotten;
        all && page_table.reach.takes_tables() && !moving
    }
}

/// Returns whether any tables were left.
fn zap_sparing_in<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    range: VirtRange,
    Exceptions { spared, protected }: Exceptions,
    pass: Pass,
) -> Result<bool, NoMemory> {
    let page_table = edit.table();
    let (depth, whole) = match pass {
        // Upper tables stay: detaching an upper table would require marking all tables below it in
        // one lock span.
        Pass::Tables => (Depth::LeafEdges, WholeTables::LowestYielded),
        Pass::Entries => (Depth::Floor(Level::PTE), WholeTables::Entered),
    };
    let mut left = false;
    let mut chunks = Chunks::of(range);
    while let Some(part) = edit.next_part(&mut chunks) {
        let section = edit.table().read_section();
        let mut span = edit.chunk_span(&section, &mut chunks, part, depth);
        // Leaves are suspended from this address to the span's position.
        let mut from = None;
        loop {
            let run = match span.next_run_or_table(Equal::empty(), whole) {
                Ok(Some(run)) => run,
                Ok(None) => break,
                Err(error) => {
                    drop_stretch(&mut span, from.take());
                    span.flush();
                    return Err(error);
                }
            };
            match run.what {
                What::Empty => {}
                What::Table(table) => {
                    let node = run.node.child(table);
                    if try_mark_stray(&page_table.tables(&section), node, Keep::Guards) {
                        span.detach(&run, table, range);
                    } else {
                        // Nothing in the exception is suspended, so a stretch must not extend
                        // across it.
                        let stretch = from.take().map(|from: VirtAddr| (from, run.at));
                        drop_until(&mut span, stretch);
                        left = true;
                    }
                }
                What::Leaf(_) | What::Absent(_) if is_spared(page_table.memory, &run, spared) => {
                    let stretch = from.take().map(|from: VirtAddr| (from, run.at));
                    drop_until(&mut span, stretch);
                }
                What::Leaf(_) | What::Absent(_)
                    if protected == Protected::Marked && is_protected(&run) =>
                {
                    let stretch = from.take().map(|from: VirtAddr| (from, run.at));
                    drop_until(&mut span, stretch);
                    leave_markers(&mut span, &run);
                }
                What::Leaf(_) => {
                    suspend(&mut span, &run);
                    from.get_or_insert(run.at);
                }
                What::Absent(first) => clear_absent(&mut span, &run, first),
            }
        }
        drop_stretch(&mut span, from.take());
        span.flush();
    }
    Ok(left)
}

fn is_spared<P: Platform>(memory: &Memory<P>, run: &Run<P::Arch>, spared: Spared) -> bool {
    let copies = spared != Spared::Guards;
    let is_copy = |frame| {
        let folio = memory.frames.folio_of(frame);
        match spared {
            Spared::Guards => false,
            Spared::GuardsAndCopies => {
                folio.is_some_and(|folio| memory.frames.folio(folio).is_anonymous())
            }
            Spared::AllBut(dropped) => folio != Some(dropped),
        }
    };
    match run.what {
        What::Leaf(first) => is_copy(P::Arch::frame(first)),
        What::Absent(first) => match P::Arch::decode_absent(first) {
            Some(Absent::Marker(Marker::Guard)) => true,
            Some(Absent::Swap { .. }) => copies,
            Some(Absent::ProtNone { frame, .. }) => is_copy(frame),
            Some(Absent::Marker(Marker::UserfaultWriteProtect | Marker::Poison)) | None => {
                match spared {
                    Spared::AllBut(_) => true,
                    Spared::Guards | Spared::GuardsAndCopies => false,
                }
            }
        },
        What::Empty | What::Table(_) => false,
    }
}

/// Drops the suspended entries from `from` up to the span's position.
fn drop_stretch<P: Platform>(span: &mut Span<'_, '_, P>, from: Option<VirtAddr>) {
    let end = span.passed().end();
    drop_until(span, from.map(|from| (from, end)));
}

fn drop_until<P: Platform>(span: &mut Span<'_, '_, P>, stretch: Option<(VirtAddr, VirtAddr)>) {
    let Some((from, end)) = stretch else { return };
    span.flush();
    // SAFETY: 1. flushed above, with the span's locks held.
    unsafe { drop_suspended(span, VirtRange::raw(from.0, end.0.max(from.0))) };
}
