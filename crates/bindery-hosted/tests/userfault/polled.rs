//! Polled waits for a handler, in which no thread sleeps for the fault.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::KeyRights;
use bindery::platform::Cpu;
use bindery::testing::with_vma_written;
use bindery::{
    Access, FaultError, FaultPoll, FaultReady, FaultWait, FillMode, Platform, Resolved, TriedFault,
    UserfaultFault, UserfaultFeatures, UserfaultKind, UserfaultModes, UserfaultScope,
    WriteProtectMode,
};
use bindery_hosted::Machine;

use super::fixture::{
    A, AT, Fixture, PAGE, Space, Wish, at, with_features, with_fixture, with_wish,
};
use crate::support::{audit, fixed};

type Wait<'s, 'm> = FaultWait<'s, 'm, Machine<A>>;

fn attempt<'s, 'm>(
    space: &'s Space<'m>,
    page: u64,
    access: Access,
) -> Result<TriedFault<'s, 'm, Machine<A>>, FaultError> {
    space.try_fault(at(page), access, KeyRights::ALL)
}

/// The wait of a fault that a handler has to serve.
#[track_caller]
fn blocked<'s, 'm>(space: &'s Space<'m>, page: u64, access: Access) -> Wait<'s, 'm> {
    match attempt(space, page, access) {
        Ok(TriedFault::Blocked(wait)) => wait,
        other => panic!("{other:?}"),
    }
}

/// The result of the wait, if it has ended.
#[track_caller]
fn poll<'m>(wait: &mut Wait<'_, 'm>) -> Option<FaultReady<'m, Machine<A>>> {
    match wait.poll().unwrap() {
        FaultPoll::Ready(ready) => Some(ready),
        FaultPoll::Pending(on) => {
            assert!(!on.has_changed());
            None
        }
        FaultPoll::NeedsThread => panic!("the thread would wait for the handler"),
    }
}

#[track_caller]
fn assert_resolved(fixture: &Fixture<'_, '_>, page: u64, access: Access) {
    let tried = attempt(fixture.space, page, access);
    assert!(matches!(tried, Ok(TriedFault::Resolved(Resolved::Spurious))), "{tried:?}");
}

#[track_caller]
fn assert_no_message(fixture: &Fixture<'_, '_>) {
    let waiting = fixture.fd.waiting();
    assert_eq!((waiting.unread, waiting.all, fixture.fd.is_readable()), (0, 0, false));
}

fn missing(page: u64, is_write: bool) -> UserfaultFault {
    UserfaultFault { address: at(page), kind: UserfaultKind::Missing, is_write, thread: 0 }
}

#[test]
fn an_answer_ends_the_wait() {
    with_fixture(|fixture| {
        for (page, access) in [(3, Access::Read), (4, Access::Write)] {
            let mut wait = blocked(fixture.space, page, access);
            assert_no_message(fixture);
            assert!(poll(&mut wait).is_none() && poll(&mut wait).is_none());
            assert!(!wait.is_for_storage());
            assert_eq!(fixture.fd.waiting().unread, 1);
            assert_eq!(fixture.fault(), missing(page, access == Access::Write));
            assert!(poll(&mut wait).is_none() && !fixture.fd.is_readable());
            let mode = FillMode::empty();
            match access {
                Access::Read => fixture.space.handler(fixture.fd).fill_zeroes(at(page), PAGE, mode),
                _ => fixture.copy(page, PAGE, 7),
            }
            .unwrap();
            let ready = poll(&mut wait);
            assert!(ready.is_some());
            assert_resolved(fixture, page, access);
            assert_no_message(fixture);
        }
        assert_eq!((fixture.byte(3), fixture.byte(4)), (0, 7));
    });
}

#[test]
fn an_early_answer_makes_the_message_needless() {
    with_fixture(|fixture| {
        let mut wait = blocked(fixture.space, 3, Access::Write);
        fixture.copy(3, PAGE, 7).unwrap();
        assert!(poll(&mut wait).is_some());
        drop(wait);
        assert_no_message(fixture);
        assert_resolved(fixture, 3, Access::Write);
        // Faults on present pages wait for no handler.
        assert_resolved(fixture, 3, Access::Read);
    });
}

