//! Builds the applications as static programs when one of their inputs has changed.
//!
//! Libraries and sources are Debian's. They are fetched with apt-get, which checks them against
//! Debian's signed index. They are unpacked under `target/guest`; nothing is installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use bindery_cli::guest::packages::{PackageList, Sources};
use bindery_cli::guest::programs::{CLibrary, Variant};
use bindery_cli::guest::requirements::Requirement;
use bindery_cli::guest::{Architecture, Problem, executable, process, programs, workspace};

use super::suite::{Application, Build};

/// The functions of Redis and of its C library whose calls are redirected to functions of the
/// client.
const WRAPPED: [&str; 7] = ["main", "socket", "bind", "listen", "accept", "accept4", "setsockopt"];

/// The files of the interpreter.
const QUICKJS: [&str; 5] = ["quickjs.c", "libregexp.c", "libunicode.c", "cutils.c", "dtoa.c"];

/// The suites of the sources. The suite of Debian 12 lacks some programs.
const REDIS_SUITE: &str = "bookworm";
const QUICKJS_SUITE: &str = "sid";

/// The directory of the sources.
pub fn directory() -> Result<PathBuf, Problem> {
    Ok(workspace::root()?.join("programs/applications"))
}

/// The program that runs the others with a swap device.
///
/// # Errors
/// The errors of [`build`].
pub fn runner(architecture: Architecture) -> Result<PathBuf, Problem> {
    programs::build(architecture, &directory()?.join("run.c"))
}

/// Builds an application, unless it exists and is newer than all its inputs; `None` for a script.
///
/// # Errors
/// If a compiler is missing, an input cannot be fetched, or the program does not compile.
pub fn build(
    architecture: Architecture,
    application: &Application,
) -> Result<Option<PathBuf>, Problem> {
    let source = directory()?.join(application.source());
    match application.build {
        Build::Script => return Ok(None),
        Build::C => return programs::build(architecture, &source).map(Some),
        Build::Glibc => {
            let variant = Variant { library: CLibrary::Glibc, ..Variant::USUAL };
            return programs::build_variant(architecture, &source, variant).map(Some);
        }
        Build::Library { .. } | Build::Go | Build::QuickJs | Build::Redis => {}
    }
    let place = workspace::target("programs")?.join(architecture.directory()).join("applications");
    let built = place.join(application.name);
    let header = workspace::root()?.join("programs/include/answer.h");
    if programs::is_newer(&built, &[source.clone(), header]) {
        return Ok(Some(built));
    }
    fs::create_dir_all(&place).map_err(|error| Problem::io("make", &place, &error))?;
    let aside =
        tempfile::tempdir_in(&place).map_err(|error| Problem::io("write to", &place, &error))?;
    let program = aside.path().join(application.name);
    match application.build {
        Build::Library { package, file } => {
            with_library(architecture, &source, package, file, &program)?;
        }
        Build::Go => go(architecture, &source, &program)?,
        Build::QuickJs => quickjs(architecture, &source, &program)?,
        Build::Redis => redis(architecture, &source, aside.path(), &program)?,
        Build::Script | Build::C | Build::Glibc => {}
    }
    executable::read_static(&program)?;
    fs::rename(&program, &built).map_err(|error| Problem::io("write", &built, &error))?;
    Ok(Some(built))
}

/// A compiler with a static glibc, which Debian's libraries require.
fn compiler(architecture: Architecture) -> Result<Command, Problem> {
    let requirement = Requirement::GlibcCompiler(architecture);
    requirement.demand()?;
    let mut command = Command::new(requirement.program());
    command.args(["-static", "-pthread", "-I"]).arg(workspace::root()?.join("programs/include"));
    Ok(command)
}

