//! Calls in steps that wait for locks without a thread.

use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::KeyRights;
use bindery::testing::{with_changes_held, with_mutex, with_pages_locked, with_vma_written};
use bindery::{
    Access, AddressSpace, Advice, CallPoll, CallReady, CallWait, Error, FaultError, FileAccess,
    LockPages, MapObject, MapRequest, Memory, Object, PendingRead, PendingUserCopy, PendingWrite,
    Sharing, Step, SyncFlags,
};
use bindery_hosted::Config;
use bindery_linux::{Call, CallStep, OpenFile, PendingCall, Process};

use super::word_lock::{WithWords, Word, memory_with_words};
use crate::support::objects::{Failing, PAGE};
use crate::support::objects_fixture::AT;
use crate::support::{MIB, fixed, memory_with, options};

type P = WithWords;
type Space<'m> = AddressSpace<'m, P>;
type Wait<'s, 'm> = CallWait<'s, 'm, P>;
type Ready<'m> = CallReady<'m, P>;

struct Caller<'s, 'm>(&'s Space<'m>);

impl<'m> Process<'m, P> for Caller<'_, 'm> {
    fn space(&self) -> &Space<'m> {
        self.0
    }

    fn file(&self, _: i32) -> Option<OpenFile<'m, P>> {
        None
    }

    fn process(&self, _: i32) -> Option<&Space<'m>> {
        Some(self.0)
    }
}

#[track_caller]
fn blocked<'s, 'm, E: Debug>(step: Result<Step<'s, 'm, P>, E>) -> Wait<'s, 'm> {
    match step.unwrap() {
        Step::Blocked(wait) => wait,
        Step::Done => panic!("it is done"),
    }
}

#[track_caller]
fn pending(wait: &mut Wait<'_, '_>) -> Word {
    match wait.poll() {
        CallPoll::Pending(on) => {
            assert!(!on.has_changed());
            Word::of(on)
        }
        polled => panic!("{polled:?}"),
    }
}

#[track_caller]
fn ready<'m>(wait: &mut Wait<'_, 'm>) -> Ready<'m> {
    match wait.poll() {
        CallPoll::Ready(ready) => ready,
        polled => panic!("{polled:?}"),
    }
}

/// Checks that the step stops while `hold` holds a lock, and that the release of the lock wakes it.
/// Returns the end of its wait.
#[track_caller]
fn stops<'s, 'm: 's, E: Debug>(
    hold: impl FnOnce(&mut dyn FnMut()),
    step: impl FnOnce() -> Result<Step<'s, 'm, P>, E>,
) -> Ready<'m> {
    let (mut step, mut held) = (Some(step), None);
    hold(&mut || {
        let mut wait = blocked(step.take().unwrap()());
        pending(&mut wait);
        let word = pending(&mut wait);
        held = Some((wait, word));
    });
    let (mut wait, word) = held.unwrap();
    // SAFETY: the word is in the address space or in an object, which live.
    assert!(unsafe { word.has_changed() }, "the release changes the word");
    ready(&mut wait)
}

/// Runs `scenario` with eight pages at [`AT`], the first of which was written, and a pager.
fn with_space(scenario: impl for<'m> FnOnce(&'m Memory<P>, &Space<'m>, &'m Failing)) {
    let files = Failing::new();
    let memory = memory_with_words();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT, 8 * PAGE)).unwrap();
    space.fault(VirtAddr(AT), Access::Write).unwrap();
    scenario(&memory, &space, &files);
}

