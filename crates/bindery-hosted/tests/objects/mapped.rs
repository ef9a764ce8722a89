//! Shared memory and its mappings. The object and its mappings see each other's writes, and every
//! address space sees truncations, holes, seals and collapses.

use std::thread;

use bindery::addr::{Order, VirtAddr, VirtRange};
use bindery::platform::Cpu;
use bindery::{
    Access, Accounting, AddressSpace, Advice, CollapseLimits, Error, FaultError, FileAccess,
    Growth, MapObject, MapRequest, PinTime, Place, Protection, Sealing, Seals, Sharing, SizeMode,
    testing,
};
use bindery_hosted::{Config, Program, TlbKind, Walk};

use crate::support::objects::{PAGE, content, memfd, use_object_order};
use crate::support::objects_fixture::{AT, map, with_fixture};
use crate::support::{MIB, READ_WRITE, audit, memory_with, options};

on_every_architecture! {
    writes_are_seen_from_both_sides => both_sides;
    what_is_cut_off_is_gone_everywhere => cut_off;
    a_hole_is_zeroes_but_for_private_copies => hole;
    a_folios_hole_stays_a_hole => hole_in_large_folio;
    a_hole_that_waits_has_freed_the_frames_before => waiting_hole;
    pages_beyond_the_end_are_not_mapped => waiting_pages;
    a_mapping_outlives_the_handle => outlives;
    small_folios_become_large_with_their_content => collapse;
    a_private_mapping_keeps_its_copies_and_stays => collapse_private;
    pinned_pages_block_seals_and_collapsing => pinned;
    sealing_against_writing_needs_writers_to_be_gone => sealing;
    programs_touch_while_the_size_changes => touch_while_resizing;
}

fn both_sides<A: Walk>() {
    for order in [0, 4, 9] {
        with_fixture::<A>(order, |fixture| {
            let object = memfd(fixture.memory, 4 * MIB);
            let (one, two) = (fixture.space(), fixture.space());
            map(&one, &object, AT, 4 * MIB, Sharing::Shared).unwrap();
            map(&two, &object, 3 * AT, 4 * MIB, Sharing::Shared).unwrap();
            let (first, second) =
                (Program::new(fixture.machine, &one), Program::new(fixture.machine, &two));
            first.store(VirtAddr(AT + 5 * PAGE), 55).unwrap();
            assert_eq!(second.load(VirtAddr(3 * AT + 5 * PAGE)), Ok(55));
            assert_eq!(content(&object)[5 * PAGE as usize], 55);
            object.write(700 * PAGE + 8, &77_u64.to_ne_bytes()).unwrap();
            assert_eq!(first.load(VirtAddr(AT + 700 * PAGE + 8)), Ok(77));
            second.store(VirtAddr(3 * AT + 700 * PAGE + 8), 78).unwrap();
            assert_eq!(first.load(VirtAddr(AT + 700 * PAGE + 8)), Ok(78));
            let child = one.fork().unwrap();
            let third = Program::new(fixture.machine, &child);
            third.store(VirtAddr(AT), 3).unwrap();
            assert_eq!(second.load(VirtAddr(3 * AT)), Ok(3));
            assert_eq!(content(&object)[0], 3);
            assert_eq!(fixture.audit(&[&one, &two, &child]).objects, 1);
        });
    }
}

