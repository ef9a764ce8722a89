//! The vmalloc tests of kernels: one size repeatedly, an arena filled to the last page, very many
//! areas, random sizes and alignments, frees by the thousand, all CPUs at once. Contents are
//! verified; the work is bounded by counts, never by times.

use std::thread;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, MemoryType, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Content, KernelAddress, KernelMap, KernelMapError, Reach, UnmapTime, VmallocOptions,
    VmapOptions,
};
use bindery_hosted::{Config, Machine, Walk};

use crate::support::areas::Areas;
use crate::support::kernel::{
    Numbers, assert_filled, audit, fill, map, map_with, pages, rounds, scattered,
};
use crate::support::{KIB, MIB, memory_with, strict};

on_every_architecture! {
    one_size_is_allocated_and_freed_repeatedly => fixed_size;
    the_window_is_filled_to_the_last_page => full_fit;
    sizes_at_random_keep_their_contents => random_sizes;
    alignments_at_random_are_kept => random_alignments;
    every_power_of_two_is_an_alignment => powers_of_two;
    pages_are_aligned_far_beyond_their_size => fixed_alignment;
    thousands_of_frees_are_purged_at_every_limit => purge_storms;
    all_cpus_allocate_at_once => many_threads;
    an_area_becomes_larger_and_smaller_and_moves => resizing;
    moved_frames_wait_for_their_old_addresses_flush => moved_frames;
    a_smaller_area_elsewhere_frees_the_rest => realigned;
}

type Map<'m, A> = KernelMap<'m, Machine<A>>;

