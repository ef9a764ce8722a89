//! Calls that have made a change, and that stop until a handler has read the message about it.

use std::thread;

use bindery::addr::{VirtAddr, VirtRange};
use bindery::platform::Cpu;
use bindery::{
    Access, CallPoll, CallReady, CallWait, Errno, Error, FaultError, Inspection, PartialFill,
    PendingEvents, Remap, Step, Userfault, UserfaultFeatures, UserfaultMessage, UserfaultModes,
    UserfaultScope,
};
use bindery_hosted::Machine;
use bindery_linux::{Call, CallStep, OpenFile, PendingCall, Process};

use super::fixture::{A, AT, Fixture, PAGE, Space, at, with_features};
use crate::support::fixed;

type P = Machine<A>;

const EVENTS: UserfaultFeatures = UserfaultFeatures::EVENT_FORK
    .union(UserfaultFeatures::EVENT_REMAP)
    .union(UserfaultFeatures::EVENT_UNMAP);
const AGAIN: Result<(), PartialFill> = Err(PartialFill { done: 0, error: Error::TryAgain });

fn pages(first: u64, count: u64) -> VirtRange {
    VirtRange::from_len(at(first), count * PAGE).unwrap()
}

#[track_caller]
fn blocked<'s, 'm>(step: Step<'s, 'm, P>) -> CallWait<'s, 'm, P> {
    match step {
        Step::Blocked(wait) => wait,
        Step::Done => panic!("it does not wait"),
    }
}

#[track_caller]
fn assert_done<'m>(events: &mut PendingEvents<'m, P>, ready: Option<CallReady<'m, P>>) {
    assert!(matches!(events.step(ready), Step::Done));
    assert!(events.is_empty());
    assert!(matches!(events.step(None), Step::Done));
}

#[track_caller]
fn unmapped(fd: &Userfault<'_, P>) -> VirtRange {
    match fd.try_read() {
        Some(UserfaultMessage::Unmap(range)) => range,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn childs<'m>(fd: &Userfault<'m, P>) -> Userfault<'m, P> {
    match fd.try_read() {
        Some(UserfaultMessage::Fork(child)) => child,
        other => panic!("{other:?}"),
    }
}

/// Polls the wait until `read` has read its message, the only one.
#[track_caller]
fn until_read<'m>(
    fixture: &Fixture<'_, 'm>,
    mut wait: CallWait<'_, 'm, P>,
    read: impl FnOnce(),
) -> CallReady<'m, P> {
    assert!(!wait.is_for_storage());
    let CallPoll::Pending(on) = wait.poll() else { panic!("nothing to wait for") };
    assert_eq!(fixture.copy(900, PAGE, 1), AGAIN, "the message is unread");
    assert!(!on.has_changed());
    read();
    assert!(on.has_changed());
    assert!(!fixture.fd.is_readable(), "one message at a time");
    match wait.poll() {
        CallPoll::Ready(ready) => ready,
        other => panic!("the message was read: {other:?}"),
    }
}

fn is_mapped(space: &Space<'_>, page: u64) -> bool {
    let covers = |range: VirtRange| range.contains(at(page));
    space.view_mapping(at(page), |view| covers(view.mapping().range)).unwrap_or_default()
}

/// Registers this range with a second userfaultfd.
fn second<'m>(fixture: &Fixture<'_, 'm>, first: u64, count: u64) -> Userfault<'m, P> {
    let (space, length) = (fixture.space, count * PAGE);
    let second = space.userfault(EVENTS, UserfaultScope::All).unwrap();
    space.unregister_userfault(fixture.fd, at(first), length).unwrap();
    space.register_userfault(&second, at(first), length, UserfaultModes::MISSING).unwrap();
    second
}

#[test]
fn an_unmapping_is_done_before_its_reader() {
    with_features(EVENTS, |fixture| {
        fixture.copy(4, 2 * PAGE, 4).unwrap();
        let (result, mut events) = fixture.space.begin_munmap(at(4), 2 * PAGE);
        assert_eq!(result, Ok(()));
        assert!(!fixture.fd.is_readable(), "the steps send");
        let wait = blocked(events.step(None));
        assert!(!is_mapped(fixture.space, 4));
        assert_eq!(fixture.space.resident().anonymous, 0);
        // Another thread takes the place. The call does not unmap it.
        fixture.space.mmap(&fixed(at(4).0, PAGE)).unwrap();
        let read = || assert_eq!(unmapped(fixture.fd), pages(4, 2));
        let ready = until_read(fixture, wait, read);
        assert_done(&mut events, Some(ready));
        assert!(is_mapped(fixture.space, 4) && !is_mapped(fixture.space, 5));
        fixture.copy(900, PAGE, 1).unwrap();
    });
}

