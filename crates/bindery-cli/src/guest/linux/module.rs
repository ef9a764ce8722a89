//! Modules for Debian's Linux, built from our own sources.
//!
//! A module fits only one kernel, because it is built with that kernel's headers, configuration,
//! build system and compiler. All of these come from Debian's packages of the kernel's own suite.
//! They are unpacked under `target`, once for each kernel; `make` and a shell are the host's.

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::borrowed;
use crate::guest::packages::PackageList;
use crate::guest::requirements::Requirement;
use crate::guest::{Architecture, Problem, process, programs, workspace};

/// The directory with the assembler, under the name that the compiler uses.
const ASSEMBLER: &str = "assembler";

/// The tools that build a module.
#[derive(Clone, Debug)]
struct Kit {
    /// The release of the kernel, which ends with its flavour.
    release: String,
    /// The directory of the unpacked packages.
    root: PathBuf,
    compiler: Compiler,
}

/// A compiler, by the name of its program: `x86_64-linux-gnu-gcc-16`.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Compiler {
    /// `x86_64-linux-gnu`
    triple: String,
    /// `16`
    version: String,
}

/// Builds the module `name` from `programs/modules` for the kernel of [`super::newest`], unless it
/// exists and is newer than all its inputs.
///
/// # Errors
/// If an input is missing and cannot be fetched, or the source does not compile.
pub fn build(architecture: Architecture, name: &str) -> Result<PathBuf, Problem> {
    let release = release(&super::newest(architecture)?)?;
    let directory = workspace::target("guest/module")?.join(&release);
    let sources = workspace::root()?.join("programs");
    let file = format!("{name}.ko");
    let module = directory.join(&file);
    let inputs = ["modules/Kbuild", &format!("modules/{name}.c"), "include/mark.h"];
    let paths = inputs.iter().map(|input| sources.join(input));
    let made_from: Vec<PathBuf> = paths.chain(env::current_exe().ok()).collect();
    if programs::is_newer(&module, &made_from) {
        return Ok(module);
    }
    Requirement::Make.demand()?;
    let kit = Kit::ready(architecture, release, &directory)?;
    // Built in another place and then renamed, because another process may be building the same
    // module.
    let failed = |error| Problem::io("write", &module, &error);
    let aside = tempfile::tempdir_in(&directory).map_err(failed)?;
    for directory in ["modules", "include"] {
        fs::create_dir(aside.path().join(directory)).map_err(failed)?;
    }
    for input in inputs {
        fs::copy(sources.join(input), aside.path().join(input)).map_err(failed)?;
    }
    process::output(&mut kit.make(&aside.path().join("modules")))?;
    fs::rename(aside.path().join("modules").join(&file), &module).map_err(failed)?;
    Ok(module)
}

/// The release of an unpacked kernel: the name of the directory that contains the image.
pub(super) fn release(image: &Path) -> Result<String, Problem> {
    let directory = image.parent().and_then(Path::file_name);
    directory.map(|name| name.to_string_lossy().into_owned()).ok_or_else(|| {
        Problem::Failed(format!(
            "cannot tell the release of {}: its directory must have the release's name",
            image.display()
        ))
    })
}

impl Kit {
    fn ready(
        architecture: Architecture,
        release: String,
        directory: &Path,
    ) -> Result<Self, Problem> {
        let root = directory.join("packages");
        let failed = |error| Problem::io("unpack packages below", directory, &error);
        fs::create_dir_all(directory).map_err(failed)?;
        // The lock is held until the end of this function, so one process fetches while the others
        // wait and then find the result.
        let lock = File::create(directory.join("lock")).map_err(failed)?;
        lock.lock().map_err(failed)?;
        if !root.is_dir() {
            // Unpacked to another place and then renamed, so that the directory is always complete.
            let aside = tempfile::tempdir_in(directory).map_err(failed)?;
            fetch(architecture, &release, aside.path())?;
            fs::rename(aside.keep(), &root).map_err(failed)?;
        }
        let compiler = Compiler::of_kernel(&root, &release)?;
        Ok(Self { release, root, compiler })
    }

    /// The command that builds the modules in a directory.
    fn make(&self, modules: &Path) -> Command {
        let Self { release, root, compiler } = self;
        let Compiler { triple, .. } = compiler;
        let version = version(release);
        let headers = sources(root, release);
        let argument = |name: &str, path: &Path| format!("{name}={}", path.display());
        let program = root.join("usr/bin").join(format!("{triple}-gcc-{}", compiler.version));
        let assembler = root.join(ASSEMBLER);
        let mut make = Command::new("make");
        process::without_cargo_settings(&mut make).env_remove("MAKEFLAGS").env("LC_ALL", "C");
        borrowed::locate(&mut make, root);
        make.arg("--silent").arg("--directory").arg(&headers);
        // The Makefile in that directory includes the Makefile at the path where Debian installs
        // the packages.
        make.arg("--file").arg(sources(root, &format!("{version}-common")).join("Makefile"));
        make.arg(argument("KBUILD_OUTPUT", &headers)).arg(argument("M", modules));
        make.arg(argument("CROSS_COMPILE", &root.join(format!("usr/bin/{triple}-"))));
        make.arg(format!("CC={} -B{}/", program.display(), assembler.display()));
        // Debug information is left out, because the module must be identical wherever it is built
        // and does not need it.
        make.args(["KCFLAGS=-g0", "CONFIG_DEBUG_INFO_BTF_MODULES=", "PAHOLE=true", "modules"]);
        make
    }
}

