//! `fsync` and `msync` that stop while the pager stores pages, and continue later.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::{KeyRights, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, CallPoll, CallWait, Errno, Error, FaultPoll, FileAccess, MapObject,
    MapRequest, Memory, Object, PagerError, Place, Sharing, Step, SyncFlags, TriedFault, Writeback,
};
use bindery_hosted::{Config, DelayedFiles, Machine};
use bindery_linux::{self as linux, Call, CallStep, OpenFile, PendingCall, Process};

use crate::support::objects::PAGE;
use crate::support::objects_fixture::{AT, map};
use crate::support::{MIB, READ_WRITE, audit, memory_with, options};

type A = X86_64<4>;
type P = Machine<A>;
type Space<'m> = AddressSpace<'m, P>;
type File<'m> = Object<'m, P>;

const PAGES: u64 = 64;
/// `MS_SYNC`.
const SYNC: u64 = 4;
const HALF: u64 = 4 * PAGE;
const SECOND: u64 = AT + HALF;

struct Fixture<'m> {
    machine: &'m Machine<A>,
    memory: &'m Memory<P>,
    pager: &'m DelayedFiles,
    space: Space<'m>,
}

impl<'m> Process<'m, P> for Fixture<'m> {
    fn space(&self) -> &Space<'m> {
        &self.space
    }

    fn file(&self, _descriptor: i32) -> Option<OpenFile<'m, P>> {
        None
    }

    fn process(&self, _descriptor: i32) -> Option<&Space<'m>> {
        None
    }
}

