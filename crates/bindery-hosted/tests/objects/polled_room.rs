//! Tasks that wait for room below a dirty limit, or for a pager to prepare for their writes.

use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{
    CallPoll, CallReady, CallWait, DirtyLimit, Error, FaultError, FaultPoll, FileSystem, Memory,
    Object, PagerError, PendingWrite, Step, TriedFault,
};
use bindery_hosted::{Config, DelayedFiles, Machine};

use super::held_pager::Io;
use super::mapped_writes::{Fixture as Fixed, with_blocks};
use crate::support::objects::PAGE;
use crate::support::{MIB, audit, memory_with};

type A = X86_64<4>;
type Wait<'s, 'm> = CallWait<'s, 'm, Machine<A>>;
type Ready<'m> = CallReady<'m, Machine<A>>;
type File<'m> = Object<'m, Machine<A>>;

const PAGE_BYTES: usize = PAGE as usize;

/// Pages of one file that may be dirty.
const LIMIT: u64 = 64;

struct Fixture<'f, 'm> {
    machine: &'f Machine<A>,
    memory: &'m Memory<Machine<A>>,
    pager: &'f DelayedFiles,
    limit: &'f DirtyLimit,
    disk: &'f FileSystem<'m, Machine<A>>,
}

/// Runs `scenario` with a file system of which [`LIMIT`] pages may be dirty.
fn with_limit(scenario: impl for<'f, 'm> FnOnce(&Fixture<'f, 'm>)) {
    let (pager, limit) = (DelayedFiles::new(), DirtyLimit::new(LIMIT));
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    {
        let disk = memory.file_system_within(&pager, &limit);
        let (memory, pager) = (&memory, &pager);
        let fixture = Fixture { machine: &machine, memory, pager, limit: &limit, disk: &disk };
        scenario(&fixture);
        assert_eq!(limit.pages(), 0);
    }
    assert_eq!(audit(&machine, &memory, &[]).objects, 0);
}

impl<'m> Fixture<'_, 'm> {
    /// A file, and the first write that finds no room.
    fn full_file(&self) -> (File<'m>, PendingWrite<'m, Machine<A>>) {
        let file = self.disk.file(1, 0).unwrap();
        for page in 0..=LIMIT {
            let mut write = PendingWrite::new(&file, page * PAGE, PAGE_BYTES).unwrap();
            if let Step::Blocked(_) = write.step(None, &[7; PAGE_BYTES]).unwrap() {
                return (file, write);
            }
        }
        panic!("there is room for all pages");
    }
}

#[track_caller]
fn blocked<'s, 'm>(
    write: &mut PendingWrite<'m, Machine<A>>,
    ready: Option<Ready<'m>>,
) -> Wait<'s, 'm>
where
    'm: 's,
{
    match write.step(ready, &[7; PAGE_BYTES]).unwrap() {
        Step::Blocked(wait) => wait,
        Step::Done => panic!("there is room"),
    }
}

#[track_caller]
fn ready<'m>(wait: &mut Wait<'_, 'm>) -> Ready<'m> {
    match wait.poll() {
        CallPoll::Ready(ready) => ready,
        polled => panic!("{polled:?}"),
    }
}

#[test]
fn a_task_makes_room_for_dirty_pages() {
    with_limit(|Fixture { memory, pager, disk, limit, .. }| {
        let file = disk.file(1, 0).unwrap();
        let mut waits = 0;
        for page in 0..300 {
            let mut write = PendingWrite::new(&file, page * PAGE, PAGE_BYTES).unwrap();
            let (from, mut last) = ([page as u8; PAGE_BYTES], None);
            while let Step::Blocked(mut wait) = write.step(last.take(), &from).unwrap() {
                assert!(wait.is_for_storage());
                // Every second wait is for answers that come later.
                pager.keep_writes(waits % 2 == 1);
                if waits % 2 == 1 {
                    let CallPoll::Pending(on) = wait.poll() else { panic!("nothing is stored") };
                    assert!(!on.has_changed());
                    assert!(pager.answer_all(memory) > 0);
                    assert!(on.has_changed(), "the answer wakes the task");
                }
                waits += 1;
                last = Some(ready(&mut wait));
            }
            assert_eq!(write.moved(), from.len());
            assert!(limit.pages() <= LIMIT);
        }
        assert!(waits > 2);
        pager.keep_writes(false);
        file.sync(0, u64::MAX).unwrap();
        let content = pager.files.content(1);
        assert!((0..300).all(|page| content[page * PAGE_BYTES] == page as u8));
    });
}

