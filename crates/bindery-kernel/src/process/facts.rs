//! Facts about the program that a process runs, for `/proc`.

use alloc::vec::Vec;
use core::ops::Range;

/// The known facts about a process's program.
#[derive(Clone, Default)]
pub struct ProgramFacts {
    /// The path of the file.
    pub path: Vec<u8>,
    /// The addresses of the argument strings, which are contiguous.
    pub arguments: Range<u64>,
    /// The addresses of the environment strings.
    pub environment: Range<u64>,
    /// An address in the program's initial stack.
    pub stack: u64,
    /// The addresses of the program's code.
    pub code: Range<u64>,
}
