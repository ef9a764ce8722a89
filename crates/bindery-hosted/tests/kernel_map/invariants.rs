//! Every invariant of a kernel map, broken on purpose. The auditor reports the invariant and the
//! address. The strict TLB reports violations that the auditor cannot see.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bindery::addr::{Frame, PAGE_SIZE, VirtAddr};
use bindery::arch::{
    AArch64, Arch, Attributes, Entry, EntryIndex, Level, Permissions, Riscv64, X86_64,
};
use bindery::check::{self, Violation};
use bindery::{KernelMap, Memory, Platform, VmallocOptions, VmapOptions};
use bindery_hosted::{Machine, Walk};

use crate::support::areas::Areas;
use crate::support::kernel::{self, audit, pages, scattered};
use crate::support::{MIB, strict};

on_every_architecture! {
    a_page_that_leads_elsewhere_is_found => elsewhere;
    a_page_that_is_missing_is_found => missing;
    a_page_behind_an_area_is_found => behind;
    a_page_of_a_freed_area_is_found => freed;
    a_page_open_to_user_mode_is_found => open_to_users;
    an_entry_that_means_nothing_is_found => absent;
    a_table_that_is_none_is_found => no_table;
    a_table_that_hangs_twice_is_found => table_twice;
    a_table_where_no_area_is_is_found => stray_table;
    a_map_that_nobody_shows_is_missed => unseen_map;
}

struct Fixture<'s, 'm, A: Walk> {
    machine: &'s Machine<A>,
    memory: &'m Memory<Machine<A>>,
    map: &'s KernelMap<'m, Machine<A>>,
    /// 20 pages of its own; `vmap` is a view of 20 frames of another owner.
    vmalloc: VirtAddr,
    vmap: VirtAddr,
}

/// Runs `scenario`, which may break the map but must repair it before it returns.
fn with_fixture<A: Walk>(scenario: impl FnOnce(&Fixture<'_, '_, A>)) {
    let (machine, memory) = strict::<A>(32 * MIB);
    {
        let map = kernel::map(&memory);
        map.set_purge_limit(u64::MAX);
        let vmalloc = map.vmalloc(20 * PAGE_SIZE, &VmallocOptions::default()).unwrap();
        let (_, list) = scattered(&map, 20, 2);
        let vmap = map.vmap(&list, &VmapOptions::default()).unwrap();
        let fixture = Fixture { machine: &machine, memory: &memory, map: &map, vmalloc, vmap };
        assert_eq!(fixture.audit(), None);
        scenario(&fixture);
        assert_eq!(fixture.audit(), None, "it was not repaired");
        audit(&machine, &memory, &[&map]);
    }
    audit(&machine, &memory, &[]);
}

impl<A: Walk> Fixture<'_, '_, A> {
    fn audit(&self) -> Option<Violation> {
        let mut scratch = vec![0; check::scratch_words(self.memory)];
        check::check_with_kernel(self.memory, &[], &[self.map], &mut scratch).err()
    }

    /// The entry of `level` for `at`, and its table.
    fn slot(&self, at: VirtAddr, level: Level<A>) -> (Frame, &AtomicU64) {
        let mut table = self.map.root();
        for above in level.up_to(A::ROOT).rev() {
            let index = (at.0 >> above.span_shift()) as usize & ((1 << A::INDEX_BITS) - 1);
            let start = self.machine.direct_map(table).cast::<u64>().as_ptr();
            // SAFETY: the frame is a table in the machine's memory, which lives as long as the
            // machine, the index is one of its entries, and all code accesses entries as atomics.
            let slot = unsafe { AtomicU64::from_ptr(start.add(index)) };
            if above == level {
                return (table, slot);
            }
            let entry = Entry(slot.load(Relaxed));
            assert!(entry.0 & A::PRESENT != 0 && A::is_table(entry, above), "no table at {at}");
            table = A::frame(entry);
        }
        unreachable!("the levels end at {level}");
    }

    /// The auditor's verdict if the entry of `level` for `at` is replaced.
    #[track_caller]
    fn broken(&self, at: VirtAddr, level: Level<A>, change: impl FnOnce(u64) -> u64) -> Violation {
        let (_, slot) = self.slot(at, level);
        let old = slot.load(Relaxed);
        slot.store(change(old), Relaxed);
        let found = self.audit().expect("the auditor found nothing");
        slot.store(old, Relaxed);
        found
    }

