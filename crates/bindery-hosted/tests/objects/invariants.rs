//! Each invariant of objects, broken on purpose. The auditor reports it.

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::check::{self, Violation};
use bindery::testing::{self, FolioDamage, ObjectDamage, damage_object};
use bindery::{FileAccess, MapObject, MapRequest, Object, Place, Sharing};
use bindery_hosted::{Machine, MemoryFiles};

use crate::support::fixture::{Fixture, with_fixture};
use crate::support::objects::{PAGE, in_memory, memfd};
use crate::support::{GIB, READ_WRITE};

type Arch = X86_64<4>;
type Memfd<'m> = Object<'m, Machine<Arch>>;

const AT: u64 = GIB;

/// Four pages of shared memory, mapped and written.
fn mapped(scenario: impl FnOnce(&Fixture<'_, '_, Arch>, &Memfd<'_>)) {
    with_fixture::<Arch>(0, |fixture| {
        let object = memfd(fixture.memory, 4 * PAGE);
        let request = MapRequest {
            length: 4 * PAGE,
            protection: READ_WRITE,
            place: Place::Fixed(VirtAddr(AT)),
            sharing: Sharing::Shared,
            ..MapRequest::default()
        };
        let access = FileAccess::READ | FileAccess::WRITE;
        fixture
            .space
            .mmap_object(&request, &MapObject { object: &object, offset: 0, access })
            .unwrap();
        fixture.fill(AT, 4);
        scenario(fixture, &object);
    });
}

fn damaged(damage: ObjectDamage, undo: Option<ObjectDamage>) -> Violation {
    let mut found = None;
    mapped(|fixture, object| {
        damage_object(object, damage);
        found = Some(fixture.broken(&[]));
        match undo {
            Some(undo) => damage_object(object, undo),
            None => fixture.space.munmap(VirtAddr(AT), 4 * PAGE).unwrap(),
        }
    });
    found.unwrap()
}

#[test]
fn more_is_promised_than_the_object_has() {
    let (damage, undo) = (ObjectDamage::Committed(3), ObjectDamage::Committed(-3));
    assert_eq!(damaged(damage, Some(undo)), Violation::Committed { says: 7, holds: 4 });
}

#[test]
fn more_pages_count_as_dirty_than_are() {
    let (damage, undo) = (ObjectDamage::Unsaved(3), ObjectDamage::Unsaved(-3));
    assert_eq!(damaged(damage, Some(undo)), Violation::Unsaved { says: 3, holds: 0 });
}

#[test]
fn a_clean_file_is_listed_as_dirty() {
    let (damage, undo) = (ObjectDamage::UnsavedOf(3), ObjectDamage::UnsavedOf(-3));
    assert_eq!(damaged(damage, Some(undo)), Violation::Registry);
}

#[test]
fn a_dirty_file_is_counted_with_more_pages() {
    let files = MemoryFiles::new();
    in_memory(|memory, audit| {
        let file = memory.file_system(&files).file(1, 0).unwrap();
        file.write(0, &[1]).unwrap();
        audit();
        damage_object(&file, ObjectDamage::UnsavedOf(1));
        let mut scratch = vec![0; check::scratch_words(memory)];
        let found = check::check(memory, &[], &mut scratch).map(|_| ());
        assert!(matches!(found, Err(Violation::ObjectIndex(_))), "{found:?}");
        damage_object(&file, ObjectDamage::UnsavedOf(-1));
    });
}

#[test]
fn a_nonexistent_writable_mapping_is_counted() {
    let (more, fewer) = (ObjectDamage::MoreWriters, ObjectDamage::FewerWriters);
    assert_eq!(damaged(more, Some(fewer)), Violation::ObjectMappers(1));
    assert_eq!(damaged(fewer, Some(more)), Violation::ObjectMappers(1));
}

#[test]
fn two_pages_have_changed_places() {
    let swap = ObjectDamage::Swap(1, 3);
    assert_eq!(damaged(swap, Some(swap)), Violation::ObjectPage { object: 1, page: 1 });
}

#[test]
fn pages_are_being_saved_and_nobody_is_there() {
    let (damage, undo) = (ObjectDamage::Saving(1), ObjectDamage::Saving(0));
    assert_eq!(damaged(damage, Some(undo)), Violation::ObjectIndex(1));
}

#[test]
fn a_page_is_mapped_that_was_dropped() {
    let found = damaged(ObjectDamage::Drop(2), None);
    assert!(matches!(found, Violation::DroppedButMapped(_)), "{found}");
}

#[test]
fn a_folio_has_more_references_than_pages() {
    mapped(|fixture, _| {
        let frame = fixture.frame(AT);
        testing::damage_folio(fixture.memory, frame, FolioDamage::References(1));
        assert_eq!(fixture.broken(&[]), Violation::References { folio: frame, says: 2 });
        testing::damage_folio(fixture.memory, frame, FolioDamage::References(-1));
    });
}
