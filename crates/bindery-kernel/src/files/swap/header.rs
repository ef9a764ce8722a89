//! The first page of a swap area, as `mkswap(8)` writes it.

use crate::errno::Errno;

/// Bytes of the page.
pub const SIZE: usize = 4096;
const SIGNATURE: &[u8; 10] = b"SWAPSPACE2";
/// The offset of the fields after the space for a boot loader: version, number of the last page,
/// number of bad pages.
const FIELDS: usize = 1024;

/// The number of slots in the area: the pages behind the first one.
///
/// # Errors
/// `EINVAL` if the page lacks the signature, or has another version, no pages, bad pages (memory
/// has none), or more pages than the device (`pages`).
pub fn slots(page: &[u8; SIZE], pages: u64) -> Result<u64, Errno> {
    if !page.ends_with(SIGNATURE) {
        return Err(Errno::EINVAL);
    }
    let field = |number: usize| {
        let at = FIELDS + 4 * number;
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&page[at..at + 4]);
        u32::from_le_bytes(bytes)
    };
    let (version, last, bad) = (field(0), u64::from(field(1)), field(2));
    if version != 1 || last == 0 || last >= pages || bad != 0 {
        return Err(Errno::EINVAL);
    }
    Ok(last)
}
