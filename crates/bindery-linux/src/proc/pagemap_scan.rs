//! `ioctl(PAGEMAP_SCAN)` of `/proc/self/pagemap`: regions of pages by categories.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::Arch;
use bindery::{
    AddressSpace, Errno, Error, FaultError, PageCategories, PageRegion, PageRegions, PageScan,
    Platform,
};

/// The number of the request.
pub const PAGEMAP_SCAN: u32 = 3 << 30 | (8 * SCAN_WORDS as u32) << 16 | (b'f' as u32) << 8 | 16;
/// The number of 64-bit words in the request's structure (`struct pm_scan_arg`).
pub const SCAN_WORDS: usize = 12;
/// The index of the word that receives the end address of the scan.
pub const SCAN_END: usize = 4;
/// The bytes of a region (`struct page_region`).
const REGION: u64 = 24;

/// `PM_SCAN_WP_MATCHING` and `PM_SCAN_CHECK_WPASYNC`.
const PROTECT: u64 = 1;
const REFUSE: u64 = 2;

/// The capacity of the buffer on the stack, in regions.
const AT_ONCE: usize = 32;

/// Writes to the caller's memory.
pub type RegionSink<'a> = dyn FnMut(VirtAddr, &[u8]) -> Result<(), FaultError> + 'a;

/// Scans `space` as the words of the structure specify and returns the number of regions. Stores
/// the end of the scan in the word [`SCAN_END`], even if the scan itself fails. `write` writes to
/// the caller's memory and is called without locks.
///
/// Context: may sleep. Complexity: as [`AddressSpace::scan_pages`].
///
/// # Errors
/// `EINVAL` for another size, unknown flags or categories, an unaligned start, or a null buffer
/// with a length; `EFAULT` for a range or buffer beyond user space, or a buffer that cannot be
/// written; `EPERM`, `EINTR`; `ENOMEM` if memory runs out before any page is protected. A scan that
/// runs out of memory later ends there without an error.
pub fn pagemap_scan<P: Platform>(
    space: &AddressSpace<'_, P>,
    words: &mut [u64; SCAN_WORDS],
    write: &mut RegionSink<'_>,
) -> Result<u64, Errno> {
    let (scan, room) = arguments::<P>(words)?;
    words[SCAN_END] = scan.range.end().0;
    if room.length == 0 {
        let scanned = space.scan_pages(&scan, None).map_err(refused)?;
        words[SCAN_END] = scanned.end.0;
        return Ok(0);
    }
    let mut done = 0;
    let end = report(space, scan, &room, &mut done, write)?;
    words[SCAN_END] = end.0;
    Ok(done)
}

fn refused(error: Error) -> Errno {
    if error == Error::AccessDenied {
        Errno::EPERM
    } else if error == Error::Interrupted {
        Errno::EINTR
    } else {
        Errno::ENOMEM
    }
}

/// The buffer for regions in the program's memory.
struct Room {
    start: u64,
    /// The capacity in regions.
    length: u64,
}

/// Decodes and checks the structure.
fn arguments<P: Platform>(words: &[u64; SCAN_WORDS]) -> Result<(PageScan, Room), Errno> {
    let [size, flags, start, end, _, vec, length, most, inverted, required, any_of, reported] =
        *words;
    if size != 8 * SCAN_WORDS as u64 || flags & !(PROTECT | REFUSE) != 0 {
        return Err(Errno::EINVAL);
    }
    let categories = |bits| PageCategories::from_bits(bits).ok_or(Errno::EINVAL);
    let (inverted, required) = (categories(inverted)?, categories(required)?);
    let (any_of, reported) = (categories(any_of)?, categories(reported)?);
    if !start.is_multiple_of(PAGE_SIZE) {
        return Err(Errno::EINVAL);
    }
    let inside = |start: u64, end: u64| start <= end && end <= P::Arch::USER_END;
    if !inside(start, end) {
        return Err(Errno::EFAULT);
    }
    if vec == 0 && length > 0 {
        return Err(Errno::EINVAL);
    }
    let behind = length.checked_mul(REGION).and_then(|bytes| vec.checked_add(bytes));
    if vec != 0 && !behind.is_some_and(|behind| inside(vec, behind)) {
        return Err(Errno::EFAULT);
    }
    let scan = PageScan {
        inverted,
        required,
        any_of,
        reported,
        protects: flags & PROTECT != 0,
        refuses_others: flags & REFUSE != 0,
        maximum_pages: if most == 0 { u64::MAX } else { most },
        ..PageScan::of(super::range(VirtAddr(start), VirtAddr(end.next_multiple_of(PAGE_SIZE))))
    };
    Ok((scan, Room { start: vec, length }))
}

/// Scans and writes regions, a few at a time. Withholds the last region, because the next scan may
/// extend it.
fn report<P: Platform>(
    space: &AddressSpace<'_, P>,
    mut scan: PageScan,
    room: &Room,
    done: &mut u64,
    write: &mut RegionSink<'_>,
) -> Result<VirtAddr, Errno> {
    let (start, end) = (scan.range.start(), scan.range.end());
    let mut buffer = [PageRegion::default(); AT_ONCE];
    let mut last = None;
    loop {
        let left = usize::try_from(room.length - *done).map_or(AT_ONCE, |left| left.min(AT_ONCE));
        let mut regions = match last {
            None => PageRegions::new(&mut buffer[..left]),
            Some(region) => PageRegions::after(&mut buffer[..left], region),
        };
        let scanned = match space.scan_pages(&scan, Some(&mut regions)) {
            Ok(scanned) => scanned,
            Err(error) => {
                if let Some(region) = last {
                    write_region(room, done, &region, write)?;
                }
                // The pages protected so far must be reported. The next scan returns the error.
                let short = error == Error::OutOfMemory && scan.range.start() > start;
                return if short { Ok(scan.range.start()) } else { Err(refused(error)) };
            }
        };
        let found = regions.found();
        let more = scanned.end < end && regions.is_full() && *done + (left as u64) < room.length;
        let kept = usize::from(more);
        for region in &found[..found.len() - kept] {
            write_region(room, done, region, write)?;
        }
        if !more {
            return Ok(scanned.end);
        }
        last = found.last().copied();
        scan.range = super::range(scanned.end, end);
        scan.maximum_pages -= scanned.pages;
    }
}

fn write_region(
    room: &Room,
    done: &mut u64,
    region: &PageRegion,
    write: &mut RegionSink<'_>,
) -> Result<(), Errno> {
    let place = VirtAddr(room.start + *done * REGION);
    write(place, &bytes_of(region)).map_err(|_| Errno::EFAULT)?;
    *done += 1;
    Ok(())
}

fn bytes_of(region: &PageRegion) -> [u8; REGION as usize] {
    let mut bytes = [0; REGION as usize];
    let words = [region.range.start().0, region.range.end().0, region.categories.bits()];
    for (slot, word) in bytes.chunks_exact_mut(8).zip(words) {
        slot.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}
