//! The machine with a kernel's own mappings: the upper half up to its last page, the rights of each
//! mode, contiguous runs of 2 MiB leaves, memory types, devices, and invalidations on all CPUs.

mod blocks;
mod format;

use bindery::addr::{Frame, VirtAddr};
use bindery::arch::{AArch64, MemoryType, Riscv64, X86_64};
use bindery::platform::{Cpu, Platform, Tables};
use bindery_hosted::{Config, Machine, MmuFault, TlbKind, Violation, Walk};

use crate::hand::*;
use format::Format;

/// The last two pages of the address space. Both have index 511 in every table above level 1.
const NEXT_TO_LAST: u64 = 0xffff_ffff_ffff_e000;
const LAST: u64 = 0xffff_ffff_ffff_f000;
/// The start of the last 2 MiB.
const LAST_MIB2: u64 = 0u64.wrapping_sub(MIB2);

/// A test that is the same on all architectures: its name and body.
macro_rules! everywhere {
    ($($name:ident: $body:ident)*) => {$(
        #[test]
        fn $name() {
            $body::<X86_64<4>>();
            $body::<X86_64<5>>();
            $body::<AArch64>();
            $body::<Riscv64<3>>();
            $body::<Riscv64<4>>();
        }
    )*};
}

everywhere! {
    the_last_pages_of_all_are_translated_for_the_kernel: last_pages
    the_last_huge_leaf_goes_with_a_page_of_it: last_huge_leaf
    a_conflict_with_the_last_huge_leaf_is_found: last_conflict
    a_stale_leaf_at_the_end_of_all_is_found: last_stale
    an_invalidation_of_the_kernel_reaches_every_cpu: every_cpu
    each_mode_is_refused_the_pages_of_the_other: modes
    the_kernel_executes_its_code_and_does_not_write_it: code
    bytes_of_the_kernel_are_copied_up_to_the_page_that_faults: bytes
    a_write_of_the_kernel_is_recorded: recorded
    types_of_memory_are_read_from_the_bits: memory_types
    a_type_of_memory_that_changes_under_a_translation_is_found: changed_type
    a_device_is_where_its_entry_says_and_answers_nothing: device
    normal_memory_and_tables_are_nowhere_but_in_memory: nowhere
    a_device_that_begins_in_memory_is_memory_there: straddling
}

fn root<A: Walk>() -> Frame {
    Frame(0x8_0000 + u32::from(A::LEVELS))
}

/// A machine with tables down to the last 2 MiB of the address space, whose entry is number 511.
fn fixture_with<A: Format>(tlb: TlbKind) -> Machine<A> {
    let machine = Machine::new(Config { cpus: 3, memory: 2 << 30, tlb, ..Config::default() });
    for level in 1..u32::from(A::LEVELS) {
        set(&machine, Frame(0x8_0001 + level), 511, A::names(Frame(0x8_0000 + level)));
    }
    machine
}

fn fixture<A: Format>() -> Machine<A> {
    fixture_with(TlbKind::Strict)
}

fn kernel<A: Walk>(
    machine: &Machine<A>,
    addr: u64,
    access: bindery_hosted::AccessKind,
) -> Result<u64, bool> {
    match machine.translate_kernel(root::<A>(), VirtAddr(addr), access) {
        Ok(phys) => Ok(phys.0),
        Err(fault) => {
            assert_eq!((fault.addr, fault.access), (VirtAddr(addr), access));
            Err(fault.present)
        }
    }
}

fn flush_kernel<A: Walk>(machine: &Machine<A>, addr: u64, tables: Tables) {
    machine.invalidate_kernel(root::<A>(), &what(addr, PAGE, tables));
}

fn last_pages<A: Format>() {
    for tlb in [TlbKind::Strict, TlbKind::Plain] {
        let machine = fixture_with::<A>(tlb);
        set(&machine, L1, 510, A::maps(0x8_0100, 1, A::KERNEL));
        set(&machine, L1, 511, A::maps(0x8_0102, 1, A::KERNEL));
        for _ in 0..2 {
            assert_eq!(kernel(&machine, NEXT_TO_LAST + 5, Read), Ok(0x8_0100_005));
            assert_eq!(kernel(&machine, u64::MAX, Write), Ok(0x8_0102_fff));
        }
        assert_eq!(machine.statistics().hits, 2);
        machine.assert_clean();
        set(&machine, L1, 510, 0);
        set(&machine, L1, 511, 0);
        flush_kernel(&machine, NEXT_TO_LAST, Tables::Unchanged);
        assert_eq!(kernel(&machine, NEXT_TO_LAST, Read), Err(false));
        assert_eq!(kernel(&machine, LAST, Read), Ok(0x8_0102_000), "it was not named");
    }
}