const CALLS: [(Call, [u64; 6]); 17] = [
    (Call::Mprotect, [AT, PAGE, 1, 0, 0, 0]),
    (Call::PkeyMprotect, [AT, PAGE, 3, u64::MAX, 0, 0]),
    (Call::Madvise, [AT, PAGE, 4, 0, 0, 0]),
    (Call::Madvise, [AT, PAGE, 21, 0, 0, 0]),
    (Call::Madvise, [AT, 8 * PAGE, 23, 0, 0, 0]),
    (Call::Mincore, [AT, PAGE, AT + PAGE, 0, 0, 0]),
    (Call::Msync, [AT, PAGE, 4, 0, 0, 0]),
    (Call::Mlock, [AT, PAGE, 0, 0, 0, 0]),
    (Call::Mlock2, [AT, PAGE, 1, 0, 0, 0]),
    (Call::Munlock, [AT, PAGE, 0, 0, 0, 0]),
    (Call::Mlockall, [1, 0, 0, 0, 0, 0]),
    (Call::Munlockall, [0; 6]),
    (Call::Brk, [0; 6]),
    (Call::ProcessMadvise, [0, AT, 1, 20, 0, 0]),
    (Call::Mremap, [AT, PAGE, 2 * PAGE, 1, 0, 0]),
    (Call::Mmap, [AT + MIB, PAGE, 3, 0x32, u64::MAX, 0]),
    (Call::Munmap, [AT, PAGE, 0, 0, 0, 0]),
];

#[test]
fn each_call_waits_for_the_mutex() {
    with_space(|_, space, _| {
        let caller = Caller(space);
        // The one range of `process_madvise`.
        let range = [AT + 4 * PAGE, PAGE].map(u64::to_ne_bytes).concat();
        space.write_user(VirtAddr(AT), &range).unwrap();
        for (call, arguments) in CALLS {
            let mut pending = PendingCall::new(call, arguments);
            let ready = stops(
                |held| with_mutex(space, held),
                || match pending.step(&caller, None) {
                    CallStep::Blocked(wait) => Ok::<_, i64>(Step::Blocked(wait)),
                    CallStep::Done(result) => Err(result),
                },
            );
            let CallStep::Done(result) = pending.step(&caller, Some(ready)) else {
                panic!("{call:?} stops without a reason");
            };
            let alone = bindery_linux::call(&caller, call, arguments);
            let repeats = matches!(call, Call::Mremap | Call::Mmap | Call::Brk);
            assert!(result == alone || repeats && result >= 0, "{call:?}: {result}, {alone}");
        }
    });
}

#[test]
fn the_halves_of_calls_wait_for_the_mutex() {
    with_space(|_, space, _| {
        let hold = |held: &mut dyn FnMut()| with_mutex(space, held);
        let mut mlock = space.begin_mlock(VirtAddr(AT), 8 * PAGE, LockPages::Now).unwrap();
        let end = stops(hold, || mlock.step(space, None));
        assert!(matches!(mlock.step(space, Some(end)), Ok(Step::Done)));
        assert!(matches!(with_mutex(space, || mlock.step(space, None)), Ok(Step::Done)));
        for advice in [Advice::PageOut, Advice::Collapse] {
            let begun = space.begin_madvise(VirtAddr(AT), PAGE, advice, KeyRights::ALL);
            let mut call = begun.unwrap();
            let end = stops(hold, || call.step(space, None));
            assert!(!matches!(call.step(space, Some(end)), Ok(Step::Blocked(_))));
        }
        let mut msync = space.begin_msync(VirtAddr(AT), PAGE, SyncFlags::SYNC).unwrap();
        let end = stops(hold, || msync.step(space));
        drop(end);
        assert!(matches!(msync.step(space), Ok(Step::Done)));
        let mut none = None;
        assert!(space.wait_for_mutex(&mut none).is_none());
        with_mutex(space, || assert!(space.wait_for_mutex(&mut none).is_some()));
    });
}

#[test]
fn a_step_waits_for_a_vma() {
    with_space(|_, space, _| {
        let hold = |held: &mut dyn FnMut()| with_vma_written(space, VirtAddr(AT), held);
        for page in [0, 1] {
            let mut copy = PendingUserCopy::new(VirtAddr(AT + page * PAGE));
            let end = stops(hold, || copy.write(space, None, b"new"));
            assert!(matches!(copy.write(space, Some(end), b"new"), Ok(Step::Done)));
            let mut into = [0; 3];
            let mut copy = PendingUserCopy::new(VirtAddr(AT + page * PAGE));
            let end = stops(hold, || copy.read(space, None, &mut into));
            assert!(matches!(copy.read(space, Some(end), &mut into), Ok(Step::Done)));
            assert_eq!(&into, b"new");
        }
    });
}