/// Runs `scenario` with a file of [`PAGES`] pages, all in memory, whose pager keeps writes. Nothing
/// is left afterwards.
#[track_caller]
fn with_file(scenario: impl for<'m> FnOnce(&Fixture<'m>, File<'m>)) {
    let config = Config { memory: 32 * MIB, cpus: 3, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let free = memory.free_frame_count();
    let pager = DelayedFiles::new();
    pager.keep_writes(true);
    {
        let file = memory.file(&pager, 1, 0).unwrap();
        // The pager supplies zeroes: nothing is stored yet.
        file.set_size(PAGES * PAGE).unwrap();
        file.read_ahead(0, PAGES * PAGE);
        pager.answer_all(&memory);
        let space = AddressSpace::new(&memory, options()).unwrap();
        let fixture = Fixture { machine: &machine, memory: &memory, pager: &pager, space };
        scenario(&fixture, file);
        pager.keep_writes(false);
    }
    let report = audit(&machine, &memory, &[]);
    assert_eq!((report.objects, report.object_pages), (0, 0));
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

impl<'m> Fixture<'m> {
    #[track_caller]
    fn answer(&self, page: u64, answer: Result<(), PagerError>) {
        let kept = self.pager.try_take_write(|asked| asked.first == page);
        self.pager.answer_write(self.memory, kept.expect("a write of the page"), answer);
    }

    /// Whether the first byte of the page is stored.
    fn stored(&self, page: u64) -> bool {
        self.pager.files.content(1).get((page * PAGE) as usize) == Some(&(page as u8 + 1))
    }

    /// Completes a wait while the pager answers late.
    #[track_caller]
    fn until_ready(&self, mut wait: CallWait<'_, 'm, P>) {
        assert!(wait.is_for_storage());
        loop {
            match wait.poll() {
                CallPoll::Ready(_) => return,
                CallPoll::Pending(on) => {
                    assert!(!on.has_changed());
                    assert!(self.pager.answer_all(self.memory) > 0, "what does it wait for?");
                    assert!(on.has_changed());
                }
                CallPoll::NeedsThread => panic!("a thread is needed"),
            }
        }
    }

    /// Runs all steps. Returns the result and the number of waits.
    fn in_steps(&self, writeback: &mut Writeback<'m, P>) -> (Result<(), Error>, usize) {
        for waits in 0.. {
            match writeback.step() {
                Ok(Step::Done) => return (Ok(()), waits),
                Ok(Step::Blocked(wait)) => self.until_ready(wait),
                Err(error) => return (Err(error), waits),
            }
        }
        unreachable!()
    }
}

/// Writes one byte to each of the pages, which are not adjacent.
fn write(file: &File<'_>, pages: impl IntoIterator<Item = u64>) {
    for page in pages {
        assert_eq!(file.write(page * PAGE, &[page as u8 + 1]), Ok(1));
    }
}

/// Returns once a thread sleeps.
fn until_parked(machine: &P) {
    while machine.parked_threads() == 0 {
        thread::yield_now();
    }
}

#[track_caller]
fn blocked<'m>(step: Result<Step<'m, 'm, P>, Error>) -> CallWait<'m, 'm, P> {
    match step {
        Ok(Step::Blocked(wait)) => wait,
        other => panic!("it does not wait: {other:?}"),
    }
}

#[track_caller]
fn is_pending(wait: &mut CallWait<'_, '_, P>) {
    assert!(matches!(wait.poll(), CallPoll::Pending(_)));
}

#[test]
fn steps_store_what_a_sync_stores() {
    with_file(|fixture, file| {
        let pages = (0..PAGES).step_by(3);
        write(&file, pages.clone());
        let mut writeback = file.begin_sync(0, u64::MAX);
        let (result, waits) = fixture.in_steps(&mut writeback);
        assert_eq!(result, Ok(()));
        // 22 non-adjacent pages, in batches of 7.
        assert_eq!(waits, 4);
        assert!(pages.clone().all(|page| fixture.stored(page)));
        // The pages are clean and may be written.
        assert_eq!(fixture.in_steps(&mut file.begin_sync(0, u64::MAX)), (Ok(()), 0));
        assert!(matches!(writeback.step(), Ok(Step::Done)));
        write(&file, pages.clone());
        assert_eq!(fixture.in_steps(&mut file.begin_sync(PAGE, 3 * PAGE)), (Ok(()), 1));
        audit(fixture.machine, fixture.memory, &[&fixture.space]);
        fixture.pager.keep_writes(false);
        assert_eq!(fixture.in_steps(&mut file.begin_sync(0, u64::MAX)), (Ok(()), 0));
    });
}

#[test]
fn the_writes_are_answered_in_any_order() {
    with_file(|fixture, file| {
        write(&file, [1, 5, 9]);
        let mut writeback = file.begin_sync(0, u64::MAX);
        let mut wait = blocked(writeback.step());
        for page in [9, 1] {
            is_pending(&mut wait);
            fixture.answer(page, Ok(()));
            // A premature step changes nothing.
            is_pending(&mut blocked(writeback.step()));
        }
        fixture.answer(5, Ok(()));
        assert!(matches!(wait.poll(), CallPoll::Ready(_)));
        assert!(matches!(writeback.step(), Ok(Step::Done)));
        assert!([1, 5, 9].iter().all(|page| fixture.stored(*page)));
    });
}

#[test]
fn an_error_ends_the_sync_at_its_end() {
    with_file(|fixture, file| {
        let mut mark = file.error_mark();
        let pages = (0..PAGES).step_by(2).take(10);
        write(&file, pages.clone());
        let mut writeback = file.begin_sync(0, u64::MAX);
        let wait = blocked(writeback.step());
        fixture.answer(4, Err(PagerError::NoSpace));
        fixture.until_ready(wait);
        let (result, _) = fixture.in_steps(&mut writeback);
        assert_eq!(result, Err(Error::NoSpace));
        assert!(matches!(writeback.step(), Ok(Step::Done)), "it is over");
        assert_eq!(file.check_errors(&mut mark), Err(Error::NoSpace));
        assert_eq!(file.check_errors(&mut mark), Ok(()));
        assert!(pages.clone().all(|page| fixture.stored(page) == (page != 4)));
        // The page is still dirty, so the sync retries it.
        assert_eq!(fixture.in_steps(&mut file.begin_sync(0, u64::MAX)), (Ok(()), 1));
        assert!(fixture.stored(4));
    });
}

/// The mark of an open file hears once of each error: of the call's own stores, and of those of
/// other calls. An error ends the call.
#[test]
fn msync_reports_to_the_open_file() {
    for in_steps in [false, true] {
        with_file(|fixture, file| {
            let Fixture { space, memory, pager, .. } = fixture;
            map(space, &file, AT, HALF, Sharing::Shared).unwrap();
            map(space, &file, SECOND, HALF, Sharing::Shared).unwrap();
            let mut mark = file.error_mark();
            let mut msync = |answers: &mut dyn FnMut()| {
                let mut told = Vec::new();
                let mut report = |object: &File<'_>, at: VirtAddr| {
                    told.push(at.0);
                    object.check_errors(&mut mark)
                };
                let result = if in_steps {
                    let mut call =
                        space.begin_msync(VirtAddr(AT), 2 * HALF, SyncFlags::SYNC).unwrap();
                    loop {
                        match call.step_with(space, &mut report) {
                            Ok(Step::Done) => break Ok(()),
                            Ok(Step::Blocked(wait)) => {
                                answers();
                                drop(wait.wait());
                            }
                            Err(error) => break Err(error),
                        }
                    }
                } else {
                    space.msync_with(VirtAddr(AT), 2 * HALF, SyncFlags::SYNC, report)
                };
                (result, told)
            };
            assert_eq!(msync(&mut || {}), (Ok(()), vec![AT, SECOND]), "{in_steps}");

            // Another call has met the error, and the pages are stored since.
            write(&file, [1]);
            let mut sync = file.begin_sync(0, u64::MAX);
            let wait = blocked(sync.step());
            fixture.answer(1, Err(PagerError::NoSpace));
            fixture.until_ready(wait);
            assert_eq!(fixture.in_steps(&mut sync).0, Err(Error::NoSpace));
            assert_eq!(fixture.in_steps(&mut file.begin_sync(0, u64::MAX)).0, Ok(()));
            assert_eq!(msync(&mut || {}), (Err(Error::NoSpace), vec![AT]), "{in_steps}");
            assert_eq!(msync(&mut || {}), (Ok(()), vec![AT, SECOND]), "{in_steps}");

            if !in_steps {
                return;
            }
            // An error of the call's own store is not reported again.
            write(&file, [2]);
            let fails = msync(&mut || fixture.answer(2, Err(PagerError::InputOutput)));
            assert_eq!(fails, (Err(Error::InputOutput), vec![AT]));
            let stores = msync(&mut || assert_eq!(pager.answer_all(memory), 1));
            assert_eq!(stores, (Ok(()), vec![AT, SECOND]));
        });
    }
}

