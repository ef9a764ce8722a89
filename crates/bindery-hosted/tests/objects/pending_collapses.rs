//! A collapse that stops where it would wait for the pager, and continues later.

use bindery::addr::VirtAddr;
use bindery::arch::{KeyRights, Level, X86_64};
use bindery::{
    AddressSpace, Advice, CallPoll, Errno, Inspection, Operation, PagerError, Sharing, Step,
};
use bindery_hosted::{Config, DelayedFiles, Machine};
use bindery_linux::{Call, CallStep, OpenFile, PendingCall, Process};

use super::content_steps::until_answered;
use crate::support::objects::PAGE;
use crate::support::objects_fixture::{AT, map};
use crate::support::{MIB, audit, memory_with, options};

type A = X86_64<4>;
type P = Machine<A>;
type Space<'m> = AddressSpace<'m, P>;

const LENGTH: u64 = 512 * PAGE;

struct Caller<'s, 'm>(&'s Space<'m>);

impl<'m> Process<'m, P> for Caller<'_, 'm> {
    fn space(&self) -> &Space<'m> {
        self.0
    }

    fn file(&self, _descriptor: i32) -> Option<OpenFile<'m, P>> {
        None
    }

    fn process(&self, _descriptor: i32) -> Option<&Space<'m>> {
        None
    }
}

/// Runs `scenario` with one span of a file mapped, and no page of it in memory.
fn with_file(scenario: impl for<'m> FnOnce(&'m bindery::Memory<P>, &DelayedFiles, &Space<'m>)) {
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let free = memory.free_frame_count();
    let pager = DelayedFiles::new();
    let content: Vec<u8> = (0..LENGTH).map(|n| (n / PAGE % 251) as u8).collect();
    pager.files.put(1, &content);
    {
        let space = AddressSpace::new(&memory, options()).unwrap();
        let file = memory.file(&pager, 1, LENGTH).unwrap();
        map(&space, &file, AT, LENGTH, Sharing::Shared).unwrap();
        scenario(&memory, &pager, &space);
        audit(&machine, &memory, &[&space]);
    }
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

fn is_huge(space: &Space<'_>) -> bool {
    let found = space.inspect(VirtAddr(AT));
    matches!(found, Inspection::Page { level, .. } if level == Level::PMD)
}

#[test]
fn each_page_of_the_file_is_read_once() {
    with_file(|memory, pager, space| {
        let caller = Caller(space);
        let mut call = PendingCall::new(Call::Madvise, [AT, LENGTH, 25, 0, 0, 0]);
        let (mut ready, mut waits) = (None, 0);
        loop {
            match call.step(&caller, ready.take()) {
                CallStep::Done(result) => {
                    assert_eq!(result, 0);
                    break;
                }
                CallStep::Blocked(wait) => {
                    assert!(wait.is_for_storage());
                    waits += 1;
                    ready = Some(until_answered(memory, pager, wait));
                }
            }
        }
        assert!(is_huge(space));
        assert!(waits > 0);
        assert_eq!(pager.log().iter().map(|asked| asked.pages).sum::<u64>(), 512);
        let mut byte = [0];
        space.read_user(VirtAddr(AT + 200 * PAGE), &mut byte).unwrap();
        assert_eq!(byte, [200]);
    });
}

#[test]
fn an_error_of_the_pager_ends_the_collapse() {
    with_file(|memory, pager, space| {
        let rights = KeyRights::ALL;
        let call = space.begin_madvise(VirtAddr(AT), LENGTH, Advice::Collapse, rights);
        let mut call = call.unwrap();
        let Ok(Step::Blocked(mut wait)) = call.step(space, None) else { panic!("not in memory") };
        // The pages around the first one may have caused the error, so that page is asked for alone.
        for pages in [32, 1] {
            assert!(matches!(wait.poll(), CallPoll::Pending(_)));
            let asked = pager.take(|asked| asked.first == 0);
            assert_eq!(pager.log().last().map(|asked| asked.pages), Some(pages));
            pager.answer(memory, asked, Err(PagerError::InputOutput));
        }
        let CallPoll::Ready(ready) = wait.poll() else { panic!("it has answered") };
        drop(wait);
        let step = call.step(space, Some(ready)).map(drop);
        assert_eq!(step.map_err(|error| error.errno(Operation::Madvise)), Err(Errno::EIO));
        assert!(matches!(call.step(space, None), Ok(Step::Done)));
        assert!(!is_huge(space));
        pager.answer_all(memory);
    });
}
