//! Failed writes of a file, each reported once to each opener ([`ErrorMark`]; Linux: `errseq_t`).
//!
//! A page may be stored long after it was written, by a call of another process. If the store
//! fails, the writers receive the error from their next `fsync`. The object keeps the last error in
//! a word:
//!
//! ```text
//!  63                    8    7     6      0
//! | times it has changed | seen | the error |
//! ```
//!
//! A mark is a copy of the word. An error is new to an opener whose mark differs from the word. The
//! count increases only when an error replaces one that was seen, so a burst of failures counts as
//! one error.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::error::Error;
use crate::platform::Platform;

use super::{Object, PagerError};

const SEEN: u64 = 1 << 7;
const ERROR: u64 = SEEN - 1;
const ONE: u64 = 1 << 8;

/// The errors of an object that one opener has seen; stored in the embedder's open file
/// ([`Object::error_mark`]).
///
/// ```
/// use bindery::{Error, ErrorMark, Object, Platform};
///
/// struct OpenFile<'m, P: Platform> {
///     object: Object<'m, P>,
///     errors: ErrorMark,
/// }
///
/// /// `fsync(2)`.
/// fn fsync<P: Platform>(file: &mut OpenFile<'_, P>) -> Result<(), Error> {
///     let stored = file.object.sync(0, u64::MAX);
///     // First: an error of this very call is seen by it, and not reported again.
///     file.object.check_errors(&mut file.errors).and(stored)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ErrorMark(u64);

/// The word of an object that holds its last error.
pub(super) struct WriteErrors(AtomicU64);

impl WriteErrors {
    pub(super) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Records the failure of a write. A lack of memory is not an error of the storage; the caller
    /// of the write retries.
    pub(super) fn record(&self, error: PagerError) {
        let code = match error {
            PagerError::InputOutput => 1,
            PagerError::NoSpace => 2,
            PagerError::NotSupported => 3,
            PagerError::OutOfMemory => return,
        };
        let next = |word: u64| {
            let changed = if word & SEEN == 0 { 0 } else { ONE };
            Some((word & !(SEEN | ERROR)).wrapping_add(changed) | code)
        };
        // The update always succeeds.
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
    }

    /// The mark of a new opener, to which an error is new that no other opener has seen.
    fn mark(&self) -> ErrorMark {
        let word = self.0.load(Ordering::Relaxed);
        ErrorMark(if word & SEEN == 0 { 0 } else { word })
    }

    /// The error that is new since the mark. Advances the mark.
    fn check(&self, mark: &mut ErrorMark) -> Result<(), Error> {
        let mut word = self.0.load(Ordering::Relaxed);
        if word == mark.0 {
            return Ok(());
        }
        while word & SEEN == 0 {
            match self.0.compare_exchange_weak(
                word,
                word | SEEN,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => word |= SEEN,
                Err(now) => word = now,
            }
        }
        mark.0 = word;
        match word & ERROR {
            1 => Err(Error::InputOutput),
            2 => Err(Error::NoSpace),
            3 => Err(Error::NotSupported),
            _ => Ok(()),
        }
    }
}

impl<P: Platform> Object<'_, P> {
    /// The mark of a new opener of a file: taken when the file is opened, and stored with the open
    /// file. An error that no opener has seen yet is new to this opener, so an error is not lost if
    /// the file was closed in between.
    ///
    /// Context: any.
    pub fn error_mark(&self) -> ErrorMark {
        self.state().write_errors.mark()
    }

    /// Reports the last failure of a write of the file's pages, from any call, once for each mark.
    /// Intended for the end of `fsync(2)`, `fdatasync(2)` and `msync(2)` with `MS_SYNC`. Failures
    /// of the object's last save, after all handles and mappings were dropped, are reported to no
    /// opener. A failure that a dropped [`Writeback`](crate::Writeback) has not waited for is
    /// reported once a later call has taken the pager's answer: a sync of those pages, or reclaim.
    ///
    /// Context: any.
    ///
    /// # Errors
    /// The pager's error: [`Error::InputOutput`], [`Error::NoSpace`], [`Error::NotSupported`].
    pub fn check_errors(&self, mark: &mut ErrorMark) -> Result<(), Error> {
        self.state().write_errors.check(mark)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mark_sees_an_error_once() {
        let errors = WriteErrors::new();
        let (mut early, mut other) = (errors.mark(), errors.mark());
        assert_eq!(errors.check(&mut early), Ok(()));
        errors.record(PagerError::InputOutput);
        assert_eq!(errors.check(&mut early), Err(Error::InputOutput));
        assert_eq!(errors.check(&mut early), Ok(()));
        // An opener that opens the file later does not see an error that another has seen; one that
        // opened it before does.
        let mut late = errors.mark();
        assert_eq!(errors.check(&mut late), Ok(()));
        assert_eq!(errors.check(&mut other), Err(Error::InputOutput));
        // A repeated error is new to all openers.
        errors.record(PagerError::InputOutput);
        for mark in [&mut early, &mut other, &mut late] {
            assert_eq!(errors.check(mark), Err(Error::InputOutput));
            assert_eq!(errors.check(mark), Ok(()));
        }
    }

    #[test]
    fn a_later_opener_sees_an_unseen_error() {
        let errors = WriteErrors::new();
        errors.record(PagerError::InputOutput);
        errors.record(PagerError::NoSpace);
        let mut late = errors.mark();
        assert_eq!(errors.check(&mut late), Err(Error::NoSpace));
        assert_eq!(errors.check(&mut late), Ok(()));
        errors.record(PagerError::OutOfMemory);
        assert_eq!(errors.check(&mut late), Ok(()));
    }
}
