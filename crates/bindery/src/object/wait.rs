//! The reasons for which a call or a fault waits, with its locks released.

use core::convert::Infallible;

use crate::Memory;
use crate::addr::PageRange;
use crate::error::{Error, Failure, NoMemory};
use crate::folio::{FolioRef, HeldFolio};
use crate::platform::Platform;
use crate::swap::device_read::DeviceRead;
use crate::swap::{find_cached, lock_kept, wait_for_request};
use crate::userfault::{Ending, QueuedFault, WaitSignals};

use super::Object;
use super::ask::Fetch;
use super::in_flight::Ticket;
use super::mapped_write;
use super::read_ahead::NextWindow;
use super::transfers::Reads;
use super::write_back::make_room;

/// The reason why a call or a fault cannot continue with its locks held: it releases all of them,
/// waits, and retries. This is a value, so that a caller that must not wait can pass it on instead
/// ([`crate::AddressSpace::try_fault`]). Only a wait for a handler borrows anything: the message in
/// the handler's queue. That variant exists only in [`Wait<HandlerWait>`].
#[derive(Debug)]
#[must_use = "the call would try again at once"]
pub(crate) enum Wait<H = Infallible> {
    /// Pages that must be fetched from the pager.
    Pages(Fetch),
    /// Pages after those that the call needs; the pager should start to read them.
    ReadAhead(NextWindow),
    /// Work that the pager is already performing.
    Pager(Ticket),
    /// A page that a swap device reads for the caller.
    SwapRead(DeviceRead),
    /// A folio in the swap cache whose lock is held by another thread or a device.
    SwapCache {
        /// The area of one of the folio's slots.
        area: u8,
        /// The number of the slot.
        slot: u64,
    },
    /// A free request of a swap area whose requests are all in use.
    SwapRequest {
        /// The area.
        area: u8,
    },
    /// A folio whose lock is held by another thread or a device.
    Folio(HeldFolio),
    /// The handler of a userfaultfd, for a fault whose message is in the queue.
    Handler(H),
    /// Unused memory that is retained by caches and must be collected for a large folio.
    Memory,
    /// Dirty pages that must be stored to make room for another one ([`crate::DirtyLimit`]).
    DirtyLimit,
    /// The pager, before these pages become writable ([`crate::Pager::prepare_write`]).
    WriteAccess(PageRange),
}

/// The wait of a fault for a handler, if any.
pub(crate) trait ForHandler {
    /// Waits until the handler has answered.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    fn wait<P: Platform>(self, platform: &P) -> Result<(), Error>;
}

impl ForHandler for Infallible {
    fn wait<P: Platform>(self, _: &P) -> Result<(), Error> {
        match self {}
    }
}

/// A fault whose message is in the queue of a userfaultfd, and the signals that end its wait.
#[derive(Debug)]
pub(crate) struct HandlerWait<'w>(pub(crate) QueuedFault<'w>, pub(crate) WaitSignals);

impl ForHandler for HandlerWait<'_> {
    #[inline(always)]
    fn wait<P: Platform>(self, platform: &P) -> Result<(), Error> {
        match self.0.wait(platform, self.1) {
            Ending::Woken | Ending::Closed => Ok(()),
            Ending::Interrupted => Err(Error::Interrupted),
        }
    }
}

impl<H: ForHandler> Wait<H> {
    /// Waits, without any lock. Returns a reference to the folio that the caller needs, which holds
    /// the folio in memory until the caller has retried. `None` if no folio exists to hold, because
    /// another thread is fetching it or it was already dropped. `object` is the object whose pages
    /// the call needs.
    ///
    /// # Errors
    /// The pager's or the device's error; [`Error::OutOfMemory`]; [`Error::NoSpace`] if no more may
    /// be committed; [`Error::Interrupted`], for a handler, for a dirty limit, and for pages that
    /// become writable.
    pub(crate) fn wait<'m, P: Platform>(
        self,
        memory: &'m Memory<P>,
        object: Option<&Object<'m, P>>,
    ) -> Result<Option<FolioRef<'m, P>>, Failure> {
        self.wait_for_known(memory, object)
    }

    /// As [`Wait::wait`], for a caller that knows the variant, so that the compiler omits the other
    /// variants.
    #[inline(always)]
    pub(crate) fn wait_for_known<'m, P: Platform>(
        self,
        memory: &'m Memory<P>,
        object: Option<&Object<'m, P>>,
    ) -> Result<Option<FolioRef<'m, P>>, Failure> {
        match self {
            Self::Pages(fetch) => object.map_or(Ok(None), |object| fetch.serve(object)),
            Self::ReadAhead(next) => {
                if let Some(object) = object {
                    next.begin(object);
                }
                Ok(None)
            }
            Self::Pager(ticket) => {
                if let Some(object) = object {
                    object.state().pages.wait(memory, ticket);
                }
                Ok(None)
            }
            Self::SwapRead(read) => read.finish(memory),
            Self::SwapCache { area, slot } => {
                let cached = find_cached(memory, area, slot);
                if let Some(cached) = &cached {
                    drop(lock_kept(memory, cached));
                }
                Ok(cached)
            }
            Self::SwapRequest { area } => {
                wait_for_request(memory, area);
                Ok(None)
            }
            Self::Folio(held) => {
                drop(lock_kept(memory, &held.guard(&memory.frames)));
                Ok(None)
            }
            Self::Handler(handler) => {
                handler.wait(memory.platform())?;
                Ok(None)
            }
            Self::Memory => {
                memory.collect();
                Ok(None)
            }
            Self::DirtyLimit => {
                object.map_or(Ok(()), make_room)?;
                Ok(None)
            }
            Self::WriteAccess(pages) => {
                object.map_or(Ok(()), |object| mapped_write::prepare(object, pages))?;
                Ok(None)
            }
        }
    }

    /// Whether a fault that waits for this counts as major if the wait returns a folio.
    pub(crate) fn is_major(&self) -> bool {
        match self {
            Self::Pages(_) | Self::SwapRead(_) => true,
            Self::ReadAhead(_)
            | Self::Pager(_)
            | Self::SwapCache { .. }
            | Self::SwapRequest { .. }
            | Self::Folio(_)
            | Self::Handler(..)
            | Self::Memory
            | Self::DirtyLimit
            | Self::WriteAccess(_) => false,
        }
    }
}

