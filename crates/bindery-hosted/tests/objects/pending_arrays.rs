//! Calls with arrays in a program's memory that stop where they would wait for the pager, and
//! continue later.

use bindery::addr::VirtAddr;
use bindery::{Errno, Sharing};
use bindery_linux::{
    self as linux, Call, CallStep, CopyDirection, IoRange, PendingCall, PendingProcessVm,
};

use super::pending_copies::{Fixture, LENGTH, PAGES, PIDFD, PLAIN, with_two};
use crate::support::objects::PAGE;
use crate::support::objects_fixture::AT;

/// `MADV_POPULATE_READ`, `MADV_COLD` and `MADV_WILLNEED`.
const POPULATE: u64 = 22;
const COLD: u64 = 20;
const WILL_NEED: u64 = 3;
const FAULT: i64 = -(Errno::EFAULT as i64);

/// Starts and lengths.
type Ranges<'r> = &'r [(u64, u64)];

#[test]
fn a_pending_mincore_waits_for_its_vector() {
    let call = (Call::Mincore, [PLAIN, LENGTH, AT + PAGE - 3, 0, 0, 0]);
    let in_way = |steps: bool| {
        with_two(Sharing::Private, |fixture| {
            for page in [0, 2, 7] {
                fixture.space.write_user(VirtAddr(PLAIN + page * PAGE), &[1]).unwrap();
            }
            fixture.pager.keep_reads(steps);
            let (result, waits) = if steps {
                fixture.in_steps(call, |_| {})
            } else {
                (linux::call(fixture, call.0, call.1), 2)
            };
            assert_eq!((result, waits), (0, 2));
            let effects = fixture.effects();
            let mut vector = [0; PAGES as usize];
            fixture.space.read_user(VirtAddr(call.1[2]), &mut vector).unwrap();
            (effects, vector)
        })
    };
    let (stepped, blocking) = (in_way(true), in_way(false));
    assert_eq!(stepped, blocking);
    assert_eq!(stepped.1, [1, 0, 1, 0, 0, 0, 0, 1]);
}

#[test]
fn a_mincore_tells_what_it_has_found_first() {
    with_two(Sharing::Private, |fixture| {
        let call = (Call::Mincore, [PLAIN, LENGTH, AT, 0, 0, 0]);
        let (result, waits) = fixture.in_steps(call, |waits| {
            if waits == 1 {
                fixture.space.write_user(VirtAddr(PLAIN), &[1]).unwrap();
            }
        });
        assert_eq!((result, waits), (0, 1));
        let mut vector = [9; PAGES as usize];
        fixture.space.read_user(VirtAddr(AT), &mut vector).unwrap();
        assert_eq!(vector, [0; PAGES as usize]);
        // A vector that was unmapped.
        let call = (Call::Mincore, [PLAIN, LENGTH, AT + PAGE, 0, 0, 0]);
        let unmap = |waits| {
            if waits == 1 {
                fixture.space.munmap(VirtAddr(AT), LENGTH).unwrap();
            }
        };
        assert_eq!(fixture.in_steps(call, unmap), (FAULT, 1));
    });
}

/// Stores an array of ranges in the second page of the file, where the read of the array is
/// delayed.
fn put_array(fixture: &Fixture<'_, '_>, ranges: Ranges<'_>) -> [u64; 2] {
    let mut bytes = vec![0; LENGTH as usize];
    for (at, (start, length)) in ranges.iter().enumerate() {
        let place = &mut bytes[2 * PAGE as usize - 16 + at * 16..][..16];
        place[..8].copy_from_slice(&start.to_le_bytes());
        place[8..].copy_from_slice(&length.to_le_bytes());
    }
    fixture.pager.files.put(1, &bytes);
    [AT + 2 * PAGE - 16, ranges.len() as u64]
}

