//! A driver that refuses that its mapping is moved or cut.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::MemoryType;
use bindery::{Access, AddressSpace, Advice, Errno, Error, Operation, Protection, Remap};
use bindery_hosted::{Machine, Walk};

use super::frames::AT;
use crate::support::devices::{DEVICE, Driver, leaf, map, shared};
use crate::support::{GIB, MIB, audit, fixed, options, strict};

on_every_architecture! {
    a_driver_may_refuse_moves => refused_moves;
    a_driver_may_refuse_cuts => refused_cuts;
    a_refused_cut_leaves_other_mappings => refused_in_the_middle;
}

const PAGES: u64 = 8;
const LENGTH: u64 = PAGES * PAGE_SIZE;
const TO: u64 = 2 * GIB;

/// The errors of a driver, and what they are as errnos.
const REFUSALS: [(Error, Errno); 3] = [
    (Error::Invalid, Errno::EINVAL),
    (Error::AccessDenied, Errno::EACCES),
    (Error::Busy, Errno::EBUSY),
];

type Space<'m, A> = AddressSpace<'m, Machine<A>>;

struct Fixture<'f, 'm, A: Walk> {
    driver: &'f Driver,
    space: Space<'m, A>,
}

/// Runs `scenario` with eight pages of a device mapped, the first of which was read.
fn with_mapping<A: Walk>(scenario: impl for<'f, 'm> FnOnce(&Fixture<'f, 'm, A>)) {
    let (machine, memory) = strict::<A>(32 * MIB);
    let driver = Driver::of(&[(0, DEVICE, PAGES as u32)]);
    let object = memory.frame_object(&driver, LENGTH, MemoryType::Device).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(AT, LENGTH)).unwrap();
    space.fault(VirtAddr(AT), Access::Read).unwrap();
    let fixture = Fixture { driver: &driver, space };
    scenario(&fixture);
    audit(&machine, &memory, &[&fixture.space]);
}

