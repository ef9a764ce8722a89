//! A read of an object that stops wherever it would have to wait, and continues later.
//!
//! ```text
//! | moved | moved | page is not in memory: stops here, goes on here |
//! ```
//!
//! A stopped step holds no lock, no record and no request.

use core::fmt;
use core::ptr::NonNull;

use crate::addr::PAGE_SHIFT;
use crate::error::{Error, Failure};
use crate::folio::FolioRef;
use crate::interrupt;
use crate::platform::Platform;
use crate::reclaim::Attempts;
use crate::vma::MappingFlags;

use super::Object;
use super::polled_wait::{ObjectWait, PolledWait};
use super::swap_in::swap_in;
use super::wait::{Stop, Wait};

/// The end of a wait for a page: a reference that holds the page's folio, or the error.
pub(crate) type PageReady<'m, P> = Result<Option<FolioRef<'m, P>>, Failure>;

/// A read of an object, and its progress.
pub(crate) struct ReadSteps<'m, P: Platform> {
    object: Object<'m, P>,
    /// The first byte to read, as an offset in the object.
    offset: u64,
    length: usize,
    /// The number of bytes that were read.
    done: usize,
    /// Whether the read has ended.
    is_over: bool,
    /// The measures against a lack of memory that were taken so far.
    attempts: Attempts,
    /// The page that was last waited for is held until it is read.
    kept: Option<FolioRef<'m, P>>,
}

impl<'m, P: Platform> ReadSteps<'m, P> {
    /// A read of these bytes.
    ///
    /// # Errors
    /// As [`Object::read`] for an invalid position.
    pub(crate) fn new(object: &Object<'m, P>, offset: u64, length: usize) -> Result<Self, Error> {
        object.state().allow_access(offset, length)?;
        Ok(Self {
            object: object.clone(),
            offset,
            length,
            done: 0,
            is_over: false,
            attempts: Attempts::default(),
            kept: None,
        })
    }

    pub(crate) fn platform(&self) -> &'m P {
        self.object.memory.platform()
    }

    /// The object, unless the call has ended.
    pub(crate) fn rest(&self) -> Option<&Object<'m, P>> {
        (!self.is_over && self.done < self.length).then_some(&self.object)
    }

    /// The number of bytes that were read.
    pub(crate) fn done(&self) -> usize {
        self.done
    }

    /// Reads up to the first page that requires a wait. `ready` is the end of the last wait.
    ///
    /// # Errors
    /// As [`Object::read`].
    pub(crate) fn read(
        &mut self,
        ready: Option<PageReady<'m, P>>,
        copy: &mut dyn FnMut(usize, NonNull<u8>, usize) -> usize,
    ) -> Result<Option<ObjectWait<'m, P>>, Error> {
        let mut ready = ready;
        while !self.is_over && self.done < self.length {
            let before = self.done;
            let Self { object, offset, length, done, attempts, kept, .. } = self;
            let read = attempts.repeat(object.memory, || {
                if let Some(Some(folio)) = ready.take().transpose()? {
                    *kept = Some(folio);
                }
                interrupt::check(object.memory.platform())?;
                match object.try_piece(*offset, *length, done, copy) {
                    Ok(stopped) => Ok((stopped, None)),
                    Err(Stop::Wait(wait)) => Ok((false, Some(wait))),
                    // The next piece, for the rest, reports the error first.
                    Err(Stop::Failed(_)) if *done > before => Ok((false, None)),
                    Err(Stop::Failed(failure)) => Err(failure),
                }
            });
            if self.done > before {
                self.attempts = Attempts::default();
                self.kept = None;
            }
            match read {
                Ok((_, Some(wait))) => {
                    let page = (self.offset + self.done as u64) >> PAGE_SHIFT;
                    return Ok(Some(self.wait_for(wait, page)));
                }
                Ok((true, None)) => return Ok(None),
                Ok((false, None)) => {
                    self.is_over = self.done == before;
                    self.kept = None;
                }
                Err(error) => return self.fail(error),
            }
        }
        Ok(None)
    }

    /// The wait of a step that needs the page.
    fn wait_for(&self, wait: Wait, page: u64) -> ObjectWait<'m, P> {
        let wait = PolledWait::of_call(self.object.memory, wait);
        ObjectWait::new(self.object.clone(), wait, page)
    }

    /// Ends with the error, or with the bytes that were moved before it. Linux does the same: its
    /// next call returns the error.
    fn fail(&mut self, error: Error) -> Result<Option<ObjectWait<'m, P>>, Error> {
        self.is_over = true;
        self.kept = None;
        if self.done > 0 { Ok(None) } else { Err(error) }
    }
}

/// Swaps in the page, if it is in swap.
pub(super) fn swap_in_page<P: Platform>(object: &Object<'_, P>, page: u64) -> Result<(), Stop> {
    let (memory, state) = (object.memory, object.state());
    let orders = state.orders(memory, MappingFlags::empty());
    let swap_in = |_: &_| swap_in(memory, state, page, orders);
    state.invalidate_lock.with_read(memory.platform(), swap_in).map(drop)
}

/// Swaps in the page, if it is in swap, and performs the waits.
///
/// # Errors
/// The device's error; [`Failure::NoMemory`].
pub(super) fn bring_in<P: Platform>(object: &Object<'_, P>, page: u64) -> Result<(), Failure> {
    let mut _kept = None;
    loop {
        match swap_in_page(object, page) {
            Ok(()) => return Ok(()),
            Err(Stop::Failed(failure)) => return Err(failure),
            Err(Stop::Wait(wait)) => _kept = wait.wait(object.memory, Some(object))?.or(_kept),
        }
    }
}

impl<P: Platform> fmt::Debug for ReadSteps<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadSteps")
            .field("offset", &self.offset)
            .field("length", &self.length)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}
