//! The output of `bindery random`, and sequences that it has found.

mod found;

use std::process::{Command, Output};

fn random(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bindery"))
        .arg("random")
        .args(arguments)
        .output()
        .expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program writes UTF-8")
}

/// The output of a run without a finding.
#[track_caller]
fn finds_nothing(arguments: &[&str]) -> String {
    let output = random(arguments);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{arguments:?} print\n{out}\n{err}");
    assert!(err.is_empty(), "{err}");
    out
}

/// The output of a run with a finding.
#[track_caller]
fn fails(arguments: &[&str]) -> String {
    let output = random(arguments);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{arguments:?} print\n{out}\n{err}");
    assert!(err.starts_with("error: "), "{err}");
    out
}

#[test]
fn random_calls_find_nothing_in_two_seconds() {
    let out = finds_nothing(&["calls", "--seed", "1000", "--seconds", "2"]);
    assert!(out.contains(" machines, ") && out.contains("seeds 1000 to "), "{out}");
}

#[test]
fn random_threads_find_nothing_in_two_seconds() {
    let out = finds_nothing(&["threads", "--seed", "1000", "--seconds", "2"]);
    assert!(out.contains(" calls; seeds 1000 to "), "{out}");
}

#[test]
fn random_calls_find_an_unflushed_tlb() {
    let arguments = ["calls", "--seed", "1", "--seconds", "60", "--without-invalidation"];
    for architecture in ["x86-64", "riscv64-sv39"] {
        let out = fails(&[&arguments[..], &["--arch", architecture]].concat());
        assert!(out.contains("#[test]") && out.contains("replay(run::<"), "{out}");
        let steps = out.lines().filter(|line| line.starts_with("        ")).count();
        assert!((1..=12).contains(&steps), "{steps} steps:\n{out}");
    }
}

#[test]
fn random_threads_find_an_unflushed_tlb() {
    let out = fails(&["threads", "--seed", "1", "--seconds", "60", "--without-invalidation"]);
    // The schedule determines which check fails first.
    assert!(out.contains("random threads, seed "), "{out}");
    for cpu in 0..3 {
        assert!(out.contains(&format!("CPU {cpu}, ")), "{out}");
    }
}

#[test]
fn an_architecture_without_drivers_is_a_mistake() {
    let output = random(&["calls", "--arch", "tiny"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("riscv64-sv39"), "{}", text(&output.stderr));
}
