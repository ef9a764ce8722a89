//! Calls for mappings of frames that are not the core's: their answers, and the reports to the
//! source.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::MemoryType;
use bindery::{
    Access, AddressSpace, Advice, Error, FaultError, FileAccess, LockPages, MapFlags, MapObject,
    MapRequest, Memory, Object, PinError, PinTime, Protection, Remap, Residence, Seals,
};
use bindery_hosted::Machine;
use bindery_linux::proc::{self, Unnamed};

use super::frames::{AT, X86};
use crate::support::devices::{BOTH, DEVICE, Driver, leaf, map, shared};
use crate::support::{MIB, READ_WRITE, audit, fixed, options, strict};

pub(super) fn with_device(
    scenario: impl for<'m> FnOnce(&'m Memory<Machine<X86>>, &Object<'m, Machine<X86>>, &'m Driver),
) {
    let (machine, memory) = strict::<X86>(32 * MIB);
    let driver = Driver::of(&[(0, DEVICE, 16)]);
    scenario(&memory, &memory.frame_object(&driver, MIB, MemoryType::Device).unwrap(), &driver);
    assert_eq!(driver.mappings(), 0);
    audit(&machine, &memory, &[]);
}

#[test]
fn calls_have_the_answers_of_linux() {
    with_device(|memory, object, _| {
        let space = AddressSpace::new(memory, options()).unwrap();
        let (at, length) = (VirtAddr(AT), 16 * PAGE_SIZE);
        map(&space, object, &shared(AT, length)).unwrap();
        space.fault(at, Access::Write).unwrap();
        let refused = [
            Advice::DontNeed,
            Advice::DontNeedLocked,
            Advice::Free,
            Advice::Cold,
            Advice::PageOut,
            Advice::DoFork,
            Advice::WipeOnFork,
            Advice::DoDump,
            Advice::Collapse,
            Advice::PopulateRead,
            Advice::PopulateWrite,
            Advice::GuardInstall,
            Advice::GuardRemove,
        ];
        for advice in Advice::ALL {
            let expected = match advice {
                Advice::Remove => Err(Error::NoContent),
                advice if refused.contains(advice) => Err(Error::Invalid),
                _ => Ok(()),
            };
            assert_eq!(space.madvise(at, length, *advice), expected, "{advice:?}");
        }
        assert!(leaf(&space, AT).is_some(), "no advice has unmapped it");
        // The mapping cannot grow, and the attempt leaves nothing behind.
        let grown = space.mremap(at, length, 2 * length, Remap::MayMove);
        assert_eq!(grown, Err(Error::Fault(VirtAddr(AT + length))));
        assert_eq!(space.mremap(at, 0, length, Remap::MayMove), Err(Error::Fault(at)));
        let left = Remap::Leave(VirtAddr(2 * AT));
        assert_eq!(space.mremap(at, length, length, left), Err(Error::Invalid));
        // Its pages cannot be locked or pinned, and no other process can read them.
        assert_eq!(space.mlock(at, length, LockPages::Now), Ok(()));
        assert_eq!(space.usage().locked, 0);
        let pinned = space.pin(at, 1, Access::Read, PinTime::Short).map(drop);
        assert_eq!(pinned, Err(PinError::Fault(FaultError::Protection)));
        let mut bytes = [0];
        assert_eq!(space.read_foreign(at, &mut bytes), Err(FaultError::Protection));
        assert_eq!(space.read_user(at, &mut bytes), Err(FaultError::Protection));
        space.mincore(at, length, |there, _| assert_eq!(there, Residence::Absent)).unwrap();
        let mut text = String::new();
        proc::smaps(&space, &Unnamed, &mut text).unwrap();
        assert!(text.contains("Rss:                   0 kB\n"), "{text}");
        assert!(text.contains("VmFlags: rd wr sh mr mw ms pf io "), "{text}");
    });
}

#[test]
fn handles_have_no_content() {
    with_device(|memory, object, driver| {
        assert!(object.shows_frames());
        assert_eq!(object.read(0, &mut [0]), Err(Error::Invalid));
        assert_eq!(object.write(0, &[0]), Err(Error::Invalid));
        assert_eq!(object.set_size(2 * MIB), Err(Error::Invalid));
        let empty = memory.frame_object(driver, 0, MemoryType::Device).unwrap();
        assert_eq!(empty.set_size(MIB), Err(Error::Invalid), "also once");
        assert_eq!(object.punch_hole(0, PAGE_SIZE), Err(Error::NoContent));
        let allocated = object.allocate(0, PAGE_SIZE, bindery::Growth::Allowed);
        assert_eq!(allocated, Err(Error::NoContent));
        assert_eq!(object.add_seals(Seals::GROW), Err(Error::Invalid));
        assert_eq!((object.next_data(5), object.next_hole(5)), (Some(5), Some(MIB)));
        assert_eq!(object.sync(0, MIB), Ok(()));
    });
}

