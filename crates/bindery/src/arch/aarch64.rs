//! AArch64 stage 1, EL1&0, 4 KiB granule, 48-bit addresses, four levels. Arm ARM (DDI 0487),
//! chapter D8: "Translation table descriptor formats" (D8.3), "Memory access control" (D8.4),
//! "Hardware updates to the translation tables" (D8.5), "The Contiguous bit" (in D8.7), "Using
//! break-before-make when updating translation table entries" (D8.16). The numbers differ between
//! issues; the titles do not.
//!
//! The manual counts levels from the root: its level 0 is level 4 here, its level 3 is level 1.
//!
//! The MMU interprets two bits together as the state of a page (D8.5, "dirty state"). Software adds
//! a third:
//!
//! | DBM | AP\[2\] (read-only) | saved dirty | the page is |
//! |---|---|---|---|
//! | 1 | 1 | 0 | writable, clean; the first write makes the MMU clear AP\[2\] |
//! | 1 | 0 | 0 | writable, dirty |
//! | 0 | 1 | 0 | not writable, clean |
//! | 0 | 1 | 1 | not writable, dirty |

use super::{
    Arch, Attributes, ControlBit, Entry, EntryIndex, Equal, LeafAttributes, Level, MemoryType,
    Permissions, Register, RegisterRule, Saturated, Severity, Symptom, Write,
};
use crate::addr::{Frame, PAGE_SHIFT};

const VALID: u64 = 1 << 0;
/// In valid entries: a table (levels 2 to 4) or a page (level 1); clear in a block.
const TABLE_OR_PAGE: u64 = 1 << 1;
/// Index into `MAIR_EL1`: the memory type.
const ATTRIBUTE_INDEX: u64 = 0b111 << 2;
/// AP\[1\]: EL0 may access the page.
const USER: u64 = 1 << 6;
/// AP\[2\]: a write faults; inverted dirty if [`DBM`] is set.
const READ_ONLY: u64 = 1 << 7;
/// Shareability: inner shareable, so that all CPUs have a coherent view of memory.
const INNER_SHAREABLE: u64 = 0b11 << 8;
const ACCESSED: u64 = 1 << 10;
/// nG: the translation belongs to one ASID.
const NOT_GLOBAL: u64 = 1 << 11;
/// GP: an indirect branch from EL0 into the page must land on a landing pad (FEAT_BTI).
const GUARDED: u64 = 1 << 50;
/// Dirty bit modifier: the MMU may clear [`READ_ONLY`]. The core uses it to mean that the page is
/// writable.
const DBM: u64 = 1 << 51;
const CONTIGUOUS: u64 = 1 << 52;
/// Execute-never at EL1.
const PXN: u64 = 1 << 53;
/// Execute-never at EL0.
const UXN: u64 = 1 << 54;
// Bits 55 to 58 are available to software.
/// Dirty, while the page is not writable: [`READ_ONLY`] then only means read-only.
const SAVED_DIRTY: u64 = 1 << 55;
const SOFT_DIRTY: u64 = 1 << 56;
const USERFAULT: u64 = 1 << 58;
/// Output address bits 47:12.
const FRAME_MASK: u64 = 0x0000_ffff_ffff_f000;

/// The distance in bits from [`READ_ONLY`] up to [`SAVED_DIRTY`].
const SAVE_SHIFT: u32 = SAVED_DIRTY.trailing_zeros() - READ_ONLY.trailing_zeros();

const HA: ControlBit =
    ControlBit::set("TCR_EL1.HA", "Arm ARM D8.5: hardware management of the Access flag");
const HD: ControlBit =
    ControlBit::set("TCR_EL1.HD", "Arm ARM D8.5: hardware management of dirty state");
const WXN: ControlBit =
    ControlBit::clear("SCTLR_EL1.WXN", "Arm ARM D8.4: write permission implies execute-never");
