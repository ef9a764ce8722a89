//! Shared parts of the scenarios of forking families.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::testing::{AnonymousWalk, walk_anonymous};
use bindery::{Access, AddressSpace, Memory};
use bindery_hosted::{Machine, Walk};

use crate::support::{GIB, fixed, options};

pub type X = bindery::arch::X86_64<4>;
pub type Space<'m, A> = AddressSpace<'m, Machine<A>>;

pub const AT: VirtAddr = VirtAddr(GIB);

pub fn page(number: u64) -> VirtAddr {
    VirtAddr(AT.0 + number * PAGE_SIZE)
}

pub fn write<A: Walk>(space: &Space<'_, A>, pages: u64) {
    for number in 0..pages {
        space.fault(page(number), Access::Write).unwrap();
    }
}

pub fn new_space<A: Walk>(memory: &Memory<Machine<A>>, pages: u64) -> Space<'_, A> {
    let space = AddressSpace::new(memory, options()).unwrap();
    space.mmap(&fixed(AT.0, pages * PAGE_SIZE)).unwrap();
    space
}

/// The walk for the page finds all entries, and visits at most twice the number of VMAs that can
/// map it.
#[track_caller]
pub fn assert_walk<A: Walk>(space: &Space<'_, A>, at: VirtAddr, can_map: u64) -> AnonymousWalk {
    let walk = walk_anonymous(space, at).expect("nothing runs");
    assert_eq!(walk.found, walk.mappings, "{walk:?}");
    assert!(walk.visited <= 2 * can_map, "{can_map} VMAs can map the page: {walk:?}");
    walk
}

pub fn free<A: Walk>(memory: &Memory<Machine<A>>) -> u64 {
    memory.trim();
    memory.free_frame_count()
}
