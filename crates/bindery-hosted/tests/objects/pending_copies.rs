//! Copies from and to programs, and calls with arrays in a program's memory, that stop where they
//! would wait for the pager and continue later.

use std::cell::Cell;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{
    AddressSpace, Advice, CallPoll, CallReady, CallWait, Errno, FaultError, Memory, Object,
    PagerError, PartialCopy, PendingCopy, PendingUserCopy, Resident, Sharing, Step,
};
use bindery_hosted::{Asked, Config, DelayedFiles, Machine};
use bindery_linux::{
    self as linux, Call, CallStep, CopyDirection, IoRange, OpenFile, PendingCall, PendingProcessVm,
    Process,
};

use crate::support::objects::PAGE;
use crate::support::objects_fixture::{AT, map};
use crate::support::{MIB, audit, fixed, memory_with, options};

type A = X86_64<4>;
type P = Machine<A>;
type Space<'m> = AddressSpace<'m, P>;

const PAGES: u64 = 8;
const LENGTH: u64 = PAGES * PAGE;
/// Memory without a file.
const PLAIN: u64 = AT + 64 * MIB;
/// `MADV_POPULATE_READ`, `MADV_COLD` and `MADV_WILLNEED`.
const POPULATE: u64 = 22;
const COLD: u64 = 20;
const WILL_NEED: u64 = 3;
const PIDFD: u64 = 7;

/// Starts and lengths.
type Ranges<'r> = &'r [(u64, u64)];

struct Fixture<'f, 'm> {
    memory: &'m Memory<P>,
    pager: &'f DelayedFiles,
    /// The space that maps a file of [`PAGES`] pages, none in memory, and the same amount of plain
    /// memory.
    space: &'f Space<'m>,
    /// A second space, mapped like `space`.
    other: &'f Space<'m>,
    file: Object<'m, P>,
    /// The number of times that the pidfd is found.
    lasts: Cell<usize>,
}

impl<'m> Process<'m, P> for Fixture<'_, 'm> {
    fn space(&self) -> &Space<'m> {
        self.space
    }

    fn file(&self, _descriptor: i32) -> Option<OpenFile<'m, P>> {
        None
    }

    fn process(&self, descriptor: i32) -> Option<&Space<'m>> {
        self.lasts.set(self.lasts.get().checked_sub(1)?);
        match descriptor as u64 {
            PIDFD => Some(self.other),
            0 => Some(self.space),
            _ => None,
        }
    }
}

#[track_caller]
fn with_two<R>(sharing: Sharing, scenario: impl for<'f, 'm> FnOnce(&Fixture<'f, 'm>) -> R) -> R {
    let (machine, memory) = memory_with::<A>(Config { memory: 32 * MIB, ..Config::default() });
    let free = memory.free_frame_count();
    let pager = DelayedFiles::new();
    let content: Vec<u8> = (0..LENGTH).map(|at| (at / PAGE * 7 + at % 251) as u8).collect();
    let result = {
        pager.files.put(1, &content);
        let file = memory.file(&pager, 1, LENGTH).unwrap();
        let spaces = [(); 2].map(|()| {
            let space = AddressSpace::new(&memory, options()).unwrap();
            map(&space, &file, AT, LENGTH, sharing).unwrap();
            // Each page is read separately.
            space.madvise(VirtAddr(AT), LENGTH, Advice::Random).unwrap();
            space.mmap(&fixed(PLAIN, LENGTH)).unwrap();
            space
        });
        let [space, other] = &spaces;
        let lasts = Cell::new(usize::MAX);
        let fixture = Fixture { memory: &memory, pager: &pager, space, other, file, lasts };
        let result = scenario(&fixture);
        pager.answer_all(&memory);
        pager.keep_reads(false);
        // Reading the file consumes the answers.
        assert_eq!(fixture.file.read(0, &mut [0; LENGTH as usize]), Ok(LENGTH as usize));
        audit(&machine, &memory, &[space, other]);
        result
    };
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
    result
}

