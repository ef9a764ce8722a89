//! [`PolledWait`]: a wait in which no thread sleeps, for kernels whose tasks are futures.
//!
//! A poll performs all work that needs no wait: it starts the read and settles answers. Then it
//! returns the word that changes when more work is possible. [`Platform::unpark`] is called with
//! its address. Any thread may settle the read ([`super::page_read`]), so a wait may be dropped:
//! the pages still enter the index.

use core::fmt;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::Memory;
use crate::addr::PageRange;
use crate::error::Failure;
use crate::folio::FolioRef;
use crate::platform::Platform;

use super::Object;
use super::ask::Fetch;
use super::detached_batch::{FollowedBatch, settle_written};
use super::in_flight::{InTheWay, Ticket};
use super::mapped_write;
use super::page_read::FollowedRead;
use super::pager::Preparation;
use super::read_end::settle_answered;
use super::read_steps::{PageReady, bring_in};
use super::wait::Wait;
use super::write_back::{PolledRoom, poll_room, stored};
use crate::swap::polled::{PolledSlot, SlotPoll};
use crate::swap::wait_for_request;

/// The word that a wait depends on. After a change of the word, the core calls [`Platform::unpark`]
/// with its address, from any context.
///
/// ```
/// use bindery::{ParkedOn, Platform};
///
/// /// A thread that may sleep waits like this. A task that is a future leaves its waker in the
/// /// table of the platform's parked threads, under the address of the word, and then asks
/// /// `has_changed`.
/// fn sleep<P: Platform>(platform: &P, parked: &ParkedOn<'_>) {
///     while !parked.has_changed() {
///         platform.park(parked.word(), parked.expected());
///     }
/// }
/// ```
///
/// # Context
/// Context: any.
#[derive(Clone, Copy)]
pub struct ParkedOn<'w> {
    word: &'w AtomicU32,
    expected: u32,
}

impl<'w> ParkedOn<'w> {
    pub(crate) fn new(word: &'w AtomicU32, expected: u32) -> Self {
        Self { word, expected }
    }

    /// The word; [`Platform::unpark`] is called with its address.
    pub fn word(&self) -> &'w AtomicU32 {
        self.word
    }

    /// The value of the word that means that no progress is possible yet.
    pub fn expected(&self) -> u32 {
        self.expected
    }

    /// Whether progress may be possible. A task calls this after it has registered its waker,
    /// because the word may have changed earlier.
    pub fn has_changed(&self) -> bool {
        self.word.load(Ordering::Acquire) != self.expected
    }
}

impl fmt::Debug for ParkedOn<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParkedOn").field("expected", &self.expected).finish_non_exhaustive()
    }
}

