//! Private mappings of frames that are not the core's: a write copies the page.

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{Absent, MemoryType};
use bindery::{
    Access, AddressSpace, Advice, Error, FaultError, FrameRange, Inspection, MapFlags, MapObject,
    MapRequest, Memory, Object, PinTime, Protection, Remap, Resolved, Sharing,
};
use bindery_hosted::{Machine, Program, Walk};
use bindery_linux::proc::{self, Unnamed};

use super::frames_in_calls::with_device;
use crate::support::devices::{BOTH, DEVICE, Driver, leaf, map, shared};
use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, options, strict};

const AT: u64 = GIB;
const HUGE: u64 = 2 * MIB;
/// A shared mapping of the same frames, which shows the device's bytes.
const SHARED: u64 = 2 * GIB;

/// The parts available to a scenario.
struct Scene<'s, 'm, A: Walk> {
    machine: &'m Machine<A>,
    memory: &'m Memory<Machine<A>>,
    driver: &'m Driver,
    object: &'s Object<'m, Machine<A>>,
    block: FrameRange,
    space: &'s AddressSpace<'m, Machine<A>>,
    program: Program<'s, 'm, A>,
}

/// A block of 2 MiB, mapped privately and shared; each page holds its number.
fn scene<A: Walk>(scenario: impl FnOnce(&Scene<'_, '_, A>)) {
    let (machine, memory) = strict::<A>(32 * MIB);
    let block = memory.allocate_frames(Order(9)).unwrap();
    let driver = Driver::of(&[(0, block.first, block.count)]);
    let object = memory.frame_object(&driver, HUGE, MemoryType::Normal).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &fixed(AT, HUGE)).unwrap();
    map(&space, &object, &shared(SHARED, HUGE)).unwrap();
    let program = Program::new(&machine, &space);
    for page in 0..512 {
        program.store(VirtAddr(SHARED + page * PAGE_SIZE), page).unwrap();
    }
    let (machine, memory, driver, object) = (&machine, &memory, &driver, &object);
    scenario(&Scene { machine, memory, driver, object, block, space: &space, program });
    audit(machine, memory, &[&space]);
    drop(space);
    assert_eq!(driver.mappings(), 0);
    // SAFETY: 1. the scene allocated the block; 2. no program maps the block now.
    assert!(unsafe { memory.free_frames(block) });
    audit(machine, memory, &[]);
}

impl<A: Walk> Scene<'_, '_, A> {
    fn store(&self, page: u64, value: u64) {
        self.program.store(VirtAddr(AT + page * PAGE_SIZE), value).unwrap();
    }

    /// The values of a page in the private mapping and in the shared one.
    fn values(&self, page: u64) -> [u64; 2] {
        [AT, SHARED].map(|start| self.program.load(VirtAddr(start + page * PAGE_SIZE)).unwrap())
    }

    fn frame(&self, page: u64) -> Option<bindery::addr::Frame> {
        leaf(self.space, AT + page * PAGE_SIZE).map(|leaf| leaf.0)
    }

    fn audit(&self) {
        audit(self.machine, self.memory, &[self.space]);
    }
}

on_every_architecture! {
    a_write_copies_the_page_and_no_other => copied;
    a_first_write_maps_the_frames_and_copies_one => first_write;
    a_child_has_the_copies_and_makes_its_own => forked;
    protections_come_and_go => protected;
    copies_are_swapped_out_and_in => swapped;
    a_revoke_leaves_the_copies => revoked;
    copies_move_with_the_mapping => moved;
    frames_outside_of_the_memory_are_never_copied => unreadable;
    a_copy_without_memory_changes_nothing => without_memory;
    a_writable_private_mapping_is_shown_whole => private_whole;
}

