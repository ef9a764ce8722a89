//! Facts about the program that a process runs, for `/proc`.

use alloc::vec::Vec;
use core::ops::Range;

/// The known facts about the program that a process runs.
#[derive(Clone, Default)]
pub struct ProgramFacts {
    /// The path of the file.
    pub path: Vec<u8>,
    /// The addresses of the arguments' texts, one behind the other.
    pub arguments: Range<u64>,
    /// The addresses of the environment's texts.
    pub environment: Range<u64>,
    /// An address in the stack that the program began with.
    pub stack: u64,
    /// The addresses of the program's code.
    pub code: Range<u64>,
}
