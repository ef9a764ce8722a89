//! Collapse: one huge leaf replaces a table of small ones. The pages are copied into one folio, or
//! already form one folio.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Frame, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Attributes, Entry, EntryIndex, Equal, Kind, Level};
use crate::folio::{Folio, FreshFolio};
use crate::memory::before_execution;
use crate::platform::Platform;
use crate::stats::Counts;

use super::edit::Edit;
use super::locking::Depth;
use super::run::{Entries, Run, What};
use super::span::Span;
use super::{EntryAt, PageTable, Table, free_table, new_table, run};

/// The huge leaf that replaces a table of small leaves.
pub(crate) struct Replacement {
    /// The start of the table's span.
    pub(crate) base: VirtAddr,
    /// The attributes of the new leaf.
    pub(crate) attributes: Attributes,
    /// The table to be deposited for a later split of the leaf.
    pub(crate) deposit: Frame,
}

/// The reason that the entries of a table could not become one leaf.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum JoinError {
    /// An entry is missing, or the entries differ or do not map one folio in order.
    NotUniform,
    /// No memory for the table that the new leaf must keep on deposit.
    NoMemory,
}

/// Copies the pages that the table for `base` maps into the folio, zeroes the other pages, and
/// replaces the table with one leaf. The folio is fresh and of the table's size. The old table and
/// everything that it maps enter the gather. Returns the folio without a change if no table exists
/// or if the table holds anything but leaves. Called without table locks and outside of read
/// sections.
///
/// The caller excludes faults and pins from the range, because no page may be written during the
/// copy and no translation may be left by then:
/// 1. the entry that refers to the table is cleared and flushed, and the table is marked as
///    detached;
/// 2. without locks, the pages are copied, since no other thread changes a marked table;
/// 3. under the parent's lock, the leaf is written.
///
/// No thread fills the entry between steps 1 and 3, since the VMA is held for writing. A walk of
/// the reverse map finds the folios busy in that time: they are mapped, but no entry refers to
/// them.
pub(super) fn replace_by_copy<'m, P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    what: &Replacement,
    folio: FreshFolio<'m, P>,
) -> Option<FreshFolio<'m, P>> {
    let Some(table) = take_table(edit, what.base) else { return Some(folio) };
    // SAFETY: 1. the table is detached and in the gather of the edit, which is borrowed and frees
    // the table later.
    copy_all(edit, unsafe { Table::new(table) }, *folio);
    before_execution(edit.memory, what.attributes.permissions, *folio);
    put_leaf(edit, what, folio);
    None
}

/// Removes the table for `base` from the tree, if the table exists and contains only leaves.
fn take_table<P: Platform>(edit: &mut Edit<'_, '_, P>, base: VirtAddr) -> Option<Frame> {
    let range = VirtRange::raw(base.0, base.0 + P::Arch::PMD.span());
    let page_table = edit.table();
    let section = edit.table().read_section();
    let mut span = edit.span(&section, range, Depth::Floor(Level::PTE));
    let EntryAt { node, .. } = span.entry_at(base);
    let EntryAt { node: parent, index, .. } = span.parent_of(base, Level::PTE)?;
    let words = page_table.entries(node.table);
    let entries = P::Arch::ENTRIES;
    let leaf_or_empty = |index: EntryIndex| {
        matches!(P::Arch::PTE.kind(run::load(words, index)), Kind::Leaf | Kind::Empty)
    };
    if node.level != Level::PTE || !EntryIndex::all::<P::Arch>().all(leaf_or_empty) {
        return None;
    }
    page_table.memory.worked(u64::from(entries), 0);
    let what = What::Table(node.table);
    let run = Run { at: base, node: parent, index, count: 1, what };
    span.clear_table_entry(&run, range);
    page_table.change_entry_count(parent.table, 0, 1);
    span.flush();
    span.gather_subtree(node, Level::PTE);
    Some(node.table.frame())
}

/// Copies the pages of `table`, which has left the tree, into the folio.
fn copy_all<P: Platform>(page_table: &PageTable<'_, P>, table: Table<'_>, folio: Folio) {
    let memory = page_table.memory;
    let mut counts = Counts::default();
    let words = page_table.entries(table);
    let mut index = EntryIndex::FIRST;
    while index.left::<P::Arch>() > 0 {
        let raw = run::load(words, index);
        let to = folio.head.plus(index.number());
        let count = if P::Arch::PTE.kind(raw) == Kind::Leaf {
            let first = P::Arch::frame(P::Arch::clear_contig(raw, index));
            let count = consecutive::<P>(words, index, first, memory.zero_frame);
            memory.platform().copy(first, to, count);
            counts.bytes_copied += u64::from(count) * PAGE_SIZE;
            count
        } else {
            let count = run::count_empty(&words[index.positions(index.left::<P::Arch>())]);
            memory.platform().zero(to, count);
            counts.bytes_zeroed += u64::from(count) * PAGE_SIZE;
            count
        };
        counts.entries_read += u64::from(count);
        index += count;
    }
    page_table.count(&counts);
}

