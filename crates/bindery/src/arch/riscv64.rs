//! RISC-V, Sv39 and Sv48. RISC-V privileged specification, version 1.12: sections 4.3.1 (flag
//! bits), 4.3.2 (the walk), 4.4 and 4.5 (formats), chapter 5 (Svnapot), and 4.2.1 (`SFENCE.VMA`);
//! "Svadu" for accessed and dirty.
//!
//! ```text
//! 63  62......54  53 ............. 10   9          8           7  6  5  4  3  2  1  0
//! N   0           frame (PPN)           userfault  soft-dirty  D  A  G  U  X  W  R  V
//! ```
//!
//! Both bits that the format leaves to software (RSW) are used. Linux uses one of them for
//! "special" leaves, which have no folio. Here, the leaf's frame identifies such leaves.

use super::{
    Arch, Attributes, ControlBit, Entry, EntryIndex, Equal, LeafAttributes, Level, MemoryType,
    Permissions, Register, RegisterRule, Saturated, Severity, Symptom, Write,
};
use crate::addr::Frame;

const VALID: u64 = 1 << 0;
const READ: u64 = 1 << 1;
/// Reserved without [`READ`].
const WRITE: u64 = 1 << 2;
const EXECUTE: u64 = 1 << 3;
const USER: u64 = 1 << 4;
const GLOBAL: u64 = 1 << 5;
const ACCESSED: u64 = 1 << 6;
/// Legal in entries that are not writable, so dirty needs no second bit.
const DIRTY: u64 = 1 << 7;
const SOFT_DIRTY: u64 = 1 << 8;
const USERFAULT: u64 = 1 << 9;
/// Svpbmt: non-cacheable, idempotent, weakly ordered memory.
const NON_CACHEABLE: u64 = 1 << 61;
/// Svpbmt: a device's registers.
const DEVICE: u64 = 1 << 62;
/// Svnapot: one of the sixteen entries of a 64 KiB region.
const NAPOT: u64 = 1 << 63;
const FRAME_SHIFT: u32 = 10;
const FRAME_MASK: u64 = 0x003f_ffff_ffff_fc00;
/// An entry with any of these bits is a leaf.
const LEAF: u64 = READ | WRITE | EXECUTE;

const CONTIG_ENTRIES: u32 = 16;
/// The frame bits that a NAPOT entry replaces: the MMU takes them from the address.
const NAPOT_FRAME_MASK: u64 = ((CONTIG_ENTRIES - 1) as u64) << FRAME_SHIFT;
/// The value of the PPN bits instead: the region has 2^4 pages.
const NAPOT_FRAME_SIZE: u64 = 0b1000 << FRAME_SHIFT;

const SUM: ControlBit =
    ControlBit::clear("sstatus.SUM", "RISC-V privileged specification 4.1.1.2: user memory access");
const MXR: ControlBit = ControlBit::clear(
    "sstatus.MXR",
    "RISC-V privileged specification 4.1.1.2: make executable readable",
);
const ADUE: ControlBit = ControlBit::set(
    "menvcfg.ADUE",
    "RISC-V privileged specification, Svadu: hardware updates of A and D",
);
const PBMTE: ControlBit = ControlBit::set(
    "menvcfg.PBMTE",
    "RISC-V privileged specification, Svpbmt: page-based memory types",
);
const NAPOT_EXTENSION: ControlBit = ControlBit::set(
    "Svnapot",
    "RISC-V privileged specification, Svnapot: contiguity; no bit switches it on, see `KernelMap::without_contigs`",
);

/// RISC-V with `LEVELS` table levels: 3 for Sv39, 4 for Sv48. Contiguous runs need Svnapot.
///
/// With Svadu the MMU sets accessed and dirty. Without it (Svade) the first use and the first write
/// are page faults, and [`Arch::mark_accessed`] and [`Arch::make_writable`] with [`Write::Now`]
/// record them.
///
/// Memory that is not normal ([`MemoryType`]) needs Svpbmt (its chapter in the privileged
/// specification); without Svpbmt, only the physical address determines the type, and kernels map
/// all memory as normal. Write-through does not exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Riscv64<const LEVELS: u8>;

