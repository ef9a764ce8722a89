//! The visible state of a process after an operation: the same type for Linux and for the core.

use super::place::ALL_FILES;
use super::words::Source;

/// A signal at the end of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// `SIGSEGV`, `SEGV_MAPERR`: nothing is mapped at the address.
    NotMapped,
    /// `SIGSEGV`, `SEGV_ACCERR`: this access is not allowed.
    Denied,
    /// `SIGBUS`, `BUS_ADRERR`: the mapping extends beyond the end of its object.
    Bus,
    /// Any other signal, with its code.
    Other(u16, u16),
}

impl Signal {
    /// From the numbers of Linux.
    pub fn from_numbers(signal: i32, code: i32) -> Self {
        match (signal, code) {
            (libc::SIGSEGV, 1) => Self::NotMapped,
            (libc::SIGSEGV, 2) => Self::Denied,
            (libc::SIGBUS, 2) => Self::Bus,
            _ => Self::Other(signal as u16, code as u16),
        }
    }

    fn word(self) -> u64 {
        match self {
            Self::NotMapped => 1,
            Self::Denied => 2,
            Self::Bus => 3,
            Self::Other(signal, code) => 4 | u64::from(signal) << 16 | u64::from(code) << 32,
        }
    }

    fn from_word(word: u64) -> Self {
        match word {
            1 => Self::NotMapped,
            2 => Self::Denied,
            3 => Self::Bus,
            _ => Self::Other((word >> 16) as u16, (word >> 32) as u16),
        }
    }
}

/// The result of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The return value of a system call, negative for errors.
    Returned(i64),
    /// A mapping outside the region of sequences; it was unmapped again.
    Elsewhere,
    /// The loaded value; 0 for a store.
    Accessed(u64),
    /// The access ended with this signal.
    Signaled(Signal),
    /// The memory was observed as the program sees it.
    Looked,
}

impl Outcome {
    fn words(self) -> [u64; 2] {
        match self {
            Self::Returned(value) => [0, value as u64],
            Self::Elsewhere => [1, 0],
            Self::Accessed(value) => [2, value],
            Self::Signaled(signal) => [3, signal.word()],
            Self::Looked => [4, 0],
        }
    }

    fn from_words(kind: u64, value: u64) -> Self {
        match kind {
            0 => Self::Returned(value as i64),
            1 => Self::Elsewhere,
            2 => Self::Accessed(value),
            3 => Self::Signaled(Signal::from_word(value)),
            _ => Self::Looked,
        }
    }
}

/// The observed letters of `VmFlags`; the bit of each is its index.
pub const LETTERS: [&str; 23] = [
    "rd", "wr", "ex", "mr", "mw", "me", "ms", "gd", "lo", "nr", "ac", "dc", "wf", "hg", "nh", "sl",
    "sr", "rr", "dd", "dp", "um", "uw", "ui",
];

/// The bit of a letter of `VmFlags`; `None` if it is not observed.
pub fn letter(name: &[u8]) -> u64 {
    LETTERS.iter().position(|known| known.as_bytes() == name).map_or(0, |place| 1 << place)
}

/// The object behind a mapping.
pub type Backing = u64;

/// Anonymous memory.
pub const ANONYMOUS: Backing = 0;

/// The number of the first file; the other files have the following numbers.
pub const FIRST_FILE: Backing = 1;

/// The first number of objects that no descriptor names.
pub const OTHER_OBJECT: Backing = 16;

/// A mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Area {
    pub start: u64,
    pub end: u64,
    /// Bits as in [`LETTERS`].
    pub letters: u64,
    pub backing: Backing,
    /// The offset in the object, in bytes; 0 for anonymous memory.
    pub offset: u64,
}

/// The state of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    /// A page of anonymous memory.
    Anonymous,
    /// A page of an object.
    Object,
    /// The zero page.
    Zero,
    /// A guard.
    Guard,
    /// A state outside of Linux's categories.
    Other(u64),
}

impl Presence {
    fn word(self) -> u64 {
        match self {
            Self::Anonymous => 1,
            Self::Object => 2,
            Self::Zero => 3,
            Self::Guard => 4,
            Self::Other(categories) => 5 | categories << 8,
        }
    }

    fn from_word(word: u64) -> Self {
        match word {
            1 => Self::Anonymous,
            2 => Self::Object,
            3 => Self::Zero,
            4 => Self::Guard,
            _ => Self::Other(word >> 8),
        }
    }
}

/// Neighboring pages in the same state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stretch {
    pub start: u64,
    pub end: u64,
    pub presence: Presence,
}

/// A file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FileState {
    pub size: u64,
    /// The number of allocated pages.
    pub pages: u64,
    pub seals: u64,
}

/// The counters of an address space, in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    pub mapped: u64,
    pub data: u64,
    pub locked: u64,
}

