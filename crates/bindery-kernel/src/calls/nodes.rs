//! The system calls about memory nodes. The machine has one node, so every policy that names it is
//! already fulfilled, and no page ever has to move. The arguments are checked as on Linux.

use bindery::addr::PAGE_SIZE;
use linux_raw_sys::general as nr;
use linux_raw_sys::mempolicy::{
    MPOL_F_RELATIVE_NODES, MPOL_F_STATIC_NODES, MPOL_MF_VALID, MPOL_MODE_FLAGS,
};

use crate::errno::{Errno, Outcome};
use crate::{process, user};

const DEFAULT: u32 = 0;
const PREFERRED: u32 = 1;
const LOCAL: u32 = 4;
/// One more than the last policy (`MPOL_WEIGHTED_INTERLEAVE`).
const POLICIES: u32 = 7;

/// Makes a call about memory nodes; `None` if the number belongs to another call.
pub fn call(number: u32, [a, b, c, d, e, f]: [u64; 6]) -> Option<Outcome> {
    Some(match number {
        nr::__NR_mbind => bind(a, b, c as u32, d, e, f as u32),
        nr::__NR_set_mempolicy => check_policy(a as u32, b, c).map(|()| 0),
        _ => return None,
    })
}

fn bind(start: u64, length: u64, mode: u32, nodes: u64, count: u64, flags: u32) -> Outcome {
    if flags & !MPOL_MF_VALID != 0 || !start.is_multiple_of(PAGE_SIZE) {
        return Err(Errno::EINVAL);
    }
    let length = length.checked_next_multiple_of(PAGE_SIZE).unwrap_or(0);
    let end = start.checked_add(length).ok_or(Errno::EINVAL)?;
    check_policy(mode, nodes, count)?;
    process::with_space(|space| {
        let mut at = start;
        space.for_each_mapping(|mapping| {
            let range = mapping.range;
            if range.start().0 <= at {
                at = at.max(range.end().0);
            }
        });
        if at >= end { Ok(0) } else { Err(Errno::EFAULT) }
    })
}

/// Refuses an unknown policy, or any node besides node 0.
fn check_policy(mode: u32, nodes: u64, count: u64) -> Result<(), Errno> {
    let (policy, flags) = (mode & !MPOL_MODE_FLAGS, mode & MPOL_MODE_FLAGS);
    let both = MPOL_F_STATIC_NODES | MPOL_F_RELATIVE_NODES;
    if policy >= POLICIES || flags & both == both {
        return Err(Errno::EINVAL);
    }
    let named = named_nodes(nodes, count)?;
    match (policy, named) {
        (DEFAULT | LOCAL, 0) if flags == 0 => Ok(()),
        (PREFERRED, 0) if flags & both == 0 => Ok(()),
        (DEFAULT | LOCAL, _) => Err(Errno::EINVAL),
        (_, named) if named & 1 != 0 => Ok(()),
        _ => Err(Errno::EINVAL),
    }
}

/// The first 64 nodes of a program's set. No other node may be named.
fn named_nodes(at: u64, count: u64) -> Result<u64, Errno> {
    // As on Linux, the count is one more than the number of bits, and at most the bits of a page.
    let Some(bits) = count.checked_sub(1).filter(|bits| *bits > 0 && at != 0) else {
        return Ok(0);
    };
    if bits > 8 * PAGE_SIZE {
        return Err(Errno::EINVAL);
    }
    let mut first = 0;
    for word in 0..bits.div_ceil(64) {
        let left = bits - 64 * word;
        let mask = if left < 64 { (1 << left) - 1 } else { u64::MAX };
        let named = user::read::<u64>(at.wrapping_add(word * 8))? & mask;
        match word {
            0 => first = named,
            _ if named != 0 => return Err(Errno::EINVAL),
            _ => {}
        }
    }
    Ok(first)
}
