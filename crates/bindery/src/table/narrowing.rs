//! Stores into entries that TLBs may cache.
//!
//! A store *narrows* an entry if the new entry refuses an access that the old one allows, or no
//! longer records its use; TLBs must then drop the old entry. A table lock may be released before
//! that flush only while the table's pending count is raised ([`crate::tlb`]). The narrowing stores
//! are therefore methods of values that only these calls construct:
//!
//! | call | the flush comes |
//! |---|---|
//! | [`Span::narrow`] | after the unlock: the call has raised the table's pending count |
//! | [`Span::narrow_some`] | after the unlock: the first store raises the table's pending count |
//! | [`Span::narrow_until_flush`], [`Span::clear_table_entry`] | before the unlock (debug check) |
//! | [`Span::suspend`] | as in row 1 or 3 if the entries are cleared; never if they are restored |
//! | [`Edit::narrow_few`] | before the unlock (debug check) |
//! | [`Cursor::break_run`] | immediately, between break and make |
//! | [`Cursor::widen`] | never (debug check that no store narrows) |
//!
//! Each value borrows the span or its cursor, so no value outlives the lock. A span exists only in
//! an [`Edit`], which owns the gather.

use core::marker::PhantomData;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::VirtRange;
use crate::arch::{AbsentFormat, Arch, Entry, EntryIndex, Equal, Level, Permissions};
use crate::platform::Platform;
use crate::stats::Counts;

use super::cursor::Cursor;
use super::edit::Edit;
use super::run::{Entries, Run};
use super::span::Span;

/// Entries of one locked table that may be narrowed.
#[must_use = "the range counts as stale already"]
pub(crate) struct Narrowing<'c, A: Arch> {
    /// The entries of the run.
    entries: &'c [AtomicU64],
    _arch: PhantomData<A>,
}

/// Entries of one locked table: some may be narrowed.
pub(super) struct LazyNarrowing<'c, 'e, 'm, P: Platform> {
    span: &'c mut Span<'e, 'm, P>,
    run: &'c Run<'c, P::Arch>,
    entries: &'c [AtomicU64],
    /// The number of narrowed entries.
    narrowed: u32,
}

/// Entries of one locked table that may be widened.
pub(crate) struct Widening<'c, A: Arch> {
    entries: &'c [AtomicU64],
    run: Run<'c, A>,
}

/// Entries that have lost their valid bit and that no TLB holds.
#[must_use = "the entries are invalid until they are made again"]
pub(crate) struct Broken<'c, A: Arch> {
    entries: &'c [AtomicU64],
    _arch: PhantomData<A>,
}

/// Entries of one locked table that have lost their valid bit and that TLBs may still hold.
#[must_use = "the entries are invalid until they are restored or cleared"]
pub(super) struct Suspended<'c, 'e, 'm, P: Platform> {
    span: &'c mut Span<'e, 'm, P>,
    run: &'c Run<'c, P::Arch>,
    /// Whether one of the entries was dirty.
    pub(super) dirty: bool,
}

