//! `msync` that stops while the pager stores pages, and continues later.

use bindery::addr::VirtAddr;
use bindery::{
    CallPoll, Errno, Error, FileAccess, MapObject, MapRequest, PagerError, Place, Sharing, Step,
    SyncFlags,
};
use bindery_linux::{self as linux, Call, CallStep, OpenFile, PendingCall, Process};

use super::pending_syncs::{File, Fixture, P, Space, blocked, with_file, write};
use crate::support::READ_WRITE;
use crate::support::objects::PAGE;
use crate::support::objects_fixture::{AT, map};

/// `MS_SYNC`.
const SYNC: u64 = 4;
const HALF: u64 = 4 * PAGE;
const SECOND: u64 = AT + HALF;
const NO_MEMORY: i64 = -(Errno::ENOMEM as i64);

impl<'m> Process<'m, P> for Fixture<'m> {
    fn space(&self) -> &Space<'m> {
        &self.space
    }

    fn file(&self, _descriptor: i32) -> Option<OpenFile<'m, P>> {
        None
    }

    fn process(&self, _descriptor: i32) -> Option<&Space<'m>> {
        None
    }
}

/// The mark of an open file hears once of each error: of the call's own stores, and of those of
/// other calls. An error ends the call.
#[test]
fn msync_reports_to_the_open_file() {
    for in_steps in [false, true] {
        with_file(|fixture, file| {
            let Fixture { space, memory, pager, .. } = fixture;
            map(space, &file, AT, HALF, Sharing::Shared).unwrap();
            map(space, &file, SECOND, HALF, Sharing::Shared).unwrap();
            let mut mark = file.error_mark();
            let mut msync = |answers: &mut dyn FnMut()| {
                let mut told = Vec::new();
                let mut report = |object: &File<'_>, at: VirtAddr| {
                    told.push(at.0);
                    object.check_errors(&mut mark)
                };
                let result = if in_steps {
                    let mut call =
                        space.begin_msync(VirtAddr(AT), 2 * HALF, SyncFlags::SYNC).unwrap();
                    loop {
                        match call.step_with(space, &mut report) {
                            Ok(Step::Done) => break Ok(()),
                            Ok(Step::Blocked(wait)) => {
                                answers();
                                drop(wait.wait());
                            }
                            Err(error) => break Err(error),
                        }
                    }
                } else {
                    space.msync_with(VirtAddr(AT), 2 * HALF, SyncFlags::SYNC, report)
                };
                (result, told)
            };
            assert_eq!(msync(&mut || {}), (Ok(()), vec![AT, SECOND]), "{in_steps}");

            // Another call has met the error, and the pages are stored since.
            write(&file, [1]);
            let mut sync = file.begin_sync(0, u64::MAX);
            let wait = blocked(sync.step());
            fixture.answer(1, Err(PagerError::NoSpace));
            fixture.until_ready(wait);
            assert_eq!(fixture.in_steps(&mut sync).0, Err(Error::NoSpace));
            assert_eq!(fixture.in_steps(&mut file.begin_sync(0, u64::MAX)).0, Ok(()));
            assert_eq!(msync(&mut || {}), (Err(Error::NoSpace), vec![AT]), "{in_steps}");
            assert_eq!(msync(&mut || {}), (Ok(()), vec![AT, SECOND]), "{in_steps}");

            if !in_steps {
                return;
            }
            // An error of the call's own store is not reported again.
            write(&file, [2]);
            let fails = msync(&mut || fixture.answer(2, Err(PagerError::InputOutput)));
            assert_eq!(fails, (Err(Error::InputOutput), vec![AT]));
            let stores = msync(&mut || assert_eq!(pager.answer_all(memory), 1));
            assert_eq!(stores, (Ok(()), vec![AT, SECOND]));
        });
    }
}

