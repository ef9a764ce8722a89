//! Copies from and to programs that stop where they would wait for the pager, and continue later.

use std::cell::Cell;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{
    AddressSpace, Advice, CallPoll, CallReady, CallWait, FaultError, Memory, Object, PagerError,
    PartialCopy, PendingCopy, PendingUserCopy, Resident, Sharing, Step,
};
use bindery_hosted::{Asked, Config, DelayedFiles, Machine};
use bindery_linux::{Call, CallStep, OpenFile, PendingCall, Process};

use super::content_steps::until_answered;
use crate::support::objects::PAGE;
use crate::support::objects_fixture::{AT, map};
use crate::support::{MIB, audit, fixed, memory_with, options};

pub(super) type A = X86_64<4>;
pub(super) type P = Machine<A>;
pub(super) type Space<'m> = AddressSpace<'m, P>;

pub(super) const PAGES: u64 = 8;
pub(super) const LENGTH: u64 = PAGES * PAGE;
/// Memory without a file.
pub(super) const PLAIN: u64 = AT + 64 * MIB;
pub(super) const PIDFD: u64 = 7;

pub(super) struct Fixture<'f, 'm> {
    pub(super) memory: &'m Memory<P>,
    pub(super) pager: &'f DelayedFiles,
    /// The space that maps a file of [`PAGES`] pages, none in memory, and the same amount of plain
    /// memory.
    pub(super) space: &'f Space<'m>,
    /// A second space, mapped like `space`.
    pub(super) other: &'f Space<'m>,
    pub(super) file: Object<'m, P>,
    /// The number of times that the pidfd is found.
    pub(super) lasts: Cell<usize>,
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
pub(super) fn with_two<R>(
    sharing: Sharing,
    scenario: impl for<'f, 'm> FnOnce(&Fixture<'f, 'm>) -> R,
) -> R {
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
    pub(super) fn until_ready(&self, wait: CallWait<'_, 'm, P>) -> CallReady<'m, P> {
        until_answered(self.memory, self.pager, wait)
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
    pub(super) fn in_steps(
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

    pub(super) fn effects(&self) -> (Resident, Resident, Vec<(u64, u64)>, u64) {
        let asked = self.pager.log().into_iter().map(|Asked { first, pages, .. }| (first, pages));
        let resident = (self.space.resident(), self.other.resident());
        (resident.0, resident.1, asked.collect(), self.memory.events().major_faults)
    }

    pub(super) fn plain(&self, space: &Space<'_>) -> Vec<u8> {
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
