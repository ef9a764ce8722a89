//! Page-table entries: the meaning of each architecture's bits, as pure functions over values.
//!
//! No function here reads or writes memory or executes a special instruction, so all formats are
//! compiled and tested on every host. **To add an architecture, write one file with one `impl
//! Arch`**, list it below, and give the hosted machine a walker for it. No other code of this crate
//! depends on the bits of an entry.
//!
//! Levels are numbered from the leaf. Level 1 has base pages, level 2 (Linux: PMD) entries of 2
//! MiB, level 3 (PUD) entries of 1 GiB, and so on up to [`Arch::LEVELS`], the root.
//!
//! ```text
//! VA 0x4000_0000            0x4001_0000                         0x4020_0000
//! level 1 | leaf run: 16 entries, | empty run: 496 entries           |
//! level 2 | one entry: the table of level 1 above                    | the next table: one entry
//! ```
//!
//! An entry is one of four kinds ([`Kind`]): *empty* (all bits zero), a *table*, a *leaf* that the
//! MMU uses, or *absent*: an entry that only software reads ([`Absent`]), with bit 0 clear. The
//! format of absent entries is the same everywhere, see [`absent`].
//!
//! A *contiguous run* is [`Arch::CONTIG_ENTRIES`] level-1 entries that the MMU may cache as one
//! (AArch64's contiguous bit, RISC-V's Svnapot; Linux: contpte). In memory, the entries of a
//! contiguous run differ from those of single pages. [`Arch::set_contig`] and
//! [`Arch::clear_contig`] convert between the two, and all other functions take entries without the
//! contiguous bit.
//!
//! # Context
//! All functions are pure. Context: any.

mod aarch64;
pub mod absent;
mod control;
mod entry_index;
mod key;
mod level;
mod page_entry;
mod riscv64;
#[cfg(test)]
mod tests;
mod tiny;
mod x86_64;

use core::fmt;

use bitflags::bitflags;

use crate::addr::Frame;

pub use aarch64::AArch64;
pub use absent::{Absent, AbsentFormat, Marker};
pub use control::{ControlBit, Needed, Register, RegisterRule, Severity, Symptom};
pub use entry_index::EntryIndex;
pub use key::{KeyRights, ProtectionKey};
pub use level::Level;
pub use page_entry::LeafAttributes;
pub use riscv64::Riscv64;
pub use tiny::Tiny;
pub use x86_64::X86_64;

bitflags! {
    /// The accesses that a leaf allows.
    ///
    /// ```
    /// use bindery::arch::Permissions;
    ///
    /// let data = Permissions::READ | Permissions::WRITE;
    /// assert!(!data.contains(Permissions::EXECUTE));
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct Permissions: u8 {
        /// Loads. On architectures that cannot express stores or fetches separately, these imply
        /// loads.
        const READ = 1 << 0;
        /// Stores.
        const WRITE = 1 << 1;
        /// Instruction fetches.
        const EXECUTE = 1 << 2;
        /// Whether user mode may use the leaf; without this bit, only the kernel may.
        const USER = 1 << 3;
        /// With [`Permissions::EXECUTE`]: an indirect branch into the page must land on a landing
        /// pad (the guarded page of AArch64's FEAT_BTI). No effect without
        /// [`Permissions::EXECUTE`], or if [`Arch::BTI`] is false.
        const BTI = 1 << 4;
    }
}

impl Permissions {
    /// All accesses, without regard to user mode.
    pub(crate) const ACCESS: Self = Self::READ.union(Self::WRITE).union(Self::EXECUTE);
}

bitflags! {
    /// Attributes in which the entries of a run must agree, besides those that must always agree
    /// (frame order, permissions other than write, the userfault bit).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct Equal: u8 {
        /// Whether stores are allowed.
        const WRITABLE = 1 << 0;
        /// The soft-dirty bit.
        const SOFT_DIRTY = 1 << 1;
        /// Compares only attributes: the frames may differ arbitrarily.
        const ANY_FRAMES = 1 << 2;
    }
}

/// All properties of a leaf except its frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Attributes {
    /// The accesses that the entry allows.
    pub permissions: Permissions,
    /// The MMU has used the entry (or software set the bit beforehand).
    pub accessed: bool,
    /// The page was written through the entry (or software set the bit beforehand).
    pub dirty: bool,
    /// The page was written since soft-dirty was last cleared (Linux: `clear_refs`).
    pub soft_dirty: bool,
    /// A userfaultfd write-protected the page.
    pub userfault: bool,
    /// The page's protection key. Always key 0 if entries have none ([`Arch::PROTECTION_KEYS`]).
    pub key: ProtectionKey,
    /// The memory type. Every change of a leaf preserves the type, including a change to
    /// `PROT_NONE` and back.
    pub memory: MemoryType,
}

