//! Debian packages that are fetched and unpacked under `target`, for another architecture or from
//! another suite, without installing anything.
//!
//! One process at a time uses a list. Apt has locks of its own but does not wait for them, so a
//! second process would mistake apt's refusal for an unavailable package. A process that has waited
//! checks again whether its files exist by now.
//!
//! Apt is run with a list of sources, a state and a cache of its own under `target/guest/apt`. The
//! system's lists are neither read nor changed, so no root rights are needed; its trusted keys and
//! its settings for the network are used.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Architecture, Problem, process, workspace};

const MIRROR: &str = "http://deb.debian.org/debian";
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// One suite of Debian's packages for one architecture.
#[derive(Debug)]
pub struct PackageList {
    directory: PathBuf,
    architecture: Architecture,
    /// The lock is held while the list is used; the system releases it when the process ends.
    _lock: File,
}

impl PackageList {
    /// The packages of a suite (`bookworm`, `sid`) for an architecture, in their current versions.
    /// Waits until no other process uses this list.
    ///
    /// # Errors
    /// If the host is not Debian, or the list cannot be fetched.
    pub fn new(architecture: Architecture, suite: &str) -> Result<Self, Problem> {
        let source = format!(
            "deb [arch={} signed-by={KEYS}] {MIRROR} {suite} main\n",
            architecture.debian()
        );
        Self::of(architecture, &format!("{suite}-{}", architecture.debian()), &source)
    }

    /// The list under this name that one line of apt's `sources.list` describes.
    fn of(architecture: Architecture, name: &str, source: &str) -> Result<Self, Problem> {
        let directory = workspace::target(&format!("guest/apt/{name}"))?;
        let lock = lock(&directory.join("lock"))?;
        let list = Self { directory, architecture, _lock: lock };
        for part in ["state/lists/partial", "cache/archives/partial", "fetched"] {
            let path = list.directory.join(part);
            fs::create_dir_all(&path).map_err(|error| Problem::io("make", &path, &error))?;
        }
        workspace::write_if_changed(&list.directory.join("sources.list"), source.as_bytes())?;
        workspace::write_if_changed(&list.directory.join("state/status"), b"")?;
        process::output(list.command("apt-get").args(["-qq", "update"]))?;
        Ok(list)
    }

    /// The packages of the Debian that this host runs.
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    pub fn of_this_debian(architecture: Architecture) -> Result<Self, Problem> {
        let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
        let suite = debian_suite(&release).ok_or_else(|| {
            Problem::Missing(
                "Bindery fetches packages with Debian's apt-get, and this host is not Debian; run \
                 this command in a Debian container"
                    .to_owned(),
            )
        })?;
        Self::new(architecture, suite)
    }

    /// One of apt's programs, run on this list; the caller adds the arguments of the action.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.directory.join("fetched")).env("LC_ALL", "C");
        let architecture = self.architecture.debian();
        let option =
            |name: &str, part: &str| format!("-o{name}={}", self.directory.join(part).display());
        command.args([
            option("Dir::Etc::SourceList", "sources.list"),
            option("Dir::Etc::SourceParts", "no-sources"),
            option("Dir::Etc::PreferencesParts", "no-preferences"),
            option("Dir::State", "state"),
            option("Dir::State::status", "state/status"),
            option("Dir::Cache", "cache"),
            format!("-oAPT::Architecture={architecture}"),
            format!("-oAPT::Architectures={architecture}"),
            // Root may fetch into a directory that the user `_apt` cannot enter.
            "-oAPT::Sandbox::User=root".to_owned(),
        ]);
        command
    }

    /// Fetches a package, without its dependencies, and unpacks its files below a directory.
    ///
    /// # Errors
    /// If no such package exists, or it cannot be fetched or unpacked.
    pub fn unpack(&self, package: &str, directory: &Path) -> Result<(), Problem> {
        let fetched = self.directory.join("fetched");
        let failed = |error| Problem::io("read", &fetched, &error);
        process::output(self.command("apt-get").args(["-qq", "download", package]))?;
        let start = format!("{package}_");
        let archives = fs::read_dir(&fetched).map_err(failed)?.flatten().map(|entry| entry.path());
        let mut archives = archives.filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&start))
        });
        let archive = archives.next().ok_or_else(|| {
            Problem::Failed(format!(
                "apt-get succeeded, but fetched no {package} to {}",
                fetched.display()
            ))
        })?;
        fs::create_dir_all(directory).map_err(|error| Problem::io("make", directory, &error))?;
        process::output(Command::new("dpkg").arg("-x").arg(&archive).arg(directory))?;
        fs::remove_file(&archive).map_err(|error| Problem::io("remove", &archive, &error))
    }

    /// Fetches packages with all their dependencies and unpacks their files below a directory.
    ///
    /// # Errors
    /// The errors of [`Self::unpack`].
    pub fn unpack_with_dependencies(
        &self,
        packages: &[&str],
        directory: &Path,
    ) -> Result<(), Problem> {
        // Files of an earlier attempt may be out of date.
        process::output(self.command("apt-get").arg("clean"))?;
        let mut fetch = self.command("apt-get");
        fetch.args(["-qq", "--yes", "--no-install-recommends", "--download-only", "install"]);
        process::output(fetch.args(packages))?;
        let fetched = self.directory.join("cache/archives");
        let failed = |error| Problem::io("read", &fetched, &error);
        fs::create_dir_all(directory).map_err(|error| Problem::io("make", directory, &error))?;
        let files = fs::read_dir(&fetched).map_err(failed)?.flatten().map(|entry| entry.path());
        for archive in files.filter(|path| path.extension().is_some_and(|name| name == "deb")) {
            process::output(Command::new("dpkg").arg("-x").arg(&archive).arg(directory))?;
        }
        process::output(self.command("apt-get").arg("clean")).map(drop)
    }
}

