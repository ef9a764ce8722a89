//! The pager consents before a mapping writes to a page of a file. Each page for which it has
//! reserved a block is dirty, and each dirty page of the mapping has a block.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::{KeyRights, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, Advice, Error, FaultError, FaultPoll, LockPages, Memory, Object,
    PagerError, PinTime, Protection, Resolved, Sharing, TriedFault,
};
use bindery_hosted::{Config, Machine};

use super::held_pager::Io;
use super::reserving_pager::ReservingFiles;
use crate::support::objects::{PAGE, use_object_order};
use crate::support::objects_fixture::{AT, map};
use crate::support::{MIB, audit, memory_with, options};

type A = X86_64<4>;

pub const PAGES: u64 = 8;

pub fn at(page: u64) -> VirtAddr {
    VirtAddr(AT + page * PAGE)
}

/// A file of [`PAGES`] holes, mapped shared at [`AT`].
pub struct Fixture<'m> {
    pub machine: &'m Machine<A>,
    pub memory: &'m Memory<Machine<A>>,
    pub pager: &'m ReservingFiles,
    pub file: Object<'m, Machine<A>>,
    pub space: AddressSpace<'m, Machine<A>>,
}

/// Runs `scenario` with a storage of this number of blocks. In the end, the pages with a reserved
/// block are the dirty ones; then all of them are stored.
pub fn with_blocks(blocks: usize, scenario: impl FnOnce(&Fixture<'_>)) {
    with_size((blocks, PAGES, 0), scenario);
}

pub fn with_size((blocks, pages, order): (usize, u64, u8), scenario: impl FnOnce(&Fixture<'_>)) {
    let config = Config { memory: 64 * MIB, cpus: 3, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    use_object_order(&memory, order);
    let pager = ReservingFiles::new(blocks);
    {
        let file = memory.file(&pager, 1, pages * PAGE).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        map(&space, &file, AT, pages * PAGE, Sharing::Shared).unwrap();
        let fixture = Fixture { machine: &machine, memory: &memory, pager: &pager, file, space };
        scenario(&fixture);
        fixture.check();
        audit(&machine, &memory, &[&fixture.space]);
        fixture.file.sync(0, u64::MAX).unwrap();
        assert_eq!(pager.reserved(), [], "a reserved block is not used");
    }
    assert_eq!(audit(&machine, &memory, &[]).objects, 0);
}

impl<'m> Fixture<'m> {
    /// The pages with a reserved block, all of which must be dirty.
    #[track_caller]
    pub fn check(&self) -> Vec<u64> {
        let reserved = self.pager.reserved();
        let dirty = self.memory.dirty_limit().pages();
        assert!(reserved.len() as u64 <= dirty, "{reserved:?} are reserved, {dirty} dirty");
        reserved
    }

    pub fn write(&self, page: u64) -> Result<Resolved, FaultError> {
        self.space.fault(at(page), Access::Write)
    }

    pub fn asked(&self) -> Vec<(u64, u64)> {
        self.pager.asked(Io::MakeWritable)
    }

    pub fn try_write(&self, page: u64) -> TriedFault<'_, 'm, Machine<A>> {
        self.space.try_fault(at(page), Access::Write, KeyRights::ALL).unwrap()
    }

    pub fn punch(&self, page: u64) {
        self.file.punch_hole(page * PAGE, PAGE).unwrap();
    }

    pub fn byte(&self, page: u64) -> u8 {
        let mut byte = [0];
        self.space.read_user(at(page), &mut byte).unwrap();
        byte[0]
    }
}

#[test]
fn a_write_without_room_is_refused() {
    with_blocks(2, |fixture| {
        fixture.space.write_user(at(0), b"a").unwrap();
        fixture.space.write_user(at(1), b"b").unwrap();
        assert_eq!(fixture.write(2), Err(FaultError::Bus));
        assert_eq!(fixture.check(), [0, 1]);
        assert_eq!(fixture.memory.dirty_limit().pages(), 2, "a refused page stays clean");
        assert_eq!(fixture.byte(2), 0, "it can be read");
        assert_eq!(fixture.write(2), Err(FaultError::Bus), "also when it is mapped");
        let populated = fixture.space.madvise(at(0), 4 * PAGE, Advice::PopulateWrite);
        assert_eq!(populated, Err(Error::Fault(at(2))));
        assert_eq!(fixture.space.mlock(at(2), PAGE, LockPages::Now), Ok(()));
        let written = fixture.space.write_user(at(2), b"c");
        assert!(written.is_err(), "{written:?}");
        let pinned = fixture.space.pin(at(2), 1, Access::Write, PinTime::Short);
        assert_eq!(pinned.err(), Some(FaultError::Bus.into()));
        fixture.punch(0);
        assert_eq!(fixture.check(), [1]);
        assert!(fixture.write(2).is_ok(), "the block of the hole is free");
        assert_eq!(fixture.check(), [1, 2]);
        fixture.file.set_size(PAGE).unwrap();
        assert_eq!(fixture.check(), [], "and so are those of a truncation");
    });
}

#[test]
fn a_stored_page_is_asked_for_again() {
    with_blocks(2, |fixture| {
        assert!(fixture.write(0).is_ok() && fixture.write(1).is_ok());
        assert_eq!(fixture.asked(), [(0, 1), (1, 1)]);
        assert_eq!(fixture.write(0), Ok(Resolved::Spurious));
        assert_eq!(fixture.asked().len(), 2, "a writable page needs no consent");
        fixture.file.sync(0, u64::MAX).unwrap();
        assert_eq!(fixture.pager.stored(), [0, 1]);
        assert!(fixture.write(0).is_ok(), "a page with a block needs no room");
        assert_eq!(fixture.asked()[2..], [(0, 1)]);
        // The first write through another mapping.
        let other = AddressSpace::new(fixture.memory, options()).unwrap();
        map(&other, &fixture.file, AT, PAGE, Sharing::Shared).unwrap();
        assert!(other.fault(at(0), Access::Write).is_ok());
        assert_eq!(fixture.asked()[3..], [(0, 1)]);
    });
}

#[test]
fn only_shared_writes_are_asked_for() {
    with_blocks(0, |fixture| {
        let own = AddressSpace::new(fixture.memory, options()).unwrap();
        map(&own, &fixture.file, AT, PAGES * PAGE, Sharing::Private).unwrap();
        assert_eq!(own.fault(at(0), Access::Write), Ok(Resolved::Copied));
        assert!(own.fault(at(1), Access::Read).is_ok());
        assert_eq!(own.fault(at(1), Access::Write), Ok(Resolved::Copied));
        assert!(fixture.space.fault(at(0), Access::Read).is_ok());
        let all = PAGES * PAGE;
        fixture.space.mprotect(at(0), all, Protection::READ).unwrap();
        fixture.space.mprotect(at(0), all, Protection::READ | Protection::WRITE).unwrap();
        assert_eq!(fixture.asked(), [], "a page stays read-only until it is written");
        assert_eq!(fixture.write(0), Err(FaultError::Bus));
        assert_eq!(fixture.asked(), [(0, 1)]);
    });
}

#[test]
fn a_huge_leaf_is_asked_for_once() {
    with_size((512, 512, 9), |fixture| {
        assert!(fixture.space.fault(at(3), Access::Read).is_ok());
        assert!(fixture.write(3).is_ok());
        assert_eq!(fixture.asked(), [(0, 512)]);
        assert_eq!(fixture.write(4), Ok(Resolved::Spurious));
        assert_eq!(fixture.check().len(), 512);
    });
}

#[test]
fn a_huge_leaf_without_room_is_split() {
    with_size((2, 512, 9), |fixture| {
        assert!(fixture.space.fault(at(3), Access::Read).is_ok());
        assert!(fixture.write(3).is_ok());
        assert_eq!(fixture.asked(), [(0, 512), (3, 1)]);
        assert!(fixture.write(5).is_ok());
        assert_eq!(fixture.write(4), Err(FaultError::Bus));
        assert_eq!(fixture.check(), [3, 5]);
    });
}

#[test]
fn a_huge_leaf_is_prepared_as_a_whole() {
    with_size((512, 512, 9), |fixture| {
        fixture.pager.reserve_later();
        assert!(fixture.space.fault(at(3), Access::Read).is_ok());
        let TriedFault::Blocked(wait) = fixture.try_write(3) else { panic!("not prepared") };
        let ready = wait.wait().unwrap();
        assert_eq!(fixture.pager.asked(Io::PrepareWrite), [(0, 512)]);
        assert!(matches!(fixture.try_write(3), TriedFault::Resolved(_)));
        drop(ready);
    });
}

#[test]
fn a_leaf_is_split_only_for_room() {
    with_size((512, 512, 9), |fixture| {
        assert!(fixture.space.fault(at(3), Access::Read).is_ok());
        fixture.pager.refuse(Some(PagerError::InputOutput));
        assert_eq!(fixture.write(3), Err(FaultError::Bus));
        assert_eq!(fixture.memory.dirty_limit().pages(), 0);
        fixture.pager.refuse(None);
        assert!(fixture.write(3).is_ok());
        assert_eq!(fixture.asked(), [(0, 512), (0, 512)]);
    });
}

#[test]
fn the_dirty_limit_comes_before_the_pager() {
    with_blocks(2, |fixture| {
        assert!(fixture.write(0).is_ok());
        assert_eq!(fixture.byte(1), 0);
        fixture.memory.dirty_limit().set_limit(1);
        let TriedFault::Blocked(wait) = fixture.try_write(1) else { panic!("too many are dirty") };
        assert_eq!(fixture.check(), [0], "the fault may never ask again");
        let ready = wait.wait().unwrap();
        assert_eq!(fixture.pager.stored(), [0]);
        assert!(matches!(fixture.try_write(1), TriedFault::Resolved(_)));
        drop(ready);
    });
}

#[test]
fn a_pager_may_prepare_without_locks() {
    with_blocks(1, |fixture| {
        fixture.pager.reserve_later();
        assert!(fixture.write(0).is_ok());
        assert_eq!(fixture.asked(), [(0, 1), (0, 1)]);
        assert_eq!(fixture.pager.asked(Io::PrepareWrite), [(0, 1)]);
        assert_eq!(fixture.write(1), Err(FaultError::Bus), "its refusal is the fault's");
        fixture.punch(0);
        let TriedFault::Blocked(mut wait) = fixture.try_write(1) else { panic!("no block") };
        assert!(matches!(wait.poll(), Ok(FaultPoll::NeedsThread)));
        assert_eq!(fixture.pager.asked(Io::PrepareWrite).len(), 2, "only a thread may sleep");
        let ready = fixture.machine.on_cpu(Cpu(1), || wait.wait().unwrap());
        assert!(matches!(fixture.try_write(1), TriedFault::Resolved(_)));
        drop(ready);
    });
}

#[test]
fn a_hole_after_the_preparation_is_seen() {
    with_blocks(1, |fixture| {
        fixture.pager.reserve_later();
        fixture.pager.held.hold_next(Io::PrepareWrite, 0);
        thread::scope(|scope| {
            let fault = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || fixture.write(0)));
            fixture.pager.held.wait_until_held();
            // No lock is held, so nothing waits for the pager.
            fixture.punch(0);
            fixture.space.mprotect(at(4), PAGE, Protection::READ).unwrap();
            fixture.pager.held.release();
            assert!(fault.join().unwrap().is_ok());
        });
        fixture.file.sync(0, u64::MAX).unwrap();
        // A reservation that is gone before the fault asks again.
        assert_eq!(fixture.byte(1), 0);
        let TriedFault::Blocked(wait) = fixture.try_write(1) else { panic!("no block") };
        assert!(wait.wait().is_err(), "the only block is in use");
        fixture.punch(0);
        let TriedFault::Blocked(wait) = fixture.try_write(1) else { panic!("not prepared") };
        let ready = wait.wait().unwrap();
        fixture.punch(1);
        assert_eq!((fixture.check(), fixture.byte(1)), (vec![], 0));
        let asked = fixture.pager.asked(Io::PrepareWrite).len();
        let TriedFault::Blocked(wait) = fixture.try_write(1) else { panic!("no reservation") };
        drop((wait, ready));
        assert!(fixture.write(1).is_ok());
        assert_eq!(fixture.pager.asked(Io::PrepareWrite).len(), asked + 1);
    });
}

#[test]
fn a_killed_program_does_not_wait_for_room() {
    with_blocks(1, |fixture| {
        fixture.pager.reserve_later();
        fixture.machine.kill(Cpu(1));
        let killed = fixture.machine.on_cpu(Cpu(1), || fixture.write(0));
        assert_eq!(killed, Err(FaultError::Interrupted));
        assert_eq!(fixture.pager.asked(Io::PrepareWrite), []);
    });
}

/// Holds the pager in the cut that `cuts` makes. A write to a page of the cut waits for it, and
/// asks the pager afterwards.
fn cut_is_waited_for(
    cuts: impl FnOnce(&Fixture<'_>) + Send,
    held_at: u64,
    after: Option<FaultError>,
) {
    with_blocks(PAGES as usize, |fixture| {
        fixture.space.write_user(at(5), b"5").unwrap();
        fixture.space.write_user(at(6), b"6").unwrap();
        fixture.file.sync(6 * PAGE, PAGE).unwrap();
        assert_eq!(fixture.byte(0), 0);
        let asked = fixture.asked().len();
        fixture.pager.held.hold_next(Io::Discard, held_at);
        thread::scope(|scope| {
            let cut = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || cuts(fixture)));
            fixture.pager.held.wait_until_held();
            for page in [5, 6] {
                let tried = fixture.try_write(page);
                // Page 5 is still writable.
                assert_eq!(matches!(tried, TriedFault::Resolved(_)), page == 5, "{tried:?}");
            }
            assert!(matches!(fixture.try_write(0), TriedFault::Resolved(_)), "no page of the cut");
            let TriedFault::Blocked(mut wait) = fixture.try_write(6) else { panic!("it is cut") };
            let Ok(FaultPoll::Pending(parked)) = wait.poll() else { panic!("the cut goes on") };
            assert!(!parked.has_changed());
            assert_eq!(fixture.asked().len(), asked + 1, "the pager is asked after the cut");
            drop(wait);
            fixture.pager.held.release();
            cut.join().unwrap();
        });
        assert_eq!(fixture.check(), [0]);
        assert_eq!(fixture.write(6).err(), after);
        assert_eq!(fixture.check().len(), if after.is_some() { 1 } else { 2 });
    });
}

