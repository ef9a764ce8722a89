//! [`ReadBuffer`]: pages that a pager fills.

use core::fmt;

use arrayvec::ArrayVec;

use super::PagerError;

/// The maximum number of folios that one call of the pager fills.
pub(super) const FOLIOS: usize = 32;

/// Consecutive pages of a file that [`Pager::read`](super::Pager::read) fills, from the first byte
/// on. The pages form pieces, one for each folio.
///
/// The frames had other owners before. So the buffer counts the bytes that were appended, and the
/// core zeroes the rest: a pager that appends too little exposes zeroes and never the bytes of
/// another program. A pager that appends everything causes no further work.
///
/// ```
/// use bindery::{PagerError, ReadBuffer};
///
/// /// Reads from a disk that may end before the pages do.
/// fn read(disk: &[u8], into: &mut ReadBuffer<'_>) -> Result<(), PagerError> {
///     into.append(disk);
///     Ok(())
/// }
///
/// /// Has the bytes put where they belong, a piece at a time.
/// fn load(mut disk: impl std::io::Read, into: &mut ReadBuffer<'_>) -> Result<(), PagerError> {
///     while into.left() > 0 {
///         let read = into.append_with(|piece| {
///             disk.read(piece).map_err(|_| PagerError::InputOutput)
///         })?;
///         if read == 0 {
///             break;
///         }
///     }
///     Ok(())
/// }
/// ```
///
/// # Context
/// Context: any.
pub struct ReadBuffer<'a> {
    // A pager must have no means to make a buffer with the lifetime of the one that it received: it
    // could replace the received buffer, whose pages would then not be zeroed.
    pieces: ArrayVec<&'a mut [u8], FOLIOS>,
    /// The number of bytes that were appended.
    filled: usize,
    length: usize,
}

impl<'a> ReadBuffer<'a> {
    /// A buffer of these pieces, whose first `filled` bytes already have their content.
    pub(super) fn new(pieces: ArrayVec<&'a mut [u8], FOLIOS>, filled: usize) -> Self {
        let length = pieces.iter().map(|piece| piece.len()).sum();
        Self { pieces, filled: filled.min(length), length }
    }

    /// The number of bytes that already have their content.
    pub(super) fn filled(&self) -> usize {
        self.filled
    }

