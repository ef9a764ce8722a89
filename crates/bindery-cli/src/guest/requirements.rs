//! The host programs for building and starting machines: their purposes, versions and installation.

use std::process::Command;

use super::toolchain::{self, Toolchain};
use super::{Architecture, Problem, busybox, packages, process};

/// A requirement on the host for a part of the work.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Requirement {
    /// QEMU for an architecture.
    Emulator(Architecture),
    /// A Rust that builds the kernel for an architecture.
    Rust(Architecture),
    /// The C compiler for programs, with the usual static C library.
    CCompiler(Architecture),
    /// A C compiler with a static glibc.
    GlibcCompiler(Architecture),
    /// Debian's static BusyBox.
    BusyBox(Architecture),
    /// GNU make.
    Make,
    /// Valgrind.
    Valgrind,
    /// QEMU for programs of x86-64.
    ProgramEmulator,
}

/// The installation of a requirement.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Remedy {
    /// Packages of Debian's.
    Packages(&'static [&'static str]),
    /// A Rust for the target, by one of several commands.
    RustTarget(&'static str),
    /// Nothing to install: Bindery fetches the program itself, but only on Debian.
    OnDebian,
}

impl Requirement {
    /// All requirements, in display order.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let kinds =
            [Self::Emulator, Self::Rust, Self::CCompiler, Self::GlibcCompiler, Self::BusyBox];
        let mut all = Vec::new();
        for kind in kinds {
            all.extend(Architecture::ALL.map(kind));
        }
        all.extend([Self::Make, Self::Valgrind, Self::ProgramEmulator]);
        all
    }

    /// QEMU for an architecture.
    #[must_use]
    pub fn emulator(architecture: Architecture) -> Self {
        Self::Emulator(architecture)
    }

    /// How the requirement is installed.
    #[must_use]
    pub fn program(self) -> &'static str {
        match self {
            Self::Emulator(architecture) => architecture.emulator(),
            Self::Rust(_) => "rustc",
            Self::CCompiler(architecture) => architecture.c_compiler(),
            Self::GlibcCompiler(Architecture::X86_64) => "gcc",
            Self::GlibcCompiler(Architecture::AArch64) => "aarch64-linux-gnu-gcc",
            Self::BusyBox(_) => "busybox",
            Self::Make => "make",
            Self::Valgrind => "valgrind",
            Self::ProgramEmulator => "qemu-x86_64",
        }
    }

    /// The requirement's name, for a sentence or a table.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Emulator(architecture) => format!("QEMU for {architecture}"),
            Self::Rust(architecture) => format!("Rust for {}", architecture.kernel_target()),
            Self::CCompiler(Architecture::X86_64) => "musl's C compiler for x86-64".to_owned(),
            Self::CCompiler(architecture) => format!("C compiler for {architecture}"),
            Self::GlibcCompiler(architecture) => format!("static glibc for {architecture}"),
            Self::BusyBox(architecture) => format!("static BusyBox for {architecture}"),
            Self::Make => "GNU make".to_owned(),
            Self::Valgrind => "Valgrind".to_owned(),
            Self::ProgramEmulator => "QEMU for programs of x86-64".to_owned(),
        }
    }

    /// The parts that need the requirement.
    #[must_use]
    pub fn purpose(self) -> &'static str {
        match self {
            Self::Emulator(_) => "run, compare, conformance",
            Self::Rust(_) => "the kernel",
            Self::CCompiler(_) => "C programs for the kernel",
            Self::GlibcCompiler(Architecture::X86_64) => "counting plugin, some C programs",
            Self::GlibcCompiler(Architecture::AArch64) => "some C programs",
            Self::BusyBox(_) => "run busybox, compare",
            Self::Make => "compare kernel-map on Linux",
            Self::Valgrind => "scripts/callgrind",
            Self::ProgramEmulator => "bench conflicts",
        }
    }

    /// The requirement's version, if it is installed.
    #[must_use]
    pub fn version(self) -> Option<String> {
        match self {
            Self::Emulator(_) | Self::Make | Self::Valgrind | Self::ProgramEmulator => {
                first_line(self.program())
            }
            Self::CCompiler(_) | Self::GlibcCompiler(_) => {
                has_static_library(self.program()).then(|| first_line(self.program())).flatten()
            }
            Self::Rust(architecture) => match toolchain::choose(architecture.kernel_target()) {
                Ok(Toolchain::Installed { version }) => Some(format!("rustc {version}")),
                Ok(Toolchain::Debian { version }) => {
                    Some(format!("Debian's rustc {version}, own sysroot"))
                }
                Err(_) => None,
            },
            Self::BusyBox(architecture) => match busybox::present(architecture) {
                Ok(Some(path)) if Some(architecture) == Architecture::host() => {
                    first_line(&path.display().to_string())
                }
                Ok(Some(_)) => Some("fetched and unpacked aside".to_owned()),
                _ if self.is_fetched() => Some("fetched at first use".to_owned()),
                _ => None,
            },
        }
    }

    /// Whether the requirement is fetched on demand, without an installation.
    fn is_fetched(self) -> bool {
        let foreign = |architecture| Some(architecture) != Architecture::host();
        matches!(self, Self::BusyBox(architecture) if foreign(architecture))
            && packages::is_debian()
    }

    /// How the requirement is installed.
    #[must_use]
    pub fn remedy(self) -> Remedy {
        Remedy::Packages(match self {
            Self::Emulator(Architecture::X86_64) => &["qemu-system-x86"],
            Self::Emulator(Architecture::AArch64) => &["qemu-system-arm"],
            Self::Rust(architecture) => return Remedy::RustTarget(architecture.kernel_target()),
            Self::CCompiler(Architecture::X86_64) => &["musl-tools"],
            Self::GlibcCompiler(Architecture::X86_64) => &["gcc", "libc6-dev"],
            Self::CCompiler(Architecture::AArch64) | Self::GlibcCompiler(Architecture::AArch64) => {
                &["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"]
            }
            Self::BusyBox(architecture) if Some(architecture) == Architecture::host() => {
                &[busybox::PACKAGE]
            }
            Self::BusyBox(_) => return Remedy::OnDebian,
            Self::Make => &["make"],
            Self::Valgrind => &["valgrind"],
            Self::ProgramEmulator => &["qemu-user"],
        })
    }

    /// Has no effect if the requirement is installed.
    ///
    /// # Errors
    /// If the requirement is not installed; the problem names the command in one sentence.
    pub fn demand(self) -> Result<(), Problem> {
        let there = match self {
            Self::Rust(architecture) => {
                return toolchain::choose(architecture.kernel_target()).map(drop);
            }
            Self::Emulator(_) | Self::Make | Self::Valgrind | Self::ProgramEmulator => {
                which::which(self.program()).is_ok()
            }
            Self::CCompiler(_) | Self::GlibcCompiler(_) => has_static_library(self.program()),
            Self::BusyBox(_) => self.version().is_some(),
        };
        if there {
            return Ok(());
        }
        let (name, program) = (self.name(), self.program());
        let install = match self.remedy() {
            Remedy::Packages(packages) => {
                format!("run `bindery setup`, or on Debian `{}`", apt_install(packages))
            }
            Remedy::RustTarget(target) => format!("run `rustup target add {target}`"),
            Remedy::OnDebian => "Bindery fetches it, but only on Debian".to_owned(),
        };
        Err(Problem::Missing(format!("{name} ({program}) is not installed: {install}")))
    }
}

