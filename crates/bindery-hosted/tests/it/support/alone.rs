//! Tests that look at the mappings of their own process need one to themselves: others map and
//! unmap memory all the time.

use std::process::Command;

/// The environment variable that says that a process runs one test alone.
const ENVIRONMENT: &str = "BINDERY_ALONE";

/// Whether the test `name` of `module` has just run in a process of its own: this program, started
/// once more for it. In that process the answer is no, and the test is to go on. Panics where it
/// failed there.
#[track_caller]
pub fn ran_alone(module: &str, name: &str) -> bool {
    if std::env::var_os(ENVIRONMENT).is_some() {
        return false;
    }
    let (_, folders) = module.split_once("::").expect("a module of this program");
    let program = std::env::current_exe().expect("the program's path");
    let output = Command::new(program)
        .args(["--exact", &format!("{folders}::{name}"), "--nocapture", "--test-threads=1"])
        .env(ENVIRONMENT, "1")
        .output()
        .expect("this program starts once more");
    let text = String::from_utf8_lossy(&output.stdout);
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "it fails alone:\n{text}");
    assert!(text.contains("1 passed"), "there is no test {folders}::{name}:\n{text}");
    true
}