fn cut_off<A: Walk>() {
    for order in [0, 4, 9] {
        with_fixture::<A>(order, |fixture| {
            let object = memfd(fixture.memory, 2 * MIB);
            let (one, two) = (fixture.space(), fixture.space());
            map(&one, &object, AT, 2 * MIB, Sharing::Shared).unwrap();
            map(&two, &object, AT, 2 * MIB, Sharing::Private).unwrap();
            let (shared, private) =
                (Program::new(fixture.machine, &one), Program::new(fixture.machine, &two));
            let at = |page: u64| VirtAddr(AT + page * PAGE);
            for page in [0, 9, 10, 300, 511] {
                shared.store(at(page), page + 1).unwrap();
                assert_eq!(private.load(at(page)), Ok(page + 1));
            }
            private.store(at(9), 99).unwrap();
            private.store(at(300), 99).unwrap();
            fixture.audit(&[&one, &two]);
            object.set_size(10 * PAGE + 5).unwrap();
            fixture.audit(&[&one, &two]);
            for program in [&shared, &private] {
                assert_eq!(program.load(at(10)), Ok(11 & 0xff_ffff));
                for page in [11, 300, 511] {
                    assert_eq!(program.load(at(page)), Err(FaultError::Bus), "{page}");
                    assert_eq!(program.store(at(page), 1), Err(FaultError::Bus), "{page}");
                }
            }
            assert_eq!((shared.load(at(9)), private.load(at(9))), (Ok(10), Ok(99)));
            object.set_size(2 * MIB).unwrap();
            for program in [&shared, &private] {
                assert_eq!(program.load(at(300)), Ok(0));
            }
            shared.store(at(300), 4).unwrap();
            assert_eq!(private.load(at(300)), Ok(4));
            fixture.audit(&[&one, &two]);
        });
    }
}

fn hole<A: Walk>() {
    for order in [0, 4, 9] {
        with_fixture::<A>(order, |fixture| {
            let object = memfd(fixture.memory, 2 * MIB);
            let (one, two) = (fixture.space(), fixture.space());
            map(&one, &object, AT, 2 * MIB, Sharing::Shared).unwrap();
            map(&two, &object, AT, 2 * MIB, Sharing::Private).unwrap();
            let (shared, private) =
                (Program::new(fixture.machine, &one), Program::new(fixture.machine, &two));
            let at = |page: u64| VirtAddr(AT + page * PAGE);
            for page in [3, 4, 5, 100] {
                shared.store(at(page), page + 1).unwrap();
                assert_eq!(private.load(at(page)), Ok(page + 1));
            }
            private.store(at(5), 99).unwrap();
            object.punch_hole(4 * PAGE, 90 * PAGE).unwrap();
            fixture.audit(&[&one, &two]);
            assert_eq!(shared.load(at(3)), Ok(4));
            assert_eq!(shared.load(at(4)), Ok(0));
            assert_eq!(shared.load(at(5)), Ok(0));
            assert_eq!(private.load(at(4)), Ok(0));
            assert_eq!(private.load(at(5)), Ok(99));
            assert_eq!(private.load(at(100)), Ok(101));
            shared.store(at(4), 8).unwrap();
            assert_eq!(private.load(at(4)), Ok(8));
            fixture.audit(&[&one, &two]);
        });
    }
}

/// The holder of a folio's lock may need memory, so the waiting call retains no free frame.
fn waiting_hole<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let (machine, memory) = (fixture.machine, fixture.memory);
        let object = memfd(memory, 16 * PAGE);
        let space = fixture.space();
        map(&space, &object, AT, 16 * PAGE, Sharing::Shared).unwrap();
        let program = Program::new(machine, &space);
        (0..16).for_each(|page| program.store(VirtAddr(AT + page * PAGE), page).unwrap());
        let free = memory.free_frame_count();
        thread::scope(|scope| {
            let unlock = testing::lock_folio(&space, VirtAddr(AT + 12 * PAGE));
            let punch =
                scope.spawn(|| machine.on_cpu(Cpu(0), || object.punch_hole(2 * PAGE, 12 * PAGE)));
            while machine.parked_threads() == 0 {
                assert!(!punch.is_finished(), "the folio is locked");
                thread::yield_now();
            }
            assert_eq!(memory.free_frame_count(), free + 10, "the frames before the folio");
            unlock();
            assert_eq!(punch.join().unwrap(), Ok(()));
        });
        assert_eq!((memory.free_frame_count(), object.resident_pages()), (free + 12, 4));
        fixture.audit(&[&space]);
    });
}

