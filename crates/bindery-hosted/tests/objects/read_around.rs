//! Fault-around: the pages that a read fault maps besides its own, and the pages that it omits.

use std::ops::Range;

use bindery::addr::{VirtAddr, VirtRange};
use bindery::{
    Access, AddressSpace, Advice, FaultError, Inspection, MapRequest, Place, Resolved, Sharing,
};
use bindery_hosted::{Machine, Program, Walk};
use bindery_linux::proc::{self, ClearRefs};

use crate::support::READ_WRITE;
use crate::support::objects::{PAGE, content, memfd};
use crate::support::objects_fixture::{AT, map, with_fixture};

on_every_architecture! {
    reads_in_order_map_ever_longer_parts => in_order;
    reads_elsewhere_map_one_window => elsewhere;
    holes_and_pages_beyond_the_end_stay_unmapped => holes;
    pages_around_stay_protected => protected;
}

/// The pages of a table, and half of another table.
const PAGES: u64 = 768;

fn at(page: u64) -> VirtAddr {
    VirtAddr(AT + page * PAGE)
}

/// The pages that are mapped.
fn mapped<A: Walk>(space: &AddressSpace<'_, Machine<A>>) -> Vec<u64> {
    let is_mapped = |page: &u64| matches!(space.inspect(at(*page)), Inspection::Page { .. });
    (0..PAGES).filter(is_mapped).collect()
}

/// Reads an unmapped page. Returns the pages that the fault maps around it.
#[track_caller]
fn read<A: Walk>(space: &AddressSpace<'_, Machine<A>>, page: u64) -> Range<u64> {
    let before = mapped(space);
    let resolved = space.fault(at(page), Access::Read).unwrap();
    let Resolved::Mapped(range) = resolved else { panic!("{resolved:?}") };
    assert!(range.contains(at(page)));
    let mut new = mapped(space);
    new.retain(|page| !before.contains(page));
    let (first, last) = (new[0], new[new.len() - 1]);
    assert_eq!(new.len() as u64, last + 1 - first, "a gap in {new:?}");
    first..last + 1
}

fn written<'m, A: Walk>(
    memory: &'m bindery::Memory<Machine<A>>,
    pages: impl Iterator<Item = u64>,
) -> bindery::Object<'m, Machine<A>> {
    let object = memfd(memory, PAGES * PAGE);
    for page in pages {
        object.write(page * PAGE, &(page + 1).to_ne_bytes()).unwrap();
    }
    object
}

fn in_order<A: Walk>() {
    for sharing in [Sharing::Shared, Sharing::Private] {
        with_fixture::<A>(0, |fixture| {
            let object = written(fixture.memory, 0..PAGES);
            let space = fixture.space();
            map(&space, &object, AT, PAGES * PAGE, sharing).unwrap();
            let program = Program::new(fixture.machine, &space);
            let mut next = 0;
            let mut parts = Vec::new();
            while next < PAGES {
                let part = read(&space, next);
                assert_eq!(part.start, next);
                parts.push(part.end - part.start);
                next = part.end;
            }
            // The window stops at the edge of a table and at the end of the mapping.
            assert_eq!(parts, [16, 32, 64, 128, 256, 16, 16, 32, 64, 128, 16]);
            for page in 0..PAGES {
                assert_eq!(program.load(at(page)), Ok(page + 1));
            }
            fixture.audit(&[&space]);
        });
    }
}

fn elsewhere<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let object = written(fixture.memory, 0..PAGES);
        let space = fixture.space();
        map(&space, &object, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        // In the middle of a window, at its end, and before mapped pages.
        assert_eq!(read(&space, 103), 96..112);
        assert_eq!(read(&space, 63), 48..64);
        assert_eq!(read(&space, 80), 80..96);
        // After mapped pages, from the middle of a window on.
        assert_eq!(read(&space, 65), 64..80);
        assert_eq!(read(&space, 117), 112..240);
        // The pages before it belong to another mapping.
        let request = MapRequest {
            length: 16 * PAGE,
            protection: READ_WRITE,
            place: Place::Fixed(at(400)),
            ..MapRequest::default()
        };
        space.mmap(&request).unwrap();
        (400..416).for_each(|page| _ = space.fault(at(page), Access::Write).unwrap());
        assert_eq!(read(&space, 421), 416..432);
        space.madvise(at(300), 100 * PAGE, Advice::Random).unwrap();
        assert_eq!(read(&space, 304), 304..320);
        assert_eq!(read(&space, 320), 320..336);
        fixture.audit(&[&space]);
    });
}

fn holes<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let present = |page: &u64| page % 7 != 3 || *page < 20;
        let object = written(fixture.memory, (0..PAGES).filter(present));
        object.set_size(100 * PAGE).unwrap();
        let space = fixture.space();
        map(&space, &object, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        let program = Program::new(fixture.machine, &space);
        for page in [0, 16, 48] {
            assert_eq!(program.load(at(page)), Ok(page + 1));
        }
        let expected: Vec<_> = (0..100).filter(present).collect();
        assert_eq!(mapped(&space), expected);
        assert_eq!(program.load(at(100)), Err(FaultError::Bus));
        assert_eq!(program.load(at(24)), Ok(0), "a hole");
        object.punch_hole(50 * PAGE, 30 * PAGE).unwrap();
        object.set_size(90 * PAGE).unwrap();
        let expected: Vec<_> = (0..90)
            .filter(|page| present(page) && !(50..80).contains(page) || *page == 24)
            .collect();
        assert_eq!(mapped(&space), expected);
        fixture.audit(&[&space]);
    });
}

fn protected<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let object = written(fixture.memory, 0..PAGES);
        let (private, shared) = (fixture.space(), fixture.space());
        map(&private, &object, AT, PAGES * PAGE, Sharing::Private).unwrap();
        map(&shared, &object, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        proc::clear_refs(&shared, ClearRefs::SoftDirty).unwrap();
        for space in [&private, &shared] {
            for page in [0, 16, 48] {
                assert_eq!(read(space, page).start, page);
            }
        }
        let program = Program::new(fixture.machine, &private);
        for page in [1, 17, 60, 111] {
            // A copy, invisible to the object.
            program.store(at(page), 99).unwrap();
            assert_eq!(content(&object)[(page * PAGE) as usize], (page + 1) as u8);
        }
        let is_soft_dirty = |page: u64| match shared.inspect(at(page)) {
            Inspection::Page { attributes, .. } => attributes.soft_dirty,
            Inspection::Empty | Inspection::Absent(_) => panic!("page {page} is mapped"),
        };
        Program::new(fixture.machine, &shared).store(at(70), 7).unwrap();
        for page in 0..112 {
            assert_eq!(is_soft_dirty(page), page == 70);
        }
        let all = VirtRange::from_len(at(0), PAGES * PAGE).unwrap();
        shared.madvise(all.start(), all.len(), Advice::DontNeed).unwrap();
        assert!(mapped(&shared).is_empty());
        fixture.audit(&[&private, &shared]);
    });
}
