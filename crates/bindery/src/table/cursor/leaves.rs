//! Level-1 leaves that one operation handles together, even if they form several runs.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Frame, VirtAddr};
use crate::arch::{Arch, Entry, Kind, Level};
use crate::platform::Platform;
use crate::table::run::{Run, What};

use super::Cursor;

impl<'a, P: Platform> Cursor<'a, '_, P> {
    /// The level-1 leaves from the position on whose frames `takes` accepts, up to the end of the
    /// table. Their frames and attributes need not agree. `None` if the first entry is no such
    /// leaf.
    #[inline]
    pub(in crate::table) fn next_leaves(
        &mut self,
        takes: impl Fn(Frame) -> bool,
    ) -> Option<Run<'a, P::Arch>> {
        let node = self.position.filter(|node| node.level == Level::PTE)?;
        let index = node.level.index_of(VirtAddr(self.at));
        let entries =
            &self.page_table.entries(node.table)[index.positions(self.limit(node.level, index))];
        let is_taken = |word: &&AtomicU64| {
            let entry = Entry(word.load(Ordering::Relaxed));
            // A contiguous run is part of a larger folio.
            node.level.kind(entry) == Kind::Leaf
                && !P::Arch::is_contig(entry)
                && takes(P::Arch::frame(entry))
        };
        let count = entries.iter().take_while(is_taken).count() as u32;
        if count == 0 {
            return None;
        }
        self.counts.entries_read += u64::from(count);
        let what = What::Leaf(Entry(entries[0].load(Ordering::Relaxed)));
        Some(self.pass(Run { at: VirtAddr(self.at), node, index, count, what }))
    }

    /// Skips the leaves that [`Cursor::next_leaves`] would return, for a caller that would do
    /// nothing with each run.
    #[inline]
    pub(in crate::table) fn skip_leaves(&mut self, skips: impl Fn(Frame) -> bool) {
        let _passed = self.next_leaves(skips);
    }
}
