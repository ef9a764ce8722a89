//! C programs for the machine, which are built as static ELF files when their source has changed.
//!
//! A source `programs/tests/start.c` becomes `target/programs/x86_64/tests/start`; sources
//! elsewhere get a directory named after their place.

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use super::requirements::Requirement;
use super::{Architecture, Problem, executable, process, workspace};

/// The C library of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CLibrary {
    /// musl on x86-64, glibc on AArch64.
    Usual,
    /// glibc.
    Glibc,
}

/// The linkage of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Link {
    /// A program for fixed addresses.
    Static,
    /// A program for any address, which relocates itself. Debian's musl does not link such
    /// programs, so they always use glibc.
    StaticPie,
}

/// A variant of a program's build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Variant {
    /// The program's C library.
    pub library: CLibrary,
    /// How the program is linked.
    pub link: Link,
}

impl Variant {
    /// The default build.
    pub const USUAL: Self = Self { library: CLibrary::Usual, link: Link::Static };

    fn requirement(self, architecture: Architecture) -> Requirement {
        match self {
            Self { library: CLibrary::Usual, link: Link::Static } => {
                Requirement::CCompiler(architecture)
            }
            _ => Requirement::GlibcCompiler(architecture),
        }
    }

    fn suffix(self) -> &'static str {
        match (self.library, self.link) {
            (CLibrary::Usual, Link::Static) => "",
            (CLibrary::Glibc, Link::Static) => ".glibc",
            (_, Link::StaticPie) => ".static-pie",
        }
    }
}

/// As [`build_variant`], in the usual variant.
///
/// # Errors
/// The errors of [`build_variant`].
pub fn build(architecture: Architecture, source: &Path) -> Result<PathBuf, Problem> {
    build_variant(architecture, source, Variant::USUAL)
}

/// Builds a program from one C file, unless the program exists and is newer than all its inputs.
///
/// # Errors
/// If the compiler is not installed, or rejects the source.
pub fn build_variant(
    architecture: Architecture,
    source: &Path,
    variant: Variant,
) -> Result<PathBuf, Problem> {
    let source = source.canonicalize().map_err(|error| Problem::io("read", source, &error))?;
    let include = workspace::root()?.join("programs/include");
    let program = place(architecture, &source, variant)?;
    if is_newer(&program, &inputs(&source, &include)) {
        return Ok(program);
    }
    let requirement = variant.requirement(architecture);
    requirement.demand()?;
    let directory = program.parent().unwrap_or(Path::new("."));
    let failed = |error| Problem::io("write", &program, &error);
    fs::create_dir_all(directory).map_err(failed)?;
    // Built in another place and then renamed, because another process may be building or starting
    // the same program.
    let aside = tempfile::tempdir_in(directory).map_err(failed)?;
    let built = aside.path().join("program");
    let mut compiler = Command::new(requirement.program());
    compiler.args(["-O2", "-g0", "-pthread"]);
    compiler.arg(match variant.link {
        Link::Static => "-static",
        Link::StaticPie => "-static-pie",
    });
    compiler.arg("-I").arg(&include).arg("-o").arg(&built).arg(&source).arg("-lm");
    process::output(&mut compiler)?;
    let found = executable::read_static(&built)?;
    if found != architecture {
        return Err(Problem::Failed(format!(
            "{} builds programs for {found}, and this one is for {architecture}; `bindery doctor` \
             lists the compilers that Bindery needs",
            requirement.program()
        )));
    }
    fs::rename(&built, &program).map_err(failed)?;
    Ok(program)
}

fn place(architecture: Architecture, source: &Path, variant: Variant) -> Result<PathBuf, Problem> {
    let (Some(directory), Some(stem)) = (source.parent(), source.file_stem()) else {
        return Err(Problem::Wrong(format!(
            "{} does not end in a file name; give the path of a C file",
            source.display()
        )));
    };
    let programs = workspace::root()?.join("programs");
    let programs = programs.canonicalize().unwrap_or(programs);
    let group = match directory.strip_prefix(&programs) {
        Ok(group) => group.to_owned(),
        Err(_) => {
            let mut hasher = DefaultHasher::new();
            directory.hash(&mut hasher);
            PathBuf::from(format!("elsewhere-{:016x}", hasher.finish()))
        }
    };
    let mut name = stem.to_owned();
    name.push(variant.suffix());
    Ok(workspace::target("programs")?.join(architecture.directory()).join(group).join(name))
}

/// All inputs of a program: the source, the headers, and this executable, which contains the flags.
fn inputs(source: &Path, include: &Path) -> Vec<PathBuf> {
    let beside = source.parent().into_iter();
    let headers = beside.chain([include]).filter_map(|directory| directory.read_dir().ok());
    let headers = headers.flatten().flatten().map(|entry| entry.path());
    let headers = headers.filter(|path| path.extension().is_some_and(|name| name == "h"));
    [source.to_owned()].into_iter().chain(headers).chain(env::current_exe().ok()).collect()
}

/// Whether a build output exists and is newer than all its inputs.
#[must_use]
pub fn is_newer(built: &Path, inputs: &[PathBuf]) -> bool {
    let time = |path: &Path| -> Option<SystemTime> { fs::metadata(path).ok()?.modified().ok() };
    let Some(built) = time(built) else { return false };
    inputs.iter().all(|input| time(input).is_some_and(|input| input < built))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_input_rebuilds_a_program() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, age: u64| {
            let path = directory.path().join(name);
            let file = fs::File::create(&path).unwrap();
            let time = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(2_000 - age);
            file.set_modified(time).unwrap();
            path
        };
        let (source, header) = (file("a.c", 100), file("a.h", 90));
        let built = file("a", 50);
        assert!(is_newer(&built, &[source.clone(), header.clone()]));
        file("a.h", 40);
        assert!(!is_newer(&built, &[source.clone(), header]));
        assert!(!is_newer(&directory.path().join("none"), std::slice::from_ref(&source)));
        assert!(!is_newer(&built, &[source, directory.path().join("gone.h")]));
    }

    #[test]
    fn programs_have_places_of_their_own() {
        let place = |source: &str, variant| {
            let path = place(Architecture::AArch64, Path::new(source), variant).unwrap();
            path.strip_prefix(workspace::target("programs").unwrap()).unwrap().to_owned()
        };
        let tests = workspace::root().unwrap().join("programs/tests/start.c");
        let tests = tests.to_str().unwrap();
        assert_eq!(place(tests, Variant::USUAL), Path::new("aarch64/tests/start"));
        let pie = Variant { library: CLibrary::Usual, link: Link::StaticPie };
        assert_eq!(place(tests, pie), Path::new("aarch64/tests/start.static-pie"));
        let (one, two) = (place("/one/a.c", Variant::USUAL), place("/two/a.c", Variant::USUAL));
        assert_ne!(one, two);
    }
}
