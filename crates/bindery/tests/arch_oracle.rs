//! Checks this crate's entries against independent implementations of the formats: the `x86_64`
//! crate walks tables filled here, the `aarch64-paging` crate fills tables that must equal those
//! built here, and for RISC-V, which has no such crate, the manual's figures are given as numbers.

#![allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")]

use bindery::addr::{Frame, VirtAddr};
use bindery::arch::{
    AArch64, Arch, Attributes, Entry, EntryIndex, Level, Permissions, Riscv64, Write, X86_64,
};

const USER: Permissions = Permissions::USER.union(Permissions::READ);

/// Every combination of attributes that all architectures can express.
fn all_attributes() -> impl Iterator<Item = Attributes> {
    (0..=u8::MAX)
        .map(|bits| Attributes {
            permissions: Permissions::from_bits_truncate(bits),
            accessed: bits & 1 << 4 != 0,
            dirty: bits & 1 << 5 != 0,
            soft_dirty: bits & 1 << 6 != 0,
            userfault: bits & 1 << 7 != 0,
            ..Attributes::default()
        })
        .filter(|attributes| attributes.permissions.contains(Permissions::READ))
}

mod x86 {
    use super::*;
    use x86_64::structures::paging::mapper::{
        MappedFrame, MappedPageTable, PageTableFrameMapping, Translate, TranslateResult,
    };
    use x86_64::structures::paging::page_table::PageTableEntry;
    use x86_64::structures::paging::{PageTable, PageTableFlags, PhysFrame};

    fn theirs(entry: Entry) -> PageTableEntry {
        // SAFETY: `PageTableEntry` is a transparent wrapper around a u64 for which every value is
        // valid; the crate offers no constructor from bits.
        unsafe { core::mem::transmute(entry.0) }
    }

    #[test]
    fn the_x86_64_crate_reads_our_flags() {
        for level in Level::PTE.up_to(Level::PUD) {
            for attributes in all_attributes() {
                let has = |permission| attributes.permissions.contains(permission);
                let entry = theirs(X86_64::<4>::page_entry(Frame(0x1234 << 18), level, attributes));
                let flags = entry.flags();
                assert_eq!(entry.addr().as_u64(), 0x1234 << 30);
                assert!(flags.contains(PageTableFlags::PRESENT));
                let pairs = [
                    (PageTableFlags::WRITABLE, has(Permissions::WRITE)),
                    (PageTableFlags::USER_ACCESSIBLE, has(Permissions::USER)),
                    (PageTableFlags::GLOBAL, !has(Permissions::USER)),
                    (PageTableFlags::NO_EXECUTE, !has(Permissions::EXECUTE)),
                    (PageTableFlags::ACCESSED, attributes.accessed),
                    (PageTableFlags::DIRTY, attributes.dirty && has(Permissions::WRITE)),
                    (PageTableFlags::BIT_58, attributes.dirty && !has(Permissions::WRITE)),
                    (PageTableFlags::BIT_11, attributes.soft_dirty),
                    (PageTableFlags::BIT_10, attributes.userfault),
                    (PageTableFlags::HUGE_PAGE, level > Level::PTE),
                ];
                let known =
                    pairs.iter().fold(PageTableFlags::PRESENT, |all, (flag, _)| all | *flag);
                for (flag, set) in pairs {
                    assert_eq!(flags.contains(flag), set, "{flag:?} for {attributes:?}");
                }
                assert!((flags - known).is_empty(), "nothing else is set");
            }
        }
    }

    /// Tables on the heap; the frame number is the index.
    struct Tables(Vec<Box<PageTable>>);

    impl Tables {
        fn set(&mut self, table: Frame, index: EntryIndex, entry: Entry) {
            self.0[table.0 as usize][index.position()] = theirs(entry);
        }
    }

    struct Pointers(Vec<*mut PageTable>);

    // SAFETY: the pointers are to tables that outlive the walk and are not used during it.
    unsafe impl PageTableFrameMapping for Pointers {
        fn frame_to_pointer(&self, frame: PhysFrame) -> *mut PageTable {
            self.0[(frame.start_address().as_u64() >> 12) as usize]
        }
    }