/// The source packages of one suite.
#[derive(Debug)]
pub struct Sources(PackageList);

impl Sources {
    /// The packages of a suite (`bookworm`, `sid`), in their current versions. Waits until no other
    /// process uses the list.
    ///
    /// # Errors
    /// The errors of [`PackageList::new`].
    pub fn new(suite: &str) -> Result<Self, Problem> {
        let architecture = Architecture::host().unwrap_or(Architecture::X86_64);
        let source = format!("deb-src [signed-by={KEYS}] {MIRROR} {suite} main\n");
        PackageList::of(architecture, &format!("{suite}-source"), &source).map(Self)
    }

    /// Fetches a package and unpacks its upstream source, without Debian's changes. The directory
    /// is complete or absent.
    ///
    /// # Errors
    /// If no such package exists, or it cannot be fetched or unpacked.
    pub fn unpack(&self, package: &str, directory: &Path) -> Result<(), Problem> {
        let parent = directory.parent().unwrap_or(Path::new("."));
        let failed = |error| Problem::io("write to", parent, &error);
        let aside = tempfile::tempdir_in(parent).map_err(failed)?;
        let mut fetch = self.0.command("apt-get");
        fetch.args(["-qq", "source", "--download-only", package]).current_dir(aside.path());
        process::output(&mut fetch)?;
        let start = format!("{package}_");
        let files = fs::read_dir(aside.path()).map_err(failed)?.flatten();
        let archive = files.map(|entry| entry.path()).find(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(&start) && name.contains(".orig.tar.")
        });
        let archive = archive.ok_or_else(|| {
            Problem::Failed(format!(
                "the source package {package} has no upstream archive ({package}_*.orig.tar.*)"
            ))
        })?;
        let unpacked = aside.path().join("unpacked");
        fs::create_dir(&unpacked).map_err(failed)?;
        let mut tar = Command::new("tar");
        tar.args(["--extract", "--strip-components=1", "--file"]).arg(&archive);
        process::output(tar.arg("--directory").arg(&unpacked))?;
        fs::rename(&unpacked, directory).map_err(|error| Problem::io("make", directory, &error))
    }
}

/// Locks a file, which is created if necessary; reports if it has to wait for the lock.
fn lock(path: &Path) -> Result<File, Problem> {
    let failed = |error| Problem::io("lock", path, &error);
    let file = File::create(path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            eprintln!("bindery: waiting for another bindery that fetches packages");
            file.lock().map_err(failed)?;
        }
        Err(TryLockError::Error(error)) => return Err(failed(error)),
    }
    Ok(file)
}

/// Debian's name for the suite that an `os-release` describes.
fn debian_suite(release: &str) -> Option<&str> {
    let value = |key: &str| {
        let line = release.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))?;
        Some(line.trim_matches('"'))
    };
    // Testing and unstable have no version number; testing's list serves both.
    (value("ID")? == "debian").then(|| value("VERSION_CODENAME").unwrap_or("testing"))
}

/// Whether this host runs Debian.
#[must_use]
pub fn is_debian() -> bool {
    debian_suite(&fs::read_to_string("/etc/os-release").unwrap_or_default()).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_another_uses_is_waited_for() {
        use std::sync::atomic::{AtomicBool, Ordering};

        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let first = lock(&path).unwrap();
        let given_back = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let second = scope.spawn(|| {
                let second = lock(&path).unwrap();
                assert!(given_back.load(Ordering::SeqCst), "both have it");
                drop(second);
            });
            // Enough time for the second lock, if it wrongly does not wait, to return before the
            // first is released.
            std::thread::sleep(std::time::Duration::from_millis(100));
            given_back.store(true, Ordering::SeqCst);
            drop(first);
            second.join().expect("the second has waited");
        });
        assert!(lock(&path).is_ok());
    }

    #[test]
    fn the_suite_comes_from_debians_own_description() {
        let bookworm = "NAME=\"Debian\"\nVERSION_CODENAME=bookworm\nID=debian\n";
        assert_eq!(debian_suite(bookworm), Some("bookworm"));
        assert_eq!(debian_suite("ID=debian\n"), Some("testing"));
        assert_eq!(debian_suite("ID=fedora\nVERSION_CODENAME=bookworm\n"), None);
        assert_eq!(debian_suite("ID_LIKE=debian\n"), None);
        assert_eq!(debian_suite(""), None);
    }
}
