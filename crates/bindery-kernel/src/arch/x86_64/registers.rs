//! A program's registers while it is in the kernel.

use crate::errno::Errno;

use super::USER_END;
use super::per_cpu::{USER_CODE, USER_DATA};

/// Takes the place of the vector after the `syscall` instruction.
pub(super) const SYSTEM_CALL: u64 = 256;

/// The initial flags of a program: interrupts enabled, and the bit that is always set.
const FLAGS: u64 = 0x202;

/// A program's registers in the layout of the thread's kernel stack.
#[derive(Clone, Default)]
#[repr(C)]
pub struct Registers {
    pub(super) r15: u64,
    pub(super) r14: u64,
    pub(super) r13: u64,
    pub(super) r12: u64,
    pub(super) rbp: u64,
    pub(super) rbx: u64,
    pub(super) r11: u64,
    pub(super) r10: u64,
    pub(super) r9: u64,
    pub(super) r8: u64,
    pub(super) rax: u64,
    pub(super) rcx: u64,
    pub(super) rdx: u64,
    pub(super) rsi: u64,
    pub(super) rdi: u64,
    /// The vector by which the program entered the kernel.
    pub(super) vector: u64,
    /// An exception's error code; the number of a system call.
    pub(super) error: u64,
    pub(super) rip: u64,
    pub(super) cs: u64,
    pub(super) flags: u64,
    pub(super) rsp: u64,
    pub(super) ss: u64,
}

// Keeps the stack aligned to 16 bytes for the entry code's calls.
const _: () = assert!(size_of::<Registers>().is_multiple_of(16));

impl Registers {
    /// The registers of a new program.
    pub fn new(entry: u64, stack: u64) -> Self {
        let mut registers = Self {
            cs: u64::from(USER_CODE),
            ss: u64::from(USER_DATA),
            flags: FLAGS,
            rsp: stack,
            ..Self::default()
        };
        registers.set_program_counter(entry);
        registers
    }

    /// The system call's number.
    #[inline]
    pub fn number(&self) -> u64 {
        self.error
    }

    /// The system call's arguments.
    #[inline]
    pub fn arguments(&self) -> [u64; 6] {
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9]
    }

    /// Sets the system call's result.
    #[inline]
    pub fn set_result(&mut self, value: i64) {
        self.rax = value as u64;
    }

    /// The system call's result.
    pub fn result(&self) -> i64 {
        self.rax as i64
    }

    /// Whether a system call ended with a result that programs never see.
    #[inline]
    pub fn is_restart(&self) -> bool {
        const RESTART: u64 = -(Errno::RESTART.0 as i64) as u64;
        const RESTART_WITHOUT_HANDLER: u64 = -(Errno::RESTART_WITHOUT_HANDLER.0 as i64) as u64;
        (self.rax == RESTART || self.rax == RESTART_WITHOUT_HANDLER) && self.vector == SYSTEM_CALL
    }

    /// Returns to the system call's instruction.
    pub fn restart(&mut self) {
        self.rax = self.error;
        self.rip -= 2;
    }

    /// Sets the next instruction. The processor would fault on a non-canonical address while still
    /// in the kernel. So such addresses, and those of the kernel's half, become the first address
    /// behind a program's own, where the program faults.
    pub fn set_program_counter(&mut self, at: u64) {
        self.rip = at.min(USER_END);
    }

    /// The stack pointer.
    pub fn stack_pointer(&self) -> u64 {
        self.rsp
    }

    /// Sets the stack pointer.
    pub fn set_stack_pointer(&mut self, at: u64) {
        self.rsp = at;
    }

    /// Clears the vector and the error code, because the registers no longer belong to that entry.
    pub(super) fn forget_cause(&mut self) {
        (self.vector, self.error) = (0, 0);
    }
}