    /// A leaf of level 2.
    fn huge(&self) -> u64 {
        let permissions = Permissions::READ;
        A::page_entry(
            Frame(0x8_0000),
            Level::PMD,
            Attributes { permissions, accessed: true, ..Default::default() },
        )
        .0
    }

    fn page(&self, frame: Frame, permissions: Permissions) -> u64 {
        A::page_entry(
            frame,
            Level::PTE,
            Attributes { permissions, accessed: true, ..Default::default() },
        )
        .0
    }
}

fn after(at: VirtAddr, pages: u64) -> VirtAddr {
    VirtAddr(at.0 + pages * PAGE_SIZE)
}

fn elsewhere<A: Walk>() {
    with_fixture::<A>(|fixture| {
        for page in [0, 7, 19] {
            let at = after(fixture.vmalloc, page);
            let found = fixture.broken(at, Level::PTE, |old| old + A::STEP);
            assert_eq!(found, Violation::AreaPage(at));
        }
    });
}

fn missing<A: Walk>() {
    with_fixture::<A>(|fixture| {
        for start in [fixture.vmalloc, fixture.vmap] {
            for page in [0, 7, 19] {
                let at = after(start, page);
                let found = fixture.broken(at, Level::PTE, |_| 0);
                assert!(matches!(found, Violation::AreaPage(there) if there <= at), "{found}");
            }
        }
    });
}

fn behind<A: Walk>() {
    with_fixture::<A>(|fixture| {
        let leaf = fixture.page(Frame(0x8_0000), Permissions::READ);
        for at in [after(fixture.vmalloc, 20), after(fixture.vmap, 20), after(fixture.vmap, 25)] {
            // The table's entry count reveals the damage.
            let (table, _) = fixture.slot(at, Level::PTE);
            let found = fixture.broken(at, Level::PTE, |_| leaf);
            let expected = |says, holds| Violation::LiveCount { table, says, holds };
            let Violation::LiveCount { says, .. } = found else { panic!("{found}") };
            assert_eq!(found, expected(says, says + 1));
        }
        let at = VirtAddr(fixture.vmalloc.align_down(2 * MIB).0 + 12 * MIB);
        let found = fixture.broken(at, Level::PMD, |_| fixture.huge());
        assert_eq!(found, Violation::OutsideMappings(at));
    });
}

fn freed<A: Walk>() {
    with_fixture::<A>(|fixture| {
        let at = fixture.map.vmalloc(4 * MIB, &VmallocOptions::huge()).unwrap();
        fixture.map.free_vmalloc(at).unwrap();
        let second = VirtAddr(at.0 + 2 * MIB);
        let found = fixture.broken(second, Level::PMD, |_| fixture.huge());
        assert_eq!(found, Violation::OutsideMappings(second));
    });
}

fn open_to_users<A: Walk>() {
    with_fixture::<A>(|fixture| {
        for start in [fixture.vmalloc, fixture.vmap] {
            let at = after(start, 4);
            let frame = Frame((fixture.map.physical(at).unwrap().0 / PAGE_SIZE) as u32);
            let leaf = fixture.page(frame, Permissions::READ | Permissions::USER);
            assert_eq!(fixture.broken(at, Level::PTE, |_| leaf), Violation::TooWide(at));
        }
    });
}

fn absent<A: Walk>() {
    with_fixture::<A>(|fixture| {
        // Uses an address outside of areas, since software would read the entry as a paused leaf
        // inside one.
        let at = VirtAddr(fixture.vmalloc.align_down(2 * MIB).0 + 12 * MIB);
        assert_eq!(fixture.broken(at, Level::PMD, |_| 2), Violation::BadAbsent(at));
    });
}

fn no_table<A: Walk>() {
    with_fixture::<A>(|fixture| {
        let page = Frame((fixture.map.physical(fixture.vmalloc).unwrap().0 / PAGE_SIZE) as u32);
        let base = fixture.vmalloc.align_down(2 * MIB);
        for table in [page, Frame(7), Frame(u32::MAX)] {
            let at = VirtAddr(base.0 + 6 * 2 * MIB);
            let found = fixture.broken(at, Level::PMD, |_| A::table(table).0);
            assert_eq!(found, Violation::NotATable { table, at });
        }
        let root = fixture.map.root();
        let arena = fixture.map.arena().start();
        let (_, slot) = fixture.slot(arena, A::ROOT);
        let old = slot.swap(0, Relaxed);
        let found = fixture.audit().unwrap();
        slot.store(old, Relaxed);
        let lost = matches!(found, Violation::NotATable { table, .. } if table == root);
        assert!(lost || matches!(found, Violation::AreaPage(_)), "{found}");
    });
}