impl Wait {
    /// Ends a wait that the caller no longer needs or cannot keep. Holds no resources afterwards.
    pub(crate) fn cancel<P: Platform>(self, memory: &Memory<P>) {
        match self {
            Self::SwapRead(read) => read.give_up(memory),
            Self::Folio(held) => drop(held.guard(&memory.frames)),
            Self::Pages(_)
            | Self::ReadAhead(_)
            | Self::Pager(_)
            | Self::SwapCache { .. }
            | Self::SwapRequest { .. }
            | Self::Memory
            | Self::DirtyLimit
            | Self::WriteAccess(_) => {}
            Self::Handler(never) => match never {},
        }
    }
}

/// The reason why a call cannot get a page with its locks held.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The attempt has failed.
    Failed(Failure),
    /// The call must wait and retry.
    Wait(Wait),
}

impl Stop {
    /// The started read, if any, that must be finished although the caller does not wait.
    #[cold]
    pub(super) fn begun_read(self) -> Option<DeviceRead> {
        if let Self::Wait(Wait::SwapRead(read)) = self { Some(read) } else { None }
    }
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error.into())
    }
}

impl From<NoMemory> for Stop {
    fn from(NoMemory: NoMemory) -> Self {
        Self::Failed(Failure::NoMemory)
    }
}

impl From<Wait> for Stop {
    fn from(wait: Wait) -> Self {
        Self::Wait(wait)
    }
}

impl<P: Platform> Object<'_, P> {
    /// Runs `work`, which changes the pages, with the object's changes held and, for a file, while
    /// the pager stores none of the pages. If `work` must wait, releases all locks for the wait and
    /// runs `work` again. Called without locks.
    pub(super) fn change_pages<R>(
        &self,
        pages: PageRange,
        reads: Reads,
        mut work: impl FnMut() -> Result<R, Stop>,
    ) -> Result<R, Failure> {
        let (platform, state) = (self.memory.platform(), self.state());
        // The last two folios fetched, because the first and the last page of a range may both be
        // needed at the same time.
        let (mut _kept, mut _kept_before) = (None, None);
        loop {
            let mut locked = || state.changes.with_write(platform, &mut work);
            let done = if state.is_file() {
                state.pages.with_change(self.memory, pages, reads, locked)
            } else {
                locked()
            };
            match done {
                Ok(result) => return Ok(result),
                Err(Stop::Failed(failure)) => return Err(failure),
                Err(Stop::Wait(wait)) => {
                    let fetched = wait.wait(self.memory, Some(self))?;
                    _kept_before = core::mem::replace(&mut _kept, fetched);
                }
            }
        }
    }

    /// As [`Object::change_pages`], for a caller that must not wait. It has no place in the queue
    /// of those that wait for the pager's stores, so the next attempt may have to wait again.
    ///
    /// # Errors
    /// Those of `work`; [`Stop::Wait`] also for pages that the pager is storing.
    pub(super) fn try_change_pages<R>(
        &self,
        pages: PageRange,
        reads: Reads,
        work: impl FnOnce() -> Result<R, Stop>,
    ) -> Result<R, Stop> {
        let (platform, state) = (self.memory.platform(), self.state());
        let locked = || state.changes.with_write(platform, work);
        if !state.is_file() {
            return locked();
        }
        state.pages.try_change(self.memory, pages, reads, locked).map_err(Wait::Pager)?
    }
}

#[cfg(test)]
mod tests {
    #![allow(unsafe_code, reason = "the memory of a machine")]

    use super::*;
    use crate::addr::{PAGE_SIZE, VirtAddr};
    use crate::frame::tests::Machine;
    use crate::object::PolledWait;
    use crate::{Access, AddressSpace, Inspection, MapRequest, Place, Protection, SpaceOptions};

    #[test]
    fn a_dropped_wait_for_a_folio_frees_it() {
        let machine = Machine::new(0x100, 1 << 10);
        let whole = machine.whole();
        // SAFETY: the machine has no other user.
        let memory = unsafe { Memory::new(machine, &[whole]) }.unwrap();
        let space = AddressSpace::new(&memory, SpaceOptions::default()).unwrap();
        let at = VirtAddr(1 << 30);
        let protection = Protection::READ | Protection::WRITE;
        let place = Place::Fixed(at);
        let request = MapRequest { length: PAGE_SIZE, protection, place, ..MapRequest::default() };
        space.mmap(&request).unwrap();
        space.fault(at, Access::Write).unwrap();
        let Inspection::Page { frame, .. } = space.inspect(at) else { panic!("nothing is mapped") };
        let held = memory.frames.try_hold(frame).unwrap();
        let wait = PolledWait::new(&memory, Wait::Folio(held.into_held()));
        space.munmap(at, PAGE_SIZE).unwrap();
        let is_held = || memory.frames.try_hold(frame).is_some();
        assert!(is_held(), "the wait has a reference");
        drop(wait);
        assert!(!is_held(), "the reference is gone with the wait");
    }
}
