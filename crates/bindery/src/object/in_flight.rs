//! Input and output in flight: the pages of a file that the pager is reading or storing, and the
//! threads that wait for them.
//!
//! While the pager works, no mutex, no VMA and no lock of an object is held. A *record* represents
//! the call or the read ahead in a list that the index lock guards:
//!
//! | record | made by | waits for its end |
//! |---|---|---|
//! | read, read ahead | a fetch, while the pager fills folios that are not in the page index yet | a fetch of one of the pages |
//! | write | a `sync`, reclaim, or a writer at a dirty limit, while the pager stores pages | a call that writes, drops or replaces them |
//! | change | a thread that replaces pages, or writes them from outside | a fetch or a `sync` of the pages |
//! | cut | a thread that drops pages | the same, and a fault that would make one of the pages writable |
//! | turn | a `sync` that met a change | later changes |
//!
//! A waiting thread holds no lock and retries after the wait ([`super::Wait`]).
//!
//! # Stale content never enters the page index
//! A change that drops pages *cancels* the reads that overlap it: their folios are discarded, and
//! the pages are requested again. Without cancellation, this could happen:
//! 1. CPU A reads page 3, and the pager has copied the bytes.
//! 2. CPU B truncates the file to nothing and lets it grow again, so page 3 is now zeroes.
//! 3. CPU A inserts the folio with the stale bytes into the page index.
//!
//! The start of a read, its cancellation and its insertion into the page index each happen with the
//! index lock held for writing, together with the check of the list. So a read either begins before
//! the change and is canceled, or begins after the change.
//!
//! # Stable bytes
//! A write begins with the invalidate lock held for writing, after write permission was removed
//! from the mappings. A thread that wants to write to a page either holds that lock for reading,
//! from its check of the list until it is done ([`super::pages::mark_dirty`]), or has a
//! change of its own in the list, during which no write begins.
//!
//! # No page is written in the middle of a cut
//! A cut is a change that drops pages. Its thread waits for the faults that have the invalidate
//! lock, before it tells the pager ([`super::mapped_write::wait_for_faults`]). Later faults find
//! the cut in the list.
//!
//! # No circular wait, and no endless one
//! A thread with a read or a write in the list waits only for the pager. A read ahead and a
//! detached write ([`super::detached_batch`]) have no thread: to end, they need the pager's answer
//! and any thread that takes it, and every thread that waits for such a record also takes answers.
//! A thread with a change waits for writes and for older turns, without a lock, and then acquires
//! locks. A thread that holds a lock of the object waits for no record. A thread with a turn waits
//! for older changes. So between a change and a turn, the younger one waits, and a `sync` completes
//! however many threads write the page that it has to save.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::addr::PageRange;
use crate::platform::Platform;

/// The operation that a record represents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TransferKind {
    /// A thread waits for the answer and settles the read.
    Read,
    /// No thread waits for the answer.
    ReadAhead,
    Write,
    Change,
    /// A change that drops pages.
    Cut,
    Turn,
}

/// Changes of both kinds.
pub(super) const CHANGES: [TransferKind; 2] = [TransferKind::Change, TransferKind::Cut];

/// The operations that block the start of a fetch of the pages.
pub(super) const KEEP_FROM_READING: [TransferKind; 4] =
    [TransferKind::Read, TransferKind::Change, TransferKind::Cut, TransferKind::ReadAhead];

/// A record of pages in flight. It lies in the memory of the call that moves the pages, or of the
/// read ([`super::page_read`]). All its fields are read and written with the index lock held for
/// writing.
#[derive(Debug)]
pub(super) struct FlightRecord {
    first: Cell<u64>,
    end: Cell<u64>,
    kind: Cell<TransferKind>,
    /// Increases from one record to the next.
    number: Cell<u64>,
    /// For a read: its content is stale.
    canceled: Cell<bool>,
    /// A thread is parked, or about to park, until the record ends.
    wanted: Cell<bool>,
    /// Any thread may end the record.
    is_detached: bool,
    next: Cell<Option<NonNull<Self>>>,
    previous: Cell<Option<NonNull<Self>>>,
}

impl FlightRecord {
    /// A record that is in no list.
    pub(super) const fn new() -> Self {
        Self {
            first: Cell::new(0),
            end: Cell::new(0),
            kind: Cell::new(TransferKind::Read),
            number: Cell::new(0),
            canceled: Cell::new(false),
            wanted: Cell::new(false),
            is_detached: false,
            next: Cell::new(None),
            previous: Cell::new(None),
        }
    }

    /// As [`FlightRecord::new`], for a write that any thread may end ([`super::detached_batch`]).
    pub(super) const fn detached() -> Self {
        Self { is_detached: true, ..Self::new() }
    }

    /// Whether the pages of a read must not enter the index. The index lock is held for writing.
    pub(super) fn is_canceled(&self) -> bool {
        self.canceled.get()
    }

    fn overlaps(&self, pages: PageRange) -> bool {
        self.first.get() < pages.end && pages.first < self.end.get()
    }
}

