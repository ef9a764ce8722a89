//! System calls that stop where they would wait for the pager, and continue later.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, Advice, CallPoll, CallReady, CallWait, Errno, FileAccess, LockPages,
    Memory, Object, PagerError, Protection, Resident, Sharing,
};
use bindery_hosted::{Asked, Config, DelayedFiles, Machine};
use bindery_linux::{self as linux, Call, CallStep, OpenFile, PendingCall, Process};

use super::content_steps::until_answered;
use crate::support::objects::PAGE;
use crate::support::objects_fixture::{AT, map};
use crate::support::{MIB, audit, fixed, memory_with, options};

type A = X86_64<4>;
type Space<'m> = AddressSpace<'m, Machine<A>>;

const PAGES: u64 = 12;
const LENGTH: u64 = PAGES * PAGE;
const MLOCK: (Call, [u64; 6]) = (Call::Mlock, [AT, LENGTH, 0, 0, 0, 0]);
const POPULATE: (Call, [u64; 6]) = (Call::Madvise, [AT, LENGTH, 22, 0, 0, 0]);
const POPULATE_WRITE: (Call, [u64; 6]) = (Call::Madvise, [AT, LENGTH, 23, 0, 0, 0]);
/// Shared memory of descriptor 3, readable and writable, at a fixed address.
const MMAP: (Call, [u64; 6]) = (Call::Mmap, [AT, LENGTH, 3, 0x8011, 3, 0]);
const MLOCKALL: (Call, [u64; 6]) = (Call::Mlockall, [1, 0, 0, 0, 0, 0]);

/// A process with one open file.
struct Caller<'s, 'm> {
    space: &'s Space<'m>,
    file: Object<'m, Machine<A>>,
}

impl<'m> Process<'m, Machine<A>> for Caller<'_, 'm> {
    fn space(&self) -> &Space<'m> {
        self.space
    }

    fn file(&self, descriptor: i32) -> Option<OpenFile<'m, Machine<A>>> {
        let access = FileAccess::READ | FileAccess::WRITE;
        (descriptor == 3).then(|| OpenFile { object: self.file.clone(), access })
    }

    fn process(&self, _descriptor: i32) -> Option<&Space<'m>> {
        None
    }
}

struct Fixture<'f, 'm> {
    machine: &'f Machine<A>,
    memory: &'m Memory<Machine<A>>,
    pager: &'f DelayedFiles,
    caller: Caller<'f, 'm>,
}

/// Runs `scenario` with a file of [`PAGES`] pages, mapped shared or private unless `sharing` is
/// `None`. Nothing is left afterwards.
#[track_caller]
fn with_file<R>(
    sharing: Option<Sharing>,
    scenario: impl for<'f, 'm> FnOnce(&Fixture<'f, 'm>) -> R,
) -> R {
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let free = memory.free_frame_count();
    let pager = DelayedFiles::new();
    let content: Vec<u8> = (0..LENGTH).map(|n| (n / PAGE) as u8 + 1).collect();
    pager.files.put(1, &content);
    let result = {
        let space = AddressSpace::new(&memory, options()).unwrap();
        let file = memory.file(&pager, 1, LENGTH).unwrap();
        if let Some(sharing) = sharing {
            map(&space, &file, AT, LENGTH, sharing).unwrap();
            // Each page needs a separate read.
            space.madvise(VirtAddr(AT), LENGTH, Advice::Random).unwrap();
        }
        let caller = Caller { space: &space, file };
        let fixture = Fixture { machine: &machine, memory: &memory, pager: &pager, caller };
        let result = scenario(&fixture);
        audit(&machine, &memory, &[&space]);
        // Requests without a waiting call are answered at the end, because otherwise no thread
        // could close the file.
        pager.answer_all(&memory);
        result
    };
    let report = audit(&machine, &memory, &[]);
    assert_eq!((report.objects, report.object_pages), (0, 0));
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
    result
}

type Wait<'s, 'm> = CallWait<'s, 'm, Machine<A>>;
type Ready<'m> = CallReady<'m, Machine<A>>;

#[track_caller]
fn blocked<'s, 'm>(step: CallStep<'s, 'm, Machine<A>>) -> Wait<'s, 'm> {
    match step {
        CallStep::Blocked(wait) => wait,
        CallStep::Done(result) => panic!("it is done: {result}"),
    }
}

#[track_caller]
fn ready<'m>(wait: &mut Wait<'_, 'm>) -> Ready<'m> {
    match wait.poll() {
        CallPoll::Ready(ready) => ready,
        other => panic!("it is not over: {other:?}"),
    }
}

/// Starts the read of a wait.
#[track_caller]
fn begin(wait: &mut Wait<'_, '_>) {
    assert!(matches!(wait.poll(), CallPoll::Pending(_)));
}

