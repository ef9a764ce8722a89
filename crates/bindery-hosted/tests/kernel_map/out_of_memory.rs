//! Memory runs out at every single point of every call of a kernel map, on every architecture. The
//! call fails or falls back to another allocation. A failure changes nothing, nothing leaks, and
//! the call succeeds once memory is available again. (`kernel_exhausted` uses up memory and
//! addresses for real.)

use bindery::addr::{Frame, PAGE_SIZE, PhysAddr, VirtAddr};
use bindery::arch::{AArch64, MemoryType, Permissions, X86_64};
use bindery::{Content, KernelMap, KernelMapError, Reach, VmallocOptions, VmapOptions, testing};
use bindery_hosted::{Machine, Walk};

use crate::support::areas::Areas;
use crate::support::kernel::{
    self, assert_filled, audit, check_core, fill, map_with, pages, picture,
};
use crate::support::{GIB, KIB, MIB, strict};

on_every_architecture! {
    a_new_map => new_map;
    a_new_area_of_pages => vmalloc_pages;
    a_new_area_of_large_pieces => vmalloc_large;
    a_list_of_frames => vmap;
    registers_of_a_device => ioremap;
    a_cut_at_both_ends => protect;
    a_cut_out_of_a_gibibyte => protect_gibibyte;
    a_larger_area_in_place => grow;
    a_larger_area_elsewhere => move_away;
    a_smaller_area => shrink;
}

type Map<'m, A> = KernelMap<'m, Machine<A>>;