#[test]
fn a_dropped_wait_withdraws_its_message() {
    with_fixture(|fixture| {
        let mut waits = [3, 4, 5].map(|page| blocked(fixture.space, page, Access::Read));
        assert!(waits.iter_mut().all(|wait| poll(wait).is_none()));
        let [one, other, last] = waits;
        drop(other);
        assert_eq!(fixture.fd.waiting().unread, 2);
        assert_eq!((fixture.fault(), fixture.fault()), (missing(3, false), missing(5, false)));
        assert!(!fixture.fd.is_readable());
        // The handler has read this fault's message and answers although no wait is left.
        drop(one);
        assert_eq!(fixture.fd.waiting().all, 1);
        fixture.copy(3, 3 * PAGE, 7).unwrap();
        drop(last);
        assert_no_message(fixture);
        assert_eq!(fixture.byte(3), 7);
    });
}

#[test]
fn a_wait_moves_with_its_message_queued() {
    with_fixture(|fixture| {
        let mut waits = Vec::new();
        for page in 0..40 {
            waits.push(blocked(fixture.space, page, Access::Read));
            assert!(poll(waits.last_mut().unwrap()).is_none());
        }
        waits.reverse();
        for page in 0..40 {
            assert_eq!(fixture.fault(), missing(page, false));
            fixture.copy(page, PAGE, 1).unwrap();
            let mut wait = waits.pop().unwrap();
            let end = thread::scope(|scope| scope.spawn(|| poll(&mut wait).is_some()).join());
            assert!(end.unwrap());
        }
    });
}

#[test]
fn a_userfaultfd_that_is_closed_ends_the_waits() {
    with_fixture(|fixture| {
        let space = fixture.space;
        let there = 2 * AT;
        space.mmap(&fixed(there, 8 * PAGE)).unwrap();
        let fd = space.userfault(UserfaultFeatures::empty(), UserfaultScope::All).unwrap();
        let modes = UserfaultModes::MISSING;
        space.register_userfault(&fd, VirtAddr(there), 8 * PAGE, modes).unwrap();
        let page = |page: u64| AT / PAGE + page;
        let mut waits = [0, 1, 2].map(|number| blocked(space, page(number), Access::Read));
        let [unread, read, unsent] = &mut waits;
        assert!(poll(read).is_none() && fd.try_read().is_some());
        assert!(poll(unread).is_none() && fd.is_readable());
        audit(fixture.machine, fixture.memory, &[space]);
        drop(fd);
        assert!([unread, read, unsent].map(poll).iter().all(Option::is_some));
        // The waits retain the resources that they hold.
        for number in 0..3 {
            let tried = attempt(space, page(number), Access::Read);
            assert!(matches!(tried, Ok(TriedFault::Resolved(Resolved::ZeroPage))), "{tried:?}");
        }
        drop(waits);
        space.munmap(VirtAddr(there), 8 * PAGE).unwrap();
    });
}

#[test]
fn a_fault_woken_unanswered_asks_again() {
    with_fixture(|fixture| {
        let mut wait = blocked(fixture.space, 3, Access::Read);
        assert!(poll(&mut wait).is_none());
        fixture.fault();
        fixture.space.wake_userfaults(fixture.fd, at(3), PAGE).unwrap();
        assert!(poll(&mut wait).is_some());
        let mut again = blocked(fixture.space, 3, Access::Read);
        drop(wait);
        assert_no_message(fixture);
        assert!(poll(&mut again).is_none());
        assert_eq!(fixture.fault(), missing(3, false));
        fixture.space.munmap(at(3), PAGE).unwrap();
        fixture.space.wake_userfaults(fixture.fd, at(3), PAGE).unwrap();
        assert!(poll(&mut again).is_some());
        let ended = attempt(fixture.space, 3, Access::Read);
        // The mutex decides whether a mapping grows down to it.
        let Ok(TriedFault::Blocked(wait)) = ended else { panic!("{ended:?}") };
        assert_eq!(wait.wait().err(), Some(FaultError::NotMapped));
    });
}