const PAN: ControlBit =
    ControlBit::set("PSTATE.PAN", "Arm ARM D8.4: privileged access never; SCTLR_EL1.SPAN is clear");
const SPAN: ControlBit =
    ControlBit::clear("SCTLR_EL1.SPAN", "Arm ARM D8.4: PSTATE.PAN is set by each exception");

/// AArch64 with 4 KiB pages and 48-bit addresses.
///
/// The embedder programs the machine as follows:
/// - `MAIR_EL1` (Arm ARM D17.2, "MAIR_EL1"): attribute 0 is normal memory, inner and outer
///   write-back (0xff). If other types are mapped, by [`crate::KernelMap`] or for programs
///   ([`crate::FrameSource`]): attribute 1 is Device-nGnRE (0x04, [`MemoryType::Device`]), 2 normal
///   non-cacheable (0x44, [`MemoryType::WriteCombining`]), 3 Device-nGnRnE (0x00,
///   [`MemoryType::Uncached`]), 4 normal write-through (0xbb, [`MemoryType::WriteThrough`]).
/// - `TCR_EL1` has 48-bit addresses, the 4 KiB granule, and any `HPDn`: the core's tables restrict
///   nothing.
/// - `TCR_EL1.HA` and `HD` are set if the processor has FEAT_HAFDBS. They are not required: without
///   them the first use is an Access flag fault, the first write a Permission fault, and
///   [`Arch::mark_accessed`] and [`Arch::make_writable`] with [`Write::Now`] record them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AArch64;

impl Arch for AArch64 {
    const NAME: &'static str = "aarch64";
    const LEVELS: u8 = 4;
    // The whole lower half: TTBR0 translates 48 bits.
    const USER_END: u64 = 1 << 48;
    const CONTIG_ENTRIES: u32 = 16;
    const LARGEST_CONTIG_LEVEL: Level<Self> = Level::PMD;
    const BTI: bool = true;
    const STEP: u64 = 1 << PAGE_SHIFT;
    const SOFT_DIRTY: u64 = SOFT_DIRTY;
    const USERFAULT: u64 = USERFAULT;
    const SATURATED: Saturated =
        Saturated { mask: VALID | ACCESSED | READ_ONLY, value: VALID | ACCESSED };

    #[inline]
    fn table(frame: Frame) -> Entry {
        Self::table_entry(frame)
    }

    // Always inlined: callers of first accesses know most of the attributes at compile time.
    #[inline(always)]
    fn leaf(frame: Frame, level: Level<Self>, attributes: LeafAttributes) -> Entry {
        Entry(leaf_bits(frame, level, attributes))
    }

    #[inline]
    fn is_table(entry: Entry, level: Level<Self>) -> bool {
        level > Level::PTE && entry.0 & TABLE_OR_PAGE != 0
    }

    #[inline]
    fn frame(entry: Entry) -> Frame {
        Frame(((entry.0 & FRAME_MASK) >> PAGE_SHIFT) as u32)
    }

    fn attributes(entry: Entry) -> Attributes {
        let user = entry.0 & USER != 0;
        let never = if user { UXN } else { PXN };
        let mut permissions = Permissions::READ;
        permissions.set(Permissions::WRITE, entry.0 & DBM != 0);
        permissions.set(Permissions::EXECUTE, entry.0 & never == 0);
        permissions.set(Permissions::USER, user);
        permissions.set(Permissions::BTI, entry.0 & GUARDED != 0);
        Attributes {
            permissions,
            accessed: entry.0 & ACCESSED != 0,
            dirty: entry.0 & READ_ONLY == 0 || entry.0 & SAVED_DIRTY != 0,
            soft_dirty: entry.0 & SOFT_DIRTY != 0,
            userfault: entry.0 & USERFAULT != 0,
            memory: Self::memory_type_of(entry),
            ..Attributes::default()
        }
    }