#[test]
fn a_move_waits_for_both_messages() {
    with_features(EVENTS, |fixture| {
        fixture.copy(4, PAGE, 4).unwrap();
        let to = VirtAddr(4 * AT);
        let length = 4 * PAGE;
        let (moved, mut events) = fixture.space.begin_mremap(at(4), length, length, Remap::To(to));
        assert_eq!(moved.map(|(at, _)| at), Ok(to));
        let wait = blocked(events.step(None));
        let ready = until_read(fixture, wait, || match fixture.fd.try_read() {
            Some(UserfaultMessage::Remap { from, to: there, length: long }) => {
                assert_eq!((from, there, long), (at(4), to, length));
            }
            other => panic!("{other:?}"),
        });
        let wait = blocked(events.step(Some(ready)));
        let read = || assert_eq!(unmapped(fixture.fd), pages(4, 4));
        let ready = until_read(fixture, wait, read);
        assert_done(&mut events, Some(ready));
        let mut byte = [0];
        fixture.space.read_user(to, &mut byte).unwrap();
        assert_eq!(byte, [4]);
        fixture.copy(900, PAGE, 1).unwrap();
    });
}

#[test]
fn a_dropped_wait_leaves_the_message_sent() {
    with_features(EVENTS, |fixture| {
        let (_, mut events) = fixture.space.begin_munmap(at(4), PAGE);
        for polls in [false, true] {
            let mut wait = blocked(events.step(None));
            if polls {
                assert!(matches!(wait.poll(), CallPoll::Pending(_)));
            }
            drop(wait);
            assert!(fixture.fd.is_readable());
            assert_eq!(fixture.copy(900, PAGE, 1), AGAIN);
        }
        assert_eq!(unmapped(fixture.fd), pages(4, 1));
        assert!(!fixture.fd.is_readable(), "it was sent once");
        assert_done(&mut events, None);
        fixture.copy(900, PAGE, 1).unwrap();
    });
}

#[test]
fn a_dropped_call_withdraws_and_ends_waits() {
    with_features(EVENTS, |fixture| {
        for (page, steps) in [(4, false), (6, true)] {
            let (_, mut events) = fixture.space.begin_munmap(at(page), PAGE);
            let wait = steps.then(|| blocked(events.step(None)));
            assert_eq!(fixture.copy(900, PAGE, 1), AGAIN);
            drop(events);
            assert!(!fixture.fd.is_readable());
            assert!(!is_mapped(fixture.space, page), "the change stays");
            fixture.copy(900 + page, PAGE, 1).unwrap();
            if let Some(mut wait) = wait {
                assert!(matches!(wait.poll(), CallPoll::Ready(_)));
            }
        }
    });
}

#[test]
fn a_wait_that_outlives_its_call_wakes() {
    with_features(EVENTS, |fixture| {
        let (_, mut events) = fixture.space.begin_munmap(at(4), PAGE);
        let wait = blocked(events.step(None));
        thread::scope(|scope| {
            let waits = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || drop(wait.wait())));
            while fixture.machine.parked_threads() == 0 {
                thread::yield_now();
            }
            drop(events);
            waits.join().unwrap();
        });
        fixture.copy(900, PAGE, 1).unwrap();
    });
}

#[test]
fn closing_while_waiting_reaches_the_next() {
    with_features(EVENTS, |fixture| {
        let other = second(fixture, 4, 2);
        let (_, mut events) = fixture.space.begin_munmap(at(4), 4 * PAGE);
        let mut wait = blocked(events.step(None));
        assert!(other.is_readable() && !fixture.fd.is_readable());
        assert!(matches!(wait.poll(), CallPoll::Pending(_)));
        drop(other);
        let CallPoll::Ready(ready) = wait.poll() else { panic!("it is closed") };
        let wait = blocked(events.step(Some(ready)));
        let read = || assert_eq!(unmapped(fixture.fd), pages(4, 4));
        let ready = until_read(fixture, wait, read);
        assert_done(&mut events, Some(ready));
    });
}

