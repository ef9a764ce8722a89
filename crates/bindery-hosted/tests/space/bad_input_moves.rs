//! Moves that make no sense: each fails with the right error and changes nothing, not even a
//! counter.

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{
    Accounting, AddressSpace, Advice, Error, FaultError, FileAccess, MapFlags, MapObject,
    MapRequest, Place, Protection, Remap, Sealing, Sharing, SpaceOptions, SyncFlags,
};
use bindery_hosted::Walk;

use super::refusal::{AT, MINIMUM, PAGE, nowhere, out_of_range, refused, scene};
use crate::support::{GIB, MIB, anywhere, audit, fixed, options, strict};

on_every_architecture! {
    a_resizing_that_cannot_be_is_refused => resize;
    a_move_that_cannot_be_is_refused => move_to;
    an_impossible_tail_fails_after_the_unmap => tail;
    an_impossible_move_with_staying_source_is_refused => leave;
    a_staying_source_without_room_keeps_contents => no_room;
}

fn resize<A: Walk>() {
    scene::<A>(|fixture, end| {
        for remap in [Remap::InPlace, Remap::MayMove] {
            let resize = |old, old_length, length, expected| {
                refused(fixture, expected, |space| {
                    space.mremap(VirtAddr(old), old_length, length, remap)
                });
            };
            for at in [AT + 1, AT + PAGE - 1, u64::MAX] {
                resize(at, PAGE, PAGE, Error::Unaligned(VirtAddr(at)));
            }
            // A length that wraps when it is rounded up is zero.
            for length in [0, u64::MAX, u64::MAX - PAGE + 2] {
                resize(AT, PAGE, length, Error::ZeroLength);
                resize(end, length, length, Error::ZeroLength);
            }
            for length in [end + 1, 1 << 57, 1 << 63, u64::MAX - PAGE + 1] {
                resize(AT, 16 * PAGE, length, out_of_range(end));
            }
            for at in nowhere(end).into_iter().chain([0, AT - PAGE, AT + 32 * PAGE]) {
                resize(at, PAGE, 2 * PAGE, Error::NotMapped(VirtAddr(at)));
                resize(at, 0, PAGE, Error::NotMapped(VirtAddr(at)));
            }
            resize(AT, 0, PAGE, Error::NotShared);
            let crossing = Error::CrossesMapping { end: VirtAddr(AT + 16 * PAGE) };
            resize(AT, 17 * PAGE, 18 * PAGE, crossing);
            resize(AT + 15 * PAGE, 2 * PAGE, 3 * PAGE, crossing);
            resize(AT, 16 * PAGE, end, Error::NoRoom);
        }
        let in_place = |old, old_length| {
            refused(fixture, Error::NoRoom, |space| {
                space.mremap(VirtAddr(old), old_length, old_length + PAGE, Remap::InPlace)
            });
        };
        in_place(AT, 16 * PAGE);
        in_place(AT, 3 * PAGE);
        // Shrinking a mapping to these lengths would unmap a tail beyond user space.
        for tail in [1 << 63, u64::MAX - PAGE + 1] {
            refused(fixture, out_of_range(end), |space| {
                space.mremap(VirtAddr(AT), tail, PAGE, Remap::InPlace)
            });
        }
    });
}

fn move_to<A: Walk>() {
    scene::<A>(|fixture, end| {
        let old = AT + 2 * PAGE;
        let move_to = |old_length, length, to, expected| {
            refused(fixture, expected, |space| {
                space.mremap(VirtAddr(old), old_length, length, Remap::To(VirtAddr(to)))
            });
        };
        for to in [1, AT + 64 * PAGE + 1, end - 1] {
            move_to(PAGE, PAGE, to, Error::Unaligned(VirtAddr(to)));
        }
        for to in nowhere(end) {
            move_to(PAGE, PAGE, to, out_of_range(end));
        }
        move_to(PAGE, 2 * PAGE, end - PAGE, out_of_range(end));
        move_to(PAGE, end, PAGE, out_of_range(end));
        move_to(PAGE, end + 1, AT, out_of_range(end));
        move_to(PAGE, 0, AT + 64 * PAGE, Error::ZeroLength);
        move_to(2 * PAGE, 2 * PAGE, old, Error::Overlap);
        move_to(2 * PAGE, 2 * PAGE, old + PAGE, Error::Overlap);
        move_to(2 * PAGE, 2 * PAGE, old - PAGE, Error::Overlap);
        move_to(PAGE, 3 * PAGE, old - 2 * PAGE, Error::Overlap);
        move_to(0, PAGE, AT + 64 * PAGE, Error::NotShared);
        let crossing = Error::CrossesMapping { end: VirtAddr(AT + 16 * PAGE) };
        move_to(15 * PAGE, 16 * PAGE, AT + 64 * PAGE, crossing);
        for to in [0, PAGE, MINIMUM.0 - PAGE] {
            move_to(PAGE, PAGE, to, Error::BelowMinimum { minimum: MINIMUM });
            move_to(8 * PAGE, PAGE, to, Error::BelowMinimum { minimum: MINIMUM });
        }
        for at in nowhere(end).into_iter().chain([0, AT - PAGE, AT + 32 * PAGE]) {
            let to = Remap::To(VirtAddr(AT + 64 * PAGE));
            let expected = Error::NotMapped(VirtAddr(at));
            refused(fixture, expected, |space| space.mremap(VirtAddr(at), PAGE, PAGE, to));
        }
        // A range that begins in a hole is unmapped at its start, whatever follows.
        let (hole, to) = (VirtAddr(AT - PAGE), Remap::To(VirtAddr(AT + 64 * PAGE)));
        refused(fixture, Error::NotMapped(hole), |space| {
            space.mremap(hole, 4 * PAGE, 4 * PAGE, to)
        });
    });
}