#[test]
fn a_pager_without_memory_is_asked_again() {
    with_file(|fixture, file| {
        write(&file, [1]);
        let mut writeback = file.begin_sync(0, u64::MAX);
        let wait = blocked(writeback.step());
        fixture.answer(1, Err(PagerError::OutOfMemory));
        fixture.until_ready(wait);
        assert_eq!(fixture.in_steps(&mut writeback), (Ok(()), 1));
        assert!(fixture.stored(1));
    });
}

#[test]
fn a_dropped_sync_leaves_its_writes_to_others() {
    with_file(|fixture, file| {
        let Fixture { machine, memory, pager, .. } = fixture;
        write(&file, [1, 5]);
        let mut writeback = file.begin_sync(0, u64::MAX);
        let mut wait = blocked(writeback.step());
        is_pending(&mut wait);
        drop(writeback);
        drop(wait);
        // Another sync waits for these pages, in steps or in a thread.
        let mut other = file.begin_sync(0, u64::MAX);
        is_pending(&mut blocked(other.step()));
        thread::scope(|scope| {
            let sync = scope.spawn(|| machine.on_cpu(Cpu(1), || file.sync(0, u64::MAX)));
            until_parked(machine);
            assert!(!sync.is_finished(), "it is not stored yet");
            assert_eq!(pager.answer_all(memory), 2);
            assert_eq!(sync.join().unwrap(), Ok(()));
        });
        assert_eq!(fixture.in_steps(&mut other), (Ok(()), 0));
        assert!([1, 5].iter().all(|page| fixture.stored(*page)));
    });
}

