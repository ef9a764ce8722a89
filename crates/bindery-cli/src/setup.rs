//! `bindery setup`: installs what is missing, on Debian.
//!
//! The command uses only apt-get and prints each apt-get command before running it. Rust for bare
//! metal is installed as Debian's own Rust with the source of `core` (see `guest::toolchain`). With
//! rustup, the targets can be added there instead.

use std::fmt;
use std::process::{Command, ExitCode};

use crate::guest::Problem;
use crate::guest::packages::is_debian;
use crate::guest::requirements::{Remedy, Requirement};

/// Debian's packages of Rust: first those that build web browsers, which are kept up to date in
/// stable releases, then the ordinary ones. The first field is the package whose version decides.
const RUST: [(&str, [&str; 4]); 2] = [
    ("rustc-web", ["rustc-web", "cargo-web", "rust-web-src", "lld"]),
    ("rustc", ["rustc", "cargo", "rust-src", "lld"]),
];

/// The oldest Rust that builds the kernel.
const OLDEST_RUST: (u32, u32) = (1, 95);

/// Install what is missing, on Debian as root
///
/// Uses apt-get, prints each command before it runs, and installs only what `bindery doctor`
/// reports as missing. Without root it only prints the commands, and the exit status is 1.
#[derive(clap::Args)]
pub struct Arguments {}

/// A command, as printed and run.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Step(Vec<String>);

impl Step {
    fn new<'a>(words: impl IntoIterator<Item = &'a str>) -> Self {
        Self(words.into_iter().map(str::to_owned).collect())
    }

    fn run(&self) -> Result<(), Problem> {
        println!("+ {self}");
        let (program, arguments) = self.0.split_first().expect("a step has a program");
        let mut command = Command::new(program);
        command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive");
        match command.status() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(Problem::Failed(format!("`{self}` ended with {status}"))),
            Err(error) => Err(Problem::Failed(format!("cannot start {program}: {error}"))),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(" "))
    }
}

/// Installs the missing requirements, or prints the commands.
///
/// # Errors
/// If the host is not Debian, a command fails, or a requirement is still missing.
pub fn run(_: &Arguments) -> Result<ExitCode, Problem> {
    let missing = missing();
    if missing.is_empty() {
        println!("Everything is there.");
        return Ok(ExitCode::SUCCESS);
    }
    if !is_debian() {
        return Err(Problem::Failed(
            "`bindery setup` installs packages on Debian only, and this host is not Debian; \
             `bindery doctor` lists what to install"
                .to_owned(),
        ));
    }
    let update = Step::new(["apt-get", "update"]);
    if !rustix::process::geteuid().is_root() {
        println!("# Run these as root:\n{update}");
        if let Some(install) = install(&missing, &rust_packages()?) {
            println!("{install}");
        }
        return Ok(ExitCode::FAILURE);
    }
    update.run()?;
    if let Some(install) = install(&missing, &rust_packages()?) {
        install.run()?;
    }
    match still_missing() {
        None => {
            println!("Everything is there.");
            Ok(ExitCode::SUCCESS)
        }
        Some(names) => Err(Problem::Failed(format!(
            "the packages were installed, but these are still missing: {names}; `bindery doctor` \
             shows how each is installed"
        ))),
    }
}

fn missing() -> Vec<Requirement> {
    Requirement::all().into_iter().filter(|requirement| requirement.version().is_none()).collect()
}

fn still_missing() -> Option<String> {
    let names: Vec<String> = missing().into_iter().map(Requirement::name).collect();
    (!names.is_empty()).then(|| names.join(", "))
}

/// The command that installs these requirements, with the given packages for Rust if Rust is among
/// them; `None` if no package helps.
fn install(missing: &[Requirement], rust: &[&str]) -> Option<Step> {
    let mut packages: Vec<&str> = Vec::new();
    for requirement in missing {
        match requirement.remedy() {
            Remedy::Packages(of_this) => packages.extend(of_this),
            Remedy::RustTarget(_) => packages.extend(rust),
            Remedy::OnDebian => {}
        }
    }
    packages.sort_unstable();
    packages.dedup();
    let start = ["apt-get", "install", "--yes", "--no-install-recommends"];
    (!packages.is_empty()).then(|| Step::new(start.into_iter().chain(packages)))
}

/// Debian's packages of a Rust that is new enough; empty if Debian has no such Rust.
fn rust_packages() -> Result<Vec<&'static str>, Problem> {
    let names = RUST.map(|(name, _)| name);
    let output = Command::new("apt-cache")
        .arg("policy")
        .args(names)
        .env("LC_ALL", "C")
        .output()
        .map_err(|error| Problem::Failed(format!("cannot start apt-cache: {error}")))?;
    let policy = String::from_utf8_lossy(&output.stdout);
    let fits = RUST
        .into_iter()
        .find(|(name, _)| candidate(&policy, name).is_some_and(|version| version >= OLDEST_RUST));
    Ok(fits.map(|(_, packages)| packages.to_vec()).unwrap_or_default())
}

/// The version of a package that apt would install, from the output of `apt-cache policy`.
fn candidate(policy: &str, package: &str) -> Option<(u32, u32)> {
    let heading = format!("{package}:");
    let mut lines = policy.lines().skip_while(|line| *line != heading).skip(1);
    let version = lines
        .by_ref()
        .take_while(|line| line.starts_with(' '))
        .find_map(|line| line.trim_start().strip_prefix("Candidate: "))?;
    let mut parts = version.split(['.', '+', '~', '-']).map(str::parse::<u32>);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Some((major, minor)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::Architecture;

    const POLICY: &str = "\
rustc:
  Installed: (none)
  Candidate: 1.63.0+dfsg1-2
  Version table:
     1.63.0+dfsg1-2 500
rustc-web:
  Installed: (none)
  Candidate: 1.96.0+dfsg1-1~deb12u2
  Version table:
old:
  Installed: (none)
  Candidate: (none)
";

    #[test]
    fn the_version_that_apt_would_install_is_read() {
        assert_eq!(candidate(POLICY, "rustc-web"), Some((1, 96)));
        assert_eq!(candidate(POLICY, "rustc"), Some((1, 63)));
        assert_eq!(candidate(POLICY, "old"), None);
        assert_eq!(candidate(POLICY, "cargo"), None);
        assert_eq!(candidate("", "rustc"), None);
    }

    #[test]
    fn one_command_installs_every_missing_package_once() {
        let missing = [
            Requirement::Rust(Architecture::X86_64),
            Requirement::Rust(Architecture::AArch64),
            Requirement::CCompiler(Architecture::AArch64),
            Requirement::GlibcCompiler(Architecture::AArch64),
        ];
        let step = install(&missing, &RUST[0].1).unwrap();
        assert_eq!(
            step.to_string(),
            "apt-get install --yes --no-install-recommends cargo-web gcc-aarch64-linux-gnu \
             libc6-dev-arm64-cross lld rust-web-src rustc-web"
        );
        assert_eq!(install(&missing[..2], &[]), None, "nothing is installed for nothing");
    }
}
