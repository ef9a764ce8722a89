//! No lock is held while a pager stores pages. Calls that write the pages wait for the store; all
//! others continue.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use bindery::platform::Cpu;
use bindery::{Error, Protection};

use super::held_pager::Io;
use super::pager_waits::{Fixture, PAGE, PAGES, SLOW, at, with_fixture};
use crate::support::READ_WRITE;
use crate::support::kernel::Finished;

#[test]
fn a_sync_of_another_range_is_not_blocked() {
    with_fixture(|fixture| {
        fixture.space.write_user(at(40), b"other").unwrap();
        let synced = fixture.hold_sync(|| {
            fixture.file.sync(40 * PAGE, PAGE).unwrap();
            assert_eq!(&fixture.pager.files.content(1)[40 * PAGE as usize..][..5], b"other");
        });
        assert_eq!(synced, Ok(()));
    });
}

#[test]
fn other_calls_continue_while_a_page_is_stored() {
    with_fixture(|fixture| {
        let synced = fixture.hold_sync(|| {
            assert_eq!(fixture.first_byte(SLOW), b'w');
            fixture.space.write_user(at(SLOW + 1), b"other").unwrap();
            fixture.file.write((SLOW + 2) * PAGE, b"other").unwrap();
            fixture.file.set_size((PAGES + 3) * PAGE).unwrap();
            fixture.file.set_size(PAGES * PAGE).unwrap();
            fixture.file.punch_hole((SLOW + 3) * PAGE, PAGE).unwrap();
            drop(fixture.space.fork().unwrap());
            fixture.space.mprotect(at(0), PAGES * PAGE, Protection::READ).unwrap();
            fixture.space.munmap(at(0), PAGES * PAGE).unwrap();
        });
        assert_eq!(synced, Ok(()));
        assert_eq!(&fixture.pager.files.content(1)[(SLOW * PAGE) as usize..][..7], b"written");
    });
}

/// A call that writes, drops or replaces a page waits while the pager stores it. No other call
/// waits for the waiting call.
#[track_caller]
fn waits_for_the_sync_alone(call: impl Fn(&Fixture<'_>) + Sync, check: impl FnOnce(&Fixture<'_>)) {
    with_fixture(|fixture| {
        fixture.space.write_user(at(SLOW), b"written").unwrap();
        fixture.pager.hold_next(Io::Write, SLOW);
        thread::scope(|scope| {
            let sync = scope
                .spawn(|| fixture.machine.on_cpu(Cpu(1), || fixture.file.sync(SLOW * PAGE, PAGE)));
            fixture.pager.wait_until_held();
            let call = scope.spawn(|| fixture.machine.on_cpu(Cpu(2), || call(fixture)));
            for page in 20..30 {
                // Faults, writes and mappings of other pages continue, whatever the two calls do.
                fixture.space.write_user(at(page), b"other").unwrap();
                fixture.file.write(page * PAGE + 64, b"outside").unwrap();
                fixture.file.sync(page * PAGE, PAGE).unwrap();
                fixture.space.mprotect(at(page), PAGE, Protection::READ).unwrap();
                fixture.space.mprotect(at(page), PAGE, READ_WRITE).unwrap();
            }
            assert!(!call.is_finished(), "the page was changed while the pager had it");
            fixture.pager.release();
            assert_eq!(sync.join().unwrap(), Ok(()));
            call.join().unwrap();
        });
        check(fixture);
    });
}

#[test]
fn a_store_to_a_saving_page_waits_unlocked() {
    waits_for_the_sync_alone(
        |fixture| fixture.space.write_user(at(SLOW), b"later").unwrap(),
        |fixture| {
            assert_eq!(&fixture.pager.files.content(1)[(SLOW * PAGE) as usize..][..7], b"written");
            fixture.file.sync(0, u64::MAX).unwrap();
            assert_eq!(&fixture.pager.files.content(1)[(SLOW * PAGE) as usize..][..7], b"lateren");
        },
    );
}

#[test]
fn a_write_to_a_saving_page_waits_unlocked() {
    waits_for_the_sync_alone(
        |fixture| assert_eq!(fixture.file.write(SLOW * PAGE, b"later"), Ok(5)),
        |fixture| {
            fixture.file.sync(0, u64::MAX).unwrap();
            assert_eq!(&fixture.pager.files.content(1)[(SLOW * PAGE) as usize..][..7], b"lateren");
        },
    );
}