    #[inline]
    fn compare_mask(equal: Equal) -> u64 {
        // Without DBM, AP[2] is always set, so dropping it loses no information.
        let mut mask = !(ACCESSED | READ_ONLY | SAVED_DIRTY | DBM | SOFT_DIRTY);
        if equal.contains(Equal::WRITABLE) {
            mask |= DBM;
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
    fn gather_run(into: Entry, any: u64, all: u64) -> Entry {
        // Dirty is a clear bit in a writable entry and a set bit in any other; `into` decides which
        // of the two it becomes.
        let dirty = ((!all & READ_ONLY) << SAVE_SHIFT) | (any & SAVED_DIRTY);
        let bits = if into.0 & DBM != 0 { into.0 & !(dirty >> SAVE_SHIFT) } else { into.0 | dirty };
        Entry(bits | (any & ACCESSED))
    }

    #[inline]
    fn is_saturated(entry: Entry) -> bool {
        let writable_and_clean = entry.0 & (DBM | READ_ONLY) == DBM | READ_ONLY;
        entry.0 & ACCESSED != 0 && !writable_and_clean
    }

    #[inline]
    fn write_protect(entry: Entry) -> Entry {
        let saved = (!entry.0 & READ_ONLY) << SAVE_SHIFT;
        Entry((entry.0 & !DBM) | READ_ONLY | saved)
    }

    #[inline]
    fn make_writable(entry: Entry, write: Write) -> Entry {
        let dirty = (entry.0 & SAVED_DIRTY) >> SAVE_SHIFT;
        let bits = ((entry.0 & !SAVED_DIRTY) | DBM) & !dirty;
        match write {
            Write::Now => Entry((bits | ACCESSED | SOFT_DIRTY) & !READ_ONLY),
            Write::Later => Entry(bits),
        }
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
        // Without DBM, AP[2] is set already.
        Entry((entry.0 | READ_ONLY) & !SAVED_DIRTY)
    }

    #[inline]
    fn is_contig(entry: Entry) -> bool {
        entry.0 & CONTIGUOUS != 0
    }

    #[inline]
    fn set_contig(entry: Entry, _index: EntryIndex) -> Entry {
        Entry(entry.0 | CONTIGUOUS)
    }

    #[inline]
    fn clear_contig(entry: Entry, _index: EntryIndex) -> Entry {
        Entry(entry.0 & !CONTIGUOUS)
    }

    #[inline]
    fn memory_type(memory: MemoryType) -> Option<u64> {
        Some(memory_bits(memory))
    }

    fn memory_type_of(entry: Entry) -> MemoryType {
        match (entry.0 & ATTRIBUTE_INDEX) >> ATTRIBUTE_INDEX.trailing_zeros() {
            0 => MemoryType::Normal,
            1 => MemoryType::Device,
            2 => MemoryType::WriteCombining,
            4 => MemoryType::WriteThrough,
            _ => MemoryType::Uncached,
        }
    }

    fn needs_break(old: Entry, new: Entry, _level: Level<Self>) -> bool {
        // D8.16 requires it for a change of output address, contiguous run size, memory type or
        // shareability, and for a global entry if the TLB may hold a non-global one. (The address
        // rule has exceptions for equal contents, the size rule for FEAT_BBM; we use neither.)
        // Another table changes the addresses of everything below.
        const ALWAYS: u64 =
            FRAME_MASK | TABLE_OR_PAGE | ATTRIBUTE_INDEX | INNER_SHAREABLE | CONTIGUOUS;
        let changed = (old.0 ^ new.0) & ALWAYS;
        let becomes_global = old.0 & !new.0 & NOT_GLOBAL;
        old.0 & new.0 & VALID != 0 && changed | becomes_global != 0
    }

    const REGISTERS: &'static [RegisterRule] = &[
        RegisterRule::new(Register::SctlrEl1, 19, WXN, Severity::Broken),
        RegisterRule::new(Register::SctlrEl1, 23, SPAN, Severity::Unprotected),
        RegisterRule::new(Register::TcrEl1, 39, HA, Severity::Slow),
        RegisterRule::new(Register::TcrEl1, 40, HD, Severity::Slow),
        RegisterRule::field(
            Register::MairEl1,
            0xff_ffff_ffff,
            0xbb_0044_04ff,
            "MAIR_EL1",
            "Arm ARM D17.2: memory attribute indirection",
        ),
    ];

    fn control_bit(symptom: Symptom) -> Option<(ControlBit, Severity)> {
        Some(match symptom {
            Symptom::WritableCodeFaulted => (WXN, Severity::Broken),
            Symptom::UserPageRead => (PAN, Severity::Unprotected),
            Symptom::AccessedFaulted => (HA, Severity::Slow),
            Symptom::DirtyFaulted => (HD, Severity::Slow),
            Symptom::DataFaulted
            | Symptom::DataExecuted
            | Symptom::ReadOnlyWritten
            | Symptom::StaleWritten
            | Symptom::CodeFaulted
            | Symptom::ExecuteOnlyRead
            | Symptom::ContiguousFaulted
            | Symptom::MemoryTypeFaulted
            | Symptom::UserPageExecuted
            | Symptom::UserCopyFaulted
            | Symptom::OtherFrame
            | Symptom::Register => return None,
        })
    }
}

impl AArch64 {
    /// A kernel leaf at `level` for `frame`, for tables that an embedder builds itself at boot,
    /// before it has a [`crate::KernelMap`]: global, accessed, and dirty if stores are allowed, so
    /// that the MMU never changes it. `permissions` has no [`Permissions::USER`]; `frame` is
    /// aligned to the level's size. The empty entry if `permissions` allows nothing.
    ///
    /// A constant expression for constant arguments. Code that runs before the MMU is on adds a
    /// frame's address to the leaf of frame 0.
    ///
    /// # Examples
    /// ```
    /// use bindery::addr::Frame;
    /// use bindery::arch::{AArch64, Entry, Level, MemoryType, Permissions};
    ///
    /// const CODE: Entry = AArch64::kernel_leaf(
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
        // APTable, PXNTable and UXNTable stay clear: only the leaves restrict accesses.
        Entry(frame.start().0 | VALID | TABLE_OR_PAGE)
    }
}

