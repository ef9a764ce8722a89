//! Calls that drop contents, and that stop until a handler has read the message about it.

use std::thread;

use bindery::addr::VirtRange;
use bindery::arch::KeyRights;
use bindery::platform::Cpu;
use bindery::{
    Accounting, Advice, CallPoll, CallReady, CallWait, Error, FileAccess, LockPages, MapObject,
    MapRequest, PartialFill, PendingMadvise, Place, Sealing, Sharing, Step, UserfaultFeatures,
    UserfaultMessage, UserfaultModes, UserfaultScope,
};
use bindery_hosted::Machine;

use super::fixture::{A, Fixture, PAGE, at, with_features};
use crate::support::READ_WRITE;

type P = Machine<A>;

const REMOVE: UserfaultFeatures = UserfaultFeatures::EVENT_REMOVE;
const AGAIN: Result<(), PartialFill> = Err(PartialFill { done: 0, error: Error::TryAgain });

fn pages(first: u64, count: u64) -> VirtRange {
    VirtRange::from_len(at(first), count * PAGE).unwrap()
}

fn blocked<'s, 'm>(step: Result<Step<'s, 'm, P>, Error>) -> CallWait<'s, 'm, P> {
    match step {
        Ok(Step::Blocked(wait)) => wait,
        other => panic!("it does not wait: {other:?}"),
    }
}

impl<'m> Fixture<'_, 'm> {
    /// Advice for pages 4 to 9.
    fn advise(&self, advice: Advice) -> PendingMadvise<'m, P> {
        self.space.begin_madvise(at(4), 6 * PAGE, advice, KeyRights::ALL).unwrap()
    }

    /// The next message.
    #[track_caller]
    fn told(&self) -> VirtRange {
        match self.fd.try_read() {
            Some(UserfaultMessage::Remove(range)) => range,
            other => panic!("{other:?}"),
        }
    }

    /// Completes the wait, whose message is about this range.
    #[track_caller]
    fn until_read(&self, mut wait: CallWait<'_, 'm, P>, range: VirtRange) -> CallReady<'m, P> {
        assert!(!wait.is_for_storage());
        let CallPoll::Pending(on) = wait.poll() else { panic!("nothing to wait for") };
        assert!(!on.has_changed());
        assert_eq!(self.copy(900, PAGE, 1), AGAIN, "the message is unread");
        assert_eq!(self.told(), range);
        assert!(on.has_changed());
        assert!(!self.fd.is_readable(), "one message at a time");
        match wait.poll() {
            CallPoll::Ready(ready) => ready,
            other => panic!("the message was read: {other:?}"),
        }
    }

    fn resident(&self) -> u64 {
        self.space.resident().anonymous
    }
}

/// Runs `scenario` with pages 4 to 9 filled, in three mappings.
fn with_three(scenario: impl FnOnce(&Fixture<'_, '_>)) {
    with_features(REMOVE, |fixture| {
        fixture.copy(4, 6 * PAGE, 4).unwrap();
        fixture.space.mlock(at(6), 2 * PAGE, LockPages::OnFault).unwrap();
        scenario(fixture);
    });
}

#[test]
fn each_mapping_waits_for_a_reader() {
    with_three(|fixture| {
        let mut call = fixture.advise(Advice::DontNeedLocked);
        let mut ready = None;
        for first in [4, 6, 8] {
            let wait = blocked(call.step(fixture.space, ready.take()));
            assert_eq!(fixture.resident(), 6, "nothing is dropped before the last message");
            ready = Some(fixture.until_read(wait, pages(first, 2)));
        }
        assert!(matches!(call.step(fixture.space, ready), Ok(Step::Done)));
        assert_eq!(fixture.resident(), 0);
        fixture.copy(900, PAGE, 1).unwrap();
        // The call is over.
        assert!(matches!(call.step(fixture.space, None), Ok(Step::Done)));
        assert_eq!(fixture.resident(), 1);
        assert!(!fixture.fd.is_readable());
    });
}

#[test]
fn a_refused_mapping_is_not_told() {
    for advice in [Advice::DontNeed, Advice::Free] {
        with_three(|fixture| {
            let mut call = fixture.advise(advice);
            let wait = blocked(call.step(fixture.space, None));
            let ready = fixture.until_read(wait, pages(4, 2));
            let step = call.step(fixture.space, Some(ready)).map(drop);
            assert_eq!(step, Err(Error::Invalid));
            assert!(!fixture.fd.is_readable());
            assert!(matches!(call.step(fixture.space, None), Ok(Step::Done)));
        });
    }
}

