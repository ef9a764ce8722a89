//! Long calls end early for a thread that is about to be killed.
//!
//! Linux asks `fatal_signal_pending` at the same points, so that a program that locks all memory,
//! or writes a file of many gigabytes, can be killed meanwhile. A call asks between two pieces of
//! bounded work, and never in a read section or with a table locked. What it has done stays done,
//! unless its documentation says that it undoes that.

use crate::error::Error;
use crate::platform::Platform;

/// Refuses to begin the next piece of a long call if a fatal signal waits.
#[inline]
pub(crate) fn check<P: Platform>(platform: &P) -> Result<(), Error> {
    if platform.fatal_signal() { Err(Error::Interrupted) } else { Ok(()) }
}

/// As [`check`], for a call that any signal ends (Linux: `signal_pending`): its caller can repeat
/// it.
#[inline]
pub(crate) fn check_any<P: Platform>(platform: &P) -> Result<(), Error> {
    if platform.signal() { Err(Error::Interrupted) } else { Ok(()) }
}