/// The records of an object; the index lock guards the list.
pub(super) struct InFlight {
    first: Option<NonNull<FlightRecord>>,
    next_number: u64,
    /// The number of failed writes.
    failures: u64,
    /// The number of pages covered by the writes in the list.
    being_stored: u64,
}

/// A ticket to wait for the end of some record. A stored ticket becomes outdated: only the list
/// shows whether the wait is still necessary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) struct Ticket {
    ended: u32,
    /// Any thread may end the record once it is answered.
    pub(super) is_detached: bool,
}

/// The words that are read without the index lock, and therefore lie outside the list.
pub(super) struct Ends {
    /// Changes whenever a record ends; waiters park on it.
    ended: AtomicU32,
    /// The number of writes in the list.
    writes: AtomicU32,
    /// The number of cuts in the list.
    cuts: AtomicU32,
}

impl Ends {
    pub(super) const fn new() -> Self {
        Self { ended: AtomicU32::new(0), writes: AtomicU32::new(0), cuts: AtomicU32::new(0) }
    }

    /// Whether no page is being stored. A true result stays true for as long as the caller holds
    /// the invalidate lock.
    #[inline]
    pub(super) fn no_writes(&self) -> bool {
        // Acquire: the pager has read a page before the next write to it.
        self.writes.load(Ordering::Acquire) == 0
    }

    /// Whether no cut has begun. A caller that holds the invalidate lock finds each cut whose
    /// thread has waited for the holders of that lock.
    #[inline]
    pub(super) fn no_cuts(&self) -> bool {
        self.cuts.load(Ordering::Relaxed) == 0
    }

    /// Sets the number of writes. The index lock is held for writing.
    pub(super) fn set_writes(&self, writes: u32) {
        self.writes.store(writes, Ordering::Release);
    }

    /// The word that changes when a record ends, and its value in the ticket. `None` if a record
    /// has ended since the ticket was made.
    pub(super) fn word(&self, ticket: Ticket) -> Option<(&AtomicU32, u32)> {
        (self.ended.load(Ordering::Acquire) == ticket.ended).then_some((&self.ended, ticket.ended))
    }

    /// Sleeps until a record ends. Returns immediately if one has ended since the ticket was made.
    pub(super) fn wait<P: Platform>(&self, platform: &P, ticket: Ticket) {
        platform.park(&self.ended, ticket.ended);
    }

    /// Wakes all waiters.
    pub(super) fn wake<P: Platform>(&self, platform: &P) {
        platform.unpark(&self.ended);
    }
}

