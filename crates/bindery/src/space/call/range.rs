//! The pages that a call specifies by a start and a length.

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::Arch;
use crate::error::Error;

/// `length` bytes, rounded up to pages, from `start` on.
///
/// # Errors
/// [`Error::Unaligned`]; [`Error::OutOfRange`] if the range wraps.
#[inline]
pub(super) fn page_range<A: Arch>(start: VirtAddr, length: u64) -> Result<VirtRange, Error> {
    if !start.is_aligned(PAGE_SIZE) {
        return Err(Error::Unaligned(start));
    }
    let rounded = length.checked_next_multiple_of(PAGE_SIZE);
    let range = rounded.and_then(|length| VirtRange::from_len(start, length));
    range.ok_or(Error::OutOfRange { limit: VirtAddr(A::USER_END) })
}
