//! The program retains its pinned pages, whatever else happens.

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::{
    Access, AddressSpace, Advice, Error, FaultError, FolioError, Inspection, MapRequest, PinError,
    PinTime, Protection, Remap,
};
use bindery_hosted::{Machine, Program, Walk};

use crate::support::{GIB, KIB, MIB, READ_WRITE, audit, fixed, options, strict, use_order};

const AT: VirtAddr = VirtAddr(GIB);

fn written<'m, A: Walk>(
    memory: &'m bindery::Memory<Machine<A>>,
    machine: &Machine<A>,
    length: u64,
) -> AddressSpace<'m, Machine<A>> {
    let space = AddressSpace::new(memory, options()).unwrap();
    space.mmap(&fixed(AT.0, length)).unwrap();
    let program = Program::new(machine, &space);
    for page in 0..length / PAGE_SIZE {
        program.store(VirtAddr(AT.0 + page * PAGE_SIZE), page).unwrap();
    }
    space
}

fn a_fork_gives_the_child_copies_of_what_is_pinned<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    use_order(&memory, 4);
    let space = written(&memory, &machine, 64 * KIB);
    let pinned = space.pin(AT, 1, Access::Write, PinTime::Long).unwrap();
    let child = space.fork().unwrap();
    // The parent's next store reaches the pinned frame, without a copy.
    let before = space.counts();
    Program::new(&machine, &space).store(AT, 77).unwrap();
    assert_eq!((space.counts() - before).bytes_copied, 0);
    let Inspection::Page { frame, .. } = space.inspect(AT) else { panic!("no page") };
    assert_eq!(frame, pinned.first());
    assert_eq!(Program::new(&machine, &child).load(AT), Ok(0), "the child has what was there");
    assert_eq!(Program::new(&machine, &space).load(AT), Ok(77));
    audit(&machine, &memory, &[&space, &child]);
    drop(pinned);
    audit(&machine, &memory, &[&space, &child]);
}

fn a_move_takes_pinned_pages_along<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = written(&memory, &machine, 4 * PAGE_SIZE);
    let pinned = space.pin(AT, 4, Access::Write, PinTime::Short).unwrap();
    let to = VirtAddr(AT.0 + MIB);
    space.mremap(AT, 4 * PAGE_SIZE, 4 * PAGE_SIZE, Remap::To(to)).unwrap();
    let Inspection::Page { frame, .. } = space.inspect(to) else { panic!("no page") };
    assert_eq!(frame, pinned.first());
    drop(pinned);
    audit(&machine, &memory, &[&space]);
}

fn pinned_pages_outlive_their_mapping<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = written(&memory, &machine, PAGE_SIZE);
    let pinned = space.pin(AT, 1, Access::Read, PinTime::Short).unwrap();
    space.munmap(AT, PAGE_SIZE).unwrap();
    let without = memory.free_frame_count();
    audit(&machine, &memory, &[&space]);
    drop(pinned);
    assert_eq!(memory.free_frame_count(), without + 1);
    audit(&machine, &memory, &[&space]);
}

fn what_is_pinned_is_not_collapsed_or_cut<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = written(&memory, &machine, 2 * MIB);
    let pinned = space.pin(AT, 1, Access::Write, PinTime::Short).unwrap();
    assert_eq!(space.madvise(AT, 2 * MIB, Advice::Collapse), Err(Error::TryAgain));
    drop(pinned);
    assert_eq!(space.madvise(AT, 2 * MIB, Advice::Collapse), Ok(()));
    let pinned = space.pin(AT, 512, Access::Write, PinTime::Short).unwrap();
    assert_eq!(pinned.pages(), 512, "one folio, one pin");
    assert_eq!(space.split_folio(AT, Order::PAGE), Err(FolioError::Busy));
    drop(pinned);
    assert_eq!(space.split_folio(AT, Order::PAGE), Ok(()));
    for page in 0..512 {
        let at = VirtAddr(AT.0 + page * PAGE_SIZE);
        assert_eq!(Program::new(&machine, &space).load(at), Ok(page));
    }
    audit(&machine, &memory, &[&space]);
}