fn hole_in_large_folio<A: Walk>() {
    with_fixture::<A>(4, |fixture| {
        let object = memfd(fixture.memory, 64 * PAGE);
        let space = fixture.space();
        map(&space, &object, AT, 64 * PAGE, Sharing::Shared).unwrap();
        let program = Program::new(fixture.machine, &space);
        for page in 0..16 {
            object.write(page * PAGE, &[0x55; PAGE as usize]).unwrap();
        }
        object.punch_hole(4 * PAGE, 4 * PAGE).unwrap();
        // A fault next to the hole maps the rest of the folio, and nothing else.
        program.store(VirtAddr(AT + 3 * PAGE), 1).unwrap();
        fixture.audit(&[&space]);
        assert_eq!(program.load(VirtAddr(AT + 5 * PAGE)), Ok(0));
        program.store(VirtAddr(AT + 5 * PAGE), 2).unwrap();
        assert_eq!(program.load(VirtAddr(AT + 9 * PAGE)), Ok(0x5555_5555_5555_5555));
        assert_eq!(content(&object)[5 * PAGE as usize], 2);
        fixture.audit(&[&space]);
    });
}

fn waiting_pages<A: Walk>() {
    with_fixture::<A>(4, |fixture| {
        let object = memfd(fixture.memory, 3 * PAGE);
        object.allocate(0, 32 * PAGE, Growth::Forbidden).unwrap();
        assert_eq!(object.resident_pages(), 32);
        let space = fixture.space();
        map(&space, &object, AT, 32 * PAGE, Sharing::Shared).unwrap();
        let program = Program::new(fixture.machine, &space);
        for touch in [false, true] {
            if touch {
                program.store(VirtAddr(AT + 2 * PAGE), 1).unwrap();
            } else {
                assert_eq!(program.load(VirtAddr(AT)), Ok(0));
            }
            for page in [3, 4, 15, 16] {
                assert_eq!(program.load(VirtAddr(AT + page * PAGE)), Err(FaultError::Bus));
            }
        }
        fixture.audit(&[&space]);
        object.set_size(20 * PAGE).unwrap();
        assert_eq!(object.resident_pages(), 32);
        program.store(VirtAddr(AT + 16 * PAGE), 1).unwrap();
        assert_eq!(program.load(VirtAddr(AT + 20 * PAGE)), Err(FaultError::Bus));
        fixture.audit(&[&space]);
    });
}

fn collapse<A: Walk>() {
    // Runs out of memory at every point first, then runs with memory.
    for point in (0..6).map(Some).chain([None]) {
        with_fixture::<A>(0, |fixture| {
            let object = memfd(fixture.memory, 2 * MIB);
            let spaces = [fixture.space(), fixture.space(), fixture.space()];
            for (space, sharing) in
                spaces.iter().zip([Sharing::Shared, Sharing::Shared, Sharing::Private])
            {
                map(space, &object, AT, 2 * MIB, sharing).unwrap();
            }
            let programs = spaces.each_ref().map(|space| Program::new(fixture.machine, space));
            let at = |page: u64| VirtAddr(AT + page * PAGE);
            let pages = || (0..512).filter(|page| page % 7 != 3);
            for page in pages() {
                programs[(page % 2) as usize].store(at(page), page + 1).unwrap();
                assert_eq!(programs[2].load(at(page)), Ok(page + 1));
            }
            programs[2].store(at(100), 9).unwrap();
            let resident = object.resident_pages();
            fixture.memory.fail_allocations_after(point);
            let range = VirtRange::from_len(VirtAddr(AT), 2 * MIB).unwrap();
            let result = spaces[0].collapse_range(range);
            let failures = testing::failed_allocations(fixture.memory);
            fixture.memory.fail_allocations_after(None);
            fixture.audit(&spaces.each_ref());
            if point.is_none() {
                assert_eq!(result, Ok(()));
                assert_eq!(fixture.audit(&spaces.each_ref()).folios, 2);
                assert_eq!(object.resident_pages(), 512);
                // The private mapping's copies are committed too.
                assert_eq!(fixture.memory.commitment().committed(), 512 + 512);
                assert_eq!(spaces[0].collapse_range(range), Ok(()));
            } else if failures > 0 && result.is_err() {
                assert_eq!(object.resident_pages(), resident);
            }
            for page in 0..512 {
                let value = if page % 7 == 3 { 0 } else { page + 1 };
                for program in &programs[..2] {
                    assert_eq!(program.load(at(page)), Ok(value));
                }
                assert_eq!(programs[2].load(at(page)), Ok(if page == 100 { 9 } else { value }));
            }
            // The object still records the page as dirty although no mapping is left; a failure
            // does not change that.
            spaces.iter().for_each(|space| space.munmap(VirtAddr(AT), 2 * MIB).unwrap());
            fixture.memory.fail_allocations_after(Some(0));
            let refused = object.allocate(0, 4 * MIB, Growth::Allowed);
            fixture.memory.fail_allocations_after(None);
            assert_eq!(refused, Err(Error::OutOfMemory));
            assert_eq!(content(&object)[5 * PAGE as usize], 6);
            spaces[..2]
                .iter()
                .for_each(|space| map(space, &object, AT, 2 * MIB, Sharing::Shared).unwrap());
            programs[1].store(at(3), 5).unwrap();
            assert_eq!(programs[0].load(at(3)), Ok(5));
            fixture.audit(&spaces.each_ref());
        });
    }
}

