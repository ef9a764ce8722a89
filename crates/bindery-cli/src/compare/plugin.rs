//! The counting plugin under `tools/count`: built with the host's C compiler for the QEMU that is
//! installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use bindery_cli::guest::{Architecture, Problem, process, requirements::Requirement, workspace};

const SOURCES: [&str; 5] = ["plugin.c", "phases.c", "profile.c", "x86_64.c", "aarch64.c"];

/// The C compiler of the host.
const COMPILER: &str = "cc";

/// The properties of QEMU that matter to the plugin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Emulator {
    /// Its version, as QEMU reports it.
    pub version: String,
    /// The version of its plugin interface that the plugin is built for.
    interface: u32,
}

impl Emulator {
    /// The installed one for an architecture.
    ///
    /// # Errors
    /// If none is installed, or its plugins cannot count.
    pub fn installed(architecture: Architecture) -> Result<Self, Problem> {
        Requirement::emulator(architecture).demand()?;
        let printed = process::output(Command::new(architecture.emulator()).arg("--version"))?;
        let line = printed.lines().next().unwrap_or_default();
        let version = line.split_whitespace().nth(3).unwrap_or_default().to_owned();
        let interface = interface(&version).ok_or_else(|| {
            Problem::Failed(format!(
                "the counting plugin is for QEMU 7.2 to 8.1 and from 9.2 on, and {} is {line:?}",
                architecture.emulator()
            ))
        })?;
        Ok(Self { version, interface })
    }
}

/// The version of the plugin interface for a QEMU. The versions between the two that the plugin
/// knows were short-lived.
fn interface(version: &str) -> Option<u32> {
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().ok());
    match (numbers.next()??, numbers.next()??) {
        (7, 2..) | (8, 0..=1) => Some(1),
        (9, 2..) | (10.., _) => Some(4),
        _ => None,
    }
}

/// Builds the plugin; a file name that no other build uses is its own.
///
/// # Errors
/// If there is no C compiler, or it rejects the sources.
pub fn build(emulator: &Emulator) -> Result<PathBuf, Problem> {
    let directory = workspace::target("guest/count")?;
    let plugin = directory.join(format!("count-{}.so", emulator.interface));
    let aside = tempfile::NamedTempFile::new_in(&directory)
        .map_err(|error| Problem::io("write to", &directory, &error))?;
    let mut compiler = compiler(&workspace::root()?.join("tools/count"), &SOURCES);
    compiler.args(["-O2", "-fPIC", "-shared", "-fvisibility=hidden"]);
    compiler.arg(format!("-DPLUGIN_API={}", emulator.interface));
    process::output(compiler.arg("-o").arg(aside.path()))?;
    let built =
        fs::read(aside.path()).map_err(|error| Problem::io("read", aside.path(), &error))?;
    workspace::write_if_changed(&plugin, &built)?;
    Ok(plugin)
}

fn compiler(directory: &Path, sources: &[&str]) -> Command {
    let mut command = Command::new(COMPILER);
    command.args(["-std=c11", "-Wall", "-Wextra"]);
    command.args(sources.iter().map(|source| directory.join(source)));
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_qemu_gets_the_interface_that_it_has() {
        for (version, expected) in [
            ("7.2.22", Some(1)),
            ("8.1.0", Some(1)),
            ("8.2.4", None),
            ("9.1.1", None),
            ("9.2.0", Some(4)),
            ("10.0.3", Some(4)),
            ("6.2.0", None),
            ("", None),
            ("version", None),
        ] {
            assert_eq!(interface(version), expected, "{version}");
        }
    }

    #[test]
    fn instructions_are_classified_as_the_assembler_encodes_them() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("classify_test");
        let sources = ["classify_test.c", "x86_64.c", "aarch64.c"];
        let tools = workspace::root().unwrap().join("tools/count");
        process::output(compiler(&tools, &sources).arg("-o").arg(&program)).unwrap();
        let output = Command::new(&program).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }

    #[test]
    fn the_plugin_builds_without_warnings_for_every_interface() {
        let tools = workspace::root().unwrap().join("tools/count");
        for interface in [1, 4] {
            let mut compiler = compiler(&tools, &SOURCES);
            compiler.args(["-Werror", "-fsyntax-only", &format!("-DPLUGIN_API={interface}")]);
            process::output(&mut compiler).unwrap();
        }
    }
}