#[test]
fn a_first_write_waits_for_the_mutex() {
    with_space(|_, space, _| {
        let at = VirtAddr(AT + MIB);
        space.mmap(&fixed(at.0, PAGE)).unwrap();
        let mut copy = PendingUserCopy::new(at);
        let end = stops(|held| with_mutex(space, held), || copy.write(space, None, b"new"));
        assert!(matches!(copy.write(space, Some(end), b"new"), Ok(Step::Done)));
        // Without another thread, the step needs no wait for it.
        space.mmap(&fixed(at.0 + PAGE, PAGE)).unwrap();
        let mut copy = PendingUserCopy::new(VirtAddr(at.0 + PAGE));
        assert!(matches!(copy.write(space, None, b"new"), Ok(Step::Done)));
        let mut copy = PendingUserCopy::new(VirtAddr(at.0 + 2 * PAGE));
        assert_eq!(copy.write(space, None, b"new").err(), Some(FaultError::NotMapped));
    });
}

fn map<'m>(space: &Space<'m>, file: &Object<'m, P>) {
    let access = FileAccess::READ | FileAccess::WRITE;
    let source = MapObject { object: file, offset: 0, access };
    let request = MapRequest { sharing: Sharing::Shared, ..fixed(AT + MIB, 4 * PAGE) };
    space.mmap_object(&request, &source).unwrap();
}

#[test]
fn a_step_waits_for_pages_of_objects() {
    with_space(|memory, space, files| {
        let file = memory.file(files, 1, 4 * PAGE).unwrap();
        map(space, &file);
        let mut into = [1; 3];
        let mut copy = PendingUserCopy::new(VirtAddr(AT + MIB));
        let locks = |held: &mut dyn FnMut()| with_pages_locked(&file, held);
        let mut end = Some(stops(locks, || copy.read(space, None, &mut into)));
        while let Step::Blocked(wait) = copy.read(space, end.take(), &mut into).unwrap() {
            end = Some(wait.wait());
        }
        assert_eq!(into, [0; 3]);
    });
}

#[test]
fn calls_on_objects_wait_for_their_locks() {
    with_space(|memory, space, files| {
        let file = memory.file(files, 1, 4 * PAGE).unwrap();
        let (mut into, from) = ([1; 3], [2; PAGE as usize]);
        let mut read = PendingRead::new(&file, 5, into.len()).unwrap();
        let pages = |held: &mut dyn FnMut()| with_pages_locked(&file, held);
        let changes = |held: &mut dyn FnMut()| with_changes_held(&file, held);
        let mut end = Some(stops(pages, || read.step(None, &mut into)));
        while let Step::Blocked(wait) = read.step(end.take(), &mut into).unwrap() {
            end = Some(wait.wait());
        }
        assert_eq!((into, read.moved()), ([0; 3], 3));
        let mut write = PendingWrite::new(&file, 0, from.len()).unwrap();
        let end = stops(changes, || write.step(None, &from));
        assert!(matches!(write.step(Some(end), &from), Ok(Step::Done)));
        // Calls that are over wait for nothing.
        with_changes_held(&file, || assert!(matches!(write.step(None, &from), Ok(Step::Done))));
        with_pages_locked(&file, || assert!(matches!(read.step(None, &mut into), Ok(Step::Done))));
        map(space, &file);
        let (at, rights) = (VirtAddr(AT + MIB), KeyRights::ALL);
        let mut remove = space.begin_madvise(at, PAGE, Advice::Remove, rights).unwrap();
        let end = stops(changes, || remove.step(space, None));
        let mutex = |held: &mut dyn FnMut()| with_mutex(space, held);
        drop(end);
        while let Step::Blocked(wait) = remove.step(space, None).unwrap() {
            drop(wait.wait());
        }
        let mut remove = space.begin_madvise(at, PAGE, Advice::Remove, rights).unwrap();
        drop(stops(mutex, || remove.step(space, None)));
    });
}