// Always inlined: callers of first accesses know most of the attributes at compile time.
#[inline(always)]
const fn leaf_bits(frame: Frame, level: Level<AArch64>, attributes: LeafAttributes) -> u64 {
    let attributes = attributes.get();
    let permissions = attributes.permissions;
    let mut bits = frame.start().0 | VALID | INNER_SHAREABLE | memory_bits(attributes.memory);
    if level.number() == 1 {
        bits |= TABLE_OR_PAGE;
    }
    // Each side may run only its own code.
    let execute = permissions.contains(Permissions::EXECUTE);
    if permissions.contains(Permissions::USER) {
        bits |= USER | NOT_GLOBAL | PXN;
        bits |= if execute { 0 } else { UXN };
    } else {
        bits |= UXN;
        bits |= if execute { 0 } else { PXN };
    }
    if permissions.contains(Permissions::BTI.union(Permissions::EXECUTE)) {
        bits |= GUARDED;
    }
    bits |= match (permissions.contains(Permissions::WRITE), attributes.dirty) {
        (true, true) => DBM,
        (true, false) => DBM | READ_ONLY,
        (false, true) => READ_ONLY | SAVED_DIRTY,
        (false, false) => READ_ONLY,
    };
    if attributes.accessed {
        bits |= ACCESSED;
    }
    if attributes.soft_dirty {
        bits |= SOFT_DIRTY;
    }
    if attributes.userfault {
        bits |= USERFAULT;
    }
    bits
}

