//! Programs' advice about their memory, and its effects: guards, collapse, forks.

use bindery::addr::{Order, PAGE_SIZE, VirtAddr, VirtRange};
use bindery::arch::Level;
use bindery::{
    Access, AddressSpace, Advice, CollapseLimits, Error, FaultError, Inspection, MapFlags,
    MapRequest, PinTime, Place, Sharing, SizeMode, testing,
};
use bindery_hosted::{Program, Walk};

use crate::support::{self, GIB, MIB, audit, fixed, options, strict};

const AT: VirtAddr = VirtAddr(GIB);

fn page(number: u64) -> VirtAddr {
    VirtAddr(AT.0 + number * PAGE_SIZE)
}

fn guards_stand_until_they_are_lifted<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT.0, 4 * MIB)).unwrap();
    let program = Program::new(&machine, &space);
    program.fill(AT, 4 * MIB, 7).unwrap();
    // One whole table span and a bit: one entry of level 2, and a few of level 1.
    let before = space.counts();
    space.madvise(AT, 2 * MIB + 3 * PAGE_SIZE, Advice::GuardInstall).unwrap();
    let cost = space.counts() - before;
    assert!(cost.entries_written < 20, "{cost:?}");
    assert_eq!(space.mapping_count(), 1, "no mapping is cut");
    for guarded in [0, 511, 512, 514] {
        assert_eq!(program.load(page(guarded)), Err(FaultError::NotMapped));
        assert_eq!(program.store(page(guarded), 1), Err(FaultError::NotMapped));
    }
    assert_eq!(program.load(page(515)), Ok(0x0707_0707_0707_0707));
    // Neither dropping contents nor forking removes guards.
    space.madvise(AT, 4 * MIB, Advice::DontNeed).unwrap();
    assert_eq!(program.load(page(515)), Ok(0));
    let child = space.fork().unwrap();
    assert_eq!(Program::new(&machine, &child).load(page(3)), Err(FaultError::NotMapped));
    assert_eq!(program.load(page(3)), Err(FaultError::NotMapped));
    space.madvise(page(3), PAGE_SIZE, Advice::GuardRemove).unwrap();
    assert_eq!(program.store(page(3), 9), Ok(()));
    assert_eq!(program.load(page(2)), Err(FaultError::NotMapped));
    audit(&machine, &memory, &[&space, &child]);
    drop(child);
    space.madvise(AT, 4 * MIB, Advice::GuardRemove).unwrap();
    program.fill(AT, 4 * MIB, 1).unwrap();
    audit(&machine, &memory, &[&space]);
}

/// A folio becomes lazy only as a whole. Otherwise its pages keep their contents, and a page that a
/// device has written stays dirty.
fn a_folio_is_lazy_as_a_whole_or_not_at_all<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    support::use_order(&memory, 4);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT.0, MIB)).unwrap();
    let program = Program::new(&machine, &space);
    program.fill(AT, MIB, 7).unwrap();
    // Only a device has written since the content was saved.
    testing::clear_accessed_and_dirty(&space, AT, 16);
    drop(space.pin(page(5), 1, Access::Write, PinTime::Short).unwrap());
    space.madvise(page(3), PAGE_SIZE, Advice::Free).unwrap();
    assert!(space.is_dirty(page(5)), "what the device wrote would be lost");
    let lazy = |page: &u64| testing::is_lazy(&space, VirtAddr(AT.0 + page * PAGE_SIZE));
    assert_eq!((0..16).filter(lazy).collect::<Vec<_>>(), [3], "the advice covers no other page");
    // The folio does not become lazy if a pin may write at any moment or another process maps it.
    let pinned = space.pin(page(21), 1, Access::Write, PinTime::Short).unwrap();
    space.madvise(page(16), 16 * PAGE_SIZE, Advice::Free).unwrap();
    assert!(!lazy(&16));
    drop(pinned);
    let child = space.fork().unwrap();
    space.madvise(page(16), 16 * PAGE_SIZE, Advice::Free).unwrap();
    assert!(!lazy(&16));
    drop(child);
    space.madvise(page(16), 16 * PAGE_SIZE, Advice::Free).unwrap();
    assert!(lazy(&16));
    assert!(!space.is_dirty(page(21)));
    audit(&machine, &memory, &[&space]);
}