/// Maps pages 0 to 3 and then 8 to 11 of the file, writes to the first page of each range, and runs
/// an `msync` of `length` bytes with `between` after its first step.
#[track_caller]
fn msync_with<'m>(
    fixture: &Fixture<'m>,
    file: &File<'m>,
    length: u64,
    between: impl FnOnce(&Space<'_>),
) -> i64 {
    let space = &fixture.space;
    for (at, page) in [(AT, 0), (SECOND, 8)] {
        let request = MapRequest {
            length: HALF,
            protection: READ_WRITE,
            place: Place::Fixed(VirtAddr(at)),
            sharing: Sharing::Shared,
            ..MapRequest::default()
        };
        let access = FileAccess::READ | FileAccess::WRITE;
        let source = MapObject { object: file, offset: page * PAGE, access };
        space.mmap_object(&request, &source).unwrap();
        space.write_user(VirtAddr(at), &[page as u8 + 1]).unwrap();
    }
    let mut call = PendingCall::new(Call::Msync, [AT, length, SYNC, 0, 0, 0]);
    let CallStep::Blocked(wait) = call.step(fixture, None) else { panic!("it does not wait") };
    assert_eq!((fixture.stored(0), fixture.stored(8)), (false, false));
    between(space);
    fixture.until_ready(wait);
    loop {
        match call.step(fixture, None) {
            CallStep::Blocked(wait) => fixture.until_ready(wait),
            CallStep::Done(result) => {
                // Returns the result again, without effect.
                let again = call.step(fixture, None);
                assert!(matches!(again, CallStep::Done(same) if same == result));
                return result;
            }
        }
    }
}

#[test]
fn a_pending_msync_stores_all_mappings() {
    for (length, result) in [(2 * HALF, 0), (3 * HALF, NO_MEMORY)] {
        with_file(|fixture, file| {
            assert_eq!(msync_with(fixture, &file, length, |_| {}), result);
            assert_eq!((fixture.stored(0), fixture.stored(8)), (true, true));
            // The blocking call, which stores everything.
            let arguments = [AT, length, SYNC, 0, 0, 0];
            assert_eq!(linux::call(fixture, Call::Msync, arguments), result);
        });
    }
}

#[test]
fn a_mapping_may_go_between_two_steps() {
    // The call has reached the first mapping and stores its pages, but not yet the second.
    let unmapped = [(AT, 0, true), (SECOND, NO_MEMORY, false)];
    for (at, result, is_second_stored) in unmapped {
        with_file(|fixture, file| {
            let unmap = |space: &Space<'_>| space.munmap(VirtAddr(at), HALF).unwrap();
            assert_eq!(msync_with(fixture, &file, 2 * HALF, unmap), result);
            assert_eq!((fixture.stored(0), fixture.stored(8)), (true, is_second_stored));
        });
    }
}

#[test]
fn an_msync_without_waits_is_one_step() {
    with_file(|fixture, file| {
        map(&fixture.space, &file, AT, HALF, Sharing::Shared).unwrap();
        fixture.space.write_user(VirtAddr(AT), &[1]).unwrap();
        let results = [
            // `MS_ASYNC`, `MS_ASYNC | MS_SYNC`, a bad flag, a bad address, a hole.
            ([AT, HALF, 1], 0),
            ([AT, HALF, 5], -(Errno::EINVAL as i64)),
            ([AT, HALF, 8], -(Errno::EINVAL as i64)),
            ([AT + 1, HALF, SYNC], -(Errno::EINVAL as i64)),
            ([SECOND, HALF, SYNC], NO_MEMORY),
        ];
        for ([at, length, flags], result) in results {
            let arguments = [at, length, flags, 0, 0, 0];
            let mut call = PendingCall::new(Call::Msync, arguments);
            let step = call.step(fixture, None);
            assert!(matches!(step, CallStep::Done(same) if same == result), "{flags}: {step:?}");
            assert_eq!(linux::call(fixture, Call::Msync, arguments), result);
        }
        assert!(!fixture.stored(0));
    });
}

#[test]
fn a_failed_write_ends_an_msync() {
    with_file(|fixture, file| {
        map(&fixture.space, &file, AT, HALF, Sharing::Shared).unwrap();
        fixture.space.write_user(VirtAddr(AT), &[1]).unwrap();
        let mut call = fixture.space.begin_msync(VirtAddr(AT), HALF, SyncFlags::SYNC).unwrap();
        let mut wait = blocked(call.step(&fixture.space));
        fixture.answer(0, Err(PagerError::InputOutput));
        assert!(matches!(wait.poll(), CallPoll::Ready(_)));
        assert_eq!(call.step(&fixture.space).err(), Some(Error::InputOutput));
        assert!(matches!(call.step(&fixture.space), Ok(Step::Done)));
    });
}
