//! The routines behind [`super::super::probe`], their faults, and the control registers.

use core::arch::{asm, global_asm};

use aarch64_cpu::registers::{MAIR_EL1, Readable, SCTLR_EL1, TCR_EL1, Writeable};
use bindery::arch::Register;
use bindery::check::AccessFault;

use super::super::probe::{FAULTED, is_expected};
use super::Registers;

global_asm!(
    r#"
    .section .text.probe, "ax"
    .global probe_load              // x0: where; x0: the value, x1: the fault
probe_load:
    mov     x1, xzr
    ldr     x0, [x0]
    ret
    .global probe_store             // x0: where, x1: the value; x1: the fault
probe_store:
    mov     x2, x1
    mov     x1, xzr
    str     x2, [x0]
    ret
    .global probe_call              // x0: where; x1: the fault
probe_call:
    mov     x1, xzr
    br      x0
    .text
    "#
);

/// Instructions that only return: `ret`.
pub const RETURN: [u8; 4] = 0xd65f_03c0_u32.to_le_bytes();

/// Ends the routine that faulted at `address`. `false` if no routine caused the fault.
pub(super) fn ends(registers: &mut Registers, address: u64) -> bool {
    /// `PSTATE.BTYPE`: the kind of the last branch.
    const BRANCH_TYPE: u64 = 0b11 << 10;
    if !is_expected(address) {
        return false;
    }
    registers.program_counter = registers.general[30];
    registers.state &= !BRANCH_TYPE;
    registers.general[1] = FAULTED | registers.syndrome;
    true
}

/// Decodes a syndrome (Arm ARM, D24 "ESR_EL1", the fault status codes).
pub fn decode_fault(syndrome: u64) -> AccessFault {
    match syndrome >> 2 & 0b1111 {
        0b0001 => AccessFault::NotMapped,
        0b0010 => AccessFault::AccessFlag,
        0b0011 => AccessFault::Denied,
        _ => AccessFault::Unknown,
    }
}

/// A control register of this CPU. `None` for a register of the other architecture.
pub fn control_register(register: Register) -> Option<u64> {
    Some(match register {
        Register::SctlrEl1 => SCTLR_EL1.get(),
        Register::TcrEl1 => TCR_EL1.get(),
        Register::MairEl1 => MAIR_EL1.get(),
        Register::Cr0 | Register::Cr4 | Register::Efer | Register::Pat | Register::Sstatus | _ => {
            return None;
        }
    })
}

/// Breaks the machine on purpose: with `SCTLR_EL1.WXN` set, no writable page is executable.
pub fn break_control_bit() {
    const WRITE_EXECUTE_NEVER: u64 = 1 << 19;
    SCTLR_EL1.set(SCTLR_EL1.get() | WRITE_EXECUTE_NEVER);
    // SAFETY: TLBs may hold translations with the old value of the bit.
    unsafe { asm!("isb", "tlbi vmalle1", "dsb nsh", "isb", options(nostack, preserves_flags)) };
}
