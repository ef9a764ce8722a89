//! The routines behind [`super::super::probe`], their faults, and the control registers.

use core::arch::{asm, global_asm};

use bindery::arch::Register;
use bindery::check::AccessFault;
use x86_64::registers::control::{Cr0, Cr0Flags, Cr4};
use x86_64::registers::model_specific::{Efer, Msr};

use super::super::probe::{FAULTED, is_expected};
use super::cpu_features::PAGE_ATTRIBUTES;
use super::registers::Registers;

/// Bits of a page fault's error code.
pub(super) const PRESENT: u64 = 1 << 0;
pub(super) const RESERVED: u64 = 1 << 3;

global_asm!(
    r#"
.global probe_load                  // rdi: where; rax: the value, rdx: the fault
probe_load:
    xor edx, edx
    mov rax, [rdi]
    ret
.global probe_store                 // rdi: where, rsi: the value; rdx: the fault
probe_store:
    xor edx, edx
    mov [rdi], rsi
    ret
.global probe_call                  // rdi: where; rdx: the fault
probe_call:
    xor edx, edx
    jmp rdi
"#
);

/// Instructions that only return: `ret`.
pub const RETURN: [u8; 1] = [0xc3];

/// The faulting address of a page fault.
#[inline]
pub(super) fn fault_address() -> u64 {
    let address;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, cr2", out(reg) address, options(nomem, nostack, preserves_flags)) };
    address
}

/// Ends the routine that caused this fault. `false` if no routine caused it.
pub(super) fn ends(registers: &mut Registers) -> bool {
    if !is_expected(fault_address()) {
        return false;
    }
    // SAFETY: a routine's stack holds only its return address.
    registers.rip =
        unsafe { core::ptr::with_exposed_provenance::<u64>(registers.rsp as usize).read() };
    registers.rsp += size_of::<u64>() as u64;
    registers.rdx = FAULTED | registers.error;
    true
}

/// Decodes an error code.
pub fn decode_fault(error: u64) -> AccessFault {
    match error & (PRESENT | RESERVED) {
        PRESENT => AccessFault::Denied,
        bits if bits & RESERVED != 0 => AccessFault::ReservedBit,
        _ => AccessFault::NotMapped,
    }
}

/// A control register of this CPU. `None` for a register of the other architecture.
pub fn control_register(register: Register) -> Option<u64> {
    Some(match register {
        Register::Cr0 => Cr0::read_raw(),
        Register::Cr4 => Cr4::read_raw(),
        Register::Efer => Efer::read_raw(),
        // SAFETY: the register exists (`cpu_check`).
        Register::Pat => unsafe { Msr::new(PAGE_ATTRIBUTES).read() },
        Register::SctlrEl1 | Register::TcrEl1 | Register::MairEl1 | Register::Sstatus | _ => {
            return None;
        }
    })
}

/// Breaks the machine on purpose: with `CR0.WP` clear, the kernel can write read-only pages.
pub fn break_control_bit() {
    // SAFETY: none. The self-test finds it.
    unsafe { Cr0::update(|flags| flags.remove(Cr0Flags::WRITE_PROTECT)) };
}