impl<const LEVELS: u8> Arch for Riscv64<LEVELS> {
    const NAME: &'static str = if LEVELS == 4 { "riscv64-sv48" } else { "riscv64-sv39" };
    const LEVELS: u8 = {
        assert!(LEVELS == 3 || LEVELS == 4, "RISC-V has three levels (Sv39) or four (Sv48)");
        LEVELS
    };
    // The lower half; higher addresses must repeat the topmost bit.
    const USER_END: u64 = 1 << (12 + 9 * LEVELS as u32 - 1);
    const CONTIG_ENTRIES: u32 = CONTIG_ENTRIES;
    const INVALID_MAY_BE_CACHED: bool = true;
    const STEP: u64 = 1 << FRAME_SHIFT;
    const SOFT_DIRTY: u64 = SOFT_DIRTY;
    const USERFAULT: u64 = USERFAULT;
    const SATURATED: Saturated =
        Saturated { mask: VALID | ACCESSED | DIRTY, value: VALID | ACCESSED | DIRTY };

    #[inline]
    fn table(frame: Frame) -> Entry {
        Self::table_entry(frame)
    }

    #[inline]
    fn leaf(frame: Frame, level: Level<Self>, attributes: LeafAttributes) -> Entry {
        Entry(leaf_bits(frame, level, attributes))
    }

    #[inline]
    fn is_table(entry: Entry, level: Level<Self>) -> bool {
        level > Level::PTE && entry.0 & LEAF == 0
    }

    #[inline]
    fn frame(entry: Entry) -> Frame {
        Frame(((entry.0 & FRAME_MASK) >> FRAME_SHIFT) as u32)
    }

    fn attributes(entry: Entry) -> Attributes {
        let mut permissions = Permissions::empty();
        permissions.set(Permissions::READ, entry.0 & READ != 0);
        permissions.set(Permissions::WRITE, entry.0 & WRITE != 0);
        permissions.set(Permissions::EXECUTE, entry.0 & EXECUTE != 0);
        permissions.set(Permissions::USER, entry.0 & USER != 0);
        Attributes {
            permissions,
            accessed: entry.0 & ACCESSED != 0,
            dirty: entry.0 & DIRTY != 0,
            soft_dirty: entry.0 & SOFT_DIRTY != 0,
            userfault: entry.0 & USERFAULT != 0,
            memory: Self::memory_type_of(entry),
            ..Attributes::default()
        }
    }

    #[inline]
    fn compare_mask(equal: Equal) -> u64 {
        let mut mask = !(ACCESSED | DIRTY | WRITE | SOFT_DIRTY);
        if equal.contains(Equal::WRITABLE) {
            mask |= WRITE;
        }
        if equal.contains(Equal::SOFT_DIRTY) {
            mask |= SOFT_DIRTY;
        }
        if equal.contains(Equal::ANY_FRAMES) {
            mask &= !FRAME_MASK;
        }
        mask
    }

    #[inline]
    fn gather_run(into: Entry, any: u64, _all: u64) -> Entry {
        Entry(into.0 | (any & (ACCESSED | DIRTY)))
    }

    #[inline]
    fn is_saturated(entry: Entry) -> bool {
        let writable_and_clean = entry.0 & (WRITE | DIRTY) == WRITE;
        entry.0 & ACCESSED != 0 && !writable_and_clean
    }

    #[inline]
    fn write_protect(entry: Entry) -> Entry {
        Entry(entry.0 & !WRITE)
    }

    #[inline]
    fn make_writable(entry: Entry, write: Write) -> Entry {
        // An execute-only page also becomes readable, because a writable page must be readable.
        let bits = entry.0 | READ | WRITE;
        match write {
            Write::Now => Entry(bits | ACCESSED | DIRTY | SOFT_DIRTY),
            Write::Later => Entry(bits),
        }
    }

    #[inline]
    fn mark_written(entry: Entry) -> Entry {
        // Not by way of a writable entry, which is readable: an execute-only page stays so.
        Entry((entry.0 & !WRITE) | ACCESSED | DIRTY | SOFT_DIRTY)
    }

    #[inline]
    fn mark_accessed(entry: Entry) -> Entry {
        Entry(entry.0 | ACCESSED)
    }

    #[inline]
    fn mark_unused(entry: Entry) -> Entry {
        Entry(entry.0 & !ACCESSED)
    }

