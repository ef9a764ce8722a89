//! Builds the kernel, makes it bootable, and lists its symbols.

pub mod image;
pub mod symbols;
pub mod text;

use std::fmt;
use std::fs;
use std::path::PathBuf;

use super::toolchain::{self, Toolchain};
use super::{Architecture, Problem, process, workspace};

/// The package of the kernel, and the name of its program.
const PACKAGE: &str = "bindery-kernel";

/// The path at which the kernel looks for its symbols.
pub const SYMBOLS_PATH: &str = "/.bindery/symbols";

/// A kernel that a machine can boot.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The architecture that the kernel is for.
    pub architecture: Architecture,
    /// The image that QEMU boots.
    pub image: PathBuf,
    /// The ELF file that the image was made from; on x86-64 the same file.
    pub elf: PathBuf,
    /// The text of the file at [`SYMBOLS_PATH`].
    pub symbols: String,
    /// The toolchain that built it.
    pub toolchain: Toolchain,
}

/// Builds the kernel, or its changed parts. One line on standard error names the toolchain.
///
/// # Errors
/// If no Rust toolchain can build the kernel, or the build fails.
pub fn build(architecture: Architecture) -> Result<Kernel, Problem> {
    build_with(architecture, Features::All)
}

/// The features of the core that a kernel is built with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Features {
    /// The default features.
    All,
    /// No features, so calls that need one fail.
    None,
}

/// As [`build`], with other features. Both builds have the same path, so each replaces the other.
///
/// # Errors
/// As [`build`].
pub fn build_with(architecture: Architecture, features: Features) -> Result<Kernel, Problem> {
    let target = architecture.kernel_target();
    let toolchain = toolchain::choose(target)?;
    let directory = workspace::root()?.join("crates").join(PACKAGE);
    if !directory.join("Cargo.toml").is_file() {
        return Err(Problem::Failed(format!(
            "the repository has no reference kernel at {}; check it out as a whole",
            directory.display()
        )));
    }
    eprintln!("bindery: the kernel for {architecture} is built with {toolchain}");
    // One directory for each architecture, because builds that share a directory wait for each
    // other.
    let built = workspace::target(&format!("kernel/{}", architecture.directory()))?;
    let mut cargo = toolchain.cargo("build", target, &directory)?;
    cargo.args(["--quiet", "--locked", "--target-dir"]).arg(&built);
    if features == Features::None {
        cargo.arg("--no-default-features");
    }
    process::output(&mut cargo)?;
    let elf = built.join(target).join("release").join(PACKAGE);
    let bytes = fs::read(&elf).map_err(|error| Problem::io("read", &elf, &error))?;
    let symbols = symbols::text(&bytes)?;
    let image = match architecture {
        Architecture::X86_64 => elf.clone(),
        Architecture::AArch64 => {
            let image = elf.with_extension("image");
            workspace::write_if_changed(&image, &image::flat(&bytes)?)?;
            image
        }
    };
    Ok(Kernel { architecture, image, elf, symbols, toolchain })
}

/// The file that cargo built is not an ELF file.
fn no_elf(error: impl fmt::Display) -> Problem {
    Problem::Failed(format!(
        "the kernel that was built is not an ELF file ({error}); remove target/kernel and try again"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_architectures_have_the_same_files() {
        let source = workspace::root().unwrap().join("crates").join(PACKAGE).join("src/arch");
        let files = |architecture: &str| {
            let entries = source.join(architecture).read_dir().unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(files("x86_64"), files("aarch64"));
    }
}
