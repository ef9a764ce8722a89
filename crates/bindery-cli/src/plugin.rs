//! The plugins under `tools`, built with the host's C compiler for the installed QEMU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use bindery_cli::guest::{Architecture, Problem, process, requirements::Requirement, workspace};

/// A plugin of the project.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plugin {
    /// Counts instructions of a kernel.
    Count,
    /// Finds cache lines that two operations share.
    Conflicts,
}

impl Plugin {
    fn name(self) -> &'static str {
        match self {
            Self::Count => "count",
            Self::Conflicts => "conflicts",
        }
    }

    /// The plugin's files under `tools`.
    fn sources(self) -> &'static [&'static str] {
        match self {
            Self::Count => &[
                "count/plugin.c",
                "count/phases.c",
                "count/profile.c",
                "count/x86_64.c",
                "count/aarch64.c",
            ],
            Self::Conflicts => {
                &["conflicts/plugin.c", "conflicts/lines.c", "count/x86_64.c", "count/aarch64.c"]
            }
        }
    }
}

/// The C compiler of the host.
const COMPILER: &str = "cc";

/// The properties of QEMU that matter to the plugin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Emulator {
    /// The version, as QEMU reports it.
    pub version: String,
    /// The version of QEMU's plugin interface for which the plugin is built.
    interface: u32,
}

impl Emulator {
    /// The installed QEMU that emulates machines of an architecture.
    ///
    /// # Errors
    /// If none is installed, or its plugin interface is unknown.
    pub fn installed(architecture: Architecture) -> Result<Self, Problem> {
        Self::of(Requirement::emulator(architecture))
    }

    /// The installed QEMU that runs programs of x86-64.
    ///
    /// # Errors
    /// The errors of [`Emulator::installed`].
    pub fn of_programs() -> Result<Self, Problem> {
        Self::of(Requirement::ProgramEmulator)
    }

    fn of(requirement: Requirement) -> Result<Self, Problem> {
        requirement.demand()?;
        let printed = process::output(Command::new(requirement.program()).arg("--version"))?;
        let line = printed.lines().next().unwrap_or_default();
        // The two kinds of QEMU name themselves by two words or by three.
        let version = line.split_whitespace().skip_while(|word| *word != "version").nth(1);
        let version = version.unwrap_or_default().to_owned();
        let interface = interface(&version).ok_or_else(|| {
            Problem::Failed(format!(
                "`{} --version` prints {line:?}, and Bindery's plugins need QEMU 7.2 to 8.1, or 9.2 \
                 and newer; install one of these",
                requirement.program()
            ))
        })?;
        Ok(Self { version, interface })
    }
}

/// The version of the plugin interface for a QEMU. The versions between the two that the plugin
/// supports were short-lived.
fn interface(version: &str) -> Option<u32> {
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().ok());
    match (numbers.next()??, numbers.next()??) {
        (7, 2..) | (8, 0..=1) => Some(1),
        (9, 2..) | (10.., _) => Some(4),
        _ => None,
    }
}

/// Builds a plugin under a file name that no other build uses.
///
/// # Errors
/// If no C compiler is installed, or the compiler rejects the sources.
pub fn build(plugin: Plugin, emulator: &Emulator) -> Result<PathBuf, Problem> {
    let name = plugin.name();
    let directory = workspace::target(&format!("guest/{name}"))?;
    let file = directory.join(format!("{name}-{}.so", emulator.interface));
    let aside = tempfile::NamedTempFile::new_in(&directory)
        .map_err(|error| Problem::io("write to", &directory, &error))?;
    let mut compiler = compiler(&workspace::root()?.join("tools"), plugin.sources());
    compiler.args(["-O2", "-fPIC", "-shared", "-fvisibility=hidden"]);
    compiler.arg(format!("-DPLUGIN_API={}", emulator.interface));
    process::output(compiler.arg("-o").arg(aside.path()))?;
    let built =
        fs::read(aside.path()).map_err(|error| Problem::io("read", aside.path(), &error))?;
    workspace::write_if_changed(&file, &built)?;
    Ok(file)
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
    fn the_plugins_build_without_warnings_for_every_interface() {
        let tools = workspace::root().unwrap().join("tools");
        for plugin in [Plugin::Count, Plugin::Conflicts] {
            for interface in [1, 4] {
                let mut compiler = compiler(&tools, plugin.sources());
                compiler.args(["-Werror", "-fsyntax-only", &format!("-DPLUGIN_API={interface}")]);
                process::output(&mut compiler).unwrap();
            }
        }
    }
}