impl InFlight {
    pub(super) const fn new() -> Self {
        Self { first: None, next_number: 0, failures: 0, being_stored: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// The number of the next record; the records in the list have lower numbers.
    pub(super) fn next_number(&self) -> u64 {
        self.next_number
    }

    /// The number of failed writes so far.
    pub(super) fn failures(&self) -> u64 {
        self.failures
    }

    /// Counts a failed write.
    pub(super) fn count_failure(&mut self) {
        self.failures += 1;
    }

    /// The number of pages that are being stored.
    pub(super) fn pages_being_stored(&self) -> u64 {
        self.being_stored
    }

    fn iter(&self) -> impl Iterator<Item = &FlightRecord> {
        let mut next = self.first;
        core::iter::from_fn(move || {
            // SAFETY: a record is in the list from `insert` to `take` and lives at least until then
            // (obligation 1 of `insert`). The cells of records are accessed with the index lock
            // held for writing, as `self` is.
            let record = unsafe { next?.as_ref() };
            next = record.next.get();
            Some(record)
        })
    }

    fn overlapping(
        &self,
        pages: PageRange,
        kinds: &[TransferKind],
    ) -> impl Iterator<Item = &FlightRecord> {
        self.iter()
            .filter(move |record| record.overlaps(pages) && kinds.contains(&record.kind.get()))
    }

    /// Whether a record of one of the kinds overlaps the pages.
    pub(super) fn overlaps(&self, pages: PageRange, kinds: &[TransferKind]) -> bool {
        self.overlapping(pages, kinds).next().is_some()
    }

    /// Whether any record overlaps the pages.
    pub(super) fn overlaps_any(&self, pages: PageRange) -> bool {
        self.iter().any(|record| record.overlaps(pages))
    }

    /// The start of the first change that overlaps the pages and is older than `number`.
    pub(super) fn first_change(&self, pages: PageRange, number: u64) -> Option<u64> {
        let changes = self.overlapping(pages, &CHANGES);
        let older = changes.filter(|change| change.number.get() < number);
        older.map(|change| change.first.get()).min()
    }

    /// A ticket for the end of a record of one of the kinds that overlaps the pages and is older
    /// than `number`.
    pub(super) fn await_older(
        &self,
        ends: &Ends,
        pages: PageRange,
        kinds: &[TransferKind],
        number: u64,
    ) -> Option<Ticket> {
        let mut records = self.overlapping(pages, kinds);
        let record = records.find(|record| record.number.get() < number)?;
        record.wanted.set(true);
        Some(self.ticket(ends, record.is_detached))
    }

    /// A ticket for the end of a record that is in the list.
    pub(super) fn ticket(&self, ends: &Ends, is_detached: bool) -> Ticket {
        // The word changes only with the index lock held for writing, so it has not changed since
        // the check of the list.
        Ticket { ended: ends.ended.load(Ordering::Relaxed), is_detached }
    }

    /// Like [`InFlight::await_older`], for records of any age.
    pub(super) fn awaits(
        &self,
        ends: &Ends,
        pages: PageRange,
        kinds: &[TransferKind],
    ) -> Option<Ticket> {
        self.await_older(ends, pages, kinds, u64::MAX)
    }

    /// The record that blocks a fetch of the pages, if one exists.
    pub(super) fn in_the_way(&self, ends: &Ends, pages: PageRange) -> Option<InTheWay> {
        let [read, change, cut, ahead] = KEEP_FROM_READING;
        let awaited = self.awaits(ends, pages, &[read, change, cut]).map(InTheWay::Thread);
        awaited.or_else(|| self.overlaps(pages, &[ahead]).then_some(InTheWay::ReadAhead))
    }

    /// The end page of the record that blocks a fetch of the page.
    pub(super) fn busy_until(&self, page: u64) -> Option<u64> {
        let pages = PageRange::from_count(page, 1);
        self.overlapping(pages, &KEEP_FROM_READING).map(|record| record.end.get()).max()
    }

    /// Cancels the reads that overlap the pages.
    pub(super) fn cancel_reads(&self, pages: PageRange) {
        let reads = self.overlapping(pages, &[TransferKind::Read, TransferKind::ReadAhead]);
        reads.for_each(|read| read.canceled.set(true));
    }

    /// Inserts a record into the list. Returns its number.
    ///
    /// # Safety
    /// 1. The record is in no list. It does not move, and no mutable reference to it exists, until
    ///    [`InFlight::take`] was called for it.
    pub(super) unsafe fn insert(
        &mut self,
        ends: &Ends,
        record: &FlightRecord,
        kind: TransferKind,
        pages: PageRange,
    ) -> u64 {
        let number = self.next_number;
        record.first.set(pages.first);
        record.end.set(pages.end);
        record.kind.set(kind);
        record.number.set(number);
        record.canceled.set(false);
        record.wanted.set(false);
        record.previous.set(None);
        record.next.set(self.first);
        self.next_number = number + 1;
        let node = Some(NonNull::from(record));
        if let Some(next) = self.first {
            // SAFETY: as in `iter`.
            unsafe { next.as_ref() }.previous.set(node);
        }
        self.first = node;
        if kind == TransferKind::Write {
            ends.set_writes(ends.writes.load(Ordering::Relaxed) + 1);
            self.being_stored += pages.end - pages.first;
        }
        if kind == TransferKind::Cut {
            ends.cuts.store(ends.cuts.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        number
    }

    /// Removes a record from the list. Returns whether threads must be woken ([`Ends::wake`]).
    ///
    /// # Safety
    /// 1. The record is in this list: the neighbors that it names are modified.
    pub(super) unsafe fn take(&mut self, ends: &Ends, record: &FlightRecord) -> bool {
        let (previous, next) = (record.previous.get(), record.next.get());
        match previous {
            // SAFETY: as in `iter`; by obligation 1, the neighbors are in the list, too.
            Some(previous) => unsafe { previous.as_ref() }.next.set(next),
            None => self.first = next,
        }
        if let Some(next) = next {
            // SAFETY: as in `iter`.
            unsafe { next.as_ref() }.previous.set(previous);
        }
        if record.kind.get() == TransferKind::Write {
            ends.set_writes(ends.writes.load(Ordering::Relaxed) - 1);
            self.being_stored -= record.end.get() - record.first.get();
        }
        if record.kind.get() == TransferKind::Cut {
            ends.cuts.store(ends.cuts.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
        }
        ends.ended.fetch_add(1, Ordering::Release);
        record.wanted.get()
    }
}

/// A record that blocks a fetch of its pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum InTheWay {
    /// A record that a waiting thread ends.
    Thread(Ticket),
    /// A read ahead, which ends when any thread takes the answer.
    ReadAhead,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counts_follow_the_list() {
        let (ends, mut in_flight) = (Ends::new(), InFlight::new());
        let counts = || (ends.no_writes(), ends.no_cuts());
        for (kind, during) in [
            (TransferKind::Cut, (true, false)),
            (TransferKind::Write, (false, true)),
            (TransferKind::Change, (true, true)),
        ] {
            let record = FlightRecord::new();
            // SAFETY: 1. the record is in no list, and is only borrowed as shared until it is
            // taken.
            unsafe { in_flight.insert(&ends, &record, kind, PageRange::from_count(3, 2)) };
            assert_eq!(counts(), during, "{kind:?}");
            // SAFETY: 1. the record is in this list.
            assert!(!unsafe { in_flight.take(&ends, &record) }, "no thread waits");
            assert_eq!(counts(), (true, true), "{kind:?}");
        }
    }
}
