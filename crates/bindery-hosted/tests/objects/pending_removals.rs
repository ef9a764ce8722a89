//! `MADV_REMOVE` that stops while the pager stores pages of the hole, and continues later.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::platform::Cpu;
use bindery::{
    Accounting, AddressSpace, CallPoll, CallWait, Errno, FileAccess, LockPages, MapObject,
    MapRequest, PagerError, Place, Protection, Sealing, Sharing, Step,
};
use bindery_hosted::{Config, DelayedFiles};
use bindery_linux::{self as linux, Call, CallStep, PendingCall};

use super::pending_syncs::{A, File, Fixture, P, Space};
use crate::support::objects::PAGE;
use crate::support::objects_fixture::AT;
use crate::support::{MIB, READ_WRITE, audit, fixed, memory_with, options};

const PAGES: u64 = 16;
const HALF: u64 = 4 * PAGE;
const SECOND: u64 = AT + HALF;
/// `MADV_REMOVE` of both mappings.
const REMOVE: [u64; 6] = [AT, 2 * HALF, 9, 0, 0, 0];
const NO_MEMORY: i64 = -(Errno::ENOMEM as i64);

/// Runs `scenario` with pages 0 to 3 and then 8 to 11 of a file mapped, and the first page of each
/// mapping written. The pager keeps the writes of the two pages. Nothing is left afterwards.
#[track_caller]
fn with_stores(scenario: impl for<'m> FnOnce(&Fixture<'m>, &File<'m>)) {
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let free = memory.free_frame_count();
    let pager = DelayedFiles::new();
    pager.keep_writes(true);
    {
        let file = memory.file(&pager, 1, 0).unwrap();
        file.set_size(PAGES * PAGE).unwrap();
        file.read_ahead(0, PAGES * PAGE);
        pager.answer_all(&memory);
        pager.keep_reads(false);
        let space = AddressSpace::new(&memory, options()).unwrap();
        map_both(&space, &file);
        // Each sync has a batch of its own, whose writes end together.
        for offset in [0, 8 * PAGE] {
            let mut sync = file.begin_sync(offset, HALF);
            assert!(matches!(sync.step(), Ok(Step::Blocked(_))));
        }
        let fixture = Fixture { machine: &machine, memory: &memory, pager: &pager, space };
        scenario(&fixture, &file);
        pager.keep_writes(false);
        pager.answer_all(&memory);
        audit(&machine, &memory, &[&fixture.space]);
    }
    let report = audit(&machine, &memory, &[]);
    assert_eq!((report.objects, report.object_pages), (0, 0));
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

fn map_both<'m>(space: &Space<'m>, object: &File<'m>) {
    for (at, page) in [(AT, 0), (SECOND, 8)] {
        let request = MapRequest {
            length: HALF,
            protection: READ_WRITE,
            place: Place::Fixed(VirtAddr(at)),
            sharing: Sharing::Shared,
            ..MapRequest::default()
        };
        let access = FileAccess::READ | FileAccess::WRITE;
        let source = MapObject { object, offset: page * PAGE, access };
        space.mmap_object(&request, &source).unwrap();
        space.write_user(VirtAddr(at), &[page as u8 + 1]).unwrap();
    }
}

impl<'m> Fixture<'m> {
    #[track_caller]
    fn blocked<'s>(&'s self, call: &mut PendingCall<'m, P>) -> CallWait<'s, 'm, P> {
        match call.step(self, None) {
            CallStep::Blocked(wait) => wait,
            CallStep::Done(result) => panic!("it does not wait: {result}"),
        }
    }

    /// Completes the wait, whose store of `page` the pager answers late.
    #[track_caller]
    fn until_stored(&self, mut wait: CallWait<'_, 'm, P>, page: u64, end: Result<(), PagerError>) {
        assert!(wait.is_for_storage());
        let CallPoll::Pending(on) = wait.poll() else { panic!("nothing to wait for") };
        assert!(!on.has_changed());
        self.answer(page, end);
        assert!(on.has_changed());
        assert!(matches!(wait.poll(), CallPoll::Ready(_)));
    }

    #[track_caller]
    fn assert_done(&self, call: &mut PendingCall<'m, P>, result: i64) {
        for _ in 0..2 {
            let step = call.step(self, None);
            assert!(matches!(step, CallStep::Done(same) if same == result), "{step:?}");
        }
    }
}

/// The first bytes of the two pages.
fn content(file: &File<'_>) -> [u8; 2] {
    [0, 8].map(|page| {
        let mut byte = [0];
        assert_eq!(file.read(page * PAGE, &mut byte), Ok(1));
        byte[0]
    })
}

fn removal<'m>() -> PendingCall<'m, P> {
    PendingCall::new(Call::Madvise, REMOVE)
}

#[test]
fn each_hole_waits_for_its_stores() {
    with_stores(|fixture, file| {
        let mut call = removal();
        fixture.until_stored(fixture.blocked(&mut call), 0, Ok(()));
        assert_eq!(content(file), [1, 9], "nothing is removed before the next step");
        // The read that follows ends the wait early, like each end of other work on the object.
        drop(fixture.blocked(&mut call));
        assert_eq!(content(file), [0, 9]);
        fixture.until_stored(fixture.blocked(&mut call), 8, Ok(()));
        fixture.assert_done(&mut call, 0);
        assert_eq!(content(file), [0, 0]);
        assert_eq!(fixture.pager.files.stored_pages(1), 0);
    });
}

