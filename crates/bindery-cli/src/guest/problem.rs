//! The reasons why a machine could not be built or started.

use std::fmt;
use std::io;
use std::path::Path;

/// The reason why a machine could not be built or started, in a sentence for the user.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Problem {
    /// A requirement must be installed first. The sentence names the requirement and how to install
    /// it.
    Missing(String),
    /// The user's request is invalid.
    Wrong(String),
    /// Another failure.
    Failed(String),
}

impl Problem {
    /// `what` failed with an input or output error on `path`.
    pub fn io(what: &str, path: &Path, error: &io::Error) -> Self {
        Self::Failed(format!("cannot {what} {}: {error}", path.display()))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Missing(text) | Self::Wrong(text) | Self::Failed(text)) = self;
        f.write_str(text)
    }
}

impl std::error::Error for Problem {}

impl From<Problem> for String {
    fn from(problem: Problem) -> Self {
        problem.to_string()
    }
}