impl Attributes {
    /// The attributes of a kernel leaf that the MMU never has to update.
    pub(crate) const fn of_kernel(permissions: Permissions) -> Self {
        Self {
            permissions,
            accessed: true,
            dirty: permissions.contains(Permissions::WRITE),
            soft_dirty: false,
            userfault: false,
            key: ProtectionKey::truncated(0),
            memory: MemoryType::Normal,
        }
    }
}

/// The memory type: how the processor may treat accesses to a leaf's memory.
///
/// ```
/// use bindery::arch::MemoryType;
///
/// /// For a physical address of which the memory map says what is there.
/// fn memory_type(is_ram: bool) -> MemoryType {
///     if is_ram { MemoryType::Normal } else { MemoryType::Device }
/// }
/// assert_ne!(memory_type(true), memory_type(false));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum MemoryType {
    /// Memory: cached, written back.
    #[default]
    Normal,
    /// Cached for loads; stores are written through to memory at once.
    WriteThrough,
    /// Not cached; stores may be merged and delayed (frame buffers).
    WriteCombining,
    /// Not cached. Accesses occur one by one in program order, and a store completes when it has
    /// reached the device.
    Uncached,
    /// A device's registers: like [`MemoryType::Uncached`], but a store may complete early.
    /// Architectures without that difference use `Uncached`.
    Device,
}

impl MemoryType {
    /// All memory types.
    pub const ALL: [Self; 5] =
        [Self::Normal, Self::WriteThrough, Self::WriteCombining, Self::Uncached, Self::Device];

    /// Whether instructions may be fetched from memory of this type. A processor fetches
    /// speculatively, and for a device each access may have side effects (the Arm ARM forbids such
    /// mappings).
    ///
    /// Context: any.
    pub const fn is_executable(self) -> bool {
        match self {
            Self::Normal | Self::WriteThrough | Self::WriteCombining => true,
            Self::Uncached | Self::Device => false,
        }
    }

    /// The type's index in [`MemoryType::ALL`].
    const fn number(self) -> u64 {
        self as u64
    }

    /// The type with this [`MemoryType::number`].
    fn of_number(number: u64) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }
}

/// One page-table entry, as in memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct Entry(pub u64);

impl Entry {
    /// The empty entry: all bits zero.
    pub const EMPTY: Self = Self(0);

    /// Whether all bits are zero.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "entry {:#018x}", self.0)
    }
}

/// The kind of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Nothing.
    Empty,
    /// It points to a table of the next lower level.
    Table,
    /// It maps memory and the MMU uses it.
    Leaf,
    /// An absent entry: only software reads it ([`AbsentFormat::decode_absent`]).
    Absent,
}