    #[inline]
    fn mark_clean(entry: Entry) -> Entry {
        Entry(entry.0 & !DIRTY)
    }

    #[inline]
    fn is_contig(entry: Entry) -> bool {
        entry.0 & NAPOT != 0
    }

    #[inline]
    fn set_contig(entry: Entry, _index: EntryIndex) -> Entry {
        Entry((entry.0 & !NAPOT_FRAME_MASK) | NAPOT_FRAME_SIZE | NAPOT)
    }

    #[inline]
    fn clear_contig(entry: Entry, index: EntryIndex) -> Entry {
        if entry.0 & NAPOT == 0 {
            return entry;
        }
        // A region is aligned in both address spaces, so index and frame agree in their low bits.
        let low = u64::from(index.offset_in(CONTIG_ENTRIES)) << FRAME_SHIFT;
        Entry((entry.0 & !(NAPOT | NAPOT_FRAME_MASK)) | low)
    }

    #[inline]
    fn memory_type(memory: MemoryType) -> Option<u64> {
        if matches!(memory, MemoryType::WriteThrough) { None } else { Some(memory_bits(memory)) }
    }

    fn memory_type_of(entry: Entry) -> MemoryType {
        match entry.0 & (DEVICE | NON_CACHEABLE) {
            0 => MemoryType::Normal,
            NON_CACHEABLE => MemoryType::WriteCombining,
            _ => MemoryType::Uncached,
        }
    }

    fn needs_break(old: Entry, new: Entry, level: Level<Self>) -> bool {
        // A change of permissions needs no break-before-make: until the fence, a hart may use the
        // old or the new permissions, even inside a NAPOT region. Translations to different memory,
        // of different sizes (chapter 5 for NAPOT) or of different scope need it, because a hart
        // may use either and alternate between them.
        let changed = (old.0 ^ new.0) & (FRAME_MASK | NAPOT | GLOBAL);
        let resized = Self::is_table(old, level) != Self::is_table(new, level);
        old.0 & new.0 & VALID != 0 && (changed != 0 || resized)
    }

    const REGISTERS: &'static [RegisterRule] = &[
        RegisterRule::new(Register::Sstatus, 18, SUM, Severity::Unprotected),
        RegisterRule::new(Register::Sstatus, 19, MXR, Severity::Unprotected),
    ];

    fn control_bit(symptom: Symptom) -> Option<(ControlBit, Severity)> {
        Some(match symptom {
            Symptom::UserPageRead => (SUM, Severity::Unprotected),
            Symptom::ExecuteOnlyRead => (MXR, Severity::Unprotected),
            Symptom::AccessedFaulted | Symptom::DirtyFaulted => (ADUE, Severity::Slow),
            Symptom::MemoryTypeFaulted => (PBMTE, Severity::Broken),
            Symptom::ContiguousFaulted => (NAPOT_EXTENSION, Severity::Broken),
            Symptom::DataFaulted
            | Symptom::DataExecuted
            | Symptom::ReadOnlyWritten
            | Symptom::StaleWritten
            | Symptom::CodeFaulted
            | Symptom::WritableCodeFaulted
            | Symptom::UserPageExecuted
            | Symptom::UserCopyFaulted
            | Symptom::OtherFrame
            | Symptom::Register => return None,
        })
    }
}

impl<const LEVELS: u8> Riscv64<LEVELS> {
    /// A kernel leaf at `level` for `frame`, for tables that an embedder builds itself at boot,
    /// before it has a [`crate::KernelMap`]: global, accessed, and dirty if stores are allowed, so
    /// that the MMU never changes it. `permissions` has no [`Permissions::USER`]; `frame` is
    /// aligned to the level's size. The empty entry if `permissions` allows nothing.
    ///
    /// A constant expression for constant arguments. Code that runs before the MMU is on adds a
    /// frame's address to the leaf of frame 0. Write-through memory does not exist and becomes
    /// uncached.
    ///
    /// # Examples
    /// ```
    /// use bindery::addr::Frame;
    /// use bindery::arch::{Entry, Level, MemoryType, Permissions, Riscv64};
    ///
    /// const CODE: Entry = Riscv64::<3>::kernel_leaf(
    ///     Frame(0),
    ///     Level::PTE,
    ///     Permissions::READ.union(Permissions::EXECUTE),
    ///     MemoryType::Normal,
    /// );
    /// assert_ne!(CODE, Entry::EMPTY);
    /// ```
    #[inline]
    pub const fn kernel_leaf(
        frame: Frame,
        level: Level<Self>,
        permissions: Permissions,
        memory: MemoryType,
    ) -> Entry {
        match LeafAttributes::of_kernel(permissions) {
            Some(attributes) => Entry(leaf_bits(frame, level, attributes) | memory_bits(memory)),
            None => Entry::EMPTY,
        }
    }