#[test]
fn a_closed_userfaultfd_is_not_told() {
    with_features(EVENTS, |fixture| {
        let other = second(fixture, 4, 2);
        let (_, mut events) = fixture.space.begin_munmap(at(4), 4 * PAGE);
        drop(other);
        let wait = blocked(events.step(None));
        let read = || assert_eq!(unmapped(fixture.fd), pages(4, 4));
        let ready = until_read(fixture, wait, read);
        assert_done(&mut events, Some(ready));
    });
}

#[test]
fn a_killed_thread_ends_one_wait() {
    with_features(EVENTS, |fixture| {
        let other = second(fixture, 4, 2);
        let (_, mut events) = fixture.space.begin_munmap(at(4), 4 * PAGE);
        let wait = blocked(events.step(None));
        let ready = thread::scope(|scope| {
            let waits = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || wait.wait()));
            while fixture.machine.parked_threads() == 0 {
                thread::yield_now();
            }
            fixture.machine.kill(Cpu(1));
            waits.join().unwrap()
        });
        assert!(other.is_readable(), "the call decides");
        // The thread of the call was not killed, and waits for the next message.
        let wait = blocked(events.step(Some(ready)));
        assert!(!other.is_readable(), "the message is withdrawn");
        let read = || assert_eq!(unmapped(fixture.fd), pages(4, 4));
        let ready = until_read(fixture, wait, read);
        assert_done(&mut events, Some(ready));
        fixture.space.close_userfault(other);
    });
}

#[test]
fn a_killed_call_withdraws_all_messages() {
    with_features(EVENTS, |fixture| {
        let other = second(fixture, 4, 2);
        let (_, mut events) = fixture.space.begin_munmap(at(4), 4 * PAGE);
        let wait = blocked(events.step(None));
        fixture.machine.kill(Cpu(1));
        fixture.machine.on_cpu(Cpu(1), || assert_done(&mut events, None));
        drop(wait);
        assert!(!other.is_readable() && !fixture.fd.is_readable());
        fixture.copy(900, PAGE, 1).unwrap();
        fixture.space.close_userfault(other);
    });
}

#[test]
fn a_fork_waits_for_its_reader() {
    with_features(EVENTS, |fixture| {
        fixture.copy(4, PAGE, 4).unwrap();
        let (child, mut events) = fixture.space.begin_fork();
        let child = child.unwrap();
        let wait = blocked(events.step(None));
        let mut theirs = None;
        let ready = until_read(fixture, wait, || theirs = Some(childs(fixture.fd)));
        assert_done(&mut events, Some(ready));
        let theirs = theirs.unwrap();
        let mut byte = [0];
        child.read_user(at(4), &mut byte).unwrap();
        assert_eq!(byte, [4]);
        child.handler(&theirs).fill_zeroes(at(5), PAGE, Default::default()).unwrap();
        child.close_userfault(theirs);
    });
}

#[test]
fn a_fork_that_is_dropped_leaves_no_userfaultfd() {
    with_features(EVENTS, |fixture| {
        for steps in [false, true] {
            let (child, mut events) = fixture.space.begin_fork();
            let child = child.unwrap();
            let wait = steps.then(|| blocked(events.step(None)));
            drop(events);
            drop(wait);
            assert!(!fixture.fd.is_readable());
            child.fault(at(7), Access::Write).unwrap();
            fixture.copy(900 + u64::from(steps), PAGE, 1).unwrap();
        }
    });
}

impl<'m> Process<'m, P> for Fixture<'_, 'm> {
    fn space(&self) -> &Space<'m> {
        self.space
    }

    fn file(&self, _descriptor: i32) -> Option<OpenFile<'m, P>> {
        None
    }

    fn process(&self, _descriptor: i32) -> Option<&Space<'m>> {
        None
    }
}

