//! System calls that only AArch64 has: none.

use crate::errno::Outcome;

/// `None`: no number is such a call's.
pub fn call(_number: u32, _arguments: [u64; 6]) -> Option<Outcome> {
    None
}
