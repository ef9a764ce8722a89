//! `fsync` that stops while the pager stores pages, and continues later.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::{KeyRights, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, CallPoll, CallWait, Error, FaultPoll, Memory, Object, PagerError,
    Sharing, Step, TriedFault, Writeback,
};
use bindery_hosted::{Config, DelayedFiles, Machine};

use super::content_steps::until_answered;
use crate::support::objects::PAGE;
use crate::support::objects_fixture::{AT, map};
use crate::support::{MIB, audit, memory_with, options};

pub(super) type A = X86_64<4>;
pub(super) type P = Machine<A>;
pub(super) type Space<'m> = AddressSpace<'m, P>;
pub(super) type File<'m> = Object<'m, P>;

const PAGES: u64 = 64;

pub(super) struct Fixture<'m> {
    pub(super) machine: &'m Machine<A>,
    pub(super) memory: &'m Memory<P>,
    pub(super) pager: &'m DelayedFiles,
    pub(super) space: Space<'m>,
}

/// Runs `scenario` with a file of [`PAGES`] pages, all in memory, whose pager keeps writes. Nothing
/// is left afterwards.
#[track_caller]
pub(super) fn with_file(scenario: impl for<'m> FnOnce(&Fixture<'m>, File<'m>)) {
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
    pub(super) fn answer(&self, page: u64, answer: Result<(), PagerError>) {
        let kept = self.pager.try_take_write(|asked| asked.first == page);
        self.pager.answer_write(self.memory, kept.expect("a write of the page"), answer);
    }

    /// Whether the first byte of the page is stored.
    pub(super) fn stored(&self, page: u64) -> bool {
        self.pager.files.content(1).get((page * PAGE) as usize) == Some(&(page as u8 + 1))
    }

    /// Completes a wait while the pager answers late.
    #[track_caller]
    pub(super) fn until_ready(&self, wait: CallWait<'_, 'm, P>) {
        assert!(wait.is_for_storage());
        drop(until_answered(self.memory, self.pager, wait));
    }

    /// Runs all steps. Returns the result and the number of waits.
    pub(super) fn in_steps(&self, writeback: &mut Writeback<'m, P>) -> (Result<(), Error>, usize) {
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
pub(super) fn write(file: &File<'_>, pages: impl IntoIterator<Item = u64>) {
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
pub(super) fn blocked<'s, 'm: 's>(step: Result<Step<'s, 'm, P>, Error>) -> CallWait<'s, 'm, P> {
    match step {
        Ok(Step::Blocked(wait)) => wait,
        other => panic!("it does not wait: {other:?}"),
    }
}

#[track_caller]
pub(super) fn is_pending(wait: &mut CallWait<'_, '_, P>) {
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