fn last_huge_leaf<A: Format>() {
    for tlb in [TlbKind::Strict, TlbKind::Plain] {
        for addr in [LAST_MIB2, NEXT_TO_LAST] {
            let machine = fixture_with::<A>(tlb);
            set(&machine, L2, 511, A::maps(0x8_0200, 2, A::KERNEL));
            assert_eq!(kernel(&machine, addr, Write), Ok(0x8_0200_000 + (addr & (MIB2 - 1))));
            set(&machine, L2, 511, 0);
            flush_kernel(&machine, addr, Tables::Unchanged);
            assert_eq!(kernel(&machine, addr, Write), Err(false));
            machine.assert_clean();
        }
    }
}

fn last_conflict<A: Format>() {
    let machine = fixture::<A>();
    set(&machine, L1, 511, A::maps(0x8_0100, 1, A::KERNEL));
    kernel(&machine, LAST, Read).unwrap();
    set(&machine, L2, 511, A::maps(0x8_0200, 2, A::KERNEL));
    // The cached upper levels are dropped; the page stays.
    flush_kernel(&machine, LAST_MIB2, Tables::Changed);
    kernel(&machine, LAST_MIB2, Read).unwrap();
    match only(&machine) {
        Violation::Conflict { cached, now, .. } => {
            assert_eq!((cached.start, now.start), (LAST, LAST_MIB2));
            assert_eq!((cached.last(), now.last()), (u64::MAX, u64::MAX));
            assert!(now.to_string().contains("..0x10000000000000000 "), "{now}");
        }
        other => panic!("{other}"),
    }
}

fn last_stale<A: Format>() {
    let machine = fixture::<A>();
    set(&machine, L2, 511, A::maps(0x8_0200, 2, A::KERNEL));
    kernel(&machine, LAST, Read).unwrap();
    machine.assert_clean();
    // The whole range is still mapped, except the last page.
    set(&machine, L2, 511, A::names(L1));
    for page in 0..511 {
        set(&machine, L1, page, A::maps(0x8_0200 + page as u64, 1, A::KERNEL));
    }
    machine.audit();
    assert!(matches!(only(&machine), Violation::StaleLeaf { now: Some(_), .. }));
    machine.frames_released(Frame(0x8_03ff), 1);
    assert!(matches!(only(&machine), Violation::ReleasedLeaf { .. }));
}

fn every_cpu<A: Format>() {
    for tlb in [TlbKind::Strict, TlbKind::Plain] {
        let machine = fixture_with::<A>(tlb);
        let everywhere = |expected| {
            for cpu in (0..3).map(Cpu) {
                machine.on_cpu(cpu, || assert_eq!(kernel(&machine, NEXT_TO_LAST, Read), expected));
            }
        };
        set(&machine, L1, 510, A::maps(0x8_0100, 1, A::KERNEL));
        everywhere(Ok(0x8_0100_000));
        set(&machine, L1, 510, 0);
        everywhere(Ok(0x8_0100_000));
        let before = machine.statistics();
        machine.on_cpu(Cpu(2), || flush_kernel(&machine, NEXT_TO_LAST, Tables::Unchanged));
        let counts = machine.statistics() - before;
        assert_eq!((counts.invalidations, counts.messages), (1, 2));
        assert_eq!((counts.local_invalidations, counts.pages_invalidated), (0, 1));
        everywhere(Err(false));
        machine.assert_clean();
    }
}

fn modes<A: Format>() {
    for tlb in [TlbKind::Strict, TlbKind::Plain] {
        // Uses the lower half, where every architecture translates both modes.
        let machine = fixture_with::<A>(tlb);
        for level in 1..u32::from(A::LEVELS) {
            set(&machine, Frame(0x8_0001 + level), 1, A::names(Frame(0x8_0000 + level)));
        }
        let addr = (2..=A::LEVELS).map(|level| 1 << (12 + 9 * (level - 1))).sum::<u64>();
        set(&machine, L1, 0, A::maps(0x8_0100, 1, A::USER));
        set(&machine, L1, 1, A::maps(0x8_0101, 1, A::KERNEL));
        for _ in 0..2 {
            for access in [Read, Write] {
                assert_eq!(go(&machine, root::<A>(), addr, access), Ok(0x8_0100_000));
                assert_eq!(kernel(&machine, addr, access), Err(true));
                assert_eq!(kernel(&machine, addr + PAGE, access), Ok(0x8_0101_000));
                assert_eq!(go(&machine, root::<A>(), addr + PAGE, access), Err(true));
            }
        }
        set(&machine, L1, 510, A::maps(0x8_0102, 1, A::KERNEL));
        assert!(go(&machine, root::<A>(), NEXT_TO_LAST, Read).is_err());
        machine.assert_clean();
    }
}

