//! Many mappings in one address space, and of one object: the steps of a call are logarithmic in
//! the number of mappings.

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::arch::X86_64;
use bindery::{
    Access, AddressSpace, FileAccess, Growth, MapObject, MapRequest, Memory, Object, Place,
    Sharing, SpaceOptions,
};
use bindery_hosted::{Config, Machine, MemoryFiles, TlbKind};

use crate::support::objects;
use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, memory_with, options};

type X = X86_64<4>;
type Space<'m> = AddressSpace<'m, Machine<X>>;

const RW: FileAccess = FileAccess::READ.union(FileAccess::WRITE);

fn plain(memory: u64, seed: u64) -> (Machine<X>, Memory<Machine<X>>) {
    memory_with(Config { memory, seed, tlb: TlbKind::Plain, ..Config::default() })
}

/// The maximum number of mappings that `work` makes the address space visit, over the arguments
/// that `each` supplies.
fn most<T>(space: &Space<'_>, each: impl Iterator<Item = T>, work: impl Fn(T)) -> u64 {
    each.map(|one| {
        let before = space.mappings_looked_at();
        work(one);
        space.mappings_looked_at() - before
    })
    .max()
    .unwrap_or(0)
}

/// The address of mapping `number` of many.
fn at(number: u64) -> VirtAddr {
    VirtAddr(GIB + 2 * number * PAGE_SIZE)
}

#[test]
fn keeping_flat_towers_slows_no_fault_down() {
    // Simulates address spaces that all draw the same heights, which a program could predict.
    let mut random = 1_u64;
    let mut height = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        1 + random.wrapping_mul(0x2545_f491_4f6c_dd1d).leading_zeros() / 2
    };
    let (machine, memory) = plain(512 * MIB, 1);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let (mut kept, mut number) = (Vec::new(), 0);
    while kept.len() < 12_000 {
        space.mmap(&fixed(at(number).0, PAGE_SIZE)).unwrap();
        if height() > 1 {
            space.munmap(at(number), PAGE_SIZE).unwrap();
        } else {
            kept.push(at(number));
        }
        number += 1;
    }
    let looked = most(&space, kept.into_iter(), |at| {
        space.fault(at, Access::Read).unwrap();
    });
    assert!(looked <= 120, "a fault among 12,000 mappings looks at {looked}");
    audit(&machine, &memory, &[&space]);
}

/// The steps of faults in each of 200 mappings.
fn looked<'m>(space: &Space<'m>) -> Vec<u64> {
    for number in 0..200 {
        space.mmap(&fixed(at(number).0, PAGE_SIZE)).unwrap();
    }
    let cost = |number| {
        let before = space.mappings_looked_at();
        space.fault(at(number), Access::Read).unwrap();
        space.mappings_looked_at() - before
    };
    (0..200).map(cost).collect()
}

#[test]
fn heights_differ_between_spaces_and_between_seeds() {
    let machines = [7, 7, 8].map(|seed| plain(64 * MIB, seed));
    let [alike, same, other] =
        machines.each_ref().map(|(_, memory)| AddressSpace::new(memory, options()).unwrap());
    let second = AddressSpace::new(&machines[0].1, options()).unwrap();
    let first = looked(&alike);
    assert_eq!(first, looked(&same), "the same seed, and the same place");
    assert_ne!(first, looked(&other), "another seed");
    assert_ne!(first, looked(&second), "another address space");
}

/// The number of mappings that `work` makes the address space visit for all of `each`.
fn all<T>(space: &Space<'_>, each: impl Iterator<Item = T>, work: impl FnMut(T)) -> u64 {
    let before = space.mappings_looked_at();
    each.for_each(work);
    space.mappings_looked_at() - before
}