/// No fault and no call waits for a removal that was dropped.
#[test]
fn a_dropped_removal_leaves_the_rest() {
    for polls in [false, true] {
        with_stores(|fixture, file| {
            let mut call = removal();
            fixture.until_stored(fixture.blocked(&mut call), 0, Ok(()));
            let mut wait = fixture.blocked(&mut call);
            if polls {
                assert!(matches!(wait.poll(), CallPoll::Pending(_)));
            }
            drop((wait, call));
            assert_eq!(content(file), [0, 9]);
            fixture.answer(8, Ok(()));
            assert_eq!(file.write(8 * PAGE, &[7]), Ok(1));
            assert_eq!(content(file), [0, 7]);
            fixture.pager.keep_writes(false);
            assert_eq!(file.sync(0, PAGES * PAGE), Ok(()));
            assert_eq!(fixture.pager.files.content(1)[8 * PAGE as usize], 7);
        });
    }
}

#[test]
fn a_failed_store_does_not_end_a_removal() {
    with_stores(|fixture, file| {
        let mut call = removal();
        fixture.until_stored(fixture.blocked(&mut call), 0, Err(PagerError::InputOutput));
        fixture.until_stored(fixture.blocked(&mut call), 8, Err(PagerError::InputOutput));
        fixture.assert_done(&mut call, 0);
        assert_eq!(content(file), [0, 0]);
    });
}

/// The call has reached the first mapping, and removes its bytes; it has not reached the second.
#[test]
fn a_mapping_may_go_between_steps() {
    for (at, result, left) in [(AT, 0, [0, 0]), (SECOND, NO_MEMORY, [0, 9])] {
        with_stores(|fixture, file| {
            let mut call = removal();
            let wait = fixture.blocked(&mut call);
            fixture.space.munmap(VirtAddr(at), HALF).unwrap();
            fixture.until_stored(wait, 0, Ok(()));
            if result == 0 {
                fixture.until_stored(fixture.blocked(&mut call), 8, Ok(()));
            }
            fixture.assert_done(&mut call, result);
            assert_eq!(content(file), left);
        });
    }
}

/// What is written between two steps is written before the hole.
#[test]
fn bytes_written_meanwhile_are_removed() {
    with_stores(|fixture, file| {
        let mut call = removal();
        let mut wait = fixture.blocked(&mut call);
        assert_eq!(file.write(PAGE, &[5]), Ok(1));
        assert!(matches!(wait.poll(), CallPoll::Ready(_)), "the call may look again");
        drop(wait);
        fixture.until_stored(fixture.blocked(&mut call), 0, Ok(()));
        fixture.until_stored(fixture.blocked(&mut call), 8, Ok(()));
        fixture.assert_done(&mut call, 0);
        let mut byte = [1];
        assert_eq!((file.read(PAGE, &mut byte), byte), (Ok(1), [0]));
    });
}

#[test]
fn a_thread_may_do_the_waiting() {
    with_stores(|fixture, file| {
        let mut call = removal();
        let wait = fixture.blocked(&mut call);
        thread::scope(|scope| {
            let waits = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || drop(wait.wait())));
            while fixture.machine.parked_threads() == 0 {
                thread::yield_now();
            }
            fixture.answer(0, Ok(()));
            waits.join().unwrap();
        });
        fixture.until_stored(fixture.blocked(&mut call), 8, Ok(()));
        fixture.assert_done(&mut call, 0);
        assert_eq!(content(file), [0, 0]);
    });
}

/// Calls without waits are one step, with the result of the blocking call.
#[test]
fn a_removal_without_waits_is_one_step() {
    with_stores(|fixture, _| {
        let (memory, space) = (fixture.memory, &fixture.space);
        let size = PAGES * PAGE;
        let object = memory.shared_memory(size, Sealing::Allowed, Accounting::PerPage).unwrap();
        let results = [(0, [0, 0]), (NO_MEMORY, [0, 9])];
        for (result, left) in results {
            let runs: [&dyn Fn() -> i64; 2] = [
                &|| {
                    let mut call = removal();
                    match call.step(fixture, None) {
                        CallStep::Done(done) => done,
                        CallStep::Blocked(wait) => panic!("{wait:?}"),
                    }
                },
                &|| linux::call(fixture, Call::Madvise, REMOVE),
            ];
            for run in runs {
                map_both(space, &object);
                if result != 0 {
                    space.munmap(VirtAddr(SECOND), HALF).unwrap();
                }
                assert_eq!(run(), result);
                assert_eq!(content(&object), left);
            }
        }
        space.munmap(VirtAddr(AT), 2 * HALF).unwrap();
    });
}

/// Mappings that refuse the advice do so in steps as in a blocking call, before anything changes.
#[test]
fn refused_removals_fail_in_both_ways() {
    with_stores(|fixture, file| {
        let space = &fixture.space;
        let map = |sharing, access| {
            let request = MapRequest {
                length: HALF,
                protection: Protection::READ,
                place: Place::Fixed(VirtAddr(AT)),
                sharing,
                ..MapRequest::default()
            };
            space.mmap_object(&request, &MapObject { object: file, offset: 0, access }).unwrap();
        };
        let changes: [(Errno, &dyn Fn()); 4] = [
            (Errno::EACCES, &|| map(Sharing::Private, FileAccess::READ | FileAccess::WRITE)),
            (Errno::EACCES, &|| map(Sharing::Shared, FileAccess::READ)),
            (Errno::EINVAL, &|| assert_eq!(space.mmap(&fixed(AT, HALF)), Ok(VirtAddr(AT)))),
            (Errno::EINVAL, &|| {
                map(Sharing::Shared, FileAccess::READ | FileAccess::WRITE);
                space.mlock(VirtAddr(AT), PAGE, LockPages::OnFault).unwrap();
            }),
        ];
        for (errno, change) in changes {
            change();
            fixture.assert_done(&mut removal(), -(errno as i64));
            assert_eq!(linux::call(fixture, Call::Madvise, REMOVE), -(errno as i64));
            assert_eq!(content(file), [1, 9]);
        }
    });
}
