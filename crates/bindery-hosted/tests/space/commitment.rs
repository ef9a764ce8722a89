//! Committed memory, and refusals at its limit.

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{AddressSpace, Advice, Error, MapFlags, MapRequest, Overcommit};

use crate::support::{GIB, MIB, audit, fixed, options, strict};

const PAGE: u64 = 4096;
const AT: u64 = GIB;
type A = X86_64<4>;

#[test]
fn a_fork_is_asked_for_mapping_by_mapping() {
    let (machine, memory) = strict::<A>(64 * MIB);
    memory.commitment().set_mode(Overcommit::Heuristic);
    let space = AddressSpace::new(&memory, options()).unwrap();
    for number in 0..3 {
        space.mmap(&fixed(AT + number * GIB, 40 * MIB)).unwrap();
    }
    let child = space.fork().unwrap();
    assert_eq!(memory.commitment().committed(), 2 * 3 * 40 * MIB / PAGE);
    audit(&machine, &memory, &[&space, &child]);
}

#[test]
fn fork_commits_only_what_the_child_gets() {
    let (machine, memory) = strict::<A>(64 * MIB);
    memory.commitment().set_mode(Overcommit::Never);
    memory.commitment().set_limit(1000);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT, 300 * PAGE)).unwrap();
    space.mmap(&fixed(2 * AT, 500 * PAGE)).unwrap();
    let promised = memory.commitment().committed();
    assert_eq!(space.fork().err(), Some(Error::Overcommitted));
    assert_eq!(memory.commitment().committed(), promised, "what was promised first is taken back");
    space.madvise(VirtAddr(2 * AT), 500 * PAGE, Advice::DontFork).unwrap();
    memory.commitment().set_limit(1100);
    let child = space.fork().unwrap();
    assert_eq!(child.usage().committed, 300);
    audit(&machine, &memory, &[&space, &child]);
}

#[test]
fn a_replacement_of_committed_memory_commits_nothing_more() {
    let (machine, memory) = strict::<A>(64 * MIB);
    memory.commitment().set_mode(Overcommit::Never);
    memory.commitment().set_limit(1000);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT, 600 * PAGE)).unwrap();
    space.mmap(&fixed(AT, 600 * PAGE)).unwrap();
    assert_eq!(memory.commitment().committed(), 600);
    space.mmap(&fixed(AT + 300 * PAGE, 700 * PAGE)).unwrap();
    assert_eq!(memory.commitment().committed(), 1000);
    let refused = space.mmap(&fixed(AT + 600 * PAGE, 401 * PAGE));
    assert_eq!(refused, Err(Error::Overcommitted));
    assert_eq!(memory.commitment().committed(), 1000);
    audit(&machine, &memory, &[&space]);
}

#[test]
fn what_may_be_dropped_is_not_promised() {
    let (machine, memory) = strict::<A>(64 * MIB);
    memory.commitment().set_mode(Overcommit::Never);
    memory.commitment().set_limit(10);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let request = MapRequest { flags: MapFlags::DROPPABLE, ..fixed(AT, 600 * PAGE) };
    space.mmap(&request).unwrap();
    assert_eq!(memory.commitment().committed(), 0);
    audit(&machine, &memory, &[&space]);
}