/// Writes the leaf in place of the table.
fn put_leaf<P: Platform>(
    page_table: &PageTable<'_, P>,
    what: &Replacement,
    folio: FreshFolio<'_, P>,
) {
    let memory = page_table.memory;
    let range = VirtRange::raw(what.base.0, what.base.0 + P::Arch::PMD.span());
    let section = page_table.read_section();
    let mut cursor = page_table.cursor(&section, range, Depth::Floor(Level::PMD));
    let EntryAt { node: parent, index, entry: found } = cursor.entry_at(what.base);
    debug_assert!(parent.level == Level::PMD && found.is_empty(), "the table's place is taken");
    let pages = folio.pages();
    let folio = folio.map(pages);
    let leaf = P::Arch::page_entry(folio.head, Level::PMD, what.attributes);
    page_table.publish_huge(parent.place(index), leaf);
    page_table.deposit_table(parent.table, what.deposit);
    cursor.counts.entries_written += 1;
    cursor.counts.folios_touched += 1;
    cursor.counts.mapped(memory.frames.folio(folio).owner_kind(), pages);
}

/// Turns the leaves that fill the level-1 table for `base`, a multiple of its span, into one leaf.
/// The leaves must map all pages, in order, of one folio of that size, with equal attributes. The
/// new leaf has accessed and dirty set if any of the leaves has. Walks the table once and
/// invalidates once. The old table enters the gather. The caller excludes faults from the range.
pub(super) fn join_leaves<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    base: VirtAddr,
) -> Result<(), JoinError> {
    let memory = edit.memory;
    let range = VirtRange::raw(base.0, base.0 + P::Arch::PMD.span());
    let mut counts = Counts::default();
    memory.may_wait();
    let deposit = new_table(memory, Level::PTE, &mut counts).ok_or(JoinError::NoMemory)?;
    let done = {
        let section = edit.table().read_section();
        let mut span = edit.span(&section, range, Depth::Floor(Level::PTE));
        join_leaves_locked(&mut span, base, deposit)
    };
    if !done {
        // SAFETY: 1. allocated above; 2. a failed join has installed it nowhere.
        unsafe { free_table(memory, deposit, &mut counts) };
    }
    edit.count(&counts);
    if done { Ok(()) } else { Err(JoinError::NotUniform) }
}

fn join_leaves_locked<P: Platform>(
    span: &mut Span<'_, '_, P>,
    base: VirtAddr,
    deposit: Frame,
) -> bool {
    let page_table = span.page_table;
    let EntryAt { node, .. } = span.entry_at(base);
    if node.level != Level::PTE {
        return false;
    }
    let words = page_table.entries(node.table);
    let entries = P::Arch::ENTRIES;
    let order = P::Arch::PMD.order();
    let first = run::load(words, EntryIndex::FIRST);
    if first.0 & P::Arch::PRESENT == 0 || page_table.entry_count(node.table) != entries {
        return false;
    }
    let frame = P::Arch::frame(P::Arch::clear_contig(first, EntryIndex::FIRST));
    let whole = page_table.memory.frames.folio_of(frame);
    let Some(folio) = whole.filter(|folio| folio.head == frame && folio.order == order) else {
        return false;
    };
    // A huge leaf is exclusive as a whole or not at all. A pinned page that is exclusive among
    // others would be copied by the next write, and the holder of the pin would keep the old page.
    let handle = page_table.memory.frames.folio(folio);
    if handle.exclusive().run(0, entries).count != entries {
        return false;
    }
    let equal = Equal::WRITABLE | Equal::SOFT_DIRTY;
    let match_all = || P::Arch::match_leaves(words, EntryIndex::FIRST, equal, P::Arch::STEP, 0);
    let (count, _) = match_all();
    span.counts.entries_read += u64::from(count);
    if count != entries {
        return false;
    }
    // The span holds the table above this one, so the range is that of the whole entry.
    let Some(above) = span.parent_of(base, Level::PTE) else { return false };
    let EntryAt { node: parent, index, .. } = above;
    let run = Run { at: base, node: parent, index, count: 1, what: What::Table(node.table) };
    span.clear_table_entry(&run, run.range());
    span.flush();
    // The MMU no longer walks the table, so accessed and dirty are final.
    let (_, gathered) = match_all();
    for word in words {
        word.store(0, Ordering::Relaxed);
    }
    page_table.change_entry_count(node.table, 0, entries);
    let leaf = P::Arch::page_entry(frame, Level::PMD, P::Arch::attributes(gathered));
    page_table.entries_of(&run)[0].store(leaf.0, Ordering::Release);
    page_table.deposit_table(parent.table, deposit);
    span.counts.entries_written += 1 + u64::from(entries);
    span.gather_subtree(node, Level::PTE);
    true
}

/// The number of leaves from `index` on that map consecutive frames from `first` on; the zero page
/// has no successor.
fn consecutive<P: Platform>(
    words: &[AtomicU64],
    index: EntryIndex,
    first: Frame,
    zero: Frame,
) -> u32 {
    let follows = |(offset, word): &(usize, &AtomicU64)| {
        let raw = Entry(word.load(Ordering::Relaxed));
        let at = index + *offset as u32;
        raw.0 & P::Arch::PRESENT != 0
            && P::Arch::frame(P::Arch::clear_contig(raw, at)) == first.plus(*offset as u32)
    };
    if first == zero {
        return 1;
    }
    words[index.position()..].iter().enumerate().take_while(follows).count() as u32
}
