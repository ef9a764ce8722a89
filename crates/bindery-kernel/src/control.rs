//! The control channel: lines of text to the host that started the machine, separate from the
//! output of programs.
//!
//! | line | meaning |
//! |---|---|
//! | `first-user-instruction N` | nanoseconds since power-on when the first program begins |
//! | `status N` | how the first program ended, 0 to 255 |
//! | `panic TEXT` | the kernel has failed |

use core::fmt;

use crate::arch;

struct Channel;

impl fmt::Write for Channel {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(arch::write_control);
        Ok(())
    }
}

/// Sends a line.
pub fn send(line: fmt::Arguments<'_>) {
    let _ = fmt::Write::write_fmt(&mut Channel, format_args!("{line}\n")); // cannot fail
}
