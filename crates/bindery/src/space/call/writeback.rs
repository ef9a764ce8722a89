//! `fsync(2)` in steps.

use crate::error::{Error, Failure};
use crate::object::{FollowedSave, Object, ObjectWait};
use crate::platform::Platform;
use crate::reclaim::Attempts;

use super::steps::{CallWait, Step};

/// The changes of a file that a sync has still to store ([`Object::begin_sync`]). Each step begins
/// writes of up to 7 runs of dirty pages, which a device may do side by side. The wait is for their
/// answers, and at the end for those of the writes that other calls have begun.
///
/// It has a handle to the object, and no lock. Dropping it ends the call: the pager stores what it
/// was asked to store, and other changes stay dirty.
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
/// Context: may sleep. The drop, too, like that of an [`Object`].
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
    /// As [`Object::sync`], for a caller that must not block while the pager works: the steps of
    /// the result store the pages.
    ///
    /// Context: spins.
    pub fn begin_sync(&self, offset: u64, length: u64) -> Writeback<'m, P> {
        let save = Some(FollowedSave::new(self, offset, length));
        Writeback { object: self.clone(), save, attempts: Attempts::default() }
    }
}

impl<'m, P: Platform> Writeback<'m, P> {
    /// Stores pages, until all are stored or the pager has to be waited for. After the end, does
    /// nothing.
    ///
    /// Sleeps for locks, and reclaims if the pager lacks memory. Waits for the pager only if there
    /// is no memory for a record of 1 KiB, or if other threads continue to drop or replace the next
    /// page.
    ///
    /// Complexity: linear in the dirty pages that it begins to store, plus one walk over the
    /// mappings of any of them.
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
        // The pages can be reclaimed now.
        memory.clock.exhausted.forget();
        Ok(Step::Done)
    }

    /// Stores the rest, and does the waiting.
    ///
    /// Context: may sleep. Complexity: as all steps.
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
