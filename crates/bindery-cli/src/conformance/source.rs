//! Linux's own tests, and the headers that they are built with, from Debian's packages.
//!
//! The package with Linux's source is large (160 MB), and its contents are larger; only the
//! directory of the tests is kept. The tests know calls that are newer than this host's C library
//! and headers, so Linux's headers come from the same release.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use bindery_cli::guest::{Architecture, Problem, linux, process, workspace};

/// The headers of the kernel for programs, of all architectures.
const HEADERS: &str = "linux-libc-dev";

/// The parts of the source that are kept; patterns for tar, in which `*` does not match a slash.
const KEPT: [&str; 6] = [
    "*/Makefile",
    "*/mm/gup_test.h",
    "*/tools/testing/selftests/*.h",
    "*/tools/testing/selftests/mm/*.[ch]",
    "*/tools/testing/selftests/clone3/clone3_selftests.h",
    "*/tools/testing/selftests/pidfd/pidfd.h",
];

/// Files of [`KEPT`] that an older bindery left out. If they are missing, the sources are fetched
/// again.
const NEEDED: [&str; 3] = [
    "mm/gup_test.h",
    "tools/testing/selftests/clone3/clone3_selftests.h",
    "tools/testing/selftests/pidfd/pidfd.h",
];

/// The tests' sources, unpacked.
#[derive(Clone, Debug)]
pub struct Source {
    directory: PathBuf,
    /// The release of Linux that contains the tests.
    pub release: String,
}

impl Source {
    /// The tests of Debian's newest Linux. They are fetched once; remove `target/guest/selftests`
    /// for newer ones.
    ///
    /// # Errors
    /// If they are missing and cannot be fetched.
    pub fn newest() -> Result<Self, Problem> {
        let parent = workspace::target("guest")?;
        let directory = parent.join("selftests");
        if !NEEDED.iter().all(|file| directory.join(file).is_file()) {
            // Unpacked to another place and then renamed, so that the directory is always complete.
            let aside = tempfile::tempdir_in(&parent)
                .map_err(|error| Problem::io("write to", &parent, &error))?;
            let whole = aside.path().join("selftests");
            fetch(aside.path(), &whole)?;
            if directory.is_dir() {
                fs::remove_dir_all(&directory)
                    .map_err(|error| Problem::io("remove", &directory, &error))?;
            }
            fs::rename(&whole, &directory)
                .map_err(|error| Problem::io("make", &directory, &error))?;
        }
        let makefile = directory.join("Makefile");
        let text = fs::read_to_string(&makefile)
            .map_err(|error| Problem::io("read", &makefile, &error))?;
        let release = release(&text).ok_or_else(|| {
            Problem::Failed(format!(
                "{} has no VERSION, PATCHLEVEL and SUBLEVEL of Linux",
                makefile.display()
            ))
        })?;
        Ok(Self { directory, release })
    }

    /// The directory of the tests about memory.
    pub fn tests(&self) -> PathBuf {
        self.directory.join("tools/testing/selftests/mm")
    }

    /// The directories with headers: Linux's, which come before the C library's.
    pub fn headers(&self, architecture: Architecture) -> [PathBuf; 2] {
        let all = self.directory.join("usr/include");
        [all.join(format!("{}-linux-gnu", architecture.directory())), all]
    }

    /// The directory that all of Linux's tests share.
    pub fn shared(&self) -> PathBuf {
        self.directory.join("tools/testing/selftests")
    }
}

fn fetch(aside: &Path, directory: &Path) -> Result<(), Problem> {
    // Both packages are the same for all architectures.
    let list = linux::packages(Architecture::host().unwrap_or(Architecture::X86_64))?;
    let mut search = list.command("apt-cache");
    search.args(["search", "--names-only", "^linux-source-[0-9.]+$"]);
    let found = process::output(&mut search)?;
    let names = found.lines().filter_map(|line| line.split_whitespace().next());
    let package = names
        .max_by_key(|name| linux::release(name))
        .ok_or_else(|| Problem::Failed("Debian's package list has no linux-source-*".to_owned()))?;
    eprintln!("bindery: fetching {package}, 160 MB, and {HEADERS} (once)");
    list.unpack(package, aside)?;
    list.unpack(HEADERS, directory)?;
    let archive = aside.join(format!("usr/src/{package}.tar.xz"));
    let mut unpack = Command::new("tar");
    // Files get the current time, so that programs built from older sources are rebuilt.
    unpack.args(["--extract", "--xz", "--touch", "--strip-components=1"]);
    unpack.args(["--wildcards", "--no-wildcards-match-slash"]);
    unpack.arg("--file").arg(&archive).arg("--directory").arg(directory).args(KEPT);
    process::output(&mut unpack).map(drop)
}

/// The release in the first lines of Linux's Makefile.
fn release(makefile: &str) -> Option<String> {
    let number = |name: &str| {
        let assigned = |line: &str| -> Option<u32> {
            let (left, right) = line.split_once('=')?;
            if left.trim() == name { right.trim().parse().ok() } else { None }
        };
        makefile.lines().find_map(assigned)
    };
    let [version, level, sub_level] = ["VERSION", "PATCHLEVEL", "SUBLEVEL"].map(number);
    Some(format!("{}.{}.{}", version?, level?, sub_level?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_read_from_the_makefile() {
        let text = "# comment\nVERSION = 7\nPATCHLEVEL = 2\nSUBLEVEL = 13\nEXTRAVERSION =\n";
        assert_eq!(release(text).as_deref(), Some("7.2.13"));
        assert_eq!(release("VERSION = 7\n"), None);
    }
}
