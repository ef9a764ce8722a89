//! Debian's static BusyBox: a shell and the commands of scripts, in one program.
//!
//! The host's own BusyBox is used if it is static and for the right architecture. Otherwise
//! Debian's package is fetched and unpacked under `target/guest` once, and nothing is installed.

use std::path::{Path, PathBuf};

use super::packages::PackageList;
use super::{Architecture, Problem, executable, workspace};

/// The package that contains BusyBox.
pub const PACKAGE: &str = "busybox-static";

/// The path of the program in the package.
const PROGRAM: &str = "bin/busybox";

/// The program, fetched if necessary.
///
/// # Errors
/// If BusyBox is not installed, or cannot be fetched.
pub fn program(architecture: Architecture) -> Result<PathBuf, Problem> {
    if let Some(path) = present(architecture)? {
        return Ok(path);
    }
    if Architecture::host() == Some(architecture) {
        return Err(Problem::Missing(format!(
            "Debian's static BusyBox is not installed; on Debian, run\n\
             \n    apt-get install {PACKAGE}\n"
        )));
    }
    let directory = unpacked(architecture)?;
    eprintln!("bindery: fetching {PACKAGE} for {architecture} (once)");
    let list = PackageList::of_this_debian(architecture)?;
    if let Some(path) = present(architecture)? {
        // Another process fetched BusyBox while this one waited for the list.
        return Ok(path);
    }
    list.unpack(PACKAGE, &directory)?;
    let path = directory.join(PROGRAM);
    executable::read_static(&path)?;
    Ok(path)
}

/// The program, if it is on this host already.
///
/// # Errors
/// If Bindery's repository is not found.
pub fn present(architecture: Architecture) -> Result<Option<PathBuf>, Problem> {
    let candidates = [Path::new("/").join(PROGRAM), unpacked(architecture)?.join(PROGRAM)];
    let fits = |path: &PathBuf| executable::read_static(path) == Ok(architecture);
    Ok(candidates.into_iter().find(fits))
}

fn unpacked(architecture: Architecture) -> Result<PathBuf, Problem> {
    Ok(workspace::target("guest/busybox")?.join(architecture.debian()))
}
