//! A tiny imaginary architecture for exhaustive tests: three levels of four entries, 64 pages in
//! all. Its size permits tests of every sequence of operations up to some depth.
//!
//! ```text
//! level 3 | 64 KiB   | 64 KiB   | 64 KiB   | 64 KiB   |   tables only
//! level 2 | 16 KiB x 4 |                                  tables and leaves
//! level 1 | 4 KiB x 4, contiguous runs of two |           leaves
//! ```
//!
//! It retains the difficult properties of the real architectures: contiguous runs and
//! break-before-make as on AArch64 (a hosted MMU may cache a whole run, and misbehaves after the
//! same changes), dirty and accessed bits set by hardware, global kernel pages.

use super::{
    Arch, Attributes, Entry, EntryIndex, Equal, LeafAttributes, Level, MemoryType, Permissions,
    Saturated, Write,
};
use crate::addr::{Frame, PAGE_SHIFT};

const VALID: u64 = 1 << 0;
const TABLE: u64 = 1 << 1;
const WRITABLE: u64 = 1 << 2;
const EXECUTABLE: u64 = 1 << 3;
const USER: u64 = 1 << 4;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const CONTIGUOUS: u64 = 1 << 7;
const SOFT_DIRTY: u64 = 1 << 8;
const USERFAULT: u64 = 1 << 9;
const FRAME_MASK: u64 = 0x0000_0fff_ffff_f000;

/// Three levels of four entries: an architecture for exhaustive tests.
///
/// | bits | meaning |
/// |---|---|
/// | 0 | valid |
/// | 1 | table (levels 2 and 3); clear in leaves |
/// | 2 | writable; every leaf is readable |
/// | 3 | executable |
/// | 4 | user; a leaf without it is global |
/// | 5 | accessed |
/// | 6 | dirty, whether writable or not |
/// | 7 | contiguous |
/// | 8 | soft-dirty |
/// | 9 | userfault |
/// | 12 to 43 | frame |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tiny;

impl Arch for Tiny {
    const NAME: &'static str = "tiny";
    const COHERENT_FETCHES: bool = true;
    const LEVELS: u8 = 3;
    const INDEX_BITS: u32 = 2;
    // The whole address space: 64 pages.
    const USER_END: u64 = 1 << (PAGE_SHIFT + 3 * 2);
    const LARGEST_LEAF: Level<Self> = Level::PMD;
    const CONTIG_ENTRIES: u32 = 2;
    const STEP: u64 = 1 << PAGE_SHIFT;
    const SOFT_DIRTY: u64 = SOFT_DIRTY;
    const USERFAULT: u64 = USERFAULT;
    const SATURATED: Saturated =
        Saturated { mask: VALID | ACCESSED | DIRTY, value: VALID | ACCESSED | DIRTY };

    #[inline]
    fn table(frame: Frame) -> Entry {
        Entry(frame.start().0 | VALID | TABLE)
    }

    fn leaf(frame: Frame, _level: Level<Self>, attributes: LeafAttributes) -> Entry {
        let attributes = attributes.get();
        let permissions = attributes.permissions;
        let mut bits = frame.start().0 | VALID;
        for (set, bit) in [
            (permissions.contains(Permissions::WRITE), WRITABLE),
            (permissions.contains(Permissions::EXECUTE), EXECUTABLE),
            (permissions.contains(Permissions::USER), USER),
            (attributes.accessed, ACCESSED),
            (attributes.dirty, DIRTY),
            (attributes.soft_dirty, SOFT_DIRTY),
            (attributes.userfault, USERFAULT),
        ] {
            bits |= if set { bit } else { 0 };
        }
        Entry(bits)
    }

    #[inline]
    fn is_table(entry: Entry, level: Level<Self>) -> bool {
        level > Level::PTE && entry.0 & TABLE != 0
    }

    #[inline]
    fn frame(entry: Entry) -> Frame {
        Frame(((entry.0 & FRAME_MASK) >> PAGE_SHIFT) as u32)
    }

    fn attributes(entry: Entry) -> Attributes {
        let mut permissions = Permissions::READ;
        permissions.set(Permissions::WRITE, entry.0 & WRITABLE != 0);
        permissions.set(Permissions::EXECUTE, entry.0 & EXECUTABLE != 0);
        permissions.set(Permissions::USER, entry.0 & USER != 0);
        Attributes {
            permissions,
            accessed: entry.0 & ACCESSED != 0,
            dirty: entry.0 & DIRTY != 0,
            soft_dirty: entry.0 & SOFT_DIRTY != 0,
            userfault: entry.0 & USERFAULT != 0,
            ..Attributes::default()
        }
    }

    #[inline]
    fn compare_mask(equal: Equal) -> u64 {
        let mut mask = !(ACCESSED | DIRTY | WRITABLE | SOFT_DIRTY);
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
        Entry(into.0 | (any & (ACCESSED | DIRTY)))
    }

    #[inline]
    fn is_saturated(entry: Entry) -> bool {
        let writable_and_clean = entry.0 & (WRITABLE | DIRTY) == WRITABLE;
        entry.0 & ACCESSED != 0 && !writable_and_clean
    }

    #[inline]
    fn write_protect(entry: Entry) -> Entry {
        Entry(entry.0 & !WRITABLE)
    }

    #[inline]
    fn make_writable(entry: Entry, write: Write) -> Entry {
        let bits = entry.0 | WRITABLE;
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
        Entry(entry.0 & !DIRTY)
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

    fn memory_type(memory: MemoryType) -> Option<u64> {
        (memory == MemoryType::Normal).then_some(0)
    }

    fn memory_type_of(_entry: Entry) -> MemoryType {
        MemoryType::Normal
    }

    fn needs_break(old: Entry, new: Entry, _level: Level<Self>) -> bool {
        // Like AArch64: another frame, another size, and a leaf that becomes global.
        let changed = (old.0 ^ new.0) & (FRAME_MASK | TABLE | CONTIGUOUS);
        let becomes_global = old.0 & !new.0 & USER;
        old.0 & new.0 & VALID != 0 && changed | becomes_global != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_tree_is_sixty_four_pages() {
        assert_eq!(Tiny::ENTRIES, 4);
        assert_eq!(Level::<Tiny>::PMD.span(), 4 << PAGE_SHIFT);
        assert_eq!(Tiny::ROOT.table_span(), 64 << PAGE_SHIFT);
        assert_eq!(Tiny::USER_END, Tiny::ROOT.table_span());
    }
}
