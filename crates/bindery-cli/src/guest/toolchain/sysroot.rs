//! `core`, `alloc` and `compiler_builtins` for bare metal, compiled from the source in Debian's
//! Rust.
//!
//! A sysroot is built once for each target, in about half a minute, and rebuilt when the compiler
//! or the recipe changes. Both are part of the sysroot's name: cargo rebuilds crates when flags
//! change, but it does not notice changes inside a sysroot.
//!
//! Cargo can compile the standard library only with an unstable option, which a stable compiler
//! accepts under `RUSTC_BOOTSTRAP=1`. The variable is set only for this step. Otherwise crates that
//! test for unstable features would find them, and a kernel that builds here would not build
//! elsewhere.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::{debian_cargo, debian_rustc};
use crate::guest::{Problem, process, workspace};

/// The libraries in a sysroot.
const LIBRARIES: [&str; 3] = ["core", "alloc", "compiler_builtins"];

const MANIFEST: &str = "\
[package]
name = \"sysroot\"
version = \"0.0.0\"
edition = \"2024\"

[profile.release]
panic = \"abort\"

[workspace]
";

const SOURCE: &str = "#![no_std]\n";

/// A kernel that is optimized as a whole needs the bitcode. Cargo leaves it out unless the package
/// asks for it.
const FLAGS: [&str; 1] = ["-Cembed-bitcode=yes"];

/// The sysroot for a target; built if necessary.
///
/// # Errors
/// If the sysroot cannot be built or stored.
pub fn ready(target: &str) -> Result<PathBuf, Problem> {
    let directory = workspace::target("sysroot")?.join(target);
    let failed = |error: io::Error| Problem::io("store a sysroot at", &directory, &error);
    fs::create_dir_all(&directory).map_err(failed)?;
    // The lock is held until the end of this function, so one process builds while the others wait
    // and then find the result.
    let lock = File::create(directory.join("lock")).map_err(failed)?;
    lock.lock().map_err(failed)?;
    let sysroot = directory.join(name(&process::output(debian_rustc().arg("-vV"))?));
    if sysroot.is_dir() {
        return Ok(sysroot);
    }
    let started = Instant::now();
    eprintln!("bindery: building core and alloc for {target} (once, about half a minute)");
    let libraries = compile(target, &directory)?;
    let partial = directory.join("partial");
    remove(&partial)?;
    install(&libraries, &partial.join("lib/rustlib").join(target).join("lib"))?;
    fs::rename(&partial, &sysroot).map_err(failed)?;
    eprintln!("bindery: built them in {} s", started.elapsed().as_secs());
    Ok(sysroot)
}

/// The name of the sysroot of a compiler, from the compiler's description.
fn name(compiler: &str) -> String {
    let mut hasher = DefaultHasher::new();
    (compiler, MANIFEST, SOURCE, FLAGS, LIBRARIES).hash(&mut hasher);
    format!("sysroot-{:016x}", hasher.finish())
}

fn remove(directory: &Path) -> Result<(), Problem> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Problem::io("remove", directory, &error))
        }
        _ => Ok(()),
    }
}

/// Compiles the libraries and returns cargo's output directory.
fn compile(target: &str, directory: &Path) -> Result<PathBuf, Problem> {
    let package = directory.join("package");
    let sources = package.join("src");
    let built = package.join("target").join(target).join("release/deps");
    let failed = |error: io::Error| Problem::io("store a sysroot at", &package, &error);
    remove(&package)?;
    fs::create_dir_all(&sources).map_err(failed)?;
    fs::write(package.join("Cargo.toml"), MANIFEST).map_err(failed)?;
    fs::write(sources.join("lib.rs"), SOURCE).map_err(failed)?;
    let mut command = debian_cargo();
    command.current_dir(&package).env("RUSTC_BOOTSTRAP", "1");
    command.args(["build", "--release", "--quiet", "--target", target, "--target-dir", "target"]);
    command.arg(format!("-Zbuild-std={}", LIBRARIES.join(",")));
    command.arg("-Zbuild-std-features=compiler-builtins-mem");
    command.arg("--config").arg(format!("target.{target}.rustflags={FLAGS:?}"));
    process::output(&mut command)?;
    Ok(built)
}

/// Copies only the libraries, to the directory where the compiler looks for them.
fn install(built: &Path, libraries: &Path) -> Result<(), Problem> {
    let failed = |error: io::Error| Problem::io("store libraries at", libraries, &error);
    fs::create_dir_all(libraries).map_err(failed)?;
    for name in LIBRARIES {
        let start = format!("lib{name}-");
        let mut found = fs::read_dir(built)
            .map_err(|error| Problem::io("read", built, &error))?
            .flatten()
            .filter(|entry| {
                let file = entry.file_name();
                let file = file.to_string_lossy();
                file.starts_with(&start) && file.ends_with(".rlib")
            });
        let library = found.next().ok_or_else(|| {
            Problem::Failed(format!(
                "cargo succeeded, but left no {start}*.rlib in {}; remove that directory and try again",
                built.display()
            ))
        })?;
        fs::copy(library.path(), libraries.join(library.file_name())).map_err(failed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_compiler_makes_another_sysroot() {
        let (one, other) = ("rustc 1.96.0\nrelease: 1.96.0\n", "rustc 1.96.1\nrelease: 1.96.1\n");
        assert_eq!(name(one), name(one));
        assert_ne!(name(one), name(other));
    }
}
