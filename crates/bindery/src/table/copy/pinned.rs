//! Pinned pages of the parent: the child gets copies immediately.
//!
//! The pages are copied without locks and outside read sections, so no thread waits for a copy. The
//! copies are installed in the child's tables under the locks of both sides, a few at a time:
//! 1. Under the parent's locks, the run is found, and its folio gets a reference.
//! 2. Without locks, up to [`BATCH`] pages are copied.
//! 3. Under the locks of both sides, the parent's entries are checked again, and the child's
//!    entries are written wherever the parent's still map the same pages. Steps 2 and 3 repeat up
//!    to the end of the run.
//!
//! During the copy, faults, operations and pins wait for the parent's VMA. A truncation does not
//! wait, and it removes private copies:
//! 1. CPU A, in a fork, copies a page.
//! 2. CPU B truncates the file: it removes the page from the parent and finds nothing in the child
//!    yet.
//! 3. Without the second check, CPU A would give the child a page beyond the file's end.

use core::ops::Range;

use arrayvec::{ArrayVec, IntoIter};

use crate::addr::{Frame, Order, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Attributes, Kind, Level};
use crate::error::Failure;
use crate::folio::{FolioIndex, FreshFolio, HeldFolio, OwnerKind};
use crate::interrupt;
use crate::memory::before_execution;
use crate::platform::Platform;
use crate::table::cursor::Cursor;
use crate::table::locking::Depth;
use crate::table::{EntryAt, NoMemory, PageTable, TableEntry, TablePool};

use super::ForkCopy;

/// The number of pages copied between two checks of the parent's entries.
const BATCH: usize = 16;

/// The attributes of the child's entries: permissions (possibly none), key and protection by a
/// userfaultfd are those of `parent`.
pub(super) fn copy_attributes(parent: Attributes) -> Attributes {
    let Attributes { permissions, key, userfault, .. } = parent;
    let used = Attributes { accessed: true, dirty: true, soft_dirty: true, ..Default::default() };
    Attributes { permissions, key, userfault, ..used }
}

/// Copies that the child does not map yet, in address order.
type Copies<'f, P> = IntoIter<FreshFolio<'f, P>, BATCH>;

/// A run of pinned pages.
#[derive(Debug)]
pub(super) struct PinnedRun {
    pub(super) range: VirtRange,
    /// The frame of the run's first page, and the folio of all its pages.
    pub(super) first: Frame,
    pub(super) held: HeldFolio,
    /// The attributes of the copies' entries.
    pub(super) attributes: Attributes,
}

/// The copy of one pinned run.
pub(super) struct PinnedCopy<'c, 'm, P: Platform> {
    pub(super) parent: &'c PageTable<'m, P>,
    pub(super) child: &'c PageTable<'m, P>,
    pub(super) run: PinnedRun,
    pub(super) what: &'c ForkCopy<'c>,
    /// New tables for the child, available while locks are held.
    pub(super) tables: &'c mut TablePool<'m, P>,
}

impl<P: Platform> PinnedCopy<'_, '_, P> {
    /// Gives the child copies of the run's pages. Called without table locks and outside of read
    /// sections. May wait for memory.
    pub(super) fn copy(mut self) -> Result<(), Failure> {
        let (memory, pages) = (self.parent.memory, self.run.range.pages());
        let mut done = 0;
        let mut result = Ok(());
        while result.is_ok() && done < pages {
            let count = (pages - done).min(BATCH as u64);
            let copied = self.copy_batch(done..done + count).map_err(Failure::from);
            result = copied.and_then(|()| Ok(interrupt::check(memory.platform())?));
            done += count;
        }
        drop(self.run.held.guard(&memory.frames));
        result
    }

    /// Copies pages of the run.
    fn copy_batch(&mut self, pages: Range<u64>) -> Result<(), NoMemory> {
        let memory = self.parent.memory;
        let frames = &memory.frames;
        let mut copies = ArrayVec::<_, BATCH>::new();
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
        let mut copies = copies.into_iter();
        while copied.is_ok() && copies.len() > 0 {
            let from = pages.end - copies.len() as u64;
            if self.install(from, &mut copies).is_err() {
                copied = self.tables.refill();
            } else if copies.len() > 0 {
                // The parent no longer has the copied page.
                break;
            }
        }
        copies.for_each(FreshFolio::discard);
        copied
    }

    /// Maps the copies in the child from page `first` of the run on, as long as the parent still
    /// maps the original pages. Mapped copies are removed from `copies`.
    ///
    /// # Errors
    /// [`NoMemory`] for a table of the next copy.
    fn install(&mut self, first: u64, copies: &mut Copies<'_, P>) -> Result<(), NoMemory> {
        let Self { parent, child, run, what, tables } = self;
        let memory = parent.memory;
        let count = copies.len();
        let start = run.range.start().0 + (first << PAGE_SHIFT);
        let range = VirtRange::raw(start, start + count as u64 * PAGE_SIZE);
        let index = what.page_offset + ((start - what.range.start().0) >> PAGE_SHIFT);
        for (copy, index) in copies.as_slice().iter().zip(index..) {
            copy.set_owner(what.owner, FolioIndex::new(index));
        }
        let section = parent.read_section();
        let mut source = parent.cursor(&section, range, Depth::Floor(Level::PTE));
        let of_child = child.read_section();
        let mut target = child.cursor(&of_child, range, Depth::Floor(Level::PTE));
        let mut frame = run.first.plus(first as u32);
        for done in 0..count {
            let at = VirtAddr(start + done as u64 * PAGE_SIZE);
            if frame_at(&mut source, at) != Some(frame) {
                return Ok(());
            }
            let table = target.table_at(at, Level::PTE, tables)?;
            let Some(fresh) = copies.next() else { return Ok(()) };
            let copy = *fresh;
            target.counts.bytes_copied += PAGE_SIZE;
            before_execution(memory, run.attributes.permissions, copy);
            fresh.map(1);
            target.counts.mapped(OwnerKind::Anonymous, 1);
            let entry = P::Arch::page_entry(copy.head, Level::PTE, run.attributes);
            let index = P::Arch::PTE.index_of(at);
            target.page_table.write_leaves(TableEntry { table, index }, entry, 1);
            target.counts.entries_written += 1;
            frame = frame.plus(1);
        }
        Ok(())
    }
}

/// The frame that the entry for `at` maps, as a leaf or as a `PROT_NONE` entry.
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