#[test]
fn mmap_and_munmap_search_few_times() {
    let (machine, memory) = plain(GIB, 3);
    let space = AddressSpace::new(&memory, options()).unwrap();
    for number in 0..10_000 {
        space.mmap(&fixed(at(number).0, PAGE_SIZE)).unwrap();
        space.fault(at(number), Access::Read).unwrap();
    }
    let some = || (0..10_000).step_by(7).map(at);
    // A fault searches once.
    let once = all(&space, some(), |at| {
        space.fault(at, Access::Read).unwrap();
    });
    // The first mapping in the range, once more after the supplies, and the removal.
    let unmap = all(&space, some(), |at| space.munmap(at, PAGE_SIZE).unwrap());
    assert!(2 * unmap <= 7 * once, "munmap looks at {unmap}, one search at {once}");
    // The place, the mapping after it, the mapping before it, and the insertion.
    let map = all(&space, some(), |at| {
        let request = MapRequest { place: Place::Near(at), ..fixed(at.0, PAGE_SIZE) };
        assert_eq!(space.mmap(&request).unwrap(), at);
    });
    assert!(2 * map <= 9 * once, "mmap looks at {map}, one search at {once}");
    audit(&machine, &memory, &[&space]);
}

#[test]
fn many_mappings_cost_each_call_a_logarithm() {
    let (machine, memory) = plain(GIB, 3);
    let limits = SpaceOptions { maximum_mappings: 1 << 20, ..options() };
    let mut before = None;
    for count in [1_000, 10_000, 100_000] {
        let space = AddressSpace::new(&memory, limits).unwrap();
        let numbers = || 0..count;
        let map = most(&space, numbers(), |number| {
            space.mmap(&fixed(at(number).0, PAGE_SIZE)).unwrap();
        });
        let fault = most(&space, numbers(), |number| {
            space.fault(at(number), Access::Read).unwrap();
        });
        let looked = space.mappings_looked_at();
        let child = space.fork().unwrap();
        let fork = (space.mappings_looked_at() - looked + child.mappings_looked_at()) / count;
        drop(child);
        let unmap = most(&space, numbers().step_by(3), |number| {
            space.munmap(at(number), PAGE_SIZE).unwrap();
        });
        let costs = [map, fault, unmap, fork];
        println!("{count} mappings: mmap, fault, munmap, fork of one look at {costs:?}");
        // A search visits 4.5 nodes on each of log4(n) levels on average, and at most three times
        // as many.
        let bound = 14 * u64::from(count.ilog2().div_ceil(2));
        assert!(fault <= bound, "a fault among {count} looks at {fault}, {bound} are allowed");
        // A call performs up to ten searches and also measures its changes.
        assert!(costs.iter().all(|cost| *cost <= 8 * bound), "{count}: {costs:?}");
        if let Some(before) = before.replace(costs) {
            let grown = costs.iter().zip(before).all(|(now, then)| *now <= 2 * then + 20);
            assert!(grown, "ten times as many mappings: {before:?} becomes {costs:?}");
        }
        if count < 100_000 {
            audit(&machine, &memory, &[&space]);
        }
    }
}

/// Maps page `page` of the object at the address of mapping `number`.
fn map_page<'m>(space: &Space<'m>, object: &Object<'m, Machine<X>>, number: u64, page: u64) {
    let request = MapRequest {
        length: PAGE_SIZE,
        protection: READ_WRITE,
        place: Place::Fixed(at(number)),
        sharing: Sharing::Shared,
        ..MapRequest::default()
    };
    space
        .mmap_object(&request, &MapObject { object, offset: page * PAGE_SIZE, access: RW })
        .unwrap();
}

/// The steps in the object's tree during `work`.
fn steps<R>(object: &Object<'_, Machine<X>>, work: impl FnOnce() -> R) -> u64 {
    let before = object.mapping_steps();
    work();
    object.mapping_steps() - before
}

#[test]
fn sync_of_scattered_pages_visits_each_mapping_once() {
    for count in [500, 1_000, 2_000, 4_000] {
        let (machine, memory) = plain(256 * MIB, 0);
        let files = MemoryFiles::new();
        let file = memory.file(&files, 1, 2 * count * PAGE_SIZE).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        for number in 0..count {
            // Every second page of the file, each in its own VMA.
            map_page(&space, &file, number, 2 * number);
            space.fault(at(number), Access::Write).unwrap();
        }
        // The work of another process that has the file open.
        let sync = steps(&file, || file.sync(0, 2 * count * PAGE_SIZE).unwrap());
        let bound = count * (8 + 8 * u64::from(count.ilog2()));
        println!("{count} mappings: {sync} steps, {bound} are allowed");
        assert!(sync <= bound, "sync of {count} scattered pages takes {sync} steps");
        let again = steps(&file, || file.sync(0, 2 * count * PAGE_SIZE).unwrap());
        assert_eq!(again, 0, "nothing is dirty");
        audit(&machine, &memory, &[&space]);
    }
}

