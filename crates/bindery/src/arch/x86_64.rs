//! x86-64, four or five levels. Intel 64 SDM volume 3A, chapter "Paging", here with its numbers as
//! chapter 4 (later editions renumber it): tables 4-14 to 4-20 (formats), section 4.6 (shadow
//! stacks, protection keys), section 4.8 (accessed and dirty), section 4.10.4 (invalidation).

use super::{
    Arch, Attributes, ControlBit, Entry, Equal, LeafAttributes, Level, MemoryType, Permissions,
    ProtectionKey, Register, RegisterRule, Saturated, Severity, Symptom, Write,
};
use crate::addr::{Frame, PAGE_SHIFT};

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
/// PWT and PCD: with the PAT bit clear, the two choose among the first four entries of `IA32_PAT`.
const WRITE_THROUGH: u64 = 1 << 3;
const CACHE_DISABLE: u64 = 1 << 4;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
/// In entries of level 2 and 3: the entry is a leaf.
const LARGE: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
const USERFAULT: u64 = 1 << 10;
const SOFT_DIRTY: u64 = 1 << 11;
/// Dirty, while the entry is not writable. An entry that is dirty and not writable would be a
/// shadow-stack page (SDM section 4.6), so write protection saves the dirty state here.
const SAVED_DIRTY: u64 = 1 << 58;
/// The position of the four protection-key bits in leaves, which have an effect if CR4.PKE is set.
const KEY_SHIFT: u32 = 59;
const NO_EXECUTE: u64 = 1 << 63;
/// In leaves of level 2 and 3 the lowest of these bits selects a memory type (PAT); frames are
/// aligned there, so the bit is clear, which means write-back after reset.
const FRAME_MASK: u64 = 0x000f_ffff_ffff_f000;

const NXE: ControlBit =
    ControlBit::set("EFER.NXE", "Intel SDM volume 3A, 4.1.3 and 4.6: execute-disable");
const WP: ControlBit =
    ControlBit::set("CR0.WP", "Intel SDM volume 3A, 4.1.3 and 4.6: supervisor-mode writes");
const PGE: ControlBit = ControlBit::set("CR4.PGE", "Intel SDM volume 3A, 4.10.2.4: global pages");
const PCIDE: ControlBit =
    ControlBit::set("CR4.PCIDE", "Intel SDM volume 3A, 4.10.1: process-context identifiers");
const SMEP: ControlBit =
    ControlBit::set("CR4.SMEP", "Intel SDM volume 3A, 4.6.1: instruction fetches");
const SMAP: ControlBit = ControlBit::set("CR4.SMAP", "Intel SDM volume 3A, 4.6.1: data accesses");
const PKE: ControlBit = ControlBit::set("CR4.PKE", "Intel SDM volume 3A, 4.6.2: protection keys");

/// x86-64 with `LEVELS` table levels: 4, or 5 if the processor has LA57 and it is switched on.
///
/// If memory other than normal is mapped, by [`crate::KernelMap`] or for programs
/// ([`crate::FrameSource`]), the embedder programs
/// `IA32_PAT` (SDM volume 3A, "Page Attribute Table") so that entries 0 to 3 are write-back (6),
/// write-combining (1), write-through (4), uncacheable (0); 4 to 7 are not used. After reset, entry
/// 1 is write-through and entry 2 UC-, so a missing setup costs only speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct X86_64<const LEVELS: u8 = 4>;