/// Runs `scenario` with a map and verifies that everything is freed.
fn on_map<A: Walk>(arena: u64, scenario: impl FnOnce(&Machine<A>, &Map<'_, A>)) {
    let (machine, memory) = strict::<A>(64 * MIB);
    let free = memory.free_frame_count();
    {
        let map = map_with(&memory, arena, Reach::Table);
        scenario(&machine, &map);
        audit(&machine, &memory, &[&map]);
    }
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

/// Both ways to request memory.
fn both() -> [VmallocOptions; 2] {
    [VmallocOptions::default(), VmallocOptions::huge()]
}

fn fixed_size<A: Walk>() {
    on_map::<A>(1 << 33, |machine, map| {
        for round in 0..rounds(200) {
            let options = both()[(round % 2) as usize];
            let count = [3, 10, 64, 517][(round % 4) as usize];
            let at = map.vmalloc(count * PAGE_SIZE, &options).unwrap();
            fill(machine, map.root(), pages(at, count), round);
            assert_filled(machine, map.root(), pages(at, count), at, round);
            map.free_vmalloc(at).unwrap();
        }
    });
}

fn full_fit<A: Walk>() {
    on_map::<A>(4 * MIB, |machine, map| {
        for (count, options) in [(3, both()[0]), (15, both()[1]), (1, both()[0]), (127, both()[1])]
        {
            for round in 0..2 {
                let mut areas = Vec::new();
                let problem = loop {
                    match map.vmalloc(count * PAGE_SIZE, &options) {
                        Ok(at) => areas.push(at),
                        Err(problem) => break problem,
                    }
                };
                assert_eq!(problem, KernelMapError::OutOfAddresses);
                // Fills the arena to the last page that fits, guard pages included.
                if options == both()[0] {
                    assert_eq!(areas.len() as u64, 1024 / (count + 1));
                }
                for at in &areas {
                    fill(machine, map.root(), pages(*at, count), round);
                }
                for at in &areas {
                    assert_filled(machine, map.root(), pages(*at, count), *at, round);
                }
                // Frees every second one: holes of exactly this size.
                let (holes, rest): (Vec<_>, Vec<_>) =
                    areas.into_iter().enumerate().partition(|(index, _)| index % 2 == 0);
                holes.iter().for_each(|(_, at)| map.free_vmalloc(*at).unwrap());
                let mut again = Vec::new();
                for _ in &holes {
                    again.push(map.vmalloc(count * PAGE_SIZE, &options).unwrap());
                }
                let mut expected: Vec<_> = holes.iter().map(|(_, at)| *at).collect();
                again.sort();
                expected.sort();
                assert_eq!(again, expected, "each hole is filled again");
                let rest = rest.into_iter().map(|(_, at)| at);
                rest.chain(again).for_each(|at| map.free_vmalloc(at).unwrap());
                map.purge();
            }
        }
    });
}

/// Tens of thousands of areas: each call finds the right place at the cost of one walk. (The search
/// is logarithmic, but the index does not count steps.)
#[test]
fn a_free_place_among_thousands_is_found() {
    let (machine, memory) = strict::<X86_64<4>>(256 * MIB);
    let map = map(&memory);
    map.set_purge_limit(u64::MAX);
    let (_, list) = scattered(&map, 1, 1);
    let options = VmapOptions::default();
    let areas: Vec<_> = (0..30_000).map(|_| map.vmap(&list, &options).unwrap()).collect();
    assert!(areas.is_sorted(), "the lowest free place each time");
    let before = map.counts();
    let mut last = areas[areas.len() - 1];
    for _ in 0..100 {
        let at = map.vmap(&list, &options).unwrap();
        assert!(at > last);
        last = at;
    }
    let cost = map.counts() - before;
    // One walk and one store each, whatever other areas exist.
    assert!(cost.entries_descended <= 100 * 4, "{cost:?}");
    assert!(cost.entries_written <= 100 + 2, "{cost:?}");
    // The search finds single holes among the areas, the lowest first.
    let mut holes: Vec<_> = areas.iter().copied().step_by(997).collect();
    holes.iter().for_each(|at| map.free_vmap(*at, UnmapTime::Later).unwrap());
    map.purge();
    for hole in &holes {
        assert_eq!(map.vmap(&list, &options), Ok(*hole));
    }
    holes.clear();
    // An area larger than each hole is placed behind all others.
    let large = map.vmalloc(5 * PAGE_SIZE, &VmallocOptions::default()).unwrap();
    assert!(large > last);
    let mut told = 0;
    map.for_each_area(|_| told += 1);
    assert_eq!(told, 30_000 + 100 + 2);
    audit(&machine, &memory, &[&map]);
    let freed = map.counts();
    areas.iter().for_each(|at| map.free_vmap(*at, UnmapTime::Later).unwrap());
    map.purge();
    let cost = map.counts() - freed;
    assert!(cost.invalidations <= 30_000 / 256 + 1, "{cost:?}");
    assert!(cost.entries_descended <= 30_000 * 8, "{cost:?}");
    audit(&machine, &memory, &[&map]);
}

fn random_sizes<A: Walk>() {
    on_map::<A>(64 * MIB, |machine, map| {
        let mut numbers = Numbers(1);
        let mut areas: Vec<(VirtAddr, u64, u64)> = Vec::new();
        for round in 0..rounds(300) {
            let count = numbers.of_any_size(10);
            let content = if round % 3 == 0 { Content::Zeroes } else { Content::Any };
            let options = VmallocOptions { content, ..both()[(round % 2) as usize] };
            if let Ok(at) = map.vmalloc(count * PAGE_SIZE, &options) {
                if content == Content::Zeroes {
                    let last = VirtAddr(at.0 + count * PAGE_SIZE - 8);
                    let mut bytes = [1; 8];
                    machine.read_kernel(map.root(), last, &mut bytes).unwrap();
                    assert_eq!(bytes, [0; 8]);
                }
                fill(machine, map.root(), pages(at, count), round);
                areas.push((at, count, round));
            }
            while areas.len() > 24 || areas.iter().map(|(_, count, _)| count).sum::<u64>() > 8000 {
                let (at, count, stamp) =
                    areas.swap_remove(numbers.below(areas.len() as u64) as usize);
                assert_filled(machine, map.root(), pages(at, count), at, stamp);
                map.free_vmalloc(at).unwrap();
            }
        }
        for (at, count, stamp) in areas {
            assert_filled(machine, map.root(), pages(at, count), at, stamp);
        }
    });
}

fn random_alignments<A: Walk>() {
    on_map::<A>(1 << 33, |machine, map| {
        let mut numbers = Numbers(2);
        for round in 0..rounds(150) {
            let align = PAGE_SIZE << numbers.below(14);
            let count = 1 + numbers.below(20);
            let options = VmallocOptions { align, ..both()[(round % 2) as usize] };
            let at = map.vmalloc(count * PAGE_SIZE, &options).unwrap();
            assert!(at.is_aligned(align), "{at} {align:#x}");
            fill(machine, map.root(), pages(at, count), round);
            assert_filled(machine, map.root(), pages(at, count), at, round);
            if round % 4 != 0 {
                map.free_vmalloc(at).unwrap();
            }
        }
    });
}

fn powers_of_two<A: Walk>() {
    on_map::<A>(1 << 33, |_, map| {
        for shift in 0..64 {
            let options = VmallocOptions { align: 1 << shift, ..VmallocOptions::default() };
            let result = map.vmalloc(PAGE_SIZE, &options);
            match result {
                Err(KernelMapError::BadAlignment) => assert!(shift < 12),
                Err(KernelMapError::OutOfAddresses) => {
                    let start = map.arena().start().0;
                    let fits = start.checked_next_multiple_of(1 << shift);
                    let inside = fits.filter(|at| at + 2 * PAGE_SIZE <= map.arena().end().0);
                    assert!(inside.is_none() || inside == Some(start), "1 << {shift}");
                }
                result => {
                    let at = result.unwrap();
                    assert!(at.is_aligned(1 << shift.max(12)));
                    map.free_vmalloc(at).unwrap();
                }
            }
        }
    });
}

fn fixed_alignment<A: Walk>() {
    on_map::<A>(1 << 33, |machine, map| {
        // Many small areas with an alignment of 256 pages leave gaps between all of them.
        let options = VmallocOptions { align: MIB, ..VmallocOptions::default() };
        let areas: Vec<_> =
            (0..100).map(|_| map.vmalloc(5 * PAGE_SIZE, &options).unwrap()).collect();
        for (at, next) in areas.iter().zip(&areas[1..]) {
            assert_eq!(next.0 - at.0, MIB, "no place is left out");
        }
        for (stamp, at) in (0..).zip(&areas) {
            fill(machine, map.root(), pages(*at, 5), stamp);
        }
        // The gaps can still be used.
        let between = map.vmalloc(200 * PAGE_SIZE, &VmallocOptions::default()).unwrap();
        assert!(between < areas[99]);
        for (stamp, at) in (0..).zip(&areas) {
            assert_filled(machine, map.root(), pages(*at, 5), *at, stamp);
            map.free_vmalloc(*at).unwrap();
        }
    });
}

fn purge_storms<A: Walk>() {
    on_map::<A>(1 << 33, |machine, map| {
        for limit in [0, 1, 7, 100, u64::MAX] {
            map.set_purge_limit(limit);
            let before = map.counts();
            let (mut freed, mut areas) = (0, Vec::new());
            for round in 0..rounds(1200) {
                let count = 1 + round % 3;
                let at = map.vmalloc(count * PAGE_SIZE, &VmallocOptions::default()).unwrap();
                if round % 16 == 0 {
                    fill(machine, map.root(), pages(at, count), round);
                    assert_filled(machine, map.root(), pages(at, count), at, round);
                }
                areas.push((at, count));
                if round % 8 == 7 {
                    for (at, count) in areas.drain(..) {
                        map.free_vmalloc(at).unwrap();
                        freed += count;
                        assert!(map.freed_pages() <= limit);
                    }
                }
            }
            let purges = (map.counts() - before).invalidations;
            if !A::INVALID_MAY_BE_CACHED {
                assert!(purges <= freed / limit.saturating_add(1).min(3) + 1, "{limit}: {purges}");
                assert_eq!(purges == 0, limit == u64::MAX);
            }
            map.purge();
            assert_eq!(map.freed_pages(), 0);
        }
    });
}

fn many_threads<A: Walk>() {
    const CPUS: u16 = 4;
    let config = Config { memory: 128 * MIB, cpus: CPUS, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let free = memory.free_frame_count();
    {
        let map = map(&memory);
        map.set_purge_limit(500);
        let work = |cpu: u64| {
            let mut numbers = Numbers(cpu);
            let mut areas = Vec::new();
            for round in 0..rounds(250) {
                let count = numbers.of_any_size(10);
                let align = if round % 7 == 0 { 64 * KIB } else { PAGE_SIZE };
                let options = VmallocOptions { align, ..both()[numbers.below(2) as usize] };
                let at = map.vmalloc(count * PAGE_SIZE, &options).unwrap();
                let stamp = cpu << 32 | round;
                fill(&machine, map.root(), pages(at, count), stamp);
                areas.push((at, count, stamp));
                if areas.len() > 6 {
                    let which = numbers.below(areas.len() as u64) as usize;
                    let (at, count, stamp) = areas.swap_remove(which);
                    assert_filled(&machine, map.root(), pages(at, count), at, stamp);
                    map.free_vmalloc(at).unwrap();
                }
            }
            for (at, count, stamp) in areas {
                assert_filled(&machine, map.root(), pages(at, count), at, stamp);
                map.free_vmalloc(at).unwrap();
            }
        };
        thread::scope(|scope| {
            for cpu in 0..CPUS {
                let (machine, work) = (&machine, &work);
                scope.spawn(move || machine.on_cpu(Cpu(cpu), || work(u64::from(cpu))));
            }
        });
        audit(&machine, &memory, &[&map]);
        let mut left = 0;
        map.for_each_area(|_| left += 1);
        assert_eq!(left, 0);
    }
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

fn resizing<A: Walk>() {
    on_map::<A>(1 << 33, |machine, map| {
        map.set_purge_limit(u64::MAX);
        let options = VmallocOptions { content: Content::Zeroes, ..VmallocOptions::huge() };
        let mut at = map.vmalloc(PAGE_SIZE, &options).unwrap();
        let (mut numbers, mut count, mut from) = (Numbers(3), 1, at);
        fill(machine, map.root(), pages(at, 1), 0);
        for round in 0..rounds(60) {
            let new = numbers.of_any_size(11);
            // Sometimes a neighbor prevents that.
            let neighbor = (round % 3 == 0).then(|| map.vmalloc(1, &options).unwrap());
            let moved = map.resize_vmalloc(at, new * PAGE_SIZE, &options).unwrap();
            let kept = new.min(count);
            assert_filled(machine, map.root(), pages(moved, kept), from, 0);
            for page in kept..new {
                let mut bytes = [1; 8];
                let place = VirtAddr(moved.0 + page * PAGE_SIZE);
                machine.read_kernel(map.root(), place, &mut bytes).unwrap();
                assert_eq!(bytes, [0; 8]);
            }
            if moved != at {
                assert!(matches!(
                    map.explain(at),
                    KernelAddress::Freed { .. } | KernelAddress::Free
                ));
            }
            (at, count, from) = (moved, new, moved);
            fill(machine, map.root(), pages(at, count), 0);
            neighbor.iter().step_by(2).for_each(|at| map.free_vmalloc(*at).unwrap());
        }
    });
}

/// TLBs may still have the former addresses of moved frames. Neither a smaller size nor a purge of
/// very many areas may free the frames before a flush of those addresses.
fn moved_frames<A: Walk>() {
    on_map::<A>(1 << 33, |machine, map| {
        map.set_purge_limit(u64::MAX);
        for others in [0, 10, 255, 256, 300, 600] {
            let old = map.vmalloc(4 * PAGE_SIZE, &VmallocOptions::default()).unwrap();
            let behind = map.vmalloc(PAGE_SIZE, &VmallocOptions::default()).unwrap();
            fill(machine, map.root(), pages(old, 4), 1);
            let options = VmallocOptions::default();
            let many: Vec<_> = (0..others).map(|_| map.vmalloc(1, &options).unwrap()).collect();
            let new = map.resize_vmalloc(old, 8 * PAGE_SIZE, &options).unwrap();
            assert_ne!(new, old);
            if others == 10 {
                map.resize_vmalloc(new, PAGE_SIZE, &options).unwrap();
            }
            many.iter().for_each(|at| map.free_vmalloc(*at).unwrap());
            map.free_vmalloc(new).unwrap();
            map.purge();
            map.free_vmalloc(behind).unwrap();
            map.purge();
        }
    });
}

/// A stricter alignment moves an area that becomes smaller.
fn realigned<A: Walk>() {
    on_map::<A>(1 << 33, |_, map| {
        map.set_purge_limit(u64::MAX);
        let one = map.vmalloc(PAGE_SIZE, &VmallocOptions::default()).unwrap();
        let start = map.vmalloc(512 * PAGE_SIZE, &VmallocOptions::default()).unwrap();
        let align = 1 << (start.0.trailing_zeros() + 1);
        let options = VmallocOptions { align, ..VmallocOptions::default() };
        let before = map.memory().free_frame_count();
        let moved = map.resize_vmalloc(start, PAGE_SIZE, &options).unwrap();
        assert!(moved != start && moved.is_aligned(align));
        // Tables of the new address may be new.
        let freed = map.memory().free_frame_count() - before;
        assert!((508..=511).contains(&freed), "{freed} frames");
        map.free_vmalloc(moved).unwrap();
        map.free_vmalloc(one).unwrap();
    });
}

#[test]
fn lists_of_equal_frames_are_mapped_repeatedly() {
    on_map::<AArch64>(1 << 33, |machine, map| {
        let (owner, list) = scattered(map, 64, 1);
        fill(machine, map.root(), pages(owner, 64), 5);
        let views: Vec<_> =
            (0..40).map(|_| map.vmap(&list, &VmapOptions::default()).unwrap()).collect();
        for view in &views {
            assert_filled(machine, map.root(), pages(*view, 64), owner, 5);
        }
        let uncached = VmapOptions { memory: MemoryType::WriteCombining, ..VmapOptions::default() };
        let view = map.vmap(&list, &uncached).unwrap();
        assert_filled(machine, map.root(), pages(view, 64), owner, 5);
        for view in views {
            map.free_vmap(view, UnmapTime::Later).unwrap();
        }
    });
}
