//! Arrays of `struct iovec` in a program's memory: address and length, 64 bits each.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{AddressSpace, Errno, Platform};

/// The most ranges of one call (`UIO_MAXIOV`).
pub(super) const MOST_RANGES: u64 = 1024;
/// The most bytes of one call, truncated as on Linux (`MAX_RW_COUNT`).
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
    /// Its start.
    pub start: u64,
    /// Its length in bytes.
    pub length: u64,
}

impl IoRange {
    /// The range at `vector`, or `index` ranges after it.
    pub(super) fn read<P: Platform>(
        space: &AddressSpace<'_, P>,
        vector: u64,
        index: u64,
    ) -> Result<Self, Errno> {
        let mut bytes = [0; 16];
        let at = vector.checked_add(index * 16).ok_or(Errno::EFAULT)?;
        space.read_user(VirtAddr(at), &mut bytes).map_err(|_| Errno::EFAULT)?;
        let (start, length) = bytes.split_at(8);
        let word =
            |bytes: &[u8]| bytes.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte));
        Ok(Self { start: word(start), length: word(length) })
    }
}
