//! The MMU: what the hardware does with page tables, for programs ([`Mode::User`]) and for the
//! kernel.
//!
//! [`Walk`] says what the bits of one architecture mean **to the hardware**. The definitions are
//! written from the architecture manuals and share nothing with the core's [`Arch`]: if both made
//! the same mistake in one place, no test would find it. [`walk`] goes through tables by them.

pub(crate) mod walk;

mod aarch64;
mod rights;
mod riscv64;
mod tiny;
mod x86_64;

use bindery::addr::{PAGE_SHIFT, PAGE_SIZE, PhysAddr};
use bindery::arch::{Arch, MemoryType, Permissions};

pub(crate) use rights::Access;
pub use rights::{AccessKind, MmuFault, Mode, Rights};

/// A translation as the hardware holds it, in a TLB or on the way there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Translation {
    /// The first virtual address.
    pub start: u64,
    /// Base-2 logarithm of the base pages that it covers.
    pub order: u8,
    /// The first frame; aligned to the order.
    pub frame: u32,
    /// What it allows, with the restrictions of the tables above: to user mode where it has
    /// [`Permissions::USER`], else to the kernel.
    pub permissions: Permissions,
    /// How what it maps may be accessed. Of types that the architecture cannot tell apart, the
    /// strictest.
    pub memory: MemoryType,
    /// The hardware need not record a use.
    pub accessed: bool,
    /// The hardware need not record a write.
    pub dirty: bool,
    /// The protection key; 0 where the architecture has none.
    pub key: u8,
}

impl Translation {
    /// Bytes that it covers.
    #[inline]
    pub const fn bytes(&self) -> u64 {
        PAGE_SIZE << self.order
    }

    /// The last address that it covers.
    #[inline]
    pub const fn last(&self) -> u64 {
        // Aligned to its size, so that this cannot overflow, unlike the address after it.
        self.start | (self.bytes() - 1)
    }

    /// The address after the last one that it covers; 0 where that is the last of all.
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

    /// Whether this may be done.
    #[inline]
    pub(crate) fn allows(&self, access: Access) -> bool {
        access.is_allowed(self.permissions)
    }

    /// Whether it may be without recording anything in the table.
    #[inline]
    pub(crate) fn serves(&self, access: Access) -> bool {
        self.allows(access) && (self.dirty || !access.is_write())
    }

    /// Whether the two send the same addresses to the same place in the same way. Otherwise a TLB
    /// must not hold both: it may use either for an address that both cover.
    pub(crate) fn agrees(&self, other: &Self) -> bool {
        let place = |leaf: &Self| (leaf.start, leaf.order, leaf.frame, leaf.memory);
        place(self) == place(other)
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
        rights: Rights,
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
    /// The first frame; of an entry in a contiguous run, that of the entry alone.
    pub frame: u64,
    /// What it allows.
    pub rights: Rights,
    /// The type of memory that its bits choose.
    pub memory: MemoryType,
    /// The hardware need not record a use.
    pub accessed: bool,
    /// The hardware need not record a write.
    pub dirty: bool,
    /// The protection key; 0 where the architecture has none.
    pub key: u8,
    /// Base-2 logarithm of the entries that form one translation with it; 0 where it is alone.
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

/// Whether the hardware may fetch instructions that no program asked for, from wherever it may
/// execute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fetches {
    /// Never from the registers of a device.
    OnDemand,
    /// From the registers of a device too, so that they must not be executable.
    Ahead,
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
    /// Whether instructions are fetched ahead from devices.
    pub fetches: Fetches,
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

    /// The last address that the entry at `level` covers whose first is `start`.
    #[inline]
    pub(crate) const fn last(&self, start: u64, level: u8) -> u64 {
        start | ((1 << self.shift(level)) - 1)
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

    /// Whether the root translates `addr` at all for the mode (canonical, within the translated
    /// size). Where each half of the addresses has a root of its own (AArch64), the root of a walk
    /// is that of the half.
    fn translates(addr: u64, mode: Mode) -> bool;

    /// What the entry at `index` of a table of `level` says.
    fn decode(entry: u64, level: u8, index: u32) -> Meaning;

    /// The entry, a table or a leaf, with its use recorded.
    fn with_accessed(entry: u64) -> u64;

    /// The leaf, which allows writing, with a use and a write recorded.
    fn with_dirty(entry: u64) -> u64;
}
