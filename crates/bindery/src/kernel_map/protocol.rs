//! The protocol of the tables, without areas, so that a model checker (`loom_model`) runs the same
//! code. The module documentation ([`super`]) explains the rules.
//!
//! ```text
//! a table   made - offered -----> installed - detached - flushed - addresses free - freed
//!                    |            (the areas' lock)       (TLBs)       (lock)      (readers)
//!                    '- another was faster: freed
//! a leaf    stored - paused: its valid bit clear - flushed - replaced
//! ```

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ops::{Deref, Range};
use core::sync::atomic::Ordering;

use crate::addr::{Frame, VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, EntryIndex, Kind, Level};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::table::locking::Node;
use crate::table::{EntryAt, ReadSection, Table, free_table};

use super::KernelMap;
use super::walk::WalkError;

/// The tree of tables that the protocol works on.
pub(super) trait KernelTree {
    type Arch: Arch;
    /// A table that was found. It is not freed while it is used.
    type Table: Copy + Into<Frame>;
    /// The table of the highest level.
    fn top(&self) -> Self::Table;
    /// The table in a frame.
    ///
    /// # Safety
    /// 1. The caller has read an entry that refers to the frame as a table, in a table that was
    ///    found here.
    unsafe fn below(&self, frame: Frame) -> Self::Table;
    /// Reads an entry.
    fn load(&self, table: Self::Table, index: EntryIndex, order: Ordering) -> Entry;
    /// Writes an entry that the caller owns.
    fn store(&self, table: Self::Table, index: EntryIndex, entry: Entry, order: Ordering);
    /// Writes an entry if it is empty, with acquire and release. Otherwise returns the current
    /// entry, read with acquire.
    fn offer(&self, table: Self::Table, index: EntryIndex, entry: Entry) -> Result<(), Entry>;
    /// An empty table that no other CPU has seen.
    fn make_table(&self, level: Level<Self::Arch>, counts: &mut Counts) -> Option<Self::Table>;
    /// Frees a table that no other CPU has seen.
    fn drop_table(&self, table: Self::Table, counts: &mut Counts);
    /// Whether a TLB may hold a detached table.
    fn is_unflushed(&self, order: Ordering) -> bool;
    /// Records whether a TLB may hold a detached table.
    fn set_unflushed(&self, unflushed: bool, order: Ordering);
    /// Waits until [`KernelTree::set_unflushed`] is called. May return spuriously.
    fn park_while_unflushed(&self);
}

/// The result of a walk without a claim.
pub(super) struct FoundEntry<A: Arch> {
    /// Empty or a leaf. A paused leaf is returned with its valid bit set.
    pub(super) entry: Entry,
    pub(super) level: Level<A>,
    pub(super) index: EntryIndex,
    pub(super) paused: bool,
}

/// The table below the entry for `at` in the table of `node`. Creates the table if the entry is
/// empty. The caller owns an address under the entry.
#[inline]
pub(super) fn child<T: KernelTree>(
    tree: &T,
    node: Node<T::Arch, T::Table>,
    at: VirtAddr,
    counts: &mut Counts,
) -> Result<T::Table, WalkError> {
    let Node { table, level } = node;
    // Acquire: this CPU sees the table as empty, or with the entries that others have stored since.
    let index = level.index_of(at);
    let entry = tree.load(table, index, Ordering::Acquire);
    counts.entries_descended += 1;
    match level.kind(entry) {
        // SAFETY: 1. just read in the table of `node`.
        Kind::Table => Ok(unsafe { tree.below(T::Arch::frame(entry)) }),
        Kind::Empty => make_child(tree, node, at, counts),
        Kind::Leaf | Kind::Absent => Err(WalkError::Occupied(at.0)),
    }
}