#[test]
fn a_dropped_sync_loses_no_failure() {
    with_file(|fixture, file| {
        let mut mark = file.error_mark();
        write(&file, [1]);
        drop(blocked(file.begin_sync(0, u64::MAX).step()));
        let mut other = file.begin_sync(0, u64::MAX);
        let wait = blocked(other.step());
        fixture.answer(1, Err(PagerError::InputOutput));
        // The other sync waited for the page, which is dirty again, and now retries it.
        fixture.until_ready(wait);
        assert_eq!(fixture.in_steps(&mut other), (Ok(()), 1));
        assert!(fixture.stored(1));
        assert_eq!(file.check_errors(&mut mark), Err(Error::InputOutput));
    });
}

/// Not only syncs but also calls that need clean pages consume the answers of a dropped sync.
#[test]
fn answered_pages_of_a_dropped_sync_are_evicted() {
    with_file(|fixture, file| {
        let Fixture { memory, pager, .. } = fixture;
        for evict in [|file: &File<'_>, _: &_| file.evict(0, u64::MAX), drop_clean] {
            write(&file, [1, 5]);
            drop(blocked(file.begin_sync(0, u64::MAX).step()));
            pager.answer_all(memory);
            assert_eq!(evict(&file, memory), PAGES);
            file.read_ahead(0, PAGES * PAGE);
            pager.answer_all(memory);
        }
    });
}

fn drop_clean(_: &File<'_>, memory: &Memory<P>) -> u64 {
    memory.drop_clean_pages()
}

#[test]
fn the_last_holder_waits_for_writes_left_behind() {
    with_file(|fixture, file| {
        write(&file, [3, 7]);
        let mut writeback = file.begin_sync(0, u64::MAX);
        let wait = blocked(writeback.step());
        drop(file);
        drop(wait);
        thread::scope(|scope| {
            let end = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || drop(writeback)));
            until_parked(fixture.machine);
            assert!(!end.is_finished());
            assert_eq!(fixture.pager.files.counts().removed, 0);
            assert_eq!(fixture.pager.answer_all(fixture.memory), 2);
            end.join().unwrap();
        });
        assert_eq!(fixture.pager.files.counts().removed, 1);
        assert!([3, 7].iter().all(|page| fixture.stored(*page)));
    });
}

#[test]
fn a_program_writes_the_page_after_the_answer() {
    with_file(|fixture, file| {
        let Fixture { machine, memory, pager, space } = fixture;
        map(space, &file, AT, PAGE, Sharing::Shared).unwrap();
        let at = VirtAddr(AT);
        space.write_user(at, b"old").unwrap();
        drop(blocked(file.begin_sync(0, u64::MAX).step()));
        let fault = || space.try_fault(at, Access::Write, KeyRights::ALL).unwrap();
        let TriedFault::Blocked(mut wait) = fault() else { panic!("the page is being stored") };
        assert!(matches!(wait.poll(), Ok(FaultPoll::Pending(_))));
        let has_written = AtomicBool::new(false);
        thread::scope(|scope| {
            let write = scope.spawn(|| {
                machine.on_cpu(Cpu(2), || space.write_user(at, b"new").unwrap());
                has_written.store(true, Relaxed);
            });
            until_parked(machine);
            assert!(!has_written.load(Relaxed), "the page is being stored");
            assert_eq!(pager.answer_all(memory), 1);
            write.join().unwrap();
        });
        assert!(matches!(wait.poll(), Ok(FaultPoll::Ready(_))));
        assert!(matches!(fault(), TriedFault::Resolved(_)));
        assert_eq!(&pager.files.content(1)[..3], b"old");
        assert_eq!(fixture.in_steps(&mut file.begin_sync(0, PAGE)), (Ok(()), 1));
        assert_eq!(&pager.files.content(1)[..3], b"new");
        audit(machine, memory, &[space]);
    });
}