fn collapse_private<A: Walk>() {
    for touched in [1, 512] {
        with_fixture::<A>(0, |fixture| {
            let object = memfd(fixture.memory, 2 * MIB);
            for page in 0..512 {
                object.write(page * PAGE, &[page as u8 | 1]).unwrap();
            }
            let space = fixture.space();
            map(&space, &object, AT, 2 * MIB, Sharing::Private).unwrap();
            let program = Program::new(fixture.machine, &space);
            for page in 0..touched {
                program.load(VirtAddr(AT + page * PAGE)).unwrap();
            }
            program.store(VirtAddr(AT), 7).unwrap();
            let collapsed = space.madvise(VirtAddr(AT), 2 * MIB, Advice::Collapse);
            assert_eq!(collapsed, Err(Error::Invalid));
            fixture.memory.folio_policy().set(Order(9), SizeMode::Always);
            let progress = space.collapse_some(VirtAddr(0), 8, &CollapseLimits::default());
            assert_eq!(progress.collapsed, 0, "nor in the background");
            for page in 0..512 {
                let expected = if page == 0 { 7 } else { u64::from(page as u8 | 1) };
                assert_eq!(program.load(VirtAddr(AT + page * PAGE)), Ok(expected));
            }
            fixture.audit(&[&space]);
        });
    }
}

fn pinned<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let object = memfd(fixture.memory, 2 * MIB);
        let space = fixture.space();
        map(&space, &object, AT, 2 * MIB, Sharing::Shared).unwrap();
        let program = Program::new(fixture.machine, &space);
        program.store(VirtAddr(AT + 5 * PAGE), 5).unwrap();
        let at = VirtAddr(AT + 5 * PAGE);
        let pin = space.pin(at, 1, Access::Write, PinTime::Short).unwrap();
        let range = VirtRange::from_len(VirtAddr(AT), 2 * MIB).unwrap();
        assert!(space.collapse_range(range).is_err());
        assert_eq!((program.load(at), object.resident_pages()), (Ok(5), 1));
        space.munmap(VirtAddr(AT), 2 * MIB).unwrap();
        assert_eq!(object.add_seals(Seals::WRITE), Err(Error::Busy));
        let free = fixture.memory.free_frame_count();
        object.set_size(0).unwrap();
        assert_eq!(object.resident_pages(), 0);
        let kept = fixture.memory.free_frame_count();
        drop(pin);
        assert!(fixture.memory.free_frame_count() > kept && kept >= free);
        assert_eq!(object.add_seals(Seals::WRITE), Ok(()));
        fixture.audit(&[&space]);
    });
}

fn outlives<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let object = memfd(fixture.memory, 8 * PAGE);
        object.write(PAGE, &[7; 8]).unwrap();
        let space = fixture.space();
        map(&space, &object, AT, 8 * PAGE, Sharing::Shared).unwrap();
        drop(object);
        let program = Program::new(fixture.machine, &space);
        assert_eq!(program.load(VirtAddr(AT + PAGE)), Ok(0x0707_0707_0707_0707));
        space.munmap(VirtAddr(AT), 4 * PAGE).unwrap();
        program.store(VirtAddr(AT + 5 * PAGE), 1).unwrap();
        assert_eq!(fixture.audit(&[&space]).objects, 1);
        space.munmap(VirtAddr(AT), 8 * PAGE).unwrap();
        assert_eq!(fixture.audit(&[&space]).objects, 0);
    });
}

