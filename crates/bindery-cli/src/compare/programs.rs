//! The workloads as programs.
//!
//! Both kernels run the same file, so the C library does not favor one of them. But it determines
//! how many mappings a program has at its start, and with the mappings of glibc, Linux needs some
//! 3,000 instructions more for each call that changes mappings. The recorded figures are those of
//! musl on both architectures. Debian has no musl compiler for AArch64 on other hosts, so there
//! musl is fetched, unpacked under `target`, and passed to the usual compiler.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use bindery_cli::guest::requirements::Requirement;
use bindery_cli::guest::{Architecture, Problem, linux, process, programs, workspace};

/// A workload, and the C library in it.
#[derive(Clone, Debug)]
pub struct Program {
    /// The ELF file.
    pub path: PathBuf,
    /// `musl`, or the reason why it is a different library.
    pub library: String,
}

/// Builds the workload of this name.
///
/// # Errors
/// If there is no compiler for it, or it does not compile.
pub fn build(architecture: Architecture, name: &str) -> Result<Program, Problem> {
    let source = workspace::root()?.join(format!("programs/workloads/{name}.c"));
    match architecture {
        Architecture::X86_64 => {
            let path = programs::build(architecture, &source)?;
            Ok(Program { path, library: "musl".to_owned() })
        }
        Architecture::AArch64 => match musl(architecture) {
            Ok(musl) => {
                let path = build_with(&musl, architecture, &source)?;
                Ok(Program { path, library: "musl".to_owned() })
            }
            Err(problem) => {
                let path = programs::build(architecture, &source)?;
                Ok(Program { path, library: format!("glibc (no musl: {problem})") })
            }
        },
    }
}

/// The directories of musl's headers and libraries.
struct Musl {
    headers: PathBuf,
    libraries: PathBuf,
}

const PACKAGE: &str = "musl-dev";

fn musl(architecture: Architecture) -> Result<Musl, Problem> {
    let directory = workspace::target("guest/musl")?.join(architecture.debian());
    let triple = format!("{}-linux-musl", architecture.directory());
    let musl = Musl {
        headers: directory.join("usr/include").join(&triple),
        libraries: directory.join("usr/lib").join(&triple),
    };
    if !musl.libraries.join("libc.a").is_file() {
        eprintln!("bindery: fetching {PACKAGE} for {architecture} (once)");
        let list = linux::packages(architecture)?;
        // Another process may have fetched musl while this one waited for the list.
        if !musl.libraries.join("libc.a").is_file() {
            list.unpack(PACKAGE, &directory)?;
        }
    }
    Ok(musl)
}

fn build_with(musl: &Musl, architecture: Architecture, source: &Path) -> Result<PathBuf, Problem> {
    let requirement = Requirement::CCompiler(architecture);
    requirement.demand()?;
    let compiler = requirement.program();
    let ask = |what: &str| -> Result<String, Problem> {
        Ok(process::output(Command::new(compiler).arg(what))?.trim_end().to_owned())
    };
    let builtin_headers = ask("-print-file-name=include")?;
    let builtin_library = ask("-print-libgcc-file-name")?;
    let directory = workspace::target("programs")?.join(architecture.directory()).join("musl");
    fs::create_dir_all(&directory).map_err(|error| Problem::io("make", &directory, &error))?;
    let program = directory.join(source.file_stem().unwrap_or_default());
    let aside = tempfile::NamedTempFile::new_in(&directory)
        .map_err(|error| Problem::io("write to", &directory, &error))?;
    let library = |name: &str| musl.libraries.join(name);
    let mut command = Command::new(compiler);
    command.args(["-O2", "-static", "-nostdinc", "-nostdlib", "-isystem"]).arg(&musl.headers);
    command.arg("-isystem").arg(builtin_headers);
    command.arg("-I").arg(workspace::root()?.join("programs/include"));
    command.arg("-o").arg(aside.path()).args([library("crt1.o"), library("crti.o")]);
    command.arg(source).arg(library("libc.a")).arg(builtin_library).arg(library("crtn.o"));
    process::output(&mut command)?;
    let built =
        fs::read(aside.path()).map_err(|error| Problem::io("read", aside.path(), &error))?;
    workspace::write_if_changed(&program, &built)?;
    Ok(program)
}
