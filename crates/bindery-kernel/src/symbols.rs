//! The kernel's symbols, from the file `/.bindery/symbols` of the initramfs.

use spin::Once;

/// Lines `HEXADDRESS NAME`, in rising order.
static TEXT: Once<&'static [u8]> = Once::new();

/// Records the file's bytes, which stay in the initramfs.
pub fn begin(text: &'static [u8]) {
    TEXT.call_once(|| text);
}

/// The symbol that contains `address`, and the offset in it. Callable from a panic, because it
/// acquires no lock and allocates nothing.
pub fn name(address: u64) -> Option<(&'static str, u64)> {
    let lines = TEXT.get()?.split(|byte| *byte == b'\n');
    let symbols = lines.filter_map(|line| {
        let (start, name) = core::str::from_utf8(line).ok()?.split_once(' ')?;
        Some((u64::from_str_radix(start, 16).ok()?, name))
    });
    let (start, name) = symbols.take_while(|(start, _)| *start <= address).last()?;
    Some((name, address - start))
}