#[inline(never)]
fn make_child<T: KernelTree>(
    tree: &T,
    Node { table, level }: Node<T::Arch, T::Table>,
    at: VirtAddr,
    counts: &mut Counts,
) -> Result<T::Table, WalkError> {
    let new = tree.make_table(level.below(), counts).ok_or(WalkError::NoMemory)?;
    // The entry may have pointed to a table that was detached just now, with this caller's
    // addresses free under it. A CPU whose TLB holds that table finds no mapping of this caller:
    // see the module documentation. Acquire: the flush precedes the publication of the new table.
    if tree.is_unflushed(Ordering::Acquire) {
        wait_for_flush(tree);
    }
    let index = level.index_of(at);
    // Release: a reader that finds the table through this entry sees it empty. Acquire: this CPU
    // sees another caller's table in the same way.
    match tree.offer(table, index, T::Arch::table(new.into())) {
        Ok(()) => {
            counts.entries_written += 1;
            Ok(new)
        }
        Err(other) => {
            tree.drop_table(new, counts);
            match level.kind(other) {
                // SAFETY: 1. just read in the table of `node`.
                Kind::Table => Ok(unsafe { tree.below(T::Arch::frame(other)) }),
                Kind::Empty | Kind::Leaf | Kind::Absent => Err(WalkError::Occupied(at.0)),
            }
        }
    }
}

#[cold]
fn wait_for_flush<T: KernelTree>(tree: &T) {
    while tree.is_unflushed(Ordering::Acquire) {
        tree.park_while_unflushed();
    }
}

/// The entry for `at` in the lowest table that exists for it. A second read may return a different
/// entry. The caller owns the address or is in a read section.
#[inline]
pub(super) fn descend<T: KernelTree>(
    tree: &T,
    at: VirtAddr,
    counts: &mut Counts,
) -> EntryAt<T::Arch, T::Table> {
    let mut node = Node { table: tree.top(), level: T::Arch::ROOT };
    loop {
        let index = node.level.index_of(at);
        let entry = tree.load(node.table, index, Ordering::Acquire);
        counts.entries_descended += 1;
        if node.level.kind(entry) != Kind::Table {
            return EntryAt { node, index, entry };
        }
        // SAFETY: 1. just read in the table of `node`.
        node = node.child(unsafe { tree.below(T::Arch::frame(entry)) });
    }
}

/// Finds the leaf or empty entry for `at`. The caller is in a read section.
///
/// Each entry is read only once, because a second read of the last entry could find a table:
/// 1. a dump finds a huge leaf and remembers its level;
/// 2. a cut replaces the leaf by a table;
/// 3. the dump reads the entry again, finds no leaf, and continues after the table: a hole.
pub(super) fn find<T: KernelTree>(tree: &T, at: VirtAddr) -> FoundEntry<T::Arch> {
    let EntryAt { node, index, entry } = descend(tree, at, &mut Counts::default());
    let paused = !entry.is_empty() && entry.0 & T::Arch::PRESENT == 0;
    FoundEntry { entry: whole::<T::Arch>(entry), level: node.level, index, paused }
}

/// The entry as it was before a pause.
#[inline]
pub(super) fn whole<A: Arch>(entry: Entry) -> Entry {
    Entry(if entry.is_empty() { 0 } else { entry.0 | A::PRESENT })
}

/// Empties the leaves of the entries at `indices`, up to a table; returns the number of entries
/// processed, at least one. The caller owns an address under each of these entries.
///
/// An empty entry is not written, because it may also cover addresses of other areas, and the store
/// could remove the entry for their table:
/// 1. A, which never had a table here, reads the entry: it is empty;
/// 2. B, whose area begins under the same entry, installs a table;
/// 3. A stores an empty entry.
pub(super) fn clear_leaves<T: KernelTree>(
    tree: &T,
    Node { table, level }: Node<T::Arch, T::Table>,
    indices: Range<EntryIndex>,
    counts: &mut Counts,
) -> u32 {
    let mut passed = 0;
    for index in indices.start.up_to(indices.end) {
        let entry = tree.load(table, index, Ordering::Relaxed);
        match level.kind(entry) {
            Kind::Table => break,
            Kind::Empty => {}
            Kind::Leaf | Kind::Absent => {
                tree.store(table, index, Entry::EMPTY, Ordering::Relaxed);
                counts.entries_written += 1;
            }
        }
        passed += 1;
    }
    // If an entry became a table after the caller read it, nothing of the caller's is mapped below
    // it.
    passed.max(1)
}

