//! Settings of a whole address space (`prctl(2)`): large folios, and memory that becomes
//! executable.

use bindery::addr::{Order, VirtAddr};
use bindery::{
    AddressSpace, Advice, Errno, Error, ExecGain, LargeFolios, MapRequest, MappingFlags, Memory,
    Protection, Sharing,
};
use bindery_hosted::{Machine, Program, Walk};
use bindery_linux::prctl;

use crate::support::*;

on_every_architecture! {
    large_folios_are_used_where_allowed => large;
    shared_memory_keeps_to_the_same => shared;
    the_background_and_collapse_keep_to_the_same => collapsed;
    memory_does_not_become_executable => refused;
    settings_are_inherited => inherited;
    the_calls_check_their_arguments => raw;
    mappings_say_whether_their_pages_may_be_merged => merging;
}

const AT: u64 = GIB;
const SIZE: u64 = 2 * MIB;

type Space<'m, A> = AddressSpace<'m, Machine<A>>;

fn with_fixture<A: Walk>(scenario: impl FnOnce(&Machine<A>, &Memory<Machine<A>>)) {
    let (machine, memory) = strict::<A>(64 * MIB);
    scenario(&machine, &memory);
    audit(&machine, &memory, &[]);
}

/// The number of pages that one store to fresh memory maps.
fn touched<A: Walk>(
    machine: &Machine<A>,
    space: &Space<'_, A>,
    request: &MapRequest,
    advised: bool,
) -> u64 {
    let program = Program::new(machine, space);
    let at = space.mmap(request).unwrap();
    if advised {
        space.madvise(at, SIZE, Advice::Huge).unwrap();
    }
    let before = space.counts();
    program.store(at, 1).unwrap();
    let counts = space.counts() - before;
    space.munmap(at, SIZE).unwrap();
    counts.anonymous_pages + counts.shared_pages
}

fn large<A: Walk>() {
    with_fixture::<A>(|machine, memory| {
        use_order(memory, 9);
        let space = AddressSpace::new(memory, options()).unwrap();
        let touched = |advised| touched(machine, &space, &fixed(AT, SIZE), advised);
        assert_eq!((touched(false), touched(true)), (512, 512));
        space.set_large_folios(LargeFolios::Never);
        assert_eq!((touched(false), touched(true)), (1, 1));
        space.set_large_folios(LargeFolios::Advised);
        assert_eq!((touched(false), touched(true)), (1, 512));
        assert_eq!(space.large_folios(), LargeFolios::Advised);
        space.set_large_folios(LargeFolios::Allowed);
        assert_eq!(touched(false), 512);
    });
}

fn shared<A: Walk>() {
    with_fixture::<A>(|machine, memory| {
        memory.shared_folio_policy().set(Order(4), bindery::SizeMode::Always);
        let space = AddressSpace::new(memory, options()).unwrap();
        let request = MapRequest { sharing: Sharing::Shared, ..fixed(AT, SIZE) };
        assert_eq!(touched(machine, &space, &request, false), 16);
        space.set_large_folios(LargeFolios::Never);
        assert_eq!(touched(machine, &space, &request, false), 1);
    });
}

fn collapsed<A: Walk>() {
    with_fixture::<A>(|machine, memory| {
        let space = AddressSpace::new(memory, options()).unwrap();
        let program = Program::new(machine, &space);
        space.mmap(&fixed(AT, SIZE)).unwrap();
        program.fill(VirtAddr(AT), SIZE, 1).unwrap();
        use_order(memory, 9);
        let background = || space.collapse_some(VirtAddr(0), 8, &Default::default()).collapsed;
        let on_demand = || space.madvise(VirtAddr(AT), SIZE, Advice::Collapse);
        space.set_large_folios(LargeFolios::Never);
        assert_eq!((background(), on_demand()), (0, Err(Error::Invalid)));
        // The setting counts as advice.
        space.set_large_folios(LargeFolios::Advised);
        assert_eq!((background(), on_demand()), (0, Ok(())));
        assert_eq!(program.load(VirtAddr(AT + SIZE - 8)), Ok(0x0101_0101_0101_0101));
    });
}

