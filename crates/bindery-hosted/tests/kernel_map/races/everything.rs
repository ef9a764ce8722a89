//! Everything at once: small and huge areas alternate in the same slots, so that tables are
//! detached and huge leaves replace them; cuts race with a writer in the cut area; and a dump runs.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;

use bindery::addr::{Frame, PAGE_SIZE, VirtAddr, VirtRange};
use bindery::arch::Permissions;
use bindery::platform::Cpu;
use bindery::{KernelAddress, KernelMap, Pauses, Reach, Resolution, VmallocOptions, VmapOptions};
use bindery_hosted::{Config, Machine, Walk};

use super::READ_WRITE;
use crate::support::areas::Areas;
use crate::support::kernel::{
    self, Finished, Numbers, assert_filled, audit, fill, map_with, pages, rounds, scattered,
};
use crate::support::{MIB, memory_with};

/// The shared knowledge of all CPUs.
struct Shared {
    finished: AtomicBool,
    /// The area that is being cut; 0 if none is.
    cut: AtomicU64,
    /// The number of areas that were cut and withdrawn from the writer.
    taken: AtomicU64,
    /// The number of withdrawn areas that the writer has left or never entered. The writer reads
    /// `taken` before it sees that `cut` is 0; in the opposite order it could also report the next
    /// area.
    left: AtomicU64,
}

/// The maximum number of retries of an access; the CPU that paused the page may be preempted.
const TRIES: u32 = 200_000;

/// Pages of the area that is being cut.
const CUT_PAGES: u64 = 1100;

