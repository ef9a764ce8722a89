//! System calls that only AArch64 has: none.

use crate::errno::Outcome;

/// `None`: AArch64 has no calls of its own.
pub fn call(_number: u32, _arguments: [u64; 6]) -> Option<Outcome> {
    None
}
