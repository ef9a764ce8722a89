//! Input and output in flight: the pages of a file that its pager works on, and the threads that
//! wait for them.
//!
//! While the pager works, no mutex, no VMA and no lock of an object is held. A *record* represents
//! the call, or the read ahead, in a list that the index lock guards:
//!
//! | record | made by | waits for its end |
//! |---|---|---|
//! | read, read ahead | a fetch, while the pager fills folios that are not in the page index yet | a fetch of one of the pages |
//! | write | a `sync`, or a writer at a dirty limit, while the pager stores pages | a call that writes, drops or replaces them |
//! | change | a thread that drops or replaces pages, or writes them from outside | a fetch or a `sync` of the pages |
//! | turn | a `sync` that met a change | later changes |
//!
//! A waiting thread holds no lock, and tries again afterwards ([`super::Wait`]).
//!
//! # Stale content never enters the page index
//! A change that drops pages *cancels* the reads that overlap it: their folios are discarded, and
//! the pages are requested again. Without that:
//! 1. CPU A reads page 3, and the pager has copied the bytes.
//! 2. CPU B truncates the file to nothing, and lets it grow again: page 3 is zeroes now.
//! 3. CPU A puts the folio into the page index.
//!
//! A read is begun, canceled, and entered into the page index with the index lock held for writing,
//! each in one step with its look at the list. So it begins before the change, and is canceled, or
//! after it.
//!
//! # Stable bytes
//! A write begins with the invalidate lock held for writing, after the mappings have lost their
//! permission to write. A thread that wants to write holds that lock for reading, from its look at
//! the list until it is done ([`super::pages::mark_dirty`]). Or it has a change of its own in the
//! list, during which no write begins.
//!
//! # No circular wait, and no endless one
//! A thread with a read or a write in the list waits only for the pager. A read ahead and a
//! detached write ([`super::detached_batch`]) have no thread: the end needs the pager, and any
//! thread that takes the answer, as each thread that waits for it does. A thread with a change
//! waits for writes and for older turns, without a lock, and then takes locks. A thread that holds
//! a lock of the object waits for no record. A thread with a turn waits for older changes. So of a
//! change and a turn, the younger one waits, and a `sync` comes to its end however many threads
//! write the page that it wants to save.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::Memory;
use crate::addr::PageRange;
use crate::platform::Platform;

use super::detached_batch::settle_written;
use super::page_index::Pages;
use crate::collections::page_tree::PageIndex;

/// The operation that a record represents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TransferKind {
    /// A thread waits for the answer, and settles the read.
    Read,
    /// No thread does.
    ReadAhead,
    Write,
    Change,
    Turn,
}

/// The operations during which no fetch of the pages begins.
const KEEP_FROM_READING: [TransferKind; 3] =
    [TransferKind::Read, TransferKind::Change, TransferKind::ReadAhead];

/// A record of pages in flight, in the memory of the call that moves them, or of the read
/// ([`super::page_read`]). Everything in it is read
/// and written with the index lock held for writing.
#[derive(Debug)]
pub(super) struct Record {
    first: Cell<u64>,
    end: Cell<u64>,
    kind: Cell<TransferKind>,
    /// Rises from one record to the next.
    number: Cell<u64>,
    /// For a read: its content is stale.
    canceled: Cell<bool>,
    /// A thread is parked, or about to park, until it ends.
    wanted: Cell<bool>,
    /// Any thread may end it.
    is_detached: bool,
    next: Cell<Option<NonNull<Self>>>,
    previous: Cell<Option<NonNull<Self>>>,
}

impl Record {
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

    /// As [`Record::new`], for a write that any thread may end ([`super::detached_batch`]).
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
    first: Option<NonNull<Record>>,
    next_number: u64,
    /// The number of failed writes.
    failures: u64,
    /// The number of pages in the writes of the list.
    being_stored: u64,
}

/// The end of some record, to wait for. Outdated if it is kept: only the list tells whether the
/// wait is still necessary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) struct Ticket {
    ended: u32,
    /// Any thread may end the record, once its answers have come.
    pub(super) is_detached: bool,
}