impl<const LEVELS: u8> Arch for X86_64<LEVELS> {
    const NAME: &'static str = if LEVELS == 5 { "x86-64-la57" } else { "x86-64" };
    const LEVELS: u8 = {
        assert!(LEVELS == 4 || LEVELS == 5, "x86-64 has four or five levels");
        LEVELS
    };
    // One page less than half, like Linux: a system call instruction in the last page would return
    // to a non-canonical address.
    const USER_END: u64 = (1 << (PAGE_SHIFT + 9 * LEVELS as u32 - 1)) - (1 << PAGE_SHIFT);
    // SDM volume 3A, section 4.10.4.1, "Operations that Invalidate TLBs and Paging-Structure
    // Caches".
    const FAULTS_INVALIDATE: bool = true;
    // SDM volume 3A, "Self-Modifying Code": by physical address, for all processors.
    const COHERENT_FETCHES: bool = true;
    const PROTECTION_KEYS: u8 = 16;
    const STEP: u64 = 1 << PAGE_SHIFT;
    const ABSENT_FLIP: u64 = FRAME_MASK;
    const SOFT_DIRTY: u64 = SOFT_DIRTY;
    const USERFAULT: u64 = USERFAULT;
    const SATURATED: Saturated =
        Saturated { mask: PRESENT | ACCESSED | DIRTY, value: PRESENT | ACCESSED | DIRTY };

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
        level > Level::PTE && entry.0 & LARGE == 0
    }

    #[inline]
    fn frame(entry: Entry) -> Frame {
        Frame(((entry.0 & FRAME_MASK) >> PAGE_SHIFT) as u32)
    }

    fn attributes(entry: Entry) -> Attributes {
        let mut permissions = Permissions::READ;
        permissions.set(Permissions::WRITE, entry.0 & WRITABLE != 0);
        permissions.set(Permissions::EXECUTE, entry.0 & NO_EXECUTE == 0);
        permissions.set(Permissions::USER, entry.0 & USER != 0);
        Attributes {
            permissions,
            accessed: entry.0 & ACCESSED != 0,
            dirty: entry.0 & (DIRTY | SAVED_DIRTY) != 0,
            soft_dirty: entry.0 & SOFT_DIRTY != 0,
            userfault: entry.0 & USERFAULT != 0,
            key: ProtectionKey::truncated(entry.0 >> KEY_SHIFT),
            memory: Self::memory_type_of(entry),
        }
    }

    #[inline]
    fn compare_mask(equal: Equal) -> u64 {
        let mut mask = !(ACCESSED | DIRTY | SAVED_DIRTY | WRITABLE | SOFT_DIRTY);
        if equal.contains(Equal::WRITABLE) {
            mask |= WRITABLE;
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
        // If the two differ in writable, `into` decides which of its dirty bits to use.
        let dirty = (any & DIRTY) << 52 | any & SAVED_DIRTY;
        let dirty = if into.0 & WRITABLE != 0 { dirty >> 52 } else { dirty };
        Entry(into.0 | any & ACCESSED | dirty)
    }

    #[inline]
    fn is_saturated(entry: Entry) -> bool {
        let bits = entry.0 & (ACCESSED | DIRTY | WRITABLE);
        bits & ACCESSED != 0 && bits & (DIRTY | WRITABLE) != WRITABLE
    }

    #[inline]
    fn write_protect(entry: Entry) -> Entry {
        let saved = (entry.0 & DIRTY) << 52;
        Entry(entry.0 & !(WRITABLE | DIRTY) | saved)
    }

    #[inline]
    fn make_writable(entry: Entry, write: Write) -> Entry {
        let dirty = (entry.0 & SAVED_DIRTY) >> 52;
        let bits = entry.0 & !SAVED_DIRTY | WRITABLE | dirty;
        match write {
            Write::Now => Entry(bits | ACCESSED | DIRTY | SOFT_DIRTY),
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
        Entry(entry.0 & !(DIRTY | SAVED_DIRTY))
    }

    #[inline]
    fn memory_type(memory: MemoryType) -> Option<u64> {
        Some(memory_bits(memory))
    }

    fn memory_type_of(entry: Entry) -> MemoryType {
        match (entry.0 & CACHE_DISABLE != 0, entry.0 & WRITE_THROUGH != 0) {
            (false, false) => MemoryType::Normal,
            (false, true) => MemoryType::WriteCombining,
            (true, false) => MemoryType::WriteThrough,
            (true, true) => MemoryType::Uncached,
        }
    }

    fn needs_break(old: Entry, new: Entry, level: Level<Self>) -> bool {
        // A change of permissions needs no break-before-make. A change of frame or size while both
        // are valid would let one processor alternate between the old and the new translation (SDM
        // section 4.10.2.3), so such a change needs an invalid entry in between.
        let changed = old.0 ^ new.0;
        let size = if level > Level::PTE { LARGE } else { 0 };
        old.0 & new.0 & PRESENT != 0 && changed & (FRAME_MASK | GLOBAL | size) != 0
    }

    const REGISTERS: &'static [RegisterRule] = &[
        RegisterRule::new(Register::Efer, 11, NXE, Severity::Broken),
        RegisterRule::new(Register::Cr0, 16, WP, Severity::Broken),
        RegisterRule::new(Register::Cr4, 7, PGE, Severity::Slow),
        RegisterRule::new(Register::Cr4, 17, PCIDE, Severity::Slow),
        RegisterRule::new(Register::Cr4, 20, SMEP, Severity::Unprotected),
        RegisterRule::new(Register::Cr4, 21, SMAP, Severity::Unprotected),
        RegisterRule::new(Register::Cr4, 22, PKE, Severity::BrokenWithKeys),
        RegisterRule::field(
            Register::Pat,
            0xffff_ffff,
            0x0004_0106,
            "IA32_PAT",
            "Intel SDM volume 3A, section \"Page Attribute Table (PAT)\"",
        ),
    ];

    fn control_bit(symptom: Symptom) -> Option<(ControlBit, Severity)> {
        Some(match symptom {
            // Bit 63 is reserved while NXE is clear: each use of such an entry faults.
            Symptom::DataFaulted | Symptom::DataExecuted => (NXE, Severity::Broken),
            Symptom::ReadOnlyWritten => (WP, Severity::Broken),
            Symptom::UserPageRead => (SMAP, Severity::Unprotected),
            Symptom::UserPageExecuted => (SMEP, Severity::Unprotected),
            Symptom::StaleWritten
            | Symptom::CodeFaulted
            | Symptom::WritableCodeFaulted
            | Symptom::ExecuteOnlyRead
            | Symptom::ContiguousFaulted
            | Symptom::MemoryTypeFaulted
            | Symptom::UserCopyFaulted
            | Symptom::AccessedFaulted
            | Symptom::DirtyFaulted
            | Symptom::OtherFrame
            | Symptom::Register => return None,
        })
    }
}