    /// [`Arch::table`] as a constant function: an entry that points to the table in `frame`.
    #[inline]
    pub const fn table_entry(frame: Frame) -> Entry {
        // A, D and U are reserved in tables.
        Entry(((frame.0 as u64) << FRAME_SHIFT) | VALID)
    }
}

#[inline]
const fn leaf_bits<A>(frame: Frame, _level: Level<A>, attributes: LeafAttributes) -> u64 {
    let attributes = attributes.get();
    let permissions = attributes.permissions;
    let mut bits = ((frame.0 as u64) << FRAME_SHIFT) | VALID | memory_bits(attributes.memory);
    if permissions.contains(Permissions::READ) {
        bits |= READ;
    }
    if permissions.contains(Permissions::WRITE) {
        bits |= READ | WRITE;
    }
    if permissions.contains(Permissions::EXECUTE) {
        bits |= EXECUTE;
    }
    if permissions.contains(Permissions::USER) {
        bits |= USER;
    } else {
        bits |= GLOBAL;
    }
    if attributes.accessed {
        bits |= ACCESSED;
    }
    if attributes.dirty {
        bits |= DIRTY;
    }
    if attributes.soft_dirty {
        bits |= SOFT_DIRTY;
    }
    if attributes.userfault {
        bits |= USERFAULT;
    }
    bits
}

/// Write-through does not exist; uncached memory is used instead.
const fn memory_bits(memory: MemoryType) -> u64 {
    match memory {
        MemoryType::Normal => 0,
        MemoryType::WriteCombining => NON_CACHEABLE,
        MemoryType::WriteThrough | MemoryType::Uncached | MemoryType::Device => DEVICE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type A = Riscv64<3>;

    fn page(frame: Frame, permissions: Permissions) -> Entry {
        A::page_entry(
            frame,
            Level::PTE,
            Attributes { permissions, accessed: true, ..Default::default() },
        )
    }

    #[test]
    fn a_writable_page_is_readable_too() {
        let page = page(Frame(7), Permissions::WRITE | Permissions::USER);
        assert_eq!(page.0 & LEAF, READ | WRITE);
    }

    #[test]
    fn an_execute_only_page_stays_until_written() {
        let page = page(Frame(7), Permissions::EXECUTE | Permissions::USER);
        assert_eq!(page.0 & LEAF, EXECUTE);
        assert_eq!(A::attributes(page).permissions, Permissions::EXECUTE | Permissions::USER);
        assert_eq!(A::make_writable(page, Write::Later).0 & LEAF, LEAF);
    }

    #[test]
    fn the_entries_of_a_region_are_equal() {
        let user = Permissions::READ | Permissions::USER;
        let first = A::set_contig(page(Frame(0x1230), user), EntryIndex::new(0x40));
        for page_number in 0..CONTIG_ENTRIES {
            let index = EntryIndex::new(0x40 + page_number);
            let frame = Frame(0x1230 + page_number);
            let entry = A::set_contig(page(frame, user), index);
            assert_eq!(entry, first);
            assert_eq!(A::frame(A::clear_contig(entry, index)), frame);
        }
    }

    #[test]
    fn a_regions_middle_page_needs_a_break() {
        // The frame bits equal those of a region; only N distinguishes the two.
        let single = page(Frame(0x1238), Permissions::READ | Permissions::USER);
        let contig = A::set_contig(single, EntryIndex::new(8));
        assert_eq!(contig.0 ^ single.0, NAPOT);
        assert!(
            A::needs_break(contig, single, Level::PTE)
                && A::needs_break(single, contig, Level::PTE)
        );
    }
}
