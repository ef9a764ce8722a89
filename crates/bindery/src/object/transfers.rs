//! Reads, changes and turns of pages: each of them begins in one step with a check of the list of
//! records ([`super::in_flight`]), and its thread waits with no lock held.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::Memory;
use crate::addr::PageRange;
use crate::collections::page_tree::PageIndex;
use crate::error::Error;
use crate::interrupt;
use crate::platform::Platform;

use super::detached_batch::settle_written;
use super::in_flight::{
    CHANGES, Ends, FlightRecord, InFlight, InTheWay, KEEP_FROM_READING, Ticket, TransferKind,
};
use super::page_index::Pages;

/// The effect of a change on the reads that overlap it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reads {
    /// The reads stay valid for all pages that the index lacks after the change.
    Stay,
    /// The reads are canceled, because the change drops pages.
    Canceled,
}

/// The reason why a read does not begin.
pub(super) enum Refused {
    /// The pages are no longer needed.
    NotNeeded,
    /// Another record is in the way.
    Busy(InTheWay),
}

/// A record in the list of `pages`, until this is dropped. The existence of this value implies that
/// the record was inserted, and only dropping the value removes it.
struct Listed<'a, P: Platform> {
    pages: &'a Pages,
    platform: &'a P,
    record: &'a FlightRecord,
}

impl<P: Platform> Drop for Listed<'_, P> {
    fn drop(&mut self) {
        let wanted = self.pages.alone(self.platform, |_, in_flight, ends| {
            // SAFETY: 1. `self` is the only value that represents the record.
            unsafe { in_flight.take(ends, self.record) }
        });
        if wanted {
            self.pages.ends.wake(self.platform);
        }
    }
}

impl InFlight {
    /// Cancels reads as the change requires. Returns the kind of the change's record.
    fn begin_change(&self, pages: PageRange, reads: Reads) -> TransferKind {
        match reads {
            Reads::Stay => TransferKind::Change,
            Reads::Canceled => {
                self.cancel_reads(pages);
                TransferKind::Cut
            }
        }
    }
}