/// Detaches the highest tables that cover a part of `own` and nothing outside `free`, and passes
/// them to `met`. The root's entries are not changed. Called under the areas' lock.
pub(super) fn detach<T: KernelTree>(
    tree: &T,
    own: VirtRange,
    free: VirtRange,
    counts: &mut Counts,
    mut met: impl FnMut(T::Table),
) {
    let mut at = own.start();
    while at < own.end() {
        let (mut table, mut level) = (tree.top(), T::Arch::ROOT);
        let span = loop {
            let span = level.span();
            let index = level.index_of(at);
            let entry = tree.load(table, index, Ordering::Acquire);
            counts.entries_descended += 1;
            if level.kind(entry) != Kind::Table {
                break span;
            }
            // SAFETY: 1. just read in `table`.
            let child = unsafe { tree.below(T::Arch::frame(entry)) };
            let start = at.align_down(span).0;
            // Saturating: no area lies above the table of the highest addresses.
            let end = start.saturating_add(span);
            if free.start().0 <= start && end <= free.end().0 && level < T::Arch::ROOT {
                // Relaxed: the areas' lock orders this store before any later reservation under the
                // table.
                tree.set_unflushed(true, Ordering::Relaxed);
                tree.store(table, index, Entry::EMPTY, Ordering::Relaxed);
                counts.entries_written += 1;
                met(child);
                break span;
            }
            if level == Level::PMD {
                // The table contains only leaves and is not detached.
                break span;
            }
            (table, level) = (child, level.below());
        };
        let Some(next) = at.align_down(span).checked_add(span) else { break };
        at = next;
    }
}

/// The steps of a purge; the module documentation explains each.
pub(super) trait Purge: KernelTree {
    type Batch;
    /// Takes the freed areas and detaches tables ([`detach`]).
    fn take(&self, counts: &mut Counts) -> Option<Self::Batch>;
    /// Invalidates all TLBs for the batch.
    fn flush(&self, batch: &Self::Batch, counts: &mut Counts);
    /// Frees the addresses.
    fn free_addresses(&self, batch: &Self::Batch);
    /// Frees the frames at once; frees tables and areas after a grace period.
    ///
    /// # Safety
    /// 1. A flush of this purge has covered the batch since its entries were emptied and its tables
    ///    detached, so no TLB leads to its frames and tables.
    unsafe fn free_after_readers(&self, batch: Self::Batch, counts: &mut Counts);
}

/// Runs a purge in the only correct order. The purge runs in rounds, so no lock is held for long.
/// Only one CPU at a time purges.
pub(super) fn purge<T: Purge>(tree: &T, counts: &mut Counts) {
    while let Some(batch) = tree.take(counts) {
        tree.flush(&batch, counts);
        // Release: a thread that makes a table after it reads this store makes it after the flush.
        tree.set_unflushed(false, Ordering::Release);
        tree.free_addresses(&batch);
        // SAFETY: 1. all entries were emptied before the first batch was detached, and that batch's
        // flush covers the addresses of all rounds; the `flush` above covers the tables of this
        // batch.
        unsafe { tree.free_after_readers(batch, counts) };
    }
}

/// New entries for a part of one table.
pub(super) trait Rewrite<T: KernelTree> {
    fn table(&self) -> T::Table;
    /// The entries that change.
    fn indices(&self) -> Range<EntryIndex>;
    /// The new entry at a position. It does not depend on the valid bit of the old entry.
    fn new_entry(&self, index: EntryIndex) -> Entry;
    /// Whether the change of an entry needs break-before-make.
    fn breaks(&self, old: Entry, new: Entry) -> bool;
    /// Invalidates the old entries in all TLBs.
    fn flush(&self, counts: &mut Counts);
}

/// Stores the new entries; returns whether anything changed.
pub(super) fn write<T: KernelTree>(
    tree: &T,
    rewrite: &impl Rewrite<T>,
    counts: &mut Counts,
) -> bool {
    let (table, indices) = (rewrite.table(), rewrite.indices());
    let mut changed = false;
    for index in indices.start.up_to(indices.end) {
        let new = rewrite.new_entry(index);
        if tree.load(table, index, Ordering::Relaxed) != new {
            // Release: a table's entries are visible before the entry that points to the table.
            tree.store(table, index, new, Ordering::Release);
            counts.entries_written += 1;
            changed = true;
        }
    }
    changed
}

