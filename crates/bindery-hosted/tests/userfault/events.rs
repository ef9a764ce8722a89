//! Messages about changes: a change waits until its message is read, and until then requests of
//! handlers fail with "try again".

use std::thread;

use bindery::addr::{VirtAddr, VirtRange};
use bindery::platform::Cpu;
use bindery::{
    Access, Accounting, Advice, Attachments, Error, FaultError, FileAccess, FillMode, ForkIsNext,
    LockPages, MapFlags, MapObject, MapRequest, PartialFill, Remap, SegmentId, Sharing,
    UserfaultFeatures, UserfaultMessage, UserfaultModes, UserfaultScope,
};

use super::fixture::{AT, Fixture, PAGE, PAGES, Space, at, with_features, with_fixture};
use crate::support::fixed;

const MONITOR: UserfaultFeatures = UserfaultFeatures::EVENT_FORK
    .union(UserfaultFeatures::EVENT_REMAP)
    .union(UserfaultFeatures::EVENT_REMOVE)
    .union(UserfaultFeatures::EVENT_UNMAP);

fn pages(first: u64, count: u64) -> VirtRange {
    VirtRange::from_len(at(first), count * PAGE).unwrap()
}

/// Runs `change` on another CPU. It waits until `read` has read its messages.
fn changed<'m, T: Send>(
    fixture: &Fixture<'_, 'm>,
    change: impl FnOnce(&Space<'m>) -> T + Send,
    read: impl FnOnce(),
) -> T {
    thread::scope(|scope| {
        let change = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || change(fixture.space)));
        while !fixture.fd.is_readable() {
            thread::yield_now();
        }
        assert!(!change.is_finished());
        let again = Err(PartialFill { done: 0, error: Error::TryAgain });
        assert_eq!(fixture.copy(900, PAGE, 1), again);
        let zeroes =
            fixture.space.handler(fixture.fd).fill_zeroes(at(900), PAGE, FillMode::empty());
        assert_eq!(zeroes, again);
        read();
        change.join().unwrap()
    })
}

#[test]
fn a_fork_message_can_wait_for_room() {
    with_features(MONITOR, |fixture| {
        let fork = |space: &Space<'_>| drop(space.fork().unwrap());
        changed(fixture, fork, || {
            assert!(matches!(fixture.fd.try_read_but_fork(), Err(ForkIsNext)));
            let again = Err(PartialFill { done: 0, error: Error::TryAgain });
            assert_eq!(fixture.copy(900, PAGE, 1), again, "it waits still");
            assert!(matches!(fixture.fd.try_read_but_fork(), Err(ForkIsNext)));
            assert!(matches!(fixture.fd.try_read(), Some(UserfaultMessage::Fork(_))));
        });
        assert!(matches!(fixture.fd.try_read_but_fork(), Ok(None)));
        let unmap = |space: &Space<'_>| space.munmap(at(4), 2 * PAGE).unwrap();
        changed(fixture, unmap, || {
            let read = fixture.fd.try_read_but_fork();
            assert!(matches!(read, Ok(Some(UserfaultMessage::Unmap(_)))));
        });
    });
}

#[test]
fn unmapping_is_told_and_waits_for_the_reader() {
    with_features(MONITOR, |fixture| {
        let unmap = |space: &Space<'_>| space.munmap(at(4), 2 * PAGE);
        let done = changed(fixture, unmap, || match fixture.fd.read().unwrap() {
            UserfaultMessage::Unmap(range) => assert_eq!(range, pages(4, 2)),
            other => panic!("{other:?}"),
        });
        assert_eq!(done, Ok(()));
        fixture.copy(900, PAGE, 1).unwrap();
    });
}

#[test]
fn a_move_is_told_and_stays_registered() {
    with_features(MONITOR, |fixture| {
        fixture.copy(4, 2 * PAGE, 4).unwrap();
        let to = VirtAddr(4 * AT);
        let remap = |space: &Space<'_>| space.mremap(at(4), 4 * PAGE, 4 * PAGE, Remap::To(to));
        let moved = changed(fixture, remap, || {
            match fixture.fd.read().unwrap() {
                UserfaultMessage::Remap { from, to: there, length } => {
                    assert_eq!((from, there, length), (at(4), to, 4 * PAGE));
                }
                other => panic!("{other:?}"),
            }
            match fixture.fd.read().unwrap() {
                UserfaultMessage::Unmap(range) => assert_eq!(range, pages(4, 4)),
                other => panic!("{other:?}"),
            }
        });
        assert_eq!(moved, Ok(to));
        let mut source = |_, piece: &mut [u8]| {
            piece.fill(6);
            Ok(())
        };
        let behind = VirtAddr(to.0 + 2 * PAGE);
        let fill = fixture.space.handler(fixture.fd).fill_copy(
            behind,
            PAGE,
            FillMode::empty(),
            &mut source,
        );
        fill.unwrap();
        let mut bytes = [0; 2];
        fixture.space.read_user(VirtAddr(behind.0 - 1), &mut bytes).unwrap();
        assert_eq!(bytes, [4, 6]);
    });
}

