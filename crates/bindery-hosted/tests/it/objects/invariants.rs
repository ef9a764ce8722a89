//! Each invariant of objects, broken on purpose: the auditor says which one.

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::check::Violation;
use bindery::testing::{self, FolioDamage, ObjectDamage, damage_object};
use bindery::{FileAccess, MapObject, MapRequest, Object, Place, Sharing};
use bindery_hosted::Machine;

use crate::support::objects::{PAGE, memfd};
use crate::support::stage::{Stage, on_stage};
use crate::support::{GIB, READ_WRITE};

type Arch = X86_64<4>;
type Memfd<'m> = Object<'m, Machine<Arch>>;

const AT: u64 = GIB;

/// Four pages of shared memory, mapped and written.
fn mapped(play: impl FnOnce(&Stage<'_, '_, Arch>, &Memfd<'_>)) {
    on_stage::<Arch>(0, |stage| {
        let object = memfd(stage.memory, 4 * PAGE);
        let request = MapRequest {
            length: 4 * PAGE,
            protection: READ_WRITE,
            place: Place::Fixed(VirtAddr(AT)),
            sharing: Sharing::Shared,
            ..MapRequest::default()
        };
        let access = FileAccess::READ | FileAccess::WRITE;
        stage
            .space
            .mmap_object(&request, &MapObject { object: &object, offset: 0, access })
            .unwrap();
        stage.fill(AT, 4);
        play(stage, &object);
    });
}

fn damaged(damage: ObjectDamage, undo: Option<ObjectDamage>) -> Violation {
    let mut found = None;
    mapped(|stage, object| {
        damage_object(object, damage);
        found = Some(stage.broken(&[]));
        match undo {
            Some(undo) => damage_object(object, undo),
            None => stage.space.munmap(VirtAddr(AT), 4 * PAGE).unwrap(),
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
fn a_writable_mapping_is_counted_that_is_not_there() {
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
fn a_folio_has_more_references_than_pages_that_an_object_names() {
    mapped(|stage, _| {
        let frame = stage.frame(AT);
        testing::damage_folio(stage.memory, frame, FolioDamage::References(1));
        assert_eq!(stage.broken(&[]), Violation::References { folio: frame, says: 2 });
        testing::damage_folio(stage.memory, frame, FolioDamage::References(-1));
    });
}
