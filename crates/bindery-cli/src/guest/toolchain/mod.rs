//! Builds for bare metal with the installed Rust.
//!
//! A kernel needs `core` and `alloc` for a target without an operating system. Rust includes them
//! in compiled form only if the user has added the target. The choice is made in this order:
//!
//! 1. the Rust in the search path has the target's `core`: plain cargo;
//! 2. Debian's own Rust is installed with the source of `core`, and it is new enough: cargo with a
//!    sysroot of our own, which is built once (see [`sysroot`]);
//! 3. neither: the problem names the packages to install.

pub mod sysroot;

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Problem;
use super::process;

/// The oldest Rust that builds the kernel.
const MINIMUM: (u32, u32) = (1, 95);

/// The directory of Debian's programs. Other programs of the same name may come earlier in the
/// search path.
const DEBIAN_PROGRAMS: &str = "/usr/bin";

/// Debian's linker, used instead of the linker included in Rust.
const DEBIAN_LINKER: &str = "ld.lld";

/// The way to build for a target.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Toolchain {
    /// The Rust in the search path, which has the target.
    Installed {
        /// The version of the compiler.
        version: String,
    },
    /// Debian's Rust, with a sysroot of our own.
    Debian {
        /// The version of the compiler.
        version: String,
    },
}

/// The tools on this host for a target.
#[derive(Clone, Default, Debug)]
struct Host {
    /// The version of the Rust in the search path, if that Rust has the target.
    with_target: Option<String>,
    /// The version of Debian's Rust.
    debian: Option<String>,
    /// The missing parts of Debian's Rust: the source, or the linker.
    lacking: Vec<&'static str>,
}

/// Chooses a toolchain for a target without building anything.
///
/// # Errors
/// If no toolchain is suitable; the problem names the packages to install.
pub fn choose(target: &str) -> Result<Toolchain, Problem> {
    decide(target, &Host::look(target))
}

fn decide(target: &str, host: &Host) -> Result<Toolchain, Problem> {
    if let Some(version) = host.with_target.clone() {
        return Ok(Toolchain::Installed { version });
    }
    let beside = match &host.debian {
        None => String::new(),
        Some(version) if !new_enough(version) => {
            format!(
                " (Debian's Rust {version} is too old: the kernel needs {}.{} or newer)",
                MINIMUM.0, MINIMUM.1
            )
        }
        Some(version) if !host.lacking.is_empty() => {
            format!(" (Debian's Rust {version} lacks {})", host.lacking.join(" and "))
        }
        Some(version) => return Ok(Toolchain::Debian { version: version.clone() }),
    };
    Err(Problem::Missing(format!(
        "no installed Rust builds for {target}{beside}; with rustup, run\n\
         \n    rustup target add {target}\n\n\
         or on Debian `bindery setup`"
    )))
}

fn new_enough(version: &str) -> bool {
    let mut parts = version.split('.').map(str::parse::<u32>);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= MINIMUM,
        _ => false,
    }
}

impl Host {
    fn look(target: &str) -> Self {
        let with_target = has_target(target).then(|| version(&mut Command::new("rustc"))).flatten();
        let programs = Path::new(DEBIAN_PROGRAMS);
        let debian = programs.join("cargo").is_file().then(|| version(&mut debian_rustc()));
        let mut lacking = Vec::new();
        if !debian_source().is_some_and(|source| source.join("core/src/lib.rs").is_file()) {
            lacking.push("the source of core (rust-web-src)");
        }
        if !programs.join(DEBIAN_LINKER).is_file() {
            lacking.push("the linker ld.lld (lld)");
        }
        Self { with_target, debian: debian.flatten(), lacking }
    }
}

/// Whether the Rust in the search path has `core` for the target.
fn has_target(target: &str) -> bool {
    let Some(sysroot) = printed_sysroot(&mut Command::new("rustc")) else { return false };
    let libraries = sysroot.join("lib/rustlib").join(target).join("lib");
    let Ok(entries) = libraries.read_dir() else { return false };
    entries.flatten().any(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with("libcore-") && name.ends_with(".rlib")
    })
}

fn printed_sysroot(rustc: &mut Command) -> Option<PathBuf> {
    let printed = process::output(rustc.args(["--print", "sysroot"])).ok()?;
    Some(PathBuf::from(printed.trim_end()))
}

fn debian_rustc() -> Command {
    let mut command = Command::new(Path::new(DEBIAN_PROGRAMS).join("rustc"));
    process::without_cargo_settings(&mut command);
    command
}