fn copied<A: Walk>() {
    scene::<A>(|scene| {
        assert_eq!(scene.values(7), [7, 7]);
        assert_eq!(leaf(scene.space, AT).map(|leaf| leaf.2), Some(2), "one leaf for all of it");
        scene.store(7, 700);
        assert_eq!(scene.values(7), [700, 7]);
        assert_ne!(scene.frame(7), Some(scene.block.first.plus(7)));
        assert_eq!(scene.frame(8), Some(scene.block.first.plus(8)));
        // The other pages still show the device.
        scene.program.store(VirtAddr(SHARED + 8 * PAGE_SIZE), 800).unwrap();
        assert_eq!(scene.values(8), [800, 800]);
        assert_eq!((scene.space.resident().anonymous, scene.space.resident().total()), (1, 1));
        // The program owns the copy, so the next write copies nothing.
        let again = scene.space.fault(VirtAddr(AT + 7 * PAGE_SIZE), Access::Write);
        assert_eq!(again, Ok(Resolved::Spurious));
        let mut text = String::new();
        proc::smaps(scene.space, &Unnamed, &mut text).unwrap();
        assert!(text.contains("Rss:                   4 kB\n"), "{text}");
        for advice in [Advice::DontNeed, Advice::PageOut, Advice::Cold, Advice::Free] {
            assert_eq!(scene.space.madvise(VirtAddr(AT), HUGE, advice), Err(Error::Invalid));
        }
        // Copies are refused to the same calls as the frames.
        let pinned = scene.space.pin(VirtAddr(AT + 7 * PAGE_SIZE), 1, Access::Read, PinTime::Short);
        assert!(pinned.is_err());
        scene.audit();
        scene.space.munmap(VirtAddr(AT + 6 * PAGE_SIZE), 3 * PAGE_SIZE).unwrap();
        assert_eq!(scene.space.resident().total(), 0);
    });
}

fn first_write<A: Walk>() {
    scene::<A>(|scene| {
        let at = VirtAddr(AT + 100 * PAGE_SIZE);
        assert_eq!(scene.space.fault(at, Access::Write), Ok(Resolved::Copied));
        assert_eq!(scene.values(100), [100, 100]);
        assert_eq!(scene.frame(101), Some(scene.block.first.plus(101)));
        scene.space.munmap(VirtAddr(AT), HUGE).unwrap();
        // Populating the mapping copies nothing.
        let request = MapRequest { flags: MapFlags::POPULATE, ..fixed(AT, HUGE) };
        map(scene.space, scene.object, &request).unwrap();
        assert_eq!(scene.frame(511), Some(scene.block.first.plus(511)));
        assert_eq!(scene.space.resident().total(), 0);
    });
}

fn forked<A: Walk>() {
    scene::<A>(|scene| {
        scene.store(1, 100);
        scene.store(2, 200);
        let child = scene.space.fork().unwrap();
        let program = Program::new(scene.machine, &child);
        let of_child = |page| program.load(VirtAddr(AT + page * PAGE_SIZE)).unwrap();
        assert_eq!([1, 2, 3].map(of_child), [100, 200, 3]);
        program.store(VirtAddr(AT + PAGE_SIZE), 101).unwrap();
        program.store(VirtAddr(AT + 3 * PAGE_SIZE), 301).unwrap();
        scene.store(2, 201);
        assert_eq!([1, 2, 3].map(of_child), [101, 200, 301]);
        assert_eq!([1, 2, 3].map(|page| scene.values(page)), [[100, 1], [201, 2], [3, 3]]);
        audit(scene.machine, scene.memory, &[scene.space, &child]);
        // The leaves that the child got from the parent are revoked there too.
        scene.driver.set(&[]);
        scene.object.revoke(0, HUGE).unwrap();
        assert_eq!(leaf(&child, AT + 5 * PAGE_SIZE), None);
        assert_eq!(of_child(1), 101);
        audit(scene.machine, scene.memory, &[scene.space, &child]);
    });
}

fn protected<A: Walk>() {
    scene::<A>(|scene| {
        let set = |protection| scene.space.mprotect(VirtAddr(AT), HUGE, protection).unwrap();
        scene.store(1, 100);
        for protection in [Protection::READ, Protection::empty()] {
            set(protection);
            scene.audit();
            set(READ_WRITE);
            scene.audit();
            assert_eq!([scene.values(1), scene.values(2)], [[100, 1], [2, 2]]);
        }
        scene.store(2, 200);
        assert_eq!(scene.values(2), [200, 2], "the frame did not become writable");
        // An initially read-only mapping may become writable and then copies on write.
        scene.space.munmap(VirtAddr(AT), HUGE).unwrap();
        let request = MapRequest { protection: Protection::READ, ..fixed(AT, HUGE) };
        map(scene.space, scene.object, &request).unwrap();
        assert_eq!(scene.values(9), [9, 9]);
        set(READ_WRITE);
        scene.store(9, 900);
        assert_eq!(scene.values(9), [900, 9]);
    });
}

