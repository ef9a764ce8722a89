//! `fsync(2)`: stores all dirty pages of a range, in one call or in steps.
//!
//! Any number of calls may save at the same time. No call finds a page that another call is
//! storing, because such a page is not dirty. So at its end, each call waits for the writes that
//! other calls had begun before.
//!
//! A blocking call and a call in steps run the same loop ([`Save::run`]). The loop holds nothing
//! while it waits, because its only state is the position in the range.

use crate::Memory;
use crate::addr::{PAGE_SHIFT, PageRange};
use crate::collections::page_tree::IndexRun;
use crate::error::{Error, Failure};
use crate::interrupt;
use crate::platform::Platform;

use super::detached_batch::{self, FollowedBatch, settle_written};
use super::in_flight::Ticket;
use super::save::{Rules, Saved, Tried, next_to_store, save_from};
use super::state::pages_of;
use super::{Object, ObjectState, PolledWait, Wait};

/// The maximum number of pages that are saved at a time: 16 MiB. Writers to any of these pages
/// wait.
const PAGES: u32 = 4096;

/// The rules for a batch of pages before `end`.
fn rules_up_to(end: u64) -> Rules {
    Rules { end, turn: u64::MAX, most: PAGES, tried: Tried::Once }
}

/// The number of changes of one page for which a sync in steps waits before it makes later changes
/// wait.
const PATIENCE: u32 = 8;

impl<P: Platform> Object<'_, P> {
    /// Stores the changes of the file in `length` bytes from `offset` on, made through mappings or
    /// otherwise, and returns when the pager has them. Does nothing for shared memory. Holds no
    /// lock while the pager works. Pages beyond the file's size at the start of the call, and pages
    /// written behind the call's position, are left to the next call, so a continuous writer does
    /// not delay this one. (Linux: `fsync(2)`, `msync(2)` with `MS_SYNC`.)
    ///
    /// A page that the pager has failed to store is retried once, by the next call that reaches it.
    /// After that, the page is skipped until it is written again or forgotten
    /// ([`Object::discard_failed`]).
    ///
    /// Context: may sleep. Complexity: linear in the dirty pages, plus, for each batch of up to 32
    /// runs, one walk over the mappings of these runs.
    ///
    /// # Errors
    /// The pager's error, mostly [`Error::InputOutput`]; the rest of the range is still stored.
    /// [`Error::Interrupted`] if a fatal signal is pending between two pieces of at most 16 MiB.
    /// Pages that were not stored stay dirty.
    pub fn sync(&self, offset: u64, length: u64) -> Result<(), Error> {
        let (memory, pages) = (self.memory, pages_in(offset, length));
        // A stored page is no longer dirty, so a retry does not store it again.
        memory.retry(|| save(memory, self.state(), pages, Until::FatalSignal))?;
        memory.clock.exhausted.forget();
        Ok(())
    }
}

/// The pages of `length` bytes from `offset` on.
fn pages_in(offset: u64, length: u64) -> PageRange {
    PageRange { first: offset >> PAGE_SHIFT, end: pages_of(offset.saturating_add(length)) }
}

/// The condition that ends a save early.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// A fatal signal.
    FatalSignal,
    /// No condition: an unsaved page would be lost.
    End,
}

/// Like [`Object::sync`], for `range`. Called without locks.
pub(super) fn save<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    range: PageRange,
    until: Until,
) -> Result<(), Failure> {
    if !object.is_file() {
        return Ok(());
    }
    let mut save = Save::new(memory, object, range);
    loop {
        // With a blocking thread, the save never stops early.
        if let Some(result) = save.run(memory, object, until, &mut BlockingThread) {
            return result;
        }
    }
}

/// A save of a range, in progress.
#[derive(Debug)]
struct Save {
    range: PageRange,
    /// The page from which dirty pages still have to be stored.
    from: u64,
    /// The first error.
    result: Result<(), Failure>,
    /// The number of failed writes before the save looked for dirty pages.
    failures: u64,
    /// Set once all dirty pages are stored: the save then waits for the writes with lower numbers.
    waits_below: Option<u64>,
}