/// The command that installs Debian packages, as a user would type it.
#[must_use]
pub fn apt_install(packages: &[&str]) -> String {
    format!("apt-get install {}", packages.join(" "))
}

/// The first line of a program's version output.
fn first_line(program: &str) -> Option<String> {
    // BusyBox has no --version, but prints its version when called without a command.
    let argument = if program.ends_with("busybox") { "--help" } else { "--version" };
    let text = process::output(Command::new(program).arg(argument)).ok()?;
    Some(short_version(text.lines().next()?))
}

/// A line with a version, without the part in brackets.
fn short_version(line: &str) -> String {
    let mut depth = 0_usize;
    let mut kept = String::new();
    for character in line.chars() {
        match character {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ if depth == 0 => kept.push(character),
            _ => {}
        }
    }
    kept.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether a C compiler exists and finds a static C library. A compiler prints the full path of a
/// file that it finds, and otherwise the bare name.
fn has_static_library(compiler: &str) -> bool {
    let printed = process::output(Command::new(compiler).arg("-print-file-name=libc.a"));
    printed.is_ok_and(|path| path.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_requirement_has_a_row_of_its_own() {
        let all = Requirement::all();
        let mut names: Vec<String> = all.iter().map(|requirement| requirement.name()).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all.len());
        assert!(all.iter().all(|requirement| !requirement.purpose().is_empty()));
    }

    #[test]
    fn versions_are_shown_without_what_stands_in_brackets() {
        let line = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)";
        assert_eq!(short_version(line), "QEMU emulator version 7.2.22");
        let line = "gcc (Debian 12.2.0-14+deb12u1) 12.2.0";
        assert_eq!(short_version(line), "gcc 12.2.0");
        assert_eq!(short_version("a) b ((c) d) e"), "a b e");
    }
}