#[test]
fn the_source_follows_every_mapping() {
    with_device(|memory, object, driver| {
        let space = AddressSpace::new(memory, options()).unwrap();
        map(&space, object, &shared(AT, 16 * PAGE_SIZE)).unwrap();
        assert_eq!(driver.mappings(), 1);
        space.munmap(VirtAddr(AT + 4 * PAGE_SIZE), PAGE_SIZE).unwrap();
        assert_eq!(driver.mappings(), 2, "a hole makes two of one");
        let child = space.fork().unwrap();
        assert_eq!(driver.mappings(), 4);
        drop(child);
        assert_eq!(driver.mappings(), 2);
        // Neighbors do not merge: each is a separate mapping of the driver's.
        map(&space, object, &shared(2 * AT, PAGE_SIZE)).unwrap();
        let next = MapObject { object, offset: PAGE_SIZE, access: BOTH };
        space.mmap_object(&shared(2 * AT + PAGE_SIZE, PAGE_SIZE), &next).unwrap();
        assert_eq!((driver.mappings(), space.mapping_count()), (4, 4));
    });
}

#[test]
fn the_source_hears_of_every_move() {
    with_device(|memory, object, driver| {
        let space = AddressSpace::new(memory, options()).unwrap();
        let at = |page: u64| VirtAddr(AT + page * PAGE_SIZE);
        let told = || (driver.take_made_and_removed(), driver.take_moves());
        let made_and_removed = |made, removed| ((made, removed), Vec::new());
        let move_to = |from, pages: u64, to| {
            let length = pages * PAGE_SIZE;
            space.mremap(from, length, length, Remap::To(to)).unwrap();
        };
        map(&space, object, &shared(AT, 16 * PAGE_SIZE)).unwrap();
        space.fault(at(0), Access::Write).unwrap();
        assert_eq!(told(), made_and_removed(1, 0));
        // Between its neighbors, a mapping moves as it is; past a neighbor, it is made anew.
        move_to(at(0), 16, at(100));
        assert_eq!(told(), ((0, 0), vec![(AT, 16, at(100).0)]));
        space.mmap(&fixed(at(200).0, PAGE_SIZE)).unwrap();
        move_to(at(100), 16, at(300));
        assert_eq!(told(), ((1, 1), vec![(at(100).0, 16, at(300).0)]));
        // A part from the middle: the parts around it are two mappings.
        move_to(at(304), 4, at(0));
        assert_eq!((driver.mappings(), space.mapping_count()), (3, 4));
        assert_eq!(told(), ((3, 1), vec![(at(304).0, 4, AT)]));
        move_to(at(308), 2, at(20));
        move_to(at(314), 2, at(30));
        let moves = vec![(at(308).0, 2, at(20).0), (at(314).0, 2, at(30).0)];
        assert_eq!(told(), ((4, 2), moves));
        // A part that is unmapped: at an end, by a smaller size, in the middle.
        space.munmap(at(310), PAGE_SIZE).unwrap();
        space.mremap(at(311), 3 * PAGE_SIZE, 2 * PAGE_SIZE, Remap::InPlace).unwrap();
        assert_eq!(told(), made_and_removed(2, 2));
        space.munmap(at(1), PAGE_SIZE).unwrap();
        assert_eq!(told(), made_and_removed(2, 1));
        // Several mappings, the last of which is sealed.
        let first = VirtAddr(4 * AT);
        map(&space, object, &shared(first.0, PAGE_SIZE)).unwrap();
        map(&space, object, &shared(first.0 + PAGE_SIZE, PAGE_SIZE)).unwrap();
        space.mseal(VirtAddr(first.0 + PAGE_SIZE), PAGE_SIZE).unwrap();
        told();
        let both = space.mremap(first, 2 * PAGE_SIZE, 2 * PAGE_SIZE, Remap::To(at(500)));
        assert_eq!(both, Err(Error::Sealed(VirtAddr(first.0 + PAGE_SIZE))));
        let (_, moves) = told();
        assert_eq!(moves, [(first.0, 1, at(500).0)], "what has really moved");
        assert_eq!(leaf(&space, first.0), None);
    });
}