/// The way in which a save waits. The results `None` and `false` stop the save.
trait Waiting<P: Platform> {
    /// Stores the next dirty pages, starting with `run`.
    fn store(
        &mut self,
        memory: &Memory<P>,
        object: &ObjectState,
        run: IndexRun,
        rules: Rules,
    ) -> Option<Saved>;

    /// Waits for the end of a write.
    fn wait(&mut self, memory: &Memory<P>, object: &ObjectState, ticket: Ticket) -> bool;
}

/// A thread that blocks.
struct BlockingThread;

impl<P: Platform> Waiting<P> for BlockingThread {
    #[inline(always)]
    fn store(
        &mut self,
        memory: &Memory<P>,
        object: &ObjectState,
        run: IndexRun,
        rules: Rules,
    ) -> Option<Saved> {
        Some(save_from(memory, object, run, rules))
    }

    #[inline(always)]
    fn wait(&mut self, memory: &Memory<P>, object: &ObjectState, ticket: Ticket) -> bool {
        object.pages.wait(memory, ticket);
        true
    }
}

impl Save {
    fn new<P: Platform>(memory: &Memory<P>, object: &ObjectState, range: PageRange) -> Self {
        let range = PageRange { end: range.end.min(object.size_in_pages()), ..range };
        let failures = failures(memory, object);
        Self { range, from: range.first, result: Ok(()), failures, waits_below: None }
    }

    /// Starts over. Stored pages are no longer dirty.
    fn restart<P: Platform>(&mut self, memory: &Memory<P>, object: &ObjectState) {
        (self.from, self.result, self.waits_below) = (self.range.first, Ok(()), None);
        self.failures = failures(memory, object);
    }

    /// Processes the result of a batch.
    fn note(&mut self, saved: &Saved) {
        self.result = self.result.and(saved.result);
        self.from = saved.after;
    }

    /// Saves all pages, or the pages up to a point at which `waiting` stops.
    #[inline]
    fn run<P: Platform>(
        &mut self,
        memory: &Memory<P>,
        object: &ObjectState,
        until: Until,
        waiting: &mut impl Waiting<P>,
    ) -> Option<Result<(), Failure>> {
        let (pages, platform) = (&object.pages, memory.platform());
        loop {
            let number = match self.waits_below {
                Some(number) => number,
                None => {
                    self.store_dirty(memory, object, until, waiting)?;
                    // Pages that other calls were storing when this one began are not dirty, but
                    // are not stored yet.
                    pages.alone(platform, |_, in_flight, _| in_flight.next_number())
                }
            };
            self.waits_below = Some(number);
            while let Some(ticket) = pages.write_before(platform, self.range, number) {
                if !waiting.wait(memory, object, ticket) {
                    return None;
                }
            }
            if self.result.is_err() || failures(memory, object) == self.failures {
                return Some(self.result);
            }
            // Some of the pages may be dirty again. The call that failed knows the error, but this
            // call's caller does not.
            self.restart(memory, object);
        }
    }

    /// Saves the dirty pages that no other call is saving. `None` if `waiting` stops the save.
    #[inline]
    fn store_dirty<P: Platform>(
        &mut self,
        memory: &Memory<P>,
        object: &ObjectState,
        until: Until,
        waiting: &mut impl Waiting<P>,
    ) -> Option<()> {
        loop {
            if until == Until::FatalSignal
                && let Err(signal) = interrupt::check(memory.platform())
            {
                // A failure of the pager takes precedence.
                self.result = self.result.and(Err(signal.into()));
                return Some(());
            }
            // Checked before other threads are excluded, because often no page is dirty.
            let within = self.range.end.min(object.size_in_pages());
            let left = PageRange { first: self.from, end: within };
            let Some(run) = next_to_store(memory, object, left, Tried::Once) else {
                return Some(());
            };
            let saved = waiting.store(memory, object, run, rules_up_to(self.range.end))?;
            self.note(&saved);
        }
    }
}

