//! Control bits of the processor on which page tables depend: the bit that explains a symptom in
//! the self-test ([`crate::check::machine`]), and the required register values.

use core::fmt;

/// An observation that a correctly configured processor never causes.
///
/// ```
/// use bindery::arch::Symptom;
///
/// // A boot log shows it by name.
/// assert_eq!(format!("{:?}", Symptom::StaleWritten), "StaleWritten");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum Symptom {
    /// A load or a store of the kernel faulted on a writable page that is not executable.
    DataFaulted,
    /// The kernel fetched an instruction from a page that is not executable.
    DataExecuted,
    /// The kernel stored to a page that was read-only from the start.
    ReadOnlyWritten,
    /// The kernel stored to a page after it had become read-only and the invalidation had returned.
    StaleWritten,
    /// A fetch of the kernel faulted on a page that is readable and executable.
    CodeFaulted,
    /// A fetch of the kernel faulted on a page that is writable and executable.
    WritableCodeFaulted,
    /// The kernel loaded from a page that is executable but not readable.
    ExecuteOnlyRead,
    /// A load faulted in a contiguous run of entries, or reached another frame of it.
    ContiguousFaulted,
    /// A load faulted on memory of a type other than normal.
    MemoryTypeFaulted,
    /// The kernel loaded from a user-mode page outside a user copy.
    UserPageRead,
    /// The kernel fetched an instruction from a user-mode page.
    UserPageExecuted,
    /// A copy from or to user mode faulted on a page that is mapped and allows the copy.
    UserCopyFaulted,
    /// A load faulted because the entry's accessed bit was clear.
    AccessedFaulted,
    /// A store faulted because the entry's dirty bit was clear.
    DirtyFaulted,
    /// A store reached a frame other than the one that [`crate::Platform::direct_map`] returns.
    OtherFrame,
    /// A control register holds a wrong value.
    Register,
}

impl fmt::Display for Symptom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DataFaulted => "a kernel access to a writable, non-executable page faulted",
            Self::DataExecuted => "the kernel executed a non-executable page",
            Self::ReadOnlyWritten => "the kernel wrote to a read-only page",
            Self::StaleWritten => "the kernel wrote to a page after it had become read-only",
            Self::CodeFaulted => "a kernel fetch from an executable page faulted",
            Self::WritableCodeFaulted => {
                "a kernel fetch from a writable and executable page faulted"
            }
            Self::ExecuteOnlyRead => "the kernel read an execute-only page",
            Self::ContiguousFaulted => {
                "a load in a contiguous run faulted or reached another frame"
            }
            Self::MemoryTypeFaulted => "a load from memory that is not of normal type faulted",
            Self::UserPageRead => "the kernel read a user page without asking for it",
            Self::UserPageExecuted => "the kernel executed a user page",
            Self::UserCopyFaulted => "a copy from or to a mapped user page faulted",
            Self::AccessedFaulted => "a load faulted because the accessed bit was clear",
            Self::DirtyFaulted => "a store faulted because the dirty bit was clear",
            Self::OtherFrame => "a store reached another frame than the direct map shows",
            Self::Register => "a control register has the wrong value",
        })
    }
}

/// A control bit: its name, its required value, and the manual that explains it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct ControlBit {
    /// Register and bit, as named in the manual.
    pub name: &'static str,
    /// The required value.
    pub needed: Needed,
    /// The manual and its section.
    pub manual: &'static str,
}

impl ControlBit {
    pub(crate) const fn set(name: &'static str, manual: &'static str) -> Self {
        Self { name, needed: Needed::Set, manual }
    }

    pub(crate) const fn clear(name: &'static str, manual: &'static str) -> Self {
        Self { name, needed: Needed::Clear, manual }
    }
}

impl fmt::Display for ControlBit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let needed = match self.needed {
            Needed::Set => "must be set",
            Needed::Clear => "must be clear",
            Needed::AsDocumented => "must be programmed as the documentation of the format says",
        };
        write!(f, "{} {needed} ({})", self.name, self.manual)
    }
}

/// The required value of a control bit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Needed {
    /// 1.
    Set,
    /// 0.
    Clear,
    /// A field of several bits: the type of the entry format documents its value.
    AsDocumented,
}

/// The effect of a wrong value of a control bit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Severity {
    /// Endless faults, or accesses that the tables forbid.
    Broken,
    /// Like [`Severity::Broken`], on a platform that offers protection keys.
    BrokenWithKeys,
    /// Correct, but with more faults or more TLB misses.
    Slow,
    /// Correct, but a kernel defect is not caught.
    Unprotected,
}

/// A register that the self-test compares, if the embedder lets it be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum Register {
    /// x86-64 `CR0`.
    Cr0,
    /// x86-64 `CR4`.
    Cr4,
    /// x86-64 `IA32_EFER`.
    Efer,
    /// x86-64 `IA32_PAT`.
    Pat,
    /// AArch64 `SCTLR_EL1`.
    SctlrEl1,
    /// AArch64 `TCR_EL1`.
    TcrEl1,
    /// AArch64 `MAIR_EL1`.
    MairEl1,
    /// RISC-V `sstatus`.
    Sstatus,
}

/// The value that a register must hold under a mask.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegisterRule {
    /// The register.
    pub register: Register,
    /// The bits to compare.
    pub mask: u64,
    /// The required value of the bits.
    pub value: u64,
    /// The name of the bits.
    pub bit: ControlBit,
    /// The effect of a wrong value.
    pub severity: Severity,
}

impl RegisterRule {
    /// One bit of a register, set or clear as `bit` requires.
    pub(crate) const fn new(
        register: Register,
        position: u32,
        bit: ControlBit,
        severity: Severity,
    ) -> Self {
        let mask = 1 << position;
        let value = if matches!(bit.needed, Needed::Set) { mask } else { 0 };
        Self { register, mask, value, bit, severity }
    }

    /// Several bits of a register.
    pub(crate) const fn field(
        register: Register,
        mask: u64,
        value: u64,
        name: &'static str,
        manual: &'static str,
    ) -> Self {
        let bit = ControlBit { name, needed: Needed::AsDocumented, manual };
        Self { register, mask, value, bit, severity: Severity::Broken }
    }
}
