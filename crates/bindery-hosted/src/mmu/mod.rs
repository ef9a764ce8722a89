//! The MMU: what the hardware does with page tables.
//!
//! [`Walk`] says what the bits of one architecture mean **to the hardware**. The definitions are
//! written from the architecture manuals and share nothing with the core's [`Arch`]: if both made
//! the same mistake in one place, no test would find it. [`walk`] goes through tables by them.

pub(crate) mod walk;

mod aarch64;
mod riscv64;
mod tiny;
mod x86_64;

use bindery::addr::{PAGE_SHIFT, PAGE_SIZE, PhysAddr, VirtAddr};
use bindery::arch::{Arch, Permissions};

/// What a program does with memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum AccessKind {
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch.
    Execute,
}

impl AccessKind {
    /// The permission that it takes.
    #[inline]
    fn needs(self) -> Permissions {
        match self {
            Self::Read => Permissions::READ,
            Self::Write => Permissions::WRITE,
            Self::Execute => Permissions::EXECUTE,
        }
    }
}

/// The MMU refused an access: the page fault that the kernel gets to see.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MmuFault {
    /// The address that was used.
    pub addr: VirtAddr,
    /// How.
    pub access: AccessKind,
    /// There is a translation, and it does not allow the access (or it is malformed). Otherwise
    /// there is none.
    pub present: bool,
}

/// A translation as the hardware holds it, in a TLB or on the way there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Translation {
    /// The first virtual address.
    pub start: u64,
    /// Base-2 logarithm of the base pages that it covers.
    pub order: u8,
    /// The first frame; aligned to the order.
    pub frame: u32,
    /// What it allows, with the restrictions of the tables above.
    pub permissions: Permissions,
    /// The hardware need not record a use.
    pub accessed: bool,
    /// The hardware need not record a write.
    pub dirty: bool,
}

impl Translation {
    /// Bytes that it covers.
    #[inline]
    pub const fn bytes(&self) -> u64 {
        PAGE_SIZE << self.order
    }

    /// The address behind the last one that it covers.
    #[inline]
    pub const fn end(&self) -> u64 {
        self.start.wrapping_add(self.bytes())
    }

    /// Whether it covers `addr`.
    #[inline]
    pub const fn covers(&self, addr: u64) -> bool {
        addr.wrapping_sub(self.start) < self.bytes()
    }

    /// Where `addr` lies in memory.
    #[inline]
    pub const fn translate(&self, addr: u64) -> PhysAddr {
        PhysAddr(((self.frame as u64) << PAGE_SHIFT) + (addr - self.start))
    }

    /// Whether a program in user mode may do this.
    #[inline]
    pub(crate) fn allows(&self, access: AccessKind) -> bool {
        self.permissions.contains(access.needs() | Permissions::USER)
    }

    /// Whether it does so without recording anything in the table.
    #[inline]
    pub(crate) fn serves(&self, access: AccessKind) -> bool {
        self.allows(access) && (self.dirty || access != AccessKind::Write)
    }
}

/// What an entry says to the hardware.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Meaning {
    /// The valid bit is clear: nothing.
    Invalid,
    /// It names a table of the next lower level.
    Table {
        /// The frame of the table.
        frame: u64,
        /// What it allows to everything below it.
        permissions: Permissions,
        /// The hardware need not record a use.
        accessed: bool,
    },
    /// It maps memory.
    Leaf(Leaf),
    /// The manual calls it reserved, or forbids it: the rule that it breaks.
    Malformed(&'static str),
}

/// What a leaf says to the hardware.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// The first frame; of an entry in a contiguous block, that of the entry alone.
    pub frame: u64,
    /// What it allows.
    pub permissions: Permissions,
    /// The hardware need not record a use.
    pub accessed: bool,
    /// The hardware need not record a write.
    pub dirty: bool,
    /// Base-2 logarithm of the entries that form one translation with it; 0 where it stands alone.
    pub block: u8,
    /// Further bits in which the entries of a block must agree.
    pub attributes: u64,
}

/// What the hardware does when a cached translation does not allow an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Denial {
    /// It forgets what it knows of the address and reads the tables again.
    ReadAgain,
    /// It reports a fault, again and again until software invalidates.
    Report,
}

/// Whether the hardware may remember that an entry was invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InvalidEntries {
    /// It reads them each time.
    NotCached,
    /// It remembers them until software invalidates.
    Cached,
}

/// The rules of an architecture that are not in the bits of an entry.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Table levels.
    pub levels: u8,
    /// Base-2 logarithm of the entries in a table.
    pub index_bits: u32,
    /// When a cached translation does not allow an access.
    pub denial: Denial,
    /// Whether invalid entries are cached.
    pub invalid: InvalidEntries,
}

impl Rules {
    /// Base-2 logarithm of the bytes that an entry at `level` covers.
    #[inline]
    pub(crate) const fn shift(&self, level: u8) -> u32 {
        PAGE_SHIFT + self.index_bits * (level as u32 - 1)
    }

    /// The first address that the entry for `addr` at `level` covers.
    #[inline]
    pub(crate) const fn start(&self, addr: u64, level: u8) -> u64 {
        let shift = self.shift(level);
        addr >> shift << shift
    }

    /// The position of the entry for `addr` in its table at `level`.
    #[inline]
    pub(crate) const fn index(&self, addr: u64, level: u8) -> u32 {
        ((addr >> self.shift(level)) & ((1 << self.index_bits) - 1)) as u32
    }
}

/// What the hardware of an architecture reads from page tables and writes to them.
///
/// All functions are pure. To give the hosted machine another architecture, write one file with
/// one `impl Walk`, from its manual and not from the core, and add it to
/// [`dispatch`](crate::dispatch()).
pub trait Walk: Arch {
    /// What is not in the bits.
    const RULES: Rules;

    /// Whether the root translates `addr` at all (canonical, within the translated size).
    fn translates(addr: u64) -> bool;

    /// What the entry at `index` of a table of `level` says.
    fn decode(entry: u64, level: u8, index: u32) -> Meaning;

    /// The entry, a table or a leaf, with its use recorded.
    fn with_accessed(entry: u64) -> u64;

    /// The leaf, which allows writing, with a use and a write recorded.
    fn with_dirty(entry: u64) -> u64;
}
