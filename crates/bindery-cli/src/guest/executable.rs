//! The properties of an ELF file: its architecture, and whether the kernel can start it without an
//! interpreter.

use std::fs;
use std::path::Path;

use object::Endianness;
use object::elf::{EM_AARCH64, EM_X86_64, ET_DYN, ET_EXEC, FileHeader64, PT_INTERP};
use object::read::elf::{FileHeader, ProgramHeader};

use super::{Architecture, Problem};

/// The linkage of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Linkage {
    /// The program contains its libraries.
    Static,
    /// The program needs an interpreter to load its libraries.
    Dynamic {
        /// The path of the interpreter.
        interpreter: String,
    },
}

/// The relevant properties of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Executable {
    /// The architecture that the program is for.
    pub architecture: Architecture,
    /// Whether the program is static or dynamic.
    pub linkage: Linkage,
}

/// Reads a program from a file.
///
/// # Errors
/// If the file cannot be read, or is not a program for an architecture of the machines.
pub fn read(path: &Path) -> Result<Executable, Problem> {
    let bytes = fs::read(path).map_err(|error| Problem::io("read", path, &error))?;
    parse(&bytes).map_err(|why| Problem::Wrong(format!("{} {why}", path.display())))
}

/// Reads a static program from a file.
///
/// # Errors
/// The errors of [`read`], or if the program is dynamic.
pub fn read_static(path: &Path) -> Result<Architecture, Problem> {
    let executable = read(path)?;
    match executable.linkage {
        Linkage::Static => Ok(executable.architecture),
        Linkage::Dynamic { interpreter } => Err(Problem::Wrong(format!(
            "{} is linked dynamically (its interpreter is {interpreter}), and the kernel starts \
             only static programs; link it with -static",
            path.display()
        ))),
    }
}

fn parse(bytes: &[u8]) -> Result<Executable, String> {
    let no_elf = |_| {
        if bytes.starts_with(b"#!") {
            "is a script; add it with --file, and run its interpreter: `bindery run --file \
             SCRIPT:/script busybox sh /script`"
                .to_owned()
        } else {
            "is not a 64-bit ELF program; give a static one, or a C file whose name ends in .c"
                .to_owned()
        }
    };
    let damaged = || "is a damaged ELF file; build it again".to_owned();
    let header = FileHeader64::<Endianness>::parse(bytes).map_err(no_elf)?;
    let endian = header.endian().map_err(no_elf)?;
    let architecture = match (header.e_machine(endian), endian) {
        (EM_X86_64, Endianness::Little) => Architecture::X86_64,
        (EM_AARCH64, Endianness::Little) => Architecture::AArch64,
        (other, _) => {
            return Err(format!(
                "is built for a machine (ELF number {other}) on which the kernel does not run; build \
                 it for x86-64 or aarch64"
            ));
        }
    };
    if !matches!(header.e_type(endian), ET_EXEC | ET_DYN) {
        return Err("is an ELF file, but not a program; link it with -static first".to_owned());
    }
    let mut linkage = Linkage::Static;
    for segment in header.program_headers(endian, bytes).map_err(|_| damaged())? {
        if segment.p_type(endian) == PT_INTERP {
            let data = segment.data(endian, bytes).map_err(|()| damaged())?;
            let name = data.split(|&byte| byte == 0).next().unwrap_or(data);
            let interpreter = String::from_utf8_lossy(name).into_owned();
            linkage = Linkage::Dynamic { interpreter };
        }
    }
    Ok(Executable { architecture, linkage })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Vec<u8> {
        fs::read(std::env::current_exe().unwrap()).unwrap()
    }

    #[test]
    fn this_test_is_a_dynamic_program() {
        let executable = parse(&own()).unwrap();
        assert_eq!(Some(executable.architecture), Architecture::host());
        let Linkage::Dynamic { interpreter } = executable.linkage else { panic!("it is dynamic") };
        assert!(interpreter.starts_with("/lib") && interpreter.contains("ld"), "{interpreter}");
        let problem = read_static(&std::env::current_exe().unwrap()).unwrap_err();
        let text = problem.to_string();
        assert!(text.contains(&interpreter) && text.contains("-static"), "{text}");
    }

    #[test]
    fn what_is_no_program_is_refused() {
        assert!(parse(b"").unwrap_err().contains("not a 64-bit ELF"));
        assert!(parse(b"#!/bin/sh\n").unwrap_err().contains("busybox sh /script"));
        let mut object = own();
        object[16] = 1;
        assert!(parse(&object).unwrap_err().contains("not a program"));
        let mut riscv = own();
        riscv[18] = 243;
        assert!(parse(&riscv).unwrap_err().contains("243"));
        assert!(parse(&own()[..64]).unwrap_err().contains("damaged"));
        let missing = read(Path::new("/nonexistent")).unwrap_err().to_string();
        assert!(missing.contains("/nonexistent"), "{missing}");
    }
}