fn code<A: Format>() {
    let machine = fixture::<A>();
    set(&machine, L1, 509, A::maps(0x8_0100, 1, (A::CODE)(A::KERNEL)));
    set(&machine, L1, 510, A::maps(0x8_0101, 1, A::KERNEL));
    let at = VirtAddr(NEXT_TO_LAST - PAGE);
    assert_eq!(machine.execute_kernel(root::<A>(), at), Ok(()));
    let fault = MmuFault { addr: at, access: Write, present: true };
    assert_eq!(machine.write_kernel(root::<A>(), at, b"x"), Err(fault));
    assert_eq!(kernel(&machine, NEXT_TO_LAST, Execute), Err(true));
    assert!(go(&machine, root::<A>(), at.0, Execute).is_err());
    machine.assert_clean();
}

fn bytes<A: Format>() {
    let machine = fixture::<A>();
    set(&machine, L1, 509, A::maps(0x8_0105, 1, A::KERNEL));
    set(&machine, L1, 510, A::maps(0x8_0100, 1, A::KERNEL));
    let at = VirtAddr(NEXT_TO_LAST - 3);
    assert_eq!(machine.write_kernel(root::<A>(), at, b"across"), Ok(()));
    let mut read = [0; 6];
    assert_eq!(machine.read_kernel(root::<A>(), at, &mut read), Ok(()));
    assert_eq!(&read, b"across");
    let mut part = [7; 6];
    let fault = MmuFault { addr: VirtAddr(LAST), access: Read, present: false };
    let at = VirtAddr(LAST - 4);
    machine.write_kernel(root::<A>(), at, b"last").unwrap();
    assert_eq!(machine.read_kernel(root::<A>(), at, &mut part), Err(fault));
    assert_eq!(&part, b"last\x07\x07");
    machine.assert_clean();
}

fn recorded<A: Format>() {
    let machine = fixture::<A>();
    let clean = A::maps(0x8_0100, 1, (A::CLEAN)(A::KERNEL));
    set(&machine, L1, 510, clean);
    kernel(&machine, NEXT_TO_LAST, Read).unwrap();
    assert_eq!(get(&machine, L1, 510), clean);
    kernel(&machine, NEXT_TO_LAST, Write).unwrap();
    assert_eq!(get(&machine, L1, 510), A::maps(0x8_0100, 1, A::KERNEL));
    machine.assert_clean();
}

fn memory_types<A: Format>() {
    for (bits, expected) in [
        (0, MemoryType::Normal),
        (A::WRITE_COMBINING, MemoryType::WriteCombining),
        (A::DEVICE, A::STRICTEST),
    ] {
        for (table, index, level, frame) in [(L1, 510, 1, 0x8_0100), (L2, 511, 2, 0x8_0200)] {
            let machine = fixture::<A>();
            set(&machine, table, index, A::maps(frame, level, A::KERNEL | bits));
            kernel(&machine, NEXT_TO_LAST, Write).unwrap();
            assert_eq!(machine.cached(Cpu(0), root::<A>())[0].memory, expected);
            machine.assert_clean();
        }
    }
}

fn changed_type<A: Format>() {
    let machine = fixture::<A>();
    set(&machine, L1, 510, A::maps(0x8_0100, 1, (A::CLEAN)(A::KERNEL)));
    kernel(&machine, NEXT_TO_LAST, Read).unwrap();
    set(&machine, L1, 510, A::maps(0x8_0100, 1, A::KERNEL | A::WRITE_COMBINING));
    machine.audit();
    match only(&machine) {
        Violation::StaleLeaf { why, .. } => assert!(why.contains("memory type"), "{why}"),
        other => panic!("{other}"),
    }
    // The first write walks the tables again and finds another translation.
    kernel(&machine, NEXT_TO_LAST, Write).unwrap();
    let found = only(&machine);
    assert!(matches!(found, Violation::Conflict { .. }), "{found}");
    assert!(found.to_string().contains("WriteCombining"), "{found}");
}

/// The machine's memory ends below this frame.
const BEYOND: u64 = 0x10_0000;

