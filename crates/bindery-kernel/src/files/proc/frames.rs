//! `/proc/kpageflags` and `/proc/kpagecount`: a word for each frame, written by the core.

use alloc::sync::Arc;

use bindery::Memory;
use bindery_linux::proc::{kpagecount, kpageflags};

use crate::errno::Errno;
use crate::memory::memory;
use crate::platform::Machine;

use super::super::attributes::{Attributes, Kind, Patience};
use super::super::inode::new_number;
use super::super::node::Node;

/// Fills words from a frame's number on. Returns their count, which is smaller only at the end.
type Fill = fn(&Memory<Machine>, u64, &mut [u64]) -> usize;

struct Words {
    number: u64,
    fill: Fill,
}

/// `kpageflags`.
pub fn flags() -> Arc<dyn Node> {
    Arc::new(Words { number: new_number(), fill: kpageflags })
}

/// `kpagecount`.
pub fn counts() -> Arc<dyn Node> {
    Arc::new(Words { number: new_number(), fill: kpagecount })
}

impl Node for Words {
    fn kind(&self) -> Kind {
        Kind::Regular
    }

    fn attributes(&self) -> Attributes {
        Attributes::plain(self.number, 0o400)
    }

    fn read(&self, at: u64, into: &mut [u8], _: Patience) -> Result<usize, Errno> {
        read_words(at, into, |first, words| (self.fill)(memory(), first, words))
    }

    fn write(&self, _: u64, _: &[u8], _: Patience) -> Result<usize, Errno> {
        Err(Errno::EIO)
    }
}

/// Reads a file of eight-byte words, whole words only. `fill` writes the words from a number on and
/// returns their count.
///
/// # Errors
/// `EINVAL` for a part of a word.
pub fn read_words(
    at: u64,
    into: &mut [u8],
    mut fill: impl FnMut(u64, &mut [u64]) -> usize,
) -> Result<usize, Errno> {
    if !at.is_multiple_of(8) || !into.len().is_multiple_of(8) {
        return Err(Errno::EINVAL);
    }
    let (mut words, mut done) = ([0_u64; 64], 0);
    while done < into.len() {
        let count = ((into.len() - done) / 8).min(words.len());
        let filled = fill((at + done as u64) / 8, &mut words[..count]);
        for word in &words[..filled] {
            into[done..done + 8].copy_from_slice(&word.to_ne_bytes());
            done += 8;
        }
        if filled < count {
            break;
        }
    }
    Ok(done)
}