#[test]
fn no_page_is_written_during_a_hole() {
    cut_is_waited_for(|fixture| fixture.file.punch_hole(5 * PAGE, 2 * PAGE).unwrap(), 5, None);
}

#[test]
fn no_page_is_written_during_a_truncation() {
    let cuts = |fixture: &Fixture<'_>| fixture.file.set_size(5 * PAGE).unwrap();
    cut_is_waited_for(cuts, 5, Some(FaultError::Bus));
}

/// Holds the pager in the question of a fault. `cuts` does not reach the pager before the fault is
/// over, and then drops the page.
fn fault_is_waited_for(cuts: impl FnOnce(&Fixture<'_>) + Send) {
    with_blocks(PAGES as usize, |fixture| {
        let held = &fixture.pager.held;
        held.hold_next(Io::MakeWritable, 5);
        thread::scope(|scope| {
            let fault = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || fixture.write(5)));
            held.wait_until_held();
            let cut = scope.spawn(|| fixture.machine.on_cpu(Cpu(2), || cuts(fixture)));
            while fixture.machine.parked_threads() == 0
                && fixture.pager.asked(Io::Discard).is_empty()
            {
                thread::yield_now();
            }
            let discarded = fixture.pager.asked(Io::Discard);
            held.release();
            assert!(fault.join().unwrap().is_ok());
            cut.join().unwrap();
            assert_eq!(discarded, [], "the cut would miss what the fault reserves");
        });
        assert_eq!(fixture.pager.asked(Io::Discard).len(), 1);
        assert_eq!(fixture.check(), []);
        assert_eq!(fixture.memory.dirty_limit().pages(), 0);
    });
}

