//! The part of a text that one read requests.

use core::fmt::{self, Write};

/// A buffer for one read of a longer text: it keeps the requested part (Linux: `seq_file`).
pub struct SequenceBuffer<'a> {
    /// The number of bytes still to skip.
    skip: u64,
    into: &'a mut [u8],
    filled: usize,
}

impl<'a> SequenceBuffer<'a> {
    /// The part that begins at `at`, as long as `into`.
    pub fn new(at: u64, into: &'a mut [u8]) -> Self {
        Self { skip: at, into, filled: 0 }
    }

    /// The number of bytes in the part.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Adds bytes. Fails once the part is complete, so that no more text is generated.
    pub fn push(&mut self, bytes: &[u8]) -> fmt::Result {
        let skipped = self.skip.min(bytes.len() as u64);
        self.skip -= skipped;
        let bytes = &bytes[skipped as usize..];
        let count = bytes.len().min(self.into.len() - self.filled);
        self.into[self.filled..self.filled + count].copy_from_slice(&bytes[..count]);
        self.filled += count;
        if count < bytes.len() { Err(fmt::Error) } else { Ok(()) }
    }
}

impl Write for SequenceBuffer<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text.as_bytes())
    }
}
