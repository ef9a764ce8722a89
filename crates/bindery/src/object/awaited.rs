//! The value that a call on an object waits for, with all of its locks released.

use crate::addr::PageRange;
use crate::error::{Error, Failure, NoMemory};
use crate::frame::Reference;
use crate::platform::Platform;

use super::Object;
use super::fetch::Fetch;
use super::in_flight::{Reads, Ticket};

/// Why a call cannot go on under its locks: it gives all of them back, waits for this, and comes
/// again. A value, so that a caller who must not wait could hand it on instead.
#[derive(Debug)]
pub(crate) enum Awaited {
    /// Pages that have to come from the pager.
    Pages(Fetch),
    /// Something that the pager does already.
    End(Ticket),
}

impl Awaited {
    /// Waits for it, without any lock. A page that was fetched is kept, so that nobody takes it
    /// away before the caller has come again and drops the reference. `None` if there is nothing to
    /// keep: another thread does it, or it is gone already.
    ///
    /// # Errors
    /// What the pager says; [`Error::OutOfMemory`]; [`Error::NoSpace`] if no more may be committed.
    pub(crate) fn wait<'m, P: Platform>(
        self,
        object: &Object<'m, P>,
    ) -> Result<Option<Reference<'m, P>>, Failure> {
        match self {
            Self::Pages(fetch) => fetch.serve(object),
            Self::End(ticket) => {
                object.state().pages.wait(&object.memory.platform, ticket);
                Ok(None)
            }
        }
    }
}

/// Why a call cannot have a page under its locks.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The attempt has failed.
    Failed(Failure),
    /// It has to wait, and come again.
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
    /// Does `work`, which changes the pages, with the object's changes held;
    /// of a file, while the pager has none of the pages. Where `work` has to wait, all locks are
    /// given back meanwhile, and it is done again. Called without locks.
    pub(super) fn change_pages<R>(
        &self,
        pages: PageRange,
        reads: Reads,
        mut work: impl FnMut() -> Result<R, Stop>,
    ) -> Result<R, Failure> {
        let (platform, state) = (&self.memory.platform, self.state());
        // What was fetched last: the first and the last page of a range may both be needed at once.
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