/// Each base page becomes lazy separately. Pages that a pin or another process may write do not
/// change.
fn base_pages_are_lazy_one_by_one<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    support::use_order(&memory, 0);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT.0, MIB)).unwrap();
    let program = Program::new(&machine, &space);
    program.fill(AT, 16 * PAGE_SIZE, 7).unwrap();
    // The zero page, then an empty entry, then two more pages.
    assert_eq!(program.load(page(16)), Ok(0));
    program.fill(page(18), 2 * PAGE_SIZE, 7).unwrap();
    let child = space.fork().unwrap();
    child.munmap(AT, 8 * PAGE_SIZE).unwrap();
    child.munmap(page(18), PAGE_SIZE).unwrap();
    let pinned = space.pin(page(5), 1, Access::Write, PinTime::Short).unwrap();
    let free = || {
        let before = space.counts();
        space.madvise(AT, 20 * PAGE_SIZE, Advice::Free).unwrap();
        (space.counts() - before).invalidations
    };
    assert_eq!(free(), 1);
    let lazy = |number: &u64| testing::is_lazy(&space, page(*number));
    let mapped = || (0..16).chain(18..20);
    assert_eq!(mapped().filter(lazy).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 6, 7, 18]);
    assert!(mapped().filter(lazy).all(|number| !space.is_dirty(page(number))));
    assert!(space.is_dirty(page(5)) && space.is_dirty(page(8)), "another may write these pages");
    // No entry has a bit that could be lost.
    assert_eq!(free(), 0);
    drop((pinned, child));
    assert_eq!(free(), 1);
    assert_eq!(mapped().filter(lazy).count(), 18);
    program.store(page(2), 1).unwrap();
    assert!(space.is_dirty(page(2)), "the content is wanted again");
    audit(&machine, &memory, &[&space]);
}

fn collapsing_makes_one_huge_leaf_with_the_same_contents<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT.0, 2 * MIB)).unwrap();
    let program = Program::new(&machine, &space);
    // Private pages, zero pages, and empty entries.
    for number in (0..512).step_by(3) {
        program.store(page(number), number).unwrap();
    }
    program.load(page(1)).unwrap();
    assert_eq!(space.madvise(AT, 2 * MIB, Advice::Collapse), Ok(()));
    let Inspection::Page { level, .. } = space.inspect(AT) else { panic!("no page") };
    assert_eq!(level, Level::PMD);
    for number in 0..512 {
        let expected = if number % 3 == 0 { number } else { 0 };
        assert_eq!(program.load(page(number)), Ok(expected));
    }
    assert_eq!(space.madvise(AT, 2 * MIB, Advice::Collapse), Ok(()), "it is one already");
    audit(&machine, &memory, &[&space]);
}

fn collapsing_what_a_child_shares_copies_it<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT.0, 2 * MIB)).unwrap();
    let program = Program::new(&machine, &space);
    program.fill(AT, 2 * MIB, 3).unwrap();
    let child = space.fork().unwrap();
    child.madvise(AT, 2 * MIB, Advice::Collapse).unwrap();
    Program::new(&machine, &child).store(AT, 1).unwrap();
    assert_eq!(program.load(AT), Ok(0x0303_0303_0303_0303));
    assert_eq!(Program::new(&machine, &child).load(page(511)), Ok(0x0303_0303_0303_0303));
    audit(&machine, &memory, &[&space, &child]);
}