/// The result of a poll.
pub(crate) enum Polled<'w, 'm, P: Platform> {
    /// The wait is over. The reference holds the folio that was waited for, if it is in memory.
    Ready(Option<FolioRef<'m, P>>),
    /// No progress is possible until this word changes.
    Pending(ParkedOn<'w>),
    /// Only a thread that may sleep can continue the wait.
    NeedsThread,
}

/// A wait that is polled.
pub(crate) struct PolledWait<'m, P: Platform> {
    memory: &'m Memory<P>,
    wait: Wait,
    followed: Followed<'m, P>,
    /// Whether the wait is counted among those that wait for answers.
    has_entered: bool,
    /// Whether a page that is read counts as a major fault.
    is_fault: bool,
}

/// The work that the polls follow.
enum Followed<'m, P: Platform> {
    Nothing,
    /// For a page in swap, in place of the wait.
    Slot(PolledSlot),
    Read(FollowedRead<'m, P>),
    /// The store that makes room for a dirty page.
    Store(FollowedBatch<'m, P>),
}

impl<'m, P: Platform> PolledWait<'m, P> {
    /// The wait as a value that can be queued. It abandons a read from a swap device and starts it
    /// again in the first poll.
    pub(crate) fn new(memory: &'m Memory<P>, wait: Wait) -> Self {
        let of_slot = Followed::Slot;
        let (wait, followed) = match wait {
            Wait::SwapRead(read) => (Wait::Memory, of_slot(read.into_polled(memory))),
            Wait::SwapCache { area, slot } => (wait, of_slot(PolledSlot::cached(area, slot))),
            Wait::SwapRequest { area } => (wait, of_slot(PolledSlot::request(area))),
            Wait::Pages(_)
            | Wait::ReadAhead(_)
            | Wait::Pager(_)
            | Wait::Folio(_)
            | Wait::Memory
            | Wait::DirtyLimit
            | Wait::WriteAccess(_) => (wait, Followed::Nothing),
            Wait::Handler(never) => match never {},
        };
        Self { memory, wait, followed, has_entered: false, is_fault: true }
    }

    /// As [`PolledWait::new`], for a call that works on the object rather than a mapping.
    pub(crate) fn of_call(memory: &'m Memory<P>, wait: Wait) -> Self {
        let mut polled = Self::new(memory, wait);
        polled.is_fault = false;
        polled
    }

    /// Whether the wait is for a pager or a device.
    fn is_for_storage(&self) -> bool {
        let storage = matches!(
            self.wait,
            Wait::Pages(_) | Wait::Pager(_) | Wait::DirtyLimit | Wait::WriteAccess(_)
        );
        storage || matches!(self.followed, Followed::Slot(_))
    }

    /// The wait, for a thread that may sleep. A read in progress continues, and the thread finds
    /// it. `None` for a read from a swap device, which the thread's own fault starts or finds.
    pub(crate) fn into_wait(mut self) -> Option<Wait> {
        if matches!(&self.followed, Followed::Slot(slot) if slot.is_for_read()) {
            return None;
        }
        Some(core::mem::replace(&mut self.wait, Wait::Memory))
    }

    /// Waits for a request of a swap device, in the thread.
    pub(crate) fn wait_for_request(self) {
        let memory = self.memory;
        if let Some(Wait::SwapRequest { area }) = self.into_wait() {
            wait_for_request(memory, area);
        }
    }

    /// Continues the wait. `object` is the object whose pages are needed, if any.
    ///
    /// # Errors
    /// The pager's error.
    pub(crate) fn poll<'w>(
        &'w mut self,
        object: Option<&'w Object<'m, P>>,
    ) -> Result<Polled<'w, 'm, P>, Failure> {
        if let Followed::Slot(slot) = &mut self.followed {
            return Ok(match slot.poll(self.memory) {
                SlotPoll::Ready(kept) => {
                    if self.is_fault && slot.has_read() && kept.is_some() {
                        self.memory.note_major_fault();
                    }
                    Polled::Ready(kept)
                }
                SlotPoll::Pending(word, expected) => Polled::Pending(ParkedOn { word, expected }),
                SlotPoll::NeedsThread => Polled::NeedsThread,
            });
        }
        let Some(object) = object else { return Ok(Polled::NeedsThread) };
        match self.wait {
            Wait::Pages(fetch) => self.poll_pages(fetch, object),
            Wait::ReadAhead(next) => {
                next.begin(object);
                Ok(Polled::Ready(None))
            }
            Wait::Pager(ticket) => Ok(match self.poll_end(ticket, object) {
                Some(parked) => Polled::Pending(parked),
                None => Polled::Ready(None),
            }),
            Wait::SwapRead(_)
            | Wait::SwapCache { .. }
            | Wait::SwapRequest { .. }
            | Wait::Folio(_)
            | Wait::Memory => Ok(Polled::NeedsThread),
            Wait::DirtyLimit => self.poll_room(object),
            Wait::WriteAccess(pages) => self.poll_preparation(pages, object),
            Wait::Handler(never) => match never {},
        }
    }

    /// The word that changes with each answer, as it was before the checks that follow.
    fn word_of_answers(&mut self) -> ParkedOn<'m> {
        let answers = &self.memory.answers.completions;
        if !core::mem::replace(&mut self.has_entered, true) {
            answers.enter();
        }
        let (word, expected) = answers.word();
        ParkedOn { word, expected }
    }