#[test]
fn the_source_hears_of_no_move_that_fails() {
    let (machine, memory) = strict::<X86>(4 * MIB);
    let driver = Driver::of(&[(0, DEVICE, 16)]);
    let object = memory.frame_object(&driver, MIB, MemoryType::Device).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let (at, length) = (VirtAddr(AT), 16 * PAGE_SIZE);
    map(&space, &object, &shared(AT, length)).unwrap();
    space.fault(at, Access::Write).unwrap();
    driver.take_made_and_removed();
    let to = VirtAddr(2 * AT);
    space.mremap(at, length, 2 * length, Remap::MayMove).unwrap_err();
    space.mremap(at, length, length, Remap::Leave(to)).unwrap_err();
    space.mremap(at, length, length, Remap::LeaveTo(to)).unwrap_err();
    for (source, pages) in [(at, 16), (VirtAddr(2 * AT + 4 * PAGE_SIZE), 4)] {
        let (length, to) = (pages * PAGE_SIZE, VirtAddr(source.0 + AT));
        for allowed in 0.. {
            memory.fail_allocations_after(Some(allowed));
            let moved = space.mremap(source, length, length, Remap::To(to));
            memory.fail_allocations_after(None);
            audit(&machine, &memory, &[&space]);
            if moved == Ok(to) {
                break;
            }
            assert_eq!(moved, Err(Error::OutOfMemory));
            assert_eq!((driver.take_made_and_removed(), driver.take_moves()), ((0, 0), vec![]));
        }
        assert_eq!(driver.take_moves(), [(source.0, pages, to.0)]);
        driver.take_made_and_removed();
    }
    for allowed in 0.. {
        memory.fail_allocations_after(Some(allowed));
        let child = space.fork();
        memory.fail_allocations_after(None);
        if let Ok(child) = child {
            assert_eq!(driver.take_made_and_removed(), (3, 0));
            drop(child);
            break;
        }
        let (made, removed) = driver.take_made_and_removed();
        assert_eq!(made, removed, "a child that fails has no mappings");
    }
}

/// Linux's vDSO does not consist of such frames. Its pages are folios, and a debugger copies them.
#[test]
fn an_embedders_mapping_neither_grows_nor_merges() {
    let (machine, memory) = strict::<X86>(32 * MIB);
    let image =
        memory.shared_memory(2 * PAGE_SIZE, bindery::Sealing::Forbidden, bindery::Accounting::None);
    let image = image.unwrap();
    image.write(0, b"code").unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let at = VirtAddr(AT);
    let request = MapRequest {
        protection: Protection::READ | Protection::EXECUTE,
        flags: MapFlags::DONT_EXPAND | MapFlags::LOCKED,
        ..fixed(AT, PAGE_SIZE)
    };
    let source = |offset| MapObject { object: &image, offset, access: FileAccess::READ };
    space.mmap_object(&request, &source(0)).unwrap();
    let next = MapRequest { place: bindery::Place::Fixed(next_page(at)), ..request };
    space.mmap_object(&next, &source(PAGE_SIZE)).unwrap();
    assert_eq!((space.mapping_count(), space.usage().locked), (2, 0));
    space.munmap(next_page(at), PAGE_SIZE).unwrap();
    let grown = space.mremap(at, PAGE_SIZE, 2 * PAGE_SIZE, Remap::MayMove);
    assert_eq!(grown, Err(Error::Fault(next_page(at))));
    for advice in [Advice::DoDump, Advice::GuardInstall] {
        assert_eq!(space.madvise(at, PAGE_SIZE, advice), Err(Error::Invalid));
    }
    assert_eq!(space.madvise(at, PAGE_SIZE, Advice::DontNeed), Ok(()));
    // A breakpoint is private to the program.
    space.mprotect(at, PAGE_SIZE, READ_WRITE).unwrap();
    space.write_user(at, b"trap").unwrap();
    let mut bytes = [0; 4];
    image.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"code");
    let moved = space.mremap(at, PAGE_SIZE, PAGE_SIZE, Remap::To(VirtAddr(2 * AT)));
    assert_eq!(moved, Ok(VirtAddr(2 * AT)), "it may move");
    let mut text = String::new();
    proc::smaps(&space, &Unnamed, &mut text).unwrap();
    assert!(text.contains(" de "), "{text}");
    audit(&machine, &memory, &[&space]);
}

fn next_page(at: VirtAddr) -> VirtAddr {
    VirtAddr(at.0 + PAGE_SIZE)
}