fn a_pin_makes_a_shared_page_the_programs_own_first<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = written(&memory, &machine, PAGE_SIZE);
    let child = space.fork().unwrap();
    let pinned = child.pin(AT, 1, Access::Read, PinTime::Long).unwrap();
    let Inspection::Page { frame, .. } = space.inspect(AT) else { panic!("no page") };
    assert_ne!(frame, pinned.first(), "the pin would not follow the child's next store");
    Program::new(&machine, &child).store(AT, 5).unwrap();
    let Inspection::Page { frame, .. } = child.inspect(AT) else { panic!("no page") };
    assert_eq!(frame, pinned.first());
    drop(pinned);
    audit(&machine, &memory, &[&space, &child]);
}

fn a_pin_that_cannot_be_is_refused<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = written(&memory, &machine, PAGE_SIZE);
    let refused = |at: u64, access| space.pin(VirtAddr(at), 1, access, PinTime::Short).err();
    let fault = |error| Some(PinError::Fault(error));
    assert_eq!(refused(0, Access::Read), fault(FaultError::NotMapped));
    assert_eq!(refused(u64::MAX, Access::Read), fault(FaultError::NotMapped));
    assert_eq!(refused(A::USER_END, Access::Write), fault(FaultError::NotMapped));
    space.mprotect(AT, PAGE_SIZE, Protection::READ).unwrap();
    assert_eq!(refused(AT.0, Access::Write), fault(FaultError::Protection));
    let pinned = space.pin(AT, 0, Access::Read, PinTime::Short).unwrap();
    assert_eq!(pinned.pages(), 1);
    drop(pinned);
    space.mprotect(AT, PAGE_SIZE, READ_WRITE).unwrap();
    audit(&machine, &memory, &[&space]);
}

fn a_fork_copies_what_is_pinned_and_prot_none<A: Walk>() {
    for (order, length) in [(0, 4 * PAGE_SIZE), (4, 64 * KIB), (9, 2 * MIB)] {
        let (machine, memory) = strict::<A>(64 << 20);
        use_order(&memory, order);
        let space = written(&memory, &machine, length);
        let pinned = space.pin(AT, 1, Access::Write, PinTime::Long).unwrap();
        space.mprotect(AT, length, Protection::empty()).unwrap();
        let child = space.fork().unwrap();
        audit(&machine, &memory, &[&space, &child]);
        for one in [&space, &child] {
            one.mprotect(AT, length, READ_WRITE).unwrap();
        }
        Program::new(&machine, &space).store(AT, 77).unwrap();
        let Inspection::Page { frame, .. } = space.inspect(AT) else { panic!("no page") };
        assert_eq!(frame, pinned.first(), "the pin does not see the store");
        for page in 0..length / PAGE_SIZE {
            let at = VirtAddr(AT.0 + page * PAGE_SIZE);
            assert_eq!(Program::new(&machine, &child).load(at), Ok(page));
        }
        drop(pinned);
        audit(&machine, &memory, &[&space, &child]);
    }
}

fn memory_that_may_not_be_written_is_the_programs_own_once_it_is_pinned<A: Walk>() {
    for touched in [false, true] {
        let (machine, memory) = strict::<A>(64 << 20);
        let space = AddressSpace::new(&memory, options()).unwrap();
        let read_only = MapRequest { protection: Protection::READ, ..fixed(AT.0, PAGE_SIZE) };
        space.mmap(&read_only).unwrap();
        let program = Program::new(&machine, &space);
        if touched {
            assert_eq!(program.load(AT), Ok(0));
        }
        let pinned = space.pin(AT, 1, Access::Read, PinTime::Short).unwrap();
        assert_eq!(program.load(AT), Ok(0));
        assert_eq!(program.store(AT, 1), Err(FaultError::Protection));
        space.mprotect(AT, PAGE_SIZE, READ_WRITE).unwrap();
        program.store(AT, 1).unwrap();
        let Inspection::Page { frame, .. } = space.inspect(AT) else { panic!("no page") };
        assert_eq!(frame, pinned.first(), "the pin does not see the store");
        drop(pinned);
        audit(&machine, &memory, &[&space]);
    }
}