impl<'m> Fixture<'_, 'm> {
    /// Polls a wait to its end, while the pager answers late.
    #[track_caller]
    fn until_ready(&self, mut wait: CallWait<'_, 'm, P>) -> CallReady<'m, P> {
        loop {
            match wait.poll() {
                CallPoll::Ready(ready) => return ready,
                CallPoll::Pending(_) => {
                    assert!(self.pager.answer_all(self.memory) > 0, "what does it wait for?");
                }
                CallPoll::NeedsThread => panic!("a thread is needed"),
            }
        }
    }

    #[track_caller]
    fn finish<'s, E>(
        &self,
        mut step: impl FnMut(Option<CallReady<'m, P>>) -> Result<Step<'s, 'm, P>, E>,
    ) -> Result<usize, E>
    where
        'm: 's,
    {
        let mut ready = None;
        for waits in 0.. {
            match step(ready.take())? {
                Step::Done => return Ok(waits),
                Step::Blocked(wait) => ready = Some(self.until_ready(wait)),
            }
        }
        unreachable!()
    }

    /// Runs a call in steps, with `between` before the step with this number. Returns its result
    /// and the number of waits.
    fn in_steps(
        &self,
        (call, arguments): (Call, [u64; 6]),
        mut between: impl FnMut(usize),
    ) -> (i64, usize) {
        let mut call = PendingCall::new(call, arguments);
        let mut ready = None;
        for waits in 0.. {
            between(waits);
            match call.step(self, ready.take()) {
                CallStep::Done(result) => {
                    let again = call.step(self, None);
                    assert!(matches!(again, CallStep::Done(same) if same == result));
                    return (result, waits);
                }
                CallStep::Blocked(wait) => ready = Some(self.until_ready(wait)),
            }
        }
        unreachable!()
    }

    fn effects(&self) -> (Resident, Resident, Vec<(u64, u64)>, u64) {
        let asked = self.pager.log().into_iter().map(|Asked { first, pages, .. }| (first, pages));
        let resident = (self.space.resident(), self.other.resident());
        (resident.0, resident.1, asked.collect(), self.memory.events().major_faults)
    }

    fn plain(&self, space: &Space<'_>) -> Vec<u8> {
        let mut bytes = vec![0; LENGTH as usize];
        space.read_user(VirtAddr(PLAIN), &mut bytes).unwrap();
        bytes
    }
}

#[track_caller]
fn blocked<'s, 'm, E: std::fmt::Debug>(step: Result<Step<'s, 'm, P>, E>) -> CallWait<'s, 'm, P> {
    match step {
        Ok(Step::Blocked(wait)) => wait,
        other => panic!("it does not wait: {other:?}"),
    }
}

#[test]
fn stepped_and_blocking_copies_do_the_same() {
    const FROM: VirtAddr = VirtAddr(AT + 5);
    const TO: VirtAddr = VirtAddr(PLAIN + 1000);
    const COUNT: u64 = 5 * PAGE;
    for (sharing, kind) in
        [Sharing::Shared, Sharing::Private].into_iter().flat_map(|s| (0..6).map(move |k| (s, k)))
    {
        let in_way = |steps: bool| {
            with_two(sharing, |fixture| {
                let Fixture { space, other, .. } = *fixture;
                fixture.pager.keep_reads(steps);
                let mut into = vec![0; COUNT as usize];
                let mut waits = 0;
                match (kind, steps) {
                    (0, true) => {
                        let mut copy = PendingUserCopy::new(FROM);
                        let read = |ready| copy.read(space, ready, &mut into);
                        waits = fixture.finish(read).unwrap();
                        assert_eq!(copy.copied() as u64, COUNT);
                    }
                    (0, false) => space.read_user(FROM, &mut into).unwrap(),
                    (1, true) => {
                        let mut copy = PendingUserCopy::foreign(FROM);
                        let read = |ready| copy.read(other, ready, &mut into);
                        waits = fixture.finish(read).unwrap();
                    }
                    (1, false) => other.read_foreign(FROM, &mut into).unwrap(),
                    (2, true) => {
                        let mut copy = PendingUserCopy::new(FROM);
                        waits = fixture.finish(|ready| copy.write(space, ready, &into)).unwrap();
                    }
                    (2, false) => space.write_user(FROM, &into).unwrap(),
                    (3, true) => {
                        let mut copy = PendingCopy::from_other(TO, FROM, COUNT);
                        waits = fixture.finish(|ready| copy.step(space, other, ready)).unwrap();
                    }
                    (3, false) => space.copy_from(TO, other, FROM, COUNT).unwrap(),
                    (4, true) => {
                        let mut copy = PendingCopy::to_other(FROM, TO, COUNT);
                        waits = fixture.finish(|ready| copy.step(space, other, ready)).unwrap();
                    }
                    (4, false) => space.copy_to(FROM, other, TO, COUNT).unwrap(),
                    (_, true) => {
                        // Both sides wait.
                        let mut copy = PendingCopy::from_other(FROM, VirtAddr(AT), COUNT);
                        waits = fixture.finish(|ready| copy.step(space, other, ready)).unwrap();
                        assert_eq!(copy.copied(), COUNT);
                    }
                    (_, false) => space.copy_from(FROM, other, VirtAddr(AT), COUNT).unwrap(),
                }
                assert_eq!(waits > 0, steps);
                let effects = fixture.effects();
                fixture.pager.keep_reads(false);
                let mut first = vec![0; LENGTH as usize];
                space.read_user(VirtAddr(AT), &mut first).unwrap();
                (effects, into, fixture.plain(space), fixture.plain(other), first)
            })
        };
        assert!(in_way(true) == in_way(false), "{sharing:?}, {kind}");
    }
}

