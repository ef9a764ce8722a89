//! Files under `/sys` with one setting each. Linux's rules for writes apply: one newline may follow
//! the value, and nothing else may surround it.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt::{self, Write};
use core::ops::RangeInclusive;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::errno::Errno;

use super::super::attributes::{Attributes, Kind, Patience};
use super::super::inode::new_number;
use super::super::node::Node;
use super::super::sequence::SequenceBuffer;

/// The value that a file reads and writes.
pub trait Value: Send + Sync {
    /// Writes the text, without a newline.
    fn show(&self, out: &mut SequenceBuffer<'_>) -> fmt::Result;

    /// Sets the value from a text without a newline.
    ///
    /// # Errors
    /// `EINVAL` if the text has no meaning.
    fn take(&self, text: &str) -> Result<(), Errno>;
}

/// A file with a value.
pub struct Setting {
    number: u64,
    value: Box<dyn Value>,
}

impl Setting {
    /// A file that can be read and written.
    pub fn file(value: impl Value + 'static) -> Arc<dyn Node> {
        Self::of(Box::new(value))
    }

    #[inline(never)]
    fn of(value: Box<dyn Value>) -> Arc<dyn Node> {
        Arc::new(Self { number: new_number(), value })
    }
}

impl Node for Setting {
    fn kind(&self) -> Kind {
        Kind::Regular
    }

    fn attributes(&self) -> Attributes {
        Attributes::plain(self.number, 0o644)
    }

    fn read(&self, at: u64, into: &mut [u8], _: Patience) -> Result<usize, Errno> {
        let mut buffer = SequenceBuffer::new(at, into);
        // An error means that the buffer is full.
        let _ = self.value.show(&mut buffer).and_then(|()| buffer.write_str("\n"));
        Ok(buffer.filled())
    }

    fn write(&self, _: u64, from: &[u8], _: Patience) -> Result<usize, Errno> {
        let text = core::str::from_utf8(from).map_err(|_| Errno::EINVAL)?;
        self.value.take(text.strip_suffix('\n').unwrap_or(text))?;
        Ok(from.len())
    }
}

/// A number in a range.
pub struct Number {
    cell: &'static AtomicU32,
    range: RangeInclusive<u32>,
    changed: fn(),
}

impl Number {
    /// A number that is computed on each read.
    pub fn new(cell: &'static AtomicU32, range: RangeInclusive<u32>) -> Self {
        Self { cell, range, changed: || {} }
    }

    /// A number. `changed` is called after each write.
    pub fn watched(cell: &'static AtomicU32, changed: fn()) -> Self {
        Self { cell, range: 0..=u32::MAX, changed }
    }
}

impl Value for Number {
    fn show(&self, out: &mut SequenceBuffer<'_>) -> fmt::Result {
        write!(out, "{}", self.cell.load(Ordering::Relaxed))
    }

    fn take(&self, text: &str) -> Result<(), Errno> {
        let number: u32 = text.parse().map_err(|_| Errno::EINVAL)?;
        if !self.range.contains(&number) {
            return Err(Errno::EINVAL);
        }
        self.cell.store(number, Ordering::Relaxed);
        (self.changed)();
        Ok(())
    }
}

/// Writes words, with the one at index `chosen` in brackets.
pub fn show_words<'a>(
    words: impl Iterator<Item = &'a str>,
    chosen: usize,
    out: &mut SequenceBuffer<'_>,
) -> fmt::Result {
    for (index, word) in words.enumerate() {
        let space = if index > 0 { " " } else { "" };
        if index == chosen {
            write!(out, "{space}[{word}]")?;
        } else {
            write!(out, "{space}{word}")?;
        }
    }
    Ok(())
}
