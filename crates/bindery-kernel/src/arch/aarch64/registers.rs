//! A program's registers while it is in the kernel.

use crate::errno::Errno;

/// A program's registers in the layout that the entry code stores on the kernel stack.
#[repr(C, align(16))]
#[derive(Clone)]
pub struct Registers {
    /// x0 to x30.
    pub(super) general: [u64; 31],
    pub(super) stack_pointer: u64,
    pub(super) program_counter: u64,
    /// PSTATE, in the format of `SPSR_EL1`.
    pub(super) state: u64,
    /// x0 at entry: the first argument, which the result overwrites.
    pub(super) first_argument: u64,
    /// `ESR_EL1`: the reason for the entry.
    pub(super) syndrome: u64,
}

/// The length of an instruction.
const INSTRUCTION: u64 = 4;

impl Registers {
    /// The registers of a new program.
    pub fn new(entry: u64, stack: u64) -> Self {
        Self {
            general: [0; 31],
            stack_pointer: stack,
            program_counter: entry,
            state: 0, // EL0, nothing masked
            first_argument: 0,
            syndrome: 0,
        }
    }

    /// The system call's number.
    #[inline]
    pub fn number(&self) -> u64 {
        self.general[8] & 0xffff_ffff // a C `int`
    }

    /// The system call's arguments.
    #[inline]
    pub fn arguments(&self) -> [u64; 6] {
        let [first, second, third, fourth, fifth, sixth, ..] = self.general;
        [first, second, third, fourth, fifth, sixth]
    }

    /// Sets the result.
    #[inline]
    pub fn set_result(&mut self, value: i64) {
        self.general[0] = value as u64;
    }

    /// The result, unchanged.
    #[inline]
    pub fn result(&self) -> i64 {
        self.general[0] as i64
    }

    /// Whether the result says that the call is to be restarted.
    #[inline]
    pub fn is_restart(&self) -> bool {
        let errno = self.result().wrapping_neg();
        errno == i64::from(Errno::RESTART.0) || errno == i64::from(Errno::RESTART_WITHOUT_HANDLER.0)
    }

    /// Skips the instruction as if it had executed, which sets BTYPE (bits 11:10) to 0.
    pub(super) fn skip_instruction(&mut self) {
        self.program_counter += INSTRUCTION;
        self.state &= !(0b11 << 10);
    }

    /// Returns to the system call's instruction, with its number and original arguments.
    pub fn restart(&mut self) {
        self.general[0] = self.first_argument;
        self.program_counter -= INSTRUCTION;
    }

    /// The stack pointer.
    pub fn stack_pointer(&self) -> u64 {
        self.stack_pointer
    }

    /// Sets the stack pointer.
    pub fn set_stack_pointer(&mut self, at: u64) {
        self.stack_pointer = at;
    }
}