fn fetch(architecture: Architecture, release: &str, root: &Path) -> Result<(), Problem> {
    let host = Architecture::host().ok_or_else(|| {
        Problem::Failed("modules of Linux can be built only on x86-64 and AArch64 hosts".to_owned())
    })?;
    eprintln!("bindery: fetching headers and compiler of Linux {release}, 70 MB (once)");
    super::packages(architecture)?.unpack(&format!("linux-headers-{release}"), root)?;
    let version = version(release);
    let compiler = Compiler::of_kernel(root, release)?;
    let packages = [
        compiler.package(),
        format!("linux-kbuild-{version}"),
        format!("linux-headers-{version}-common"),
    ];
    let packages = packages.each_ref().map(String::as_str);
    PackageList::new(host, super::SUITE)?.unpack_with_dependencies(&packages, root)?;
    let kbuild = format!("usr/lib/linux-kbuild-{version}");
    borrowed::prepare(root, &["usr/bin", "usr/libexec", &kbuild])?;
    // The compiler would start the host's assembler, which may be too old for its output.
    let link = root.join(ASSEMBLER).join("as");
    let failed = |error| Problem::io("write", &link, &error);
    fs::create_dir_all(root.join(ASSEMBLER)).map_err(failed)?;
    let target = format!("../usr/bin/{}-as", compiler.triple);
    symlink(target, &link).map_err(failed)
}

/// The path of the headers in a package.
fn sources(root: &Path, name: &str) -> PathBuf {
    root.join("usr/src").join(format!("linux-headers-{name}"))
}

/// The release without the flavour, which names the packages that all flavours share.
fn version(release: &str) -> &str {
    let flavours = Architecture::ALL.map(super::flavour);
    flavours.iter().find_map(|flavour| release.strip_suffix(flavour)).unwrap_or(release)
}

impl Compiler {
    /// The compiler that built a kernel.
    fn of_kernel(root: &Path, release: &str) -> Result<Self, Problem> {
        let path = sources(root, release).join(".config");
        let configuration =
            fs::read_to_string(&path).map_err(|error| Problem::io("read", &path, &error))?;
        Self::read(&configuration).ok_or_else(|| {
            Problem::Failed(format!(
                "{} does not name the GCC that built Linux (CONFIG_CC_VERSION_TEXT)",
                path.display()
            ))
        })
    }

    /// Reads the compiler from the configuration of a kernel.
    fn read(configuration: &str) -> Option<Self> {
        let mut lines = configuration.lines();
        let text = lines.find_map(|line| line.strip_prefix("CONFIG_CC_VERSION_TEXT=\""))?;
        let (triple, version) = text.split_whitespace().next()?.split_once("-gcc-")?;
        Some(Self { triple: triple.to_owned(), version: version.to_owned() })
    }

    fn package(&self) -> String {
        format!("gcc-{}-{}", self.version, self.triple.replace('_', "-"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compiler_is_that_of_the_kernel() {
        let configuration = "CONFIG_X=y\n\
            CONFIG_CC_VERSION_TEXT=\"x86_64-linux-gnu-gcc-16 (Debian 16.2.0-4) 16.2.0\"\n";
        let compiler = Compiler::read(configuration).unwrap();
        assert_eq!((&*compiler.triple, &*compiler.version), ("x86_64-linux-gnu", "16"));
        assert_eq!(compiler.package(), "gcc-16-x86-64-linux-gnu");
        for other in ["", "CONFIG_CC_VERSION_TEXT=\"clang version 22\"\n"] {
            assert_eq!(Compiler::read(other), None);
        }
    }

    #[test]
    fn packages_of_all_flavours_have_no_flavour() {
        assert_eq!(version("7.2.13+deb14-cloud-arm64"), "7.2.13+deb14");
        assert_eq!(version("7.2.13+deb14"), "7.2.13+deb14");
    }

    #[test]
    fn the_release_is_the_directory_of_the_image() {
        let image = Path::new("usr/lib/modules/7.2.13+deb14-cloud-amd64/vmlinuz");
        assert_eq!(release(image).unwrap(), "7.2.13+deb14-cloud-amd64");
        assert!(release(Path::new("vmlinuz")).is_err());
    }
}
