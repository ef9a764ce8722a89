//! Numbers and bytes in a format close to that of `strace`.

/// An address, or a value stored by a program.
pub fn hexadecimal(value: u64) -> String {
    if value < 10 { value.to_string() } else { format!("{value:#x}") }
}

/// A length in the largest unit that leaves no fraction, or otherwise in hexadecimal digits.
pub fn size(bytes: u64) -> String {
    let units = [(30, 'G'), (20, 'M'), (10, 'K')];
    let fitting =
        units.into_iter().find(|(shift, _)| bytes != 0 && bytes.trailing_zeros() >= *shift);
    match fitting {
        _ if bytes > i64::MAX as u64 => format!("{bytes:#x}"),
        Some((shift, unit)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

/// Bytes in brackets: all bytes of a short sequence, the beginning of a long one, or a single byte
/// if all are equal.
pub fn bytes(bytes: &[u8]) -> String {
    const SHOWN: usize = 16;
    let digits =
        |some: &[u8]| some.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ");
    match bytes {
        [first, rest @ ..] if rest.len() >= SHOWN && rest.iter().all(|byte| byte == first) => {
            format!("[{first:02x}, {} times]", bytes.len())
        }
        [some @ .., _] if some.len() >= SHOWN => {
            format!("[{} ... {} bytes]", digits(&bytes[..SHOWN]), bytes.len())
        }
        few => format!("[{}]", digits(few)),
    }
}

/// "1 mapping", "2 mappings".
pub fn plural(count: u64, one: &str) -> String {
    if count == 1 { format!("1 {one}") } else { format!("{count} {one}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_have_the_largest_whole_unit() {
        let shown = [0, 4095, 4096, 3 << 20, 5 << 30, (1 << 20) + 1].map(size);
        assert_eq!(shown, ["0", "4095", "4K", "3M", "5G", "1048577"]);
        assert_eq!(size(0xffff_ffff_ffff_f000), "0xfffffffffffff000");
    }

    #[test]
    fn many_bytes_are_cut_short() {
        assert_eq!(bytes(&[]), "[]");
        assert_eq!(bytes(&[1, 0xa0]), "[01 a0]");
        assert_eq!(bytes(&[7; 17]), "[07, 17 times]");
        let many: Vec<u8> = (0..20).collect();
        assert!(bytes(&many).ends_with("0e 0f ... 20 bytes]"), "{}", bytes(&many));
    }
}