#[test]
fn tasks_share_the_stores_that_make_room() {
    with_limit(|fixture| {
        let Fixture { machine, memory, pager, .. } = fixture;
        let (file, mut write) = fixture.full_file();
        let mut other = PendingWrite::new(&file, (LIMIT + 1) * PAGE, PAGE_BYTES).unwrap();
        let (mut first, mut second) = (blocked(&mut write, None), blocked(&mut other, None));
        pager.keep_writes(true);
        assert!(matches!(first.poll(), CallPoll::Pending(_)));
        for _ in 0..2 {
            let CallPoll::Pending(on) = second.poll() else { panic!("nothing is stored") };
            assert!(!on.has_changed());
        }
        // The stores go on without the task that has begun them.
        drop(first);
        pager.wait_for_writes(1);
        let CallPoll::Pending(on) = second.poll() else { panic!("nothing is stored") };
        machine.on_cpu(Cpu(1), || pager.answer_all(memory));
        assert!(on.has_changed());
        assert_eq!(pager.answer_all(memory), 0, "each page is stored once");
        let end = ready(&mut second);
        pager.keep_writes(false);
        assert!(matches!(other.step(Some(end), &[7; PAGE_BYTES]), Ok(Step::Done)));
        drop((second, write));
    });
}

#[test]
fn a_task_without_room_gets_the_error() {
    with_limit(|fixture| {
        let Fixture { memory, pager, .. } = fixture;
        let (file, mut write) = fixture.full_file();
        let mut wait = blocked(&mut write, None);
        pager.keep_writes(true);
        assert!(matches!(wait.poll(), CallPoll::Pending(_)));
        while let Some(kept) = pager.try_take_write(|_| true) {
            pager.answer_write(memory, kept, Err(PagerError::InputOutput));
        }
        let end = ready(&mut wait);
        drop(wait);
        assert_eq!(write.step(Some(end), &[7; PAGE_BYTES]).err(), Some(Error::InputOutput));
        pager.keep_writes(false);
        file.sync(0, u64::MAX).unwrap();
    });
}

#[test]
fn a_pager_without_memory_needs_a_thread() {
    with_limit(|fixture| {
        let Fixture { memory, pager, .. } = fixture;
        let (_file, mut write) = fixture.full_file();
        let mut wait = blocked(&mut write, None);
        pager.keep_writes(true);
        assert!(matches!(wait.poll(), CallPoll::Pending(_)));
        while let Some(kept) = pager.try_take_write(|_| true) {
            pager.answer_write(memory, kept, Err(PagerError::OutOfMemory));
        }
        assert!(matches!(wait.poll(), CallPoll::NeedsThread));
        pager.keep_writes(false);
        let end = wait.wait();
        assert!(matches!(write.step(Some(end), &[7; PAGE_BYTES]), Ok(Step::Done)));
    });
}

#[test]
fn pages_of_other_files_need_a_thread() {
    with_limit(|fixture| {
        let (_full, first) = fixture.full_file();
        let other = fixture.disk.file(2, 0).unwrap();
        let mut write = PendingWrite::new(&other, 0, PAGE_BYTES).unwrap();
        let mut wait = blocked(&mut write, None);
        assert!(matches!(wait.poll(), CallPoll::NeedsThread));
        let end = wait.wait();
        assert!(matches!(write.step(Some(end), &[7; PAGE_BYTES]), Ok(Step::Done)));
        drop(first);
    });
}

#[test]
fn a_faulting_task_makes_room() {
    with_blocks(2, |fixture| {
        assert!(fixture.write(0).is_ok());
        assert_eq!(fixture.byte(1), 0);
        fixture.memory.dirty_limit().set_limit(1);
        let TriedFault::Blocked(mut wait) = fixture.try_write(1) else { panic!("it is full") };
        let Ok(FaultPoll::Ready(ready)) = wait.poll() else { panic!("the pager stores at once") };
        assert_eq!(fixture.pager.stored(), [0]);
        assert!(matches!(fixture.try_write(1), TriedFault::Resolved(_)));
        drop(ready);
    });
}

#[test]
fn a_pager_may_prepare_for_a_task() {
    with_blocks(1, |fixture| {
        let Fixed { pager, memory, .. } = fixture;
        pager.reserve_later();
        pager.prepare_for_tasks();
        let asked = || pager.asked(Io::PrepareWrite).len();
        assert_eq!(fixture.byte(0), 0);
        let TriedFault::Blocked(mut wait) = fixture.try_write(0) else { panic!("not prepared") };
        for polls in 1..3 {
            let Ok(FaultPoll::Pending(on)) = wait.poll() else { panic!("not prepared") };
            assert!(!on.has_changed());
            assert_eq!(asked(), polls);
        }
        assert_eq!(pager.reserved(), []);
        let Ok(FaultPoll::Pending(on)) = wait.poll() else { panic!("not prepared") };
        pager.finish_preparations();
        fixture.machine.on_cpu(Cpu(1), || memory.wake_prepared_writers());
        assert!(on.has_changed());
        let Ok(FaultPoll::Ready(ready)) = wait.poll() else { panic!("it is prepared") };
        drop(wait);
        assert!(matches!(fixture.try_write(0), TriedFault::Resolved(_)));
        drop(ready);
        // The refusal is the fault's.
        assert_eq!(fixture.byte(1), 0);
        let TriedFault::Blocked(mut wait) = fixture.try_write(1) else { panic!("no block") };
        assert_eq!(wait.poll().err(), Some(FaultError::Bus));
    });
}