#[test]
fn a_truncation_waits_for_the_answers() {
    with_file(|fixture, file| {
        write(&file, [1, 5, 9]);
        let mut writeback = file.begin_sync(0, u64::MAX);
        let wait = blocked(writeback.step());
        thread::scope(|scope| {
            let cut = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || file.set_size(3 * PAGE)));
            until_parked(fixture.machine);
            assert!(!cut.is_finished());
            fixture.until_ready(wait);
            assert_eq!(cut.join().unwrap(), Ok(()));
        });
        assert_eq!(fixture.in_steps(&mut writeback), (Ok(()), 0));
        assert_eq!(file.size(), 3 * PAGE);
    });
}

#[test]
fn a_change_in_the_way_is_a_wait() {
    with_file(|fixture, file| {
        write(&file, [5, 9]);
        let mut first = file.begin_sync(9 * PAGE, PAGE);
        let wait = blocked(first.step());
        thread::scope(|scope| {
            // The truncation drops page 5 once page 9 is stored.
            let cut = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || file.set_size(3 * PAGE)));
            until_parked(fixture.machine);
            let mut second = file.begin_sync(5 * PAGE, PAGE);
            is_pending(&mut blocked(second.step()));
            // This wait yields no result; the next wait is for another page.
            let mut other = blocked(second.step());
            is_pending(&mut other);
            assert!(fixture.pager.try_take_write(|asked| asked.first == 5).is_none());
            fixture.until_ready(wait);
            assert_eq!(cut.join().unwrap(), Ok(()));
            assert!(matches!(other.poll(), CallPoll::Ready(_)));
            assert_eq!(fixture.in_steps(&mut second), (Ok(()), 0));
        });
    });
}

#[test]
fn a_thread_waits_in_place_of_the_task() {
    with_file(|fixture, file| {
        write(&file, (0..PAGES).step_by(4));
        let mut writeback = file.begin_sync(0, u64::MAX);
        let mut waits = 0;
        while let Step::Blocked(wait) = writeback.step().unwrap() {
            waits += 1;
            thread::scope(|scope| {
                let waits = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || drop(wait.wait())));
                while !waits.is_finished() {
                    fixture.pager.answer_all(fixture.memory);
                    thread::yield_now();
                }
            });
        }
        assert_eq!(waits, 3);
        assert!((0..PAGES).step_by(4).all(|page| fixture.stored(page)));
    });
}

/// Maps pages 0 to 3 and then 8 to 11 of the file, writes to the first page of each range, and runs
/// an `msync` of `length` bytes with `between` after its first step.
#[track_caller]
fn msync_with<'m>(
    fixture: &Fixture<'m>,
    file: &File<'m>,
    length: u64,
    between: impl FnOnce(&Space<'_>),
) -> i64 {
    let space = &fixture.space;
    for (at, page) in [(AT, 0), (SECOND, 8)] {
        let request = MapRequest {
            length: HALF,
            protection: READ_WRITE,
            place: Place::Fixed(VirtAddr(at)),
            sharing: Sharing::Shared,
            ..MapRequest::default()
        };
        let access = FileAccess::READ | FileAccess::WRITE;
        let source = MapObject { object: file, offset: page * PAGE, access };
        space.mmap_object(&request, &source).unwrap();
        space.write_user(VirtAddr(at), &[page as u8 + 1]).unwrap();
    }
    let mut call = PendingCall::new(Call::Msync, [AT, length, SYNC, 0, 0, 0]);
    let CallStep::Blocked(wait) = call.step(fixture, None) else { panic!("it does not wait") };
    assert_eq!((fixture.stored(0), fixture.stored(8)), (false, false));
    between(space);
    fixture.until_ready(wait);
    loop {
        match call.step(fixture, None) {
            CallStep::Blocked(wait) => fixture.until_ready(wait),
            CallStep::Done(result) => {
                // Returns the result again, without effect.
                let again = call.step(fixture, None);
                assert!(matches!(again, CallStep::Done(same) if same == result));
                return result;
            }
        }
    }
}

const NO_MEMORY: i64 = -(Errno::ENOMEM as i64);

