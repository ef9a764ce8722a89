//! Single accesses of the kernel that may fault, made by the self-test at boot
//! ([`crate::self_test`]).
//!
//! Each architecture has a routine for each kind of access. The routines push nothing on the stack.
//! So a fault at the expected address, in the routine or in the instruction fetch that it causes,
//! ends the routine: the fault handler returns to the routine's caller.

use core::sync::atomic::{AtomicU64, Ordering};

use bindery::check::AccessFault;

use super::decode_fault;

/// Set in the result of a routine, in addition to the processor's fault code.
pub(super) const FAULTED: u64 = 1 << 63;

/// The result of a routine, in two registers.
#[repr(C)]
struct Probed {
    /// The loaded value.
    value: u64,
    /// 0, or [`FAULTED`] with the architecture's code of the fault.
    fault: u64,
}

unsafe extern "C" {
    fn probe_load(at: u64) -> Probed;
    fn probe_store(at: u64, value: u64) -> Probed;
    fn probe_call(at: u64) -> Probed;
}

/// The address of the access in progress; 0 at all other times. Only the first CPU makes such
/// accesses.
static EXPECTED: AtomicU64 = AtomicU64::new(0);

/// Whether the self-test caused the fault at `address`.
pub(super) fn is_expected(address: u64) -> bool {
    address != 0 && EXPECTED.load(Ordering::Relaxed) == address
}

fn probe(at: u64, access: impl FnOnce() -> Probed) -> Result<u64, AccessFault> {
    EXPECTED.store(at, Ordering::Relaxed);
    let Probed { value, fault } = access();
    EXPECTED.store(0, Ordering::Relaxed);
    if fault & FAULTED == 0 { Ok(value) } else { Err(decode_fault(fault & !FAULTED)) }
}

/// Loads eight bytes.
///
/// # Safety
/// 1. `at` is aligned, and only the self-test may fault there.
pub unsafe fn load(at: u64) -> Result<u64, AccessFault> {
    // SAFETY: the caller's promise. The routine either loads or has no effect.
    probe(at, || unsafe { probe_load(at) })
}

/// Stores eight bytes.
///
/// # Safety
/// 1. As [`load`].
/// 2. Nothing else uses the memory at `at`.
pub unsafe fn store(at: u64, value: u64) -> Result<(), AccessFault> {
    // SAFETY: the caller's promise. The routine either stores or has no effect.
    probe(at, || unsafe { probe_store(at, value) }).map(drop)
}

/// Calls the instructions at `at`.
///
/// # Safety
/// 1. As [`load`].
/// 2. The instructions do nothing but return.
pub unsafe fn call(at: u64) -> Result<(), AccessFault> {
    // SAFETY: the caller's promise. The call has no effect, whether or not it faults.
    probe(at, || unsafe { probe_call(at) }).map(drop)
}
