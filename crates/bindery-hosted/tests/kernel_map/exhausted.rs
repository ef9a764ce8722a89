//! Frames and addresses run out for real. Failed calls change nothing, and calls find the areas
//! that wait for a purge. Small pieces replace large ones only if no block is free.

use bindery::addr::{PAGE_SIZE, PhysAddr, VirtAddr};
use bindery::arch::{MemoryType, Permissions};
use bindery::{
    AddressSpace, KernelMap, KernelMapError, Memory, Pieces, Reach, UnmapTime, VmallocOptions,
    VmapOptions,
};
use bindery_hosted::{Machine, Walk};

use crate::support::areas::Areas;
use crate::support::kernel::{
    self, assert_filled, audit, fill, map_with, pages, picture, pieces, scattered,
};
use crate::support::{GIB, KIB, MIB, fixed, options, strict};

on_every_architecture! {
    memory_that_really_runs_out_is_no_different => really_out;
    areas_leave_the_frames_that_reclaim_needs => leaves_the_reserve;
    what_waits_for_a_purge_is_memory => freed_is_memory;
    only_parts_without_large_blocks_are_small => fragmented;
    a_full_window_says_so => full_window;
    without_place_for_large_pieces_small_ones_serve => no_aligned_place;
}

type Map<'m, A> = KernelMap<'m, Machine<A>>;

/// Uses up all memory except `left` frames, with single pages in no particular order. Returns the
/// areas that the caller has to free.
fn use_up<A: Walk>(memory: &Memory<Machine<A>>, map: &Map<'_, A>, left: u64) -> Vec<VirtAddr> {
    let mut areas = Vec::new();
    let options = VmallocOptions::default();
    while memory.free_frame_count() > left + 64 {
        areas.push(
            map.vmalloc((memory.free_frame_count() - left) / 3 * PAGE_SIZE, &options).unwrap(),
        );
    }
    while memory.free_frame_count() > left {
        areas.push(map.vmalloc(PAGE_SIZE, &options).unwrap());
    }
    areas
}

fn really_out<A: Walk>() {
    let (machine, memory) = strict::<A>(16 * MIB);
    let free = memory.free_frame_count();
    let map = kernel::map(&memory);
    let areas = use_up(&memory, &map, 3);
    let before = picture(&map);
    for options in [VmallocOptions::default(), VmallocOptions::huge()] {
        for size in [4 * PAGE_SIZE, MIB, 100 * MIB] {
            assert_eq!(map.vmalloc(size, &options), Err(KernelMapError::OutOfMemory));
            assert_eq!(
                map.resize_vmalloc(areas[0], GIB, &options),
                Err(KernelMapError::OutOfMemory)
            );
        }
    }
    assert_eq!(picture(&map), before);
    audit(&machine, &memory, &[&map]);
    areas.into_iter().for_each(|at| map.free_vmalloc(at).unwrap());
    map.vmalloc(12 * MIB, &VmallocOptions::huge()).unwrap();
    audit(&machine, &memory, &[&map]);
    drop(map);
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free);
}

/// Areas use as much memory as they may. Reclaim still has frames for storing pages, so all pages
/// can be swapped out.
fn leaves_the_reserve<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let swap = memory.swap_on(8192, 0).unwrap();
    let map = kernel::map(&memory);
    {
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&fixed(GIB, 16 * MIB)).unwrap();
        for page in 0..16 * MIB / PAGE_SIZE {
            // Two distinct words avoid a page filled with one value, so each page has to be stored.
            let bytes = [page + 1, page + 2].map(u64::to_ne_bytes).concat();
            space.write_user(VirtAddr(GIB + page * PAGE_SIZE), &bytes).unwrap();
        }
        let mut areas = Vec::new();
        for size in [MIB, 64 * KIB, PAGE_SIZE] {
            while let Ok(area) = map.vmalloc(size, &VmallocOptions::huge()) {
                areas.push(area);
            }
        }
        assert!(memory.free_frame_count() >= 32, "{} are free", memory.free_frame_count());
        // The calls have waited until pages of the process were stored, which was still possible.
        while memory.reclaim(64).freed > 0 {}
        let taken = memory.swap_areas().map(|area| area.taken).sum::<u64>();
        assert_eq!(taken, 16 * MIB / PAGE_SIZE, "pages cannot be freed any more");
        areas.into_iter().for_each(|at| map.free_vmalloc(at).unwrap());
    }
    audit(&machine, &memory, &[&map]);
    assert_eq!(memory.swap_off(&swap), Ok(()));
}

