//! Reclaim of file pages: clean unused pages are dropped and later read again unchanged; all other
//! pages stay.

use bindery::addr::VirtAddr;
use bindery::arch::{Level, X86_64};
use bindery::testing::{
    ObjectFolio, Spare, frame_of_page, reclaim_frame, reclaim_page, with_folio_locked,
    with_reference,
};
use bindery::{
    Access, AddressSpace, Advice, Inspection, LockPages, Object, PinTime, Protection, ReadPattern,
    Sharing,
};
use bindery_hosted::{Machine, MemoryFiles, Program, Walk};

use crate::support::objects::{PAGE, content, memfd, use_object_order};
use crate::support::objects_fixture::{AT, Fixture, map, with_fixture};
use crate::support::{MIB, audit, options, strict};

on_every_architecture! {
    clean_pages_go_and_come_again => clean;
    dirty_pages_stay_until_they_are_saved => dirty;
    used_pages_are_reclaimed_when_unused_again => used;
    what_comes_back_soon_is_hot => missed;
    what_is_read_in_order_goes_at_once => sequential;
    what_has_become_prot_none_goes => hidden;
    a_huge_mapping_goes => huge;
    copies_of_private_mappings_stay => copies;
    locked_pages_stay => locked;
    pinned_and_held_pages_stay => held;
    a_folios_rest_goes_without_its_returned_pages => punched;
    shared_memory_stays => shared;
}

pub(super) const PAGES: u64 = 32;

pub(super) fn at(page: u64) -> VirtAddr {
    VirtAddr(AT + page * PAGE)
}

pub(super) fn bytes() -> Vec<u8> {
    (0..PAGES * PAGE).map(|n| (n / PAGE) as u8 + 1).collect()
}

/// The value that a program loads from the page.
pub(super) fn word(page: u64) -> u64 {
    (page + 1) * 0x0101_0101_0101_0101
}

/// Runs `scenario` with a file of [`PAGES`] pages, in folios of 2^`order` pages.
fn with_file<A: Walk>(
    order: u8,
    scenario: impl FnOnce(&Fixture<'_, A>, &Object<'_, Machine<A>>, &MemoryFiles),
) {
    let files = MemoryFiles::new();
    files.put(1, &bytes());
    with_fixture::<A>(order, |fixture| {
        let file = fixture.memory.file(&files, 1, PAGES * PAGE).unwrap();
        scenario(fixture, &file, &files);
        fixture.audit(&[]);
    });
}

pub(super) fn reclaim<A: Walk>(file: &Object<'_, Machine<A>>, page: u64) -> ObjectFolio {
    reclaim_page(file, page, Spare::Used).expect("a page in memory")
}

fn clean<A: Walk>() {
    for order in [0, 4] {
        with_file::<A>(order, |fixture, file, files| {
            assert_eq!(content(file), bytes());
            let free = fixture.memory.free_frame_count();
            let mut page = 0;
            while page < PAGES {
                assert_eq!(reclaim(file, page), ObjectFolio::Freed(1 << order));
                page += 1 << order;
                assert_eq!(file.resident_pages(), PAGES - page);
            }
            assert!(fixture.memory.free_frame_count() >= free + PAGES);
            let reads = files.counts().pages_read;
            assert_eq!(content(file), bytes());
            assert_eq!(files.counts().pages_read, reads + PAGES);
            assert_eq!(files.counts().writes, 0);
        });
    }
}