fn the_background_collapser_keeps_to_policy_and_limits<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT.0, 8 * MIB)).unwrap();
    let program = Program::new(&machine, &space);
    program.fill(AT, 2 * MIB, 3).unwrap();
    program.store(VirtAddr(AT.0 + 2 * MIB), 1).unwrap();
    let all = |limits: CollapseLimits| {
        let (mut at, mut collapsed) = (VirtAddr(0), 0);
        loop {
            let progress = space.collapse_some(at, 1, &limits);
            collapsed += progress.collapsed;
            at = progress.next;
            if at == VirtAddr(0) {
                return collapsed;
            }
        }
    };
    assert_eq!(all(CollapseLimits::default()), 0, "the policy wants none");
    memory.folio_policy().set(Order(9), SizeMode::Madvise);
    assert_eq!(all(CollapseLimits::default()), 0, "no range was asked for");
    space.madvise(AT, 8 * MIB, Advice::Huge).unwrap();
    assert_eq!(
        all(CollapseLimits { missing: 64, shared: 0, ..CollapseLimits::default() }),
        1,
        "one span is full"
    );
    assert_eq!(all(CollapseLimits::default()), 1, "one page is enough now");
    assert_eq!(all(CollapseLimits::default()), 0, "the rest is empty");
    assert_eq!(program.load(VirtAddr(AT.0 + 2 * MIB)), Ok(1));
    memory.folio_policy().set(Order(9), SizeMode::Never);
    let third = AT.0 + 4 * MIB;
    program.store(VirtAddr(third), 1).unwrap();
    for number in 1..512 {
        assert_eq!(program.load(VirtAddr(third + number * PAGE_SIZE)), Ok(0));
    }
    memory.folio_policy().set(Order(9), SizeMode::Madvise);
    let limits = CollapseLimits { missing: 510, ..CollapseLimits::default() };
    assert_eq!(all(limits), 0, "the zero page counts as missing");
    assert_eq!(all(CollapseLimits::default()), 1);
    audit(&machine, &memory, &[&space]);
}

fn the_background_collapser_counts_what_others_map<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT.0, 2 * MIB)).unwrap();
    Program::new(&machine, &space).fill(AT, 2 * MIB, 3).unwrap();
    let child = space.fork().unwrap();
    memory.folio_policy().set(Order(9), SizeMode::Always);
    let collapse = |shared| {
        let limits = CollapseLimits { shared, ..CollapseLimits::default() };
        space.collapse_some(VirtAddr(0), 8, &limits).collapsed
    };
    assert_eq!(collapse(511), 0, "all are the child's too");
    let copies = Program::new(&machine, &child);
    for number in 0..100 {
        copies.store(page(number), 1).unwrap();
    }
    assert_eq!((collapse(411), collapse(412)), (0, 1), "but for what it has copied");
    audit(&machine, &memory, &[&space, &child]);
}

fn the_background_collapser_takes_shared_memory<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&MapRequest { sharing: Sharing::Shared, ..fixed(AT.0, 4 * MIB) }).unwrap();
    let program = Program::new(&machine, &space);
    program.fill(AT, MIB, 3).unwrap();
    let collapse = |missing| {
        let limits = CollapseLimits { missing, ..CollapseLimits::default() };
        space.collapse_some(VirtAddr(0), 8, &limits).collapsed
    };
    assert_eq!(collapse(511), 0, "the policy wants none");
    memory.shared_folio_policy().set(Order(9), SizeMode::Always);
    assert_eq!(collapse(255), 0, "256 are missing");
    assert_eq!((collapse(256), collapse(256)), (1, 0));
    let before = space.counts();
    assert_eq!(program.load(AT), Ok(0x0303_0303_0303_0303));
    assert_eq!((space.counts() - before).shared_pages, 512, "mapped large by one touch");
    assert_eq!(program.load(VirtAddr(AT.0 + MIB)), Ok(0));
    // Split into small leaves, which a large leaf replaces: at once on demand, and at the next
    // touch in the background.
    let is_large =
        || matches!(space.inspect(AT), Inspection::Page { level, .. } if level > Level::PTE);
    let cut = || {
        space.madvise(AT, PAGE_SIZE, Advice::NoHuge).unwrap();
        space.madvise(AT, 4 * MIB, Advice::Huge).unwrap();
        assert!(!is_large());
    };
    cut();
    space.madvise(AT, 2 * MIB, Advice::Collapse).unwrap();
    assert!(is_large());
    cut();
    assert_eq!((collapse(511), collapse(511)), (1, 0));
    assert_eq!(space.inspect(AT), Inspection::Empty);
    assert_eq!(program.load(AT), Ok(0x0303_0303_0303_0303));
    assert!(is_large());
    audit(&machine, &memory, &[&space]);
}