impl<'e, 'm, P: Platform> Span<'e, 'm, P> {
    /// Clears the valid bit of `run`'s entries, for a caller that clears or restores the entries
    /// under the same lock. Accessed and dirty bits that the MMU has set stay visible. The entries
    /// are not empty, so a walker without the lock does not mistake the range for unmapped.
    pub(super) fn suspend<'c>(&'c mut self, run: &'c Run<'c, P::Arch>) -> Suspended<'c, 'e, 'm, P> {
        let mut dirty = false;
        for entry in self.page_table.entries_of(run) {
            let raw = entry.fetch_and(!P::Arch::PRESENT, Ordering::Relaxed);
            dirty |= P::Arch::attributes(Entry(raw)).dirty;
        }
        Suspended { span: self, run, dirty }
    }

    /// The entries of `run`, to be narrowed. Raises the pending count of their table, because the
    /// flush follows the release of the lock. Flushes first if the gather is full.
    #[inline]
    pub(crate) fn narrow<'c>(&'c mut self, run: &'c Run<P::Arch>) -> Narrowing<'c, P::Arch> {
        self.mark_pending(run.node.table);
        self.gather.stale(run.range(), run.node.level);
        Narrowing { entries: self.page_table.entries_of(run), _arch: PhantomData }
    }

    /// The entries of `run`; the caller may narrow some of them. Acts as [`Span::narrow`] from the
    /// first store on.
    #[inline(always)]
    pub(super) fn narrow_some<'c>(
        &'c mut self,
        run: &'c Run<'c, P::Arch>,
    ) -> LazyNarrowing<'c, 'e, 'm, P> {
        let entries = self.page_table.entries_of(run);
        LazyNarrowing { span: self, run, entries, narrowed: 0 }
    }

    /// The entries of `run`, to be narrowed. The caller must call [`Span::flush`] before it drops
    /// the span.
    #[inline]
    pub(crate) fn narrow_until_flush<'c>(
        &'c mut self,
        run: &'c Run<P::Arch>,
    ) -> Narrowing<'c, P::Arch> {
        self.gather.stale(run.range(), run.node.level);
        self.unflushed.raise();
        Narrowing { entries: self.page_table.entries_of(run), _arch: PhantomData }
    }

    /// Clears the entry of `run`, which refers to a table. All mappings of that table lay in
    /// `mapped`. The caller must call [`Span::flush`] before it drops the span.
    pub(super) fn clear_table_entry(&mut self, run: &Run<P::Arch>, mapped: VirtRange) {
        // Release: a reader of the empty entry either finds the table locked or finds the flush
        // completed.
        self.page_table.entries_of(run)[0].store(0, Ordering::Release);
        self.counts.entries_written += 1;
        // No walker can cache a table in which nothing was mapped.
        self.gather.stale_tables(run.range().intersection(mapped));
        self.unflushed.raise();
    }

    /// Leaves the flush to the end of the operation: no CPU has the root loaded or will load it,
    /// and the reverse map does not lead to these tables.
    pub(super) fn flush_at_end(&mut self) {
        self.unflushed.lower();
    }
}

impl<P: Platform> Edit<'_, '_, P> {
    /// Entries of a level-1 table that is locked without a cursor, to be narrowed. All their
    /// translations lie in `range`. The caller must call [`Edit::flush_few`] before it releases the
    /// lock.
    #[inline(always)]
    pub(super) fn narrow_few<'c>(
        &mut self,
        entries: &'c [AtomicU64],
        range: VirtRange,
        unflushed: &mut Unflushed,
    ) -> Narrowing<'c, P::Arch> {
        self.gather.stale(range, Level::<P::Arch>::PTE);
        unflushed.raise();
        Narrowing { entries, _arch: PhantomData }
    }

    /// Flushes stale translations while the table is locked.
    #[inline(always)]
    pub(super) fn flush_few(&mut self, counts: &mut Counts, unflushed: &mut Unflushed) {
        self.page_table.flush(self.gather, counts);
        unflushed.lower();
    }
}

impl<P: Platform> Cursor<'_, '_, P> {
    /// The entries of `run`, to be widened: a TLB that holds the old entry raises a fault, which
    /// reads the table again.
    #[inline]
    pub(crate) fn widen<'c>(&'c mut self, run: &'c Run<P::Arch>) -> Widening<'c, P::Arch> {
        Widening { entries: self.page_table.entries_of(run), run: *run }
    }

    /// Clears the valid bit of the level-1 `run`'s entries and invalidates them at once.
    pub(super) fn break_run<'c>(&'c mut self, run: &'c Run<P::Arch>) -> Broken<'c, P::Arch> {
        let entries = self.page_table.entries_of(run);
        for entry in entries {
            entry.fetch_and(!P::Arch::PRESENT, Ordering::Relaxed);
        }
        self.page_table.invalidate_now(run.range(), Level::PTE, &mut self.counts);
        self.counts.entries_read += u64::from(run.count);
        self.counts.entries_written += u64::from(run.count);
        Broken { entries, _arch: PhantomData }
    }
}