#[test]
fn a_hole_waits_for_faults_before_it() {
    fault_is_waited_for(|fixture| fixture.punch(5));
}

#[test]
fn a_truncation_waits_for_faults_before_it() {
    fault_is_waited_for(|fixture| fixture.file.set_size(2 * PAGE).unwrap());
}

#[test]
fn a_page_being_stored_is_asked_for_afterwards() {
    with_blocks(2, |fixture| {
        assert!(fixture.write(0).is_ok());
        fixture.pager.held.hold_next(Io::Write, 0);
        thread::scope(|scope| {
            let sync =
                scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || fixture.file.sync(0, u64::MAX)));
            fixture.pager.held.wait_until_held();
            let TriedFault::Blocked(wait) = fixture.try_write(0) else { panic!("it is stored") };
            drop(wait);
            assert_eq!(fixture.asked().len(), 1);
            fixture.pager.held.release();
            assert_eq!(sync.join().unwrap(), Ok(()));
        });
        assert!(fixture.write(0).is_ok());
        assert_eq!(fixture.asked().len(), 2);
    });
}

#[test]
fn a_pins_end_asks_for_stored_pages() {
    with_size((8, PAGES, 2), |fixture| {
        for page in 0..4 {
            assert!(fixture.write(page).is_ok());
        }
        let pinned = fixture.space.pin(at(0), 4, Access::Write, PinTime::Short).unwrap();
        assert_eq!(pinned.pages(), 4);
        let asked = fixture.asked().len();
        fixture.file.sync(0, u64::MAX).unwrap();
        // Page 2 is dirty at the end of the pin.
        assert!(fixture.write(2).is_ok());
        drop(pinned);
        assert_eq!(fixture.asked()[asked..], [(2, 1), (0, 2), (3, 1)]);
        assert_eq!(fixture.memory.dirty_limit().pages(), 4);
    });
}