const fn memory_bits(memory: MemoryType) -> u64 {
    let attribute = match memory {
        MemoryType::Normal => 0,
        MemoryType::Device => 1,
        MemoryType::WriteCombining => 2,
        MemoryType::Uncached => 3,
        MemoryType::WriteThrough => 4,
    };
    attribute << ATTRIBUTE_INDEX.trailing_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    type A = AArch64;

    const USER_READ: Permissions = Permissions::READ.union(Permissions::USER);

    fn page(permissions: Permissions, dirty: bool) -> Entry {
        A::page_entry(
            Frame(7),
            Level::PTE,
            Attributes { permissions, accessed: true, dirty, ..Default::default() },
        )
    }

    #[test]
    fn the_mmu_dirties_by_clearing_one_bit() {
        let clean = page(USER_READ | Permissions::WRITE, false);
        let written = Entry(clean.0 & !READ_ONLY);
        assert!(!A::is_saturated(clean) && A::is_saturated(written));
        assert_eq!(written, page(USER_READ | Permissions::WRITE, true));
    }

    #[test]
    fn the_mmu_cannot_unprotect_a_page() {
        // If DBM stayed set, the next write would clear AP[2] and succeed.
        let protected = A::write_protect(page(USER_READ | Permissions::WRITE, true));
        assert_eq!(protected.0 & (DBM | READ_ONLY | SAVED_DIRTY), READ_ONLY | SAVED_DIRTY);
    }

    #[test]
    fn gathering_puts_dirty_where_the_receiver_keeps_it() {
        let writable = page(USER_READ | Permissions::WRITE, false);
        let read_only = page(USER_READ, false);
        let dirty = A::make_writable(writable, Write::Now);
        assert_eq!(
            A::gather(read_only, dirty).0 & (READ_ONLY | SAVED_DIRTY),
            READ_ONLY | SAVED_DIRTY
        );
        let saved = A::write_protect(dirty);
        assert_eq!(A::gather(writable, saved).0 & (READ_ONLY | SAVED_DIRTY), 0);
    }

    #[test]
    fn pages_and_blocks_differ_in_low_bits() {
        let attributes = Attributes { permissions: USER_READ, ..Default::default() };
        assert_eq!(A::page_entry(Frame(0), Level::PTE, attributes).0 & 0b11, 0b11);
        assert_eq!(A::page_entry(Frame(0), Level::PMD, attributes).0 & 0b11, 0b01);
        assert_eq!(A::page_entry(Frame(0), Level::PUD, attributes).0 & 0b11, 0b01);
        assert_eq!(A::table(Frame(0)).0, 0b11);
    }

    #[test]
    fn neither_side_runs_the_code_of_the_other() {
        let never = |permissions| page(permissions, false).0 & (PXN | UXN);
        assert_eq!(never(USER_READ | Permissions::EXECUTE), PXN);
        assert_eq!(never(Permissions::READ | Permissions::EXECUTE), UXN);
        assert_eq!(never(USER_READ), PXN | UXN);
        assert_eq!(never(Permissions::READ), PXN | UXN);
    }

    #[test]
    fn only_what_can_be_run_is_guarded() {
        let guarded = USER_READ | Permissions::BTI;
        assert_eq!(page(guarded, false), page(USER_READ, false));
        let run = page(USER_READ | Permissions::EXECUTE, false);
        assert_eq!(page(guarded | Permissions::EXECUTE, false).0, run.0 | 1 << 50);
    }

    #[test]
    fn an_entry_may_leave_globals_without_break() {
        let user = page(USER_READ, false);
        let kernel = page(Permissions::READ, false);
        assert!(A::needs_break(user, kernel, Level::PTE));
        assert!(!A::needs_break(kernel, user, Level::PTE));
    }

    #[test]
    fn another_memory_type_or_shareability_needs_a_break() {
        let normal = page(USER_READ, false);
        assert!(A::needs_break(normal, Entry(normal.0 | 1 << 2), Level::PTE));
        assert!(A::needs_break(normal, Entry(normal.0 & !INNER_SHAREABLE), Level::PTE));
    }
}
