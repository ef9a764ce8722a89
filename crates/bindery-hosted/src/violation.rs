//! What the machine found wrong: [`Violation`], one variant for each way to break the rules.

use std::fmt;

use bindery::addr::Frame;
use bindery::arch::{MemoryType, Permissions};
use bindery::platform::Cpu;
use parking_lot::Mutex;

use crate::mmu::Translation;

/// Violations that are kept; further ones are only counted.
const KEPT: usize = 1000;

/// Where it was found: the CPU whose TLB or MMU it was, the address space and the address in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The CPU.
    pub cpu: Cpu,
    /// The root table.
    pub root: Frame,
    /// The virtual address.
    pub addr: u64,
}

/// Something that the architecture forbids, or leaves open what happens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Violation {
    /// An entry that the manual calls reserved, or forbids.
    Malformed {
        /// Where the MMU met it.
        place: Place,
        /// The level of the entry's table.
        level: u8,
        /// The entry.
        entry: u64,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// An entry names frames where the machine has no memory, as a table or as normal memory.
    NoMemory {
        /// Where the MMU met it.
        place: Place,
        /// The level of the entry's table.
        level: u8,
        /// The entry.
        entry: u64,
        /// The frame that it names.
        frame: u64,
    },
    /// The entries of a contiguous run disagree.
    BrokenBlock {
        /// Where the MMU met it.
        place: Place,
        /// The entry of the accessed page.
        entry: u64,
        /// The position of the other one in the block, from 0.
        position: u32,
        /// The entry that disagrees.
        other: u64,
        /// In what.
        why: &'static str,
    },
    /// A new translation overlaps a cached one of another size or frame: break-before-make was
    /// not kept, or an invalidation is missing. The hardware may use either, or both mixed.
    Conflict {
        /// The access that brought the new one in.
        place: Place,
        /// What the TLB holds.
        cached: Translation,
        /// What the tables say.
        now: Translation,
    },
    /// A cached translation outlived its revocation: the tables no longer map the address so.
    StaleLeaf {
        /// The first address of the cached translation at which the two disagree.
        place: Place,
        /// What the TLB holds.
        cached: Translation,
        /// What the tables say, if they say anything.
        now: Option<Translation>,
        /// In what they disagree.
        why: &'static str,
    },
    /// A cached intermediate entry outlived its revocation.
    StaleTable {
        /// The first address that the entry covers.
        place: Place,
        /// The level of the table that had the entry.
        level: u8,
        /// The table that the TLB remembers.
        cached: Frame,
        /// The table that the entry names now, if it names one.
        now: Option<Frame>,
        /// In what they disagree.
        why: &'static str,
    },
    /// An instruction was fetched from a frame that was written since it was last synchronized, or
    /// never was.
    StaleInstructions {
        /// The fetch.
        place: Place,
        /// The frame.
        frame: Frame,
    },
    /// Frames were released while a TLB holds a translation to them.
    ReleasedLeaf {
        /// The first address of the cached translation.
        place: Place,
        /// The first frame released.
        first: Frame,
        /// How many.
        count: u32,
        /// What the TLB holds.
        cached: Translation,
    },
    /// Frames were released while a TLB holds an intermediate entry that names one as a table.
    ReleasedTable {
        /// The first address that the entry covers.
        place: Place,
        /// The first frame released.
        first: Frame,
        /// How many.
        count: u32,
        /// The level of the table that had the entry.
        level: u8,
        /// The table that the TLB remembers.
        cached: Frame,
    },
    /// A root table was released while a TLB holds something of its address space.
    ReleasedRoot {
        /// The first address of which something is cached.
        place: Place,
        /// Translations that are cached.
        leaves: usize,
        /// Intermediate entries that are cached.
        tables: usize,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CPU {}, root {:#x}, address {:#x}", self.cpu.0, self.root.0, self.addr)
    }
}

impl fmt::Display for Translation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has = |permission, letter| {
            if self.permissions.contains(permission) { letter } else { '-' }
        };
        write!(
            f,
            "{:#x}..{:#x} -> frame {:#x} {}{}{}{}{}{}{}",
            self.start,
            // Of the last page of all, 2^64.
            u128::from(self.start) + u128::from(self.bytes()),
            self.frame,
            has(Permissions::READ, 'r'),
            has(Permissions::WRITE, 'w'),
            has(Permissions::EXECUTE, 'x'),
            has(Permissions::USER, 'u'),
            if self.permissions.contains(Permissions::BTI) { " guarded" } else { "" },
            if self.accessed { " accessed" } else { "" },
            if self.dirty { " dirty" } else { "" },
        )?;
        match self.memory {
            MemoryType::Normal => Ok(()),
            other => write!(f, " {other:?}"),
        }
    }
}

