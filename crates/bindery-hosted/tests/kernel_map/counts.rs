//! The maximum work of kernel mappings: entries, invalidations, steps down the tables. The figures
//! are lower bounds that the architecture's format implies.

use bindery::addr::{PAGE_SIZE, PhysAddr, VirtAddr};
use bindery::arch::{AArch64, MemoryType, Permissions, Riscv64, X86_64};
use bindery::{Counts, FrameRange, KernelMap, UnmapTime, VmallocOptions, VmapOptions};
use bindery_hosted::{Machine, Walk};

use crate::support::areas::Areas;
use crate::support::kernel::{self, audit, frames, map, pages, pieces, scattered};
use crate::support::{GIB, KIB, MIB, strict};

on_every_architecture! {
    mapping_writes_leaves_and_tables_and_nothing_else => leaves_and_tables;
    one_purge_invalidates_once_for_many => one_for_many;
    permissions_without_a_cut_cost_one_invalidation => whole_area;
    permissions_that_are_there_already_cost_nothing => same_permissions;
    the_way_down_is_walked_once_each_table => one_walk;
    a_large_folio_behind_small_ones_is_found => small_then_large;
    a_device_of_a_gibibyte_is_one_entry => gibibyte;
}

type Map<'m, A> = KernelMap<'m, Machine<A>>;

/// The cost of `work`.
fn cost<A: Walk, R>(map: &Map<'_, A>, work: impl FnOnce() -> R) -> (R, Counts) {
    let before = map.counts();
    let result = work();
    (result, map.counts() - before)
}

/// The number of invalidations of a mapping call: 1 if TLBs may cache invalid entries.
fn publishing<A: Walk>() -> u64 {
    u64::from(A::INVALID_MAY_BE_CACHED)
}

/// Tables that stay allocated. A cut frees the tables that turn out to be unneeded.
fn tables(cost: &Counts) -> u64 {
    cost.tables_allocated - cost.tables_freed
}

fn leaves_and_tables<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let map = map(&memory);
    map.set_purge_limit(u64::MAX);
    let huge = |size| (size / (2 * MIB), size % (2 * MIB) / PAGE_SIZE);
    for size in [PAGE_SIZE, MIB, 2 * MIB, 5 * MIB, 4 * MIB + 12 * KIB] {
        for options in [VmallocOptions::default(), VmallocOptions::huge()] {
            let (at, cost) = cost(&map, || map.vmalloc(size, &options).unwrap());
            let (leaves, behind) = match options.pieces {
                bindery::Pieces::Base => (0, size / PAGE_SIZE),
                bindery::Pieces::Largest => huge(size),
            };
            let entries = leaves + behind + cost.tables_allocated;
            assert_eq!(cost.entries_written, entries, "{size:#x} {options:?}");
            // At level 1, one table per span with pages; at each level above, one table, except
            // that the table under the root already exists.
            let first = behind.div_ceil(512);
            assert!(cost.tables_allocated <= first + u64::from(A::LEVELS) - 3, "{cost:?}");
            assert_eq!(cost.invalidations, publishing::<A>());
            assert_eq!(cost.bytes_zeroed, 0);
            let (_, cost) = self::cost(&map, || map.free_vmalloc(at).unwrap());
            assert_eq!(cost.entries_written, leaves + behind);
            assert_eq!(cost.invalidations, 0);
            let (_, cost) = self::cost(&map, || map.purge());
            assert_eq!(cost.invalidations, 1);
            let (_, cost) = self::cost(&map, || map.purge());
            assert_eq!(cost, Counts::default(), "nothing to purge");
        }
    }
    audit(&machine, &memory, &[&map]);
}

