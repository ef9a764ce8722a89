//! Programs of measurements that are built separately.

use std::path::PathBuf;
use std::process::Command;

use bindery_cli::guest::{Problem, process, workspace};

/// Builds the program of a package on its own, because with the features of the rest of the
/// workspace the core would include counters for tests.
///
/// # Errors
/// If the build fails.
pub fn build(package: &str) -> Result<PathBuf, Problem> {
    // All these programs share one folder, because they build the core with the same flags.
    let target = workspace::target("conflicts")?;
    let mut cargo = Command::new("cargo");
    process::without_cargo_settings(&mut cargo);
    cargo.args(["build", "--release", "--locked", "--package", package]);
    cargo.arg("--manifest-path").arg(workspace::root()?.join("Cargo.toml"));
    cargo.arg("--target-dir").arg(&target);
    process::output(&mut cargo)?;
    Ok(target.join("release").join(package))
}
