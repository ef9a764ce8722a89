//! Runs host programs for single steps of the work.

use std::io::ErrorKind;
use std::process::{Command, Stdio};

use super::Problem;

/// Runs a command without input and returns its standard output.
///
/// # Errors
/// If the command cannot be started, or if it fails; the problem then contains its standard error.
pub fn output(command: &mut Command) -> Result<String, Problem> {
    let program = command.get_program().display().to_string();
    let output = command.stdin(Stdio::null()).output().map_err(|error| {
        if error.kind() == ErrorKind::NotFound {
            Problem::Missing(format!(
                "{program} is not in PATH; `bindery doctor` lists what Bindery needs, and \
                 `bindery setup` installs it on Debian"
            ))
        } else {
            Problem::Failed(format!("cannot start {program}: {error}"))
        }
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let messages = String::from_utf8_lossy(&output.stderr);
    let messages = messages.trim_end();
    Err(Problem::Failed(format!("{} ended with {}:\n{messages}", shown(command), output.status)))
}

/// The command as a user would type it.
fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.display().to_string()).collect::<Vec<_>>().join(" ")
}

/// Removes from a command the environment variables of a surrounding cargo or rustc that would
/// change the build.
pub fn without_cargo_settings(command: &mut Command) -> &mut Command {
    for name in [
        "CARGO_BUILD_RUSTFLAGS",
        "CARGO_BUILD_TARGET",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_TARGET_DIR",
        "LD_LIBRARY_PATH",
        "RUSTC",
        "RUSTC_BOOTSTRAP",
        "RUSTC_WORKSPACE_WRAPPER",
        "RUSTC_WRAPPER",
        "RUSTFLAGS",
    ] {
        command.env_remove(name);
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_returned_and_failures_show_the_message() {
        assert_eq!(output(Command::new("echo").arg("word")).unwrap(), "word\n");
        let problem = output(Command::new("sh").args(["-c", "echo reason >&2; exit 3"]));
        let text = problem.unwrap_err().to_string();
        assert!(
            text.contains("reason") && text.contains('3') && text.starts_with("sh -c"),
            "{text}"
        );
    }

    #[test]
    fn a_program_that_is_not_there_is_missing() {
        let problem = output(&mut Command::new("bindery-has-no-such-program")).unwrap_err();
        assert!(matches!(problem, Problem::Missing(_)), "{problem}");
    }
}