fn a_page_that_a_child_shares_is_copied_for_the_one_who_pins_it_to_read<A: Walk>() {
    let (machine, memory) = strict::<A>(64 << 20);
    let space = written(&memory, &machine, 2 * PAGE_SIZE);
    let child = space.fork().unwrap();
    space.mprotect(AT, 2 * PAGE_SIZE, Protection::READ).unwrap();
    let second = VirtAddr(AT.0 + PAGE_SIZE);
    let pinned = space.pin(second, 1, Access::Read, PinTime::Long).unwrap();
    let Inspection::Page { frame, .. } = child.inspect(second) else { panic!("no page") };
    assert_ne!(frame, pinned.first(), "the pin would not follow this side's next store");
    assert_eq!(Program::new(&machine, &space).load(second), Ok(1));
    audit(&machine, &memory, &[&space, &child]);
    drop(pinned);
    // Once only one process is left, the page need not be copied.
    drop(child);
    let copied = space.counts().bytes_copied;
    drop(space.pin(AT, 1, Access::Read, PinTime::Long).unwrap());
    assert_eq!(space.counts().bytes_copied, copied);
    audit(&machine, &memory, &[&space]);
}

/// A whole folio, of which only the second half belongs to the program alone.
fn half_shared<'m, A: Walk>(
    memory: &'m bindery::Memory<Machine<A>>,
    machine: &Machine<A>,
) -> AddressSpace<'m, Machine<A>> {
    use_order(memory, 9);
    let space = written(memory, machine, 2 * MIB);
    let second = VirtAddr(AT.0 + MIB);
    space.madvise(second, MIB, Advice::DontFork).unwrap();
    drop(space.fork().unwrap());
    space.madvise(second, MIB, Advice::DoFork).unwrap();
    space.mprotect(AT, 2 * MIB, Protection::READ).unwrap();
    space
}

fn a_leaf_is_exclusive_as_a_whole_or_not_at_all<A: Walk>() {
    let at = VirtAddr(AT.0 + 300 * PAGE_SIZE);
    let store = |machine: &Machine<A>, space: &AddressSpace<'_, Machine<A>>| {
        space.mprotect(AT, 2 * MIB, READ_WRITE).unwrap();
        Program::new(machine, space).store(at, 77).unwrap();
        let Inspection::Page { frame, .. } = space.inspect(at) else { panic!("no page") };
        frame
    };
    for collapsed_first in [false, true] {
        let (machine, memory) = strict::<A>(64 << 20);
        let space = half_shared(&memory, &machine);
        if collapsed_first {
            space.madvise(AT, 2 * MIB, Advice::Collapse).unwrap();
        }
        let pinned = space.pin(at, 1, Access::Read, PinTime::Long).unwrap();
        if !collapsed_first {
            assert_eq!(space.madvise(AT, 2 * MIB, Advice::Collapse), Err(Error::TryAgain));
        }
        assert_eq!(store(&machine, &space), pinned.first(), "{collapsed_first}");
        audit(&machine, &memory, &[&space]);
        drop(pinned);
        // The folio is copied, not joined: then all of it belongs to the program.
        space.mprotect(AT, 2 * MIB, Protection::READ).unwrap();
        assert_eq!(space.madvise(AT, 2 * MIB, Advice::Collapse), Ok(()));
        audit(&machine, &memory, &[&space]);
    }
    let (machine, memory) = strict::<A>(64 << 20);
    let space = half_shared(&memory, &machine);
    assert_eq!(space.join_leaves(AT), Err(FolioError::Unsuitable));
    audit(&machine, &memory, &[&space]);
}

on_every_architecture! {
    exclusive_as_a_whole => a_leaf_is_exclusive_as_a_whole_or_not_at_all;
    prot_none => a_fork_copies_what_is_pinned_and_prot_none;
    unshared => memory_that_may_not_be_written_is_the_programs_own_once_it_is_pinned;
    unshared_of_a_child => a_page_that_a_child_shares_is_copied_for_the_one_who_pins_it_to_read;
    forking => a_fork_gives_the_child_copies_of_what_is_pinned;
    moving => a_move_takes_pinned_pages_along;
    unmapping => pinned_pages_outlive_their_mapping;
    collapsing => what_is_pinned_is_not_collapsed_or_cut;
    sharing => a_pin_makes_a_shared_page_the_programs_own_first;
    refusing => a_pin_that_cannot_be_is_refused;
}
