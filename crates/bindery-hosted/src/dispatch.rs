//! The architecture, chosen at run time.

use std::fmt;
use std::str::FromStr;

use bindery::arch::{AArch64, Riscv64, Tiny, X86_64};

use crate::mmu::Walk;

/// The architectures of the hosted machine, by the names that users type.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum ArchitectureName {
    /// `x86-64`: four levels.
    X86_64,
    /// `x86-64-la57`: five levels.
    X86_64La57,
    /// `aarch64`: 4 KiB granule, four levels.
    AArch64,
    /// `riscv64-sv39`: three levels.
    Riscv64Sv39,
    /// `riscv64-sv48` or `riscv64`: four levels.
    Riscv64Sv48,
    /// `tiny`: three levels of four entries, for exhaustive tests.
    Tiny,
}

impl ArchitectureName {
    /// All architectures.
    pub const ALL: [Self; 6] = [
        Self::X86_64,
        Self::X86_64La57,
        Self::AArch64,
        Self::Riscv64Sv39,
        Self::Riscv64Sv48,
        Self::Tiny,
    ];

    /// The preferred name of the architecture.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::X86_64 => "x86-64",
            Self::X86_64La57 => "x86-64-la57",
            Self::AArch64 => "aarch64",
            Self::Riscv64Sv39 => "riscv64-sv39",
            Self::Riscv64Sv48 => "riscv64-sv48",
            Self::Tiny => "tiny",
        }
    }
}

impl fmt::Display for ArchitectureName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for ArchitectureName {
    type Err = UnknownArchitecture;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "x86_64" => Ok(Self::X86_64),
            "arm64" => Ok(Self::AArch64),
            "riscv64" => Ok(Self::Riscv64Sv48),
            _ => {
                let known = Self::ALL.into_iter().find(|known| known.as_str() == name);
                known.ok_or_else(|| UnknownArchitecture(name.to_owned()))
            }
        }
    }
}

/// A name that no architecture has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnknownArchitecture(pub String);

impl fmt::Display for UnknownArchitecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = ArchitectureName::ALL.map(ArchitectureName::as_str).join(", ");
        write!(f, "no architecture is called {:?}; there are {known}", self.0)
    }
}

impl std::error::Error for UnknownArchitecture {}

/// Generic work for an architecture that is known only at run time.
pub trait Visitor {
    /// The result of the work.
    type Output;

    /// Does the work.
    fn visit<A: Walk>(self) -> Self::Output;
}

/// Does the visitor's work on the architecture with this name.
pub fn dispatch<V: Visitor>(name: ArchitectureName, visitor: V) -> V::Output {
    match name {
        ArchitectureName::X86_64 => visitor.visit::<X86_64<4>>(),
        ArchitectureName::X86_64La57 => visitor.visit::<X86_64<5>>(),
        ArchitectureName::AArch64 => visitor.visit::<AArch64>(),
        ArchitectureName::Riscv64Sv39 => visitor.visit::<Riscv64<3>>(),
        ArchitectureName::Riscv64Sv48 => visitor.visit::<Riscv64<4>>(),
        ArchitectureName::Tiny => visitor.visit::<Tiny>(),
    }
}

#[cfg(test)]
mod tests {
    use bindery::arch::Arch;

    use super::*;

    struct Name;

    impl Visitor for Name {
        type Output = (&'static str, bool);

        fn visit<A: Walk>(self) -> Self::Output {
            let rules = A::RULES;
            (A::NAME, (rules.levels, rules.index_bits) == (A::LEVELS, <A as Arch>::INDEX_BITS))
        }
    }

    #[test]
    fn every_name_leads_to_its_architecture() {
        for name in ArchitectureName::ALL {
            assert_eq!(dispatch(name, Name), (name.as_str(), true));
            assert_eq!(name.to_string().parse(), Ok(name));
        }
    }

    #[test]
    fn customary_names_are_understood() {
        assert_eq!("x86_64".parse(), Ok(ArchitectureName::X86_64));
        assert_eq!("arm64".parse(), Ok(ArchitectureName::AArch64));
        assert_eq!("riscv64".parse(), Ok(ArchitectureName::Riscv64Sv48));
        let unknown = "vax".parse::<ArchitectureName>().unwrap_err();
        assert!(unknown.to_string().contains("vax") && unknown.to_string().contains("aarch64"));
    }
}
