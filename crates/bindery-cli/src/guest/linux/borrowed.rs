//! Programs of a newer Debian than the host's, unpacked under `target` with all their libraries.
//!
//! A dynamic program names its loader by an absolute path, `/lib64/...`, which is the host's
//! loader, and the host's C library may be too old for the program. So the program is renamed and
//! replaced by a shell script that starts it with the loader and the libraries unpacked beside it.
//! Programs that start others by their path, such as compilers, need nothing more.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::guest::executable::{self, Linkage};
use crate::guest::{Architecture, Problem};

/// The variable with the directory of the unpacked packages. The scripts do not contain this
/// directory, so that it can be renamed.
const ROOT: &str = "BINDERY_BORROWED";

/// The suffix of renamed programs.
const RENAMED: &str = ".program";

/// Prepares the programs in some of the directories below `root` for this host.
///
/// # Errors
/// If a directory or a program is missing or cannot be changed.
pub fn prepare(root: &Path, directories: &[&str]) -> Result<(), Problem> {
    directories.iter().try_for_each(|directory| prepare_directory(root, &root.join(directory)))
}

/// Passes the directory of the prepared programs to a command and its children.
pub fn locate<'a>(command: &'a mut Command, root: &Path) -> &'a mut Command {
    command.env(ROOT, root)
}

fn prepare_directory(root: &Path, directory: &Path) -> Result<(), Problem> {
    let failed = |error| Problem::io("read", directory, &error);
    let entries: Vec<PathBuf> =
        fs::read_dir(directory).map_err(failed)?.flatten().map(|entry| entry.path()).collect();
    for path in entries {
        if path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            prepare_directory(root, &path)?;
        } else if let Some(loader) = loader(&path) {
            replace(root, &path, &loader)?;
        }
    }
    Ok(())
}

/// The loader of a program for this host.
fn loader(path: &Path) -> Option<String> {
    let executable = executable::read(path).ok()?;
    let Linkage::Dynamic { interpreter } = executable.linkage else { return None };
    (Some(executable.architecture) == Architecture::host()).then_some(interpreter)
}

fn replace(root: &Path, program: &Path, loader: &str) -> Result<(), Problem> {
    let failed = |error| Problem::io("rename", program, &error);
    let mut renamed = program.as_os_str().to_owned();
    renamed.push(RENAMED);
    fs::rename(program, &renamed).map_err(failed)?;
    let place = program.strip_prefix(root).unwrap_or(program);
    fs::write(program, script(place, loader)).map_err(failed)?;
    fs::set_permissions(program, Permissions::from_mode(0o755)).map_err(failed)
}

fn script(program: &Path, loader: &str) -> String {
    let libraries = match Architecture::host() {
        Some(host) => format!("usr/lib/{}-linux-gnu", host.directory()),
        None => "usr/lib".to_owned(),
    };
    let program = program.display();
    // Debian's packages have no files outside of /usr; /lib and /lib64 are links into it.
    format!(
        "#!/bin/sh\n\
         exec \"${ROOT}/usr{loader}\" --argv0 \"$0\" --library-path \"${ROOT}/{libraries}\" \
         \"${ROOT}/{program}{RENAMED}\" \"$@\"\n"
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::guest::process;

    /// The host's own `env` with its loader and its library, as if they had been unpacked.
    fn unpack(root: &Path) {
        let program = Path::new("/usr/bin/env");
        let loader = loader(program).expect("the host's env is a dynamic program");
        let architecture = Architecture::host().unwrap().directory();
        let library = format!("/usr/lib/{architecture}-linux-gnu/libc.so.6");
        let copies = [
            ("/usr/bin/env", "usr/bin/deeper/env".to_owned()),
            (&loader, format!("usr{loader}")),
            (&library, library[1..].to_owned()),
        ];
        for (from, to) in copies {
            let to = root.join(to);
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            fs::copy(from, to).unwrap();
        }
        fs::write(root.join("usr/bin/text"), "no program").unwrap();
        symlink("deeper/env", root.join("usr/bin/link")).unwrap();
    }

    #[test]
    fn a_moved_program_starts_with_its_own_loader() {
        let directory = tempfile::tempdir().unwrap();
        let before = directory.path().join("before");
        unpack(&before);
        prepare(&before, &["usr/bin"]).unwrap();
        let root = directory.path().join("moved since");
        fs::rename(&before, &root).unwrap();
        for name in ["usr/bin/deeper/env", "usr/bin/link"] {
            let mut command = Command::new(root.join(name));
            let printed = process::output(locate(&mut command, &root).arg("GIVEN=by argument"));
            let printed = printed.unwrap();
            assert!(printed.contains("GIVEN=by argument\n"), "{printed}");
            assert!(process::output(command.env(ROOT, "/nowhere")).is_err(), "{name} is a script");
        }
        assert!(root.join("usr/bin/deeper/env.program").is_file());
    }

    #[test]
    fn other_files_than_dynamic_programs_stay_unchanged() {
        let directory = tempfile::tempdir().unwrap();
        unpack(directory.path());
        prepare(directory.path(), &["usr/bin"]).unwrap();
        let text = fs::read_to_string(directory.path().join("usr/bin/text")).unwrap();
        assert_eq!(text, "no program");
        assert!(directory.path().join("usr/bin/link").is_symlink());
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let problem = prepare(directory.path(), &["usr/bin"]).unwrap_err().to_string();
        assert!(problem.contains("usr/bin"), "{problem}");
    }
}