impl<'m> Fixture<'_, 'm> {
    fn space(&self) -> &Space<'m> {
        self.caller.space
    }

    fn step<'s>(
        &'s self,
        call: &mut PendingCall<'m, Machine<A>>,
        ready: Option<Ready<'m>>,
    ) -> CallStep<'s, 'm, Machine<A>> {
        call.step(&self.caller, ready)
    }

    /// Polls a wait to its end, while the pager answers late.
    fn until_ready(&self, wait: Wait<'_, 'm>) -> Ready<'m> {
        until_answered(self.memory, self.pager, wait)
    }

    /// Runs a call in steps. Returns its result and the number of its waits.
    fn in_steps(&self, (call, arguments): (Call, [u64; 6])) -> (i64, usize) {
        let mut call = PendingCall::new(call, arguments);
        let (mut ready, mut waits) = (None, 0);
        loop {
            match self.step(&mut call, ready.take()) {
                CallStep::Done(result) => return (result, waits),
                CallStep::Blocked(wait) => ready = Some(self.until_ready(wait)),
            }
            waits += 1;
        }
    }

    fn answer(&self, first: u64, answer: Result<(), PagerError>) {
        self.pager.answer(self.memory, self.pager.take(|asked| asked.first == first), answer);
    }
}

/// The effects of a call: its result, the state that it leaves, and the requests to the pager.
type Effects = (i64, Resident, Vec<(u64, u64)>, u64);

fn effects(fixture: &Fixture<'_, '_>, result: i64) -> Effects {
    let asked =
        fixture.pager.log().iter().map(|&Asked { first, pages, .. }| (first, pages)).collect();
    (result, fixture.space().resident(), asked, fixture.memory.events().major_faults)
}

#[test]
fn stepped_and_blocking_calls_do_the_same() {
    let mapped = [Some(Sharing::Shared), Some(Sharing::Private)];
    let calls = [MLOCK, POPULATE, POPULATE_WRITE, MLOCKALL];
    let all = mapped.iter().flat_map(|sharing| calls.map(|call| (*sharing, call)));
    for (sharing, call) in all.chain([(None, MMAP)]) {
        for advice in [Advice::Random, Advice::Normal, Advice::Sequential] {
            let advise = |fixture: &Fixture<'_, '_>| {
                let _ = fixture.space().madvise(VirtAddr(AT), LENGTH, advice);
            };
            let blocking = with_file(sharing, |fixture| {
                advise(fixture);
                fixture.pager.keep_reads(false);
                let result = linux::call(&fixture.caller, call.0, call.1);
                effects(fixture, result)
            });
            let stepped = with_file(sharing, |fixture| {
                advise(fixture);
                let (result, waits) = fixture.in_steps(call);
                assert!(waits > 0, "{call:?}: it never waits");
                effects(fixture, result)
            });
            let (mut stepped, mut blocking) = (stepped, blocking);
            if advice != Advice::Random || sharing.is_none() {
                // Readahead may supply a page before it is needed.
                (stepped.3, blocking.3) = (0, 0);
            }
            assert_eq!(stepped, blocking, "{sharing:?}, {call:?}, {advice:?}");
            let pages: u64 = stepped.2.iter().map(|(_, pages)| pages).sum();
            assert_eq!(pages, PAGES, "{sharing:?}, {call:?}: a page was asked for twice");
            let result = if call == MMAP { AT as i64 } else { 0 };
            assert_eq!(stepped.0, result, "{sharing:?}, {call:?}");
        }
    }
}

/// Pages that were locked while no access was allowed are read, and copied for their mapping.
#[test]
fn mprotect_of_locked_pages_takes_steps() {
    let lock = |fixture: &Fixture<'_, '_>| {
        let space = fixture.space();
        space.mprotect(VirtAddr(AT), LENGTH, Protection::empty()).unwrap();
        assert!(space.mlock(VirtAddr(AT), LENGTH, LockPages::Now).is_err());
    };
    let no_key = u64::MAX;
    for call in [Call::Mprotect, Call::PkeyMprotect] {
        let arguments = [AT, LENGTH, 3, no_key, 0, 0];
        let blocking = with_file(Some(Sharing::Private), |fixture| {
            lock(fixture);
            fixture.pager.keep_reads(false);
            let result = linux::call(&fixture.caller, call, arguments);
            effects(fixture, result)
        });
        let stepped = with_file(Some(Sharing::Private), |fixture| {
            lock(fixture);
            for [at, length, protection, error] in
                [[AT + 1, PAGE, 3, 22], [0, PAGE, 3, 12], [AT, PAGE, 1 << 20, 22]]
            {
                let call = (call, [at, length, protection, no_key, 0, 0]);
                assert_eq!(fixture.in_steps(call), (-(error as i64), 0));
            }
            let (result, waits) = fixture.in_steps((call, arguments));
            assert_eq!(waits, PAGES as usize);
            effects(fixture, result)
        });
        assert_eq!(stepped, blocking);
        assert_eq!((stepped.0, stepped.1.anonymous), (0, PAGES));
    }
}