#[test]
fn a_hole_in_a_saving_page_waits_unlocked() {
    waits_for_the_sync_alone(
        |fixture| fixture.file.punch_hole(SLOW * PAGE, PAGE).unwrap(),
        |fixture| assert_eq!(fixture.first_byte(SLOW), 0),
    );
}

#[test]
fn a_second_sync_waits_and_stores_nothing() {
    waits_for_the_sync_alone(
        |fixture| fixture.file.sync(SLOW * PAGE, PAGE).unwrap(),
        |fixture| assert_eq!(fixture.pager.times(Io::Write, SLOW), 1),
    );
}

#[test]
fn truncation_waits_only_for_its_saving_page() {
    with_fixture(|fixture| {
        fixture.space.write_user(at(SLOW), b"written").unwrap();
        fixture.pager.hold_next(Io::Write, SLOW);
        thread::scope(|scope| {
            let sync = scope
                .spawn(|| fixture.machine.on_cpu(Cpu(1), || fixture.file.sync(SLOW * PAGE, PAGE)));
            fixture.pager.wait_until_held();
            let cut =
                scope.spawn(|| fixture.machine.on_cpu(Cpu(2), || fixture.file.set_size(PAGE)));
            // The first page is not truncated, so it can be written and saved.
            fixture.file.write(0, b"outside").unwrap();
            fixture.space.write_user(at(0), b"other").unwrap();
            fixture.file.sync(0, PAGE).unwrap();
            assert!(!cut.is_finished(), "the page was dropped while the pager had it");
            fixture.pager.release();
            assert_eq!(sync.join().unwrap(), Ok(()));
            assert_eq!(cut.join().unwrap(), Ok(()));
        });
        assert_eq!(fixture.pager.files.size(1), PAGE, "the pager has stored what was cut off");
    });
}

#[test]
fn a_refused_page_is_dirty_for_both_savers() {
    with_fixture(|fixture| {
        fixture.space.write_user(at(SLOW), b"written").unwrap();
        *fixture.pager.failures.lock().unwrap() = 2;
        fixture.pager.hold_next(Io::Write, SLOW);
        let sync = || fixture.file.sync(SLOW * PAGE, PAGE);
        thread::scope(|scope| {
            let first = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), sync));
            fixture.pager.wait_until_held();
            let second = scope.spawn(|| fixture.machine.on_cpu(Cpu(2), sync));
            // The second call waits for the first, or finds the page dirty again.
            thread::yield_now();
            fixture.pager.release();
            assert_eq!(first.join().unwrap(), Err(Error::InputOutput));
            assert_eq!(second.join().unwrap(), Err(Error::InputOutput));
        });
        assert_ne!(&fixture.pager.files.content(1)[(SLOW * PAGE) as usize..][..7], b"written");
        fixture.space.write_user(at(SLOW), b"written").unwrap();
        assert_eq!(sync(), Ok(()));
        assert_eq!(&fixture.pager.files.content(1)[(SLOW * PAGE) as usize..][..7], b"written");
    });
}

#[test]
fn a_sync_ends_despite_continuous_writes() {
    const WRITES: u64 = 100_000_000;
    with_fixture(|fixture| {
        let over = AtomicBool::new(false);
        let write = |cpu| {
            fixture.machine.on_cpu(Cpu(cpu), || {
                let left = (0..WRITES).find(|_| {
                    assert_eq!(fixture.file.write(SLOW * PAGE, b"line of a log"), Ok(13));
                    over.load(Relaxed)
                });
                left.is_some()
            })
        };
        thread::scope(|scope| {
            let (write, finished) = (&write, Finished(&over));
            let writers = [1, 2].map(|cpu| scope.spawn(move || write(cpu)));
            for _ in 0..20 {
                fixture.file.sync(0, u64::MAX).unwrap();
            }
            drop(finished);
            let stopped = writers.map(|writer| writer.join().unwrap());
            assert_eq!(stopped, [true; 2], "the sync came when nobody wrote any more");
        });
    });
}

#[test]
fn scattered_pages_are_stored_in_batches() {
    with_fixture(|fixture| {
        for page in [0, 2, 4, 5, 6, 9, 63] {
            fixture.space.write_user(at(page), b"written").unwrap();
        }
        fixture.pager.asked.lock().unwrap().clear();
        fixture.file.sync(0, u64::MAX).unwrap();
        let asked = fixture.pager.asked.lock().unwrap().clone();
        let write = |first, count| (Io::Write, first, count);
        assert_eq!(asked, [write(0, 1), write(2, 1), write(4, 3), write(9, 1), write(63, 1)]);
    });
}