#[test]
fn a_move_that_is_not_told_unregisters() {
    with_fixture(|fixture| {
        let to = VirtAddr(4 * AT);
        fixture.space.mremap(at(4), 4 * PAGE, 4 * PAGE, Remap::To(to)).unwrap();
        fixture.space.fault(to, Access::Write).unwrap();
        assert!(!fixture.fd.is_readable());
    });
}

#[test]
fn dropped_contents_are_told() {
    with_features(MONITOR, |fixture| {
        fixture.copy(4, 2 * PAGE, 4).unwrap();
        let discard = |space: &Space<'_>| space.madvise(at(4), 2 * PAGE, Advice::DontNeed);
        let done = changed(fixture, discard, || match fixture.fd.read().unwrap() {
            UserfaultMessage::Remove(range) => assert_eq!(range, pages(4, 2)),
            other => panic!("{other:?}"),
        });
        assert_eq!(done, Ok(()));
        assert_eq!(fixture.space.resident().anonymous, 0);
        fixture.copy(4, PAGE, 1).unwrap();
    });
}

/// Calls `madvise` on another CPU. Returns its result and the messages that the call sends before
/// it returns.
fn told(fixture: &Fixture<'_, '_>, advice: Advice) -> (Result<(), Error>, Vec<VirtRange>) {
    let mut ranges = Vec::new();
    let result = thread::scope(|scope| {
        let advise = move || fixture.space.madvise(at(4), 6 * PAGE, advice);
        let advise = scope.spawn(move || fixture.machine.on_cpu(Cpu(1), advise));
        while !advise.is_finished() || fixture.fd.is_readable() {
            match fixture.fd.try_read() {
                Some(UserfaultMessage::Remove(range)) => ranges.push(range),
                Some(other) => panic!("{other:?}"),
                None => thread::yield_now(),
            }
        }
        advise.join().unwrap()
    });
    (result, ranges)
}

#[test]
fn contents_that_stay_are_not_told() {
    with_features(MONITOR, |fixture| {
        fixture.copy(4, 6 * PAGE, 4).unwrap();
        fixture.space.mlock(at(6), 2 * PAGE, LockPages::OnFault).unwrap();
        // The locked mapping is refused, and the mapping behind it is not reached.
        assert_eq!(told(fixture, Advice::DontNeed), (Err(Error::Invalid), vec![pages(4, 2)]));
        assert_eq!(fixture.space.resident().anonymous, 4);
        assert_eq!(told(fixture, Advice::Free), (Err(Error::Invalid), vec![pages(4, 2)]));
        // Anonymous memory has no object.
        assert_eq!(told(fixture, Advice::Remove), (Err(Error::Invalid), vec![]));
        let all = vec![pages(4, 2), pages(6, 2), pages(8, 2)];
        assert_eq!(told(fixture, Advice::DontNeedLocked), (Ok(()), all));
        assert_eq!(fixture.space.resident().anonymous, 0);
    });
}

#[test]
fn a_fork_message_has_the_childs_userfaultfd() {
    with_features(MONITOR, |fixture| {
        fixture.copy(0, PAGE, 5).unwrap();
        let mut theirs = None;
        let child = changed(fixture, Space::fork, || match fixture.fd.read().unwrap() {
            UserfaultMessage::Fork(child) => theirs = Some(child),
            other => panic!("{other:?}"),
        });
        let (child, theirs) = (child.unwrap(), theirs.unwrap());
        assert_eq!(theirs.features(), MONITOR);
        thread::scope(|scope| {
            let fault = scope
                .spawn(|| fixture.machine.on_cpu(Cpu(2), || child.fault(at(7), Access::Write)));
            match theirs.read().unwrap() {
                UserfaultMessage::Fault(fault) => assert_eq!(fault.address, at(7)),
                other => panic!("{other:?}"),
            }
            assert!(!fixture.fd.is_readable());
            child.handler(&theirs).fill_zeroes(at(7), PAGE, FillMode::empty()).unwrap();
            fault.join().unwrap().unwrap();
        });
        let refused = fixture.space.handler(&theirs).fill_zeroes(at(8), PAGE, FillMode::empty());
        assert_eq!(refused, Err(PartialFill { done: 0, error: Error::Invalid }));
        child.close_userfault(theirs);
        child.fault(at(9), Access::Write).unwrap();
    });
}

#[test]
fn each_of_two_userfaultfds_hears_once() {
    with_features(MONITOR, |fixture| {
        let space = fixture.space;
        let second = space.userfault(MONITOR, UserfaultScope::All).unwrap();
        // In ascending order, the parts belong to the first, second, first, second and first
        // userfaultfd.
        for page in [4, 8] {
            space.unregister_userfault(fixture.fd, at(page), 2 * PAGE).unwrap();
            space.register_userfault(&second, at(page), 2 * PAGE, UserfaultModes::MISSING).unwrap();
        }
        let child = changed(fixture, Space::fork, || {
            let [first, second] = [fixture.fd, &second].map(|fd| match fd.read().unwrap() {
                UserfaultMessage::Fork(child) => child,
                other => panic!("{other:?}"),
            });
            assert!(fixture.fd.try_read().is_none());
            drop((first, second));
        });
        drop(child.unwrap());
        assert!(second.try_read().is_none());
        let unmap = |space: &Space<'_>| space.munmap(at(0), PAGES * PAGE).unwrap();
        changed(fixture, unmap, || {
            for fd in [fixture.fd, &second] {
                assert!(matches!(fd.read(), Ok(UserfaultMessage::Unmap(_))));
            }
        });
        assert!(fixture.fd.try_read().is_none() && second.try_read().is_none());
        space.close_userfault(second);
    });
}

