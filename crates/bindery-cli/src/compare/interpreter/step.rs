//! A step of a program: one call or access of one process.

use std::fmt::{self, Write};

use serde::Serialize;

use crate::size::{KIB, MIB};

/// A step, with its class and its size in words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// The process that performs the step.
    pub process: usize,
    /// The operation, by its letter in `programs/workloads/random.c`.
    pub operation: char,
    /// The arguments of the step.
    pub arguments: [u64; 6],
    /// The class under which the step is counted.
    pub class: Class,
    /// The step's size and special properties.
    pub detail: String,
}

impl Step {
    /// A line of the program's file.
    pub fn write(&self, file: &mut String) {
        let Self { process, operation, arguments, .. } = self;
        write!(file, "{process} {operation}").expect("a string takes all");
        for argument in arguments {
            write!(file, " {argument:#x}").expect("a string takes all");
        }
        file.push('\n');
    }
}

/// An operation on memory of one kind: an entry of the list of operations that may cost more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
pub struct Class {
    /// The call or the access.
    pub operation: &'static str,
    /// The memory.
    pub memory: &'static str,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.memory {
            "" => f.write_str(self.operation),
            memory => write!(f, "{}, {memory}", self.operation),
        }
    }
}

/// A size in bytes, in the shortest form.
pub fn size(bytes: u64) -> String {
    match bytes {
        _ if bytes.is_multiple_of(MIB) => format!("{} MiB", bytes / MIB),
        _ => format!("{} KiB", bytes / KIB),
    }
}
