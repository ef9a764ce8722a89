//! `prctl(2)`: the options about memory.

use linux_raw_sys::prctl::{
    PR_GET_MDWE, PR_GET_MEMORY_MERGE, PR_GET_THP_DISABLE, PR_MDWE_NO_INHERIT,
    PR_MDWE_REFUSE_EXEC_GAIN, PR_SET_MDWE, PR_SET_MEMORY_MERGE, PR_SET_THP_DISABLE,
};

use super::Outcome;
use bindery::{AddressSpace, Errno, ExecGain, LargeFolios, Platform};

/// `PR_THP_DISABLE_EXCEPT_ADVISED`, since Linux 6.18.
const EXCEPT_ADVISED: u64 = 1 << 1;

/// Performs a `prctl(2)` about memory for the process of `space`, with the four arguments after the
/// option. Returns `None` for options that are not about memory.
///
/// | options | setting |
/// |---|---|
/// | `PR_SET_THP_DISABLE`, `PR_GET_THP_DISABLE` | [`LargeFolios`] |
/// | `PR_SET_MDWE`, `PR_GET_MDWE` | [`ExecGain`] |
/// | `PR_SET_MEMORY_MERGE`, `PR_GET_MEMORY_MERGE` | [`AddressSpace::set_merging`] |
///
/// Context: may sleep. Complexity: constant.
///
/// # Errors
/// [`Errno::EINVAL`] for invalid arguments; [`Errno::EPERM`] if `PR_SET_MDWE` would lift a
/// restriction.
pub fn prctl<P: Platform>(
    space: &AddressSpace<'_, P>,
    option: u32,
    arguments: [u64; 4],
) -> Option<Result<u64, Errno>> {
    Some(match option {
        PR_SET_THP_DISABLE => set_thp_disable(space, arguments),
        PR_GET_THP_DISABLE => nothing_in(&arguments).map(|()| match space.large_folios() {
            LargeFolios::Allowed => 0,
            LargeFolios::Advised => 1 | EXCEPT_ADVISED,
            LargeFolios::Never => 1,
        }),
        PR_SET_MDWE => set_mdwe(space, arguments),
        PR_GET_MDWE => nothing_in(&arguments).map(|()| {
            u64::from(match space.exec_gain() {
                ExecGain::Allowed => 0,
                ExecGain::Refused => PR_MDWE_REFUSE_EXEC_GAIN,
                ExecGain::RefusedHere => PR_MDWE_REFUSE_EXEC_GAIN | PR_MDWE_NO_INHERIT,
            })
        }),
        PR_SET_MEMORY_MERGE => nothing_in(&arguments[1..]).map(|()| {
            space.set_merging(arguments[0] != 0);
            0
        }),
        PR_GET_MEMORY_MERGE => nothing_in(&arguments).map(|()| u64::from(space.merging())),
        _ => return None,
    })
}

/// Returns `EINVAL` unless the unused arguments are zero.
fn nothing_in(arguments: &[u64]) -> Result<(), Errno> {
    if arguments.iter().all(|argument| *argument == 0) { Ok(()) } else { Err(Errno::EINVAL) }
}

fn set_thp_disable<P: Platform>(space: &AddressSpace<'_, P>, arguments: [u64; 4]) -> Outcome {
    let [disable, flags, rest @ ..] = arguments;
    nothing_in(&rest)?;
    let large = match (disable, flags) {
        (0, 0) => LargeFolios::Allowed,
        (1.., 0) => LargeFolios::Never,
        (1.., EXCEPT_ADVISED) => LargeFolios::Advised,
        _ => return Err(Errno::EINVAL),
    };
    space.set_large_folios(large);
    Ok(0)
}

fn set_mdwe<P: Platform>(space: &AddressSpace<'_, P>, arguments: [u64; 4]) -> Outcome {
    const REFUSE: u64 = PR_MDWE_REFUSE_EXEC_GAIN as u64;
    const BOTH: u64 = REFUSE | PR_MDWE_NO_INHERIT as u64;
    let [bits, rest @ ..] = arguments;
    nothing_in(&rest)?;
    let gain = match bits {
        0 => ExecGain::Allowed,
        REFUSE => ExecGain::Refused,
        BOTH => ExecGain::RefusedHere,
        _ => return Err(Errno::EINVAL),
    };
    space.set_exec_gain(gain).map(|()| 0).map_err(|_| Errno::EPERM)
}