fn one_for_many<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let map = map(&memory);
    map.set_purge_limit(u64::MAX);
    let huge = VmallocOptions::huge();
    let mut tables = map.counts().tables_allocated;
    // First the number of areas that are purged together, then far more, some of which need a flush
    // for their tables.
    for (count, most) in [(30, 1), (200, 8), (1000, 33)] {
        let areas: Vec<_> = (0..count)
            .map(|pages| map.vmalloc(pages % 10 * PAGE_SIZE + 1, &huge).unwrap())
            .collect();
        tables = map.counts().tables_allocated - tables;
        let messages = machine.statistics().messages;
        let (_, freeing) =
            cost(&map, || areas.iter().for_each(|at| map.free_vmalloc(*at).unwrap()));
        assert_eq!((freeing.invalidations, machine.statistics().messages), (0, messages));
        let (_, purge) = cost(&map, || map.purge());
        assert!((1..=most).contains(&purge.invalidations), "{count}: {purge:?}");
        // All tables are freed except the root and the tables that root entries point to.
        assert_eq!(purge.tables_freed, tables);
        tables = map.counts().tables_allocated;
    }
    // Areas beyond the limit are purged at once.
    map.set_purge_limit(8);
    let mut waiting = Vec::new();
    for _ in 0..30 {
        let at = map.vmalloc(3 * PAGE_SIZE, &VmallocOptions::default()).unwrap();
        let (_, cost) = cost(&map, || map.free_vmalloc(at).unwrap());
        waiting.push(cost.invalidations);
        assert_eq!(cost.invalidations, u64::from(map.freed_pages() == 0));
    }
    assert_eq!(waiting.iter().sum::<u64>(), 10, "every third free purges: {waiting:?}");
    map.set_purge_limit(u64::MAX);
    let (_, list) = scattered(&map, 4, 1);
    let at = map.vmap(&list, &VmapOptions::default()).unwrap();
    let (_, cost) = cost(&map, || map.free_vmap(at, UnmapTime::Now).unwrap());
    assert_eq!((cost.invalidations, map.freed_pages()), (1, 0));
    audit(&machine, &memory, &[&map]);
}

fn whole_area<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let map = map(&memory);
    let base = map.vmalloc(5 * MIB, &VmallocOptions::default()).unwrap();
    let (_, cost) = cost(&map, || map.protect_part(pages(base, 1280), Permissions::READ).unwrap());
    assert_eq!((cost.invalidations, cost.entries_written), (1, 1280));
    assert_eq!((cost.pages_invalidated, cost.tables_allocated), (1280, 0));
    let huge = map.vmalloc(6 * MIB, &VmallocOptions::huge()).unwrap();
    let (_, cost) =
        self::cost(&map, || map.protect_part(pages(huge, 1536), Permissions::READ).unwrap());
    assert_eq!((cost.invalidations, cost.entries_written), (1, 3));
    let part = pages(VirtAddr(huge.0 + 2 * MIB), 512);
    let read_write = Permissions::READ | Permissions::WRITE;
    let (_, cost) = self::cost(&map, || map.protect_part(part, read_write).unwrap());
    assert_eq!((cost.invalidations, cost.entries_written), (1, 1));
    // A cut breaks and replaces the leaf and fills one table.
    let part = pages(VirtAddr(huge.0 + MIB), 3);
    let (_, cost) = self::cost(&map, || map.protect_part(part, read_write).unwrap());
    assert_eq!((tables(&cost), cost.entries_written), (1, 2 + 512));
    assert_eq!(cost.invalidations, 1 + publishing::<A>());
    audit(&machine, &memory, &[&map]);
}

fn same_permissions<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let map = map(&memory);
    for options in [VmallocOptions::default(), VmallocOptions::huge()] {
        let at = map.vmalloc(3 * MIB, &options).unwrap();
        let whole = pages(at, 768);
        let (_, cost) = cost(&map, || map.protect_part(whole, options.permissions).unwrap());
        assert_eq!((cost.invalidations, cost.entries_written), (0, 0));
    }
    audit(&machine, &memory, &[&map]);
}

fn one_walk<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let map = map(&memory);
    let (_, list) = scattered(&map, 2048, 2);
    for count in [1, 100, 512, 2048] {
        let options = VmapOptions::default();
        let (at, cost) = cost(&map, || map.vmap(&list[..count], &options).unwrap());
        // The walk starts at the root for the first table, and at the parent for the others. It
        // takes one step more if the area begins in the middle of a table, and another if the area
        // crosses a level-2 table.
        let tables = count.div_ceil(512) as u64 + 2;
        let steps = u64::from(A::LEVELS) - 1 + tables;
        assert!(cost.entries_descended <= steps, "{count}: {cost:?}");
        assert!(cost.entries_read <= count as u64, "{cost:?}");
        let ranges: Vec<_> =
            list[..count].iter().map(|frame| FrameRange { first: *frame, count: 1 }).collect();
        let (other, cost) = self::cost(&map, || map.vmap_ranges(&ranges, &options).unwrap());
        assert!(cost.entries_descended <= steps, "{count} ranges: {cost:?}");
        map.free_vmap(at, UnmapTime::Later).unwrap();
        map.free_vmap(other, UnmapTime::Later).unwrap();
    }
    audit(&machine, &memory, &[&map]);
}

