//! The directories of the sources and of build outputs.
//!
//! The kernel and the C programs are built on demand, so `bindery` must find the repository. It
//! uses the repository that it was built from or, if that no longer exists, the one that contains
//! the current directory.

use std::env;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::Problem;

/// The file that marks a directory as the repository.
const MARK: &str = "crates/bindery-cli/Cargo.toml";

/// The root of the repository.
///
/// # Errors
/// If the repository is not found.
pub fn root() -> Result<PathBuf, Problem> {
    let built_from = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    let current = env::current_dir().ok();
    let candidates = built_from.into_iter().chain(current.iter().flat_map(|path| path.ancestors()));
    candidates.map(Path::to_owned).find(|path| path.join(MARK).is_file()).ok_or_else(|| {
        Problem::Failed(
            "the kernel is built from Bindery's repository, which is not found; \
             run bindery in a folder of the repository"
                .to_owned(),
        )
    })
}

/// The directory for build outputs with the given name under `target/`; it is created if necessary.
///
/// # Errors
/// If the repository is not found, or the directory cannot be created.
pub fn target(name: &str) -> Result<PathBuf, Problem> {
    let path = root()?.join("target").join(name);
    fs::create_dir_all(&path).map_err(|error| Problem::io("make", &path, &error))?;
    Ok(path)
}

/// Writes a file, unless it already has these contents. A reader sees either the old or the new
/// contents, never a mixture.
///
/// # Errors
/// If the file cannot be written.
pub fn write_if_changed(path: &Path, contents: &[u8]) -> Result<(), Problem> {
    if fs::read(path).is_ok_and(|present| present == contents) {
        return Ok(());
    }
    let failed = |error| Problem::io("write", path, &error);
    let directory = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(directory).map_err(failed)?;
    file.write_all(contents).map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_only_by_other_contents() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        write_if_changed(&path, b"first").unwrap();
        let inode = |path| std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap());
        let first = inode(&path);
        write_if_changed(&path, b"first").unwrap();
        assert_eq!(inode(&path), first);
        write_if_changed(&path, b"second").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"second");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "nothing else remains");
    }

    #[test]
    fn the_repository_of_the_build_is_found() {
        let root = root().unwrap();
        assert!(root.join("crates/bindery/Cargo.toml").is_file(), "{}", root.display());
    }
}
