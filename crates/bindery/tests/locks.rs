//! Rules enforced by types: a call without its lock, its purpose or its reclaim does not compile.
//!
//! The files of `tests/violations` contain correct and wrong calls; they are modules of the crate,
//! so they can name private items. The correct calls compile with the crate's tests. Here the crate
//! is built with the wrong calls: the compiler must report exactly the errors that the comments
//! `//~ CODE` name, at their lines.

#![allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")]

use std::path::Path;
use std::process::Command;
use std::{env, fs};

const FOLDER: &str = "tests/violations/";
const FILES: [&str; 2] = ["folio.rs", "space.rs"];

/// A file, a line of it, and its error.
type Line = (String, usize, String);

#[test]
fn calls_that_break_rules_do_not_compile() {
    assert_eq!(errors("types"), expected("types"));
}

#[test]
fn a_passed_guard_is_not_used_again() {
    assert_eq!(errors("moves"), expected("moves"));
}

/// The lines that are wrong when code of this kind is built, with their errors.
fn expected(kind: &str) -> Vec<Line> {
    FILES.iter().flat_map(|file| expected_in(file, kind)).collect()
}

fn expected_in(file: &str, kind: &str) -> Vec<Line> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(FOLDER).join(file);
    let text = fs::read_to_string(path).unwrap();
    let condition = format!("#[cfg(lock_violations = \"{kind}\")]");
    let lines: Vec<_> = text.lines().collect();
    let wrong = lines.iter().enumerate().filter_map(|(number, line)| {
        let (_, error) = line.split_once("//~ ")?;
        // The condition is above the statement.
        let conditions = lines[..number].iter().rev().map(|line| line.trim());
        let nearest = conditions.clone().find(|line| line.starts_with("#[cfg"))?;
        (nearest == condition).then(|| (file.to_owned(), number + 1, error.to_owned()))
    });
    let wrong: Vec<_> = wrong.collect();
    assert!(wrong.len() >= 2, "only {} calls of {file} are wrong by {kind}", wrong.len());
    wrong
}

/// The errors of a build, in order.
fn errors(kind: &str) -> Vec<Line> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("locks");
    let output = Command::new(env!("CARGO"))
        .args(["rustc", "--quiet", "--offline", "--locked", "-p", "bindery", "--lib"])
        .args(["--features", "testing", "--message-format", "short", "--target-dir"])
        .arg(target)
        .args(["--", "--emit", "metadata", "--cfg"])
        .arg(format!("lock_violations=\"{kind}\""))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env_remove("RUSTFLAGS")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    let mut errors: Vec<_> = text.lines().filter_map(error).collect();
    errors.sort();
    assert!(!errors.is_empty(), "{text}");
    errors
}

/// Reads `file:line:column: error[CODE]: message`.
fn error(line: &str) -> Option<Line> {
    let (place, rest) = line.split_once(": error[")?;
    let (code, _) = rest.split_once(']')?;
    let mut parts = place.split(':');
    let (file, number) = (parts.next()?, parts.next()?.parse().ok()?);
    let file = file.rsplit_once(FOLDER).map_or(file, |(_, name)| name);
    Some((file.to_owned(), number, code.to_owned()))
}
