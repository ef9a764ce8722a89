//! The boot self-test: checks that the machine is set up as the page tables require.
//!
//! The symptoms of a wrong control bit appear late and far from their cause. With `EFER.NXE` clear,
//! bit 63 of an x86-64 entry is reserved: the kernel faults forever at the first page that is not
//! executable. With `CR0.WP` clear, the kernel writes through read-only entries, and a page that
//! two processes share changes in both. [`machine`] maps a few pages, changes their protection,
//! makes accesses that must succeed or fault, and reports the bit.
//!
//! ```text
//! kernel area   rw-  load, store succeed; fetch faults          user page  rw-  plain load faults
//!               r--  store faults                                          rw-  user copy succeeds
//!               r-x  fetch succeeds                                        r-x  kernel fetch faults
//!               rwx  fetch succeeds                                        r--  user copy faults
//!               --x  load faults (RISC-V)                  cleared A, D    rw-  user copy succeeds
//! ```
//!
//! Bits that accesses cannot test (`CR4.PGE`, `CR4.PCIDE`, memory types) are read from the
//! registers, if [`Accesses::register`] can read them.

mod pages;
mod trial;

use core::fmt;

use arrayvec::ArrayVec;

use crate::KernelMap;
use crate::addr::VirtAddr;
use crate::arch::{ControlBit, Register, Severity, Symptom};
use crate::error::{Error, FaultError};
use crate::kernel_map::KernelMapError;
use crate::platform::Platform;
use crate::space::AddressSpace;

use trial::Trial;

/// The processor's reason for refusing an access.
///
/// ```
/// use bindery::check::AccessFault;
///
/// /// From the error code of an x86-64 page fault.
/// fn fault(error: u64) -> AccessFault {
///     match (error & 1, error & 8) {
///         (0, _) => AccessFault::NotMapped,
///         (_, 0) => AccessFault::Denied,
///         _ => AccessFault::ReservedBit,
///     }
/// }
/// assert_eq!(fault(0b0011), AccessFault::Denied);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum AccessFault {
    /// The address has no translation (x86-64: bit 0 of the error code clear; AArch64: Translation
    /// fault).
    NotMapped,
    /// The translation does not allow the access (AArch64: Permission fault).
    Denied,
    /// An entry has a reserved bit set (x86-64: bit 3 of the error code).
    ReservedBit,
    /// The accessed bit is clear (AArch64: Access flag fault).
    AccessFlag,
    /// A page fault without a reason (RISC-V).
    Unknown,
}

impl fmt::Display for AccessFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotMapped => "no translation",
            Self::Denied => "permission denied",
            Self::ReservedBit => "a reserved bit is set in an entry",
            Self::AccessFlag => "the accessed bit is clear",
            Self::Unknown => "a page fault",
        })
    }
}

/// The rights with which the kernel accesses memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum AccessBy {
    /// An ordinary access of the kernel.
    Kernel,
    /// A deliberate access to memory of user mode, like the embedder's user copies (x86-64: between
    /// `stac` and `clac`; AArch64: with PAN clear, or by `ldtr` and `sttr`; RISC-V: with SUM set).
    /// The page must be aligned to the access; protection keys must allow it.
    UserCopy,
}

/// Makes single accesses for [`machine`], and catches their faults.
///
/// Each function makes one access in kernel mode on the caller's CPU. A fault is reported directly:
/// the fault handler must not pass it to [`AddressSpace::fault`] or [`KernelMap::resolve`]. Every
/// kernel already has such a handler for its user copies.
///
/// # Context
/// Context: may sleep. The functions are called without locks of the core.
pub trait Accesses {
    /// Loads eight bytes from an aligned address.
    ///
    /// # Errors
    /// The fault.
    fn read(&mut self, at: VirtAddr, by: AccessBy) -> Result<u64, AccessFault>;

    /// Stores eight bytes to an aligned address.
    ///
    /// # Errors
    /// The fault.
    fn write(&mut self, at: VirtAddr, value: u64, by: AccessBy) -> Result<(), AccessFault>;

    /// Calls [`Accesses::code`] at `at`, where the self-test has written it. First synchronizes the
    /// instruction cache, if the processor needs that.
    ///
    /// # Errors
    /// The fault of the fetch.
    fn execute(&mut self, at: VirtAddr) -> Result<(), AccessFault>;

    /// Position-independent instructions that return to their caller at once (x86-64, RISC-V and
    /// AArch64: `ret`). Longer code is truncated to 64 bytes.
    fn code(&self) -> &[u8];

    /// A control register of the CPU; `None` if it cannot be read, which skips its rules.
    fn register(&mut self, _register: Register) -> Option<u64> {
        None
    }
}