/// A call that needs memory.
struct Case<A: Walk> {
    /// Creates the areas before the call. Returns the call's address.
    set_up: fn(&Map<'_, A>) -> VirtAddr,
    call: fn(&Map<'_, A>, VirtAddr) -> Result<VirtAddr, KernelMapError>,
    /// The number of pages at the address that hold content before and after the call.
    filled: u64,
}

impl<A: Walk> Clone for Case<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A: Walk> Copy for Case<A> {}

#[derive(Clone, Copy, Debug)]
enum Failing {
    AllFrom(u64),
    Only(u64),
}

/// Makes memory run out at every single point of the call. Returns the number of points.
fn at_every_point<A: Walk>(case: Case<A>) -> u64 {
    let mut points = 0;
    while once(case, Failing::AllFrom(points)) {
        once(case, Failing::Only(points));
        points += 1;
        assert!(points < 200, "it never comes to its end");
    }
    points
}

/// Whether any allocation failed.
fn once<A: Walk>(case: Case<A>, failing: Failing) -> bool {
    let (machine, memory) = strict::<A>(64 * MIB);
    let free = memory.free_frame_count();
    let failed = {
        let map = map_with(&memory, 1 << 33, Reach::Table);
        let at = (case.set_up)(&map);
        fill(&machine, map.root(), pages(at, case.filled), 7);
        let before = (picture(&map), memory.free_frame_count());
        match failing {
            Failing::AllFrom(point) => memory.fail_allocations_after(Some(point)),
            Failing::Only(point) => testing::fail_one_allocation(&memory, Some(point)),
        }
        let result = (case.call)(&map, at);
        let failures = testing::failed_allocations(&memory);
        memory.fail_allocations_after(None);
        check_core(&memory, &[&map]);
        let now = match (result, failing) {
            (Ok(now), Failing::AllFrom(_)) => {
                assert_eq!(failures, 0, "{failing:?}: it succeeded without memory");
                now
            }
            // The call retried after a purge.
            (Ok(now), Failing::Only(_)) => now,
            (Err(problem), _) => {
                assert_eq!(problem, KernelMapError::OutOfMemory, "{failing:?}");
                assert_ne!(failures, 0, "{failing:?}: memory ran out, and none was refused");
                audit(&machine, &memory, &[&map]);
                assert_eq!(picture(&map), before.0, "{failing:?}");
                assert_filled(&machine, map.root(), pages(at, case.filled), at, 7);
                memory.trim();
                assert!(memory.free_frame_count() >= before.1, "{failing:?}: frames have leaked");
                (case.call)(&map, at).expect("the second try")
            }
        };
        if case.filled > 0 {
            assert_filled(&machine, map.root(), pages(now, case.filled), at, 7);
        }
        audit(&machine, &memory, &[&map]);
        failures > 0
    };
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked, {failing:?}");
    failed
}

/// No preparation.
fn nothing<A: Walk>() -> Case<A> {
    Case { set_up: |map| map.arena().start(), call: |_, at| Ok(at), filled: 0 }
}

/// An area in the largest pieces.
fn large<A: Walk>() -> Case<A> {
    Case {
        set_up: |map| map.vmalloc(4 * MIB, &VmallocOptions::huge()).unwrap(),
        call: |_, at| Ok(at),
        filled: 1024,
    }
}

fn new_map<A: Walk>() {
    let (machine, memory) = strict::<A>(16 * MIB);
    let free = memory.free_frame_count();
    let entries = (1_u64 << 33).div_ceil(A::ROOT.span());
    for point in 0..=entries {
        memory.fail_allocations_after(Some(point));
        let arena = kernel::arena::<A>(1 << 33);
        let problem = KernelMap::new(&memory, arena).err();
        assert_eq!(problem, Some(KernelMapError::OutOfMemory), "point {point}");
        memory.fail_allocations_after(None);
        audit(&machine, &memory, &[]);
        memory.trim();
        assert_eq!(memory.free_frame_count(), free);
    }
    drop(kernel::map(&memory));
    audit(&machine, &memory, &[]);
}

fn vmalloc_pages<A: Walk>() {
    let points = at_every_point::<A>(Case {
        call: |map, _| map.vmalloc(700 * PAGE_SIZE, &VmallocOptions::default()),
        ..nothing()
    });
    // Allocations for the area, its frames (a few blocks), two tables, and the tables above.
    let above = u64::from(A::LEVELS) - 3;
    assert!(points >= 1 + 2 + 2 + above, "{points}");
}

fn vmalloc_large<A: Walk>() {
    let points = at_every_point::<A>(Case {
        call: |map, _| {
            let content = Content::Zeroes;
            map.vmalloc(7 * MIB + 20 * KIB, &VmallocOptions { content, ..VmallocOptions::huge() })
        },
        ..nothing()
    });
    assert!(points >= 6, "{points}");
}

fn vmap<A: Walk>() {
    let points = at_every_point::<A>(Case {
        set_up: |map| map.vmalloc(1030 * PAGE_SIZE, &VmallocOptions::huge()).unwrap(),
        call: |map, at| {
            let page = |page: u64| {
                let at = VirtAddr(at.0 + page * PAGE_SIZE);
                Frame((map.physical(at).expect("mapped").0 / PAGE_SIZE) as u32)
            };
            // In descending order, so that no two frames form a piece.
            let list: Vec<_> = (0..1030).rev().map(page).collect();
            map.vmap(&list, &VmapOptions::default()).map(|_| at)
        },
        filled: 1030,
    });
    assert!(points >= 3, "the area, and tables: {points}");
}

fn ioremap<A: Walk>() {
    let points = at_every_point::<A>(Case {
        call: |map, _| map.ioremap(PhysAddr(12 * GIB + 5), 3 * MIB, MemoryType::Uncached),
        ..nothing()
    });
    assert!(points >= 2, "{points}");
}

fn protect<A: Walk>() {
    let points = at_every_point::<A>(Case {
        call: |map, at| {
            let part = pages(VirtAddr(at.0 + 12 * KIB), 700);
            map.protect_part(part, Permissions::READ | Permissions::EXECUTE)?;
            Ok(at)
        },
        ..large()
    });
    assert!(points >= 2, "a table for each leaf that is cut: {points}");
}

fn protect_gibibyte<A: Walk>() {
    at_every_point::<A>(Case {
        set_up: |map| map.ioremap(PhysAddr(16 * GIB), GIB, MemoryType::Uncached).unwrap(),
        call: |map, at| {
            let part = pages(VirtAddr(at.0 + 12 * KIB), 5000);
            map.protect_part(part, Permissions::READ).map(|()| at)
        },
        ..nothing()
    });
}

fn grow<A: Walk>() {
    let points = at_every_point::<A>(Case {
        call: |map, at| {
            let now = map.resize_vmalloc(at, 9 * MIB + 4 * KIB, &VmallocOptions::huge());
            assert!(now.is_err() || now == Ok(at));
            now
        },
        ..large()
    });
    assert!(points >= 3, "{points}");
}

fn move_away<A: Walk>() {
    let points = at_every_point::<A>(Case {
        set_up: |map| {
            let at = map.vmalloc(4 * MIB, &VmallocOptions::huge()).unwrap();
            let behind = map.vmalloc(PAGE_SIZE, &VmallocOptions::default()).unwrap();
            assert_eq!(behind.0, at.0 + 4 * MIB + PAGE_SIZE);
            at
        },
        call: |map, at| map.resize_vmalloc(at, 9 * MIB + 4 * KIB, &VmallocOptions::huge()),
        ..large()
    });
    assert!(points >= 4, "{points}");
}

fn shrink<A: Walk>() {
    at_every_point::<A>(Case {
        call: |map, at| map.resize_vmalloc(at, 3 * MIB, &VmallocOptions::huge()),
        filled: 768,
        ..large()
    });
}

#[test]
fn cuts_of_contiguous_blocks_need_no_memory() {
    let (machine, memory) = strict::<AArch64>(16 * MIB);
    let map = kernel::map(&memory);
    let at = map.vmalloc(MIB, &VmallocOptions::huge()).unwrap();
    memory.fail_allocations_after(Some(0));
    map.protect_part(pages(VirtAddr(at.0 + 12 * KIB), 50), Permissions::READ).unwrap();
    memory.fail_allocations_after(None);
    audit(&machine, &memory, &[&map]);
}

#[test]
fn unmapping_needs_no_memory() {
    let (machine, memory) = strict::<X86_64<4>>(16 * MIB);
    let map = kernel::map(&memory);
    let at = map.vmalloc(5 * MIB, &VmallocOptions::huge()).unwrap();
    let device = map.ioremap(PhysAddr(12 * GIB), 5 * MIB, MemoryType::Uncached).unwrap();
    memory.fail_allocations_after(Some(0));
    map.free_vmalloc(at).unwrap();
    map.free_ioremap(device).unwrap();
    map.purge();
    assert_eq!(testing::failed_allocations(&memory), 0);
    memory.fail_allocations_after(None);
    audit(&machine, &memory, &[&map]);
}