    #[test]
    fn the_x86_64_crate_walks_to_our_leaf() {
        type A = X86_64<4>;
        let addr = VirtAddr(0x7654_3210_f123);
        let attributes = Attributes {
            permissions: USER | Permissions::WRITE,
            accessed: true,
            ..Default::default()
        };
        for level in Level::PTE.up_to(Level::PUD) {
            let mut tables = Tables((0..4).map(|_| Box::new(PageTable::new())).collect());
            let mut table = Frame(0);
            for above in level.above().up_to(Level::new(4)).rev() {
                tables.set(table, above.index_of(addr), A::table(table.plus(1)));
                table = table.plus(1);
            }
            let leaf = Frame(0x1234_5678 & !0 << level.order().0);
            tables.set(table, level.index_of(addr), A::page_entry(leaf, level, attributes));

            let pointers = Pointers(tables.0.iter_mut().map(|table| &raw mut **table).collect());
            let root = pointers.0[0];
            // SAFETY: the root and the tables below it belong to this test and are mapped by
            // `pointers`.
            let walker = unsafe { MappedPageTable::new(&mut *root, pointers) };
            let found = walker.translate(x86_64::VirtAddr::new(addr.0));
            let TranslateResult::Mapped { frame, offset, flags } = found else {
                panic!("level {level}: {found:?}");
            };
            assert_eq!(frame.start_address().as_u64(), leaf.start().0);
            assert_eq!(frame.size(), level.span());
            assert_eq!(offset, addr.0 & (level.span() - 1));
            assert!(flags.contains(PageTableFlags::USER_ACCESSIBLE | PageTableFlags::WRITABLE));
            let size = match frame {
                MappedFrame::Size4KiB(_) => Level::PTE,
                MappedFrame::Size2MiB(_) => Level::PMD,
                MappedFrame::Size1GiB(_) => Level::PUD,
            };
            assert_eq!(size, level);
        }
    }
}

mod arm {
    use super::*;
    use aarch64_paging::descriptor::{El1Attributes, PagingAttributes, PhysicalAddress};
    use aarch64_paging::paging::{Constraints, El1And0, MemoryRegion, RootTable, VaRange};
    use aarch64_paging::target::TargetAllocator;

    const FRAME_MASK: u64 = 0x0000_ffff_ffff_f000;

    /// The other crate's flags for `attributes`, whose bits it defines itself.
    fn theirs(attributes: Attributes) -> El1Attributes {
        let has = |permission| attributes.permissions.contains(permission);
        let when = |set: bool, flag: El1Attributes| if set { flag } else { El1Attributes::empty() };
        let clean = !attributes.dirty || !has(Permissions::WRITE);
        let kernel_code = has(Permissions::EXECUTE) && !has(Permissions::USER);
        let user_code = has(Permissions::EXECUTE) && has(Permissions::USER);
        El1Attributes::VALID
            | El1Attributes::ATTRIBUTE_INDEX_0
            | El1Attributes::INNER_SHAREABLE
            | when(has(Permissions::USER), El1Attributes::USER | El1Attributes::NON_GLOBAL)
            | when(has(Permissions::WRITE), El1Attributes::DBM)
            | when(clean, El1Attributes::READ_ONLY)
            | when(attributes.dirty && !has(Permissions::WRITE), El1Attributes::SWFLAG_0)
            | when(attributes.accessed, El1Attributes::ACCESSED)
            | when(!kernel_code, El1Attributes::PXN)
            | when(!user_code, El1Attributes::UXN)
            | when(attributes.soft_dirty, El1Attributes::SWFLAG_1)
            | when(attributes.userfault, El1Attributes::SWFLAG_3)
            | when(has(Permissions::BTI) && has(Permissions::EXECUTE), El1Attributes::GP)
    }

    fn flags(entry: Entry) -> El1Attributes {
        El1Attributes::from_bits_retain((entry.0 & !FRAME_MASK) as usize)
    }

    #[test]
    fn the_aarch64_crate_fills_tables_like_ours() {
        let base = 0x10_0000;
        let addr = VirtAddr(0x7654_4000_0000);
        for attributes in all_attributes() {
            for level in Level::PTE.up_to(Level::PUD) {
                let leaf = Frame(0x1234 << 18);
                let mut root = RootTable::with_va_range(
                    TargetAllocator::new(base),
                    0,
                    El1And0,
                    VaRange::Lower,
                );
                let end = addr.0 + level.span();
                root.map_range(
                    &MemoryRegion::new(addr.0 as usize, end as usize),
                    PhysicalAddress(leaf.start().0 as usize),
                    theirs(attributes),
                    Constraints::NO_CONTIGUOUS_HINT,
                )
                .unwrap();
                let bytes = root.translation().as_bytes();
                // Its tables are contiguous, in the order of the walk.
                let entry = |table: u32, at: Level<_>| {
                    let index = at.index_of(addr).position();
                    let start = table as usize * 4096 + index * 8;
                    u64::from_le_bytes(bytes[start..start + 8].try_into().unwrap())
                };
                for (table, above) in level.above().up_to(Level::new(4)).rev().enumerate() {
                    let next = Frame((base >> 12) as u32 + table as u32 + 1);
                    assert_eq!(Entry(entry(table as u32, above)), AArch64::table(next));
                }
                let ours = AArch64::page_entry(leaf, level, attributes);
                assert_eq!(
                    Entry(entry(4 - u32::from(level.number()), level)),
                    ours,
                    "{attributes:?}"
                );
            }
        }
    }