/// An error found by [`machine`].
///
/// ```
/// use bindery::check::{Accesses, MachineReport, machine};
/// use bindery::{AddressSpace, KernelMap, Platform};
///
/// /// At boot.
/// fn verify<P: Platform>(
///     map: &KernelMap<'_, P>,
///     space: &AddressSpace<'_, P>,
///     accesses: &mut impl Accesses,
/// ) -> MachineReport {
///     match machine(Some(map), Some(space), accesses) {
///         Ok(report) => report,
///         Err(error) => panic!("the machine is not set up: {error:?}"),
///     }
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum MachineError {
    /// A control bit has the wrong value.
    ControlBit {
        /// The bit.
        bit: ControlBit,
        /// Its effect.
        symptom: Symptom,
    },
    /// An observation that no control bit explains, such as an invalidation without effect
    /// ([`Symptom::StaleWritten`]), a direct map of other memory ([`Symptom::OtherFrame`]), a root
    /// that is not loaded.
    Unexplained {
        /// The observation.
        symptom: Symptom,
        /// The fault, if the observation was a fault.
        fault: Option<AccessFault>,
    },
    /// The kernel map refused a call of the self-test.
    KernelMap(KernelMapError),
    /// The address space refused a call of the self-test.
    Space(Error),
    /// The address space refused a fault of the self-test.
    Fault(FaultError),
}

impl fmt::Display for MachineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ControlBit { bit, symptom } => write!(f, "{bit}: {symptom}"),
            Self::Unexplained { symptom, fault } => {
                write!(f, "{symptom}")?;
                if let Some(fault) = fault {
                    write!(f, ": {fault}")?;
                }
                match symptom {
                    Symptom::StaleWritten => f.write_str("; the invalidation did nothing"),
                    Symptom::OtherFrame => f.write_str("; is the right root loaded?"),
                    Symptom::DataFaulted
                    | Symptom::DataExecuted
                    | Symptom::ReadOnlyWritten
                    | Symptom::CodeFaulted
                    | Symptom::WritableCodeFaulted
                    | Symptom::ExecuteOnlyRead
                    | Symptom::ContiguousFaulted
                    | Symptom::MemoryTypeFaulted
                    | Symptom::UserPageRead
                    | Symptom::UserPageExecuted
                    | Symptom::UserCopyFaulted
                    | Symptom::AccessedFaulted
                    | Symptom::DirtyFaulted
                    | Symptom::Register => Ok(()),
                }
            }
            Self::KernelMap(error) => write!(f, "the kernel map refused the self-test: {error}"),
            Self::Space(error) => write!(f, "the address space refused the self-test: {error}"),
            Self::Fault(error) => write!(f, "a fault of the self-test was refused: {error}"),
        }
    }
}

impl core::error::Error for MachineError {}

impl From<KernelMapError> for MachineError {
    fn from(error: KernelMapError) -> Self {
        Self::KernelMap(error)
    }
}

impl From<Error> for MachineError {
    fn from(error: Error) -> Self {
        Self::Space(error)
    }
}

impl From<FaultError> for MachineError {
    fn from(error: FaultError) -> Self {
        Self::Fault(error)
    }
}

/// The maximum number of findings in a report, larger than that of any architecture.
const MOST_FINDINGS: usize = 8;

/// The report of a self-test that found nothing broken: control bits that only cost speed or
/// protection.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MachineReport {
    findings: ArrayVec<(ControlBit, Severity), MOST_FINDINGS>,
}

impl MachineReport {
    /// The control bits with a wrong value, each with its severity.
    ///
    /// Context: any.
    pub fn findings(&self) -> impl Iterator<Item = (ControlBit, Severity)> + '_ {
        self.findings.iter().copied()
    }

    fn add(&mut self, bit: ControlBit, severity: Severity) {
        if !self.findings.iter().any(|(known, _)| known.name == bit.name) {
            // An overflow would be a defect of the rule tables; tests detect it.
            debug_assert!(!self.findings.is_full(), "too many findings");
            let _ = self.findings.try_push((bit, severity));
        }
    }
}

/// Tests the caller's CPU: maps, protects and accesses kernel pages in `map` and user pages in
/// `space`, and reports a wrong control bit. If either is `None`, its part is skipped. All pages
/// are unmapped at the end.
///
/// Called once on each CPU, at boot, before the first program, after [`KernelMap`] is created and
/// loaded, and with `space` loaded on the CPU ([`AddressSpace::enter`]). No other thread uses
/// `space` during the call. Takes about 20 frames.
///
/// Context: may sleep.
///
/// # Errors
/// The first wrong control bit; see [`MachineError`].
pub fn machine<P: Platform>(
    map: Option<&KernelMap<'_, P>>,
    space: Option<&AddressSpace<'_, P>>,
    accesses: &mut impl Accesses,
) -> Result<MachineReport, MachineError> {
    let mut test = Trial::new(accesses);
    let mut keys = 1;
    if let Some(map) = map {
        test.kernel(map)?;
        keys = map.memory().platform().protection_keys();
    }
    if let Some(space) = space {
        test.user(space)?;
        keys = space.memory().platform().protection_keys();
    }
    test.registers(keys)?;
    Ok(test.report)
}
