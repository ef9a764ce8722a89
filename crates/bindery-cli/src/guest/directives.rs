//! Directives in the source of a test program, which control its run.
//!
//! Lines of the comment at the start of the source, in the form `// NAME: VALUE`:
//!
//! | name | value |
//! |---|---|
//! | `arguments` | the program's arguments, quoted as for a shell |
//! | `clock` | `instructions`: time is the number of executed instructions, one nanosecond each |
//! | `cpus` | the machine's number of CPUs |
//! | `disk` | the size of a disk, empty at first |
//! | `expect-status` | the exit status of a successful run |
//! | `kernel-only` | the reason why the program is not for the host's Linux |
//! | `library` | `glibc`: the C library to link with |
//! | `link` | `static-pie`: a program for any address |
//! | `memory` | the machine's memory |
//! | `option` | an option of the kernel, `KEY=VALUE`; may be repeated |
//! | `starts` | how often the machine is started with the same disk, 2 by default |

use std::time::Duration;

use strsim::damerau_levenshtein;

use super::machine::Clock;
use super::programs::{CLibrary, Link, Variant};
use crate::size::parse_bytes;

const NAMES: [&str; 11] = [
    "arguments",
    "clock",
    "cpus",
    "disk",
    "expect-status",
    "kernel-only",
    "library",
    "link",
    "memory",
    "option",
    "starts",
];

/// The directives of a test program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Directives {
    /// How the program is built.
    pub variant: Variant,
    /// The program's arguments.
    pub arguments: Vec<String>,
    /// The machine's clock.
    pub clock: Clock,
    /// The machine's number of CPUs.
    pub processors: u32,
    /// The model of the machine's CPUs; by default with all features of QEMU.
    pub processor: Option<String>,
    /// The machine's memory in bytes.
    pub memory: u64,
    /// The size of a disk, empty at first, in bytes.
    pub disk: Option<u64>,
    /// The number of times that the program is run with the disk.
    pub starts: u32,
    /// Options of the kernel.
    pub options: Vec<(String, String)>,
    /// The exit status of a successful run.
    pub status: i32,
    /// The reason why the program cannot run on the host's Linux, if it cannot.
    pub kernel_only: Option<String>,
    /// The time after which the program counts as hung.
    pub timeout: Duration,
}

impl Default for Directives {
    fn default() -> Self {
        Self {
            variant: Variant::USUAL,
            arguments: Vec::new(),
            clock: Clock::Host,
            processors: 1,
            processor: None,
            memory: 256 << 20,
            disk: None,
            starts: 2,
            options: Vec::new(),
            status: 0,
            kernel_only: None,
            timeout: Duration::from_secs(300),
        }
    }
}

/// Reads the directives at the start of a source.
///
/// # Errors
/// If a line has the form of a directive but no meaning.
pub fn read(source: &str) -> Result<Directives, String> {
    let mut directives = Directives::default();
    let comment = source.lines().map_while(|line| line.strip_prefix("//"));
    for line in comment {
        let Some((name, value)) = line.trim().split_once(": ") else { continue };
        let wrong = |why| format!("// {name}: {value}: {why}");
        if NAMES.contains(&name) {
            directives.take(name, value.trim()).map_err(wrong)?;
        } else if let Some(meant) = NAMES.iter().find(|known| damerau_levenshtein(name, known) <= 2)
        {
            return Err(wrong(format!("did you mean `{meant}`?")));
        }
        // Other lines are prose, which may have colons.
    }
    Ok(directives)
}

impl Directives {
    fn take(&mut self, name: &str, value: &str) -> Result<(), String> {
        let size = |value| parse_bytes(value).ok_or("this is not a size; write for example 64M");
        let number = |value: &str| value.parse::<u32>().map_err(|error| error.to_string());
        match (name, value) {
            ("arguments", _) => {
                self.arguments = shell_words::split(value).map_err(|error| error.to_string())?;
            }
            ("clock", "instructions") => self.clock = Clock::Instructions,
            ("disk", _) => self.disk = Some(size(value)?),
            ("cpus", _) => self.processors = number(value)?,
            ("expect-status", _) => {
                self.status = value.parse::<u8>().map_err(|error| error.to_string())?.into();
            }
            ("kernel-only", _) => self.kernel_only = Some(value.to_owned()),
            ("library", "glibc") => self.variant.library = CLibrary::Glibc,
            ("link", "static-pie") => self.variant.link = Link::StaticPie,
            ("memory", _) => self.memory = size(value)?,
            ("option", _) => {
                let (key, value) =
                    value.split_once('=').ok_or("an option has the form KEY=VALUE")?;
                self.options.push((key.to_owned(), value.to_owned()));
            }
            ("starts", _) => self.starts = number(value)?,
            _ => {
                return Err(
                    "this directive has no such value (clock: instructions, library: glibc, link: \
                 static-pie)"
                        .to_owned(),
                );
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_without_directives_is_run_as_usual() {
        assert_eq!(read("int main(void) {}\n// cpus: 2\n"), Ok(Directives::default()));
        let prose = "// A text: with a colon, and http://a.link\n// futex: requeue and wake.\n";
        assert_eq!(read(prose), Ok(Directives::default()));
        assert_eq!(read(""), Ok(Directives::default()));
    }

    #[test]
    fn every_directive_is_read() {
        let source = "// arguments: one \"two words\" three=3\n// clock: instructions\n// cpus: 2\n\
                      //\n// Prose stands between.\n// expect-status: 134\n\
                      // kernel-only: it eats all memory\n// link: static-pie\n\
                      // library: glibc\n// memory: 64M\n// disk: 16M\n// starts: 5\n\
                      // option: processes=64\n// option: a=b=c\n#include <stdio.h>\n";
        let directives = read(source).unwrap();
        assert_eq!(directives.arguments, ["one", "two words", "three=3"]);
        assert_eq!(directives.clock, Clock::Instructions);
        assert_eq!((directives.processors, directives.status), (2, 134));
        assert_eq!((directives.memory, directives.disk), (64 << 20, Some(16 << 20)));
        assert_eq!(directives.starts, 5);
        assert_eq!(directives.kernel_only.as_deref(), Some("it eats all memory"));
        assert_eq!(directives.variant.link, Link::StaticPie);
        assert_eq!(directives.variant.library, CLibrary::Glibc);
        let options = [("processes", "64"), ("a", "b=c")];
        assert_eq!(directives.options, options.map(|(k, v)| (k.to_owned(), v.to_owned())));
    }

    #[test]
    fn directives_that_mean_nothing_are_refused() {
        for wrong in [
            "// cpu: 2",
            "// clock: sun",
            "// cpus: many",
            "// expect-status: 256",
            "// memory: much",
            "// disk: empty",
            "// option: check",
            "// link: dynamic",
            "// arguments: \"open",
        ] {
            let error = read(wrong).unwrap_err();
            assert!(error.starts_with(wrong), "{error}");
        }
    }
}
