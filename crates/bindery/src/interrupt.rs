//! Ends long calls early for a thread that is about to be killed.
//!
//! Linux checks `fatal_signal_pending` at the same points, so that a program that locks all memory,
//! or writes a file of many gigabytes, can be killed during the call. A call checks between two
//! pieces of bounded work, and never in a read section or with a table locked. Its work so far
//! stays done, unless its documentation promises to undo it.

use crate::error::Error;
use crate::platform::Platform;

/// Fails if a fatal signal is pending, before the next piece of a long call.
#[inline]
pub(crate) fn check<P: Platform>(platform: &P) -> Result<(), Error> {
    if platform.fatal_signal() { Err(Error::Interrupted) } else { Ok(()) }
}

/// Like [`check`], for a call that any signal ends (Linux: `signal_pending`): its caller can repeat
/// it.
#[inline]
pub(crate) fn check_any<P: Platform>(platform: &P) -> Result<(), Error> {
    if platform.signal() { Err(Error::Interrupted) } else { Ok(()) }
}