/// Every call that needs memory finds frames and tables that wait for a purge.
fn freed_is_memory<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let map = kernel::map(&memory);
    map.set_purge_limit(u64::MAX);
    let huge = map.vmalloc(4 * MIB, &VmallocOptions::huge()).unwrap();
    let (_, list) = scattered(&map, 20, 2);
    let far = VmallocOptions { align: 2 * GIB, ..VmallocOptions::default() };
    let calls: [&dyn Fn() -> Result<(), KernelMapError>; 5] = [
        &|| {
            map.vmalloc(100 * PAGE_SIZE, &VmallocOptions::default())
                .map(|at| map.free_vmalloc(at).unwrap())
        },
        // Allocates at addresses without tables.
        &|| map.vmalloc(PAGE_SIZE, &far).map(|at| map.free_vmalloc(at).unwrap()),
        &|| {
            // Uses a gibibyte without other areas.
            let device = PhysAddr(17 * GIB + 512 * MIB);
            let at = map.ioremap(device, 512 * MIB + 4 * KIB, MemoryType::Uncached)?;
            map.free_ioremap(at)
        },
        &|| {
            map.vmap(&list, &VmapOptions::default())
                .map(|at| map.free_vmap(at, UnmapTime::Later).unwrap())
        },
        &|| map.protect_part(pages(VirtAddr(huge.0 + MIB), 1), Permissions::READ),
    ];
    for (number, call) in calls.into_iter().enumerate() {
        let areas = use_up(&memory, &map, 0);
        assert_eq!(memory.free_frame_count(), 0);
        areas.into_iter().for_each(|at| map.free_vmalloc(at).unwrap());
        assert_eq!(memory.free_frame_count(), 0, "all of it waits for a purge");
        assert_eq!(call(), Ok(()), "call {number}");
        map.purge();
    }
    audit(&machine, &memory, &[&map]);
}

fn fragmented<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let map = map_with(&memory, 1 << 33, Reach::Table);
    map.set_purge_limit(u64::MAX);
    // Fills the arena with areas of 2 MiB and of a page in turn.
    let base = VmallocOptions::default();
    let mut large = Vec::new();
    while memory.free_frame_count() > 600 {
        large.push(map.vmalloc(2 * MIB, &VmallocOptions::huge()).unwrap());
    }
    let mut small = Vec::new();
    while memory.free_frame_count() > 1 {
        small.push(map.vmalloc(PAGE_SIZE, &base).unwrap());
    }
    // Frees two blocks of 2 MiB and single, non-adjacent pages.
    map.free_vmalloc(large.pop().unwrap()).unwrap();
    map.free_vmalloc(large.remove(0)).unwrap();
    small.iter().skip(1).step_by(2).for_each(|at| map.free_vmalloc(*at).unwrap());
    map.purge();
    let at = map.vmalloc(4 * MIB + 200 * PAGE_SIZE, &VmallocOptions::huge()).unwrap();
    fill(&machine, map.root(), pages(at, 1224), 1);
    let found = pieces(&map, pages(at, 1224));
    let of_size = |size: u64| -> u64 {
        let fits = found.iter().filter(|piece| piece.size == size);
        fits.map(|piece| piece.range.pages()).sum()
    };
    // Two of the free blocks may have no free neighbor.
    assert_eq!(of_size(2 * MIB), 1024, "{found:?}");
    assert_eq!(of_size(PAGE_SIZE) + of_size(64 * KIB), 200);
    assert!(of_size(PAGE_SIZE) > 100, "{found:?}");
    assert_filled(&machine, map.root(), pages(at, 1224), at, 1);
    map.free_vmalloc(at).unwrap();
    // Only one free block is left, so only the other half consists of small pieces.
    map.purge();
    let keeper = map.vmalloc(2 * MIB, &VmallocOptions::huge()).unwrap();
    let hole = map.vmalloc(2 * MIB, &VmallocOptions::huge()).unwrap();
    map.protect_part(pages(hole, 1), Permissions::READ).unwrap();
    map.resize_vmalloc(hole, 2 * MIB - 8 * PAGE_SIZE, &VmallocOptions::huge()).unwrap();
    map.free_vmalloc(keeper).unwrap();
    map.purge();
    let at = map.vmalloc(2 * MIB + 30 * PAGE_SIZE, &VmallocOptions::huge()).unwrap();
    let found = pieces(&map, pages(at, 542));
    assert!(found.iter().any(|piece| piece.size == 2 * MIB), "{found:?}");
    audit(&machine, &memory, &[&map]);
}

