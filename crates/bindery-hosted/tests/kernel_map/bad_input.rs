//! Wrong calls of a kernel. Each call fails with the error for its cause and area and changes
//! nothing.

use bindery::addr::{Frame, PAGE_SIZE, PhysAddr, VirtAddr, VirtRange};
use bindery::arch::{MemoryType, Permissions, Riscv64, Tiny};
use bindery::{
    AreaKind, Errno, Error, KernelArea, KernelMap, KernelMapError as Problem, Memory, Reach,
    UnmapTime, VmallocOptions, VmapOptions,
};
use bindery_hosted::{Config, Machine, Walk};

use crate::support::areas::Areas;
use crate::support::devices::{DEVICE, Driver};
use crate::support::kernel::{
    self, arena, audit, frames, map, map_with, pages, picture, scattered, translate,
};
use crate::support::{GIB, MIB, memory_with, strict};

on_every_architecture! {
    other_addresses_than_starts_are_refused => addresses;
    what_is_given_back_twice_is_refused => twice;
    areas_of_another_kind_are_refused => kinds;
    sizes_that_nothing_has_are_refused => sizes;
    alignments_that_are_none_are_refused => alignments;
    permissions_that_no_kernel_has_are_refused => permissions;
    ranges_that_leave_their_area_are_not_protected => protect;
    the_last_physical_addresses_can_be_mapped => last_physical;
    only_frames_up_to_the_last_are_mapped => last_frames;
    windows_that_are_none_are_refused => windows;
    a_window_can_reach_the_last_page => last_page;
    accesses_to_freed_memory_end_with_the_map => access_after_purge;
}

type Map<'m, A> = KernelMap<'m, Machine<A>>;

