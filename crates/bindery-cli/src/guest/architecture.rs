//! The architectures that a machine can have.
//!
//! To add one (RISC-V is next), add a variant here, and the match arms that the compiler then asks
//! for.

use std::fmt;
use std::str::FromStr;

/// An architecture that the reference kernel runs on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Architecture {
    /// x86-64.
    X86_64,
    /// AArch64.
    AArch64,
}

impl Architecture {
    /// All architectures, in display order.
    pub const ALL: [Self; 2] = [Self::X86_64, Self::AArch64];

    /// The name that users read and type.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86-64",
            Self::AArch64 => "aarch64",
        }
    }

    /// The first part of target triples and of the names of QEMU's programs; also the name of the
    /// directories under `target/` for it.
    pub fn directory(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::AArch64 => "aarch64",
        }
    }

    /// The target that the kernel is built for.
    pub fn kernel_target(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-unknown-none",
            Self::AArch64 => "aarch64-unknown-none-softfloat",
        }
    }

    /// The QEMU program.
    pub fn emulator(self) -> &'static str {
        match self {
            Self::X86_64 => "qemu-system-x86_64",
            Self::AArch64 => "qemu-system-aarch64",
        }
    }

    /// The C compiler for programs, linked with the default C library.
    pub fn c_compiler(self) -> &'static str {
        match self {
            Self::X86_64 => "musl-gcc",
            Self::AArch64 => "aarch64-linux-gnu-gcc",
        }
    }

    /// Debian's name for the architecture.
    pub fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::AArch64 => "arm64",
        }
    }

    /// The architecture that this program was built for, if a machine can have it.
    pub fn host() -> Option<Self> {
        match std::env::consts::ARCH {
            "x86_64" => Some(Self::X86_64),
            "aarch64" => Some(Self::AArch64),
            _ => None,
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Architecture {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "x86-64" | "x86_64" | "amd64" => Ok(Self::X86_64),
            "aarch64" | "arm64" => Ok(Self::AArch64),
            _ => Err(format!("the kernel does not run on {text:?}; give x86-64 or aarch64")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_of_an_architecture_is_read_back() {
        for architecture in Architecture::ALL {
            for name in [architecture.name(), architecture.directory(), architecture.debian()] {
                assert_eq!(name.parse(), Ok(architecture));
                assert_eq!(name.to_uppercase().parse(), Ok(architecture));
            }
        }
    }

    #[test]
    fn an_unknown_architecture_is_refused_with_known_ones() {
        let error = "riscv64".parse::<Architecture>().unwrap_err();
        for part in ["riscv64", "x86-64", "aarch64"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
