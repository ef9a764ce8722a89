//! Linux itself, for comparison: Debian's newest kernel, fetched and unpacked under `target`.
//!
//! The suite `sid` has the newest release of Linux that Debian ships (candidates for the next one
//! are in `experimental`). The cloud flavour is used, because it contains no drivers for devices
//! that these machines lack.
//!
//! | module | what |
//! |---|---|
//! | [`module`] | modules for it, built from sources of ours |
//! | [`ready_made`] | modules that come with it |
//! | `borrowed` | programs of a newer Debian, for a host with older libraries |

mod borrowed;
pub mod module;
pub mod ready_made;

use std::fs;
use std::path::{Path, PathBuf};

use super::packages::PackageList;
use super::{Architecture, Problem, process, workspace};

const SUITE: &str = "sid";

/// The package list of the suite with the newest Linux, for other packages of that suite.
///
/// # Errors
/// If the host is not Debian, or the list cannot be fetched.
pub fn packages(architecture: Architecture) -> Result<PackageList, Problem> {
    PackageList::new(architecture, SUITE)
}

/// Debian's newest kernel image. It is fetched once; remove `target/guest/linux` for a newer one.
///
/// # Errors
/// If the image is missing and cannot be fetched.
pub fn newest(architecture: Architecture) -> Result<PathBuf, Problem> {
    let directory = workspace::target("guest/linux")?.join(architecture.debian());
    if let Some(image) = present(&directory) {
        return Ok(image);
    }
    let list = packages(architecture)?;
    if let Some(image) = present(&directory) {
        // Another process fetched the image while this one waited for the list.
        return Ok(image);
    }
    let flavour = flavour(architecture);
    let mut search = list.command("apt-cache");
    search.args(["search", "--names-only", &format!("^linux-binary-[0-9].*{flavour}$")]);
    let found = process::output(&mut search)?;
    let names = found.lines().filter_map(|line| line.split_whitespace().next());
    let package = names.max_by_key(|name| release(name)).ok_or_else(|| {
        Problem::Failed(format!(
            "Debian's {SUITE} has no package linux-binary-*{flavour}, which has the Linux to compare \
             with; use --no-linux, or --linux FILE where the command has it"
        ))
    })?;
    eprintln!("bindery: fetching {package} (once)");
    // Unpacked to another place and then renamed, so that the directory is always complete.
    let aside = tempfile::tempdir_in(workspace::target("guest/linux")?)
        .map_err(|error| Problem::io("write to", &directory, &error))?;
    list.unpack(package, aside.path())?;
    fs::rename(aside.keep(), &directory)
        .map_err(|error| Problem::io("make", &directory, &error))?;
    present(&directory).ok_or_else(|| {
        Problem::Failed(format!(
            "the package {package} has no kernel image at usr/lib/modules/*/vmlinuz"
        ))
    })
}

/// The suffix that all packages of the flavour share.
fn flavour(architecture: Architecture) -> String {
    format!("-cloud-{}", architecture.debian())
}

/// `usr/lib/modules/RELEASE/vmlinuz` below a directory.
fn present(directory: &Path) -> Option<PathBuf> {
    let modules = fs::read_dir(directory.join("usr/lib/modules")).ok()?;
    let images = modules.flatten().map(|release| release.path().join("vmlinuz"));
    images.into_iter().find(|image| image.is_file())
}

/// The numbers of the release in a package's name, for comparison.
#[must_use]
pub fn release(package: &str) -> Vec<u64> {
    let version = package.trim_start_matches(|letter: char| !letter.is_ascii_digit());
    let version = version.split(['+', '-']).next().unwrap_or_default();
    version.split('.').map_while(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_their_numbers() {
        assert_eq!(release("linux-binary-7.2.13+deb14-cloud-amd64"), [7, 2, 13]);
        assert_eq!(release("linux-binary-7.3-cloud-arm64"), [7, 3]);
        let newest = ["linux-binary-7.2.9-cloud-amd64", "linux-binary-7.2.13-cloud-amd64"];
        assert_eq!(newest.into_iter().max_by_key(|name| release(name)), Some(newest[1]));
        assert_eq!(release("linux-binary"), [0; 0]);
    }

    #[test]
    fn an_unpacked_image_is_found_whatever_its_release() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(present(directory.path()), None);
        let release = directory.path().join("usr/lib/modules/7.2.13");
        fs::create_dir_all(&release).unwrap();
        assert_eq!(present(directory.path()), None);
        fs::write(release.join("vmlinuz"), "").unwrap();
        assert_eq!(present(directory.path()), Some(release.join("vmlinuz")));
    }
}