/// Like [`fn@write`], for entries that may need break-before-make.
pub(super) fn replace<T: KernelTree>(tree: &T, rewrite: &impl Rewrite<T>, counts: &mut Counts) {
    let (table, indices) = (rewrite.table(), rewrite.indices());
    for index in indices.start.up_to(indices.end) {
        let old = whole::<T::Arch>(tree.load(table, index, Ordering::Relaxed));
        let new = rewrite.new_entry(index);
        // Entries that need no break are written at once, so that one invalidation covers both
        // kinds. A paused entry keeps all its other bits, so software still sees the mapping.
        let paused = Entry(old.0 & !T::Arch::PRESENT);
        let now = if rewrite.breaks(old, new) { paused } else { new };
        if old != now {
            tree.store(table, index, now, Ordering::Release);
            counts.entries_written += 1;
        }
    }
    rewrite.flush(counts);
    write(tree, rewrite, counts);
}

/// The tables of a map, for a caller that keeps every table it finds from being freed.
pub(super) struct MapTables<'s, 'm, P: Platform>(&'s KernelMap<'m, P>);

impl<P: Platform> Clone for MapTables<'_, '_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for MapTables<'_, '_, P> {}

impl<'m, P: Platform> Deref for MapTables<'_, 'm, P> {
    type Target = KernelMap<'m, P>;

    #[inline(always)]
    fn deref(&self) -> &KernelMap<'m, P> {
        self.0
    }
}

impl<'m, P: Platform> KernelMap<'m, P> {
    /// The tables, for a walk in a read section.
    #[inline(always)]
    pub(super) fn tables_in<'s>(
        &'s self,
        _section: &'s ReadSection<'_, P>,
    ) -> MapTables<'s, 'm, P> {
        MapTables(self)
    }

    /// The tables, for a walk outside a read section.
    ///
    /// # Safety
    /// 1. While a table that was found is used, no table above the addresses of the walk is
    ///    detached: the caller owns the area at these addresses, or has the right to purge.
    #[inline(always)]
    pub(super) unsafe fn tables_of_owner(&self) -> MapTables<'_, 'm, P> {
        MapTables(self)
    }
}

impl<'s, P: Platform> KernelTree for MapTables<'s, '_, P> {
    type Arch = P::Arch;
    type Table = Table<'s>;

    #[inline]
    fn top(&self) -> Table<'s> {
        // SAFETY: 1. the root; it is freed with the map, or later.
        unsafe { Table::new(self.0.root) }
    }

    #[inline]
    unsafe fn below(&self, frame: Frame) -> Table<'s> {
        // SAFETY: 1. the frame is a table by the caller's obligation 1; the read section, or the
        // caller that owns the address or the purge, keeps it from being freed (`tables_in`,
        // `tables_of_owner`).
        unsafe { Table::new(frame) }
    }

    #[inline]
    fn load(&self, table: Table<'s>, index: EntryIndex, order: Ordering) -> Entry {
        Entry(self.entries(table)[index.position()].load(order))
    }

    #[inline]
    fn store(&self, table: Table<'s>, index: EntryIndex, entry: Entry, order: Ordering) {
        self.entries(table)[index.position()].store(entry.0, order);
    }

    #[inline]
    fn offer(&self, table: Table<'s>, index: EntryIndex, entry: Entry) -> Result<(), Entry> {
        let word = &self.entries(table)[index.position()];
        let stored = word.compare_exchange(0, entry.0, Ordering::AcqRel, Ordering::Acquire);
        stored.map(drop).map_err(Entry)
    }

    fn make_table(&self, level: Level<P::Arch>, counts: &mut Counts) -> Option<Table<'s>> {
        let table = self.0.new_table(level, counts)?;
        // SAFETY: 1. the table was made above; the caller owns it until it is installed.
        Some(unsafe { Table::new(table) })
    }

    fn drop_table(&self, table: Table<'s>, counts: &mut Counts) {
        // SAFETY: 1. and 2. `make_table` returned the table, and it was never installed.
        unsafe { free_table(self.memory, table.frame(), counts) };
    }

    #[inline]
    fn is_unflushed(&self, order: Ordering) -> bool {
        self.unflushed.load(order) != 0
    }

    #[inline]
    fn set_unflushed(&self, unflushed: bool, order: Ordering) {
        self.unflushed.store(u32::from(unflushed), order);
        if !unflushed {
            self.memory.platform().unpark(&self.unflushed);
        }
    }

    fn park_while_unflushed(&self) {
        // The flush itself waits for no thread, but the purging thread may have to wait for its
        // CPU.
        self.memory.platform().park(&self.unflushed, 1);
    }
}