fn full_window<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let owner = kernel::map(&memory);
    let (_, list) = scattered(&owner, 16, 1);
    let map = map_with(&memory, MIB, Reach::Table);
    map.set_purge_limit(u64::MAX);
    let base = VmallocOptions::default();
    let areas: Vec<_> = (0..16).map(|_| map.vmalloc(15 * PAGE_SIZE, &base).unwrap()).collect();
    let before = picture(&map);
    let device = PhysAddr(12 * GIB);
    let ways: [&dyn Fn() -> Result<VirtAddr, KernelMapError>; 5] = [
        &|| map.vmalloc(PAGE_SIZE, &base),
        &|| map.vmalloc(64 * KIB, &VmallocOptions::huge()),
        &|| map.vmap(&list, &VmapOptions::default()),
        &|| map.ioremap(device, 5 * PAGE_SIZE, MemoryType::Uncached),
        &|| map.resize_vmalloc(areas[3], 16 * PAGE_SIZE, &base),
    ];
    for way in ways {
        assert_eq!(way(), Err(KernelMapError::OutOfAddresses));
        assert_eq!(picture(&map), before);
    }
    for way in ways {
        // Two neighbors wait for a purge, which provides enough space.
        map.free_vmalloc(areas[8]).unwrap();
        map.free_vmalloc(areas[9]).unwrap();
        let at = way().unwrap();
        map.purge();
        let back =
            [map.free_vmalloc(at), map.free_vmap(at, UnmapTime::Later), map.free_ioremap(at)];
        assert_eq!(back.iter().filter(|result| result.is_ok()).count(), 1);
        map.purge();
        if at != areas[3] && map.physical(areas[3]).is_none() {
            assert_eq!(map.vmalloc(15 * PAGE_SIZE, &base), Ok(areas[3]));
        }
        assert_eq!(map.vmalloc(15 * PAGE_SIZE, &base), Ok(areas[8]));
        assert_eq!(map.vmalloc(15 * PAGE_SIZE, &base), Ok(areas[9]));
    }
    audit(&machine, &memory, &[&map, &owner]);
}

fn no_aligned_place<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let owner = kernel::map(&memory);
    let (_, list) = scattered(&owner, 512, 1);
    // The space of 3 MiB contains no free aligned 2 MiB.
    let map = map_with(&memory, 4 * MIB, Reach::Table);
    let first = map.vmalloc(3 * PAGE_SIZE, &VmallocOptions::default()).unwrap();
    let options = VmallocOptions { align: 2 * MIB, ..VmallocOptions::default() };
    let middle = map.vmalloc(PAGE_SIZE, &options).unwrap();
    map.vmalloc(2 * MIB - 3 * PAGE_SIZE, &VmallocOptions::default()).unwrap();
    map.free_vmalloc(middle).unwrap();
    let at = map.vmalloc(2 * MIB - 4 * PAGE_SIZE, &VmallocOptions::huge());
    assert!(at.is_ok_and(|at| at > first), "{at:?}");
    map.free_vmalloc(at.unwrap()).unwrap();
    let at = map.vmap(&list[..500], &VmapOptions { pieces: Pieces::Base, ..Default::default() });
    map.free_vmap(at.unwrap(), UnmapTime::Later).unwrap();
    let at = map.vmap(&list[..500], &VmapOptions::default()).unwrap();
    fill(&machine, map.root(), pages(at, 500), 3);
    map.free_vmap(at, UnmapTime::Now).unwrap();
    let device = map.ioremap(PhysAddr(12 * GIB), 2 * MIB - 4 * PAGE_SIZE, MemoryType::Device);
    let device = device.unwrap();
    let piece = pieces(&map, pages(device, 1))[0];
    assert!(piece.size <= 64 * KIB, "{piece:?}");
    assert_eq!(kernel::translate(&machine, &map, device), Ok(PhysAddr(12 * GIB)));
    audit(&machine, &memory, &[&map, &owner]);
}