#[test]
fn a_pins_end_reserves_nothing_in_holes() {
    with_blocks(2, |fixture| {
        assert!(fixture.write(0).is_ok());
        let pinned = fixture.space.pin(at(0), 1, Access::Write, PinTime::Short).unwrap();
        let asked = fixture.asked().len();
        fixture.punch(0);
        drop(pinned);
        assert_eq!(fixture.asked().len(), asked, "the object has no such page");
        assert_eq!(fixture.check(), []);
        // Another page is now in the place of the pinned one.
        assert!(fixture.write(1).is_ok());
        let pinned = fixture.space.pin(at(1), 1, Access::Write, PinTime::Short).unwrap();
        fixture.punch(1);
        assert_eq!(fixture.byte(1), 0);
        drop(pinned);
        assert_eq!(fixture.check(), [1]);
    });
}

/// At the end of a pin, the pager has no room for the page, and refuses it or its preparation.
fn pin_ends_without_room(prepares: bool) {
    with_blocks(1, |fixture| {
        assert!(fixture.write(0).is_ok());
        let pinned = fixture.space.pin(at(0), 1, Access::Write, PinTime::Short).unwrap();
        fixture.punch(0);
        assert_eq!(fixture.byte(0), 0);
        assert!(fixture.write(1).is_ok());
        if prepares {
            fixture.pager.reserve_later();
        }
        drop(pinned);
        assert_eq!(fixture.pager.asked(Io::PrepareWrite).len(), usize::from(prepares));
        assert_eq!(fixture.check(), [1]);
        assert_eq!(fixture.memory.dirty_limit().pages(), 2, "the device may have written it");
        assert_eq!(fixture.file.sync(0, u64::MAX), Err(Error::NoSpace));
        fixture.punch(0);
    });
}