/// As on Linux, the destination is emptied before the tail, which extends beyond user space, is cut
/// off.
fn tail<A: Walk>() {
    scene::<A>(|fixture, end| {
        let (from, to) = (end - 2 * PAGE, AT + 64 * PAGE);
        for at in [from, to] {
            fixture.space.mmap(&fixed(at, 2 * PAGE)).unwrap();
            fixture.fill(at, 2);
        }
        let moved = fixture.space.mremap(VirtAddr(from), 3 * PAGE, PAGE, Remap::To(VirtAddr(to)));
        assert_eq!(moved, Err(out_of_range(end)));
        fixture.assert_filled(from, 2, from);
        assert_eq!(fixture.program.load(VirtAddr(to)), Err(FaultError::NotMapped));
        assert_eq!(fixture.program.load(VirtAddr(to + PAGE)), Ok(to + 1));
        assert_eq!(fixture.layout().len(), 4, "{:?}", fixture.layout());
    });
}

/// All kinds of moves that leave the source mapped.
const LEAVING: [fn(VirtAddr) -> Remap; 2] = [Remap::Leave, Remap::LeaveTo];

fn leave<A: Walk>() {
    scene::<A>(|fixture, end| {
        let old = AT + 2 * PAGE;
        for kind in LEAVING {
            let leave = |old, old_length, length, to, expected| {
                refused(fixture, expected, |space| {
                    space.mremap(VirtAddr(old), old_length, length, kind(VirtAddr(to)))
                });
            };
            for at in [AT + 1, AT + PAGE - 1, u64::MAX] {
                leave(at, PAGE, PAGE, AT + 64 * PAGE, Error::Unaligned(VirtAddr(at)));
            }
            for to in [1, AT + 64 * PAGE + 1, end - 1] {
                leave(old, PAGE, PAGE, to, Error::Unaligned(VirtAddr(to)));
            }
            for to in nowhere(end) {
                leave(old, PAGE, PAGE, to, out_of_range(end));
            }
            leave(old, 2 * PAGE, 2 * PAGE, end - PAGE, out_of_range(end));
            leave(old, end, end, PAGE, out_of_range(end));
            leave(old, end + 1, end + 1, AT, out_of_range(end));
            leave(old, PAGE, 0, AT + 64 * PAGE, Error::ZeroLength);
            leave(old, u64::MAX, u64::MAX, AT + 64 * PAGE, Error::ZeroLength);
            // The part that stays must be as long as the moved part.
            for (old_length, length) in [(PAGE, 2 * PAGE), (2 * PAGE, PAGE), (0, PAGE)] {
                leave(old, old_length, length, AT + 64 * PAGE, Error::Invalid);
                leave(old, old_length, length, old, Error::Invalid);
                leave(old, old_length, length, 0, Error::Invalid);
            }
            leave(old, 2 * PAGE, PAGE, end - PAGE / 2, Error::Unaligned(VirtAddr(end - PAGE / 2)));
            leave(old, PAGE, 2 * PAGE, end - PAGE, out_of_range(end));
            for to in [old, old + PAGE, old - PAGE] {
                leave(old, 2 * PAGE, 2 * PAGE, to, Error::Overlap);
            }
            // As on Linux, no hint means the lowest address.
            leave(AT, 2 * GIB, 2 * GIB, 0, Error::Overlap);
            for at in nowhere(end).into_iter().chain([0, AT - PAGE, AT + 32 * PAGE]) {
                leave(at, PAGE, PAGE, AT + 64 * PAGE, Error::NotMapped(VirtAddr(at)));
            }
            // A range that begins in a hole is unmapped at its start, whatever follows.
            let hole = Error::NotMapped(VirtAddr(AT - PAGE));
            leave(AT - PAGE, 4 * PAGE, 4 * PAGE, AT + 64 * PAGE, hole);
        }
        for to in [0, PAGE, MINIMUM.0 - PAGE] {
            refused(fixture, Error::BelowMinimum { minimum: MINIMUM }, |space| {
                space.mremap(VirtAddr(old), PAGE, PAGE, Remap::LeaveTo(VirtAddr(to)))
            });
        }
        // Only a fixed destination accepts several mappings.
        let crossing = Error::CrossesMapping { end: VirtAddr(AT + 16 * PAGE) };
        for to in [0, PAGE, AT + 64 * PAGE] {
            refused(fixture, crossing, |space| {
                space.mremap(VirtAddr(old), 15 * PAGE, 15 * PAGE, Remap::Leave(VirtAddr(to)))
            });
        }
    });
}

