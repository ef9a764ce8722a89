//! The MMU: the hardware's use of page tables, for programs ([`Mode::User`]) and for the kernel.
//!
//! [`Walk`] defines the meaning of one architecture's bits **to the hardware**. The definitions are
//! written from the architecture manuals and share nothing with the core's [`Arch`], because no
//! test would find a mistake in a shared definition. [`walk`] uses the definitions to walk tables.

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

/// A translation as the hardware holds it, either in a TLB or before insertion into one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Translation {
    /// The first virtual address.
    pub start: u64,
    /// Base-2 logarithm of the number of base pages covered.
    pub order: u8,
    /// The first frame; aligned to the order.
    pub frame: u32,
    /// The allowed accesses, with the restrictions of the tables above: for user mode if it has
    /// [`Permissions::USER`], otherwise for the kernel.
    pub permissions: Permissions,
    /// The memory type. Of types that the architecture cannot distinguish, the strictest.
    pub memory: MemoryType,
    /// The hardware need not record a use.
    pub accessed: bool,
    /// The hardware need not record a write.
    pub dirty: bool,
    /// The protection key; 0 if the architecture has none.
    pub key: u8,
}

impl Translation {
    /// The number of bytes covered.
    #[inline]
    pub const fn bytes(&self) -> u64 {
        PAGE_SIZE << self.order
    }

    /// The last address covered.
    #[inline]
    pub const fn last(&self) -> u64 {
        // Aligned to its size, so that this cannot overflow, unlike the address after it.
        self.start | (self.bytes() - 1)
    }

    /// The exclusive end; 0 if the translation covers the last address of the address space.
    #[inline]
    pub const fn end(&self) -> u64 {
        self.start.wrapping_add(self.bytes())
    }

    /// Whether the translation covers `addr`.
    #[inline]
    pub const fn covers(&self, addr: u64) -> bool {
        addr.wrapping_sub(self.start) < self.bytes()
    }

    /// The physical address of `addr`.
    #[inline]
    pub const fn translate(&self, addr: u64) -> PhysAddr {
        PhysAddr(((self.frame as u64) << PAGE_SHIFT) + (addr - self.start))
    }

    /// Whether the access is allowed.
    #[inline]
    pub(crate) fn allows(&self, access: Access) -> bool {
        access.is_allowed(self.permissions)
    }

    /// Whether the access is allowed without recording anything in the table.
    #[inline]
    pub(crate) fn serves(&self, access: Access) -> bool {
        self.allows(access) && (self.dirty || !access.is_write())
    }

    /// Whether both translations map the same addresses to the same memory in the same way. If not,
    /// a TLB must not hold both, because it may use either for an address that both cover.
    pub(crate) fn agrees(&self, other: &Self) -> bool {
        let place = |leaf: &Self| (leaf.start, leaf.order, leaf.frame, leaf.memory);
        place(self) == place(other)
    }
}

/// The meaning of an entry to the hardware.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Meaning {
    /// The valid bit is clear.
    Invalid,
    /// The entry points to a table of the next lower level.
    Table {
        /// The frame of the table.
        frame: u64,
        /// The limit on the rights of everything below the entry.
        rights: Rights,
        /// The hardware need not record a use.
        accessed: bool,
    },
    /// The entry maps memory.
    Leaf(Leaf),
    /// The manual reserves or forbids the entry; holds the broken rule.
    Malformed(&'static str),
}

/// The meaning of a leaf to the hardware.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// The first frame; for an entry in a contiguous run, the first frame of that entry only.
    pub frame: u64,
    /// The rights that the leaf grants.
    pub rights: Rights,
    /// The memory type that the leaf's bits encode.
    pub memory: MemoryType,
    /// The hardware need not record a use.
    pub accessed: bool,
    /// The hardware need not record a write.
    pub dirty: bool,
    /// The protection key; 0 if the architecture has none.
    pub key: u8,
    /// Base-2 logarithm of the number of entries in the leaf's contiguous run; 0 for a single
    /// entry.
    pub block: u8,
    /// Further bits in which the entries of a block must agree.
    pub attributes: u64,
}

/// The hardware's reaction when a cached translation does not allow an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Denial {
    /// The hardware drops its entries for the address and reads the tables again.
    ReadAgain,
    /// The hardware reports a fault on each access until software invalidates.
    Report,
}

/// Whether the hardware may cache invalid entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InvalidEntries {
    /// The hardware reads invalid entries each time.
    NotCached,
    /// The hardware caches invalid entries until software invalidates.
    Cached,
}

/// Whether the hardware may fetch instructions ahead from executable memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fetches {
    /// Never from the registers of a device.
    OnDemand,
    /// From the registers of a device too, so they must not be executable.
    Ahead,
}

/// The rules of an architecture that are not in the bits of an entry.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Table levels.
    pub levels: u8,
    /// Base-2 logarithm of the entries in a table.
    pub index_bits: u32,
    /// The reaction to a cached translation that does not allow an access.
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

    /// The last address that the entry at `level` covers. `start` is the first.
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

/// The reads and writes of page tables by the hardware of an architecture.
///
/// All functions are pure. To give the hosted machine another architecture, write one file with one
/// `impl Walk`, from its manual and not from the core, and add it to
/// [`dispatch`](crate::dispatch()).
pub trait Walk: Arch {
    /// The rules that are not in the bits.
    const RULES: Rules;

    /// Whether the root translates `addr` at all for the mode (canonical, within the translated
    /// size). If each half of the addresses has its own root (AArch64), a walk starts at the root
    /// of the half that contains `addr`.
    fn translates(addr: u64, mode: Mode) -> bool;

    /// Decodes the entry at `index` of a table of `level`.
    fn decode(entry: u64, level: u8, index: u32) -> Meaning;

    /// The entry, a table or a leaf, with its use recorded.
    fn with_accessed(entry: u64) -> u64;

    /// The leaf, which allows writing, with a use and a write recorded.
    fn with_dirty(entry: u64) -> u64;
}