impl<A: Walk> Fixture<'_, '_, A> {
    /// Checks that the call fails with the driver's error, and that nothing has changed.
    #[track_caller]
    fn refuses(&self, call: impl Fn(&Space<'_, A>) -> Result<(), Error>, refuse: impl Fn(Error)) {
        for (error, errno) in REFUSALS {
            let mappings = self.space.mapping_count();
            self.driver.take_made_and_removed();
            refuse(error);
            let result = call(&self.space);
            self.driver.refuse(None, None);
            assert_eq!(result, Err(error));
            assert_eq!(error.errno(Operation::Mremap), errno);
            assert_eq!(self.space.mapping_count(), mappings);
            assert_eq!(self.driver.take_made_and_removed(), (0, 0));
            assert_eq!(self.driver.take_moves(), []);
            for page in 0..PAGES {
                let frame = leaf(&self.space, AT + page * PAGE_SIZE).map(|leaf| leaf.0);
                assert_eq!(frame, Some(DEVICE.plus(page as u32)), "page {page}");
            }
        }
    }
}

fn refused_moves<A: Walk>() {
    with_mapping::<A>(|fixture| {
        let (at, page) = (VirtAddr(AT), VirtAddr(AT + PAGE_SIZE));
        let refuse = |error| fixture.driver.refuse(Some(error), None);
        let moved = |from, length, remap| {
            move |space: &Space<'_, A>| space.mremap(from, length, length, remap).map(drop)
        };
        fixture.refuses(moved(at, LENGTH, Remap::To(VirtAddr(TO))), refuse);
        fixture.refuses(moved(page, PAGE_SIZE, Remap::To(VirtAddr(TO))), refuse);
        // What is mapped at the destination stays.
        fixture.space.mmap(&fixed(TO, PAGE_SIZE)).unwrap();
        fixture.space.write_user(VirtAddr(TO), b"kept").unwrap();
        fixture.refuses(moved(at, LENGTH, Remap::To(VirtAddr(TO))), refuse);
        let mut kept = [0; 4];
        fixture.space.read_user(VirtAddr(TO), &mut kept).unwrap();
        assert_eq!(&kept, b"kept");
        // A shorter mapping at another place loses nothing.
        let shorter =
            |space: &Space<'_, A>| space.mremap(at, LENGTH, PAGE_SIZE, Remap::To(VirtAddr(TO)));
        fixture.refuses(|space| shorter(space).map(drop), refuse);
        assert!(shorter(&fixture.space).is_ok(), "the driver allows it now");
        assert_eq!(fixture.driver.take_moves(), [(AT, 1, TO)]);
    });
}

fn refused_cuts<A: Walk>() {
    with_mapping::<A>(|fixture| {
        let (at, page) = (VirtAddr(AT), VirtAddr(AT + PAGE_SIZE));
        let refuse = |error| fixture.driver.refuse(None, Some(error));
        fixture.driver.take_cuts();
        fixture.refuses(|space| space.munmap(page, PAGE_SIZE), refuse);
        assert_eq!(fixture.driver.take_cuts(), [page.0; REFUSALS.len()]);
        fixture.refuses(|space| space.munmap(at, PAGE_SIZE), refuse);
        assert_eq!(fixture.driver.take_cuts(), [page.0; REFUSALS.len()]);
        fixture.refuses(|space| space.munmap(page, LENGTH), refuse);
        fixture.refuses(|space| space.mmap(&fixed(page.0, PAGE_SIZE)).map(drop), refuse);
        fixture.refuses(|space| space.mprotect(page, PAGE_SIZE, Protection::READ), refuse);
        fixture.refuses(|space| space.madvise(page, PAGE_SIZE, Advice::DontFork), refuse);
        let moves = Remap::To(VirtAddr(TO));
        fixture.refuses(|space| space.mremap(page, PAGE_SIZE, PAGE_SIZE, moves).map(drop), refuse);
        let shrinks =
            |space: &Space<'_, A>| space.mremap(at, LENGTH, PAGE_SIZE, Remap::InPlace).map(drop);
        fixture.refuses(shrinks, refuse);
        // No cut is needed for the whole mapping, nor for a fork.
        fixture.driver.take_cuts();
        refuse(Error::Invalid);
        let child = fixture.space.fork().unwrap();
        fixture.space.mprotect(at, LENGTH, Protection::READ).unwrap();
        fixture.space.mremap(at, LENGTH, LENGTH, moves).unwrap();
        fixture.space.munmap(VirtAddr(TO - PAGE_SIZE), LENGTH + 2 * PAGE_SIZE).unwrap();
        drop(child);
        assert_eq!(fixture.driver.take_cuts(), []);
        assert_eq!(fixture.driver.mappings(), 0);
    });
}

/// As on Linux, a call has changed the mappings before the one that it must not cut, except that an
/// unmapping changes none.
fn refused_in_the_middle<A: Walk>() {
    with_mapping::<A>(|fixture| {
        let Fixture { space, driver, .. } = fixture;
        let before = VirtAddr(AT - PAGE_SIZE);
        space.mmap(&fixed(before.0, PAGE_SIZE)).unwrap();
        space.write_user(before, b"kept").unwrap();
        driver.refuse(None, Some(Error::Invalid));
        assert_eq!(space.munmap(before, 2 * PAGE_SIZE), Err(Error::Invalid));
        let mut kept = [0; 4];
        space.read_user(before, &mut kept).unwrap();
        assert_eq!((&kept, space.mapping_count()), (b"kept", 2));
        let read = space.mprotect(before, 2 * PAGE_SIZE, Protection::READ);
        assert_eq!(read, Err(Error::Invalid));
        assert!(space.write_user(before, b"lost").is_err());
        driver.refuse(None, None);
        space.munmap(before, 2 * PAGE_SIZE).unwrap();
    });
}