fn refused<A: Walk>() {
    with_fixture::<A>(|_, memory| {
        let space = AddressSpace::new(memory, options()).unwrap();
        let (read, write, execute) = (Protection::READ, Protection::WRITE, Protection::EXECUTE);
        let map = |at: u64, protection| {
            space.mmap(&MapRequest { protection, ..fixed(at, 4 * PAGE) }).map(drop)
        };
        let protect =
            |at: u64, pages, protection| space.mprotect(VirtAddr(at), pages * PAGE, protection);
        map(AT, read | write | execute).unwrap();
        map(AT + MIB, read | execute).unwrap();
        map(AT + 2 * MIB, read | write).unwrap();
        space.set_exec_gain(ExecGain::Refused).unwrap();
        assert_eq!(map(AT + 3 * MIB, write | execute), Err(Error::AccessDenied));
        // A refused call has unmapped nothing.
        assert_eq!(map(AT + 2 * MIB, write | execute), Err(Error::AccessDenied));
        assert_eq!(space.mapping_count(), 3);
        assert_eq!(map(AT + 3 * MIB, execute), Ok(()));
        assert_eq!(protect(AT + 2 * MIB, 4, execute), Err(Error::AccessDenied));
        assert_eq!(protect(AT + MIB, 2, execute), Ok(()));
        assert_eq!(protect(AT + MIB, 1, read), Ok(()));
        // Pages before it are changed, as in any failure of mprotect.
        assert_eq!(protect(AT, 4, read | execute), Ok(()));
        assert_eq!(protect(AT, 4, read | write | execute), Err(Error::AccessDenied));
        assert_eq!(protect(AT + MIB, 4, read | execute), Err(Error::AccessDenied));
        assert_eq!(space.set_exec_gain(ExecGain::Allowed), Err(Error::SealForbids));
        assert_eq!(space.exec_gain(), ExecGain::Refused);
    });
}

fn inherited<A: Walk>() {
    with_fixture::<A>(|_, memory| {
        let space = AddressSpace::new(memory, options()).unwrap();
        space.set_large_folios(LargeFolios::Advised);
        space.set_exec_gain(ExecGain::Refused).unwrap();
        let child = space.fork().unwrap();
        let settings = |space: &Space<'_, A>| (space.large_folios(), space.exec_gain());
        assert_eq!(settings(&child), (LargeFolios::Advised, ExecGain::Refused));
        let alone = AddressSpace::new(memory, options()).unwrap();
        alone.set_exec_gain(ExecGain::RefusedHere).unwrap();
        alone.set_large_folios(LargeFolios::Never);
        let executed = AddressSpace::new(memory, options()).unwrap();
        executed.inherit_settings(&alone);
        for child in [alone.fork().unwrap(), executed] {
            assert_eq!(settings(&child), (LargeFolios::Never, ExecGain::Allowed));
        }
        assert_eq!(settings(&alone), (LargeFolios::Never, ExecGain::RefusedHere));
    });
}

const SET_THP: u32 = 41;
const GET_THP: u32 = 42;
const SET_MDWE: u32 = 65;
const GET_MDWE: u32 = 66;

