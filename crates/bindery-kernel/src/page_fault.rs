//! The page-fault handler. `arch/*/exceptions.rs` decodes the fault and calls [`page_fault`]; the
//! core resolves it, or the program gets a signal.

use bindery::addr::VirtAddr;
use bindery::{Access, FaultError, Resolved};
use linux_raw_sys::general::{BUS_ADRERR, SEGV_ACCERR, SEGV_MAPERR, SIGBUS, SIGSEGV};

use crate::arch::{self, Registers};
use crate::kernel_lock;
use crate::process::{self, scheduler, signal};
use crate::trap::{self, From};

/// A program's fault at `address`.
#[inline]
pub fn page_fault(registers: &mut Registers, address: u64, access: Access) {
    scheduler::count_page_fault();
    if let Err(problem) = fault(address, access) {
        unresolved(address, access, problem);
    }
    trap::leave(registers, From::Exception);
}

/// As [`page_fault`], where several CPUs run threads and the calling CPU does not hold the kernel's
/// lock. The core resolves most faults without it.
pub fn page_fault_beside_others(registers: &mut Registers, address: u64, access: Access) {
    scheduler::count_page_fault();
    let outcome = kernel_lock::beside(|| fault(address, access));
    // An interrupt announces work that comes later, and arrives in the program.
    if outcome.is_err() || trap::has_work() {
        kernel_lock::lock();
        if let Err(problem) = outcome {
            unresolved(address, access, problem);
        }
        trap::leave(registers, From::Exception);
        kernel_lock::unlock();
    }
}

/// Resolves a fault with the rights of the running thread.
#[inline]
fn fault(address: u64, access: Access) -> Result<Resolved, FaultError> {
    let keys = arch::key_rights();
    process::with_space(|space| space.fault_with_keys(VirtAddr(address), access, keys))
}

/// Handles a fault that the core has not resolved: frees memory, or signals the program.
#[cold]
#[inline(never)]
fn unresolved(address: u64, access: Access, mut problem: FaultError) {
    loop {
        let (signal, code) = match problem {
            FaultError::OutOfMemory => {
                if process::memory_ran_out() {
                    return;
                }
                match fault(address, access) {
                    Ok(_) => return,
                    Err(again) => {
                        problem = again;
                        continue;
                    }
                }
            }
            FaultError::NotMapped => (SIGSEGV, SEGV_MAPERR),
            FaultError::Protection => (SIGSEGV, SEGV_ACCERR),
            FaultError::ProtectionKey(key) => return signal::key_violation(address, key),
            // The signal is delivered on the way back, and the program repeats the access.
            FaultError::Interrupted => return,
            FaultError::Bus | _ => (SIGBUS, BUS_ADRERR),
        };
        return signal::exception(signal, code as i32, address);
    }
}
