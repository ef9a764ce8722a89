//! The output of `bindery run`, `doctor` and `setup` without a machine.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

fn bindery(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bindery"));
    command.args(arguments);
    command
}

fn refused(command: &mut Command) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert_eq!(String::from_utf8_lossy(&stdout), "");
    (status.code(), String::from_utf8(stderr).unwrap())
}

/// The header of a static program for x86-64, the only part that is read before QEMU starts.
fn write_program(path: &Path) {
    let mut header = [0_u8; 64];
    header[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    header[16] = 2;
    header[18] = 62;
    header[20] = 1;
    fs::write(path, header).unwrap();
}

#[test]
fn without_qemu_one_sentence_says_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("program");
    write_program(&program);
    let mut command = bindery(&["run", program.to_str().unwrap()]);
    let (status, message) = refused(command.env("PATH", directory.path()));
    assert_eq!(status, Some(1), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    for part in ["qemu-system-x86_64", "not installed", "bindery setup", "apt-get install"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn a_dynamic_program_is_refused_in_one_sentence() {
    let (status, message) = refused(&mut bindery(&["run", env!("CARGO_BIN_EXE_bindery")]));
    assert_eq!(status, Some(2), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.contains("dynamic") && message.contains("-static"), "{message}");
}

#[test]
fn a_program_for_another_architecture_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("program");
    write_program(&program);
    let program = program.to_str().unwrap();
    let (status, message) = refused(&mut bindery(&["run", "--arch", "aarch64", program]));
    assert_eq!(status, Some(2), "{message}");
    assert!(message.contains("for x86-64, not for aarch64"), "{message}");
}

#[test]
fn what_is_no_program_is_refused() {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let (status, message) = refused(&mut bindery(&["run", manifest]));
    assert_eq!(status, Some(2), "{message}");
    assert!(message.contains("Cargo.toml is not a 64-bit ELF program"), "{message}");
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("script");
    fs::write(&script, "#!/bin/sh\n").unwrap();
    let (status, message) = refused(&mut bindery(&["run", script.to_str().unwrap()]));
    assert_eq!(status, Some(2), "{message}");
    assert!(message.contains("bindery run --file SCRIPT:/script busybox sh /script"), "{message}");
    let (status, message) = refused(&mut bindery(&["run", "/nonexistent/program"]));
    assert_eq!(status, Some(1), "{message}");
    assert!(message.contains("/nonexistent/program"), "{message}");
}

#[test]
fn wrong_options_are_refused_with_what_is_right() {
    for (option, value, part) in [
        ("--arch", "vax", "x86-64 or aarch64"),
        ("--memory", "much", "256m"),
        ("--cpus", "0", "1..=64"),
        ("--env", "NAME", "NAME=VALUE"),
        ("--option", "key", "NAME=VALUE"),
        ("--file", "..", "PATH:TARGET"),
        ("--disk-size", "1000", "multiple of 1 KiB"),
        ("--timeout", "0", "1.."),
    ] {
        let (status, message) = refused(&mut bindery(&["run", option, value, "program"]));
        assert_eq!(status, Some(2), "{message}");
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn the_doctor_shows_a_row_for_every_requirement() {
    let directory = tempfile::tempdir().unwrap();
    let output = bindery(&["doctor"]).env("PATH", directory.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    for part in ["qemu-system-arm", "musl-tools", "gcc-aarch64-linux-gnu", "bindery setup"] {
        assert!(text.contains(part), "{text}");
    }
}

/// A directory of programs that only print their arguments.
fn stubs(names: &[&str]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for name in names {
        let path = directory.path().join(name);
        fs::write(&path, format!("#!/bin/sh\necho called: {name} \"$@\"\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    directory
}

#[test]
fn setup_prints_and_as_root_runs_each_command() {
    let directory = stubs(&["apt-get", "apt-cache"]);
    let output = bindery(&["setup"]).env("PATH", directory.path()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    // Nothing was installed, so a requirement is always missing.
    assert_eq!(output.status.code(), Some(1), "{text}{message}");
    let is_debian = fs::read_to_string("/etc/os-release")
        .is_ok_and(|text| text.lines().any(|line| line == "ID=debian"));
    if !is_debian {
        assert!(message.contains("installs packages on Debian only"), "{message}");
        return;
    }
    assert!(text.contains("apt-get install --yes --no-install-recommends"), "{text}");
    assert!(text.contains("qemu-system-x86"), "{text}");
    if rustix::process::geteuid().is_root() {
        let calls: Vec<&str> = text.lines().filter(|line| line.starts_with("called:")).collect();
        assert_eq!(calls.len(), 2, "{text}");
        assert_eq!(calls[0], "called: apt-get update");
        assert!(message.contains("still missing: QEMU for x86-64"), "{message}");
    } else {
        assert!(text.starts_with("# Run these as root:\napt-get update\n"), "{text}");
        assert!(!text.contains("called:"), "{text}");
    }
}