#[test]
fn a_fault_ends_a_copy() {
    with_two(Sharing::Shared, |fixture| {
        let space = fixture.space;
        let mut into = vec![0; 3 * PAGE as usize];
        let mut copy = PendingUserCopy::new(VirtAddr(AT + 10));
        let first = fixture.until_ready(blocked(copy.read(space, None, &mut into)));
        let mut wait = blocked(copy.read(space, Some(first), &mut into));
        assert!(matches!(wait.poll(), CallPoll::Pending(_)));
        let kept = fixture.pager.try_take(|asked| asked.first == 1).unwrap();
        fixture.pager.answer(fixture.memory, kept, Err(PagerError::InputOutput));
        let CallPoll::Ready(error) = wait.poll() else { panic!("it has failed") };
        let end = copy.read(space, Some(error), &mut into).map(drop);
        assert_eq!((end, copy.copied() as u64), (Err(FaultError::Bus), PAGE - 10));
        assert_eq!(fixture.pager.log().len(), 2, "the pager is not asked again");
    });
}

#[test]
fn a_page_unmapped_between_steps_is_a_fault() {
    with_two(Sharing::Private, |fixture| {
        let space = fixture.space;
        let from = vec![1; 3 * PAGE as usize];
        let mut copy = PendingUserCopy::new(VirtAddr(AT));
        let first = fixture.until_ready(blocked(copy.write(space, None, &from)));
        let wait = blocked(copy.write(space, Some(first), &from));
        space.munmap(VirtAddr(AT + PAGE), PAGE).unwrap();
        let ready = fixture.until_ready(wait);
        let end = copy.write(space, Some(ready), &from).map(drop);
        assert_eq!((end, copy.copied() as u64), (Err(FaultError::NotMapped), PAGE));
        // Once the pages are mapped again, the copy continues.
        space.mmap(&fixed(AT + PAGE, 2 * PAGE)).unwrap();
        assert!(matches!(copy.write(space, None, &from), Ok(Step::Done)));
    });
}

#[test]
fn a_piece_outlives_the_mapping_behind_it() {
    with_two(Sharing::Private, |fixture| {
        let Fixture { space, other, .. } = *fixture;
        other.write_user(VirtAddr(PLAIN), &[7; 2048]).unwrap();
        let mut copy = PendingCopy::from_other(VirtAddr(AT), VirtAddr(PLAIN), 2048);
        let wait = blocked(copy.step(space, other, None));
        other.munmap(VirtAddr(PLAIN), LENGTH).unwrap();
        let ready = fixture.until_ready(wait);
        let end = copy.step(space, other, Some(ready)).map(drop);
        // The same result as for a blocking call, whose piece is on its stack.
        assert_eq!(end, Err(PartialCopy { copied: 1024, fault: FaultError::NotMapped }));
        assert!(matches!(copy.step(space, other, None), Ok(Step::Done)), "it is over");
        assert_eq!(copy.copied(), 1024);
        let mut into = [0; 1025];
        space.read_user(VirtAddr(AT), &mut into).unwrap();
        assert!(into[..1024] == [7; 1024] && into[1024] != 7);
        other.mmap(&fixed(PLAIN, LENGTH)).unwrap();
    });
}

#[test]
fn a_dropped_copy_leaves_its_read_to_others() {
    for polls in [false, true] {
        with_two(Sharing::Shared, |fixture| {
            let mut into = [0; 10];
            let mut wait =
                blocked(PendingUserCopy::new(VirtAddr(AT)).read(fixture.space, None, &mut into));
            if polls {
                assert!(matches!(wait.poll(), CallPoll::Pending(_)));
            }
            drop(wait);
            let mut copy = PendingUserCopy::foreign(VirtAddr(AT));
            let waits = fixture.finish(|ready| copy.read(fixture.other, ready, &mut into));
            assert_eq!(waits, Ok(1));
            assert_eq!(fixture.pager.log().len(), 1);
        });
    }
}

const FAULT: i64 = -(Errno::EFAULT as i64);

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