    /// Makes room for another dirty page of the object.
    fn poll_room<'w>(
        &'w mut self,
        object: &'w Object<'m, P>,
    ) -> Result<Polled<'w, 'm, P>, Failure> {
        let memory = self.memory;
        loop {
            let for_answers = self.word_of_answers();
            settle_written(memory);
            if let Followed::Store(batch) = &self.followed {
                let Some(saved) = batch.saved() else { return Ok(Polled::Pending(for_answers)) };
                self.followed = Followed::Nothing;
                if stored(&saved).is_err() {
                    return Ok(Polled::NeedsThread);
                }
            }
            match poll_room(object)? {
                PolledRoom::Made => return Ok(Polled::Ready(None)),
                PolledRoom::NeedsThread => return Ok(Polled::NeedsThread),
                // If it is stored already, more room may be needed.
                PolledRoom::AfterBatch(batch) => self.followed = Followed::Store(batch),
                PolledRoom::After(ticket) => {
                    if let Some((word, expected)) = object.state().pages.ends.word(ticket) {
                        let on_record = ParkedOn { word, expected };
                        let parked = if ticket.is_detached { for_answers } else { on_record };
                        return Ok(Polled::Pending(parked));
                    }
                }
            }
        }
    }

    /// Lets the pager prepare for writes to the pages.
    fn poll_preparation<'w>(
        &'w mut self,
        pages: PageRange,
        object: &'w Object<'m, P>,
    ) -> Result<Polled<'w, 'm, P>, Failure> {
        let for_answers = self.word_of_answers();
        Ok(match mapped_write::begin_preparation(object, pages)? {
            Preparation::Complete => Polled::Ready(None),
            Preparation::Begun => Polled::Pending(for_answers),
            Preparation::InThread => Polled::NeedsThread,
        })
    }

    /// The word that changes when the record of the ticket may have ended. `None` if a record has
    /// already ended.
    fn poll_end<'w>(
        &'w mut self,
        ticket: Ticket,
        object: &'w Object<'m, P>,
    ) -> Option<ParkedOn<'w>> {
        let (memory, ends) = (self.memory, &object.state().pages.ends);
        if !ticket.is_detached {
            let (word, expected) = ends.word(ticket)?;
            return Some(ParkedOn { word, expected });
        }
        let for_answers = self.word_of_answers();
        settle_written(memory);
        ends.word(ticket).map(|_| for_answers)
    }

    fn poll_pages<'w>(
        &'w mut self,
        mut fetch: Fetch,
        object: &'w Object<'m, P>,
    ) -> Result<Polled<'w, 'm, P>, Failure> {
        let (memory, pages) = (self.memory, &object.state().pages);
        let page = PageRange::from_count(fetch.page, 1);
        loop {
            let for_answers = Polled::Pending(self.word_of_answers());
            settle_answered(memory);
            let followed = match &self.followed {
                Followed::Read(read) => Some((read.result(), read.pages)),
                Followed::Nothing | Followed::Slot(_) | Followed::Store(_) => None,
            };
            match followed {
                Some((None, _)) => return Ok(for_answers),
                Some((Some(Ok(())), _)) => {
                    self.followed = Followed::Nothing;
                    if self.is_fault {
                        memory.note_major_fault();
                    }
                    // If the page is not in memory, reclaim has taken it, and only a thread has the
                    // means to keep it.
                    return Ok(match kept(object, fetch.page) {
                        Some(folio) => Polled::Ready(Some(folio)),
                        // A truncation has dropped the page.
                        None if fetch.page >= object.state().size_in_pages() => Polled::Ready(None),
                        None => Polled::NeedsThread,
                    });
                }
                Some((Some(Err(Failure::NoMemory)), _)) => return Ok(Polled::NeedsThread),
                Some((Some(Err(error)), pages)) => {
                    self.followed = Followed::Nothing;
                    // The surrounding pages may have caused the error.
                    if pages == 1 {
                        return Err(error);
                    }
                    fetch = fetch.only_page();
                    self.wait = Wait::Pages(fetch);
                }
                None => {}
            }
            if let Some(folio) = kept(object, fetch.page) {
                return Ok(Polled::Ready(Some(folio)));
            }
            match pages.keeps_from_reading(memory.platform(), page) {
                Some(InTheWay::ReadAhead) => return Ok(for_answers),
                Some(InTheWay::Thread(ticket)) => {
                    if let Some((word, expected)) = pages.ends.word(ticket) {
                        return Ok(Polled::Pending(ParkedOn { word, expected }));
                    }
                    continue;
                }
                None => {}
            }
            match fetch.begin_followed(object) {
                Ok(None) => return Ok(Polled::Ready(None)),
                Ok(Some(read)) => self.followed = Followed::Read(read),
                // Reclaim needs a thread.
                Err(Failure::NoMemory) => return Ok(Polled::NeedsThread),
                Err(refused) => return Err(refused),
            }
        }
    }
}

impl<P: Platform> Drop for PolledWait<'_, P> {
    fn drop(&mut self) {
        if self.has_entered {
            self.memory.answers.completions.leave();
        }
        if let Followed::Slot(slot) = &mut self.followed {
            slot.end(self.memory);
        }
        core::mem::replace(&mut self.wait, Wait::Memory).cancel(self.memory);
    }
}

impl<P: Platform> fmt::Debug for PolledWait<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.followed {
            Followed::Slot(slot) => slot.fmt(f),
            Followed::Nothing | Followed::Read(_) | Followed::Store(_) => self.wait.fmt(f),
        }
    }
}

/// The wait of a call for pages of an object, with a handle to the object.
#[derive(Debug)]
pub(crate) struct ObjectWait<'m, P: Platform> {
    object: Object<'m, P>,
    wait: PolledWait<'m, P>,
    /// The page that the call needs, if it may be in swap.
    page: u64,
}

impl<'m, P: Platform> ObjectWait<'m, P> {
    pub(crate) fn new(object: Object<'m, P>, wait: PolledWait<'m, P>, page: u64) -> Self {
        Self { object, wait, page }
    }

    /// Waits in the thread.
    ///
    /// # Errors
    /// As [`Wait::wait`].
    pub(crate) fn wait(self) -> PageReady<'m, P> {
        let Self { object, wait, page } = self;
        let Some(wait) = wait.into_wait() else {
            bring_in(&object, page)?;
            return Ok(kept(&object, page));
        };
        wait.wait(object.memory, Some(&object))
    }

    /// Continues the wait, as [`PolledWait::poll`].
    ///
    /// # Errors
    /// As [`PolledWait::poll`].
    pub(crate) fn poll(&mut self) -> Result<Polled<'_, 'm, P>, Failure> {
        self.wait.poll(Some(&self.object))
    }

    /// Whether the wait is for a pager or a device.
    pub(crate) fn is_for_storage(&self) -> bool {
        self.wait.is_for_storage()
    }
}

/// A reference to the folio that has the page, if it is in memory.
fn kept<'m, P: Platform>(object: &Object<'m, P>, page: u64) -> Option<FolioRef<'m, P>> {
    let memory = object.memory;
    // A page in the index holds a reference to its folio.
    object
        .state()
        .pages
        .look(memory.platform(), |index| memory.frames.try_hold(index.get(page)?.frame))
}
