//! Output of results, shared by several commands: to the standard output and to files.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use serde::Serialize;

use crate::guest::Problem;

/// The file of `--json`, which receives all figures of a run.
pub struct JsonFile<'a> {
    path: &'a Path,
    file: File,
}

impl<'a> JsonFile<'a> {
    /// Creates it. Called before the work begins, so that a wrong name is reported at once.
    ///
    /// # Errors
    /// The errors of [`create`].
    pub fn create(path: &'a Path) -> Result<Self, Problem> {
        create(path).map(|(path, file)| Self { path, file })
    }

    /// Writes the document, and a newline.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(mut self, document: &impl Serialize) -> Result<(), Problem> {
        let text = serde_json::to_string_pretty(document)
            .map_err(|error| Problem::Failed(error.to_string()))?;
        writeln!(self.file, "{text}").map_err(|error| Problem::io("write", self.path, &error))
    }
}

/// Creates the file of an option.
///
/// # Errors
/// If the file cannot be written; that counts as a wrong command line.
pub fn create(path: &Path) -> Result<(&Path, File), Problem> {
    match File::create(path) {
        Ok(file) => Ok((path, file)),
        Err(error) => Err(Problem::Wrong(format!(
            "cannot write {}: {error}; name a file in a directory that exists and is yours",
            path.display()
        ))),
    }
}

/// Prints to standard output. A reader that closes the pipe (`| head`) does not cause an error.
///
/// # Errors
/// If the text cannot be printed.
pub fn show(text: &str) -> Result<(), Problem> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Problem::Failed(format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// A number with commas between its thousands.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_set_apart() {
        assert_eq!([0, 999, 1_000, 524_288].map(thousands), ["0", "999", "1,000", "524,288"]);
    }

    #[test]
    fn an_impossible_file_is_the_users_mistake() {
        let directory = tempfile::tempdir().unwrap();
        assert!(create(&directory.path().join("figures.json")).is_ok());
        let problem = create(&directory.path().join("none/figures.json")).unwrap_err();
        assert!(
            matches!(&problem, Problem::Wrong(text) if text.contains("figures.json")),
            "{problem}"
        );
    }
}