fn device<A: Format>() {
    for tlb in [TlbKind::Strict, TlbKind::Plain] {
        let machine = fixture_with::<A>(tlb);
        set(&machine, L1, 510, A::maps(BEYOND + 7, 1, A::KERNEL | A::DEVICE));
        assert_eq!(kernel(&machine, NEXT_TO_LAST + 9, Write), Ok((BEYOND + 7) * PAGE + 9));
        let mut read = [0; 5];
        let at = VirtAddr(NEXT_TO_LAST + 3);
        machine.write_kernel(root::<A>(), at, b"doors").unwrap();
        machine.read_kernel(root::<A>(), at, &mut read).unwrap();
        assert_eq!(read, [0xff; 5]);
        machine.assert_clean();
        // A huge leaf below all memory.
        set(&machine, L2, 511, A::maps(0x200, 2, A::KERNEL | A::WRITE_COMBINING));
        let whole = what(LAST_MIB2, MIB2 - PAGE, Tables::Changed);
        machine.invalidate_kernel(root::<A>(), &whole);
        assert_eq!(kernel(&machine, NEXT_TO_LAST, Read), Ok(0x200_000 + MIB2 - 2 * PAGE));
        machine.assert_clean();
    }
}

fn nowhere<A: Format>() {
    let found = |table, index, entry| {
        let machine = fixture::<A>();
        set(&machine, table, index, entry);
        assert_eq!(kernel(&machine, NEXT_TO_LAST, Read), Err(true));
        match only(&machine) {
            Violation::NoMemory { frame, .. } => frame,
            other => panic!("{other}"),
        }
    };
    assert_eq!(found(L1, 510, A::maps(BEYOND, 1, A::KERNEL)), BEYOND);
    assert_eq!(found(L2, 511, A::maps(0x200, 2, A::KERNEL)), 0x200);
    assert_eq!(found(L2, 511, A::names(Frame(0x10_0000))), BEYOND);
    let far = 1 << 32;
    assert_eq!(found(L1, 510, A::maps(far, 1, A::KERNEL | A::DEVICE)), far);
}

fn straddling<A: Format>() {
    // Only half of the last 2 MiB frame of this machine is memory.
    let memory = (4 << 20) + MIB2 / 2;
    let machine = Machine::<A>::new(Config { memory, ..Config::default() });
    for level in 1..u32::from(A::LEVELS) {
        set(&machine, Frame(0x8_0001 + level), 511, A::names(Frame(0x8_0000 + level)));
    }
    set(&machine, L2, 511, A::maps(0x8_0400, 2, A::KERNEL | A::DEVICE));
    let mut read = [1; 4];
    let border = VirtAddr(LAST_MIB2 + MIB2 / 2 - 2);
    machine.write_kernel(root::<A>(), border, b"both").unwrap();
    machine.read_kernel(root::<A>(), border, &mut read).unwrap();
    assert_eq!(&read, b"bo\xff\xff");
    machine.assert_clean();
}

#[test]
fn memory_types_not_set_up_are_reported() {
    fn why<A: Format>(table: Frame, index: usize, entry: u64) -> &'static str {
        let machine = fixture::<A>();
        set(&machine, table, index, entry);
        assert_eq!(kernel(&machine, NEXT_TO_LAST, Read), Err(true));
        malformed(&machine)
    }
    type X86 = X86_64<4>;
    type Sv48 = Riscv64<4>;
    assert!(why::<X86>(L1, 510, X86::maps(0x8_0100, 1, X86::KERNEL | 1 << 7)).contains("PAT"));
    assert!(why::<X86>(L2, 511, X86::maps(0x8_0200, 2, X86::KERNEL | 1 << 12)).contains("PAT"));
    for index in 5..8 {
        let entry = AArch64::maps(0x8_0100, 1, AArch64::KERNEL | index << 2);
        assert!(why::<AArch64>(L1, 510, entry).contains("AttrIndx"));
    }
    let reserved = Sv48::maps(0x8_0100, 1, Sv48::KERNEL | 3 << 61);
    assert!(why::<Sv48>(L1, 510, reserved).contains("PBMT is 3"));
    let table = Sv48::names(L1) | Sv48::DEVICE;
    assert!(why::<Sv48>(L2, 511, table).contains("pointer to a table"));
}