fn swapped<A: Walk>() {
    scene::<A>(|scene| {
        let area = scene.memory.swap_on(100, 0).unwrap();
        for page in 0..16 {
            scene.store(page, 1000 + page);
        }
        while scene.space.resident().anonymous > 0 {
            assert!(scene.memory.reclaim(64).scanned > 0, "they are all swapped out");
        }
        assert!(matches!(
            scene.space.inspect(VirtAddr(AT)),
            Inspection::Absent(Absent::Swap { .. })
        ));
        scene.audit();
        let child = scene.space.fork().unwrap();
        for page in 0..16 {
            assert_eq!(scene.values(page), [1000 + page, page]);
        }
        let program = Program::new(scene.machine, &child);
        assert_eq!(program.load(VirtAddr(AT + 3 * PAGE_SIZE)), Ok(1003));
        audit(scene.machine, scene.memory, &[scene.space, &child]);
        drop(child);
        scene.space.munmap(VirtAddr(AT), HUGE).unwrap();
        scene.memory.swap_off(&area).unwrap();
    });
}

fn revoked<A: Walk>() {
    scene::<A>(|scene| {
        let area = scene.memory.swap_on(100, 0).unwrap();
        scene.store(1, 100);
        while scene.space.resident().anonymous > 0 {
            assert!(scene.memory.reclaim(64).scanned > 0, "it is swapped out");
        }
        scene.store(2, 200);
        scene.store(3, 300);
        let hidden = VirtAddr(AT + 3 * PAGE_SIZE);
        scene.space.mprotect(hidden, 2 * PAGE_SIZE, Protection::empty()).unwrap();
        scene.driver.set(&[]);
        scene.object.revoke(0, HUGE).unwrap();
        scene.space.mprotect(hidden, 2 * PAGE_SIZE, READ_WRITE).unwrap();
        let load = |page| scene.program.load(VirtAddr(AT + page * PAGE_SIZE));
        let bus = Err(FaultError::Bus);
        assert_eq!([0, 1, 2, 3, 4].map(load), [bus, Ok(100), Ok(200), Ok(300), bus]);
        scene.audit();
        scene.space.munmap(VirtAddr(AT), HUGE).unwrap();
        scene.memory.swap_off(&area).unwrap();
    });
}

fn moved<A: Walk>() {
    scene::<A>(|scene| {
        scene.store(1, 100);
        for to in [3 * GIB, 4 * GIB + 5 * PAGE_SIZE] {
            let from = VirtAddr(if to == 3 * GIB { AT } else { 3 * GIB });
            scene.space.mremap(from, HUGE, HUGE, Remap::To(VirtAddr(to))).unwrap();
            let values = [1, 2].map(|page| scene.program.load(VirtAddr(to + page * PAGE_SIZE)));
            assert_eq!(values, [Ok(100), Ok(2)]);
            scene.audit();
        }
        let grown =
            scene.space.mremap(VirtAddr(4 * GIB + 5 * PAGE_SIZE), HUGE, 2 * HUGE, Remap::MayMove);
        assert!(matches!(grown, Err(Error::Fault(_))));
    });
}

/// The direct map of a platform need not contain these frames.
fn unreadable<A: Walk>() {
    scene::<A>(|scene| {
        scene.driver.set(&[(0, DEVICE, 512)]);
        scene.object.revoke(0, HUGE).unwrap();
        for at in [AT, AT + 7 * PAGE_SIZE] {
            assert_eq!(scene.space.fault(VirtAddr(at), Access::Write), Err(FaultError::Bus));
            assert_eq!(leaf(scene.space, at).map(|leaf| leaf.2), Some(2), "it may be read");
        }
    });
}