/// The number of failed writes of the object.
fn failures<P: Platform>(memory: &Memory<P>, object: &ObjectState) -> u64 {
    object.pages.alone(memory.platform(), |_, in_flight, _| in_flight.failures())
}

/// A save in steps, in which no thread needs to wait for the batches.
#[derive(Debug)]
pub(crate) struct FollowedSave<'m, P: Platform> {
    save: Save,
    /// The batch that the save has begun.
    batch: Option<FollowedBatch<'m, P>>,
    /// The number of changes of the next page for which the save has waited.
    passed: u32,
}

/// The way in which a [`FollowedSave`] waits: it stops the save.
struct Steps<'w, 'm, P: Platform> {
    memory: &'m Memory<P>,
    batch: &'w mut Option<FollowedBatch<'m, P>>,
    passed: &'w mut u32,
    /// The ticket to wait for.
    ticket: Option<Ticket>,
}

impl<P: Platform> Waiting<P> for Steps<'_, '_, P> {
    fn store(
        &mut self,
        memory: &Memory<P>,
        object: &ObjectState,
        run: IndexRun,
        rules: Rules,
    ) -> Option<Saved> {
        let batch = match detached_batch::begin(self.memory, object, run.page, rules) {
            Ok((_, Some(batch))) => batch,
            Ok((after, None)) if after != run.page => {
                return Some(Saved { result: Ok(()), after, stored: 0 });
            }
            Ok((_, None)) if *self.passed < PATIENCE => {
                *self.passed += 1;
                let changed = PageRange::from_count(run.page, u64::from(run.count));
                self.ticket = object.pages.change_of(memory.platform(), changed);
                if self.ticket.is_some() {
                    return None;
                }
                // Another sync has started to store the page, or the change has ended, so the check
                // is repeated.
                return Some(Saved { result: Ok(()), after: run.page, stored: 0 });
            }
            // The record cannot be allocated, or changes never end, so the thread waits.
            Ok((_, None)) | Err(_) => {
                *self.passed = 0;
                return Some(save_from(memory, object, run, rules));
            }
        };
        *self.passed = 0;
        self.ticket = batch.ticket(object);
        if self.ticket.is_some() {
            *self.batch = Some(batch);
            return None;
        }
        batch.saved()
    }

    fn wait(&mut self, _: &Memory<P>, _: &ObjectState, ticket: Ticket) -> bool {
        self.ticket = Some(ticket);
        false
    }
}

impl<'m, P: Platform> FollowedSave<'m, P> {
    /// A save of `length` bytes of a file from `offset` on.
    pub(crate) fn new(object: &Object<'m, P>, offset: u64, length: u64) -> Self {
        let save = Save::new(object.memory, object.state(), pages_in(offset, length));
        Self { save, batch: None, passed: 0 }
    }

    /// Starts over after an error. Stored pages are no longer dirty.
    pub(crate) fn restart(&mut self, object: &Object<'m, P>) {
        self.save.restart(object.memory, object.state());
    }

    /// Continues the save until everything is stored or the returned wait is necessary. `object` is
    /// the same in each call.
    ///
    /// # Errors
    /// As [`save`].
    pub(crate) fn step(
        &mut self,
        object: &Object<'m, P>,
    ) -> Result<Option<PolledWait<'m, P>>, Failure> {
        let (memory, state) = (object.memory, object.state());
        if !state.is_file() {
            return Ok(None);
        }
        let wait = |ticket| Ok(Some(PolledWait::new(memory, Wait::Pager(ticket))));
        settle_written(memory);
        if let Some(batch) = &self.batch {
            if let Some(ticket) = batch.ticket(state) {
                return wait(ticket);
            }
            batch.saved().iter().for_each(|saved| self.save.note(saved));
            self.batch = None;
        }
        loop {
            let (batch, passed) = (&mut self.batch, &mut self.passed);
            let mut steps = Steps { memory, batch, passed, ticket: None };
            match (self.save.run(memory, state, Until::FatalSignal, &mut steps), steps.ticket) {
                (Some(result), _) => return result.map(|()| None),
                (None, Some(ticket)) => return wait(ticket),
                (None, None) => {}
            }
        }
    }
}