#[test]
fn a_thread_takes_over_wait_and_message() {
    with_fixture(|fixture| {
        let mut wait = blocked(fixture.space, 3, Access::Write);
        assert!(poll(&mut wait).is_none());
        thread::scope(|scope| {
            let waits = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || wait.wait().map(|_| ())));
            assert_eq!(fixture.fault(), missing(3, true));
            fixture.copy(3, PAGE, 7).unwrap();
            assert_eq!(waits.join().unwrap(), Ok(()));
        });
        assert_no_message(fixture);
        assert_resolved(fixture, 3, Access::Write);
    });
}

#[test]
fn the_message_names_the_thread_that_has_faulted() {
    with_features(UserfaultFeatures::THREAD_ID, |fixture| {
        let wait = blocked(fixture.space, 3, Access::Write);
        thread::scope(|scope| {
            let waits = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || wait.wait().map(|_| ())));
            assert_eq!(fixture.fault(), UserfaultFault { thread: 1, ..missing(3, true) });
            fixture.copy(3, PAGE, 7).unwrap();
            assert_eq!(waits.join().unwrap(), Ok(()));
        });
        assert_resolved(fixture, 3, Access::Write);
    });
}

#[test]
fn a_signal_withdraws_the_threads_message() {
    with_fixture(|fixture| {
        let mut wait = blocked(fixture.space, 3, Access::Write);
        assert!(poll(&mut wait).is_none());
        fixture.machine.signal_after(Some(0));
        assert_eq!(wait.wait().err(), Some(FaultError::Interrupted));
        fixture.machine.signal_after(None);
        assert_no_message(fixture);
    });
}

#[test]
fn the_word_of_the_wait_is_unparked() {
    with_fixture(|fixture| {
        thread::scope(|scope| {
            let handler = scope.spawn(|| {
                fixture.machine.on_cpu(Cpu(1), || {
                    for page in 0..100 {
                        assert_eq!(fixture.fault(), missing(page, true));
                        fixture.copy(page, PAGE, 7).unwrap();
                    }
                });
            });
            for page in 0..100 {
                let mut wait = blocked(fixture.space, page, Access::Write);
                loop {
                    match wait.poll().unwrap() {
                        FaultPoll::Ready(_) => break,
                        FaultPoll::Pending(on) => fixture.machine.park(on.word(), on.expected()),
                        // The handler is currently reading or answering.
                        FaultPoll::NeedsThread => {}
                    }
                }
                assert_resolved(fixture, page, Access::Write);
            }
            handler.join().unwrap();
        });
    });
}

#[test]
fn a_writer_of_the_vma_delays_the_message() {
    with_fixture(|fixture| {
        let mut wait = blocked(fixture.space, 3, Access::Write);
        with_vma_written(fixture.space, at(3), || {
            assert!(poll(&mut wait).is_none());
            assert_no_message(fixture);
        });
        assert!(poll(&mut wait).is_none());
        assert_eq!(fixture.fault(), missing(3, true));
    });
}

#[test]
fn a_write_to_a_protected_page_is_polled() {
    let modes = UserfaultModes::WRITE_PROTECT;
    with_wish(Wish { modes, ..Wish::default() }, |fixture| {
        fixture.space.write_user(at(3), &[7]).unwrap();
        let handler = fixture.space.handler(fixture.fd);
        handler.write_protect(at(3), PAGE, WriteProtectMode::PROTECT).unwrap();
        assert_resolved(fixture, 3, Access::Read);
        let mut wait = blocked(fixture.space, 3, Access::Write);
        assert!(poll(&mut wait).is_none());
        let kind = UserfaultKind::WriteProtected;
        assert_eq!(fixture.fault(), UserfaultFault { kind, ..missing(3, true) });
        handler.write_protect(at(3), PAGE, WriteProtectMode::empty()).unwrap();
        assert!(poll(&mut wait).is_some());
        let tried = attempt(fixture.space, 3, Access::Write);
        assert!(matches!(tried, Ok(TriedFault::Resolved(_))), "{tried:?}");
    });
}

#[test]
fn a_userfaultfd_with_signals_fails_the_attempt() {
    with_features(UserfaultFeatures::SIGBUS, |fixture| {
        assert_eq!(attempt(fixture.space, 3, Access::Read).err(), Some(FaultError::Bus));
        assert_no_message(fixture);
    });
}
