//! The initial file system: a cpio archive in the format `newc`, which a kernel unpacks at boot.
//!
//! The same entries always produce the same bytes, because entries are sorted by path, belong to
//! root, have no times, and are numbered from 1. This matters because the archive lies in the
//! machine's memory and affects counted runs, which must repeat exactly.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use cpio::newc::{Builder, ModeFileType, trailer};

use super::Problem;

/// The permissions of directories and programs.
pub const EXECUTABLE: u32 = 0o755;
/// The permissions of files that are not programs.
pub const PLAIN: u32 = 0o644;

#[derive(Debug)]
enum Entry {
    Directory,
    File { permissions: u32, contents: Vec<u8> },
    Symlink { target: String },
}

/// The files, directories and symbolic links that a machine starts with.
///
/// ```
/// use bindery_cli::guest::initramfs::{EXECUTABLE, Initramfs};
///
/// # fn main() -> Result<(), bindery_cli::guest::Problem> {
/// let mut files = Initramfs::new();
/// files.file("/init", EXECUTABLE, "#!/bin/sh\n")?;
/// files.symlink("/bin/sh", "busybox")?;
/// assert_eq!(files.archive().len() % 4, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Default, Debug)]
pub struct Initramfs {
    /// The entries by path, without a slash at the start. A directory sorts before its contents.
    entries: BTreeMap<String, Entry>,
}

impl Initramfs {
    /// An empty file system.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a file with these contents, and the directories above it.
    ///
    /// # Errors
    /// If the path is not absolute or is taken, or the file is too large for the format.
    pub fn file(
        &mut self,
        path: &str,
        permissions: u32,
        contents: impl Into<Vec<u8>>,
    ) -> Result<(), Problem> {
        let contents = contents.into();
        if u32::try_from(contents.len()).is_err() {
            return Err(Problem::Wrong(format!(
                "{path} has 4 GiB or more; a file of an initramfs must be smaller"
            )));
        }
        self.add(path, Entry::File { permissions, contents })
    }

    /// Adds a copy of a file of the host, executable if the original is.
    ///
    /// # Errors
    /// The errors of [`Self::file`], or if the source cannot be read.
    pub fn host_file(&mut self, path: &str, source: &Path) -> Result<(), Problem> {
        let failed = |error| Problem::io("read", source, &error);
        let mode = fs::metadata(source).map_err(failed)?.permissions().mode();
        let permissions = if mode & 0o111 == 0 { PLAIN } else { EXECUTABLE };
        self.file(path, permissions, fs::read(source).map_err(failed)?)
    }

    /// Adds a directory and the directories above it. An existing directory is unchanged.
    ///
    /// # Errors
    /// If the path is not absolute, or is taken.
    pub fn directory(&mut self, path: &str) -> Result<(), Problem> {
        let name = relative(path)?;
        self.parents(path, &name)?;
        self.ensure_directory(path, &name)
    }

    /// Adds a symbolic link to `target`, and the directories above the link.
    ///
    /// # Errors
    /// If the path is not absolute, or is taken.
    pub fn symlink(&mut self, path: &str, target: &str) -> Result<(), Problem> {
        self.add(path, Entry::Symlink { target: target.to_owned() })
    }

    /// Whether the path is taken.
    #[must_use]
    pub fn contains(&self, path: &str) -> bool {
        relative(path).is_ok_and(|name| self.entries.contains_key(&name))
    }

    /// The bytes of the archive.
    #[must_use]
    pub fn archive(&self) -> Vec<u8> {
        let mut archive = Vec::new();
        for (number, (name, entry)) in (1..).zip(&self.entries) {
            append(&mut archive, Builder::new(name).ino(number), entry);
        }
        trailer(archive).expect("writing to memory does not fail")
    }

    fn add(&mut self, path: &str, entry: Entry) -> Result<(), Problem> {
        let name = relative(path)?;
        self.parents(path, &name)?;
        if self.entries.contains_key(&name) {
            return Err(Problem::Wrong(format!(
                "two files have the path {path} in the machine; give one of them another path"
            )));
        }
        self.entries.insert(name, entry);
        Ok(())
    }

    fn parents(&mut self, path: &str, name: &str) -> Result<(), Problem> {
        for (end, _) in name.match_indices('/') {
            self.ensure_directory(path, &name[..end])?;
        }
        Ok(())
    }

    fn ensure_directory(&mut self, path: &str, name: &str) -> Result<(), Problem> {
        match self.entries.get(name) {
            None => {
                self.entries.insert(name.to_owned(), Entry::Directory);
                Ok(())
            }
            Some(Entry::Directory) => Ok(()),
            Some(_) => Err(Problem::Wrong(format!(
                "cannot put {path} into the machine: /{name} is not a directory there"
            ))),
        }
    }
}

