//! Fast formatting of lines: a listing of 30,000 mappings has 150,000 numbers.

use core::fmt::{self, Write};

use crate::addr::VirtRange;
use crate::space::MappingFlags;

use super::naming::FileId;

/// Bytes of a line before its path, with the space in front of it. As Linux's: enough for 64-bit
/// addresses and offset.
const PATH_COLUMN: usize = 73;

/// The width of the names in lines that tell a size, and of the numbers behind them.
const NAME_WIDTH: usize = 16;
const NUMBER_WIDTH: usize = 8;

/// The most digits that a number of 64 bits has.
const DIGITS: usize = 20;

/// Room for all columns of a line: two addresses and an offset of 16 digits, 4 letters, two numbers
/// of 8 digits, one of 20, and 9 characters between them.
const ROOM: usize = 128;

/// The beginning of a line. What does not fit is left out, which callers keep from happening.
pub(super) struct Columns {
    bytes: [u8; ROOM],
    length: usize,
}

impl Columns {
    pub(super) fn new() -> Self {
        Self { bytes: [0; ROOM], length: 0 }
    }

    pub(super) fn push(&mut self, text: &str) {
        let into = self.bytes.get_mut(self.length..self.length + text.len());
        if let Some(into) = into {
            into.copy_from_slice(text.as_bytes());
            self.length += text.len();
        }
    }

    /// Goes to a column, and at least `least` further.
    fn pad(&mut self, column: usize, least: usize) {
        let end = column.max(self.length + least).min(ROOM);
        self.bytes[self.length..end].fill(b' ');
        self.length = end;
    }

    /// Writes a decimal number, at least `least` characters wide.
    fn push_number(&mut self, mut value: u64, least: usize, fill: u8) {
        let mut digits = [fill; DIGITS];
        let mut at = DIGITS;
        loop {
            at -= 1;
            digits[at] = b'0' + (value % 10) as u8;
            value /= 10;
            if value == 0 {
                break;
            }
        }
        let text = &digits[at.min(DIGITS - least)..];
        if let Some(into) = self.bytes.get_mut(self.length..self.length + text.len()) {
            into.copy_from_slice(text);
            self.length += text.len();
        }
    }

    /// Writes a hexadecimal number, with zeros in front up to `least` digits.
    pub(super) fn push_hexadecimal(&mut self, mut value: u64, least: usize) {
        // The number of digits is known beforehand, so they are written in place.
        let digits = (67 - (value | 1).leading_zeros() as usize) / 4;
        let end = self.length + digits.max(least);
        let Some(into) = self.bytes.get_mut(self.length..end) else { return };
        for digit in into.iter_mut().rev() {
            *digit = b"0123456789abcdef"[value as usize & 15];
            value >>= 4;
        }
        self.length = end;
    }

    pub(super) fn push_decimal(&mut self, value: u64) {
        self.push_number(value, 1, b' ');
    }

    fn as_str(&self) -> &str {
        // SAFETY: 1. The bytes up to `length` are whole texts (`push`), spaces and digits, one behind
        // the other, so they are UTF-8. Looking again would cost a tenth of a listing.
        unsafe { core::str::from_utf8_unchecked(&self.bytes[..self.length]) }
    }

    pub(super) fn write_to(&self, out: &mut dyn Write) -> fmt::Result {
        out.write_str(self.as_str())
    }

    /// All of a mapping's line that stands before its path; `offset` is in bytes.
    pub(super) fn of_mapping(
        range: VirtRange,
        flags: MappingFlags,
        offset: u64,
        file: FileId,
    ) -> Self {
        let letter = |flag: MappingFlags, letter: &'static str| {
            if flags.contains(flag) { letter } else { "-" }
        };
        let mut line = Self::new();
        line.push_hexadecimal(range.start().0, 8);
        line.push("-");
        line.push_hexadecimal(range.end().0, 8);
        line.push(" ");
        line.push(letter(MappingFlags::READ, "r"));
        line.push(letter(MappingFlags::WRITE, "w"));
        line.push(letter(MappingFlags::EXECUTE, "x"));
        line.push(if flags.contains(MappingFlags::SHARED) { "s " } else { "p " });
        line.push_hexadecimal(offset, 8);
        line.push(" ");
        line.push_hexadecimal(file.major.into(), 2);
        line.push(":");
        line.push_hexadecimal(file.minor.into(), 2);
        line.push(" ");
        line.push_decimal(file.inode);
        line.push(" ");
        line
    }

    /// Goes to where paths begin: one space further at least, however long the columns are.
    pub(super) fn pad_to_path(&mut self) {
        self.pad(PATH_COLUMN, 1);
    }
}

/// Writes a line that tells a number of bytes.
pub(super) fn write_size(out: &mut dyn Write, name: &str, bytes: u64) -> fmt::Result {
    write_number(out, name, bytes >> 10, " kB\n")
}

/// Writes a line that tells a number. Names that are longer than their column take from the number's.
pub(super) fn write_number(
    out: &mut dyn Write,
    name: &str,
    number: u64,
    unit: &str,
) -> fmt::Result {
    let mut line = Columns::new();
    line.push(name);
    line.pad(NAME_WIDTH, 0);
    let width = (NAME_WIDTH + NUMBER_WIDTH).saturating_sub(line.length);
    line.push_number(number, width, b' ');
    line.push(unit);
    line.write_to(out)
}