fn without_memory<A: Walk>() {
    scene::<A>(|scene| {
        let at = VirtAddr(AT + 7 * PAGE_SIZE);
        assert_eq!(scene.values(7), [7, 7]);
        for allowed in 0.. {
            scene.memory.fail_allocations_after(Some(allowed));
            let resolved = scene.space.fault(at, Access::Write);
            scene.memory.fail_allocations_after(None);
            scene.audit();
            assert_eq!(scene.values(7), [7, 7]);
            if resolved == Ok(Resolved::Copied) {
                break;
            }
            assert_eq!(resolved, Err(FaultError::OutOfMemory));
        }
    });
}

/// Linux's `remap_pfn_range` refuses a part of a mapping that is or may become private and
/// writable.
fn private_whole<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let block = memory.allocate_frames(Order(3)).unwrap();
    let driver = Driver::of(&[(0, block.first, 4), (4, DEVICE, 2), (6, block.first.plus(4), 2)]);
    let object = memory.frame_object(&driver, 10 * PAGE_SIZE, MemoryType::Normal).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let map = |protection, sharing, first: u64, pages: u64| {
        let request = MapRequest { protection, sharing, ..fixed(AT, pages * PAGE_SIZE - 5) };
        let source = MapObject { object: &object, offset: first * PAGE_SIZE, access: BOTH };
        space.mmap_object(&request, &source)
    };
    let (ours, shared, invalid) = (Sharing::Private, Sharing::Shared, Err(Error::Invalid));
    for protection in [READ_WRITE, Protection::READ, Protection::empty()] {
        // Without the last page, beyond the object, and with a hole in the middle.
        assert_eq!(map(protection, ours, 0, 9), invalid, "{protection:?}");
        assert_eq!(map(protection, ours, 8, 1), invalid, "{protection:?}");
        assert_eq!(map(protection, ours, 7, 4), invalid, "{protection:?}");
        assert_eq!(space.mapping_count(), 0);
        assert_eq!(map(protection, shared, 0, 11), Ok(VirtAddr(AT)));
        space.munmap(VirtAddr(AT), 11 * PAGE_SIZE).unwrap();
    }
    driver.set(&[(0, block.first, 4), (5, DEVICE, 1)]);
    assert_eq!(map(READ_WRITE, ours, 0, 6), invalid);
    assert_eq!(map(READ_WRITE, ours, 1, 3), Ok(VirtAddr(AT)));
    // A mapping that was shown whole stays what it is when parts of it are cut, moved, protected.
    let (at, page) = (VirtAddr(AT + PAGE_SIZE), PAGE_SIZE);
    space.mprotect(at, page, Protection::READ).unwrap();
    driver.set(&[]);
    space.mprotect(at, page, READ_WRITE).unwrap();
    space.mremap(at, page, page, Remap::To(VirtAddr(2 * AT))).unwrap();
    let grown = space.mremap(VirtAddr(2 * AT), page, 2 * page, Remap::MayMove);
    assert_eq!(grown, Err(Error::Fault(VirtAddr(2 * AT + page))));
    assert_eq!(space.fault(VirtAddr(2 * AT), Access::Write), Err(FaultError::Bus));
    audit(&machine, &memory, &[&space]);
    // A private mapping that never becomes writable has no such rule.
    let registers = memory.frame_object(&driver, page, MemoryType::Device).unwrap();
    let request = MapRequest { protection: Protection::READ, ..fixed(4 * AT, page) };
    let source = MapObject { object: &registers, offset: 0, access: BOTH };
    space.mmap_object(&request, &source).unwrap();
}

#[test]
fn a_private_device_mapping_is_never_writable() {
    with_device(|memory, object, _| {
        let space = AddressSpace::new(memory, options()).unwrap();
        assert_eq!(map(&space, object, &fixed(AT, PAGE_SIZE)), Err(Error::Invalid));
        let request = MapRequest { protection: Protection::READ, ..fixed(AT, PAGE_SIZE) };
        map(&space, object, &request).unwrap();
        space.fault(VirtAddr(AT), Access::Read).unwrap();
        let denied = space.mprotect(VirtAddr(AT), PAGE_SIZE, READ_WRITE);
        assert_eq!(denied, Err(Error::AccessDenied));
        assert_eq!(space.reap(), Ok(()));
        assert!(leaf(&space, AT).is_some(), "not a content of the process");
    });
}