/// The path in the form of archives: no slash at the start, one between the names.
fn relative(path: &str) -> Result<String, Problem> {
    let wrong = |why| Problem::Wrong(format!("cannot put {path:?} into the machine: {why}"));
    let rest = path.strip_prefix('/').ok_or_else(|| wrong("the path must begin with a slash"))?;
    let names: Vec<&str> = rest.split('/').filter(|name| !matches!(*name, "" | ".")).collect();
    if names.is_empty() {
        return Err(wrong("the path names the root directory, and must name a file"));
    }
    if names.contains(&"..") {
        return Err(wrong("the path must not have .. in it"));
    }
    if path.contains('\0') {
        return Err(wrong("the path must not have a NUL in it"));
    }
    if names == ["TRAILER!!!"] {
        return Err(wrong("this name ends a cpio archive; choose another"));
    }
    Ok(names.join("/"))
}

fn append(archive: &mut Vec<u8>, builder: Builder, entry: &Entry) {
    let (kind, permissions, links, contents) = match entry {
        Entry::Directory => (ModeFileType::Directory, EXECUTABLE, 2, &[][..]),
        Entry::File { permissions, contents } => {
            (ModeFileType::Regular, *permissions, 1, contents.as_slice())
        }
        Entry::Symlink { target } => (ModeFileType::Symlink, 0o777, 1, target.as_bytes()),
    };
    let builder = builder.mode(permissions).set_mode_file_type(kind).nlink(links);
    let length = u32::try_from(contents.len()).expect("checked when the file was added");
    let mut writer = builder.write(archive, length);
    writer.write_all(contents).expect("writing to memory does not fail");
    writer.finish().expect("writing to memory does not fail");
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn sample() -> Initramfs {
        let mut files = Initramfs::new();
        files.file("/bin/odd", EXECUTABLE, "12345").unwrap();
        files.symlink("/bin/sh", "odd").unwrap();
        files.directory("//tmp/./deep/").unwrap();
        files.file("/a", PLAIN, "").unwrap();
        files
    }

    /// The listing of an archive by the host's cpio, or `None` without cpio.
    fn host_cpio(archive: &[u8]) -> Option<String> {
        let mut child = Command::new("cpio")
            .args(["-itv", "--quiet", "--numeric-uid-gid"])
            .env("TZ", "UTC")
            .env("LC_ALL", "C")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        child.stdin.take().unwrap().write_all(archive).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        Some(String::from_utf8(output.stdout).unwrap())
    }

    /// Name, permissions and contents of each entry, as the crate reads them back.
    fn read_back(mut archive: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        loop {
            let reader = cpio::newc::Reader::new(archive).unwrap();
            if reader.entry().is_trailer() {
                return entries;
            }
            let (name, mode) = (reader.entry().name().to_owned(), reader.entry().mode());
            let mut contents = Vec::new();
            archive = reader.to_writer(&mut contents).unwrap();
            entries.push((name, mode, contents));
        }
    }

    #[test]
    fn directories_come_before_what_is_in_them() {
        let entries = read_back(&sample().archive());
        let expected = [
            ("a", 0o100_644, ""),
            ("bin", 0o040_755, ""),
            ("bin/odd", 0o100_755, "12345"),
            ("bin/sh", 0o120_777, "odd"),
            ("tmp", 0o040_755, ""),
            ("tmp/deep", 0o040_755, ""),
        ];
        let expected: Vec<_> = expected
            .map(|(name, mode, contents)| (name.to_owned(), mode, contents.as_bytes().to_vec()))
            .into();
        assert_eq!(entries, expected);
    }

    #[test]
    fn the_hosts_cpio_reads_the_archive() {
        let Some(listing) = host_cpio(&sample().archive()) else { return };
        let lines: Vec<&str> = listing.lines().collect();
        assert_eq!(lines.len(), 6, "{listing}");
        assert!(lines[2].starts_with("-rwxr-xr-x   1 0        0               5 Jan  1  1970"));
        assert!(lines[2].ends_with(" bin/odd"), "{listing}");
        assert!(lines[3].ends_with(" bin/sh -> odd"), "{listing}");
    }

    #[test]
    fn entries_in_another_order_give_equal_bytes() {
        let mut files = Initramfs::new();
        files.file("/a", PLAIN, "").unwrap();
        files.directory("/tmp/deep").unwrap();
        files.symlink("/bin/sh", "odd").unwrap();
        files.file("/bin/odd", EXECUTABLE, "12345").unwrap();
        assert_eq!(files.archive(), sample().archive());
    }

    #[test]
    fn paths_that_lead_nowhere_are_refused() {
        let mut files = sample();
        for path in ["", "bin/x", "/", "/.", "/../x", "/a/../b", "/x\0y", "/TRAILER!!!"] {
            let problem = files.file(path, PLAIN, "x").unwrap_err();
            assert!(matches!(problem, Problem::Wrong(_)), "{path:?}: {problem}");
        }
        assert_eq!(files.archive(), sample().archive(), "nothing was added");
    }

    #[test]
    fn two_things_at_one_path_are_refused() {
        let mut files = sample();
        let twice = files.file("/bin//odd", PLAIN, "x").unwrap_err();
        assert!(twice.to_string().contains("two files have the path /bin//odd"), "{twice}");
        let below = files.file("/a/b", PLAIN, "x").unwrap_err();
        assert!(below.to_string().contains("/a is not a directory"), "{below}");
        assert!(files.directory("/a").is_err());
        assert!(files.directory("/bin").is_ok());
    }
}