impl Pages {
    /// Inserts a record of a read into the list, unless another record is in the way or `needed`,
    /// which is checked in the same step, finds that the pages are not needed.
    ///
    /// # Safety
    /// 1. As for [`InFlight::insert`].
    pub(super) unsafe fn begin_read<P: Platform>(
        &self,
        platform: &P,
        record: &FlightRecord,
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

    /// Runs `work`, which acquires the object's locks and changes the pages. While it runs, no
    /// fetch or `sync` of the pages begins, and no `sync` stores them. Called without locks.
    pub(super) fn with_change<P: Platform, R>(
        &self,
        memory: &Memory<P>,
        pages: PageRange,
        reads: Reads,
        work: impl FnOnce() -> R,
    ) -> R {
        let (platform, record) = (memory.platform(), FlightRecord::new());
        let number = self.alone(platform, |_, in_flight, ends| {
            let kind = in_flight.begin_change(pages, reads);
            // SAFETY: 1. the record stays in this stack frame and is only borrowed as shared;
            // `_listed` removes it before the frame ends.
            unsafe { in_flight.insert(ends, &record, kind, pages) }
        });
        let _listed = Listed { pages: self, platform, record: &record };
        self.wait_while(memory, |in_flight, ends| {
            let turn = in_flight.await_older(ends, pages, &[TransferKind::Turn], number);
            turn.or_else(|| in_flight.awaits(ends, pages, &[TransferKind::Write]))
        });
        work()
    }

    /// As [`Pages::with_change`] for a caller that must not wait: fails immediately if a write or a
    /// turn is in the way, and has then canceled nothing. No record waits in the list, because a
    /// value that lies in a queue of the embedder would keep other threads from the pages.
    ///
    /// # Errors
    /// A ticket for the end of the obstacle. The next attempt may have to wait again, like that of
    /// a fault.
    pub(super) fn try_change<P: Platform, R>(
        &self,
        memory: &Memory<P>,
        pages: PageRange,
        reads: Reads,
        work: impl FnOnce() -> R,
    ) -> Result<R, Ticket> {
        let (platform, record) = (memory.platform(), FlightRecord::new());
        self.alone(platform, |_, in_flight, ends| {
            let in_the_way = [TransferKind::Turn, TransferKind::Write];
            if let Some(ticket) = in_flight.awaits(ends, pages, &in_the_way) {
                return Err(ticket);
            }
            let kind = in_flight.begin_change(pages, reads);
            // SAFETY: as in `with_change`.
            unsafe { in_flight.insert(ends, &record, kind, pages) };
            Ok(())
        })?;
        let _listed = Listed { pages: self, platform, record: &record };
        Ok(work())
    }

    /// Runs `work` with a number, once no change that overlaps the pages is older than the number;
    /// younger changes wait until `work` ends. Called without locks.
    pub(super) fn with_turn<P: Platform, R>(
        &self,
        memory: &Memory<P>,
        pages: PageRange,
        work: impl FnOnce(u64) -> R,
    ) -> R {
        let (platform, record) = (memory.platform(), FlightRecord::new());
        let number = self.alone(platform, |_, in_flight, ends| {
            // SAFETY: as in `with_change`.
            unsafe { in_flight.insert(ends, &record, TransferKind::Turn, pages) }
        });
        let _listed = Listed { pages: self, platform, record: &record };
        self.wait_while(memory, |in_flight, ends| {
            in_flight.await_older(ends, pages, &CHANGES, number)
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
        self.alone(platform, |_, in_flight, ends| in_flight.awaits(ends, pages, &CHANGES))
    }

    /// Waits for each ticket that `busy` returns, until it returns `None`.
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

    /// A ticket for the end of a write that stores one of the pages. `None` if no write does, which
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

    /// A ticket for the end of a write or a cut of the pages, during which no fault makes them
    /// writable. The caller holds the invalidate lock.
    #[inline]
    pub(super) fn being_stored_or_cut<P: Platform>(
        &self,
        platform: &P,
        pages: PageRange,
    ) -> Option<Ticket> {
        if self.ends.no_writes() && self.ends.no_cuts() {
            return None;
        }
        self.alone(platform, |_, in_flight, ends| {
            in_flight.awaits(ends, pages, &[TransferKind::Write, TransferKind::Cut])
        })
    }

    /// The record that blocks a fetch of the pages, if one exists.
    pub(super) fn keeps_from_reading<P: Platform>(
        &self,
        platform: &P,
        pages: PageRange,
    ) -> Option<InTheWay> {
        self.alone(platform, |_, in_flight, ends| in_flight.in_the_way(ends, pages))
    }

    /// Whether `vacant` returns true for the index and no record blocks a fetch of the pages.
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
            self.wait_for_answers(memory, ticket, || false);
        } else {
            self.ends.wait(memory.platform(), ticket);
        }
    }

    /// As [`Pages::wait`], for a thread that a fatal signal wakes.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub(super) fn wait_unless_killed<P: Platform>(
        &self,
        memory: &Memory<P>,
        ticket: Ticket,
    ) -> Result<(), Error> {
        let platform = memory.platform();
        if ticket.is_detached {
            self.wait_for_answers(memory, ticket, || platform.fatal_signal());
        } else if !platform.fatal_signal() {
            // A signal that arrives from here on ends the sleep.
            self.ends.wait(platform, ticket);
        }
        interrupt::check(platform)
    }

    /// Takes answers until some record ends, or `stops` returns true. The thread that ends a
    /// detached write need not keep the object, so it wakes only threads that wait for answers.
    fn wait_for_answers<P: Platform>(
        &self,
        memory: &Memory<P>,
        ticket: Ticket,
        stops: impl Fn() -> bool,
    ) {
        memory.answers.completions.wait(memory.platform(), &mut || {
            settle_written(memory);
            self.ends.word(ticket).is_none() || stops()
        });
    }
}
