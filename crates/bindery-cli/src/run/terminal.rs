//! The terminal of `bindery run`, and the information about it for the guest.

use std::io::{IsTerminal, stderr, stdin, stdout};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use crate::guest::command_line::CommandLine;
use crate::guest::machine::Output;

/// The instructions for leaving, shown at a terminal.
const HOW_TO_LEAVE: &str = "bindery: all keys go to the program; Ctrl-A x ends the machine";

/// The kinds of the standard descriptors of this process.
pub struct Terminal {
    is_input: bool,
    is_output: bool,
    size: Option<(u16, u16)>,
}

impl Terminal {
    /// Determines the kinds of this process's descriptors.
    pub fn find() -> Self {
        let (is_input, is_output) = (stdin().is_terminal(), stdout().is_terminal());
        let size = if is_output { tcgetwinsize(stdout()) } else { tcgetwinsize(stdin()) };
        let size = size.ok().filter(|_| is_input).map(|size| (size.ws_row, size.ws_col));
        // Some terminals do not know their size.
        let size = size.map(|size| if size.0 == 0 || size.1 == 0 { (24, 80) } else { size });
        Self { is_input, is_output, size }
    }

    /// Adds the terminal's properties to the kernel's options. The user's own values come first and
    /// take precedence.
    pub fn describe(&self, line: &mut CommandLine) {
        if let Some((rows, columns)) = self.size {
            line.option("terminal", format!("{rows}x{columns}"));
        }
        if !self.is_input {
            line.option("input", "stream");
        }
        if !self.is_output {
            line.option("output", "stream");
        }
    }

    /// The destination of the machine's console.
    pub fn output(&self) -> Output {
        if self.is_input { Output::Terminal } else { Output::PassThrough }
    }

    /// Shows how to leave if that is useful, and saves the terminal's settings, because QEMU
    /// changes them and may be killed.
    pub fn keep(&self) -> Kept {
        if !self.is_input {
            return Kept(None);
        }
        if stderr().is_terminal() {
            eprintln!("{HOW_TO_LEAVE}");
        }
        Kept(tcgetattr(stdin()).ok())
    }
}

/// The saved settings of a terminal, restored when this value is dropped.
pub struct Kept(Option<Termios>);

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(settings) = &self.0 {
            // The call fails if the terminal no longer exists.
            let _ = tcsetattr(stdin(), OptionalActions::Drain, settings);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(terminal: &Terminal) -> String {
        let mut line = CommandLine::new();
        terminal.describe(&mut line);
        line.to_string()
    }

    #[test]
    fn the_kernel_learns_the_terminals_size() {
        let both = Terminal { is_input: true, is_output: true, size: Some((50, 132)) };
        assert_eq!(words(&both), "terminal=50x132");
        let piped = Terminal { is_input: false, is_output: true, size: None };
        assert_eq!(words(&piped), "input=stream");
        let none = Terminal { is_input: false, is_output: false, size: None };
        assert_eq!(words(&none), "input=stream output=stream");
        assert_eq!((none.output(), both.output()), (Output::PassThrough, Output::Terminal));
    }
}