fn with_library(
    architecture: Architecture,
    source: &Path,
    package: &str,
    file: &str,
    program: &Path,
) -> Result<(), Problem> {
    let unpacked = workspace::target("guest/libraries")?.join(architecture.debian());
    let triple = format!("{}-linux-gnu", architecture.directory());
    let library = unpacked.join("usr/lib").join(&triple).join(file);
    if !library.is_file() {
        eprintln!("bindery: fetching {package} for {architecture} (once)");
        let list = PackageList::of_this_debian(architecture)?;
        if !library.is_file() {
            list.unpack(package, &unpacked)?;
        }
    }
    let headers = unpacked.join("usr/include");
    let mut command = compiler(architecture)?;
    command.arg("-O2").arg("-I").arg(&headers).arg("-I").arg(headers.join(triple));
    command.arg("-o").arg(program).arg(source).arg(library).arg("-lm");
    process::output(&mut command).map(drop)
}

fn go(architecture: Architecture, source: &Path, program: &Path) -> Result<(), Problem> {
    let mut command = Command::new("go");
    command.arg("build").arg("-o").arg(program).arg(source);
    command.env("CGO_ENABLED", "0").env("GOOS", "linux").env("GOARCH", architecture.debian());
    command.env("GO111MODULE", "off").env("GOTOOLCHAIN", "local").env("GOPROXY", "off");
    command.env("GOCACHE", workspace::target("guest/go")?);
    match process::output(&mut command) {
        Err(Problem::Missing(_)) => Err(Problem::Missing(
            "Go (go) is not installed: on Debian, run `apt-get install golang-go`".to_owned(),
        )),
        other => other.map(drop),
    }
}

/// The sources of a program, as Debian has them, unpacked.
fn sources(package: &str, suite: &str) -> Result<PathBuf, Problem> {
    let directory = workspace::target("guest/sources")?.join(package);
    if !directory.is_dir() {
        eprintln!("bindery: fetching the source of {package} (once)");
        let list = Sources::new(suite)?;
        if !directory.is_dir() {
            list.unpack(package, &directory)?;
        }
    }
    Ok(directory)
}

fn quickjs(architecture: Architecture, source: &Path, program: &Path) -> Result<(), Problem> {
    let sources = sources("quickjs", QUICKJS_SUITE)?;
    let mut command = compiler(architecture)?;
    command.args(["-O1", "-w", "-fwrapv", "-D_GNU_SOURCE", "-DCONFIG_VERSION=\"\"", "-I"]);
    command.arg(&sources).arg("-o").arg(program).arg(source);
    command.args(QUICKJS.map(|file| sources.join(file))).arg("-lm");
    process::output(&mut command).map(drop)
}

fn redis(
    architecture: Architecture,
    source: &Path,
    aside: &Path,
    program: &Path,
) -> Result<(), Problem> {
    Requirement::Make.demand()?;
    let client = aside.join("client.o");
    process::output(compiler(architecture)?.args(["-O2", "-c", "-o"]).arg(&client).arg(source))?;
    // Built in a copy, because the objects are for one architecture. The program next to the copy
    // is named `redis`.
    let copy = aside.join("source");
    let sources = sources("redis", REDIS_SUITE)?;
    process::output(Command::new("cp").arg("-r").arg(sources).arg(&copy))?;
    let wraps = WRAPPED.map(|name| format!("-Wl,--wrap={name}")).join(" ");
    let compiler = Requirement::GlibcCompiler(architecture).program();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut make = Command::new("make");
    make.arg("-C").arg(copy.join("src")).arg(format!("-j{processors}"));
    make.arg(format!("CC={compiler}"));
    if let Some(prefix) = compiler.strip_suffix("gcc") {
        make.arg(format!("AR={prefix}ar")).arg(format!("RANLIB={prefix}ranlib"));
    }
    make.args(["MALLOC=libc", "BUILD_TLS=no", "USE_SYSTEMD=no", "OPTIMIZATION=-O1", "DEBUG="]);
    make.args(["CFLAGS=-static -w", "LDFLAGS=-static"]);
    make.arg(format!("REDIS_LDFLAGS={} {wraps}", client.display())).arg("redis-server");
    make.env("SOURCE_DATE_EPOCH", "0").env_remove("MAKEFLAGS").env_remove("MFLAGS");
    process::output(&mut make)?;
    let server = copy.join("src/redis-server");
    fs::rename(&server, program).map_err(|error| Problem::io("move", &server, &error))
}
