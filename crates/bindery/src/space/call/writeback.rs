//! `fsync(2)` in steps.

use crate::error::{Error, Failure};
use crate::object::{FollowedSave, Object, ObjectWait};
use crate::platform::Platform;
use crate::reclaim::Attempts;

use super::steps::{CallWait, Step};

/// The changes of a file that a sync has yet to store ([`Object::begin_sync`]). Each step starts
/// writes of up to 7 runs of dirty pages, which a device may process in parallel. The wait is for
/// these writes to complete, and at the end for writes that other calls have started.
///
/// The value holds a handle to the object, but no lock. Dropping it ends the call: the pager
/// completes the writes that it has received, and other changes stay dirty.
///
/// ```
/// use bindery::{Error, Object, Platform, Step};
///
/// /// `fsync(2)`; another thread does the waiting.
/// fn store<P: Platform>(file: &Object<'_, P>) -> Result<(), Error> {
///     let mut writeback = file.begin_sync(0, u64::MAX);
///     loop {
///         match writeback.step()? {
///             Step::Done => return Ok(()),
///             // On another thread, or polled, in a kernel that needs this call.
///             Step::Blocked(wait) => drop(wait.wait()),
///         }
///     }
/// }
/// ```
///
/// # Context
/// Context: may sleep. The drop may also sleep, like that of an [`Object`].
#[derive(Debug)]
#[must_use = "the pages are stored by its steps"]
pub struct Writeback<'m, P: Platform> {
    object: Object<'m, P>,
    /// `None` after the end.
    save: Option<FollowedSave<'m, P>>,
    /// The measures taken so far for a pager that lacks memory.
    attempts: Attempts,
}

impl<'m, P: Platform> Object<'m, P> {
    /// As [`Object::sync`], for a caller that must not block while the pager works. The steps of
    /// the result store the pages.
    ///
    /// Context: spins.
    pub fn begin_sync(&self, offset: u64, length: u64) -> Writeback<'m, P> {
        let save = Some(FollowedSave::new(self, offset, length));
        Writeback { object: self.clone(), save, attempts: Attempts::default() }
    }
}

impl<'m, P: Platform> Writeback<'m, P> {
    /// The file.
    pub(super) fn object(&self) -> &Object<'m, P> {
        &self.object
    }

    /// Stores pages until all are stored or the call has to wait for the pager. After the end, does
    /// nothing.
    ///
    /// Sleeps for locks, and reclaims if the pager lacks memory. Waits for the pager only if no
    /// memory is available for a record of 1 KiB, or if other threads continue to drop or replace
    /// the next page.
    ///
    /// Complexity: linear in the number of dirty pages whose writes the step starts, plus one walk
    /// over the mappings of any of these pages.
    ///
    /// # Errors
    /// As [`Object::sync`], once the rest of the range is stored.
    pub fn step(&mut self) -> Result<Step<'m, 'm, P>, Error> {
        let result = self.advance();
        if !matches!(result, Ok(Step::Blocked(_))) {
            self.save = None;
        }
        result
    }

    fn advance(&mut self) -> Result<Step<'m, 'm, P>, Error> {
        let memory = self.object.memory;
        let Some(save) = &mut self.save else { return Ok(Step::Done) };
        let object = &self.object;
        let wait = self.attempts.repeat(memory, || {
            let result = save.step(object);
            if let Err(Failure::NoMemory) = result {
                save.restart(object);
            }
            result
        })?;
        if let Some(wait) = wait {
            let wait = ObjectWait::new(object.clone(), wait, 0);
            return Ok(Step::Blocked(CallWait::for_object(wait)));
        }
        // The pages can now be reclaimed.
        memory.clock.exhausted.forget();
        Ok(Step::Done)
    }

    /// Stores the remaining pages, sleeping as needed.
    ///
    /// Context: may sleep. Complexity: the sum of all steps.
    ///
    /// # Errors
    /// As [`Object::sync`].
    pub fn finish(mut self) -> Result<(), Error> {
        loop {
            match self.step()? {
                Step::Done => return Ok(()),
                Step::Blocked(wait) => drop(wait.wait()),
            }
        }
    }
}