/// The words beside the list that are read without the index lock.
pub(super) struct Ends {
    /// Changes whenever a record ends; waiters park on it.
    ended: AtomicU32,
    /// The number of writes in the list.
    writes: AtomicU32,
}

impl Ends {
    pub(super) const fn new() -> Self {
        Self { ended: AtomicU32::new(0), writes: AtomicU32::new(0) }
    }

    /// Whether no page is being stored, which stays true for as long as the caller holds the
    /// invalidate lock.
    #[inline]
    pub(super) fn no_writes(&self) -> bool {
        // Acquire: the next write of a page comes after the pager has read it.
        self.writes.load(Ordering::Acquire) == 0
    }

    /// Sets the number of writes. The index lock is held for writing.
    pub(super) fn set_writes(&self, writes: u32) {
        self.writes.store(writes, Ordering::Release);
    }

    /// The word that changes when a record ends, and its value in the ticket. `None` if one has
    /// ended since.
    pub(super) fn word(&self, ticket: Ticket) -> Option<(&AtomicU32, u32)> {
        (self.ended.load(Ordering::Acquire) == ticket.ended).then_some((&self.ended, ticket.ended))
    }

    /// Sleeps until a record ends; returns at once if one has ended since the ticket was made.
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

    /// The number of the next record; those in the list have lower ones.
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

    fn iter(&self) -> impl Iterator<Item = &Record> {
        let mut next = self.first;
        core::iter::from_fn(move || {
            // SAFETY: records are in the list from `insert` to `take`, and live as long
            // (obligation 1 of `insert`). Their cells are used with the index lock held for
            // writing, as `self` is.
            let record = unsafe { next?.as_ref() };
            next = record.next.get();
            Some(record)
        })
    }

    fn overlapping(
        &self,
        pages: PageRange,
        kinds: &[TransferKind],
    ) -> impl Iterator<Item = &Record> {
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
        let changes = self.overlapping(pages, &[TransferKind::Change]);
        let older = changes.filter(|change| change.number.get() < number);
        older.map(|change| change.first.get()).min()
    }

    /// A ticket for the end of a record of one of the kinds that overlaps the pages, and is older
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
        // It changes with the index lock held for writing, so not between the check of the list and
        // this.
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

    /// The record that keeps a fetch from the pages, if there is one.
    fn in_the_way(&self, ends: &Ends, pages: PageRange) -> Option<InTheWay> {
        let [read, change, ahead] = KEEP_FROM_READING;
        let awaited = self.awaits(ends, pages, &[read, change]).map(InTheWay::Thread);
        awaited.or_else(|| self.overlaps(pages, &[ahead]).then_some(InTheWay::ReadAhead))
    }

    /// The end of a record that keeps a fetch from the page.
    pub(super) fn busy_until(&self, page: u64) -> Option<u64> {
        let pages = PageRange::from_count(page, 1);
        self.overlapping(pages, &KEEP_FROM_READING).map(|record| record.end.get()).max()
    }

    /// Cancels the reads that overlap the pages.
    pub(super) fn cancel_reads(&self, pages: PageRange) {
        let reads = self.overlapping(pages, &[TransferKind::Read, TransferKind::ReadAhead]);
        reads.for_each(|read| read.canceled.set(true));
    }

    /// Inserts a record into the list.
    ///
    /// # Safety
    /// 1. The record is in no list. It does not move, and no mutable reference to it exists, until
    ///    [`InFlight::take`] was called for it.
    pub(super) unsafe fn insert(
        &mut self,
        ends: &Ends,
        record: &Record,
        kind: TransferKind,
        pages: PageRange,
    ) {
        record.first.set(pages.first);
        record.end.set(pages.end);
        record.kind.set(kind);
        record.number.set(self.next_number);
        record.canceled.set(false);
        record.wanted.set(false);
        record.previous.set(None);
        record.next.set(self.first);
        self.next_number += 1;
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
    }