impl<const LEVELS: u8> X86_64<LEVELS> {
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
    /// use bindery::arch::{Entry, Level, MemoryType, Permissions, X86_64};
    ///
    /// const CODE: Entry = X86_64::<4>::kernel_leaf(
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
        // Accessed is preset, so that the MMU never changes a table entry during a move.
        Entry(frame.start().0 | PRESENT | WRITABLE | USER | ACCESSED)
    }
}

// Always inlined: callers of first accesses know most of the attributes at compile time.
#[inline(always)]
const fn leaf_bits<const LEVELS: u8>(
    frame: Frame,
    level: Level<X86_64<LEVELS>>,
    attributes: LeafAttributes,
) -> u64 {
    let attributes = attributes.get();
    let permissions = attributes.permissions;
    let mut bits = frame.start().0 | PRESENT | (attributes.key.number() as u64) << KEY_SHIFT;
    bits |= memory_bits(attributes.memory);
    if permissions.contains(Permissions::USER) {
        bits |= USER;
    } else {
        bits |= GLOBAL;
    }
    if !permissions.contains(Permissions::EXECUTE) {
        bits |= NO_EXECUTE;
    }
    if level.number() > 1 {
        bits |= LARGE;
    }
    if permissions.contains(Permissions::WRITE) {
        bits |= WRITABLE;
    }
    if attributes.accessed {
        bits |= ACCESSED;
    }
    if attributes.dirty {
        bits |= if bits & WRITABLE != 0 { DIRTY } else { SAVED_DIRTY };
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
    match memory {
        MemoryType::Normal => 0,
        MemoryType::WriteCombining => WRITE_THROUGH,
        MemoryType::WriteThrough => CACHE_DISABLE,
        MemoryType::Uncached | MemoryType::Device => CACHE_DISABLE | WRITE_THROUGH,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::VirtAddr;
    use crate::arch::{Absent, AbsentFormat, Marker};

    type A = X86_64<4>;

    fn attributes(permissions: Permissions, dirty: bool) -> Attributes {
        Attributes { permissions, accessed: true, dirty, ..Default::default() }
    }

    #[test]
    fn a_protected_dirty_page_is_no_shadow_stack() {
        let user = Permissions::READ | Permissions::USER;
        let dirty =
            A::page_entry(Frame(7), Level::PTE, attributes(user | Permissions::WRITE, true));
        let protected = A::write_protect(dirty);
        assert_eq!(protected.0 & (DIRTY | WRITABLE), 0);
        assert!(A::attributes(protected).dirty);
        assert_eq!(protected, A::page_entry(Frame(7), Level::PTE, attributes(user, true)));
        assert_eq!(A::make_writable(protected, Write::Later), dirty);
    }

    #[test]
    fn gathering_puts_dirty_where_the_receiver_keeps_it() {
        let user = Permissions::READ | Permissions::USER;
        let writable =
            A::page_entry(Frame(7), Level::PTE, attributes(user | Permissions::WRITE, false));
        let read_only = A::page_entry(Frame(8), Level::PTE, attributes(user, false));
        let dirty = A::make_writable(writable, Write::Now);
        assert!(A::attributes(A::gather(read_only, dirty)).dirty);
        assert_eq!(A::gather(read_only, dirty).0 & DIRTY, 0);
        let saved = A::write_protect(dirty);
        assert_eq!(A::gather(writable, saved).0 & (DIRTY | SAVED_DIRTY), DIRTY);
    }

    #[test]
    fn user_space_ends_before_the_noncanonical_addresses() {
        assert_eq!(X86_64::<4>::USER_END, 0x0000_7fff_ffff_f000);
        assert_eq!(X86_64::<5>::USER_END, 0x00ff_ffff_ffff_f000);
    }

    #[test]
    fn the_fifth_level_is_just_another_table() {
        assert_eq!((X86_64::<4>::LEVELS, X86_64::<5>::LEVELS), (4, 5));
        assert_eq!(X86_64::<5>::NAME, "x86-64-la57");
        assert_eq!(X86_64::<5>::table(Frame(7)), A::table(Frame(7)));
        assert!(X86_64::<5>::is_table(A::table(Frame(7)), Level::new(5)));
        assert_eq!(Level::<X86_64<5>>::new(5).table_span(), 1 << 57);
        assert_eq!(
            Level::<X86_64<5>>::new(5).index_of(VirtAddr(0x00ff_ffff_ffff_f000)).number(),
            255
        );
    }

    #[test]
    fn no_absent_entry_points_at_low_memory() {
        // L1 terminal fault: the processor interprets the bits as a frame, regardless of bit 0. An
        // entry without access names the inverse of its frame, and a swap entry that of its slot.
        // The cache of an affected processor has addresses of 44 bits or more.
        let entries =
            [0, 1, 0x1234_5678, (1 << 31) - 1, 1 << 31, 0x9abc_def0, u32::MAX - 1, u32::MAX]
                .map(|frame| A::encode_prot_none(Frame(frame), Attributes::default()));
        let slots = [0, (1 << 31) - 1, 1 << 31, 0x12_3456_789a, (1 << 38) - 1].map(|slot| {
            let (exclusive, soft_dirty, userfault) = (true, false, false);
            A::encode_absent(Absent::Swap { device: 1, slot, exclusive, soft_dirty, userfault })
        });
        let marker = A::encode_absent(Absent::Marker(Marker::Guard));
        for entry in entries.into_iter().chain(slots).chain([marker]) {
            assert!(entry.0 & FRAME_MASK >= 1 << 43 && entry.0 & 1 << 43 != 0, "{entry:?}");
        }
    }
}
