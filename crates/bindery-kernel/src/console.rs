//! The serial console, and the kernel's messages on it.

use core::fmt;

use crate::arch;

struct Console;

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(arch::write_console);
        Ok(())
    }
}

/// Prints the output of programs.
pub fn write(bytes: &[u8]) {
    bytes.iter().copied().for_each(arch::write_console);
}

/// Prints a line of the kernel.
pub fn print(line: fmt::Arguments<'_>) {
    let _ = fmt::Write::write_fmt(&mut Console, format_args!("[bindery] {line}\n")); // cannot fail
}

/// Prints a line of the kernel, formatted as by `format!`.
#[macro_export]
macro_rules! log {
    ($($argument:tt)*) => { $crate::console::print(format_args!($($argument)*)) };
}