fn dirty<A: Walk>() {
    with_file::<A>(2, |fixture, file, files| {
        assert_eq!(content(file), bytes());
        file.write(5 * PAGE + 3, &[99]).unwrap();
        let space = fixture.space();
        map(&space, file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        Program::new(fixture.machine, &space).store(at(8), 77).unwrap();
        for page in [4, 5, 6, 7, 8, 11] {
            assert_eq!(reclaim_page(file, page, Spare::Nothing), Some(ObjectFolio::Dirty));
        }
        assert_eq!(reclaim(file, 0), ObjectFolio::Freed(4));
        assert_eq!(files.counts().writes, 0);
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(reclaim(file, 5), ObjectFolio::Freed(4));
        assert_eq!(reclaim_page(file, 8, Spare::Nothing), Some(ObjectFolio::Freed(4)));
        assert_eq!(space.inspect(at(8)), Inspection::Empty);
        fixture.audit(&[&space]);
        let mut byte = [0];
        file.read(5 * PAGE + 3, &mut byte).unwrap();
        assert_eq!(byte, [99]);
        assert_eq!(Program::new(fixture.machine, &space).load(at(8)), Ok(77));
    });
}

fn used<A: Walk>() {
    for order in [0, 4] {
        with_file::<A>(order, |fixture, file, _| {
            let spaces = [Sharing::Shared, Sharing::Private].map(|sharing| {
                let space = fixture.space();
                map(&space, file, AT, PAGES * PAGE, sharing).unwrap();
                space
            });
            let programs = spaces.each_ref().map(|space| Program::new(fixture.machine, space));
            let load = |program: &Program<'_, '_, A>| {
                assert_eq!(program.load(at(3)), Ok(word(3)));
            };
            programs.iter().for_each(load);
            assert_eq!(reclaim(file, 3), ObjectFolio::Used);
            // A use by one program suffices.
            load(&programs[1]);
            assert_eq!(reclaim(file, 3), ObjectFolio::Used);
            fixture.audit(&[&spaces[0], &spaces[1]]);
            // The page is hot now and is dropped after two scans have found it unused.
            assert_eq!(reclaim(file, 3), ObjectFolio::Used);
            assert_eq!(reclaim(file, 3), ObjectFolio::Freed(1 << order));
            for space in &spaces {
                assert_eq!(space.inspect(at(3)), Inspection::Empty);
            }
            fixture.audit(&[&spaces[0], &spaces[1]]);
            programs.iter().for_each(load);
        });
    }
}

/// The number of reclaim attempts until the page is dropped.
fn looks<A: Walk>(file: &Object<'_, Machine<A>>, page: u64) -> u64 {
    (1..10).find(|_| reclaim(file, page) == ObjectFolio::Freed(1)).expect("it goes in the end")
}

/// A dropped page leaves a shadow entry while one of its neighbors is in memory.
fn missed<A: Walk>() {
    with_file::<A>(0, |fixture, file, _| {
        let file = &mut file.clone();
        // Only requested pages are read, not their neighbors.
        file.set_read_pattern(ReadPattern::Random);
        let read = |page| assert_eq!(file.read(page * PAGE, &mut [0; 8]), Ok(8));
        // Until memory is short, no shadow is needed.
        [3, 4].into_iter().for_each(read);
        assert_eq!(looks(file, 3), 1);
        read(3);
        assert_eq!(looks(file, 3), 1);
        fixture.memory.reclaim(0);
        read(3);
        assert_eq!(looks(file, 3), 2, "it is hot at first");
        // The shadow is lost with the last of its neighbors.
        assert_eq!(looks(file, 4), 1);
        read(3);
        assert_eq!(looks(file, 3), 1);
    });
}

fn sequential<A: Walk>() {
    with_file::<A>(0, |fixture, file, _| {
        let space = fixture.space();
        map(&space, file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        space.madvise(at(0), PAGES * PAGE, Advice::Sequential).unwrap();
        assert_eq!(Program::new(fixture.machine, &space).load(at(1)), Ok(word(1)));
        assert_eq!(reclaim(file, 1), ObjectFolio::Freed(1));
    });
}

fn hidden<A: Walk>() {
    with_file::<A>(0, |fixture, file, _| {
        let space = fixture.space();
        map(&space, file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        assert_eq!(Program::new(fixture.machine, &space).load(at(1)), Ok(word(1)));
        space.mprotect(at(0), PAGES * PAGE, Protection::empty()).unwrap();
        assert_eq!(reclaim(file, 1), ObjectFolio::Freed(1));
        fixture.audit(&[&space]);
        assert_eq!(space.inspect(at(1)), Inspection::Empty);
    });
}

fn huge<A: Walk>() {
    let files = MemoryFiles::new();
    files.put(1, &vec![6; 4 * MIB as usize]);
    with_fixture::<A>(9, |fixture| {
        let file = fixture.memory.file(&files, 1, 4 * MIB).unwrap();
        let space = fixture.space();
        map(&space, &file, AT, 4 * MIB, Sharing::Shared).unwrap();
        let program = Program::new(fixture.machine, &space);
        assert_eq!(program.load(VirtAddr(AT + MIB)), Ok(0x0606_0606_0606_0606));
        let found = space.inspect(VirtAddr(AT));
        assert!(matches!(found, Inspection::Page { level, .. } if level == Level::PMD));
        assert_eq!(reclaim(&file, 0), ObjectFolio::Used);
        assert_eq!(reclaim(&file, 256), ObjectFolio::Freed(512));
        assert_eq!((space.inspect(VirtAddr(AT)), file.resident_pages()), (Inspection::Empty, 0));
        fixture.audit(&[&space]);
        assert_eq!(program.load(VirtAddr(AT + MIB)), Ok(0x0606_0606_0606_0606));
    });
}

fn copies<A: Walk>() {
    with_file::<A>(3, |fixture, file, _| {
        let space = fixture.space();
        map(&space, file, AT, PAGES * PAGE, Sharing::Private).unwrap();
        let program = Program::new(fixture.machine, &space);
        assert_eq!(program.load(at(3)), Ok(word(3)));
        program.store(at(2), 1234).unwrap();
        assert_eq!(reclaim_page(file, 2, Spare::Nothing), Some(ObjectFolio::Freed(8)));
        assert_eq!(space.inspect(at(3)), Inspection::Empty);
        fixture.audit(&[&space]);
        assert_eq!(program.load(at(2)), Ok(1234));
        assert_eq!(program.load(at(3)), Ok(word(3)));
    });
}

fn locked<A: Walk>() {
    with_file::<A>(2, |fixture, file, _| {
        let (space, other) = (fixture.space(), fixture.space());
        for space in [&space, &other] {
            map(space, file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        }
        assert_eq!(Program::new(fixture.machine, &other).load(at(1)), Ok(word(1)));
        space.mlock(at(1), PAGE, LockPages::Now).unwrap();
        for spare in [Spare::Used, Spare::Nothing] {
            assert_eq!(reclaim_page(file, 1, spare), Some(ObjectFolio::NotReclaimable));
        }
        assert!(matches!(space.inspect(at(1)), Inspection::Page { .. }));
        space.munlock(at(1), PAGE).unwrap();
        assert_eq!(reclaim_page(file, 1, Spare::Nothing), Some(ObjectFolio::Freed(4)));
        fixture.audit(&[&space, &other]);
    });
}

fn held<A: Walk>() {
    with_file::<A>(2, |fixture, file, _| {
        let memory = fixture.memory;
        let space = fixture.space();
        map(&space, file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        let pin = space.pin(at(1), 1, Access::Read, PinTime::Short).unwrap();
        let frame = frame_of_page(file, 1).unwrap();
        let reclaim = || reclaim_frame(memory, frame, Spare::Nothing).unwrap();
        assert_eq!(reclaim(), ObjectFolio::Busy);
        assert!(matches!(space.inspect(at(1)), Inspection::Page { .. }));
        drop(pin);
        let busy = with_reference(memory, frame, |_, _| reclaim());
        assert_eq!(busy, Some(ObjectFolio::Busy));
        assert_eq!(with_folio_locked(memory, frame, reclaim), ObjectFolio::Busy);
        assert_eq!(reclaim(), ObjectFolio::Freed(4));
        assert_eq!(reclaim_frame(memory, frame, Spare::Nothing), None);
        fixture.audit(&[&space]);
    });
}

fn punched<A: Walk>() {
    with_file::<A>(3, |fixture, file, files| {
        let space = fixture.space();
        map(&space, file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        let program = Program::new(fixture.machine, &space);
        assert_eq!(program.load(at(3)), Ok(word(3)));
        file.punch_hole(2 * PAGE, PAGE).unwrap();
        assert_eq!(program.load(at(2)), Ok(0));
        let other = frame_of_page(file, 2).unwrap();
        assert_eq!(reclaim_page(file, 3, Spare::Nothing), Some(ObjectFolio::Freed(8)));
        assert_eq!((file.resident_pages(), frame_of_page(file, 2)), (1, Some(other)));
        assert!(matches!(space.inspect(at(2)), Inspection::Page { .. }));
        assert_eq!(space.inspect(at(3)), Inspection::Empty);
        fixture.audit(&[&space]);
        let mut expected = bytes();
        expected[2 * PAGE as usize..3 * PAGE as usize].fill(0);
        assert_eq!(content(file), expected);
        assert_eq!(files.content(1), expected);
    });
}

fn shared<A: Walk>() {
    with_fixture::<A>(2, |fixture| {
        let object = memfd(fixture.memory, PAGES * PAGE);
        object.write(0, &[1]).unwrap();
        let found = reclaim_page(&object, 0, Spare::Nothing);
        assert_eq!(found, Some(ObjectFolio::NotReclaimable));
        assert_eq!(object.resident_pages(), 4);
    });
}

pub(super) type X = X86_64<4>;

#[test]
fn a_file_larger_than_memory_is_read() {
    const SIZE: u64 = 64 * MIB;
    let files = MemoryFiles::new();
    let expected: Vec<u8> = (0..SIZE).map(|n| (n / PAGE % 251) as u8).collect();
    for order in [0, 4] {
        files.put(1, &expected);
        let (machine, memory) = strict::<X>(16 * MIB);
        use_object_order(&memory, order);
        let file = memory.file(&files, 1, SIZE).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        map(&space, &file, AT, SIZE, Sharing::Shared).unwrap();
        // In one call.
        assert!(content(&file) == expected);
        audit(&machine, &memory, &[&space]);
        let program = Program::new(&machine, &space);
        for page in 0..SIZE / PAGE {
            let word = u64::from_le_bytes([(page % 251) as u8; 8]);
            assert_eq!(program.load(at(page)), Ok(word));
        }
        audit(&machine, &memory, &[&space]);
        // Dirty pages are not dropped, so the others must suffice.
        for page in (0..SIZE / PAGE).step_by(64) {
            program.store(at(page), page).unwrap();
        }
        assert!(content(&file).len() as u64 == SIZE);
        for page in (0..SIZE / PAGE).step_by(64) {
            assert_eq!(program.load(at(page)), Ok(page));
        }
        audit(&machine, &memory, &[&space]);
    }
}

/// Calls that copy mark the copied pages as used: repeatedly read pages stay in memory while a
/// program reads a file larger than memory once.
#[test]
fn hot_pages_of_a_file_survive_a_scan() {
    const HOT: u64 = 512;
    const SCANNED: u64 = 16 * 1024;
    let (machine, memory) = strict::<X86_64<4>>(16 * MIB);
    use_object_order(&memory, 0);
    let files = MemoryFiles::new();
    files.put(1, &vec![1; (HOT * PAGE) as usize]);
    files.put(2, &vec![2; (SCANNED * PAGE) as usize]);
    {
        let hot = memory.file(&files, 1, HOT * PAGE).unwrap();
        let scanned = memory.file(&files, 2, SCANNED * PAGE).unwrap();
        let mut page = vec![0; PAGE as usize];
        for number in 0..SCANNED {
            assert_eq!(scanned.read(number * PAGE, &mut page), Ok(PAGE as usize));
            // Reads the hot pages three times while the scan passes through memory.
            if number % 2 == 0 {
                let number = number / 2 % HOT;
                assert_eq!(hot.read(number * PAGE, &mut page), Ok(PAGE as usize));
                assert_eq!(page[0], 1);
            }
        }
        let again = files.counts().pages_read - SCANNED - HOT;
        assert!(again < HOT, "{again} reads of hot pages found them gone");
        audit(&machine, &memory, &[]);
    }
}