#[test]
fn a_pins_end_without_room_keeps_the_write() {
    pin_ends_without_room(false);
}

#[test]
fn a_pins_end_survives_a_refused_preparation() {
    pin_ends_without_room(true);
}

#[test]
fn a_pins_end_lets_the_pager_prepare() {
    with_blocks(2, |fixture| {
        assert!(fixture.write(0).is_ok());
        let pinned = fixture.space.pin(at(0), 1, Access::Write, PinTime::Short).unwrap();
        fixture.punch(0);
        assert_eq!(fixture.byte(0), 0);
        fixture.pager.reserve_later();
        let asked = fixture.asked().len();
        drop(pinned);
        assert_eq!(fixture.pager.asked(Io::PrepareWrite), [(0, 1)]);
        assert_eq!(fixture.asked()[asked..], [(0, 1), (0, 1)], "and asks again");
        assert_eq!(fixture.check(), [0]);
    });
}

#[test]
fn a_read_pins_end_asks_nothing() {
    with_blocks(1, |fixture| {
        assert!(fixture.write(0).is_ok());
        let pinned = fixture.space.pin(at(0), 1, Access::Read, PinTime::Short).unwrap();
        fixture.file.sync(0, u64::MAX).unwrap();
        drop(pinned);
        assert_eq!(fixture.asked(), [(0, 1)]);
        assert_eq!(fixture.memory.dirty_limit().pages(), 0);
    });
}
