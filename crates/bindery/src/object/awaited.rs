//! The value that a call on an object waits for, with all of its locks released.

use crate::addr::PageRange;
use crate::error::{Error, Failure, NoMemory};
use crate::folio::FolioRef;
use crate::platform::Platform;

use super::Object;
use super::fetch::Fetch;
use super::in_flight::{Reads, Ticket};

/// The reason why a call cannot continue under its locks: it releases all of them, waits for this,
/// and tries again. A value, so that a caller that must not wait could pass it on instead.
#[derive(Debug)]
pub(crate) enum Awaited {
    /// Pages that must be fetched from the pager.
    Pages(Fetch),
    /// Work that the pager does already.
    End(Ticket),
}

impl Awaited {
    /// Waits for it, without any lock. Returns a reference to a fetched page, which keeps the page
    /// until the caller has tried again. `None` if there is no page to keep: another thread fetches
    /// it, or it was dropped already.
    ///
    /// # Errors
    /// The pager's error; [`Error::OutOfMemory`]; [`Error::NoSpace`] if no more may be committed.
    pub(crate) fn wait<'m, P: Platform>(
        self,
        object: &Object<'m, P>,
    ) -> Result<Option<FolioRef<'m, P>>, Failure> {
        match self {
            Self::Pages(fetch) => fetch.serve(object),
            Self::End(ticket) => {
                object.state().pages.wait(&object.memory.platform, ticket);
                Ok(None)
            }
        }
    }
}

/// The reason why a call cannot get a page under its locks.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The attempt has failed.
    Failed(Failure),
    /// It must wait and try again.
    Await(Awaited),
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

impl From<Ticket> for Stop {
    fn from(ticket: Ticket) -> Self {
        Self::Await(Awaited::End(ticket))
    }
}

impl<P: Platform> Object<'_, P> {
    /// Runs `work`, which changes the pages, with the object's changes held; for a file, while the
    /// pager has none of the pages. If `work` must wait, releases all locks for the wait, and runs
    /// it again. Called without locks.
    pub(super) fn change_pages<R>(
        &self,
        pages: PageRange,
        reads: Reads,
        mut work: impl FnMut() -> Result<R, Stop>,
    ) -> Result<R, Failure> {
        let (platform, state) = (&self.memory.platform, self.state());
        // The pages fetched last: the first and the last page of a range may both be needed at
        // once.
        let (mut _kept, mut _kept_before) = (None, None);
        loop {
            let mut locked = || state.changes.with_write(platform, &mut work);
            let done = if state.is_file() {
                state.pages.with_change(platform, pages, reads, locked)
            } else {
                locked()
            };
            match done {
                Ok(result) => return Ok(result),
                Err(Stop::Failed(failure)) => return Err(failure),
                Err(Stop::Await(awaited)) => {
                    let fetched = awaited.wait(self)?;
                    _kept_before = core::mem::replace(&mut _kept, fetched);
                }
            }
        }
    }
}
