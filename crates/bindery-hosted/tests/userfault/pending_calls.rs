//! Calls that stop where they would wait for a handler, and continue later.

use std::thread;

use bindery::platform::Cpu;
use bindery::{CallPoll, Error, LockPages, Step, UserfaultFault, UserfaultKind, UserfaultScope};

use super::fixture::{PAGE, Wish, at, with_fixture, with_wish};

#[test]
fn a_thread_waits_for_the_handler() {
    with_fixture(|fixture| {
        let mut call = fixture.space.begin_mlock(at(3), 2 * PAGE, LockPages::Now).unwrap();
        let mut ready = None;
        for page in 3..5 {
            let step = call.step(fixture.space, ready.take()).unwrap();
            let Step::Blocked(wait) = step else { panic!("nothing is there") };
            assert!(!fixture.fd.is_readable(), "the thread that waits sends the message");
            ready = Some(thread::scope(|scope| {
                let waits = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || wait.wait()));
                let kind = UserfaultKind::Missing;
                let fault = UserfaultFault { address: at(page), kind, is_write: true, thread: 0 };
                assert_eq!(fixture.fault(), fault);
                // The call holds no lock.
                fixture.space.munmap(at(9), PAGE).unwrap();
                fixture.copy(page, PAGE, page as u8).unwrap();
                waits.join().unwrap()
            }));
        }
        assert!(matches!(call.step(fixture.space, ready), Ok(Step::Done)));
        assert!(!fixture.fd.is_readable(), "each page was asked for once");
        assert_eq!((fixture.byte(3), fixture.byte(4)), (3, 4));
    });
}

#[test]
fn a_poll_asks_the_handler() {
    with_fixture(|fixture| {
        let mut call = fixture.space.begin_mlock(at(3), 2 * PAGE, LockPages::Now).unwrap();
        let mut ready = None;
        for page in 3..5 {
            let step = call.step(fixture.space, ready.take()).unwrap();
            let Step::Blocked(mut wait) = step else { panic!("nothing is there") };
            assert!(matches!(wait.poll(), CallPoll::Pending(_)));
            assert_eq!(fixture.fault().address, at(page));
            fixture.copy(page, PAGE, page as u8).unwrap();
            let CallPoll::Ready(end) = wait.poll() else { panic!("the handler has answered") };
            ready = Some(end);
        }
        assert!(matches!(call.step(fixture.space, ready), Ok(Step::Done)));
        assert!(!fixture.fd.is_readable(), "each page was asked for once");
        assert_eq!((fixture.byte(3), fixture.byte(4)), (3, 4));
    });
}

#[test]
fn a_handler_of_programs_alone_refuses_the_call() {
    with_wish(Wish { scope: UserfaultScope::UserMode, ..Wish::default() }, |fixture| {
        let mut call = fixture.space.begin_mlock(at(5), PAGE, LockPages::Now).unwrap();
        let step = call.step(fixture.space, None).map(|_| ());
        assert_eq!(step, Err(Error::Fault(at(5))));
    });
}

#[test]
fn a_call_that_is_dropped_sends_nothing() {
    with_fixture(|fixture| {
        let mut call = fixture.space.begin_mlock(at(5), PAGE, LockPages::Now).unwrap();
        drop(call.step(fixture.space, None));
        drop(call);
        assert!(!fixture.fd.is_readable());
    });
}

#[test]
fn a_page_that_is_unmapped_meanwhile_is_passed() {
    with_fixture(|fixture| {
        let mut call = fixture.space.begin_mlock(at(3), PAGE, LockPages::Now).unwrap();
        let Ok(Step::Blocked(wait)) = call.step(fixture.space, None) else {
            panic!("nothing is there")
        };
        let ready = thread::scope(|scope| {
            let waits = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || wait.wait()));
            fixture.fault();
            fixture.space.munmap(at(3), PAGE).unwrap();
            fixture.space.wake_userfaults(fixture.fd, at(3), PAGE).unwrap();
            waits.join().unwrap()
        });
        assert!(matches!(call.step(fixture.space, Some(ready)), Ok(Step::Done)));
    });
}