fn children_get_what_the_advice_says<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = AddressSpace::new(&memory, options()).unwrap();
    for at in 0..3 {
        space.mmap(&fixed(AT.0 + at * MIB, PAGE_SIZE)).unwrap();
        Program::new(&machine, &space).store(VirtAddr(AT.0 + at * MIB), 5).unwrap();
    }
    space.madvise(AT, PAGE_SIZE, Advice::DontFork).unwrap();
    space.madvise(VirtAddr(AT.0 + MIB), PAGE_SIZE, Advice::WipeOnFork).unwrap();
    let child = space.fork().unwrap();
    let program = Program::new(&machine, &child);
    assert_eq!(program.load(AT), Err(FaultError::NotMapped));
    assert_eq!(program.load(VirtAddr(AT.0 + MIB)), Ok(0));
    assert_eq!(program.load(VirtAddr(AT.0 + 2 * MIB)), Ok(5));
    audit(&machine, &memory, &[&space, &child]);
}

fn a_stack_grows_to_its_limit_and_keeps_its_distance<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let top = AT.0 + 64 * MIB;
    let stack = MapRequest { flags: MapFlags::GROWS_DOWN, ..fixed(top - PAGE_SIZE, PAGE_SIZE) };
    space.mmap(&stack).unwrap();
    let program = Program::new(&machine, &space);
    program.store(VirtAddr(top - MIB), 1).unwrap();
    assert_eq!(program.load(VirtAddr(top - MIB)), Ok(1));
    assert_eq!(space.mapping_count(), 1);
    assert_eq!(program.load(VirtAddr(top - 9 * MIB)), Err(FaultError::NotMapped), "the limit");
    // A mapping below leaves a gap of 1 MiB.
    space.mmap(&fixed(top - 4 * MIB, PAGE_SIZE)).unwrap();
    let below = VirtAddr(top - 3 * MIB);
    assert_eq!(program.store(below, 1), Err(FaultError::NotMapped));
    assert_eq!(program.store(VirtAddr(top - 3 * MIB + PAGE_SIZE), 1), Ok(()));
    // The kernel chooses no address in the gap.
    let near =
        MapRequest { place: Place::Near(VirtAddr(below.0 - PAGE_SIZE)), ..fixed(0, PAGE_SIZE) };
    assert_ne!(space.mmap(&near), Ok(VirtAddr(below.0 - PAGE_SIZE)));
    audit(&machine, &memory, &[&space]);
}

fn what_may_vanish_vanishes_when_it_is_to_leave_memory<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let droppable = MapRequest { flags: MapFlags::DROPPABLE, ..fixed(AT.0, 2 * MIB) };
    space.mmap(&droppable).unwrap();
    space.mmap(&fixed(AT.0 + 2 * MIB, MIB)).unwrap();
    let program = Program::new(&machine, &space);
    program.fill(AT, 3 * MIB, 7).unwrap();
    let free = memory.free_frame_count();
    space.madvise(AT, 3 * MIB, Advice::PageOut).unwrap();
    assert!(memory.free_frame_count() >= free + 512, "its frames are free");
    for number in [0, 1, 511] {
        assert_eq!(program.load(page(number)), Ok(0));
    }
    assert_eq!(program.load(page(512)), Ok(0x0707_0707_0707_0707), "what may not stays");
    audit(&machine, &memory, &[&space]);
}