/// Performs the call in steps, reads each message, and returns the result with the ranges that were
/// unmapped, whose number is that of the waits.
fn run(fixture: &Fixture<'_, '_>, call: Call, arguments: [u64; 6]) -> (i64, Vec<VirtRange>) {
    let mut pending = PendingCall::new(call, arguments);
    let (mut ready, mut told, mut waits) = (None, Vec::new(), 0);
    loop {
        match pending.step(fixture, ready.take()) {
            CallStep::Done(result) => {
                assert_eq!(told.len(), waits);
                let CallStep::Done(again) = pending.step(fixture, None) else { panic!("again") };
                assert_eq!(again, result);
                return (result, told);
            }
            CallStep::Blocked(mut wait) => {
                waits += 1;
                assert!(matches!(wait.poll(), CallPoll::Pending(_)));
                told.push(unmapped(fixture.fd));
                let CallPoll::Ready(end) = wait.poll() else { panic!("it was read") };
                ready = Some(end);
            }
        }
    }
}

#[test]
fn each_call_that_unmaps_keeps_its_result() {
    const READ_WRITE: u64 = 3;
    /// `MAP_PRIVATE`, `MAP_FIXED`, `MAP_ANONYMOUS`, `MAP_POPULATE`.
    const OVER: u64 = 0x2 | 0x10 | 0x20 | 0x8000;
    with_features(UserfaultFeatures::EVENT_UNMAP, |fixture| {
        let space = fixture.space;
        fixture.copy(4, 6 * PAGE, 4).unwrap();
        let told = |range: VirtRange| vec![range];
        let munmap = run(fixture, Call::Munmap, [at(4).0, PAGE, 0, 0, 0, 0]);
        assert_eq!(munmap, (0, told(pages(4, 1))));
        let mmap = run(fixture, Call::Mmap, [at(5).0, PAGE, READ_WRITE, OVER, u64::MAX, 0]);
        assert_eq!(mmap, (at(5).0 as i64, told(pages(5, 1))));
        assert!(matches!(space.inspect(at(5)), Inspection::Page { .. }), "it is populated");
        let cut = run(fixture, Call::Mremap, [at(6).0, 2 * PAGE, PAGE, 0, 0, 0]);
        assert_eq!(cut, (at(6).0 as i64, told(pages(7, 1))));
        assert_eq!(run(fixture, Call::Munmap, [at(8).0, 3 * PAGE, 0, 0, 0, 0]).1.len(), 1);
        space.set_break_start(at(8));
        assert_eq!(space.set_break(at(10)), at(10));
        let modes = UserfaultModes::MISSING;
        space.register_userfault(fixture.fd, at(8), 2 * PAGE, modes).unwrap();
        let heap = run(fixture, Call::Brk, [at(9).0, 0, 0, 0, 0, 0]);
        assert_eq!(heap, (at(9).0 as i64, told(pages(9, 1))));
        let nothing = run(fixture, Call::Munmap, [at(4).0, PAGE, 0, 0, 0, 0]);
        assert_eq!(nothing, (0, vec![]));
        let invalid = run(fixture, Call::Munmap, [at(4).0 + 1, PAGE, 0, 0, 0, 0]);
        assert_eq!(invalid, (-(Errno::EINVAL as i64), vec![]));
        assert_eq!(space.fault(at(7), Access::Read), Err(FaultError::NotMapped));
    });
}

/// The target is unmapped before the limit on the address space refuses the call.
#[test]
fn a_call_that_fails_after_unmapping_tells() {
    with_features(UserfaultFeatures::EVENT_UNMAP, |fixture| {
        let source = fixture.space.mmap(&fixed(4 * AT, 2 * PAGE)).unwrap();
        let mut limits = fixture.space.limits();
        limits.address_space = (fixture.space.usage().total - 2) * PAGE;
        fixture.space.set_limits(&limits);
        // `MREMAP_MAYMOVE`, `MREMAP_FIXED`, `MREMAP_DONTUNMAP`.
        let flags = 1 | 2 | 4;
        let arguments = [source.0, 2 * PAGE, 2 * PAGE, flags, at(4).0, 0];
        let (result, told) = run(fixture, Call::Mremap, arguments);
        assert_eq!((result, told), (-(Errno::ENOMEM as i64), vec![pages(4, 2)]));
        assert!(!is_mapped(fixture.space, 4));
        fixture.copy(900, PAGE, 1).unwrap();
    });
}