pub fn everything<A: Walk>() {
    let config = Config { memory: 128 * MIB, cpus: 5, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let free = memory.free_frame_count();
    {
        let owner = kernel::map(&memory);
        let (_, list) = scattered(&owner, 700, 1);
        // So small that all areas share tables.
        let map = map_with(&memory, 24 * MIB, Reach::Table);
        map.set_purge_limit(300);
        let stays = machine.on_cpu(Cpu(0), || map.vmap(&list, &VmapOptions::default()).unwrap());
        let shared = Shared {
            finished: AtomicBool::new(false),
            cut: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            left: AtomicU64::new(0),
        };
        thread::scope(|scope| {
            let (machine, map, shared, list) = (&machine, &map, &shared, &list);
            let works = [
                scope.spawn(move || machine.on_cpu(Cpu(0), || alternate(machine, map, 1))),
                scope.spawn(move || machine.on_cpu(Cpu(1), || alternate(machine, map, 2))),
                scope.spawn(move || machine.on_cpu(Cpu(2), || cut(machine, map, shared))),
            ];
            scope.spawn(move || {
                // If the scenario panics, no thread waits for it.
                let _finished = Finished(&shared.finished);
                machine.on_cpu(Cpu(3), || dump(machine, map, shared, stays, list));
            });
            scope.spawn(move || {
                let _finished = Finished(&shared.finished);
                machine.on_cpu(Cpu(4), || write(machine, map, shared));
            });
            let _finished = Finished(&shared.finished);
            works.into_iter().for_each(|work| work.join().unwrap());
        });
        audit(&machine, &memory, &[&map, &owner]);
    }
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

/// Fills slots with small areas, empties them, and requests huge areas in their place.
fn alternate<A: Walk>(machine: &Machine<A>, map: &KernelMap<'_, Machine<A>>, seed: u64) {
    let mut numbers = Numbers(seed);
    for round in 0..rounds(60) {
        let mut areas = Vec::new();
        let small = VmallocOptions::default();
        for _ in 0..12 {
            let count = numbers.of_any_size(7);
            if let Ok(at) = map.vmalloc(count * PAGE_SIZE, &small) {
                fill(machine, map.root(), pages(at, count), seed << 40 | round);
                areas.push((at, count));
            }
        }
        let mut free = |areas: &mut Vec<(VirtAddr, u64)>| {
            for (at, count) in areas.drain(..) {
                assert_filled(machine, map.root(), pages(at, count), at, seed << 40 | round);
                map.free_vmalloc(at).unwrap();
            }
            if numbers.below(2) == 0 {
                map.purge();
            }
        };
        free(&mut areas);
        for _ in 0..2 {
            let options = VmallocOptions { pauses: Pauses::Never, ..VmallocOptions::huge() };
            if let Ok(at) = map.vmalloc(2 * MIB, &options) {
                fill(machine, map.root(), pages(at, 512), seed << 40 | round);
                areas.push((at, 512));
            }
        }
        free(&mut areas);
    }
}

/// Creates huge areas and cuts them to pieces while another CPU writes to them.
fn cut<A: Walk>(machine: &Machine<A>, map: &KernelMap<'_, Machine<A>>, shared: &Shared) {
    let mut numbers = Numbers(7);
    for _ in 0..rounds(25) {
        let Ok(at) = map.vmalloc(CUT_PAGES * PAGE_SIZE, &VmallocOptions::huge()) else { continue };
        fill(machine, map.root(), pages(at, CUT_PAGES), 0);
        shared.cut.store(at.0, SeqCst);
        for _ in 0..6 {
            let first = numbers.below(CUT_PAGES);
            let count = numbers.of_any_size(9).min(CUT_PAGES - first);
            let part = pages(VirtAddr(at.0 + first * PAGE_SIZE), count);
            for permissions in [Permissions::READ, READ_WRITE] {
                map.protect_part(part, permissions).unwrap();
                thread::yield_now();
            }
        }
        shared.cut.store(0, SeqCst);
        let taken = shared.taken.fetch_add(1, SeqCst) + 1;
        while shared.left.load(SeqCst) != taken && !shared.finished.load(SeqCst) {
            thread::yield_now();
        }
        map.free_vmalloc(at).unwrap();
    }
}

/// Reads and writes the area that is being cut. Each access sees the last written value.
fn write<A: Walk>(machine: &Machine<A>, map: &KernelMap<'_, Machine<A>>, shared: &Shared) {
    let mut numbers = Numbers(9);
    // A kernel access, repeated if it faults during a pause.
    let retry = |at: VirtAddr, needed: Permissions, access: &mut dyn FnMut() -> bool| {
        for _ in 0..TRIES {
            if access() {
                return true;
            }
            match map.resolve(at, needed) {
                Resolution::Retry => thread::yield_now(),
                Resolution::Denied => return false,
                Resolution::NotMapped => panic!("{at} is not mapped"),
            }
        }
        panic!("livelock: {at} may be used, and still faults");
    };
    while !shared.finished.load(SeqCst) {
        let taken = shared.taken.load(SeqCst);
        let start = shared.cut.load(SeqCst);
        if start == 0 {
            shared.left.store(taken, SeqCst);
            thread::yield_now();
            continue;
        }
        let mut known: Vec<_> = (0..CUT_PAGES).map(|page| start + page * PAGE_SIZE).collect();
        while shared.cut.load(SeqCst) == start {
            let page = numbers.below(CUT_PAGES);
            let at = VirtAddr(start + page * PAGE_SIZE);
            let mut bytes = [0; 8];
            let mut read = || machine.read_kernel(map.root(), at, &mut bytes).is_ok();
            assert!(retry(at, Permissions::READ, &mut read));
            assert_eq!(u64::from_ne_bytes(bytes), known[page as usize], "the content at {at}");
            let stamp = numbers.below(u64::MAX);
            let mut write = || machine.write_kernel(map.root(), at, &stamp.to_ne_bytes()).is_ok();
            if retry(at, READ_WRITE, &mut write) {
                known[page as usize] = stamp;
            }
        }
    }
}

/// Reads everything repeatedly. Permanent areas are always found complete, and no impossible state
/// is reported.
fn dump<A: Walk>(
    machine: &Machine<A>,
    map: &KernelMap<'_, Machine<A>>,
    shared: &Shared,
    stays: VirtAddr,
    list: &[Frame],
) {
    let mut numbers = Numbers(11);
    let range = pages(stays, list.len() as u64);
    let (first, count) = machine.frames();
    let memory = first.start().0..first.start().0 + u64::from(count) * PAGE_SIZE;
    while !shared.finished.load(SeqCst) {
        // Reads the count before the address, since the next area may reuse the address.
        let taken = shared.taken.load(SeqCst);
        let cut = shared.cut.load(SeqCst);
        let (mut last, mut end, mut seen) = (map.arena().start(), stays, 0);
        map.for_each_piece(map.arena(), |piece| {
            assert!(last <= piece.range.start(), "out of order");
            last = piece.range.end();
            assert!(memory.contains(&piece.to.0), "{piece:?} leads out of memory");
            if range.covers(piece.range) {
                assert_eq!(piece.range.start(), end, "a hole in what stays");
                let page = (end.0 - stays.0) / PAGE_SIZE;
                assert_eq!(piece.to, list[page as usize].start());
                end = piece.range.end();
            }
            seen += overlap(piece.range, cut);
        });
        assert_eq!(end, range.end(), "a part of what stays is missing");
        let is_same = shared.cut.load(SeqCst) == cut && shared.taken.load(SeqCst) == taken;
        if cut != 0 && is_same {
            assert_eq!(seen, CUT_PAGES, "pages of the area that is being cut");
        }
        for _ in 0..50 {
            let at = VirtAddr(map.arena().start().0 + numbers.below(map.arena().len()));
            let to = map.physical(at);
            assert!(to.is_none_or(|to| memory.contains(&to.0)));
            if let KernelAddress::Mapped { area, .. } = map.explain(at) {
                assert!(area.range.contains(at));
            }
            let page = numbers.below(list.len() as u64);
            let at = VirtAddr(stays.0 + page * PAGE_SIZE);
            assert_eq!(map.physical(at), Some(list[page as usize].start()));
        }
        let (mut last, mut met) = (map.arena().start(), false);
        map.for_each_area(|area| {
            assert!(last <= area.range.start(), "out of order");
            last = area.range.end();
            met |= area.range == range;
        });
        assert!(met, "what stays is an area");
        thread::yield_now();
    }
}

/// Pages of a range that belong to the area that is being cut.
fn overlap(range: VirtRange, cut: u64) -> u64 {
    if cut == 0 { 0 } else { range.intersection(pages(VirtAddr(cut), CUT_PAGES)).pages() }
}