#[test]
fn the_end_of_the_wait_before_is_kept() {
    with_space(|memory, space, files| {
        let file = memory.file(files, 1, 4 * PAGE).unwrap();
        map(space, &file);
        files.reads_left.store(0, Ordering::Relaxed);
        let at = VirtAddr(AT + MIB);
        let mut mlock = space.begin_mlock(at, PAGE, LockPages::Now).unwrap();
        let failed = blocked(mlock.step(space, None)).wait();
        let hold = |held: &mut dyn FnMut()| with_mutex(space, held);
        let failed = stops(hold, || mlock.step(space, Some(failed)));
        files.never();
        assert_eq!(mlock.step(space, Some(failed)).err(), Some(Error::Fault(at)));
    });
}

#[test]
fn a_wait_for_a_lock_keeps_the_page() {
    for steps in 0..2 {
        with_space(|memory, space, files| {
            let file = memory.file(files, 1, 4 * PAGE).unwrap();
            map(space, &file);
            let at = VirtAddr(AT + MIB);
            let mut populate = space.begin_mlock(at, PAGE, LockPages::Now).unwrap();
            let (mut copy, mut into) = (PendingUserCopy::new(at), [0; 3]);
            let mut step = |ready| match steps {
                0 => populate.step(space, ready).map_err(|error| error.to_string()),
                _ => copy.read(space, ready, &mut into).map_err(|error| error.to_string()),
            };
            let brought = blocked(step(None)).wait();
            let evicts = || file.evict(0, PAGE) > 0;
            let end = stops(
                |held| {
                    with_vma_written(space, at, || {
                        held();
                        assert!(!evicts(), "the wait keeps the page");
                    });
                },
                || step(Some(brought)),
            );
            assert!(!evicts(), "so does its end");
            while let Step::Blocked(wait) = step(None).unwrap() {
                drop(wait.wait());
            }
            drop(end);
        });
    }
}

#[test]
fn a_step_stops_between_two_mappings() {
    with_space(|memory, space, files| {
        let file = memory.file(files, 1, 4 * PAGE).unwrap();
        map(space, &file);
        space.madvise(VirtAddr(AT), 2 * PAGE, Advice::NoHuge).unwrap();
        assert!(space.mapping_count() > 2);
        let (platform, ends) = (memory.platform(), AtomicBool::new(false));
        platform.hold_next_zero();
        thread::scope(|scope| {
            scope.spawn(|| {
                platform.wait_until_held();
                with_mutex(space, || {
                    platform.release();
                    while !ends.load(Ordering::Acquire) {
                        thread::yield_now();
                    }
                });
            });
            let mut mlock = space.begin_mlock(VirtAddr(AT), 8 * PAGE, LockPages::Now).unwrap();
            let mut wait = blocked(mlock.step(space, None));
            pending(&mut wait);
            assert!(mlock.remaining().start() < VirtAddr(AT + 8 * PAGE));
            ends.store(true, Ordering::Release);
            let ready = wait.wait();
            assert!(matches!(mlock.step(space, Some(ready)), Ok(Step::Done)));
        });
    });
}

#[test]
fn a_mutex_without_a_word_needs_a_thread() {
    let (_machine, memory) = memory_with::<super::word_lock::A>(Config::default());
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT, PAGE)).unwrap();
    let mut mlock = space.begin_mlock(VirtAddr(AT), PAGE, LockPages::Now).unwrap();
    let wait = with_mutex(&space, || {
        let Ok(Step::Blocked(mut wait)) = mlock.step(&space, None) else { panic!("it is taken") };
        assert!(matches!(wait.poll(), CallPoll::NeedsThread));
        assert!(!wait.is_for_storage());
        wait
    });
    assert!(matches!(mlock.step(&space, Some(wait.wait())), Ok(Step::Done)));
}