fn table_twice<A: Walk>() {
    with_fixture::<A>(|fixture| {
        let (table, _) = fixture.slot(fixture.vmalloc, Level::PTE);
        let far = fixture.map.vmalloc(PAGE_SIZE, &far()).unwrap();
        let at = far.align_down(2 * MIB);
        let found = fixture.broken(at, Level::PMD, |_| A::table(table).0);
        let expected = [Violation::TableTwice { table, at }, Violation::AreaPage(far)];
        assert!(expected.contains(&found), "{found}");
        fixture.map.free_vmalloc(far).unwrap();
        fixture.map.purge();
    });
}

/// 8 MiB further on, at unused addresses.
fn far() -> VmallocOptions {
    VmallocOptions { align: 8 * MIB, ..VmallocOptions::default() }
}

fn stray_table<A: Walk>() {
    with_fixture::<A>(|fixture| {
        let other = kernel::map(fixture.memory);
        let at = other.vmalloc(PAGE_SIZE, &far()).unwrap();
        // Moves the second map's level-1 table to the first map, at different addresses.
        let there = Fixture { map: &other, vmalloc: at, vmap: at, ..*fixture };
        let (table, leaf) = there.slot(at, Level::PTE);
        let leaf = leaf.swap(0, Relaxed);
        let place = VirtAddr(fixture.vmalloc.align_down(2 * MIB).0 + 16 * MIB);
        let (_, slot) = fixture.slot(place, Level::PMD);
        slot.store(A::table(table).0, Relaxed);
        let found = fixture.audit();
        slot.store(0, Relaxed);
        there.slot(at, Level::PTE).1.store(leaf, Relaxed);
        assert_eq!(found, Some(Violation::TableOutsideMappings { table, at: place }));
    });
}

fn unseen_map<A: Walk>() {
    with_fixture::<A>(|fixture| {
        let other = kernel::map(fixture.memory);
        other.vmalloc(PAGE_SIZE, &VmallocOptions::default()).unwrap();
        let found = fixture.audit().unwrap();
        assert!(
            matches!(found, Violation::LeakedAreas { allocated, used } if allocated == used + 1)
        );
        drop(other);
    });
}

#[test]
fn an_incomplete_contiguous_kernel_block_is_found() {
    fn scenario<A: Walk>() {
        with_fixture::<A>(|fixture| {
            let at = fixture.map.vmalloc(MIB, &VmallocOptions::huge()).unwrap();
            for page in [0, 1, 15, 16, 255] {
                let place = after(at, page);
                let index = Level::<A>::PTE.index_of(place);
                let single = |old: u64| A::clear_contig(Entry(old), index).0;
                let found = fixture.broken(place, Level::PTE, single);
                let first = after(at, page & !15);
                let expected = |there| first <= there && there < after(first, 16);
                assert!(
                    matches!(found, Violation::BrokenBlock(there) if expected(there)),
                    "{found}"
                );
                let found = fixture
                    .broken(place, Level::PTE, |old| old ^ single_write_bit::<A>(old, index));
                assert!(
                    matches!(found, Violation::BrokenBlock(there) if expected(there)),
                    "{found}"
                );
            }
        });
    }
    /// The bit that distinguishes a writable page from a read-only page.
    fn single_write_bit<A: Arch>(old: u64, index: EntryIndex) -> u64 {
        let single = A::clear_contig(Entry(old), index);
        let other = A::write_protect(single).0;
        single.0 ^ other
    }
    scenario::<AArch64>();
    scenario::<Riscv64<4>>();
}

#[test]
fn the_strict_tlb_sees_an_unflushed_change() {
    with_fixture::<X86_64<4>>(|fixture| {
        let read = |at| kernel::translate(fixture.machine, fixture.map, at);
        read(fixture.vmap).unwrap();
        let (_, slot) = fixture.slot(fixture.vmap, Level::PTE);
        let old = slot.swap(0, Relaxed);
        assert!(read(fixture.vmap).is_ok(), "the TLB remembers it");
        fixture.machine.audit();
        slot.store(old, Relaxed);
        assert_eq!(fixture.machine.take_violations().len(), 1);
        // The regular way, through the map.
        fixture.map.protect_part(pages(fixture.vmap, 1), Permissions::READ).unwrap();
        fixture.machine.assert_clean();
    });
}