fn raw<A: Walk>() {
    with_fixture::<A>(|_, memory| {
        let space = AddressSpace::new(memory, options()).unwrap();
        let call = |option, arguments| prctl(&space, option, arguments).unwrap();
        assert_eq!(prctl(&space, 15, [0; 4]), None);
        for wrong in [[1, 1, 0, 0], [0, 2, 0, 0], [1, 3, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]] {
            assert_eq!(call(SET_THP, wrong), Err(Errno::EINVAL), "{wrong:?}");
        }
        for (arguments, told) in [([1, 2, 0, 0], 3), ([u64::MAX, 0, 0, 0], 1), ([0; 4], 0)] {
            assert_eq!(call(SET_THP, arguments), Ok(0));
            assert_eq!(call(GET_THP, [0; 4]), Ok(told));
        }
        assert_eq!(call(GET_THP, [0, 0, 0, 1]), Err(Errno::EINVAL));
        for wrong in [[2, 0, 0, 0], [4, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]] {
            assert_eq!(call(SET_MDWE, wrong), Err(Errno::EINVAL), "{wrong:?}");
        }
        assert_eq!(call(GET_MDWE, [1, 0, 0, 0]), Err(Errno::EINVAL));
        assert_eq!((call(SET_MDWE, [0; 4]), call(GET_MDWE, [0; 4])), (Ok(0), Ok(0)));
        assert_eq!((call(SET_MDWE, [3, 0, 0, 0]), call(GET_MDWE, [0; 4])), (Ok(0), Ok(3)));
        assert_eq!(call(SET_MDWE, [3, 0, 0, 0]), Ok(0));
        for other in [0, 1] {
            assert_eq!(call(SET_MDWE, [other, 0, 0, 0]), Err(Errno::EPERM));
        }
    });
}

const PAGE: u64 = 4096;

const SET_MERGE: u32 = 67;
const GET_MERGE: u32 = 68;

fn merging<A: Walk>() {
    with_fixture::<A>(|_, memory| {
        let space = AddressSpace::new(memory, options()).unwrap();
        let call = |option, arguments| prctl(&space, option, arguments).unwrap();
        let mapping = |space: &Space<'_, A>, at| {
            let mut found = None;
            space.for_each_mapping(|mapping| {
                if mapping.range.start() == VirtAddr(at) {
                    found = Some((mapping.flags, mapping.range.end().0));
                }
            });
            found.unwrap()
        };
        let may_merge =
            |space: &Space<'_, A>, at| mapping(space, at).0.contains(MappingFlags::MERGEABLE);
        let ends = |at| mapping(&space, at).1;
        for wrong in [[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]] {
            assert_eq!(call(SET_MERGE, wrong), Err(Errno::EINVAL), "{wrong:?}");
        }
        assert_eq!(call(GET_MERGE, [1, 0, 0, 0]), Err(Errno::EINVAL));
        space.mmap(&fixed(AT, PAGE)).unwrap();
        let shared = MapRequest { sharing: Sharing::Shared, ..fixed(2 * AT, PAGE) };
        space.mmap(&shared).unwrap();
        assert_eq!((call(SET_MERGE, [1, 0, 0, 0]), call(GET_MERGE, [0; 4])), (Ok(0), Ok(1)));
        // Existing and new memory have equal attributes, so they form one mapping.
        space.mmap(&fixed(AT + PAGE, PAGE)).unwrap();
        assert_eq!(ends(AT), AT + 2 * PAGE);
        assert!(may_merge(&space, AT));
        assert!(!may_merge(&space, 2 * AT), "shared memory is not merged");
        let child = space.fork().unwrap();
        assert!(child.merging() && may_merge(&child, AT));
        // A single page's mapping differs from its neighbors until no page has the advice.
        space.madvise(VirtAddr(AT), PAGE, Advice::Unmergeable).unwrap();
        assert_eq!((may_merge(&space, AT), ends(AT)), (false, AT + PAGE));
        assert_eq!((call(SET_MERGE, [0; 4]), call(GET_MERGE, [0; 4])), (Ok(0), Ok(0)));
        assert_eq!((may_merge(&space, AT), ends(AT)), (false, AT + 2 * PAGE));
        space.madvise(VirtAddr(AT), PAGE, Advice::Mergeable).unwrap();
        space.madvise(VirtAddr(2 * AT), PAGE, Advice::Mergeable).unwrap();
        assert_eq!((may_merge(&space, AT), may_merge(&space, 2 * AT)), (true, false));
    });
}
