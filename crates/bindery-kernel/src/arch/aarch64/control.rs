//! The control channel and power-off by semihosting; power-off and the start of other CPUs by PSCI.

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::arch::Ended;

use super::Registers;

/// Semihosting (Arm, "Semihosting for AArch32 and AArch64", release 2024Q3).
pub(super) mod semihosting {
    pub const WRITE_BYTE: u64 = 0x03;
    pub const WRITE_TEXT: u64 = 0x04;
    pub const EXIT_EXTENDED: u64 = 0x20;
    /// The exit reason "application exit".
    pub const APPLICATION_EXIT: u64 = 0x2_0026;
}

/// PSCI (Arm DEN 0022).
mod psci {
    pub const SYSTEM_OFF: u64 = 0x8400_0008;
    pub const CPU_ON: u64 = 0xc400_0003;
}

/// Whether a semihosting call was refused because this emulator does not implement such calls.
static ABSENT: AtomicBool = AtomicBool::new(false);

/// The conduit of PSCI calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Conduit {
    /// By `HVC`.
    Hypervisor,
    /// By `SMC`.
    SecureMonitor,
}

static BY_SECURE_MONITOR: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    fn semihosting_call(operation: u64, argument: *const u64) -> u64;
    static semihosting_instruction: u8;
}

global_asm!(
    r#"
    .section .text.semihosting, "ax"
    .global semihosting_call, semihosting_instruction
semihosting_call:
semihosting_instruction:
    hlt     #0xf000
    ret
    "#
);

/// Sets the conduit of PSCI calls.
pub fn begin(conduit: Conduit) {
    BY_SECURE_MONITOR.store(conduit == Conduit::SecureMonitor, Ordering::Relaxed);
}

/// Whether an undefined instruction of the kernel was a semihosting call that the emulator does not
/// implement. Records such a call and advances the registers past it.
pub fn is_absent_semihosting(registers: &mut Registers) -> bool {
    if registers.program_counter != &raw const semihosting_instruction as u64 {
        return false;
    }
    ABSENT.store(true, Ordering::Relaxed);
    registers.program_counter += 4;
    true
}

fn semihosting(operation: u64, argument: &[u64]) {
    if !ABSENT.load(Ordering::Relaxed) {
        // SAFETY: the host reads the argument's words and the memory that they describe.
        unsafe { semihosting_call(operation, argument.as_ptr()) };
    }
}

/// Sends a byte to the control channel.
pub fn write_control(byte: u8) {
    // The host reads only the first byte of the word, which is the right one because the CPU is
    // little-endian.
    semihosting(semihosting::WRITE_BYTE, &[u64::from(byte)]);
}

/// Ends the machine.
pub fn power_off(how: Ended) -> ! {
    let code = match how {
        Ended::Program(_) => 0, // the status went over the control channel
        Ended::Failed => 1,
    };
    semihosting(semihosting::EXIT_EXTENDED, &[semihosting::APPLICATION_EXIT, code]);
    psci(psci::SYSTEM_OFF, [0; 3]);
    loop {
        aarch64_cpu::asm::wfi();
    }
}

/// Starts the CPU with this affinity at a physical address, with `argument` in x0.
///
/// # Errors
/// PSCI's error number.
pub fn start_cpu(affinity: u64, entry: u64, argument: u64) -> Result<(), i64> {
    match psci(psci::CPU_ON, [affinity, entry, argument]) {
        0 => Ok(()),
        refused => Err(refused),
    }
}

fn psci(function: u64, [first, second, third]: [u64; 3]) -> i64 {
    let result: u64;
    // SAFETY: the calls above change no state of this CPU except x0 to x17, as the convention says;
    // a CPU that such a call starts runs the kernel's entry code.
    unsafe {
        if BY_SECURE_MONITOR.load(Ordering::Relaxed) {
            asm!(
                "smc #0",
                inout("x0") function => result, in("x1") first, in("x2") second, in("x3") third,
                clobber_abi("C")
            );
        } else {
            asm!(
                "hvc #0",
                inout("x0") function => result, in("x1") first, in("x2") second, in("x3") third,
                clobber_abi("C")
            );
        }
    }
    result as i64
}
