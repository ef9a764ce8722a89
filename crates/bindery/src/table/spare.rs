//! Unmapping with exceptions: what stays is met in the middle of what goes.

use core::sync::atomic::Ordering;

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{self, Absent, Arch, Equal, Marker, absent};
use crate::platform::Platform;
use crate::tlb::Gather;

use super::cursor::{Cursor, Whole};
use super::lock::Depth;
use super::run::{Run, What};
use super::zap::{drop_absent, drop_suspended, suspend};
use super::{OutOfMemory, PageTable};

/// What stays.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Spared {
    /// Guard markers.
    Guards,
    /// Guard markers, and anonymous pages: private copies of an object's pages.
    GuardsAndCopies,
}

impl<P: Platform> PageTable<'_, P> {
    /// As `zap`, but some things stay, and no table is freed. One invalidation for each stretch
    /// without exceptions.
    pub(crate) fn zap_sparing(
        &self,
        range: VirtRange,
        spared: Spared,
        gather: &mut Gather,
    ) -> Result<(), OutOfMemory> {
        for chunk in self.chunks(range) {
            let mut cursor = self.cursor(chunk, Depth::Floor(1));
            // From here to the cursor's position leaves are suspended.
            let mut from = None;
            loop {
                let run = match cursor.next_run(Equal::empty(), Whole::Enter) {
                    Ok(Some(run)) => run,
                    Ok(None) => break,
                    Err(error) => {
                        drop_stretch(&mut cursor, from.take(), chunk, gather);
                        return Err(error);
                    }
                };
                match run.what {
                    What::Empty | What::Table(_) => {}
                    _ if self.is_spared(&run, spared) => {
                        let stretch = from.take().map(|from: VirtAddr| (from, run.at));
                        drop_until(&mut cursor, stretch, chunk, gather);
                    }
                    What::Leaf(_) => {
                        suspend(&mut cursor, &run, gather);
                        from.get_or_insert(run.at);
                    }
                    What::Absent(first) => {
                        let (node, count) = (run.node, run.count);
                        drop_absent(self.memory, node, first, count, &mut cursor.counts);
                        let slots = self.slots(node.table);
                        for slot in &slots[run.index as usize..(run.index + count) as usize] {
                            slot.store(0, Ordering::Relaxed);
                        }
                        cursor.counts.entries_written += u64::from(count);
                        self.change_live(node.table, 0, count);
                    }
                }
            }
            drop_stretch(&mut cursor, from.take(), chunk, gather);
        }
        Ok(())
    }

    fn is_spared(&self, run: &Run, spared: Spared) -> bool {
        let copies = spared == Spared::GuardsAndCopies;
        let is_copy = |frame| {
            let folio = self.memory.frames.folio_of(frame);
            copies && folio.is_some_and(|folio| self.memory.frames.is_anonymous(folio))
        };
        match run.what {
            What::Leaf(first) => is_copy(P::Arch::frame(first)),
            What::Absent(first) => match absent::decode::<P::Arch>(first) {
                Some(Absent::Marker(Marker::Guard)) => true,
                Some(Absent::Swap { .. }) => copies,
                Some(Absent::Hidden { frame, .. }) => is_copy(frame),
                _ => false,
            },
            What::Empty | What::Table(_) => false,
        }
    }
}

/// Drops what was suspended from `from` up to the cursor's position.
fn drop_stretch<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    from: Option<VirtAddr>,
    chunk: VirtRange,
    gather: &mut Gather,
) {
    let end = cursor.passed().end();
    drop_until(cursor, from.map(|from| (from, end)), chunk, gather);
}

fn drop_until<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    stretch: Option<(VirtAddr, VirtAddr)>,
    chunk: VirtRange,
    gather: &mut Gather,
) {
    let Some((from, end)) = stretch else { return };
    cursor.tables.flush(gather, &mut cursor.counts);
    let node = cursor.cover();
    let base = chunk.start().align_down(arch::table_span::<P::Arch>(node.level));
    let range = VirtRange::raw(from.0, end.0.max(from.0));
    let mut batch = cursor.tables.memory.free_batch();
    drop_suspended(cursor, node, base, range, &mut batch);
}
