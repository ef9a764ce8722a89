//! Tests that need their own process: tests that read the mappings of their process, which
//! concurrent tests would change, and tests that end their process.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

/// The environment variable set in a process that runs a single test.
const ENVIRONMENT: &str = "BINDERY_ALONE";

/// Runs the test `name` of `module` in its own process, in which this program is started again.
/// Returns true after that run, and false inside that process, where the test must continue. Panics
/// if the test failed there.
#[track_caller]
pub fn ran_alone(module: &str, name: &str) -> bool {
    let Some(output) = run_alone(module, name) else { return false };
    let text = String::from_utf8_lossy(&output.stdout);
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "it fails alone:\n{text}");
    assert!(text.contains("1 passed"), "there is no test {name} in {module}:\n{text}");
    true
}

/// Like [`ran_alone`], for a test that must abort its process. Returns the standard error of that
/// process. Panics if the process ended in another way.
#[track_caller]
pub fn aborted_alone(module: &str, name: &str) -> Option<String> {
    const SIGABRT: i32 = 6;
    let output = run_alone(module, name)?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let status = output.status;
    assert_eq!(status.signal(), Some(SIGABRT), "{module}::{name}: {status:?}:\n{text}");
    Some(text)
}

/// Runs the test in its own process. Returns `None` inside that process.
#[track_caller]
fn run_alone(module: &str, name: &str) -> Option<Output> {
    if std::env::var_os(ENVIRONMENT).is_some() {
        return None;
    }
    let (_, folders) = module.split_once("::").expect("a module of this program");
    let program = std::env::current_exe().expect("the program's path");
    let mut command = Command::new(program);
    command.args(["--exact", &format!("{folders}::{name}"), "--nocapture", "--test-threads=1"]);
    Some(command.env(ENVIRONMENT, "1").output().expect("this program starts once more"))
}