fn sealing<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let object = memfd(fixture.memory, 8 * PAGE);
        let space = fixture.space();
        map(&space, &object, AT, 8 * PAGE, Sharing::Shared).unwrap();
        assert_eq!(object.add_seals(Seals::WRITE), Err(Error::Busy));
        assert_eq!(object.add_seals(Seals::WRITE | Seals::SHRINK), Err(Error::Busy));
        assert_eq!(object.seals(), Seals::empty());
        // The mapping may become writable again.
        space.mprotect(VirtAddr(AT), 8 * PAGE, Protection::READ).unwrap();
        assert_eq!(object.add_seals(Seals::WRITE), Err(Error::Busy));
        let child = space.fork().unwrap();
        space.munmap(VirtAddr(AT), 8 * PAGE).unwrap();
        assert_eq!(object.add_seals(Seals::WRITE), Err(Error::Busy));
        drop(child);
        map(&space, &object, 2 * AT, 8 * PAGE, Sharing::Private).unwrap();
        assert_eq!(object.add_seals(Seals::WRITE), Ok(()));
        let shared = map(&space, &object, AT, 8 * PAGE, Sharing::Shared);
        assert_eq!(shared, Err(Error::SealForbids));
        // Copies are independent, and reading is allowed.
        let program = Program::new(fixture.machine, &space);
        program.store(VirtAddr(2 * AT), 5).unwrap();
        let request = MapRequest {
            length: 8 * PAGE,
            protection: Protection::READ,
            place: Place::Fixed(VirtAddr(AT)),
            sharing: Sharing::Shared,
            ..MapRequest::default()
        };
        let access = FileAccess::READ | FileAccess::WRITE;
        let source = MapObject { object: &object, offset: 0, access };
        space.mmap_object(&request, &source).unwrap();
        assert_eq!(program.load(VirtAddr(AT)), Ok(0));
        let refused = space.mprotect(VirtAddr(AT), PAGE, READ_WRITE);
        assert_eq!(refused, Err(Error::AccessDenied));
        fixture.audit(&[&space]);
    });
}

fn touch_while_resizing<A: Walk>() {
    const PROGRAMS: u16 = 3;
    const PAGES: u64 = 64;
    let config =
        Config { memory: 64 * MIB, cpus: PROGRAMS + 1, tlb: TlbKind::Strict, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let free = memory.free_frame_count();
    use_object_order(&memory, 3);
    {
        let object =
            memory.shared_memory(PAGES * PAGE, Sealing::Allowed, Accounting::Whole).unwrap();
        let spaces: Vec<_> =
            (0..PROGRAMS).map(|_| AddressSpace::new(&memory, options()).unwrap()).collect();
        for (space, sharing) in
            spaces.iter().zip([Sharing::Shared, Sharing::Private, Sharing::Shared])
        {
            map(space, &object, AT, PAGES * PAGE, sharing).unwrap();
        }
        thread::scope(|scope| {
            for number in 0..PROGRAMS {
                let (machine, space) = (&machine, &spaces[usize::from(number)]);
                scope.spawn(move || {
                    let _cpu = machine.bind(Cpu(number));
                    let program = Program::new(machine, space);
                    for round in 1..400_u64 {
                        let at = VirtAddr(AT + round * 13 % PAGES * PAGE);
                        let result = if round % 3 == 0 {
                            program.store(at, round)
                        } else {
                            program.load(at).map(|_| ())
                        };
                        assert!(matches!(result, Ok(()) | Err(FaultError::Bus)), "{result:?}");
                    }
                });
            }
            let (machine, object) = (&machine, object.clone());
            scope.spawn(move || {
                let _cpu = machine.bind(Cpu(PROGRAMS));
                for round in 0..150_u64 {
                    object.set_size(round * 11 % PAGES * PAGE + round).unwrap();
                    object.punch_hole(round % 16 * PAGE, 5 * PAGE).unwrap();
                    object.set_size(PAGES * PAGE).unwrap();
                }
            });
        });
        audit(&machine, &memory, &spaces.iter().collect::<Vec<_>>());
    }
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free);
}