fn ranges_without_a_whole_span_are_refused_as_on_linux<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT.0, 4 * MIB)).unwrap();
    Program::new(&machine, &space).fill(AT, 4 * MIB, 1).unwrap();
    let collapse = |at: u64, length| space.madvise(VirtAddr(at), length, Advice::Collapse);
    assert_eq!(collapse(AT.0 + PAGE_SIZE, PAGE_SIZE), Err(Error::Invalid));
    assert_eq!(collapse(AT.0 + MIB, 2 * MIB), Ok(()), "it touches an edge: nothing to do");
    let range = VirtRange::new(AT, VirtAddr(AT.0 + 4 * MIB)).unwrap();
    assert_eq!(space.collapse_range(range), Ok(()));
    assert_eq!(space.fault(AT, Access::Write).map(|_| ()), Ok(()));
    audit(&machine, &memory, &[&space]);
}

/// Drops few pages of a table, among them parts of folios and of contiguous runs, holes and guards.
fn few_pages_of_a_table_are_dropped<A: Walk>() {
    for order in [0, 4] {
        let (machine, memory) = strict::<A>(64 << 20);
        support::use_order(&memory, order);
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&fixed(AT.0, MIB)).unwrap();
        let program = Program::new(&machine, &space);
        program.fill(AT, MIB, 7).unwrap();
        let mut kept = [true; 256];
        for (first, count) in [(0, 1), (16, 16), (30, 5), (28, 9), (250, 6), (100, 16), (97, 16)] {
            let before = space.counts();
            space.madvise(page(first), count * PAGE_SIZE, Advice::DontNeed).unwrap();
            let cost = space.counts() - before;
            // The fast path for few pages leaves a contiguous run that needs a split to the general
            // path.
            assert!((1..=2).contains(&cost.tables_locked), "{first}, {count}: {cost:?}");
            kept[first as usize..(first + count) as usize].fill(false);
            audit(&machine, &memory, &[&space]);
        }
        space.madvise(page(200), 4 * PAGE_SIZE, Advice::GuardInstall).unwrap();
        // A table that may have guards is unmapped nevertheless.
        space.munmap(page(198), 4 * PAGE_SIZE).unwrap();
        audit(&machine, &memory, &[&space]);
        for (number, kept) in (0..).zip(kept) {
            let expected = match number {
                198..204 => Err(FaultError::NotMapped),
                _ if kept => Ok(0x0707_0707_0707_0707),
                _ => Ok(0),
            };
            assert_eq!(program.load(page(number)), expected, "page {number}");
        }
        audit(&machine, &memory, &[&space]);
    }
}

on_every_architecture! {
    dropping_few => few_pages_of_a_table_are_dropped;
    guarding => guards_stand_until_they_are_lifted;
    freeing_lazily => a_folio_is_lazy_as_a_whole_or_not_at_all;
    freeing_base_pages_lazily => base_pages_are_lazy_one_by_one;
    collapsing => collapsing_makes_one_huge_leaf_with_the_same_contents;
    collapsing_shared => collapsing_what_a_child_shares_copies_it;
    in_the_background => the_background_collapser_keeps_to_policy_and_limits;
    in_the_background_with_a_child => the_background_collapser_counts_what_others_map;
    shared_in_the_background => the_background_collapser_takes_shared_memory;
    forking => children_get_what_the_advice_says;
    growing => a_stack_grows_to_its_limit_and_keeps_its_distance;
    vanishing => what_may_vanish_vanishes_when_it_is_to_leave_memory;
    refusing => ranges_without_a_whole_span_are_refused_as_on_linux;
}
