//! Violations that the machine detects: [`Violation`] has one variant for each broken rule.

use std::fmt;

use bindery::addr::Frame;
use bindery::arch::{MemoryType, Permissions};
use bindery::platform::Cpu;
use parking_lot::Mutex;

use crate::mmu::Translation;

/// The number of violations that are kept; further ones are only counted.
const KEPT: usize = 1000;

/// The place of a violation: the CPU of the TLB or MMU, the address space and the address in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The CPU.
    pub cpu: Cpu,
    /// The root table.
    pub root: Frame,
    /// The virtual address.
    pub addr: u64,
}

/// A state that the architecture forbids, or whose effect it does not define.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Violation {
    /// An entry that the manual calls reserved, or forbids.
    Malformed {
        /// The access during which the MMU read the entry.
        place: Place,
        /// The level of the entry's table.
        level: u8,
        /// The entry.
        entry: u64,
        /// The broken rule.
        why: &'static str,
    },
    /// An entry refers to frames without memory, as a table or as normal memory.
    NoMemory {
        /// The access during which the MMU read the entry.
        place: Place,
        /// The level of the entry's table.
        level: u8,
        /// The entry.
        entry: u64,
        /// The frame in the entry.
        frame: u64,
    },
    /// The entries of a contiguous run disagree.
    BrokenBlock {
        /// The access during which the MMU read the entry.
        place: Place,
        /// The entry of the accessed page.
        entry: u64,
        /// The position in the block, from 0, of the entry that disagrees.
        position: u32,
        /// The entry that disagrees.
        other: u64,
        /// The difference.
        why: &'static str,
    },
    /// A new translation overlaps a cached one of another size or frame: break-before-make was
    /// violated, or an invalidation is missing. The hardware may use either, or a mix of both.
    Conflict {
        /// The access that loaded the new translation.
        place: Place,
        /// The translation in the TLB.
        cached: Translation,
        /// The translation in the tables.
        now: Translation,
    },
    /// Two translations of programs to the same frames have different memory types: accesses
    /// through one translation need not see accesses through the other (Arm ARM, "Mismatched memory
    /// attributes"; SDM volume 3A, "Programming the PAT").
    MixedTypes {
        /// The access that loaded the new translation.
        place: Place,
        /// The translation in the TLB, of any address space.
        cached: Translation,
        /// The translation in the tables.
        now: Translation,
    },
    /// A cached translation outlived its revocation: the tables no longer map the address in this
    /// way.
    StaleLeaf {
        /// The first address of the cached translation at which the two disagree.
        place: Place,
        /// The translation in the TLB.
        cached: Translation,
        /// The translation in the tables, if any.
        now: Option<Translation>,
        /// The difference.
        why: &'static str,
    },
    /// A cached intermediate entry outlived its revocation.
    StaleTable {
        /// The first address that the entry covers.
        place: Place,
        /// The level of the table that had the entry.
        level: u8,
        /// The table in the TLB.
        cached: Frame,
        /// The table in the entry now, if any.
        now: Option<Frame>,
        /// The difference.
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
    /// Frames were released while a TLB has a translation to them.
    ReleasedLeaf {
        /// The first address of the cached translation.
        place: Place,
        /// The first frame released.
        first: Frame,
        /// The number of frames.
        count: u32,
        /// The translation in the TLB.
        cached: Translation,
    },
    /// Frames were released while a TLB has an intermediate entry for one of them as a table.
    ReleasedTable {
        /// The first address that the entry covers.
        place: Place,
        /// The first frame released.
        first: Frame,
        /// The number of frames.
        count: u32,
        /// The level of the table that had the entry.
        level: u8,
        /// The table in the TLB.
        cached: Frame,
    },
    /// A root table was released while a TLB has entries of its address space.
    ReleasedRoot {
        /// The first cached address.
        place: Place,
        /// The number of cached translations.
        leaves: usize,
        /// The number of cached intermediate entries.
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
            // For the last page of the address space, 2^64.
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
            other @ (MemoryType::WriteThrough
            | MemoryType::WriteCombining
            | MemoryType::Uncached
            | MemoryType::Device) => write!(f, " {other:?}"),
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
            Self::MixedTypes { place, cached, now } => {
                write!(f, "two memory types: {place}: cached {cached}; the tables say {now}")
            }
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

/// The collected violations.
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