#[test]
fn the_other_memory_types_have_their_bits() {
    fn memory<A: Format>(bits: u64) -> MemoryType {
        let machine = fixture::<A>();
        set(&machine, L1, 510, A::maps(0x8_0100, 1, A::KERNEL | bits));
        kernel(&machine, NEXT_TO_LAST, Read).unwrap();
        machine.assert_clean();
        machine.cached(Cpu(0), root::<A>())[0].memory
    }
    assert_eq!(memory::<X86_64<4>>(1 << 4), MemoryType::WriteThrough);
    assert_eq!(memory::<AArch64>(3 << 2), MemoryType::Uncached);
    assert_eq!(memory::<AArch64>(4 << 2), MemoryType::WriteThrough);
}

#[test]
fn aarch64_modes_execute_only_their_own_code() {
    let why = |bits| {
        let machine = fixture::<AArch64>();
        set(&machine, L1, 510, AArch64::maps(0x8_0100, 1, bits));
        assert_eq!(kernel(&machine, NEXT_TO_LAST, Execute), Err(true));
        malformed(&machine)
    };
    assert!(why(AArch64::KERNEL & !(1 << 54)).contains("without UXN"));
    assert!(why(AArch64::USER & !(1 << 53)).contains("without PXN"));
    assert!(why((AArch64::CODE)(AArch64::KERNEL) | AArch64::DEVICE).contains("fetch ahead"));
    // PXNTable and UXNTable.
    for (limit, executes) in [(1 << 59, false), (1 << 60, true), (1 << 61, true)] {
        let machine = fixture::<AArch64>();
        set(&machine, L1, 510, AArch64::maps(0x8_0100, 1, (AArch64::CODE)(AArch64::KERNEL)));
        set(&machine, L2, 511, AArch64::names(L1) | limit);
        assert_eq!(kernel(&machine, NEXT_TO_LAST, Execute).is_ok(), executes);
        assert!(kernel(&machine, NEXT_TO_LAST, Read).is_ok());
        machine.assert_clean();
    }
    let machine = fixture::<AArch64>();
    set(&machine, L1, 510, AArch64::maps(0x8_0100, 1, AArch64::USER));
    assert_eq!(go(&machine, L4, NEXT_TO_LAST, Read), Err(false), "E0PD1");
    assert_eq!(kernel(&machine, NEXT_TO_LAST & !(1 << 60), Read), Err(false), "no half");
}

#[test]
fn an_x86_64_kernel_table_restricts_its_leaves() {
    type X86 = X86_64<4>;
    let machine = fixture::<X86>();
    set(&machine, L2, 511, X86::names(L1) & !4);
    set(&machine, L1, 510, X86::maps(0x8_0100, 1, X86::USER));
    assert_eq!(go(&machine, L4, NEXT_TO_LAST, Read), Err(true));
    assert_eq!(kernel(&machine, NEXT_TO_LAST, Write), Ok(0x8_0100_000));
    machine.assert_clean();
}

#[test]
fn the_risc_v_kernel_caches_invalid_entries() {
    type Sv48 = Riscv64<4>;
    let machine = fixture::<Sv48>();
    assert_eq!(kernel(&machine, NEXT_TO_LAST, Read), Err(false));
    set(&machine, L1, 510, Sv48::maps(0x8_0100, 1, Sv48::KERNEL));
    assert_eq!(kernel(&machine, NEXT_TO_LAST, Read), Err(false));
    flush_kernel(&machine, NEXT_TO_LAST, Tables::Unchanged);
    assert_eq!(kernel(&machine, NEXT_TO_LAST, Read), Ok(0x8_0100_000));
    // An entry cached as invalid that became a table is dropped only with the tables; an entry that
    // became a leaf is dropped with the leaf.
    for (entry, found) in [
        (Sv48::names(L1), Err(false)),
        (Sv48::maps(0x8_0200, 2, Sv48::KERNEL), Ok(0x8_0200_000 + MIB2 - 2 * PAGE)),
    ] {
        let machine = fixture::<Sv48>();
        set(&machine, L1, 510, Sv48::maps(0x8_0100, 1, Sv48::KERNEL));
        set(&machine, L2, 511, 0);
        assert_eq!(kernel(&machine, NEXT_TO_LAST, Read), Err(false));
        set(&machine, L2, 511, entry);
        flush_kernel(&machine, NEXT_TO_LAST, Tables::Unchanged);
        assert_eq!(kernel(&machine, NEXT_TO_LAST, Read), found);
        flush_kernel(&machine, NEXT_TO_LAST, Tables::Changed);
        assert!(kernel(&machine, NEXT_TO_LAST, Read).is_ok());
        machine.assert_clean();
    }
}