fn small_then_large<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let map = map(&memory);
    let (_, small) = scattered(&map, 300, 2);
    let (_, large) = scattered(&map, 512, 1);
    for before in [1, 7, 100, 299] {
        let mut list = small[..before].to_vec();
        list.extend(&large);
        list.extend(&small[..3]);
        let (at, cost) = cost(&map, || map.vmap(&list, &VmapOptions::default()).unwrap());
        let leaves = before as u64 + 1 + 3;
        assert_eq!(cost.entries_written, leaves + cost.tables_allocated, "{before}");
        let whole = pages(at, list.len() as u64);
        let found = pieces(&map, whole);
        assert!(found.iter().any(|piece| piece.size == 2 * MIB && piece.range.len() == 2 * MIB));
        map.free_vmap(at, UnmapTime::Later).unwrap();
        let mut ranges: Vec<_> = small[..before].iter().map(|frame| frames(frame.0, 1)).collect();
        ranges.push(frames(large[0].0, 512));
        let at = map.vmap_ranges(&ranges, &VmapOptions::default()).unwrap();
        let found = pieces(&map, pages(at, before as u64 + 512));
        assert!(found.iter().any(|piece| piece.size == 2 * MIB));
        map.free_vmap(at, UnmapTime::Later).unwrap();
    }
    audit(&machine, &memory, &[&map]);
}

fn gibibyte<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let map = map(&memory);
    let from = PhysAddr(16 * GIB);
    let (at, cost) = cost(&map, || map.ioremap(from, GIB, MemoryType::Uncached).unwrap());
    // With three levels, other roots copy this root's entries, so the root may hold no leaf.
    let (leaves, size) = if A::LEVELS > 3 { (1, GIB) } else { (512, 2 * MIB) };
    assert_eq!(cost.entries_written, leaves + cost.tables_allocated);
    assert_eq!(pieces(&map, pages(at, GIB / PAGE_SIZE))[0].size, size);
    for offset in [0, 1, GIB / 2 + 5, GIB - 1] {
        let translated = kernel::translate(&machine, &map, VirtAddr(at.0 + offset));
        assert_eq!(translated, Ok(PhysAddr(from.0 + offset)));
    }
    // A cut of the middle page needs tables of levels 2 and 1.
    if A::LEVELS > 3 {
        let page = pages(VirtAddr(at.0 + 5 * MIB), 1);
        let (_, cost) = self::cost(&map, || map.protect_part(page, Permissions::READ).unwrap());
        assert_eq!((tables(&cost), cost.entries_written), (2, 2 + 1024));
        audit(&machine, &memory, &[&map]);
    }
    let (_, cost) = self::cost(&map, || map.free_ioremap(at).unwrap());
    assert!(cost.entries_written <= 3 * 512);
    audit(&machine, &memory, &[&map]);
}

/// The sizes of an area's pieces; adjacent ones of one size are joined.
fn shape<A: Walk>(map: &Map<'_, A>, at: VirtAddr, size: u64) -> Vec<(u64, u64)> {
    let found = pieces(map, pages(at, size / PAGE_SIZE));
    found.iter().map(|piece| (piece.size, piece.range.len())).collect()
}

#[test]
fn a_mebibyte_of_aarch64_is_sixteen_contiguous_blocks() {
    let (machine, memory) = strict::<AArch64>(64 * MIB);
    let map = map(&memory);
    let at = map.vmalloc(MIB, &VmallocOptions::huge()).unwrap();
    assert_eq!(shape(&map, at, MIB), [(64 * KIB, MIB)]);
    assert_eq!(machine.cached(bindery::platform::Cpu(0), map.root()).len(), 0);
    for page in 0..256 {
        kernel::translate(&machine, &map, VirtAddr(at.0 + page * PAGE_SIZE)).unwrap();
    }
    assert_eq!(machine.cached(bindery::platform::Cpu(0), map.root()).len(), 16);
    let device = PhysAddr(12 * GIB + 64 * KIB);
    let at = map.ioremap(device, MIB, MemoryType::Device).unwrap();
    assert_eq!(shape(&map, at, MIB), [(64 * KIB, MIB)], "aligned to 64 KiB is enough");
    let at = map.ioremap(PhysAddr(device.0 + PAGE_SIZE), MIB, MemoryType::Device).unwrap();
    let ends = [(4 * KIB, 60 * KIB), (64 * KIB, 960 * KIB), (4 * KIB, 4 * KIB)];
    assert_eq!(shape(&map, at, MIB), ends);
    audit(&machine, &memory, &[&map]);
}