#[test]
fn a_dropped_wait_tells_again() {
    with_three(|fixture| {
        let mut call = fixture.advise(Advice::DontNeedLocked);
        for polls in [false, true] {
            let mut wait = blocked(call.step(fixture.space, None));
            assert!(fixture.fd.is_readable(), "the step sends the message");
            if polls {
                assert!(matches!(wait.poll(), CallPoll::Pending(_)));
            }
            drop(wait);
            assert!(!fixture.fd.is_readable(), "the message is withdrawn");
            fixture.copy(900 + u64::from(polls), PAGE, 1).unwrap();
        }
        let wait = blocked(call.step(fixture.space, None));
        let _ = fixture.until_read(wait, pages(4, 2));
        drop(call);
        assert_eq!(fixture.resident(), 8, "a call that is dropped leaves the contents");
        fixture.copy(902, PAGE, 1).unwrap();
    });
}

#[test]
fn a_wait_dropped_after_its_reader_ends() {
    with_three(|fixture| {
        let mut call = fixture.advise(Advice::DontNeedLocked);
        let wait = blocked(call.step(fixture.space, None));
        assert_eq!(fixture.told(), pages(4, 2));
        drop(wait);
        // The change ended once.
        fixture.copy(900, PAGE, 1).unwrap();
        drop(call);
    });
}

#[test]
fn a_thread_may_wait_for_the_reader() {
    with_three(|fixture| {
        let mut call = fixture.advise(Advice::DontNeedLocked);
        let mut ready = None;
        for first in [4, 6, 8] {
            let wait = blocked(call.step(fixture.space, ready.take()));
            ready = Some(thread::scope(|scope| {
                let waits = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || wait.wait()));
                while fixture.machine.parked_threads() == 0 {
                    thread::yield_now();
                }
                assert_eq!(fixture.told(), pages(first, 2));
                waits.join().unwrap()
            }));
        }
        assert!(matches!(call.step(fixture.space, ready), Ok(Step::Done)));
        assert_eq!(fixture.resident(), 0);
    });
}

#[test]
fn mappings_may_go_between_messages() {
    with_three(|fixture| {
        let mut call = fixture.advise(Advice::DontNeedLocked);
        let wait = blocked(call.step(fixture.space, None));
        fixture.space.munmap(at(4), 4 * PAGE).unwrap();
        let ready = fixture.until_read(wait, pages(4, 2));
        let wait = blocked(call.step(fixture.space, Some(ready)));
        let ready = fixture.until_read(wait, pages(8, 2));
        let step = call.step(fixture.space, Some(ready)).map(drop);
        assert_eq!(step, Err(Error::NotMapped(at(4))));
        assert_eq!(fixture.resident(), 0, "the mapping behind the hole is reached");
    });
}

#[test]
fn closing_ends_a_step_of_waiting() {
    with_features(REMOVE, |fixture| {
        let space = fixture.space;
        let second = space.userfault(REMOVE, UserfaultScope::All).unwrap();
        space.unregister_userfault(fixture.fd, at(4), 6 * PAGE).unwrap();
        space.register_userfault(&second, at(4), 6 * PAGE, UserfaultModes::MISSING).unwrap();
        let mut call = fixture.advise(Advice::DontNeed);
        let mut wait = blocked(call.step(space, None));
        assert!(matches!(wait.poll(), CallPoll::Pending(_)));
        drop(second);
        let CallPoll::Ready(ready) = wait.poll() else { panic!("it is closed") };
        drop(wait);
        assert!(matches!(call.step(space, Some(ready)), Ok(Step::Done)));
    });
}

#[test]
fn a_hole_waits_for_the_reader() {
    with_features(REMOVE, |fixture| {
        let memory = fixture.memory;
        let object = memory.shared_memory(6 * PAGE, Sealing::Allowed, Accounting::PerPage).unwrap();
        let request = MapRequest {
            length: 6 * PAGE,
            protection: READ_WRITE,
            place: Place::Fixed(at(4)),
            sharing: Sharing::Shared,
            ..MapRequest::default()
        };
        let access = FileAccess::READ | FileAccess::WRITE;
        let source = MapObject { object: &object, offset: 0, access };
        fixture.space.mmap_object(&request, &source).unwrap();
        let modes = UserfaultModes::MISSING;
        fixture.space.register_userfault(fixture.fd, at(4), 6 * PAGE, modes).unwrap();
        object.write(0, &[7]).unwrap();
        let mut call = fixture.advise(Advice::Remove);
        let first_byte = || {
            let mut byte = [0];
            object.read(0, &mut byte).unwrap();
            byte[0]
        };
        let wait = blocked(call.step(fixture.space, None));
        assert_eq!(first_byte(), 7);
        let ready = fixture.until_read(wait, pages(4, 6));
        assert!(matches!(call.step(fixture.space, Some(ready)), Ok(Step::Done)));
        assert_eq!(first_byte(), 0);
        fixture.space.munmap(at(4), 6 * PAGE).unwrap();
    });
}