impl<P: Platform> Suspended<'_, '_, '_, P> {
    /// Sets the valid bit again. A TLB that still holds an entry holds it unchanged.
    pub(super) fn restore(self) {
        for entry in self.span.page_table.entries_of(self.run) {
            entry.fetch_or(P::Arch::PRESENT, Ordering::Relaxed);
        }
    }

    /// Clears the entries and lowers the table's entry count. Otherwise as [`Span::narrow`].
    pub(super) fn clear(self) {
        let span = self.span;
        span.narrow(self.run).clear_each();
        span.page_table.change_entry_count(self.run.node.table, 0, self.run.count);
    }

    /// As [`Suspended::clear`], with the flush of [`Span::narrow_until_flush`].
    pub(super) fn clear_until_flush(self) {
        let span = self.span;
        span.narrow_until_flush(self.run).clear_each();
        span.page_table.change_entry_count(self.run.node.table, 0, self.run.count);
    }
}

impl<A: Arch> Narrowing<'_, A> {
    /// Clears each entry. Bits that the MMU sets at that moment are lost.
    fn clear_each(&self) {
        for entry in self.entries {
            entry.store(0, Ordering::Relaxed);
        }
    }

    /// Replaces each entry by the result of `change`. The entries stay valid throughout.
    #[inline]
    pub(super) fn replace_each(&self, change: impl Fn(Entry) -> Entry) {
        for word in self.entries {
            let entry = Entry(word.load(Ordering::Relaxed));
            A::replace_entry(word, entry, &change);
        }
    }

    /// Replaces the entry with that number in the run, just read as `old`, and returns the old
    /// entry with all bits that the MMU added.
    #[inline]
    pub(super) fn replace(
        &self,
        number: usize,
        old: Entry,
        change: impl Fn(Entry) -> Entry,
    ) -> Entry {
        A::replace_entry(&self.entries[number], old, change)
    }

    /// Stores the absent entry `first` and its successors into `count` entries from that number on.
    /// Bits that the MMU sets at that moment are lost.
    #[inline]
    pub(super) fn overwrite(&self, number: u32, count: u32, first: Entry) {
        let (mut entry, step) = (first, A::absent_step(first));
        for word in &self.entries[EntryIndex::new(number).positions(count)] {
            word.store(entry.0, Ordering::Relaxed);
            entry = Entry(entry.0.wrapping_add(step));
        }
    }

    /// Clears the valid bit of each entry and retains all other bits.
    #[inline]
    pub(crate) fn suspend_each(&self) {
        for word in self.entries {
            let raw = word.load(Ordering::Relaxed);
            if A::is_saturated(Entry(raw)) {
                word.store(raw & !A::PRESENT, Ordering::Relaxed);
            } else {
                word.fetch_and(!A::PRESENT, Ordering::Relaxed);
            }
        }
    }

    /// As [`Narrowing::suspend_each`], for leaves mixed with empty entries.
    #[inline(always)]
    pub(super) fn suspend_mapped(&self) {
        for word in self.entries {
            let raw = word.load(Ordering::Relaxed);
            if A::is_saturated(Entry(raw)) {
                word.store(raw & !A::PRESENT, Ordering::Relaxed);
            } else if raw != 0 {
                word.fetch_and(!A::PRESENT, Ordering::Relaxed);
            }
        }
    }

    /// Clears the valid bit of all entries of the contiguous run that starts at that number, and
    /// only then gathers accessed and dirty: while one entry is valid, the MMU may set these bits
    /// in it for any page of the contiguous run.
    pub(super) fn suspend_contig(&self, number: usize) -> Entry {
        let entries = &self.entries[number..number + A::CONTIG_ENTRIES as usize];
        for word in entries {
            word.fetch_and(!A::PRESENT, Ordering::Relaxed);
        }
        // A contiguous run starts at a multiple of its length, and so does a table.
        let (first, equal) = (EntryIndex::FIRST, Equal::empty());
        A::match_leaves(entries, first, equal, A::STEP, A::PRESENT).1
    }
}

