//! Arrays of `struct iovec` in a program's memory: address and length, 64 bits each.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{AddressSpace, CallReady, CallWait, Errno, PendingUserCopy, Platform, Step};

/// The maximum number of ranges in a call (`UIO_MAXIOV`).
pub(super) const MOST_RANGES: u64 = 1024;
/// The maximum number of bytes in a call, truncated as on Linux (`MAX_RW_COUNT`).
pub(super) const MOST_BYTES: u64 = i32::MAX as u64 & !(PAGE_SIZE - 1);

/// A range of a program's memory: `struct iovec`.
///
/// ```
/// use bindery_linux::IoRange;
///
/// let both = [IoRange { start: 0x1000, length: 16 }, IoRange { start: 0x8000, length: 4096 }];
/// assert_eq!(both.iter().map(|range| range.length).sum::<u64>(), 4112);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IoRange {
    /// The start.
    pub start: u64,
    /// The length in bytes.
    pub length: u64,
}

impl IoRange {
    /// Range number `index` of the array at `vector`.
    pub(super) fn read<P: Platform>(
        space: &AddressSpace<'_, P>,
        vector: u64,
        index: u64,
    ) -> Result<Self, Errno> {
        let mut bytes = [0; 16];
        let at = vector.checked_add(index * 16).ok_or(Errno::EFAULT)?;
        space.read_user(VirtAddr(at), &mut bytes).map_err(|_| Errno::EFAULT)?;
        Ok(Self::from_bytes(&bytes))
    }

    fn from_bytes(bytes: &[u8; 16]) -> Self {
        let (start, length) = bytes.split_at(8);
        let word =
            |bytes: &[u8]| bytes.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte));
        Self { start: word(start), length: word(length) }
    }
}

/// A read of one range of an array, in steps.
#[derive(Debug)]
pub(super) struct PendingRange {
    copy: PendingUserCopy,
    bytes: [u8; 16],
}

/// The result of a step of a [`PendingRange`].
pub(super) enum RangeStep<'s, 'm, P: Platform> {
    Read(IoRange),
    Blocked(CallWait<'s, 'm, P>),
}

impl PendingRange {
    /// Range number `index` of the array at `vector`.
    pub(super) fn new(vector: u64, index: u64) -> Result<Self, Errno> {
        let at = vector.checked_add(index * 16).ok_or(Errno::EFAULT)?;
        Ok(Self { copy: PendingUserCopy::new(VirtAddr(at)), bytes: [0; 16] })
    }

    /// Reads the range, or returns the wait that the read needs first.
    pub(super) fn step<'s, 'm, P: Platform>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
    ) -> Result<RangeStep<'s, 'm, P>, Errno> {
        let step = self.copy.read(space, ready, &mut self.bytes).map_err(|_| Errno::EFAULT)?;
        Ok(match step {
            Step::Done => RangeStep::Read(IoRange::from_bytes(&self.bytes)),
            Step::Blocked(wait) => RangeStep::Blocked(wait),
        })
    }
}