#[test]
fn a_fork_without_event_leaves_the_child_unserved() {
    with_fixture(|fixture| {
        let child = fixture.space.fork().unwrap();
        child.fault(at(7), Access::Write).unwrap();
        assert!(!fixture.fd.is_readable());
    });
}

#[test]
fn closing_ends_a_forks_wait() {
    with_fixture(|fixture| {
        let fd = fixture.space.userfault(MONITOR, Default::default()).unwrap();
        fixture.space.unregister_userfault(fixture.fd, at(0), 16 * PAGE).unwrap();
        let modes = bindery::UserfaultModes::MISSING;
        fixture.space.register_userfault(&fd, at(0), 16 * PAGE, modes).unwrap();
        thread::scope(|scope| {
            let fork = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || fixture.space.fork()));
            while !fd.is_readable() {
                thread::yield_now();
            }
            drop(fd);
            let child = fork.join().unwrap().unwrap();
            // The child has no userfaultfd.
            child.fault(at(7), Access::Write).unwrap();
        });
    });
}

#[test]
fn a_change_whose_thread_is_killed_is_over() {
    with_features(MONITOR, |fixture| {
        thread::scope(|scope| {
            let unmap = || fixture.space.munmap(at(4), PAGE);
            let unmap = scope.spawn(move || fixture.machine.on_cpu(Cpu(1), unmap));
            while !fixture.fd.is_readable() {
                thread::yield_now();
            }
            fixture.machine.kill(Cpu(1));
            unmap.join().unwrap().unwrap();
        });
        assert!(fixture.fd.try_read().is_none());
        fixture.copy(900, PAGE, 1).unwrap();
    });
}

#[test]
fn a_fault_comes_before_events_that_are_older() {
    with_features(MONITOR, |fixture| {
        thread::scope(|scope| {
            let unmap = || fixture.space.munmap(at(4), PAGE);
            let unmap = scope.spawn(move || fixture.machine.on_cpu(Cpu(1), unmap));
            while !fixture.fd.is_readable() {
                thread::yield_now();
            }
            let fault = fixture.spawn(scope, 2, |program| program.load(at(5)));
            let mut fault_read = false;
            // The fault may not be queued yet; in that case the event precedes the fault.
            for _ in 0..2 {
                match fixture.fd.read().unwrap() {
                    UserfaultMessage::Fault(_) => fault_read = true,
                    UserfaultMessage::Unmap(_) => {}
                    other => panic!("{other:?}"),
                }
            }
            assert!(fault_read);
            unmap.join().unwrap().unwrap();
            fixture.copy(5, PAGE, 5).unwrap();
            assert_eq!(fault.join().unwrap(), Ok(0x0505_0505_0505_0505));
        });
        let gone = fixture.space.fault(at(4), Access::Read);
        assert_eq!(gone, Err(FaultError::NotMapped));
    });
}

/// Nothing follows the attachments.
struct NoFollower;

impl Attachments for NoFollower {
    fn attached(&self, _segment: u64) {}

    fn detached(&self, _segment: u64) {}
}

/// These calls return although no thread reads, as on Linux.
#[test]
fn segments_and_remapped_pages_report_nothing() {
    with_features(MONITOR, |fixture| {
        let Fixture { memory, space, fd, .. } = fixture;
        let id = SegmentId { segment: 1, key: 0 };
        let segment = memory.segment_memory(&NoFollower, id, 4 * PAGE, Accounting::PerPage);
        let segment = segment.unwrap();
        let shared = MapRequest { sharing: Sharing::Shared, ..fixed(at(4).0, 4 * PAGE) };
        let access = FileAccess::READ | FileAccess::WRITE;
        let source = MapObject { object: &segment, offset: 0, access };
        let register = || {
            let modes = UserfaultModes::MISSING;
            space.register_userfault(fd, at(4), 4 * PAGE, modes).map(drop).unwrap();
        };
        // `shmat` with SHM_REMAP, over registered memory.
        space.mmap_object(&shared, &source).unwrap();
        register();
        space.remap_file_pages(at(5), PAGE, 2, MapFlags::empty()).unwrap();
        register();
        memory.fail_allocations_after(Some(0));
        space.detach_segment(at(4)).unwrap();
        memory.fail_allocations_after(None);
        assert!(
            !space
                .view_mapping(at(4), |view| view.mapping().range.contains(at(4)))
                .unwrap_or_default()
        );
        assert!(!fd.is_readable());
        fixture.copy(900, PAGE, 1).unwrap();
    });
}