/// Runs `scenario` with a map that has an area of each kind. Afterwards the map is empty, and
/// nothing has leaked.
fn on_map<A: Walk>(
    scenario: impl FnOnce(&Machine<A>, &Memory<Machine<A>>, &Map<'_, A>, [VirtAddr; 3]),
) {
    let (machine, memory) = strict::<A>(64 * MIB);
    let free = memory.free_frame_count();
    let owner = map_with(&memory, 64 * MIB, Reach::Table);
    let (_, list) = scattered(&owner, 20, 1);
    {
        let map = map(&memory);
        let vmalloc = map.vmalloc(5 * PAGE_SIZE, &VmallocOptions::default()).unwrap();
        let vmap = map.vmap(&list, &VmapOptions::default()).unwrap();
        let device = map.ioremap(PhysAddr(12 * GIB), 3 * PAGE_SIZE, MemoryType::Uncached).unwrap();
        scenario(&machine, &memory, &map, [vmalloc, vmap, device]);
        audit(&machine, &memory, &[&map, &owner]);
    }
    drop(owner);
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

/// Calls that must fail with this error and change nothing.
#[track_caller]
fn refused<A: Walk, R: std::fmt::Debug + PartialEq>(
    map: &Map<'_, A>,
    problem: Problem,
    call: impl FnOnce() -> Result<R, Problem>,
) {
    let (before, waiting) = (picture(map), map.freed_pages());
    assert_eq!(call(), Err(problem));
    assert_eq!(picture(map), before, "{problem} has changed something");
    assert_eq!(map.freed_pages(), waiting);
    assert!(!problem.to_string().is_empty());
}

/// Frees an address in every possible way.
fn frees<A: Walk>(map: &Map<'_, A>, at: VirtAddr) -> [Result<(), Problem>; 3] {
    [map.free_vmalloc(at), map.free_vmap(at, UnmapTime::Later), map.free_ioremap(at)]
}

fn area(at: VirtAddr, count: u64, kind: AreaKind) -> KernelArea {
    KernelArea { range: pages(at, count), kind }
}

const KINDS: [AreaKind; 3] = [AreaKind::Vmalloc, AreaKind::Vmap, AreaKind::Ioremap];

fn addresses<A: Walk>() {
    on_map::<A>(|_, _, map, [vmalloc, vmap, device]| {
        let before = picture(map);
        let last = map.arena().end();
        let nowhere =
            [0, 0x1000, GIB, device.0 + 4 * PAGE_SIZE, last.0 - PAGE_SIZE, last.0, !0xfff];
        for at in nowhere.map(VirtAddr) {
            assert_eq!(frees(map, at), [Err(Problem::NotAnArea(at)); 3]);
            assert_eq!(map.physical(at), None);
        }
        for (start, count, kind) in [
            (vmalloc, 5, AreaKind::Vmalloc),
            (vmap, 20, AreaKind::Vmap),
            (device, 3, AreaKind::Ioremap),
        ] {
            let there = area(start, count, kind);
            // An address in the middle, one in the last page, one in the guard page.
            for page in [1, count - 1, count] {
                let at = VirtAddr(start.0 + page * PAGE_SIZE);
                for (expected, result) in KINDS.into_iter().zip(frees(map, at)) {
                    let problem = if expected == kind {
                        Problem::NotTheStart { area: there }
                    } else {
                        Problem::WrongKind { area: there, expected }
                    };
                    assert_eq!(result, Err(problem));
                    assert!(problem.to_string().contains(&there.to_string()), "{problem}");
                }
                let result = map.resize_vmalloc(at, PAGE_SIZE, &VmallocOptions::default());
                assert!(result.is_err());
            }
        }
        let inside = VirtAddr(vmalloc.0 + 8);
        assert!(matches!(map.free_vmalloc(inside), Err(Problem::NotTheStart { .. })));
        assert_eq!(
            Problem::NotTheStart { area: area(vmalloc, 5, AreaKind::Vmalloc) }.errno(),
            Errno::EFAULT
        );
        assert_eq!(picture(map), before);
    });
}

fn twice<A: Walk>() {
    on_map::<A>(|machine, _, map, starts| {
        map.set_purge_limit(u64::MAX);
        let counts = [5, 20, 3];
        for (start, free) in starts.into_iter().zip(0..) {
            translate(machine, map, start).unwrap();
            frees_as(map, start, free).unwrap();
        }
        for (index, start) in starts.into_iter().enumerate() {
            let there = area(start, counts[index], KINDS[index]);
            for at in [start.0, start.0 + PAGE_SIZE, start.0 + counts[index] * PAGE_SIZE] {
                assert_eq!(frees(map, VirtAddr(at)), [Err(Problem::Freed { area: there }); 3]);
                let page = pages(VirtAddr(at), 1);
                let protected = map.protect_part(page, Permissions::READ);
                assert_eq!(protected, Err(Problem::Freed { area: there }));
            }
            let resized = map.resize_vmalloc(start, MIB, &VmallocOptions::default());
            assert_eq!(resized, Err(Problem::Freed { area: there }));
        }
        assert_eq!(map.freed_pages(), 28);
        map.purge();
        for start in starts {
            assert_eq!(frees(map, start), [Err(Problem::NotAnArea(start)); 3]);
        }
    });
}

fn frees_as<A: Walk>(map: &Map<'_, A>, at: VirtAddr, kind: usize) -> Result<(), Problem> {
    match kind {
        0 => map.free_vmalloc(at),
        1 => map.free_vmap(at, UnmapTime::Later),
        _ => map.free_ioremap(at),
    }
}

fn kinds<A: Walk>() {
    on_map::<A>(|_, _, map, starts| {
        for (index, start) in starts.into_iter().enumerate() {
            let there = area(start, [5, 20, 3][index], KINDS[index]);
            for (other, expected) in KINDS.into_iter().enumerate() {
                if other != index {
                    let problem = Problem::WrongKind { area: there, expected };
                    refused(map, problem, || frees_as(map, start, other));
                }
            }
            if index != 0 {
                let problem = Problem::WrongKind { area: there, expected: AreaKind::Vmalloc };
                refused(map, problem, || {
                    map.resize_vmalloc(start, MIB, &VmallocOptions::default())
                });
            }
        }
    });
}

fn sizes<A: Walk>() {
    on_map::<A>(|_, _, map, [start, ..]| {
        let options = VmallocOptions::huge();
        let arena = map.arena().len();
        for (size, problem) in [
            (0, Problem::Empty),
            (arena, Problem::TooLarge),
            (arena - PAGE_SIZE + 1, Problem::TooLarge),
            (1 << 63, Problem::TooLarge),
            (u64::MAX - 4095, Problem::TooLarge),
            (u64::MAX, Problem::TooLarge),
        ] {
            refused(map, problem, || map.vmalloc(size, &options));
            refused(map, problem, || map.resize_vmalloc(start, size, &options));
        }
        // There would be room if there were no other areas.
        let device = MemoryType::Uncached;
        let registers = || map.ioremap(PhysAddr(12 * GIB), arena - PAGE_SIZE, device);
        refused(map, Problem::OutOfAddresses, registers);
        // The same call with enough memory.
        refused(map, Problem::OutOfMemory, || map.vmalloc(arena - PAGE_SIZE, &options));
        refused(map, Problem::Empty, || map.vmap(&[], &VmapOptions::default()));
        refused(map, Problem::Empty, || map.vmap_ranges(&[], &VmapOptions::default()));
        let nothing = [frames(0x8_0000, 0); 3];
        refused(map, Problem::Empty, || map.vmap_ranges(&nothing, &VmapOptions::default()));
        let endless = [frames(0, u32::MAX); 5];
        refused(map, Problem::TooLarge, || map.vmap_ranges(&endless, &VmapOptions::default()));
        refused(map, Problem::Empty, || map.ioremap(PhysAddr(12 * GIB), 0, device));
        refused(map, Problem::TooLarge, || map.ioremap(PhysAddr(12 * GIB), arena, device));
        assert_eq!(
            (Problem::TooLarge.errno(), Problem::Empty.errno()),
            (Errno::ENOMEM, Errno::EINVAL)
        );
    });
}

fn alignments<A: Walk>() {
    on_map::<A>(|_, _, map, [start, ..]| {
        for align in [0, 1, 3, 2048, 4097, 12288, u64::MAX] {
            let options = VmallocOptions { align, ..VmallocOptions::default() };
            refused(map, Problem::BadAlignment, || map.vmalloc(PAGE_SIZE, &options));
            refused(map, Problem::BadAlignment, || map.resize_vmalloc(start, PAGE_SIZE, &options));
        }
        // No address in the arena has this alignment.
        let options = VmallocOptions { align: 1 << 63, ..VmallocOptions::huge() };
        refused(map, Problem::OutOfAddresses, || map.vmalloc(PAGE_SIZE, &options));
        refused(map, Problem::OutOfAddresses, || map.vmalloc(3 * MIB, &options));
        refused(map, Problem::OutOfAddresses, || map.resize_vmalloc(start, MIB, &options));
    });
}

fn permissions<A: Walk>() {
    on_map::<A>(|_, _, map, [start, vmap, _]| {
        let user = Permissions::READ | Permissions::USER;
        for permissions in [Permissions::empty(), Permissions::USER, user, Permissions::all()] {
            let options = VmallocOptions { permissions, ..VmallocOptions::default() };
            refused(map, Problem::BadPermissions, || map.vmalloc(PAGE_SIZE, &options));
            refused(map, Problem::BadPermissions, || map.resize_vmalloc(start, MIB, &options));
            let options = VmapOptions { permissions, ..VmapOptions::default() };
            refused(map, Problem::BadPermissions, || map.vmap(&[Frame(0x8_0000)], &options));
            refused(map, Problem::BadPermissions, || map.protect_part(pages(vmap, 1), permissions));
        }
    });
}

fn protect<A: Walk>() {
    on_map::<A>(|_, _, map, [start, vmap, device]| {
        let read = Permissions::READ;
        let there = area(start, 5, AreaKind::Vmalloc);
        let range =
            |from: u64, until: u64| VirtRange::new(VirtAddr(from), VirtAddr(until)).unwrap();
        let empty = range(start.0, start.0);
        refused(map, Problem::Empty, || map.protect_part(empty, read));
        let late = VirtAddr(start.0 + 1);
        refused(map, Problem::Unaligned(late), || map.protect_part(range(late.0, vmap.0), read));
        let early = VirtAddr(start.0 + 4095);
        refused(map, Problem::Unaligned(early), || map.protect_part(range(start.0, early.0), read));
        let crossing = Problem::CrossesArea { area: there };
        for range in [
            pages(start, 6),
            pages(VirtAddr(start.0 + 5 * PAGE_SIZE), 1),
            pages(VirtAddr(start.0 + 4 * PAGE_SIZE), 2),
            range(start.0, vmap.0 + PAGE_SIZE),
            range(start.0, !0xfff),
        ] {
            refused(map, crossing, || map.protect_part(range, read));
        }
        let nowhere = VirtAddr(device.0 + 4 * PAGE_SIZE);
        refused(map, Problem::NotAnArea(nowhere), || map.protect_part(pages(nowhere, 1), read));
        let below = VirtAddr(map.arena().start().0 - PAGE_SIZE);
        refused(map, Problem::NotAnArea(below), || map.protect_part(range(below.0, vmap.0), read));
        let run = read | Permissions::EXECUTE;
        refused(map, Problem::BadPermissions, || map.protect_part(pages(device, 1), run));
    });
}

fn last_physical<A: Walk>() {
    on_map::<A>(|machine, _, map, _| {
        const END: u64 = 1 << 44;
        let device = MemoryType::Uncached;
        for (from, size) in [
            (END, 1),
            (END - 1, 2),
            (END - MIB, MIB + 1),
            (1 << 63, MIB),
            (u64::MAX, 1),
            (u64::MAX - MIB, MIB),
            (u64::MAX - MIB, 2 * MIB),
        ] {
            refused(map, Problem::BadFrames, || map.ioremap(PhysAddr(from), size, device));
        }
        for size in [1, PAGE_SIZE, MIB, 3 * MIB] {
            let at = map.ioremap(PhysAddr(END - size), size, device).unwrap();
            for offset in [0, size - 1] {
                let to = PhysAddr(END - size + offset);
                assert_eq!(translate(machine, map, VirtAddr(at.0 + offset)), Ok(to));
                assert_eq!(map.physical(VirtAddr(at.0 + offset)), Some(to));
            }
        }
    });
}

fn last_frames<A: Walk>() {
    on_map::<A>(|machine, _, map, _| {
        let options = VmapOptions { memory: MemoryType::WriteCombining, ..VmapOptions::default() };
        let beyond = [frames(u32::MAX - 7, 9)];
        refused(map, Problem::BadFrames, || map.vmap_ranges(&beyond, &options));
        let beyond = [frames(7, 9), frames(u32::MAX, 2)];
        refused(map, Problem::BadFrames, || map.vmap_ranges(&beyond, &options));
        let last = |count: u32| u32::MAX - (count - 1);
        for count in [1, 8, 16, 512, 700] {
            let at = map.vmap_ranges(&[frames(last(count), count)], &options).unwrap();
            let to = Frame(u32::MAX).start();
            let place = VirtAddr(at.0 + u64::from(count - 1) * PAGE_SIZE);
            assert_eq!(translate(machine, map, place), Ok(to), "the last of {count}");
            // A list that continues with frame 0: no run extends beyond the last frame.
            let list: Vec<_> =
                (0..2 * count).map(|ahead| Frame(last(count).wrapping_add(ahead))).collect();
            let at = map.vmap(&list, &options).unwrap();
            for (frame, page) in list.iter().zip(0..) {
                let place = VirtAddr(at.0 + page * PAGE_SIZE);
                assert_eq!(map.physical(place), Some(frame.start()), "page {page} of {count}");
                assert_eq!(translate(machine, map, place), Ok(frame.start()));
            }
        }
    });
}

fn windows<A: Walk>() {
    let (machine, memory) = strict::<A>(16 * MIB);
    let free = memory.free_frame_count();
    let base = arena::<A>(PAGE_SIZE).start().0;
    let whole = !0 << (12 + A::INDEX_BITS * u32::from(A::LEVELS) - 1);
    for (start, end) in [
        (base, base),
        (base, base + PAGE_SIZE),
        (base + 1, base + MIB),
        (base, base + MIB + 1),
        // A range larger than a root entry covers.
        (0x1000, base),
        (0, whole + MIB),
    ] {
        let range = VirtRange::new(VirtAddr(start), VirtAddr(end)).unwrap();
        let refused = KernelMap::new(&memory, range).err();
        assert_eq!(refused, Some(Problem::BadArena), "{range}");
    }
    memory.trim();
    assert_eq!(memory.free_frame_count(), free);
    audit(&machine, &memory, &[]);
}

fn last_page<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let free = memory.free_frame_count();
    let end = VirtAddr(0_u64.wrapping_sub(PAGE_SIZE));
    let arena = VirtRange::new(VirtAddr(end.0 - 4 * MIB), end).unwrap();
    let map = KernelMap::new(&memory, arena).unwrap();
    for round in 0..3 {
        let mut areas = Vec::new();
        while let Ok(at) = map.vmalloc(37 * PAGE_SIZE, &VmallocOptions::huge()) {
            kernel::fill(&machine, map.root(), pages(at, 37), round);
            areas.push(at);
        }
        assert!(areas.len() >= 20);
        for at in &areas {
            kernel::assert_filled(&machine, map.root(), pages(*at, 37), *at, round);
        }
        audit(&machine, &memory, &[&map]);
        // Frees the areas in a different order, so that tables are freed one by one.
        areas.sort_by_key(|at| at.0.reverse_bits());
        for at in areas {
            map.free_vmalloc(at).unwrap();
            map.purge();
        }
        audit(&machine, &memory, &[&map]);
        let at = map.vmalloc(4 * MIB - 2 * PAGE_SIZE, &VmallocOptions::huge()).unwrap();
        let count = 1022;
        kernel::fill(&machine, map.root(), pages(at, count), 9);
        map.protect_part(pages(VirtAddr(at.0 + (count - 1) * PAGE_SIZE), 1), Permissions::READ)
            .unwrap();
        audit(&machine, &memory, &[&map]);
        map.free_vmalloc(at).unwrap();
    }
    drop(map);
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

#[test]
fn an_unknown_type_of_memory_is_refused() {
    on_map::<Riscv64<3>>(|_, _, map, _| {
        let through = MemoryType::WriteThrough;
        let from = PhysAddr(12 * GIB);
        refused(map, Problem::NoSuchMemoryType, || map.ioremap(from, MIB, through));
        let options = VmapOptions { memory: through, ..VmapOptions::default() };
        refused(map, Problem::NoSuchMemoryType, || map.vmap(&[Frame(0x8_0000)], &options));
        let list = [frames(0x8_0000, 4)];
        refused(map, Problem::NoSuchMemoryType, || map.vmap_ranges(&list, &options));
    });
}

/// Without Svpbmt, the physical memory attributes decide, and the bits of a type are reserved.
#[test]
fn a_machine_without_types_takes_only_normal() {
    let config = Config { page_based_memory_types: false, ..Config::default() };
    let (machine, memory) = memory_with::<Riscv64<3>>(config);
    let map = map(&memory);
    let from = PhysAddr(12 * GIB);
    let frames = Driver::of(&[(0, DEVICE, 16)]);
    for memory_type in MemoryType::ALL {
        let is_taken = memory_type == MemoryType::Normal;
        let mapped = map.ioremap(from, MIB, memory_type).map(drop);
        assert_eq!(mapped, if is_taken { Ok(()) } else { Err(Problem::NoSuchMemoryType) });
        let object = memory.frame_object(&frames, MIB, memory_type).map(drop);
        assert_eq!(object, if is_taken { Ok(()) } else { Err(Error::Invalid) });
    }
    audit(&machine, &memory, &[&map]);
}

#[test]
fn a_full_window_of_tiny_is_refused() {
    let (machine, memory) = strict::<Tiny>(16 * MIB);
    let map = KernelMap::new(&memory, pages(VirtAddr(1 << 17), 32)).unwrap();
    let whole = map.vmalloc(31 * PAGE_SIZE, &VmallocOptions::huge()).unwrap();
    let options = VmallocOptions::default();
    refused(&map, Problem::OutOfAddresses, || map.vmalloc(1, &options));
    map.free_vmalloc(whole).unwrap();
    // Areas that wait for a purge do not block the call.
    map.vmalloc(31 * PAGE_SIZE, &options).unwrap();
    audit(&machine, &memory, &[&map]);
}

fn access_after_purge<A: Walk>() {
    let (machine, memory) = strict::<A>(16 * MIB);
    let map = map(&memory);
    let at = map.vmalloc(MIB, &VmallocOptions::default()).unwrap();
    translate(&machine, &map, at).unwrap();
    map.free_vmalloc(at).unwrap();
    map.purge();
    // A walk may have read the tables and may still use them later.
    assert!(translate(&machine, &map, at).is_err());
    drop(map);
    audit(&machine, &memory, &[]);
}