#[test]
fn aarch64_maps_32_mib_as_one_block() {
    let (machine, memory) = strict::<AArch64>(64 * MIB);
    let map = map(&memory);
    let from = PhysAddr(16 * GIB + 32 * MIB);
    let (at, cost) = cost(&map, || map.ioremap(from, 32 * MIB, MemoryType::Device).unwrap());
    assert_eq!(cost.entries_written, 16 + cost.tables_allocated);
    assert_eq!(shape(&map, at, 32 * MIB), [(32 * MIB, 32 * MIB)]);
    kernel::translate(&machine, &map, at).unwrap();
    kernel::translate(&machine, &map, VirtAddr(at.0 + 31 * MIB)).unwrap();
    assert_eq!(machine.cached(bindery::platform::Cpu(0), map.root()).len(), 1);
    let (other, _) = self::cost(&map, || {
        map.ioremap(PhysAddr(from.0 + 2 * MIB), 34 * MIB, MemoryType::Device).unwrap()
    });
    let (small, large) = ((2 * MIB, 30 * MIB), (2 * MIB, 4 * MIB));
    assert_eq!(shape(&map, other, 34 * MIB), [(small.0, small.1 + large.1)], "no block fits");
    audit(&machine, &memory, &[&map]);
}

#[test]
fn a_part_of_32_mib_is_cut_out() {
    let (machine, memory) = strict::<AArch64>(64 * MIB);
    let map = map(&memory);
    let from = PhysAddr(16 * GIB);
    for (first, until) in [(3, 5), (0, 1), (31, 32), (2, 4), (3, 4), (1, 31), (0, 32)] {
        let at = map.ioremap(from, 32 * MIB, MemoryType::Uncached).unwrap();
        for mib in 0..32 {
            kernel::translate(&machine, &map, VirtAddr(at.0 + mib * MIB)).unwrap();
        }
        let part = pages(VirtAddr(at.0 + first * MIB), (until - first) * 256);
        map.protect_part(part, Permissions::READ).unwrap();
        let mut end = at;
        for piece in pieces(&map, pages(at, 8192)) {
            assert_eq!((piece.range.start(), piece.to.0), (end, from.0 + end.0 - at.0));
            let inside = part.covers(piece.range);
            assert_eq!(piece.permissions.contains(Permissions::WRITE), !inside, "{piece:?}");
            assert!(inside || !part.overlaps(piece.range), "{piece:?}");
            assert_eq!(piece.memory, MemoryType::Uncached);
            end = piece.range.end();
        }
        assert_eq!(end.0, at.0 + 32 * MIB, "{first}..{until}");
        for mib in 0..32 {
            let place = VirtAddr(at.0 + mib * MIB + 5);
            let to = PhysAddr(from.0 + mib * MIB + 5);
            assert_eq!(kernel::translate(&machine, &map, place), Ok(to));
            let written = machine.write_kernel(map.root(), place, &[1]);
            assert_eq!(written.is_err(), part.contains(place), "{place} of {part}");
        }
        audit(&machine, &memory, &[&map]);
        map.free_ioremap(at).unwrap();
    }
    audit(&machine, &memory, &[&map]);
}

#[test]
fn riscv_maps_64_kib_as_one_region() {
    let (machine, memory) = strict::<Riscv64<4>>(64 * MIB);
    let map = map(&memory);
    let at = map.vmalloc(MIB, &VmallocOptions::huge()).unwrap();
    assert_eq!(shape(&map, at, MIB), [(64 * KIB, MIB)]);
    kernel::fill(&machine, map.root(), pages(at, 256), 3);
    assert_eq!(machine.cached(bindery::platform::Cpu(0), map.root()).len(), 16);
    // The privileged specification defines such regions only at level 1.
    let at = map.ioremap(PhysAddr(16 * GIB), 32 * MIB, MemoryType::Uncached).unwrap();
    assert_eq!(shape(&map, at, 32 * MIB), [(2 * MIB, 32 * MIB)]);
    audit(&machine, &memory, &[&map]);
}

#[test]
fn pages_mapped_one_by_one_cost_walks() {
    let (machine, memory) = strict::<X86_64<4>>(64 * MIB);
    let map = kernel::map_with(&memory, 1 << 33, bindery::Reach::Page);
    let (at, cost) = cost(&map, || map.vmalloc(4 * MIB, &VmallocOptions::huge()).unwrap());
    assert_eq!(cost.entries_written, 1024 + cost.tables_allocated);
    assert_eq!(shape(&map, at, 4 * MIB).iter().map(|(size, _)| *size).max(), Some(PAGE_SIZE));
    audit(&machine, &memory, &[&map]);
}