/// The entry format and the rules of one architecture.
///
/// All functions are pure. Unless a function says otherwise, entries are leaves without the
/// contiguous bit (see the module documentation).
pub trait Arch: Copy + Eq + fmt::Debug + Default + Send + Sync + 'static {
    /// The name by which users select it.
    const NAME: &'static str;
    /// Number of table levels; the root is at this level.
    const LEVELS: u8;
    /// The level of the root.
    const ROOT: Level<Self> = Level::new(Self::LEVELS);
    /// [`Level::PTE`] of this architecture.
    const PTE: Level<Self> = Level::PTE;
    /// [`Level::PMD`] of this architecture.
    const PMD: Level<Self> = Level::PMD;
    /// Base-2 logarithm of the entries in a table.
    const INDEX_BITS: u32 = 9;
    /// Entries in a table: follows from [`Arch::INDEX_BITS`].
    const ENTRIES: u32 = 1 << Self::INDEX_BITS;
    /// End of the addresses that user space may have, exclusive (Linux: `TASK_SIZE_MAX`).
    const USER_END: u64;
    /// The highest level at which a leaf may be.
    const LARGEST_LEAF: Level<Self> = Level::PUD;
    /// Level-1 entries in a contiguous run, a power of two; 1 if the architecture has none.
    const CONTIG_ENTRIES: u32 = 1;
    /// The highest level at which [`Arch::CONTIG_ENTRIES`] leaves may form a contiguous run;
    /// [`Level::NONE`] if the architecture has none. User tables have contiguous runs only at level
    /// 1; the kernel's, at each.
    const LARGEST_CONTIG_LEVEL: Level<Self> =
        if Self::CONTIG_ENTRIES > 1 { Level::PTE } else { Level::NONE };
    /// The MMU may cache invalid entries, so a new entry is certain to be seen only after an
    /// invalidation (RISC-V privileged specification 1.12, section 4.2.1 `SFENCE.VMA`).
    const INVALID_MAY_BE_CACHED: bool = false;
    /// A page fault removes the TLB entries of its CPU for the address. So a changed entry that
    /// allows more needs no invalidation (x86-64).
    const FAULTS_INVALIDATE: bool = false;
    /// An instruction fetch sees every earlier store, so that memory may be executed right after it
    /// was written (x86-64). Otherwise
    /// [`Platform::synchronize_instructions`](crate::Platform::synchronize_instructions) is called
    /// before a leaf becomes executable.
    const COHERENT_FETCHES: bool = false;
    /// The number of protection keys that a leaf can hold, at most [`ProtectionKey::COUNT`]; 1 if
    /// entries have no key. [`crate::Platform::protection_keys`] tells whether the machine supports
    /// them.
    const PROTECTION_KEYS: u8 = 1;
    /// Whether a leaf can require a landing pad for indirect branches into it
    /// ([`Permissions::BTI`]). [`crate::Platform::branch_target_identification`] tells whether the
    /// machine enforces it.
    const BTI: bool = false;
    /// The valid bit; hardware ignores an entry without it.
    const PRESENT: u64 = 1;
    /// The difference between the level-1 leaves of two consecutive frames.
    const STEP: u64;
    /// Bits of the frame number that absent entries store inverted, so that a speculating
    /// processor that ignores the valid bit finds no memory there (x86-64: L1 terminal fault).
    const ABSENT_FLIP: u64 = 0;
    /// The soft-dirty bit of a leaf.
    const SOFT_DIRTY: u64;
    /// The userfault write-protect bit of a leaf.
    const USERFAULT: u64;
    /// A test for the most frequent saturated leaf, accessed and dirty: the bits to test, and their
    /// values. A match implies [`Arch::is_saturated`], but not all saturated leaves match.
    const SATURATED: Saturated;

    /// An entry that points to the table in `frame`.
    fn table(frame: Frame) -> Entry;

    /// A leaf at `level` for `frame`, which is aligned to the level's size. Only
    /// [`Arch::page_entry`] calls this function, and the type of the attributes guarantees that
    /// they allow some access.
    fn leaf(frame: Frame, level: Level<Self>, attributes: LeafAttributes) -> Entry;

    /// The entry at `level` for the page or pages of `frame`, which is aligned to the level's size:
    /// a leaf, or [`Absent::ProtNone`] if `attributes.permissions` allows nothing. No architecture
    /// overrides it.
    // Always inlined: callers of first accesses know most of the attributes at compile time.
    #[inline(always)]
    fn page_entry(frame: Frame, level: Level<Self>, attributes: Attributes) -> Entry {
        page_entry::page_entry(frame, level, attributes)
    }

    /// The entry of the page `count` pages after that of `first`, a leaf or an absent entry.
    #[inline]
    fn nth_page(first: Entry, count: u32) -> Entry {
        if first.0 & Self::PRESENT == 0 {
            return Self::nth_absent(first, count);
        }
        Entry(first.0.wrapping_add(Self::STEP.wrapping_mul(u64::from(count))))
    }

    /// Whether the present `entry`, read at `level`, points to a table.
    fn is_table(entry: Entry, level: Level<Self>) -> bool;

    /// The frame of a table entry or of a leaf.
    fn frame(entry: Entry) -> Frame;

    /// The attributes of a leaf.
    fn attributes(entry: Entry) -> Attributes;

    /// The bits in which the neighbors of one run must agree (after [`Arch::STEP`] per entry):
    /// never accessed and dirty; writable and soft-dirty only if `equal` contains them; not the
    /// frame with [`Equal::ANY_FRAMES`].
    fn compare_mask(equal: Equal) -> u64;

    /// `into` with the accessed and dirty state of a run of leaves merged in: `any` has the bits
    /// set in at least one of them, `all` those set in every one. (Two instructions for each entry
    /// of the run; the architecture chooses the one that it needs.)
    fn gather_run(into: Entry, any: u64, all: u64) -> Entry;

    /// `into` with the accessed and dirty state of `from` merged in.
    #[inline]
    fn gather(into: Entry, from: Entry) -> Entry {
        Self::gather_run(into, from.0, from.0)
    }

    /// Whether the leaf's accessed and dirty bits are saturated: the MMU can no longer change the
    /// leaf, so a plain store may replace it and no bit is lost.
    fn is_saturated(entry: Entry) -> bool;

    /// The leaf without write permission; dirty is kept.
    fn write_protect(entry: Entry) -> Entry;

    /// The leaf with write permission. With [`Write::Now`], it is also accessed, dirty and
    /// soft-dirty, so that the MMU need not record the write.
    fn make_writable(entry: Entry, write: Write) -> Entry;

    /// The leaf of a page that was written without its permission: accessed, dirty, soft-dirty and
    /// not writable. It permits no access that it did not permit before.
    fn mark_written(entry: Entry) -> Entry {
        Self::write_protect(Self::make_writable(entry, Write::Now))
    }

    /// The leaf with its accessed state set.
    fn mark_accessed(entry: Entry) -> Entry;

    /// The leaf with its accessed state cleared. Takes an entry as it is in memory: a contiguous
    /// run stays intact if all of its leaves are changed.
    fn mark_unused(entry: Entry) -> Entry;

    /// The leaf with its dirty state cleared. Takes an entry as [`Arch::mark_unused`] does.
    fn mark_clean(entry: Entry) -> Entry;

    /// Whether the leaf belongs to a contiguous run. Takes an entry as it is in memory.
    #[inline]
    fn is_contig(_entry: Entry) -> bool {
        false
    }

    /// The entry at `index` of a table as part of a contiguous run. Takes a leaf without the
    /// contiguous bit.
    #[inline]
    fn set_contig(entry: Entry, _index: EntryIndex) -> Entry {
        entry
    }

    /// The leaf at `index` of a level-1 table as a single page. Takes an entry as it is in memory;
    /// an entry outside contiguous runs is returned unchanged.
    #[inline]
    fn clear_contig(entry: Entry, _index: EntryIndex) -> Entry {
        entry
    }

    /// The bits that give a leaf, at any level, this memory type; zero for [`MemoryType::Normal`].
    /// `None` if the architecture lacks the type.
    fn memory_type(memory: MemoryType) -> Option<u64>;

    /// The memory type of a leaf. Of types that the architecture cannot distinguish, the strictest.
    fn memory_type_of(entry: Entry) -> MemoryType;

    /// Whether replacing `old` by `new` requires break-before-make: clear, invalidate, set. Takes
    /// entries of `level` as they are in memory. Accessed and dirty never matter.
    fn needs_break(old: Entry, new: Entry, level: Level<Self>) -> bool;

    /// The permissions of a leaf made for `permissions`: an architecture that cannot express some
    /// of them separately adds the implied ones (loads by stores everywhere, loads by fetches on
    /// some).
    #[inline]
    fn implied(permissions: Permissions) -> Permissions {
        let attributes = Attributes { permissions, ..Attributes::default() };
        LeafAttributes::new(attributes).map_or(permissions - Permissions::BTI, |attributes| {
            Self::attributes(Self::leaf(Frame(0), Level::PTE, attributes)).permissions
        })
    }

    /// Whether the [`Arch::CONTIG_ENTRIES`] leaves of one folio, without the contiguous bit, that
    /// begin at `index` with `first` may form a contiguous run: virtual and physical alignment
    /// agree. (The caller knows that they are equal and of one folio.)
    #[inline]
    fn may_fold(first: Entry, index: EntryIndex) -> bool {
        Self::CONTIG_ENTRIES > 1
            && index.offset_in(Self::CONTIG_ENTRIES) == 0
            && Self::frame(first).0 & (Self::CONTIG_ENTRIES - 1) == 0
    }

    /// The values of the control registers that give these entries their meaning.
    const REGISTERS: &'static [RegisterRule] = &[];

    /// The control bit that explains the symptom, if one does, and the severity of its wrong value.
    fn control_bit(_symptom: Symptom) -> Option<(ControlBit, Severity)> {
        None
    }
}