/// "now ..." or "now nothing".
struct Now<T>(Option<T>);

impl<T: fmt::Display> fmt::Display for Now<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(now) => write!(f, "the tables say {now}"),
            None => f.write_str("the tables say nothing"),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed { place, level, entry, why } => {
                write!(f, "malformed entry: {place}: level {level}: {entry:#018x}: {why}")
            }
            Self::NoMemory { place, level, entry, frame } => write!(
                f,
                "no memory: {place}: level {level}: {entry:#018x} names frame {frame:#x}, which is not memory"
            ),
            Self::BrokenBlock { place, entry, position, other, why } => write!(
                f,
                "broken block: {place}: {entry:#018x}, but number {position} of its block is {other:#018x}: {why}"
            ),
            Self::Conflict { place, cached, now } => write!(
                f,
                "TLB conflict (missing flush or no break before make): {place}: cached {cached}; the tables say {now}"
            ),
            Self::StaleLeaf { place, cached, now, why } => {
                write!(f, "stale translation: {place}: {why}: cached {cached}; {}", Now(*now))
            }
            Self::StaleTable { place, level, cached, now, why } => write!(
                f,
                "stale intermediate entry: {place}: level {level}: {why}: cached table {:#x}; {}",
                cached.0,
                Now(now.map(|frame| format!("table {:#x}", frame.0)))
            ),
            Self::StaleInstructions { place, frame } => write!(
                f,
                "stale instructions: {place}: frame {:#x} was not synchronized since it was written",
                frame.0
            ),
            Self::ReleasedLeaf { place, first, count, cached } => write!(
                f,
                "released too early: frames {:#x}..{:#x}: {place}: still cached {cached}",
                first.0,
                u64::from(first.0) + u64::from(*count)
            ),
            Self::ReleasedTable { place, first, count, level, cached } => write!(
                f,
                "released too early: frames {:#x}..{:#x}: {place}: an intermediate entry of level {level} still names table {:#x}",
                first.0,
                u64::from(first.0) + u64::from(*count),
                cached.0
            ),
            Self::ReleasedRoot { place, leaves, tables } => write!(
                f,
                "root released too early: {place}: still cached {leaves} translations and {tables} intermediate entries"
            ),
        }
    }
}

/// Where violations are collected.
#[derive(Debug, Default)]
pub(crate) struct Log {
    found: Mutex<Found>,
}

#[derive(Debug, Default)]
struct Found {
    kept: Vec<Violation>,
    total: u64,
}

impl Log {
    pub(crate) fn report(&self, violation: Violation) {
        let mut found = self.found.lock();
        found.total += 1;
        if found.kept.len() < KEPT {
            found.kept.push(violation);
        }
    }

    pub(crate) fn all(&self) -> Vec<Violation> {
        self.found.lock().kept.clone()
    }

    pub(crate) fn take(&self) -> Vec<Violation> {
        let mut found = self.found.lock();
        found.total = 0;
        std::mem::take(&mut found.kept)
    }

    pub(crate) fn total(&self) -> u64 {
        self.found.lock().total
    }
}