#[test]
fn an_objects_many_mappings_cost_a_logarithm() {
    let mut before = None;
    for count in [100, 1_000, 10_000] {
        let (machine, memory) = plain(512 * MIB, 0);
        let object = objects::memfd(&memory, 4 * PAGE_SIZE);
        let space = AddressSpace::new(&memory, options()).unwrap();
        // All mappings map page 0 except one, which maps page 2.
        let each = |number| if number == count / 2 { 2 } else { 0 };
        let most = (0..count)
            .map(|number| steps(&object, || map_page(&space, &object, number, each(number))));
        let map = most.max().unwrap_or(0);
        space.fault(at(count / 2), Access::Write).unwrap();
        let punch = steps(&object, || object.punch_hole(2 * PAGE_SIZE, PAGE_SIZE).unwrap());
        let fork = steps(&object, || drop(space.fork().unwrap())) / count;
        let all = steps(&object, || object.set_size(0).unwrap()) / count;
        let unmap = (0..count)
            .step_by(7)
            .map(|number| steps(&object, || space.munmap(at(number), PAGE_SIZE).unwrap()))
            .max()
            .unwrap_or(0);
        let costs = [map, punch, fork, all, unmap];
        println!("{count} mappings: mmap, punch, fork and truncate of one, munmap take {costs:?}");
        let bound = 20 * u64::from(count.ilog2());
        assert!(costs.iter().all(|cost| *cost <= bound), "{count}: {costs:?}, allowed {bound}");
        if let Some(before) = before.replace(costs) {
            let grown = costs.iter().zip(before).all(|(now, then)| *now <= 2 * then + 20);
            assert!(grown, "ten times as many mappings: {before:?} becomes {costs:?}");
        }
        audit(&machine, &memory, &[&space]);
    }
}

#[test]
fn sync_of_a_clean_file_reads_no_page() {
    let mut before = None;
    for pages in [1 << 12, 1 << 14, 1 << 16] {
        let (machine, memory) = plain(512 * MIB, 0);
        let files = MemoryFiles::new();
        let file = memory.file(&files, 1, pages * PAGE_SIZE).unwrap();
        let mut buffer = vec![0; 2 << 20];
        for offset in (0..pages * PAGE_SIZE).step_by(buffer.len()) {
            file.read(offset, &mut buffer).unwrap();
        }
        assert_eq!(file.resident_pages(), pages);
        let looked = file.page_steps();
        file.sync(0, u64::MAX).unwrap();
        let looked = file.page_steps() - looked;
        assert!(looked <= 8, "sync of {pages} clean pages looks at {looked} nodes and slots");
        assert!(before.replace(looked).is_none_or(|before| looked <= before + 1));
        audit(&machine, &memory, &[]);
    }
}

#[test]
fn pages_in_consecutive_frames_are_counted_once() {
    let pages = 1 << 14;
    let (machine, memory) = plain(256 * MIB, 0);
    // Frees all memory from the highest frame to the lowest, so that folios of one page get
    // consecutive frames.
    let mut all = Vec::new();
    while let Some(frames) = memory.allocate_frames(Order(10)) {
        all.push(frames);
    }
    all.sort_by_key(|frames| frames.first.0);
    for frames in all.into_iter().rev() {
        // SAFETY: 1. the test allocated the frames; 2. nothing maps or uses them.
        assert!(unsafe { memory.free_frames(frames) });
    }
    let object = objects::memfd(&memory, pages * PAGE_SIZE);
    object.allocate(0, pages * PAGE_SIZE, Growth::Forbidden).unwrap();
    let looked = object.page_steps();
    object.allocate(0, pages * PAGE_SIZE, Growth::Forbidden).unwrap();
    let looked = object.page_steps() - looked;
    assert!(looked <= 16 * pages, "{looked} nodes and slots for {pages} pages that are there");
    audit(&machine, &memory, &[]);
}