    /// Removes a record from the list. Returns whether threads must be woken ([`Ends::wake`]).
    ///
    /// # Safety
    /// 1. The record is in this list: its neighbors, which it names, are changed.
    pub(super) unsafe fn take(&mut self, ends: &Ends, record: &Record) -> bool {
        let (previous, next) = (record.previous.get(), record.next.get());
        match previous {
            // SAFETY: as in `iter`: by obligation 1, the neighbors are in the list, too.
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
        ends.ended.fetch_add(1, Ordering::Release);
        record.wanted.get()
    }
}

/// The effect of a change on the reads that overlap it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reads {
    /// Their content stays valid, for all pages that the index lacks afterwards.
    Stay,
    /// They are canceled.
    Canceled,
}

/// The reason why a read does not begin.
pub(super) enum Refused {
    /// The pages are not needed any more.
    NotNeeded,
    /// Another record is in the way.
    Busy(InTheWay),
}

/// A record that keeps a fetch from its pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum InTheWay {
    /// A thread ends it.
    Thread(Ticket),
    /// A read ahead, which ends when some thread takes the answer.
    ReadAhead,
}

/// A record in the list, until this is dropped. Having one means: the record was inserted into the
/// list of `pages`, and only this removes it.
struct Listed<'a, P: Platform> {
    pages: &'a Pages,
    platform: &'a P,
    record: &'a Record,
}

impl<P: Platform> Drop for Listed<'_, P> {
    fn drop(&mut self) {
        let wanted = self.pages.alone(self.platform, |_, in_flight, ends| {
            // SAFETY: 1. `self` is the only value for the record.
            unsafe { in_flight.take(ends, self.record) }
        });
        if wanted {
            self.pages.ends.wake(self.platform);
        }
    }
}

impl Pages {
    /// Inserts a record of a read into the list, unless the pages are not needed, which `needed`
    /// says in one step with that, or another record is in the way.
    ///
    /// # Safety
    /// 1. As of [`InFlight::insert`].
    pub(super) unsafe fn begin_read<P: Platform>(
        &self,
        platform: &P,
        record: &Record,
        (kind, pages): (TransferKind, PageRange),
        needed: impl FnOnce(&PageIndex) -> bool,
    ) -> Result<(), Refused> {
        self.alone(platform, |index, in_flight, ends| {
            if !needed(index) {
                return Err(Refused::NotNeeded);
            }
            if let Some(in_the_way) = in_flight.in_the_way(ends, pages) {
                return Err(Refused::Busy(in_the_way));
            }
            // SAFETY: 1. the caller's obligation.
            unsafe { in_flight.insert(ends, record, kind, pages) };
            Ok(())
        })
    }

    /// Runs `work`, which takes the object's locks and changes the pages. During it no fetch or
    /// `sync` of them begins, and no `sync` stores them. Called without locks.
    pub(super) fn with_change<P: Platform, R>(
        &self,
        memory: &Memory<P>,
        pages: PageRange,
        reads: Reads,
        work: impl FnOnce() -> R,
    ) -> R {
        let (platform, record) = (memory.platform(), Record::new());
        let number = self.alone(platform, |_, in_flight, ends| {
            if reads == Reads::Canceled {
                in_flight.cancel_reads(pages);
            }
            // SAFETY: 1. the record stays in this frame, and is only borrowed shared; `_listed`
            // removes it before the frame ends.
            unsafe { in_flight.insert(ends, &record, TransferKind::Change, pages) };
            record.number.get()
        });
        let _listed = Listed { pages: self, platform, record: &record };
        self.wait_while(memory, |in_flight, ends| {
            let turn = in_flight.await_older(ends, pages, &[TransferKind::Turn], number);
            turn.or_else(|| in_flight.awaits(ends, pages, &[TransferKind::Write]))
        });
        work()
    }