#[test]
fn stepped_and_blocking_advice_are_the_same() {
    // The ranges, the descriptor, the advice, the result.
    let file = (AT + 4 * PAGE, 3 * PAGE);
    let cases: [(Ranges<'_>, u64, u64, i64); 8] = [
        (&[file, (PLAIN, PAGE)], 0, POPULATE, 4 * PAGE as i64),
        (&[file, (PLAIN, PAGE)], PIDFD, COLD, 4 * PAGE as i64),
        (&[(PLAIN, PAGE), (0, 0), file], PIDFD, WILL_NEED, 4 * PAGE as i64),
        (&[file, (4096, PAGE), (PLAIN, PAGE)], 0, POPULATE, 3 * PAGE as i64),
        (&[(4096, PAGE)], 0, POPULATE, -(Errno::ENOMEM as i64)),
        (&[file, (PLAIN, u64::MAX)], 0, POPULATE, -(Errno::EINVAL as i64)),
        (&[file], PIDFD, POPULATE, -(Errno::EINVAL as i64)),
        (&[file], 3, COLD, -(Errno::EBADF as i64)),
    ];
    for (ranges, descriptor, advice, expected) in cases {
        let in_way = |steps: bool| {
            with_two(Sharing::Shared, |fixture| {
                let [vector, count] = put_array(fixture, ranges);
                let arguments = [descriptor, vector, count, advice, 0, 0];
                fixture.pager.keep_reads(steps);
                let result = if steps {
                    let (result, waits) =
                        fixture.in_steps((Call::ProcessMadvise, arguments), |_| {});
                    assert!(waits > 0);
                    result
                } else {
                    linux::call(fixture, Call::ProcessMadvise, arguments)
                };
                (result, fixture.effects())
            })
        };
        let (stepped, blocking) = (in_way(true), in_way(false));
        assert_eq!(stepped, blocking, "{ranges:?}, {advice}");
        assert_eq!(stepped.0, expected, "{ranges:?}, {advice}");
    }
}

#[test]
fn a_process_that_is_gone_ends_the_advice() {
    let file = (AT + 4 * PAGE, 3 * PAGE);
    // The first lookup validates. With the plain memory first, the call completes a part before the
    // wait.
    let cases: [(Ranges<'_>, usize, i64); 3] = [
        (&[file], 1, -(Errno::EBADF as i64)),
        (&[file], 2, -(Errno::EBADF as i64)),
        (&[(PLAIN, PAGE), file], 2, PAGE as i64),
    ];
    for (ranges, lookups, expected) in cases {
        with_two(Sharing::Shared, |fixture| {
            let [vector, count] = put_array(fixture, ranges);
            fixture.lasts.set(lookups);
            let arguments = [0, vector, count, POPULATE, 0, 0];
            let mut call = PendingCall::new(Call::ProcessMadvise, arguments);
            let mut ready = None;
            let result = loop {
                match call.step(fixture, ready.take()) {
                    CallStep::Done(result) => break result,
                    CallStep::Blocked(wait) => ready = Some(fixture.until_ready(wait)),
                }
            };
            assert_eq!(result, expected, "{ranges:?}, {lookups}");
        });
    }
}

/// The result once the lookups of a process run out.
#[derive(Clone, Copy)]
enum Then {
    Gone,
    /// The number now refers to another process.
    Another,
}

/// Copies between two processes, whose arrays are in the file. `lookups` is the number of lookups
/// that find the process.
fn process_vm(
    direction: CopyDirection,
    ranges: Ranges<'_>,
    (steps, lookups, then): (bool, usize, Then),
) -> (i64, impl PartialEq + use<>) {
    with_two(Sharing::Private, |fixture| {
        let Fixture { space, other, .. } = *fixture;
        space.write_user(VirtAddr(PLAIN), &[1; 100]).unwrap();
        other.write_user(VirtAddr(PLAIN), &[2; 100]).unwrap();
        let [vector, count] = put_array(fixture, ranges);
        // All ranges except the last belong to the caller.
        let arguments = [9, vector, count - 1, vector + 16 * (count - 1), 1, 0];
        let mut buffer = vec![IoRange::default(); ranges.len()];
        fixture.pager.keep_reads(steps);
        let mut left = lookups;
        let mut find = |process| {
            assert_eq!(process, 9);
            match (left.checked_sub(1), then) {
                (None, Then::Gone) => return Err(Errno::ESRCH),
                (None, Then::Another) => return Ok(space),
                (Some(rest), _) => left = rest,
            }
            Ok(other)
        };
        let result = if steps {
            let mut call = PendingProcessVm::new(direction, arguments);
            let mut ready = None;
            loop {
                match call.step(space, ready.take(), &mut buffer, &mut find) {
                    CallStep::Done(result) => break result,
                    CallStep::Blocked(wait) => ready = Some(fixture.until_ready(wait)),
                }
            }
        } else {
            linux::process_vm(space, direction, arguments, &mut buffer, &mut find)
        };
        let effects = fixture.effects();
        (result, (effects, fixture.plain(space), fixture.plain(other)))
    })
}

#[test]
fn stepped_and_blocking_transfers_are_the_same() {
    let cases: [(Ranges<'_>, i64); 6] = [
        (&[(PLAIN, 3000), (PLAIN + 5000, 10), (AT + 5 * PAGE, PAGE), (AT + 100, 7000)], 7000),
        (&[(AT + 6 * PAGE, 10), (PLAIN, 0), (PLAIN, 90)], 10),
        (&[(PLAIN, 200), (4096, 200), (PLAIN, 4096)], 200),
        (&[(4096, 200), (AT, 200)], FAULT),
        (&[(PLAIN, 200), (AT, u64::MAX)], -(Errno::EINVAL as i64)),
        (&[(u64::MAX - 5, 5), (AT, 10)], FAULT),
    ];
    for (ranges, expected) in cases {
        for direction in [CopyDirection::Read, CopyDirection::Write] {
            let stepped = process_vm(direction, ranges, (true, usize::MAX, Then::Gone));
            assert_eq!(stepped.0, expected, "{direction:?}, {ranges:?}");
            let blocking = process_vm(direction, ranges, (false, usize::MAX, Then::Gone));
            assert!(stepped == blocking, "{direction:?}, {ranges:?}, {}", blocking.0);
        }
    }
}

#[test]
fn a_process_that_is_gone_ends_the_transfer() {
    // The arrays are in pages 1 and 2.
    let ranges = [(PLAIN, 3000), (PLAIN + 5000, 3000), (AT + 4 * PAGE + 100, 6000)];
    let in_way = |lookups, then| process_vm(CopyDirection::Read, &ranges, (true, lookups, then)).0;
    assert_eq!(in_way(0, Then::Gone), -(Errno::ESRCH as i64));
    for then in [Then::Gone, Then::Another] {
        assert_eq!(in_way(1, then), -(Errno::ESRCH as i64));
        // The second page of the other process is missing, in the middle of the second range.
        assert_eq!(in_way(2, then), PAGE as i64 - 100);
    }
}

#[test]
fn advice_outlasts_its_descriptor() {
    with_two(Sharing::Shared, |fixture| {
        let [vector, count] = put_array(fixture, &[(AT + 4 * PAGE, 3 * PAGE)]);
        // The descriptor is closed after the validation, while the blocking call waits.
        fixture.lasts.set(1);
        fixture.pager.keep_reads(false);
        let arguments = [0, vector, count, POPULATE, 0, 0];
        assert_eq!(linux::call(fixture, Call::ProcessMadvise, arguments), 3 * PAGE as i64);
    });
}
