//! Sizes in bytes, as users type and read them.

use std::fmt;
use std::str::FromStr;

use bindery::addr::{PAGE_SHIFT, PAGE_SIZE};

/// A kibibyte.
pub const KIB: u64 = 1 << 10;
/// A mebibyte.
pub const MIB: u64 = 1 << 20;
/// A gibibyte.
pub const GIB: u64 = 1 << 30;

/// The largest order of folios.
pub const MAX_ORDER: u8 = 9;

/// The size of the folios of first touches: a power of two from 4 KiB to 2 MiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FolioSize {
    order: u8,
}

impl FolioSize {
    /// One base page.
    pub const BASE: Self = Self { order: 0 };
    /// 64 KiB.
    pub const KIB_64: Self = Self { order: 4 };
    /// 2 MiB.
    pub const MIB_2: Self = Self { order: MAX_ORDER };

    /// The base-2 logarithm of its number of base pages.
    pub fn order(self) -> u8 {
        self.order
    }

    /// The folio's size in bytes.
    pub fn bytes(self) -> u64 {
        PAGE_SIZE << self.order
    }
}

impl FromStr for FolioSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || {
            format!(
                "{text:?} is not a folio size; give a power of two from 4k to 2m, for example 64k"
            )
        };
        let bytes = parse_bytes(text).ok_or_else(refused)?;
        let fits = bytes.is_power_of_two() && (PAGE_SIZE..=PAGE_SIZE << MAX_ORDER).contains(&bytes);
        if !fits {
            return Err(refused());
        }
        Ok(Self { order: (bytes.trailing_zeros() - PAGE_SHIFT) as u8 })
    }
}

impl fmt::Display for FolioSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&show_bytes(self.bytes()))
    }
}

/// `64k`, `64K`, `64kB` and `64KiB` are all 65,536; a bare number counts bytes.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => KIB,
        "m" | "mb" | "mib" => MIB,
        "g" | "gb" | "gib" => GIB,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(scale)
}

/// The size in the largest unit that leaves no fraction.
pub fn show_bytes(bytes: u64) -> String {
    let units = [(GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")];
    let fitting = units.into_iter().find(|(unit, _)| bytes >= *unit && bytes.is_multiple_of(*unit));
    match fitting {
        Some((unit, name)) => format!("{} {name}", bytes / unit),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(text: &str) -> Option<u8> {
        text.parse::<FolioSize>().ok().map(FolioSize::order)
    }

    #[test]
    fn folio_sizes_are_read_in_every_customary_spelling() {
        assert_eq!(order("4k"), Some(0));
        for spelling in ["64k", "64K", "64kB", "64KiB", "64 KiB", "65536"] {
            assert_eq!(order(spelling), Some(4), "{spelling}");
        }
        assert_eq!(order("2m"), Some(9));
    }

    #[test]
    fn a_wrong_folio_size_is_refused_with_examples() {
        for wrong in ["", "k", "3k", "2k", "4m", "-4k", "4 kilo", "99999999999999999999k"] {
            let error = wrong.parse::<FolioSize>().unwrap_err();
            assert!(error.contains("64k") && error.contains(wrong), "{error}");
        }
        assert_eq!("17179869184g".parse::<FolioSize>().ok(), None, "the product would wrap");
    }

    #[test]
    fn sizes_are_shown_in_the_largest_whole_unit() {
        assert_eq!(FolioSize::BASE.to_string(), "4 KiB");
        assert_eq!(show_bytes(2 * MIB), "2 MiB");
        assert_eq!(show_bytes(MIB + 4 * KIB), "1028 KiB");
        assert_eq!(show_bytes(10), "10 bytes");
    }
}