/// The state of a process that can be read without touching its memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Snapshot {
    pub areas: Vec<Area>,
    pub stretches: Vec<Stretch>,
    pub files: [FileState; ALL_FILES.len()],
    pub counters: Counters,
}

/// The result of one operation, and the state afterwards.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Observation {
    /// The index of the operation; the length of the sequence after its end.
    pub step: usize,
    /// 0 for the first process, 1 for its child.
    pub process: u64,
    pub outcome: Outcome,
    /// The words that the operation wrote or read: the vector of `mincore`, the bytes of a file,
    /// the contents of memory.
    pub data: Vec<u64>,
    pub snapshot: Snapshot,
}

/// The words at the start of an observation.
pub fn header(step: usize, process: u64, outcome: Outcome) -> [u64; 4] {
    let [kind, value] = outcome.words();
    [step as u64, process, kind, value]
}

impl Area {
    pub fn words(&self) -> [u64; 5] {
        [self.start, self.end, self.letters, self.backing, self.offset]
    }
}

impl Stretch {
    pub fn words(&self) -> [u64; 3] {
        [self.start, self.end, self.presence.word()]
    }
}

impl FileState {
    pub fn words(&self) -> [u64; 3] {
        [self.size, self.pages, self.seals]
    }
}

impl Counters {
    pub fn words(&self) -> [u64; 3] {
        [self.mapped, self.data, self.locked]
    }
}

impl From<Result<u64, Signal>> for Outcome {
    fn from(access: Result<u64, Signal>) -> Self {
        match access {
            Ok(value) => Self::Accessed(value),
            Err(signal) => Self::Signaled(signal),
        }
    }
}

impl Observation {
    /// Reads an observation: the header, then data, areas and ranges, each after its count, then
    /// files and counters.
    pub fn take(source: &mut Source<'_>) -> Self {
        let step = source.take() as usize;
        let process = source.take();
        let outcome = Outcome::from_words(source.take(), source.take());
        let data = source.take_all();
        let count = source.take() as usize;
        let areas = source.take_many(count, |source| Area {
            start: source.take(),
            end: source.take(),
            letters: source.take(),
            backing: source.take(),
            offset: source.take(),
        });
        let count = source.take() as usize;
        let stretches = source.take_many(count, |source| Stretch {
            start: source.take(),
            end: source.take(),
            presence: Presence::from_word(source.take()),
        });
        let files = ALL_FILES.map(|_| FileState {
            size: source.take(),
            pages: source.take(),
            seals: source.take(),
        });
        let counters =
            Counters { mapped: source.take(), data: source.take(), locked: source.take() };
        let snapshot = Snapshot { areas, stretches, files, counters };
        Self { step, process, outcome, data, snapshot }
    }
}

/// A digest of a page's contents (0 for only zeroes), or the signal that a read raises.
pub fn digest(mut load: impl FnMut(u64) -> Result<u64, Signal>) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut sum = 0_u64;
    for index in 0..512 {
        match load(index) {
            Ok(word) => {
                let factor = FACTOR.wrapping_mul(2 * index + 1);
                sum = sum.wrapping_add(word.wrapping_mul(factor)).rotate_left(u32::from(word != 0));
            }
            Err(signal) => return SIGNALED | signal.word(),
        }
    }
    sum & !SIGNALED
}

/// The digest of a page whose content is known.
pub fn digest_of_bytes(page: &[u8]) -> u64 {
    digest(|index| {
        let bytes = &page[index as usize * 8..][..8];
        Ok(bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)))
    })
}

/// The significant bits of a word of `mincore`'s vector: one bit in each of the first `bytes`
/// bytes.
pub fn significant(word: u64, bytes: u64) -> u64 {
    let bits = word & 0x0101_0101_0101_0101;
    if bytes < 8 { bits & ((1 << (bytes * 8)) - 1) } else { bits }
}

/// The number of pages of a file that are compared at the end.
pub const FILE_PAGES_LOOKED_AT: u64 = 64;

/// Marks a digest that is a signal instead of contents.
const SIGNALED: u64 = 1 << 63;

/// Describes a digest.
pub fn digest_in_words(digest: u64) -> String {
    if digest & SIGNALED != 0 {
        format!("{:?}", Signal::from_word(digest & !SIGNALED))
    } else {
        format!("{digest:#x}")
    }
}

/// The bytes that `write_at` writes. The stamp makes them distinct.
pub fn stamped(stamp: u64, index: usize) -> u8 {
    (stamp as usize).wrapping_mul(31).wrapping_add(index.wrapping_mul(7)) as u8 | 1
}

/// The maximum size of a read or write of a file.
pub const LONGEST: u64 = 4 * 4096;

/// Writes bytes as words; zeroes fill the last word.
pub fn put_bytes(bytes: &[u8], mut put: impl FnMut(u64)) {
    for piece in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..piece.len()].copy_from_slice(piece);
        put(u64::from_le_bytes(word));
    }
}
