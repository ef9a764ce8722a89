//! Reclaim of anonymous pages that a family of address spaces shares: a page costs a few steps in
//! each address space, whatever surrounds the page.

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, X86_64};
use bindery::platform::Cpu;
use bindery::{Access, AddressSpace, Advice, Memory, SizeMode};
use bindery_hosted::Walk;

use crate::support::measured::{Measured, measured};
use crate::support::{GIB, MIB, fixed, options};

const AT: VirtAddr = VirtAddr(GIB);
const CHILDREN: u64 = 20;
/// Steps per page in each process: two turns of the clock with their age updates, and the swap-out;
/// one more step for the read sections in which the swap code finds the cluster of the slot.
const LOOKS: u64 = 5;

type Space<'m, A> = AddressSpace<'m, Measured<A>>;

/// A space with this number of pages and its children.
fn family<A: Walk>(memory: &Memory<Measured<A>>, pages: u64) -> Vec<Space<'_, A>> {
    let parent = AddressSpace::new(memory, options()).unwrap();
    parent.mmap(&fixed(AT.0, pages * PAGE_SIZE)).unwrap();
    for page in 0..pages {
        parent.fault(VirtAddr(AT.0 + page * PAGE_SIZE), Access::Write).unwrap();
    }
    let mut spaces: Vec<_> = (0..CHILDREN).map(|_| parent.fork().unwrap()).collect();
    spaces.push(parent);
    spaces
}

fn invalidations<A: Walk>(spaces: &[Space<'_, A>]) -> u64 {
    spaces.iter().map(|space| space.counts().invalidations).sum()
}

/// The total work of reclaim until every page of the family is swapped out.
fn reclaim<A: Walk>(order: u8, pages: u64) -> u64 {
    let (_, memory) = measured::<A>(64 * MIB);
    if order > 0 {
        memory.folio_policy().set(Order(order), SizeMode::Always);
    }
    memory.swap_on(1 << 13, 0).unwrap();
    let spaces = family(&memory, pages);
    let before = memory.platform().steps();
    memory.reclaim(u64::MAX);
    for space in &spaces {
        assert_eq!(space.counts().swap_pages, pages, "order {order}");
    }
    memory.platform().steps() - before
}

fn few_looks_at_each_page<A: Walk>() {
    for (order, pages) in [(0, 64), (0, 512), (0, 1500), (4, 1024)] {
        let each = reclaim::<A>(order, pages) / pages / (CHILDREN + 1);
        assert!(each <= LOOKS, "order {order}, {pages} pages: {each} looks at each");
    }
}

/// Folios that several processes map share one flush per process.
fn a_flush_for_each_space_and_stretch<A: Walk>() {
    let (machine, memory) = measured::<A>(64 * MIB);
    memory.swap_on(1 << 13, 0).unwrap();
    let pages = 512;
    let spaces = family(&memory, pages);
    for space in &spaces {
        machine.on_cpu(Cpu(0), || space.enter());
    }
    let before = invalidations(&spaces);
    memory.reclaim(u64::MAX);
    // The hand may start in the middle of a stretch.
    let (flushes, stretches) = (invalidations(&spaces) - before, pages / 32 + 1);
    assert!(flushes > CHILDREN, "nothing was flushed");
    // Pages age in one turn and are swapped out in another.
    assert!(flushes <= 2 * stretches * (CHILDREN + 1), "{flushes} flushes");
}

/// A child's copies of pages next to the shared pages cost the other processes nothing.
fn copies_of_a_child_are_looked_at_there<A: Walk>() {
    let (_, memory) = measured::<A>(64 * MIB);
    memory.swap_on(1 << 13, 0).unwrap();
    let pages = 512;
    let spaces = family(&memory, pages);
    for page in 0..pages {
        let at = VirtAddr(AT.0 + page * PAGE_SIZE);
        spaces[page as usize % 2].fault(at, Access::Write).unwrap();
    }
    let before = memory.platform().steps();
    memory.reclaim(u64::MAX);
    let each = (memory.platform().steps() - before) / pages / (CHILDREN + 1);
    assert!(each <= LOOKS, "{each} looks at each");
}

/// `MADV_PAGEOUT` leaves pages that other processes map too. It skips the pages of a table in one
/// step, up to the first page that only this process maps.
fn advice_passes_over_what_others_map<A: Walk>() {
    let (_, memory) = measured::<A>(64 * MIB);
    memory.swap_on(1 << 13, 0).unwrap();
    let (tables, copied) = (2, [3, 4, 700]);
    let pages = tables * u64::from(A::ENTRIES);
    let spaces = family(&memory, pages);
    for page in copied {
        spaces[0].fault(VirtAddr(AT.0 + page * PAGE_SIZE), Access::Write).unwrap();
    }
    let before = memory.platform().pieces();
    spaces[0].madvise(AT, pages * PAGE_SIZE, Advice::PageOut).unwrap();
    let pieces = memory.platform().pieces() - before;
    assert_eq!(spaces[0].counts().swap_pages, copied.len() as u64);
    assert!(pieces <= 8 * (tables + copied.len() as u64), "{pieces} pieces of {pages} pages");
}

fn all<A: Walk>() {
    advice_passes_over_what_others_map::<A>();
    few_looks_at_each_page::<A>();
    a_flush_for_each_space_and_stretch::<A>();
    copies_of_a_child_are_looked_at_there::<A>();
}

#[test]
fn on_x86_64() {
    all::<X86_64<4>>();
}

#[test]
fn on_aarch64() {
    all::<AArch64>();
}
