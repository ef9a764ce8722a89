//! Formats lines faster than `core::fmt`: a listing of 30,000 mappings has 150,000 numbers.

use core::fmt::{self, Write};
use core::mem::MaybeUninit;

use bindery::MappingFlags;
use bindery::addr::VirtRange;

use super::naming::FileId;

/// The column at which paths begin, as on Linux.
const PATH_COLUMN: usize = 73;

/// The widths of names and numbers in lines of the form `Size: 4 kB`.
const NAME_WIDTH: usize = 16;
const NUMBER_WIDTH: usize = 8;

/// Room for all columns of a line: two addresses and an offset of 16 digits, 4 letters, two numbers
/// of 8 digits, one number of 20 digits, and 9 separators.
const ROOM: usize = 128;

/// The columns of a line before its path. Text beyond [`ROOM`] is dropped; callers stay below it.
pub(super) struct Columns {
    // Not zeroed, since zeroing would cost more than writing most lines. The first `length` bytes
    // are initialized.
    bytes: [MaybeUninit<u8>; ROOM],
    length: usize,
}

impl Columns {
    #[inline]
    pub(super) fn new() -> Self {
        Self { bytes: [const { MaybeUninit::uninit() }; ROOM], length: 0 }
    }

    /// Reserves the next `count` bytes. The caller must write all of them, as UTF-8. Returns an
    /// empty slice if they do not fit.
    #[inline]
    fn extend(&mut self, count: usize) -> &mut [MaybeUninit<u8>] {
        let start = self.length;
        match self.bytes.get_mut(start..start + count) {
            Some(into) => {
                self.length += count;
                into
            }
            None => &mut [],
        }
    }

    #[inline]
    pub(super) fn push(&mut self, text: &str) {
        // The texts are short, so a call of `memcpy` would cost more than this loop.
        for (into, byte) in self.extend(text.len()).iter_mut().zip(text.bytes()) {
            into.write(byte);
        }
    }

    /// Writes spaces up to `column`, at least `least`.
    fn pad(&mut self, column: usize, least: usize) {
        let end = column.max(self.length + least).min(ROOM);
        for into in self.extend(end.saturating_sub(self.length)) {
            into.write(b' ');
        }
    }

    /// Writes a decimal number, at least `least` characters wide.
    fn push_number(&mut self, mut value: u64, least: usize, fill: u8) {
        let digits = value.checked_ilog10().unwrap_or(0) as usize + 1;
        let into = self.extend(digits.max(least));
        let front = into.len().saturating_sub(digits);
        let (blanks, places) = into.split_at_mut(front);
        for place in blanks {
            place.write(fill);
        }
        for place in places.iter_mut().rev() {
            place.write(b'0' + (value % 10) as u8);
            value /= 10;
        }
    }

    /// Writes a hexadecimal number, with zeros in front up to `least` digits.
    pub(super) fn push_hexadecimal(&mut self, mut value: u64, least: usize) {
        let digits = (67 - (value | 1).leading_zeros() as usize) / 4;
        for place in self.extend(digits.max(least)).iter_mut().rev() {
            place.write(b"0123456789abcdef"[value as usize & 15]);
            value >>= 4;
        }
    }

    pub(super) fn push_decimal(&mut self, value: u64) {
        self.push_number(value, 1, b' ');
    }

    fn as_str(&self) -> &str {
        let written = &self.bytes[..self.length];
        // SAFETY: 1. The bytes up to `length` are initialized by the callers of `extend`.
        // 2. The bytes are a sequence of whole texts, spaces and digits, so they are valid UTF-8. A
        //    check would take a tenth of a listing's time.
        unsafe {
            let bytes = core::slice::from_raw_parts(written.as_ptr().cast::<u8>(), written.len());
            core::str::from_utf8_unchecked(bytes)
        }
    }

    pub(super) fn write_to(&self, out: &mut dyn Write) -> fmt::Result {
        out.write_str(self.as_str())
    }

    /// The columns of a mapping's line before its path; `offset` is in bytes.
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

    /// Writes spaces up to the column of paths, at least one.
    pub(super) fn pad_to_path(&mut self) {
        self.pad(PATH_COLUMN, 1);
    }
}

/// Writes a line with a size in KiB.
pub(super) fn write_size(out: &mut dyn Write, name: &str, bytes: u64) -> fmt::Result {
    write_number(out, name, bytes >> 10, " kB\n")
}

/// Writes a line with a number. A name longer than its column shortens the padding of the number.
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
