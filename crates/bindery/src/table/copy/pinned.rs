//! Pinned pages of the parent: the child gets copies at once.
//!
//! They are copied without locks and outside read sections, so no thread waits for a copy. They are
//! put into the child's tables under the locks of both sides, a few at a time:
//! 1. Under the parent's locks, the run is found and its folio gets a reference.
//! 2. With no lock, up to [`BATCH`] pages are copied.
//! 3. Under the locks of both sides, the parent's entries are looked at again, and the child's are
//!    written where they still map the same pages. This repeats from 2, to the run's end.
//!
//! During the copy, faults, operations and pins wait for the parent's VMA. A truncation does not,
//! and it removes private copies:
//! 1. CPU A, in a fork, copies a page.
//! 2. CPU B truncates the file: it removes the page from the parent, and finds nothing in the child
//!    yet.
//! 3. Without the second look, CPU A would give the child a page after the file's end.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ops::Range;

use crate::addr::{Frame, Order, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{
    Absent, AbsentFormat, Arch, Attributes, Kind, Level, Permissions, ProtectionKey,
};
use crate::error::Failure;
use crate::folio::{Folio, FreshPages, OwnerKind};
use crate::interrupt;
use crate::memory::before_execution;
use crate::platform::Platform;
use crate::table::cursor::Cursor;
use crate::table::locking::Depth;
use crate::table::{EntryAt, NoMemory, PageTable, TableEntry, TablePool};

use super::ForkCopy;

/// So many pages are copied between two looks at the parent's entries.
const BATCH: usize = 16;

/// The attributes of the child's entries, with these permissions, perhaps none, and this key.
pub(super) fn copy_attributes(permissions: Permissions, key: ProtectionKey) -> Attributes {
    let used = Attributes { accessed: true, dirty: true, soft_dirty: true, ..Default::default() };
    Attributes { permissions, key, ..used }
}

/// A run of pinned pages, whose folio has a reference for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PinnedRun {
    pub(super) range: VirtRange,
    /// The frame of its first page, and the folio of all.
    pub(super) first: Frame,
    pub(super) folio: Folio,
    /// Of the entries of the copies.
    pub(super) attributes: Attributes,
}

/// The copy of one pinned run.
pub(super) struct PinnedCopy<'c, 'm, P: Platform> {
    pub(super) parent: &'c PageTable<'m, P>,
    pub(super) child: &'c PageTable<'m, P>,
    pub(super) run: &'c PinnedRun,
    pub(super) what: &'c ForkCopy<'c>,
    /// New tables of the child, while locks are held.
    pub(super) tables: &'c mut TablePool<'m, P>,
}

impl<P: Platform> PinnedCopy<'_, '_, P> {
    /// Gives the child copies of the run's pages, and drops the run's reference. Called without
    /// locks on tables and outside of read sections. May wait for memory.
    pub(super) fn copy(mut self) -> Result<(), Failure> {
        let (memory, run) = (self.parent.memory, self.run);
        let mut done = 0;
        let mut result = Ok(());
        while result.is_ok() && done < run.range.pages() {
            let count = (run.range.pages() - done).min(BATCH as u64);
            let copied = self.copy_batch(done..done + count).map_err(Failure::from);
            result = copied.and_then(|()| Ok(interrupt::check(memory.platform())?));
            done += count;
        }
        // SAFETY: 1. that of the run, whose only copy this is.
        unsafe { memory.frames.folio(run.folio).release() };
        result
    }

    /// Copies pages of the run.
    fn copy_batch(&mut self, pages: Range<u64>) -> Result<(), NoMemory> {
        let memory = self.parent.memory;
        let frames = &memory.frames;
        let mut copies = FreshPages::<_, BATCH>::new(frames);
        let mut installed = 0;
        let mut copied = Ok(());
        for page in pages.clone() {
            memory.may_wait();
            let Some(fresh) = frames.new_exclusive_folio(Order::PAGE) else {
                copied = Err(NoMemory);
                break;
            };
            memory.platform().copy(self.run.first.plus(page as u32), fresh.head, 1);
            copies.push(fresh);
        }
        while copied.is_ok() && installed < copies.len() {
            let from = pages.start + installed as u64;
            let (done, stopped) = self.install(from, &mut copies);
            installed += done;
            if stopped.is_err() {
                copied = self.tables.refill();
            } else if installed < copies.len() {
                // The parent has no longer what was copied.
                break;
            }
        }
        copies.discard();
        copied
    }

    /// Maps the copies in the child from page `first` of the run on, as long as the parent maps the
    /// pages that they were made of. Returns how many were mapped, and whether there were tables
    /// for them.
    fn install(
        &mut self,
        first: u64,
        copies: &mut FreshPages<'_, P, BATCH>,
    ) -> (usize, Result<(), NoMemory>) {
        let Self { parent, child, run, what, tables } = self;
        let memory = parent.memory;
        let count = copies.left().len();
        let start = run.range.start().0 + (first << PAGE_SHIFT);
        let range = VirtRange::raw(start, start + count as u64 * PAGE_SIZE);
        let index = what.page_offset + ((start - what.range.start().0) >> PAGE_SHIFT);
        copies.set_owner(what.owner, index);
        let section = parent.read_section();
        let mut source = parent.cursor(&section, range, Depth::Floor(Level::PTE));
        let of_child = child.read_section();
        let mut target = child.cursor(&of_child, range, Depth::Floor(Level::PTE));
        let mut frame = run.first.plus(first as u32);
        for done in 0..count {
            let Some(copy) = copies.first() else { return (done, Ok(())) };
            let at = VirtAddr(start + done as u64 * PAGE_SIZE);
            if frame_at(&mut source, at) != Some(frame) {
                return (done, Ok(()));
            }
            let Ok(table) = target.table_at(at, Level::PTE, tables) else {
                return (done, Err(NoMemory));
            };
            target.counts.bytes_copied += PAGE_SIZE;
            before_execution(memory, run.attributes.permissions, copy);
            copies.map(1);
            target.counts.mapped(OwnerKind::Anonymous, 1);
            let entry = P::Arch::page_entry(copy.head, Level::PTE, run.attributes);
            let index = P::Arch::PTE.index_of(at);
            target.page_table.write_leaves(TableEntry { table, index }, entry, 1);
            target.counts.entries_written += 1;
            frame = frame.plus(1);
        }
        (count, Ok(()))
    }
}

/// The frame that the entry for `at` maps, present or `PROT_NONE`.
fn frame_at<P: Platform>(cursor: &mut Cursor<'_, '_, P>, at: VirtAddr) -> Option<Frame> {
    let EntryAt { node, index, entry: raw } = cursor.entry_at(at);
    let first = match node.level.kind(raw) {
        Kind::Leaf if node.level == Level::PTE => P::Arch::frame(node.single(raw, index)),
        Kind::Leaf => P::Arch::frame(raw),
        Kind::Absent => match P::Arch::decode_absent(raw)? {
            Absent::ProtNone { frame, .. } => frame,
            Absent::Swap { .. } | Absent::Marker(_) => return None,
        },
        Kind::Empty | Kind::Table => return None,
    };
    let inside = (at.0 & (node.level.span() - 1)) >> PAGE_SHIFT;
    Some(first.plus(inside as u32))
}