#[test]
fn a_call_without_waits_takes_one_step() {
    with_file(None, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, LENGTH)).unwrap();
        for call in [MLOCK, POPULATE_WRITE, MLOCKALL] {
            assert_eq!(fixture.in_steps(call), (0, 0));
        }
        assert_eq!(space.resident().total(), PAGES);
        assert_eq!(fixture.in_steps((Call::Munlock, MLOCK.1)), (0, 0));
        // An address that is not mapped, and a bad argument.
        assert_eq!(fixture.in_steps((Call::Mlock, [0, PAGE, 0, 0, 0, 0])), (-12, 0));
        assert_eq!(fixture.in_steps((Call::Mlock2, [AT, PAGE, 9, 0, 0, 0])), (-22, 0));
        let mut call = PendingCall::new(Call::Munmap, [AT, LENGTH, 0, 0, 0, 0]);
        for _ in 0..2 {
            // After the last step the call returns its result again, without effect.
            assert!(matches!(fixture.step(&mut call, None), CallStep::Done(0)));
            let _ = space.mmap(&fixed(AT, PAGE));
        }
        assert_eq!(space.usage().total, 1);
    });
}

#[test]
fn two_calls_are_answered_out_of_order() {
    with_file(Some(Sharing::Shared), |fixture| {
        let half = LENGTH / 2;
        let mut calls =
            [0, half].map(|from| PendingCall::new(Call::Mlock, [AT + from, half, 0, 0, 0, 0]));
        let mut waits: Vec<_> =
            calls.iter_mut().map(|call| blocked(fixture.step(call, None))).collect();
        waits.iter_mut().for_each(begin);
        fixture.answer(PAGES / 2, Ok(()));
        begin(&mut waits[0]);
        let second = ready(&mut waits[1]);
        let next = blocked(fixture.step(&mut calls[1], Some(second)));
        fixture.answer(0, Ok(()));
        let first = ready(&mut waits[0]);
        // A result of another call has no effect.
        drop(blocked(fixture.step(&mut calls[1], Some(first))));
        drop((next, waits));
        for mut call in calls {
            let mut ready = None;
            while let CallStep::Blocked(wait) = fixture.step(&mut call, ready.take()) {
                ready = Some(fixture.until_ready(wait));
            }
            assert!(matches!(fixture.step(&mut call, None), CallStep::Done(0)));
        }
        assert_eq!(fixture.pager.log().len() as u64, PAGES, "each page was read once");
    });
}

#[test]
fn a_failed_read_ends_the_call() {
    let errors = [
        (Some(Sharing::Shared), MLOCK, -(Errno::ENOMEM as i64)),
        (Some(Sharing::Private), POPULATE, -(Errno::EFAULT as i64)),
        // The mapping exists, and the other mappings are locked.
        (None, MMAP, AT as i64),
        (Some(Sharing::Shared), MLOCKALL, 0),
    ];
    for (sharing, call, expected) in errors {
        with_file(sharing, |fixture| {
            let mut pending = PendingCall::new(call.0, call.1);
            let mut wait = blocked(fixture.step(&mut pending, None));
            begin(&mut wait);
            fixture.answer(0, Ok(()));
            let first = ready(&mut wait);
            let mut second = blocked(fixture.step(&mut pending, Some(first)));
            begin(&mut second);
            fixture.answer(1, Err(PagerError::InputOutput));
            let error = ready(&mut second);
            let step = fixture.step(&mut pending, Some(error));
            assert!(
                matches!(step, CallStep::Done(result) if result == expected),
                "{call:?}: {step:?}"
            );
            assert_eq!(fixture.pager.log().len(), 2, "the pager is not asked again");
            assert_eq!(fixture.space().resident().total(), 1);
            drop((step, wait, second));
            let again = fixture.step(&mut pending, None);
            assert!(matches!(again, CallStep::Done(result) if result == expected));
        });
    }
}

#[test]
fn a_call_may_be_dropped_at_any_point() {
    for polls in [false, true] {
        with_file(Some(Sharing::Private), |fixture| {
            let mut call = PendingCall::new(POPULATE.0, POPULATE.1);
            let mut wait = blocked(fixture.step(&mut call, None));
            if polls {
                begin(&mut wait);
            }
            // The pager never answers during the call.
            drop(call);
            drop(wait);
            assert_eq!(fixture.pager.log().len(), usize::from(polls));
            // Another call finds the read that was started, or starts its own.
            assert_eq!(fixture.in_steps(MLOCK).0, 0);
            assert_eq!(fixture.pager.log().len() as u64, PAGES);
        });
    }
}

