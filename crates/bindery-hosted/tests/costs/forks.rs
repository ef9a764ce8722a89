//! Forks of memory in folios of one page: the fork copies whole tables.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{Access, AddressSpace, PinTime};
use bindery_hosted::{Program, Walk};

use crate::support::{GIB, MIB, audit, fixed, options, strict, use_order};

on_every_architecture! {
    a_second_fork_flushes_only_written_pages => flushes;
    a_fork_copies_pinned_pages_among_others => pinned;
    an_exit_leaves_shared_pages_to_others => exits;
    a_fork_splits_no_huge_leaf => huge;
}

const AT: VirtAddr = VirtAddr(GIB);
const PAGES: u64 = 512;

fn page(number: u64) -> VirtAddr {
    VirtAddr(AT.0 + number * PAGE_SIZE)
}

fn flushes<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let parent = AddressSpace::new(&memory, options()).unwrap();
    parent.mmap(&fixed(AT.0, PAGES * PAGE_SIZE)).unwrap();
    let program = Program::new(&machine, &parent);
    let write = |number| program.store(page(number), number).unwrap();
    (0..PAGES).for_each(write);
    let first = parent.fork().unwrap();
    [100, 102, 107].into_iter().for_each(write);
    let before = parent.counts();
    let second = parent.fork().unwrap();
    let counts = parent.counts() - before;
    assert_eq!((counts.invalidations, counts.pages_invalidated), (1, 8), "from 100 to 107");
    audit(&machine, &memory, &[&parent, &first, &second]);
}

/// Pages whose entries cannot be shared, before, among and behind those that can.
fn pinned<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let parent = AddressSpace::new(&memory, options()).unwrap();
    parent.mmap(&fixed(AT.0, PAGES * PAGE_SIZE)).unwrap();
    let program = Program::new(&machine, &parent);
    // Some pages are never touched.
    let touched = |number: &u64| number % 7 != 3;
    for number in (0..PAGES).filter(touched) {
        program.store(page(number), number).unwrap();
    }
    let numbers = [0, 50, 51, 200, PAGES - 1];
    let pins = numbers.map(|number| parent.pin(page(number), 1, Access::Write, PinTime::Long));
    let pins = pins.map(Result::unwrap);
    let child = parent.fork().unwrap();
    let of_child = Program::new(&machine, &child);
    for number in 0..PAGES {
        let content = if touched(&number) { number } else { 0 };
        assert_eq!(of_child.load(page(number)), Ok(content), "page {number} of the child");
    }
    let before = parent.counts();
    for number in numbers {
        program.store(page(number), 1 << 32).unwrap();
        let content = if touched(&number) { number } else { 0 };
        assert_eq!(
            of_child.load(page(number)),
            Ok(content),
            "page {number}, written by the parent"
        );
    }
    assert_eq!((parent.counts() - before).bytes_copied, 0, "pinned pages stay the parent's");
    audit(&machine, &memory, &[&parent, &child]);
    drop(pins);
}

/// A child exits, then its parent. Both have private pages among the shared pages.
fn exits<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let free = memory.free_frame_count();
    let parent = AddressSpace::new(&memory, options()).unwrap();
    parent.mmap(&fixed(AT.0, PAGES * PAGE_SIZE)).unwrap();
    let program = Program::new(&machine, &parent);
    (0..PAGES).for_each(|number| program.store(page(number), number).unwrap());
    let (first, second) = (parent.fork().unwrap(), parent.fork().unwrap());
    let writes = |space, of: [u64; 3], value| {
        let program = Program::new(&machine, space);
        of.into_iter().for_each(|number| program.store(page(number), value).unwrap());
    };
    writes(&first, [0, 7, 300], 1 << 32);
    writes(&second, [7, 8, PAGES - 1], 2 << 32);
    let before = memory.free_frame_count();
    drop(first);
    memory.trim();
    assert!(memory.free_frame_count() >= before + 3, "the first child's own pages");
    audit(&machine, &memory, &[&parent, &second]);
    // Unmaps only a part, so the table is not freed.
    parent.munmap(page(5), 200 * PAGE_SIZE).unwrap();
    audit(&machine, &memory, &[&parent, &second]);
    drop(parent);
    let of_child = Program::new(&machine, &second);
    for number in 0..PAGES {
        let content = if [7, 8, PAGES - 1].contains(&number) { 2 << 32 } else { number };
        assert_eq!(of_child.load(page(number)), Ok(content), "page {number}");
    }
    audit(&machine, &memory, &[&second]);
    drop(second);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "pages are lost");
    audit(&machine, &memory, &[]);
}

/// More huge leaves than one lock span copies, in a mapping that begins and ends with base pages.
fn huge<A: Walk>() {
    const LEAF: u64 = 2 * MIB;
    const LEAVES: u64 = 45;
    let (machine, memory) = strict::<A>(128 * MIB);
    use_order(&memory, 9);
    let parent = AddressSpace::new(&memory, options()).unwrap();
    let edge = 3 * PAGE_SIZE;
    parent.mmap(&fixed(AT.0 - edge, LEAVES * LEAF + 2 * edge)).unwrap();
    let program = Program::new(&machine, &parent);
    let leaf = |number| VirtAddr(AT.0 + number * LEAF);
    // Two of the leaves' addresses stay empty.
    let touched = |number: &u64| ![4, 30].contains(number);
    (0..LEAVES).filter(touched).for_each(|number| program.store(leaf(number), number).unwrap());
    let edges = [VirtAddr(AT.0 - PAGE_SIZE), leaf(LEAVES)];
    edges.into_iter().for_each(|at| program.store(at, 1 << 32).unwrap());
    let before = parent.counts();
    let child = parent.fork().unwrap();
    let cost = parent.counts() - before;
    assert_eq!(cost.entries_written, LEAVES - 2 + 2, "{cost:?}");
    assert_eq!((cost.tables_allocated, cost.bytes_copied), (0, 0), "{cost:?}");
    audit(&machine, &memory, &[&parent, &child]);
    let of_child = Program::new(&machine, &child);
    for number in (0..LEAVES).filter(touched) {
        assert_eq!(of_child.load(leaf(number)), Ok(number), "leaf {number}");
    }
    edges.into_iter().for_each(|at| assert_eq!(of_child.load(at), Ok(1 << 32)));
}
