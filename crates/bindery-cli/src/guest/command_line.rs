//! The kernel's command line.
//!
//! Words are separated by spaces: first options, `key=value`, then after the word `--` the
//! arguments of the first program. Values and arguments may contain any bytes, so they are
//! percent-encoded: control characters, spaces, quotes, the percent sign and all bytes from 0x80 on
//! become `%` and two hexadecimal digits. An empty argument is written `%00`, which ends at once
//! like every string in C.
//!
//! ```text
//! init=/bin/busybox check=exit env=HOME=/tmp -- sh -c echo%20hello
//! ```

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;

use percent_encoding::{AsciiSet, CONTROLS, percent_encode};

const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b'"').add(b'\'');

/// A command line for the reference kernel.
#[derive(Clone, Default, Debug)]
pub struct CommandLine {
    options: Vec<String>,
    arguments: Vec<String>,
}

impl CommandLine {
    /// An empty command line, with which the kernel starts `/init`.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an option of the kernel.
    pub fn option(&mut self, key: &str, value: impl AsRef<OsStr>) -> &mut Self {
        self.options.push(format!("{key}={}", encode(value.as_ref())));
        self
    }

    /// Adds an argument of the first program; the first argument is the program's own name.
    pub fn argument(&mut self, word: impl AsRef<OsStr>) -> &mut Self {
        let word = word.as_ref();
        self.arguments.push(if word.is_empty() { "%00".to_owned() } else { encode(word) });
        self
    }
}

fn encode(word: &OsStr) -> String {
    percent_encode(word.as_bytes(), ENCODED).to_string()
}

impl fmt::Display for CommandLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.options.join(" "))?;
        if !self.arguments.is_empty() {
            write!(f, " -- {}", self.arguments.join(" "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;

    use percent_encoding::percent_decode_str;

    use super::*;

    #[test]
    fn options_come_before_arguments() {
        let mut line = CommandLine::new();
        line.argument("/bin/sh").option("check", "exit").argument("-c").argument("echo a; echo b");
        line.option("env", "A=b c");
        assert_eq!(line.to_string(), "check=exit env=A=b%20c -- /bin/sh -c echo%20a;%20echo%20b");
    }

    #[test]
    fn a_line_without_arguments_has_no_dashes() {
        assert_eq!(CommandLine::new().to_string(), "");
        assert_eq!(CommandLine::new().option("check", "exit").to_string(), "check=exit");
    }

    #[test]
    fn every_byte_survives_in_a_word() {
        let bytes: Vec<u8> = (1..=255).collect();
        let mut line = CommandLine::new();
        line.argument(OsString::from_vec(bytes.clone()));
        let line = line.to_string();
        let word = line.strip_prefix(" -- ").unwrap();
        assert!(word.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"'), "{word}");
        assert_eq!(percent_decode_str(word).collect::<Vec<u8>>(), bytes);
    }

    #[test]
    fn an_empty_argument_is_a_word_still() {
        let mut line = CommandLine::new();
        line.argument("a").argument("").argument("b");
        assert_eq!(line.to_string(), " -- a %00 b");
    }
}