#[test]
fn a_thread_waits_in_place_of_the_task() {
    with_file(Some(Sharing::Private), |fixture| {
        let Fixture { machine, memory, pager, .. } = *fixture;
        let mut call = PendingCall::new(MLOCK.0, MLOCK.1);
        let mut ready = None;
        while let CallStep::Blocked(wait) = fixture.step(&mut call, ready.take()) {
            ready = Some(thread::scope(|scope| {
                let waits = scope.spawn(|| machine.on_cpu(Cpu(1), || wait.wait()));
                while !waits.is_finished() {
                    pager.answer_all(memory);
                    thread::yield_now();
                }
                waits.join().unwrap()
            }));
        }
        assert!(matches!(fixture.step(&mut call, None), CallStep::Done(0)));
        assert_eq!(pager.log().len() as u64, PAGES);
    });
}

/// Stops a call at its third page, makes a change, and continues the call.
fn changed_between(
    call: (Call, [u64; 6]),
    change: impl FnOnce(&Space<'_>),
) -> (i64, Resident, usize) {
    with_file(Some(Sharing::Private), |fixture| {
        let mut pending = PendingCall::new(call.0, call.1);
        let mut ready = None;
        for _ in 0..2 {
            ready = Some(fixture.until_ready(blocked(fixture.step(&mut pending, ready))));
        }
        let mut wait = blocked(fixture.step(&mut pending, ready));
        begin(&mut wait);
        change(fixture.space());
        let mut ready = Some(fixture.until_ready(wait));
        loop {
            match fixture.step(&mut pending, ready.take()) {
                CallStep::Done(result) => {
                    return (result, fixture.space().resident(), fixture.pager.log().len());
                }
                CallStep::Blocked(wait) => ready = Some(fixture.until_ready(wait)),
            }
        }
    })
}

fn page(number: u64) -> VirtAddr {
    VirtAddr(AT + number * PAGE)
}

#[test]
fn the_rest_may_be_unmapped_between_two_steps() {
    let unmap_rest = |space: &Space<'_>| space.munmap(page(2), LENGTH - 2 * PAGE).unwrap();
    let unmap_some = |space: &Space<'_>| space.munmap(page(2), 4 * PAGE).unwrap();
    let unmap_all = |space: &Space<'_>| space.munmap(page(0), LENGTH).unwrap();
    // As on Linux, `mlock` found no hole at first and skips one that appeared later.
    let (result, resident, asked) = changed_between(MLOCK, unmap_rest);
    assert_eq!((result, resident.total(), asked), (0, 2, 3));
    let (result, resident, asked) = changed_between(MLOCK, unmap_some);
    assert_eq!((result, resident.total(), asked as u64), (0, PAGES - 4, PAGES - 3));
    assert_eq!(changed_between(MLOCK, unmap_all).0, 0);
    // `MADV_POPULATE_READ` depends only on the pages.
    let (result, resident, asked) = changed_between(POPULATE, unmap_some);
    assert_eq!((result, resident.total(), asked), (-(Errno::ENOMEM as i64), 2, 3));
}

#[test]
fn the_rest_may_be_protected_between_two_steps() {
    let protect = |space: &Space<'_>| {
        space.mprotect(page(2), LENGTH - 2 * PAGE, Protection::empty()).unwrap();
    };
    assert_eq!(changed_between(MLOCK, protect).0, -(Errno::ENOMEM as i64));
    assert_eq!(changed_between(POPULATE, protect).0, -(Errno::EINVAL as i64));
    assert_eq!(changed_between(MLOCKALL, protect).0, 0);
    // The call also reads pages that became readable only now.
    let read = |space: &Space<'_>| {
        space.mprotect(page(2), LENGTH - 2 * PAGE, Protection::READ).unwrap();
    };
    let (result, resident, asked) = changed_between(MLOCK, read);
    assert_eq!((result, resident.total(), asked as u64), (0, PAGES, PAGES));
    assert_eq!(changed_between(POPULATE_WRITE, read).0, -(Errno::EINVAL as i64));
}

#[test]
fn the_rest_may_be_replaced_between_two_steps() {
    let replace = |space: &Space<'_>| {
        space.mmap(&fixed(AT + 2 * PAGE, LENGTH - 2 * PAGE)).unwrap();
        space.fault(page(3), Access::Write).unwrap();
    };
    for call in [MLOCK, POPULATE, POPULATE_WRITE, MLOCKALL] {
        let (result, resident, asked) = changed_between(call, replace);
        // A read of new memory maps the zero page.
        let pages = if call == POPULATE { 3 } else { PAGES };
        assert_eq!((result, resident.total(), asked), (0, pages, 3), "{call:?}");
    }
}
