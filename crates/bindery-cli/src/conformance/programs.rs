//! The tests as programs.
//!
//! The tests are linked with glibc on both architectures, because they look for free addresses,
//! count mappings and lock all of them, which depends on the mappings that glibc creates at
//! startup.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use bindery_cli::guest::requirements::Requirement;
use bindery_cli::guest::{Architecture, Problem, process, programs, workspace};

use super::source::Source;
use super::suite::Test;

/// Files that tests share, in the directory of the tests; each test is linked with them.
const COMMON: [&str; 2] = ["vm_util.c", "hugepage_settings.c"];

/// The headers that Linux's Makefile generates. An empty header means that `liburing` is missing.
const MADE: &str = "local_config.h";

/// Builds a test, unless it exists and is newer than its source and this program.
///
/// # Errors
/// If there is no compiler for it, or it does not compile.
pub fn build(source: &Source, architecture: Architecture, test: &Test) -> Result<PathBuf, Problem> {
    let directory = source.tests();
    let mut inputs = vec![directory.join(format!("{}.c", test.program))];
    inputs.extend(COMMON.map(|file| directory.join(file)));
    if test.program.starts_with("uffd-") {
        inputs.push(directory.join("uffd-common.c"));
    }
    let place = format!("programs/{}/selftests", architecture.directory());
    let place = workspace::target(&place)?;
    let program = place.join(test.program);
    let made_from: Vec<PathBuf> = inputs.iter().cloned().chain(env::current_exe().ok()).collect();
    if programs::is_newer(&program, &made_from) {
        return Ok(program);
    }
    let requirement = Requirement::GlibcCompiler(architecture);
    requirement.demand()?;
    let failed = |error| Problem::io("write", &program, &error);
    let aside = tempfile::tempdir_in(&place).map_err(failed)?;
    let built = aside.path().join("program");
    let mut compiler = Command::new(requirement.program());
    // The options of Linux's own Makefile, but quiet.
    compiler.args(["-static", "-O2", "-w", "-U_FORTIFY_SOURCE", "-D_GNU_SOURCE=", "-pthread"]);
    // Some tests write files beside their source, in a directory that the machine does not have.
    compiler.arg(format!("-fmacro-prefix-map={}=/tmp", directory.display()));
    for headers in source.headers(architecture) {
        compiler.arg("-isystem").arg(headers);
    }
    fs::write(aside.path().join(MADE), "").map_err(failed)?;
    for headers in [&source.shared(), &directory, aside.path()] {
        compiler.arg("-I").arg(headers);
    }
    compiler.arg("-o").arg(&built).args(&inputs).args(["-lrt", "-lm"]);
    process::output(&mut compiler)?;
    fs::rename(&built, &program).map_err(failed)?;
    Ok(program)
}
