//! Unmapping with exceptions: entries in the middle of the range that stay.

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Equal, Level, Marker};
use crate::folio::Folio;
use crate::platform::Platform;
use crate::tlb::Gather;

use super::cursor::{Chunks, Cursor, WholeTables};
use super::locking::Depth;
use super::rewrite::write_protect::is_protected;
use super::run::{Run, What};
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
    /// All but the pages of this folio.
    AllBut(Folio),
}

/// The write-protection of unmapped pages (`userfaultfd(2)`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Protected {
    /// It is forgotten.
    Forgotten,
    /// Markers keep it.
    Marked,
}

/// The exceptions of an unmapping.
#[derive(Clone, Copy)]
pub(crate) struct Exceptions {
    pub(crate) spared: Spared,
    pub(crate) protected: Protected,
}

/// Whether whole tables may be detached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pass {
    /// Tables that the range covers and that can have no guard markers are detached whole; others
    /// are left.
    Tables,
    /// Each entry is read.
    Entries,
}

impl<P: Platform> PageTable<'_, P> {
    /// As `zap`, but some things stay. One invalidation for each chunk of tables without
    /// exceptions, and for each stretch between two exceptions.
    ///
    /// Whether a table has a guard is asked under that table's lock: the flag of the VMA
    /// ([`crate::space::MappingFlags::MAYBE_GUARDS`]) may come after the caller has looked.
    pub(crate) fn zap_sparing(
        &self,
        range: VirtRange,
        except: Exceptions,
        gather: &mut Gather,
    ) -> Result<(), NoMemory> {
        let tables = self.takes_tables(except);
        if tables && !self.zap_sparing_in(range, except, Pass::Tables, gather)? {
            return Ok(());
        }
        self.zap_sparing_in(range, except, Pass::Entries, gather).map(|_| ())
    }

    /// Whether tables may be detached whole. Not while a move brings entries here: it has
    /// preallocated tables, and needs them (`move_range`).
    pub(crate) fn takes_tables(&self, Exceptions { spared, protected }: Exceptions) -> bool {
        let moving = self.moving.source().is_some();
        let all = spared == Spared::Guards && protected == Protected::Forgotten;
        all && self.reach.takes_tables() && !moving
    }

    /// Says whether tables were left.
    fn zap_sparing_in(
        &self,
        range: VirtRange,
        except: Exceptions,
        pass: Pass,
        gather: &mut Gather,
    ) -> Result<bool, NoMemory> {
        let Exceptions { spared, protected } = except;
        let (depth, whole) = match pass {
            // Those above keep: to detach one, all below it would have to be marked in one lock
            // span.
            Pass::Tables => (Depth::LeafEdges, WholeTables::LowestYielded),
            Pass::Entries => (Depth::Floor(Level::PTE), WholeTables::Entered),
        };
        let mut left = false;
        let mut chunks = Chunks::of(range);
        while let Some(mut cursor) = chunks.next(self, depth, None) {
            // From here to the cursor's position leaves are suspended.
            let mut from = None;
            loop {
                let run = match cursor.next_run_or_table(Equal::empty(), whole) {
                    Ok(Some(run)) => run,
                    Ok(None) => break,
                    Err(error) => {
                        drop_stretch(&mut cursor, from.take(), gather);
                        cursor.flush(gather);
                        return Err(error);
                    }
                };
                match run.what {
                    What::Empty => {}
                    What::Table(table) => {
                        let node = run.node.child(table);
                        if try_mark_stray(self, node, Keep::Guards) {
                            cursor.detach(&run, table, range, gather);
                        } else {
                            // Nothing in it is suspended: a stretch must not reach over it.
                            let stretch = from.take().map(|from: VirtAddr| (from, run.at));
                            drop_until(&mut cursor, stretch, gather);
                            left = true;
                        }
                    }
                    What::Leaf(_) | What::Absent(_) if self.is_spared(&run, spared) => {
                        let stretch = from.take().map(|from: VirtAddr| (from, run.at));
                        drop_until(&mut cursor, stretch, gather);
                    }
                    What::Leaf(_) | What::Absent(_)
                        if protected == Protected::Marked && is_protected(&run) =>
                    {
                        let stretch = from.take().map(|from: VirtAddr| (from, run.at));
                        drop_until(&mut cursor, stretch, gather);
                        leave_markers(&mut cursor, &run, gather);
                    }
                    What::Leaf(_) => {
                        suspend(&mut cursor, &run, gather);
                        from.get_or_insert(run.at);
                    }
                    What::Absent(first) => clear_absent(&mut cursor, &run, first),
                }
            }
            drop_stretch(&mut cursor, from.take(), gather);
            cursor.flush(gather);
        }
        Ok(left)
    }

    fn is_spared(&self, run: &Run<P::Arch>, spared: Spared) -> bool {
        let copies = spared != Spared::Guards;
        let is_copy = |frame| {
            let folio = self.memory.frames.folio_of(frame);
            match spared {
                Spared::Guards => false,
                Spared::GuardsAndCopies => {
                    folio.is_some_and(|folio| self.memory.frames.folio(folio).is_anonymous())
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
}

/// Drops what was suspended from `from` up to the cursor's position.
fn drop_stretch<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    from: Option<VirtAddr>,
    gather: &mut Gather,
) {
    let end = cursor.passed().end();
    drop_until(cursor, from.map(|from| (from, end)), gather);
}

fn drop_until<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    stretch: Option<(VirtAddr, VirtAddr)>,
    gather: &mut Gather,
) {
    let Some((from, end)) = stretch else { return };
    cursor.flush(gather);
    drop_suspended(cursor, VirtRange::raw(from.0, end.0.max(from.0)));
}