#[test]
fn a_pending_msync_stores_all_mappings() {
    for (length, result) in [(2 * HALF, 0), (3 * HALF, NO_MEMORY)] {
        with_file(|fixture, file| {
            assert_eq!(msync_with(fixture, &file, length, |_| {}), result);
            assert_eq!((fixture.stored(0), fixture.stored(8)), (true, true));
            // The blocking call, which stores everything.
            let arguments = [AT, length, SYNC, 0, 0, 0];
            assert_eq!(linux::call(fixture, Call::Msync, arguments), result);
        });
    }
}

#[test]
fn a_mapping_may_go_between_two_steps() {
    // The call has reached the first mapping and stores its pages, but not yet the second.
    let unmapped = [(AT, 0, true), (SECOND, NO_MEMORY, false)];
    for (at, result, is_second_stored) in unmapped {
        with_file(|fixture, file| {
            let unmap = |space: &Space<'_>| space.munmap(VirtAddr(at), HALF).unwrap();
            assert_eq!(msync_with(fixture, &file, 2 * HALF, unmap), result);
            assert_eq!((fixture.stored(0), fixture.stored(8)), (true, is_second_stored));
        });
    }
}

#[test]
fn an_msync_without_waits_is_one_step() {
    with_file(|fixture, file| {
        map(&fixture.space, &file, AT, HALF, Sharing::Shared).unwrap();
        fixture.space.write_user(VirtAddr(AT), &[1]).unwrap();
        let results = [
            // `MS_ASYNC`, `MS_ASYNC | MS_SYNC`, a bad flag, a bad address, a hole.
            ([AT, HALF, 1], 0),
            ([AT, HALF, 5], -(Errno::EINVAL as i64)),
            ([AT, HALF, 8], -(Errno::EINVAL as i64)),
            ([AT + 1, HALF, SYNC], -(Errno::EINVAL as i64)),
            ([SECOND, HALF, SYNC], NO_MEMORY),
        ];
        for ([at, length, flags], result) in results {
            let arguments = [at, length, flags, 0, 0, 0];
            let mut call = PendingCall::new(Call::Msync, arguments);
            let step = call.step(fixture, None);
            assert!(matches!(step, CallStep::Done(same) if same == result), "{flags}: {step:?}");
            assert_eq!(linux::call(fixture, Call::Msync, arguments), result);
        }
        assert!(!fixture.stored(0));
    });
}

#[test]
fn a_failed_write_ends_an_msync() {
    with_file(|fixture, file| {
        map(&fixture.space, &file, AT, HALF, Sharing::Shared).unwrap();
        fixture.space.write_user(VirtAddr(AT), &[1]).unwrap();
        let mut call = fixture.space.begin_msync(VirtAddr(AT), HALF, SyncFlags::SYNC).unwrap();
        let mut wait = blocked(call.step(&fixture.space));
        fixture.answer(0, Err(PagerError::InputOutput));
        assert!(matches!(wait.poll(), CallPoll::Ready(_)));
        assert_eq!(call.step(&fixture.space).err(), Some(Error::InputOutput));
        assert!(matches!(call.step(&fixture.space), Ok(Step::Done)));
    });
}

/// The pager is silent, so a sync that took no record from the pool would have to block.
#[test]
fn syncs_have_records_without_memory() {
    with_file(|fixture, file| {
        let others: Vec<_> = (2..34)
            .map(|number| {
                let file = fixture.memory.file(fixture.pager, number, 0).unwrap();
                file.write(0, &[1]).unwrap();
                file
            })
            .collect();
        fixture.memory.trim();
        fixture.memory.fail_allocations_after(Some(0));
        let mut syncs: Vec<_> = others.iter().map(|file| file.begin_sync(0, u64::MAX)).collect();
        for sync in &mut syncs {
            assert!(matches!(sync.step(), Ok(Step::Blocked(_))));
        }
        fixture.memory.fail_allocations_after(None);
        assert_eq!(fixture.pager.answer_all(fixture.memory), 32);
        for sync in &mut syncs {
            assert_eq!(fixture.in_steps(sync), (Ok(()), 0));
        }
        drop(file);
    });
}