    #[test]
    fn both_crates_require_the_same_breaks() {
        let page = |attributes| AArch64::page_entry(Frame(0x1230), Level::PTE, attributes);
        for old in all_attributes() {
            for new in all_attributes() {
                // The other crate is stricter in both directions for AP[1], the user's permission,
                // and for GP, the guard of branch targets. The manual has no such rule.
                let stricter = El1Attributes::USER | El1Attributes::GP;
                if (flags(page(old)) ^ flags(page(new))).intersects(stricter) {
                    continue;
                }
                let singles = (page(old), page(new));
                let joins = (page(old), AArch64::set_contig(page(new), EntryIndex::FIRST));
                let inside = (
                    AArch64::set_contig(page(old), EntryIndex::FIRST),
                    AArch64::set_contig(page(new), EntryIndex::FIRST),
                );
                for (old, new) in [singles, joins, inside] {
                    let safe = El1Attributes::is_bbm_safe(flags(old), flags(new));
                    assert_eq!(
                        AArch64::needs_break(old, new, Level::PTE),
                        !safe,
                        "{old:?} {new:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_contiguous_bit_equals_the_other_crates() {
        let leaf = AArch64::page_entry(
            Frame(0x1230),
            Level::PTE,
            Attributes { permissions: USER, ..Default::default() },
        );
        let added = flags(AArch64::set_contig(leaf, EntryIndex::FIRST)) - flags(leaf);
        assert_eq!(added, El1Attributes::CONTIGUOUS_OR_PROTECTED);
    }
}

mod riscv {
    use super::*;

    type Sv39 = Riscv64<3>;
    type Sv48 = Riscv64<4>;

    fn attributes(permissions: Permissions) -> Attributes {
        Attributes { permissions, accessed: true, ..Default::default() }
    }

    // Privileged specification 1.12, section 4.4.1, the figure of the Sv39 page-table entry (the
    // one of Sv48 in section 4.5.1 has the same fields): V 0, R 1, W 2, X 3, U 4, G 5, A 6, D 7,
    // RSW 9:8, PPN 53:10, N 63.
    #[test]
    fn leaves_have_the_bits_of_the_manuals_figure() {
        let write = Permissions::WRITE;
        let execute = Permissions::EXECUTE;
        let table = [
            (attributes(USER), 0b0_0101_0011),
            (attributes(USER | write), 0b0_0101_0111),
            (attributes(USER | execute), 0b0_0101_1011),
            (attributes(Permissions::USER | execute), 0b0_0101_1001),
            (attributes(Permissions::READ | write), 0b0_0110_0111),
            (Attributes { dirty: true, ..attributes(USER | write) }, 0b0_1101_0111),
            (Attributes { dirty: true, ..attributes(USER) }, 0b0_1101_0011),
            (Attributes { soft_dirty: true, ..attributes(USER) }, 0b01_0101_0011),
            (Attributes { userfault: true, ..attributes(USER) }, 0b10_0101_0011),
        ];
        for (attributes, flags) in table {
            for level in 1..=3 {
                let expected = Entry(0x1234_0000 << 10 | flags);
                let frame = Frame(0x1234_0000);
                assert_eq!(Sv39::page_entry(frame, Level::new(level), attributes), expected);
                assert_eq!(Sv48::page_entry(frame, Level::new(level), attributes), expected);
            }
        }
    }

    #[test]
    fn a_table_is_valid_and_nothing_else() {
        assert_eq!(Sv39::table(Frame(0x8_0001)), Entry(0x8_0001 << 10 | 1));
        assert_eq!(Sv48::table(Frame(u32::MAX)), Entry(0xffff_ffff << 10 | 1));
    }

    // Chapter 5, the table of encodings with N set: i = 0, pte.ppn[0] = x xxxx 1000 is a 64 KiB
    // contiguous region.
    #[test]
    fn a_region_has_the_low_frame_bits_1000() {
        for index in 0..16 {
            let single = Sv39::page_entry(Frame(0x1230 + index), Level::PTE, attributes(USER));
            let expected = 1 << 63 | 0x1238 << 10 | 0b0101_0011;
            assert_eq!(Sv39::set_contig(single, EntryIndex::new(index)), Entry(expected));
        }
    }

    #[test]
    fn the_first_write_sets_bits_6_and_7() {
        let clean = Sv39::page_entry(
            Frame(1),
            Level::PTE,
            Attributes { accessed: false, ..attributes(USER) },
        );
        let written = Sv39::make_writable(clean, Write::Now);
        assert_eq!(written.0 ^ clean.0, 1 << 2 | 1 << 6 | 1 << 7 | Sv39::SOFT_DIRTY);
    }

    #[test]
    fn user_space_is_the_lower_half() {
        assert_eq!(Sv39::USER_END, 0x40_0000_0000);
        assert_eq!(Sv48::USER_END, 0x8000_0000_0000);
        assert_eq!((Sv39::NAME, Sv48::NAME), ("riscv64-sv39", "riscv64-sv48"));
    }
}