/// See [`Arch::SATURATED`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Saturated {
    /// The bits to test, including the valid bit.
    pub mask: u64,
    /// The values of the bits.
    pub value: u64,
}

impl Saturated {
    /// A saturated leaf with `bits` also set.
    pub(crate) const fn with(self, bits: u64) -> Self {
        Self { mask: self.mask | bits, value: self.value | bits }
    }

    /// Whether the entry is a saturated leaf of this kind. Takes an entry of level 1 as it is in
    /// memory.
    #[inline]
    pub const fn is(self, entry: Entry) -> bool {
        entry.0 & self.mask == self.value
    }

    /// Whether all entries are such leaves.
    #[inline]
    pub fn are<const N: usize>(self, entries: [Entry; N]) -> bool {
        // Tests set and clear bits separately: if no bit must be clear, as on x86-64, only one
        // instruction remains for each entry.
        let clear = self.mask & !self.value;
        let (all, any) =
            entries.iter().fold((u64::MAX, 0), |(all, any), entry| (all & entry.0, any | entry.0));
        all & self.value == self.value && any & clear == 0
    }
}

/// Whether a write immediately follows the grant of write permission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Write {
    /// The write follows immediately, so it is recorded now.
    Now,
    /// A write may follow later, and the MMU will record it.
    Later,
}