fn no_room<A: Walk>() {
    scene::<A>(|fixture, end| {
        // Longer than the free range below the mapping and the free range above it.
        let length = (end / 2 - GIB) & !(PAGE - 1);
        let large = length + 64 * PAGE;
        fixture.space.mmap(&fixed(large, length)).unwrap();
        fixture.fill(large, 2);
        for hint in [0, PAGE, MINIMUM.0, 64 * PAGE] {
            refused(fixture, Error::NoRoom, |space| {
                space.mremap(VirtAddr(large), length, length, Remap::Leave(VirtAddr(hint)))
            });
        }
        fixture.assert_filled(large, 2, large);
    });
}

/// If nothing fits below the embedder's top, any free range serves, as on Linux.
#[test]
fn a_search_finds_ranges_across_its_top() {
    let (machine, memory) = strict::<X86_64<4>>(32 * MIB);
    let top = 1 << 30;
    let search_top = Some(VirtAddr(top));
    let space = AddressSpace::new(&memory, SpaceOptions { search_top, ..options() }).unwrap();
    let fill = |from: u64, to: u64| space.mmap(&fixed(from, to - from)).map(drop).unwrap();
    fill(0x1_0000, top - MIB);
    fill(top + MIB, top + 2 * MIB);
    let at = |length| space.mmap(&anywhere(length)).map(|at| at.0);
    assert_eq!(at(2 * MIB - PAGE), Ok(top - MIB), "across the top");
    // Directly above the top, and below a stack.
    let (stack, flags) = (top + 8 * MIB, MapFlags::GROWS_DOWN);
    fill(top + MIB - PAGE, top + 7 * MIB);
    space.mmap(&MapRequest { flags, ..fixed(stack, MIB) }).unwrap();
    assert_eq!(at(MIB / 2), Ok(stack + MIB), "above the stack and its guard gap");
    audit(&machine, &memory, &[&space]);
}

/// As on Linux, a mapping may grow and be duplicated beyond an object's maximum size, until a page
/// number no longer fits.
#[test]
fn a_mapping_may_extend_beyond_an_objects_maximum() {
    const STEP: u64 = 1 << 54;
    let (machine, memory) = strict::<X86_64<5>>(64 * MIB);
    let object = memory.shared_memory(PAGE, Sealing::Allowed, Accounting::PerPage).unwrap();
    let search_top = Some(VirtAddr((1 << 56) - PAGE));
    let space = AddressSpace::new(&memory, SpaceOptions { search_top, ..options() }).unwrap();
    let request = MapRequest {
        length: PAGE,
        protection: Protection::READ | Protection::WRITE,
        place: Place::Fixed(VirtAddr(AT)),
        sharing: Sharing::Shared,
        ..MapRequest::default()
    };
    let access = FileAccess::READ | FileAccess::WRITE;
    let source = MapObject { object: &object, offset: (1 << 63) - 2 * PAGE, access };
    let mut at = space.mmap_object(&request, &source).unwrap();
    let mut steps = 0;
    let refused = loop {
        let view = match space.mremap(at, 0, STEP, Remap::MayMove) {
            Ok(view) => view,
            Err(error) => break error,
        };
        space.munmap(at, PAGE).unwrap();
        at = VirtAddr(view.0 + STEP - PAGE);
        space.munmap(view, STEP - PAGE).unwrap();
        assert_eq!(space.msync(at, PAGE, SyncFlags::SYNC), Ok(()));
        assert_eq!(space.madvise(at, PAGE, Advice::Remove), Err(Error::Invalid));
        assert_eq!(space.fault(at, bindery::Access::Read), Err(FaultError::Bus));
        steps += 1;
    };
    // From 2^51 pages on, by 2^42 pages: the index of a page has 52 bits.
    assert_eq!((refused, steps), (Error::Invalid, 512));
    audit(&machine, &memory, &[&space]);
}