    /// Calls `read` to fill `bytes`, as the core calls a pager, and zeroes the rest. Intended for
    /// tests of pagers.
    ///
    /// ```
    /// use bindery::ReadBuffer;
    ///
    /// let mut bytes = *b"stale";
    /// ReadBuffer::over(&mut bytes, |buffer| buffer.append(b"ab"));
    /// assert_eq!(&bytes, b"ab\0\0\0");
    /// ```
    ///
    /// A pager may fill the core's buffer from the one that `read` gets:
    ///
    /// ```
    /// fn read(into: &mut bindery::ReadBuffer<'_>) {
    ///     bindery::ReadBuffer::over(&mut [], |other| drop(into.append(&[other.left() as u8])));
    /// }
    /// ```
    ///
    /// but neither buffer can replace the other:
    ///
    /// ```compile_fail
    /// fn read(into: &mut bindery::ReadBuffer<'_>) {
    ///     bindery::ReadBuffer::over(&mut [], |other| std::mem::swap(into, other));
    /// }
    /// ```
    pub fn over<R>(bytes: &mut [u8], read: impl FnOnce(&mut ReadBuffer<'_>) -> R) -> R {
        let size = bytes.len() as u64;
        let mut pieces = ArrayVec::new();
        pieces.push(bytes);
        let mut buffer = ReadBuffer::new(pieces, 0);
        let result = read(&mut buffer);
        buffer.zero_rest(size);
        result
    }

    /// The size of all pages in bytes: a multiple of the page size.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The number of bytes still to be filled.
    pub fn left(&self) -> usize {
        self.length - self.filled
    }

    /// Appends as many of the bytes as fit. Returns their number.
    ///
    /// Complexity: linear in the bytes.
    pub fn append(&mut self, bytes: &[u8]) -> usize {
        let before = self.filled;
        while let rest = &bytes[self.filled - before..]
            && let (1.., Some(piece)) = (rest.len(), self.unfilled())
        {
            let count = rest.len().min(piece.len());
            piece[..count].copy_from_slice(&rest[..count]);
            self.filled += count;
        }
        self.filled - before
    }

    /// Calls `fill` to write the next bytes in place. It receives the rest of a piece, which may be
    /// shorter than [`ReadBuffer::left`], and returns the number of bytes that it wrote from the
    /// piece's beginning on, like a function that reads a file. A number beyond the piece's length
    /// counts as that length. Returns the number. `fill` must not read the bytes before it has
    /// written them, and it must not count bytes that it did not write, because those belong to the
    /// frame's last owner.
    ///
    /// `fill` is not called if the buffer is full.
    ///
    /// # Errors
    /// The errors of `fill`; nothing is appended.
    pub fn append_with(
        &mut self,
        fill: impl FnOnce(&mut [u8]) -> Result<usize, PagerError>,
    ) -> Result<usize, PagerError> {
        let Some(piece) = self.unfilled() else { return Ok(0) };
        let count = fill(piece)?.min(piece.len());
        self.filled += count;
        Ok(count)
    }

    /// Fills the rest with a repeated byte.
    ///
    /// Complexity: linear in the remaining bytes.
    pub fn append_all(&mut self, byte: u8) {
        while let Some(piece) = self.unfilled() {
            piece.fill(byte);
            self.filled += piece.len();
        }
    }

    /// The rest of the first piece that is not full.
    fn unfilled(&mut self) -> Option<&mut [u8]> {
        let mut before = self.filled;
        for piece in &mut self.pieces {
            if before < piece.len() {
                return Some(&mut piece[before..]);
            }
            before -= piece.len();
        }
        None
    }

    /// Zeroes the bytes that were not appended, and those beyond the first `size` bytes, which lie
    /// after the end of the file. Returns the number of bytes zeroed.
    pub(super) fn zero_rest(self, size: u64) -> usize {
        let mut kept = self.filled.min(usize::try_from(size).unwrap_or(usize::MAX));
        let zeroed = self.length - kept;
        for piece in self.pieces {
            let inside = kept.min(piece.len());
            piece[inside..].fill(0);
            kept -= inside;
        }
        zeroed
    }
}

impl fmt::Debug for ReadBuffer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { filled, length, .. } = self;
        f.debug_struct("ReadBuffer").field("filled", filled).field("length", length).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result of `fill` on two pieces of stale bytes, and the number of bytes zeroed.
    fn filled(size: u64, fill: impl FnOnce(&mut ReadBuffer<'_>)) -> ([u8; 12], usize) {
        let mut bytes = [0xee; 12];
        let (first, second) = bytes.split_at_mut(4);
        let mut pieces = ArrayVec::new();
        pieces.extend([first, second]);
        let mut buffer = ReadBuffer::new(pieces, 0);
        fill(&mut buffer);
        let zeroed = buffer.zero_rest(size);
        (bytes, zeroed)
    }

    #[test]
    fn bytes_that_were_not_appended_are_zeroes() {
        assert_eq!(filled(12, |_| ()), ([0; 12], 12));
        let short = filled(12, |buffer| assert_eq!(buffer.append(&[1; 6]), 6));
        assert_eq!(short, ([1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0], 6));
        let fails = filled(12, |buffer| {
            let fill = |piece: &mut [u8]| {
                piece.fill(1);
                Err(PagerError::InputOutput)
            };
            assert_eq!(buffer.append_with(fill), Err(PagerError::InputOutput));
        });
        assert_eq!(fails, ([0; 12], 12));
    }

    #[test]
    fn a_full_buffer_is_not_zeroed() {
        assert_eq!(filled(12, |buffer| assert_eq!(buffer.append(&[1; 99]), 12)), ([1; 12], 0));
        assert_eq!(filled(u64::MAX, |buffer| buffer.append_all(1)), ([1; 12], 0));
        let pieces = filled(12, |buffer| {
            let fill = |piece: &mut [u8]| {
                piece.fill(1);
                Ok(usize::MAX)
            };
            let lengths = [(); 3].map(|()| buffer.append_with(fill));
            assert_eq!(lengths, [Ok(4), Ok(8), Ok(0)]);
        });
        assert_eq!(pieces, ([1; 12], 0));
        // Beyond the end of the file.
        let (bytes, zeroed) = filled(5, |buffer| buffer.append_all(1));
        assert_eq!((bytes, zeroed), ([1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0], 7));
    }
}
