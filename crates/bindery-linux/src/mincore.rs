//! `mincore`.

use bindery::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr};
use bindery::{AddressSpace, Errno, Error, Operation, Platform, Residence};

use super::Outcome;

/// The number of pages whose answers are buffered on the stack.
const PAGES_AT_ONCE: u64 = 512;

pub(super) fn mincore<P: Platform>(
    space: &AddressSpace<'_, P>,
    addr: u64,
    length: u64,
    vector: u64,
) -> Outcome {
    if !addr.is_multiple_of(PAGE_SIZE) {
        return Err(Errno::EINVAL);
    }
    let limit = space.limit().0;
    let fits = |start: u64, length: u64| length <= limit && start <= limit - length;
    if !fits(addr, length) {
        return Err(Errno::ENOMEM);
    }
    let pages = length.div_ceil(PAGE_SIZE);
    if !fits(vector, pages) {
        return Err(Errno::EFAULT);
    }
    let mut done = 0;
    while done < pages {
        let mut answers = [0_u8; PAGES_AT_ONCE as usize];
        let mut known = 0;
        let start = VirtAddr(addr + (done << PAGE_SHIFT));
        // One mapping at a time, as on Linux: the vector itself may lie in the next mapping, and
        // writing to it makes pages there resident.
        let end = space.mapping_end(start).unwrap_or(start);
        let left = ((end.0 - start.0) >> PAGE_SHIFT).max(1);
        let count = (pages - done).min(PAGES_AT_ONCE).min(left);
        let told = space.mincore(start, count << PAGE_SHIFT, |residence, pages| {
            let stretch = &mut answers[known..known + pages as usize];
            stretch.fill(u8::from(residence == Residence::Resident));
            known += pages as usize;
        });
        // The answers before a hole are written even if the call fails at the hole.
        let to = VirtAddr(vector + done);
        space.write_user(to, &answers[..known]).map_err(|_| Errno::EFAULT)?;
        told.map_err(|error| {
            let beyond = matches!(error, Error::OutOfRange { .. });
            if beyond { Errno::ENOMEM } else { error.errno(Operation::Mincore) }
        })?;
        done += count;
    }
    Ok(0)
}
