//! Ends long calls early for a thread that is about to be killed.
//!
//! Linux checks `fatal_signal_pending` at the same points, so that a program that locks all memory,
//! or writes a file of many gigabytes, can be killed during the call. A call checks between two
//! pieces of bounded work, never in a read section or with a table locked. The completed work is
//! not undone, unless the call's documentation says so.

use crate::error::Error;
use crate::platform::Platform;

/// Fails if a fatal signal is pending, before the next piece of a long call.
#[inline]
pub(crate) fn check<P: Platform>(platform: &P) -> Result<(), Error> {
    if platform.fatal_signal() { Err(Error::Interrupted) } else { Ok(()) }
}

/// Like [`check`], for a call that any signal interrupts (Linux: `signal_pending`), because the
/// caller can repeat the call.
#[inline]
pub(crate) fn check_any<P: Platform>(platform: &P) -> Result<(), Error> {
    if platform.signal() { Err(Error::Interrupted) } else { Ok(()) }
}