impl<P: Platform> LazyNarrowing<'_, '_, '_, P> {
    /// Replaces the entry with that number in the run, just read as `old`, and returns the old
    /// entry with all bits that the MMU added.
    #[inline(always)]
    pub(super) fn replace(
        &mut self,
        number: usize,
        old: Entry,
        change: impl Fn(Entry) -> Entry,
    ) -> Entry {
        if self.narrowed == 0 {
            self.span.mark_pending(self.run.node.table);
            self.span.gather.stale(self.run.range(), self.run.node.level);
        }
        self.narrowed += 1;
        P::Arch::replace_entry(&self.entries[number], old, change)
    }

    /// The number of narrowed entries.
    pub(super) fn narrowed(&self) -> u32 {
        self.narrowed
    }
}

impl<A: Arch> Widening<'_, A> {
    /// Replaces each entry by the result of `change`. The entries stay valid throughout.
    #[inline]
    pub(super) fn replace_each(&self, change: impl Fn(Entry) -> Entry) {
        for word in self.entries {
            let entry = Entry(word.load(Ordering::Relaxed));
            debug_assert!(!is_narrower::<A>(entry, change(entry)), "no flush follows");
            debug_assert!(
                !A::needs_break(entry, change(entry), self.run.node.level),
                "a change in place that the architecture wants broken first"
            );
            A::replace_entry(word, entry, &change);
        }
    }

    /// Replaces each absent entry, which no TLB holds, by the result of `change`.
    #[inline]
    pub(super) fn replace_absent(&self, mut change: impl FnMut(Entry, EntryIndex) -> Entry) {
        for (word, index) in self.entries.iter().zip(self.run.index.stretch(self.run.count)) {
            let entry = Entry(word.load(Ordering::Relaxed));
            debug_assert!(entry.0 & A::PRESENT == 0, "a leaf among absent entries");
            word.store(change(entry, index).0, Ordering::Relaxed);
        }
    }
}

impl<A: Arch> Broken<'_, A> {
    /// Stores the result of `change` for each entry, applied to the entry's value before the break.
    #[inline]
    pub(super) fn make(self, change: impl Fn(Entry) -> Entry) {
        for word in self.entries {
            let entry = Entry(word.load(Ordering::Relaxed) | A::PRESENT);
            word.store(change(entry).0, Ordering::Relaxed);
        }
    }
}

/// Whether `new` refuses an access that `old` allows, so that TLBs must drop `old`. A key change
/// counts as narrowing because each thread has its own rights. Gaining or losing BTI also counts.
pub(super) fn is_narrower<A: Arch>(old: Entry, new: Entry) -> bool {
    let (old, new) = (A::attributes(old), A::attributes(new));
    let gains_bti = A::BTI && (new.permissions - old.permissions).contains(Permissions::BTI);
    !new.permissions.contains(old.permissions) || new.key != old.key || gains_bti
}

/// Whether narrowed entries must be flushed before the locks are released. Recorded in debug builds
/// only.
pub(super) struct Unflushed(#[cfg(debug_assertions)] bool);

impl Unflushed {
    #[inline(always)]
    pub(super) const fn none() -> Self {
        Self(
            #[cfg(debug_assertions)]
            false,
        )
    }

    #[inline(always)]
    fn raise(&mut self) {
        #[cfg(debug_assertions)]
        {
            self.0 = true;
        }
    }

    #[inline(always)]
    pub(super) fn lower(&mut self) {
        #[cfg(debug_assertions)]
        {
            self.0 = false;
        }
    }

    /// Called just before the locks are released.
    #[inline(always)]
    pub(super) fn assert_none(&self) {
        #[cfg(debug_assertions)]
        assert!(!self.0, "a table lock is released before a narrowing was flushed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "before a narrowing was flushed"))]
    fn locks_are_not_released_before_the_flush() {
        let mut unflushed = Unflushed::none();
        unflushed.raise();
        unflushed.lower();
        unflushed.assert_none();
        unflushed.raise();
        unflushed.assert_none();
    }
}