/// The directory with the source of the standard library of Debian's Rust.
fn debian_source() -> Option<PathBuf> {
    Some(printed_sysroot(&mut debian_rustc())?.join("lib/rustlib/src/rust/library"))
}

/// The version of a compiler, in the form `1.95.0`.
fn version(rustc: &mut Command) -> Option<String> {
    let text = process::output(rustc.arg("-vV")).ok()?;
    release(&text).map(str::to_owned)
}

fn release(verbose_version: &str) -> Option<&str> {
    verbose_version.lines().find_map(|line| line.strip_prefix("release: "))
}

impl Toolchain {
    /// A command that runs cargo's `subcommand` for `target` in `directory`, optimized. Builds the
    /// sysroot first if necessary.
    ///
    /// # Errors
    /// If the sysroot cannot be built.
    pub fn cargo(
        &self,
        subcommand: &str,
        target: &str,
        directory: &Path,
    ) -> Result<Command, Problem> {
        let mut command = match self {
            Self::Installed { .. } => {
                let mut command = Command::new("cargo");
                process::without_cargo_settings(&mut command);
                command.arg(subcommand);
                command
            }
            Self::Debian { .. } => {
                let sysroot = sysroot::ready(target)?;
                let mut command = debian_cargo();
                command.arg(subcommand);
                // Cargo joins lists of flags from several places, so the package's own remain.
                let flags = [format!("--sysroot={}", sysroot.display())];
                command.arg("--config").arg(format!("target.{target}.rustflags={flags:?}"));
                command.arg("--config").arg(format!("target.{target}.linker={DEBIAN_LINKER:?}"));
                command
            }
        };
        // With rustup, cargo must not start to download another Rust.
        command.env("RUSTUP_AUTO_INSTALL", "0").current_dir(directory);
        command.args(["--release", "--target", target]);
        Ok(command)
    }
}

/// Debian's cargo, with Debian's rustc.
fn debian_cargo() -> Command {
    let programs = Path::new(DEBIAN_PROGRAMS);
    let mut command = Command::new(programs.join("cargo"));
    process::without_cargo_settings(&mut command);
    let mut path = OsString::from(DEBIAN_PROGRAMS);
    if let Some(rest) = env::var_os("PATH") {
        path.push(":");
        path.push(rest);
    }
    command.env("PATH", path).env("RUSTC", programs.join("rustc"));
    command
}

impl fmt::Display for Toolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Installed { version } => write!(f, "Rust {version}, which has the target"),
            Self::Debian { version } => {
                write!(f, "Debian's Rust {version} and a sysroot of our own")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: &str = "x86_64-unknown-none";

    fn debian(version: &str, lacking: Vec<&'static str>) -> Host {
        Host { with_target: None, debian: Some(version.to_owned()), lacking }
    }

    #[test]
    fn an_installed_target_comes_before_debians_rust() {
        let host = Host { with_target: Some("1.95.0".to_owned()), ..debian("1.96.0", Vec::new()) };
        let expected = Toolchain::Installed { version: "1.95.0".to_owned() };
        assert_eq!(decide(TARGET, &host), Ok(expected));
    }

    #[test]
    fn debians_rust_serves_without_the_installed_target() {
        for version in ["1.95.0", "1.96.0", "2.0.0", "1.100.1"] {
            let expected = Toolchain::Debian { version: version.to_owned() };
            assert_eq!(decide(TARGET, &debian(version, Vec::new())), Ok(expected));
        }
    }

    #[test]
    fn without_a_toolchain_the_problem_has_a_command() {
        for (host, part) in [
            (Host::default(), "bindery setup"),
            (debian("1.63.0", Vec::new()), "1.63.0 is too old"),
            (debian("1.96.0", vec!["the source", "ld.lld"]), "lacks the source and ld.lld"),
            (debian("", Vec::new()), "too old"),
        ] {
            let problem = decide(TARGET, &host).unwrap_err();
            assert!(matches!(problem, Problem::Missing(_)));
            let text = problem.to_string();
            assert!(text.contains("rustup target add x86_64-unknown-none"), "{text}");
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_compilers_release_is_parsed() {
        let text = "rustc 1.96.0 (ac68faa20 2026-05-25)\nbinary: rustc\nrelease: 1.96.0\n";
        assert_eq!(release(text), Some("1.96.0"));
        assert_eq!(release("rustc 1.96.0"), None);
    }
}
