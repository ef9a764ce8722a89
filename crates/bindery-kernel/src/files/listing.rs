//! Texts that are generated entry by entry as the reader advances: a process's files under `/proc`.
//!
//! ```text
//! entries          | first line | second line | third line |
//! has been read    ---------------------->|
//! kept                                    ond line |
//!                                  next entry: ^ by its key, an address for `maps`
//! ```
//!
//! Each opening has its own [`Reader`]. It keeps the unread rest of an entry and the key of the
//! next one, so that each entry is made once, whatever the size of the pieces it is read in, and no
//! line mixes two moments. Entries that are inserted or removed before the key do not shift the
//! position.
//!
//! A read that does not start at the end of the previous one generates the text again from the
//! beginning and skips the entries before the position (Linux: `seq_file`). A read from 0 always
//! does.

use alloc::vec::Vec;
use core::fmt::{self, Write};

use crate::errno::Errno;
use crate::heap;
use crate::sync::SleepingMutex;

/// A read generates no further entry once the text has this many bytes, so its work is bounded.
/// (Linux fills a page.)
const ENOUGH: usize = 4096;

/// The maximum heap memory for an entry, in bytes: a path of maximum length, each byte escaped as
/// four, and the rest of its line.
const LONGEST_ENTRY: usize = 32 << 10;

/// Receives the text of an entry.
pub struct EntryText(Vec<u8>);

impl EntryText {
    /// Adds bytes. Never fails; the result is for chains of writes.
    pub fn push(&mut self, bytes: &[u8]) -> fmt::Result {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
}

impl Write for EntryText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text.as_bytes())
    }
}

/// The progress of one opening through a text.
pub struct Reader(SleepingMutex<Place>);

struct Place {
    /// The entry that was generated last.
    entry: EntryText,
    /// The number of its bytes that were read.
    taken: usize,
    /// The key of the next entry. `None` if the text has ended; it never grows afterwards.
    next: Option<u64>,
    /// The number of bytes that were read since the beginning.
    position: u64,
}

impl Reader {
    /// At the beginning.
    pub fn new() -> Self {
        let entry = EntryText(Vec::new());
        Self(SleepingMutex::new(Place { entry, taken: 0, next: Some(0), position: 0 }))
    }

    /// Reads from `at` on, up to the end of the entry that makes the text [`ENOUGH`] long. `make`
    /// writes the entry of a key (0 for the first) and returns the key of the next one. At the end
    /// `make` returns `None` and writes nothing.
    ///
    /// # Errors
    /// The errors of `make` for the first entry, and `ENOMEM`.
    pub fn read(
        &self,
        at: u64,
        into: &mut [u8],
        mut make: impl FnMut(u64, &mut EntryText) -> Result<Option<u64>, Errno>,
    ) -> Result<usize, Errno> {
        let mut place = self.0.lock();
        if at == 0 || at != place.position {
            place.rewind()?;
            while place.position < at {
                if !place.is_ready(&mut make)? {
                    return Ok(0);
                }
                let skipped = (at - place.position).min(usize::MAX as u64) as usize;
                place.take(skipped);
            }
        }
        let mut filled = 0;
        while filled < into.len() {
            match place.is_ready(&mut make) {
                Ok(true) => {}
                Err(errno) if filled == 0 => return Err(errno),
                Ok(false) | Err(_) => break,
            }
            let part = place.take(into.len() - filled);
            into[filled..filled + part.len()].copy_from_slice(part);
            filled += part.len();
            if filled >= ENOUGH {
                break;
            }
        }
        Ok(filled)
    }
}

impl Place {
    /// Restarts at the beginning.
    fn rewind(&mut self) -> Result<(), Errno> {
        if self.entry.0.capacity() == 0 {
            heap::room(LONGEST_ENTRY)?;
            self.entry.0.reserve(256);
        }
        self.entry.0.clear();
        (self.taken, self.next, self.position) = (0, Some(0), 0);
        Ok(())
    }

    /// Generates the next entry if the last one was read completely. Returns `false` at the end.
    fn is_ready(
        &mut self,
        make: &mut impl FnMut(u64, &mut EntryText) -> Result<Option<u64>, Errno>,
    ) -> Result<bool, Errno> {
        while self.taken == self.entry.0.len() {
            let Some(key) = self.next else { return Ok(false) };
            self.entry.0.clear();
            self.taken = 0;
            self.next = make(key, &mut self.entry).inspect_err(|_| self.entry.0.clear())?;
        }
        Ok(true)
    }

    /// The next bytes of the entry, `most` at most.
    fn take(&mut self, most: usize) -> &[u8] {
        let start = self.taken;
        let count = most.min(self.entry.0.len() - start);
        self.taken += count;
        self.position += count as u64;
        &self.entry.0[start..start + count]
    }
}