    /// Runs `work` with a number once all changes that overlap the pages are younger than it; the
    /// younger ones wait for its end. Called without locks.
    pub(super) fn with_turn<P: Platform, R>(
        &self,
        memory: &Memory<P>,
        pages: PageRange,
        work: impl FnOnce(u64) -> R,
    ) -> R {
        let (platform, record) = (memory.platform(), Record::new());
        let number = self.alone(platform, |_, in_flight, ends| {
            // SAFETY: as in `with_change`.
            unsafe { in_flight.insert(ends, &record, TransferKind::Turn, pages) };
            record.number.get()
        });
        let _listed = Listed { pages: self, platform, record: &record };
        self.wait_while(memory, |in_flight, ends| {
            in_flight.await_older(ends, pages, &[TransferKind::Change], number)
        });
        work(number)
    }

    /// Waits for the writes that overlap the pages and are older than `number`. Called without
    /// locks.
    pub(super) fn wait_for_writes<P: Platform>(
        &self,
        memory: &Memory<P>,
        pages: PageRange,
        number: u64,
    ) {
        while let Some(ticket) = self.write_before(memory.platform(), pages, number) {
            self.wait(memory, ticket);
        }
    }

    /// A ticket for the end of a write that overlaps the pages and is older than `number`.
    pub(super) fn write_before<P: Platform>(
        &self,
        platform: &P,
        pages: PageRange,
        number: u64,
    ) -> Option<Ticket> {
        self.alone(platform, |_, in_flight, ends| {
            in_flight.await_older(ends, pages, &[TransferKind::Write], number)
        })
    }

    /// A ticket for the end of a change that overlaps the pages.
    pub(super) fn change_of<P: Platform>(&self, platform: &P, pages: PageRange) -> Option<Ticket> {
        self.alone(platform, |_, in_flight, ends| {
            in_flight.awaits(ends, pages, &[TransferKind::Change])
        })
    }

    /// Waits for the ticket that `busy` returns, until it returns none.
    fn wait_while<P: Platform>(
        &self,
        memory: &Memory<P>,
        mut busy: impl FnMut(&InFlight, &Ends) -> Option<Ticket>,
    ) {
        let platform = memory.platform();
        while let Some(ticket) = self.alone(platform, |_, in_flight, ends| busy(in_flight, ends)) {
            self.wait(memory, ticket);
        }
    }

    /// A ticket for the end of a write that stores one of the pages. `None` if none does, which
    /// stays true for as long as the caller holds the invalidate lock.
    #[inline]
    pub(super) fn being_stored<P: Platform>(
        &self,
        platform: &P,
        page: u64,
        count: u64,
    ) -> Option<Ticket> {
        if self.ends.no_writes() {
            return None;
        }
        let pages = PageRange::from_count(page, count);
        self.alone(platform, |_, in_flight, ends| {
            in_flight.awaits(ends, pages, &[TransferKind::Write])
        })
    }

    /// The record that keeps a fetch from the pages, if there is one.
    pub(super) fn keeps_from_reading<P: Platform>(
        &self,
        platform: &P,
        pages: PageRange,
    ) -> Option<InTheWay> {
        self.alone(platform, |_, in_flight, ends| in_flight.in_the_way(ends, pages))
    }

    /// Whether `vacant` is true of the index, and no record blocks a fetch of the pages.
    pub(super) fn is_free_for_reading<P: Platform>(
        &self,
        platform: &P,
        pages: PageRange,
        vacant: impl FnOnce(&PageIndex) -> bool,
    ) -> bool {
        self.alone(platform, |index, in_flight, _| {
            vacant(index) && !in_flight.overlaps(pages, &KEEP_FROM_READING)
        })
    }

    /// Sleeps until some record ends, unless one has ended since the ticket was made. Called
    /// without locks.
    pub(super) fn wait<P: Platform>(&self, memory: &Memory<P>, ticket: Ticket) {
        if ticket.is_detached {
            // The thread that ends it need not keep the object, and so wakes only those that wait
            // for answers.
            memory.answers.completions.wait(memory.platform(), &mut || {
                settle_written(memory);
                self.ends.word(ticket).is_none()
            });
        } else {
            self.ends.wait(memory.platform(), ticket);
        }
    }
}
