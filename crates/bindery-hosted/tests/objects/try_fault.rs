//! Faults on files that do not wait for the pager.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::{KeyRights, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, Error, FaultError, FaultPoll, PagerError, Resolved, Sharing, TriedFault,
};
use bindery_hosted::{Config, DelayedFiles, Program};

use super::held_pager::{HeldFiles, Io};
use crate::support::objects::{Failing, PAGE, use_object_order};
use crate::support::objects_fixture::{AT, map, with_fixture};
use crate::support::{MIB, audit, fixed, memory_with, options};

const PAGES: u64 = 8;

#[test]
fn the_pager_works_for_another_thread() {
    let pager = HeldFiles::new();
    pager.files.put(1, &[7; (PAGES * PAGE) as usize]);
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<X86_64<4>>(config);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let file = memory.file(&pager, 1, PAGES * PAGE).unwrap();
    map(&space, &file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
    let attempt = || space.try_fault(VirtAddr(AT), Access::Read, KeyRights::ALL);
    // The attempt ends without a request to the pager.
    let Ok(TriedFault::Blocked(wait)) = attempt() else { panic!("no page is in memory") };
    assert!(wait.is_for_storage());
    drop(wait);
    assert!(pager.asked.lock().unwrap().is_empty());
    let Ok(TriedFault::Blocked(wait)) = attempt() else { panic!("no page is in memory") };
    pager.hold_next(Io::Read, 0);
    let ready = thread::scope(|scope| {
        let waits = scope.spawn(|| machine.on_cpu(Cpu(1), || wait.wait()));
        pager.wait_until_held();
        // Another attempt has to wait too. It finds the request in flight.
        let Ok(TriedFault::Blocked(second)) = attempt() else { panic!("the pager is held") };
        // The handler continues with other work in the same address space.
        space.mmap(&fixed(AT + MIB, PAGE)).unwrap();
        space.fault(VirtAddr(AT + MIB), Access::Write).unwrap();
        pager.release();
        assert!(second.wait().is_ok());
        waits.join().unwrap()
    });
    let tried = attempt();
    assert!(matches!(tried, Ok(TriedFault::Resolved(Resolved::Mapped(_)))), "{tried:?}");
    drop(ready);
    assert_eq!(pager.times(Io::Read, 0), 1);
    assert_eq!(Program::new(&machine, &space).load(VirtAddr(AT)), Ok(0x0707_0707_0707_0707));
    audit(&machine, &memory, &[&space]);
}

#[test]
fn a_pager_that_fails_fails_the_wait() {
    let pager = Failing::new();
    pager.files.put(1, &[7; PAGE as usize]);
    with_fixture::<X86_64<4>>(0, |fixture| {
        let file = fixture.memory.file(&pager, 1, PAGE).unwrap();
        let space = fixture.space();
        map(&space, &file, AT, PAGE, Sharing::Private).unwrap();
        pager.reads_left.store(0, std::sync::atomic::Ordering::Relaxed);
        let tried = space.try_fault(VirtAddr(AT), Access::Read, KeyRights::ALL).unwrap();
        let TriedFault::Blocked(wait) = tried else { panic!("no page is in memory") };
        assert_eq!(wait.wait().err(), Some(FaultError::Bus));
        assert_eq!(file.read(0, &mut [0]), Err(Error::InputOutput));
        pager.never();
        let tried = space.try_fault(VirtAddr(AT), Access::Read, KeyRights::ALL).unwrap();
        let TriedFault::Blocked(wait) = tried else { panic!("no page is in memory") };
        let ready = wait.wait().unwrap();
        let tried = space.try_fault(VirtAddr(AT), Access::Read, KeyRights::ALL);
        assert!(matches!(tried, Ok(TriedFault::Resolved(_))), "{tried:?}");
        drop(ready);
    });
}

/// A machine with a file of [`PAGES`] pages behind a pager that keeps requests, mapped shared.
fn with_delayed(
    scenario: impl for<'m> FnOnce(
        &AddressSpace<'m, bindery_hosted::Machine<X86_64<4>>>,
        &bindery::Memory<bindery_hosted::Machine<X86_64<4>>>,
        &DelayedFiles,
    ),
) {
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<X86_64<4>>(config);
    let pager = DelayedFiles::new();
    pager.files.put(1, &[7; (PAGES * PAGE) as usize]);
    {
        let space = AddressSpace::new(&memory, options()).unwrap();
        let file = memory.file(&pager, 1, PAGES * PAGE).unwrap();
        map(&space, &file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        drop(file);
        scenario(&space, &memory, &pager);
        audit(&machine, &memory, &[&space]);
    }
    assert_eq!(audit(&machine, &memory, &[]).objects, 0);
}

fn page(number: u64) -> VirtAddr {
    VirtAddr(AT + number * PAGE)
}

#[test]
fn a_polled_wait_needs_no_thread() {
    with_delayed(|space, memory, pager| {
        let attempt = |number| space.try_fault(page(number), Access::Read, KeyRights::ALL);
        let Ok(TriedFault::Blocked(mut wait)) = attempt(0) else { panic!("no page is in memory") };
        let Ok(FaultPoll::Pending(parked)) = wait.poll() else { panic!("the pager has it") };
        assert!(!parked.has_changed());
        assert!(!pager.log()[0].ahead, "a fault needs the page");
        // The answer changes the word that the task has received.
        pager.answer(memory, pager.take(|asked| asked.first == 0), Ok(()));
        assert!(parked.has_changed());
        let Ok(FaultPoll::Ready(ready)) = wait.poll() else { panic!("the answer is there") };
        assert!(matches!(attempt(0), Ok(TriedFault::Resolved(Resolved::Mapped(_)))));
        drop(ready);
        assert_eq!(pager.log().len(), 1);
        drop(wait);
    });
}

#[test]
fn waits_for_one_page_share_the_request() {
    with_delayed(|space, memory, pager| {
        let attempt = || space.try_fault(page(3), Access::Read, KeyRights::ALL);
        let waits = [(); 3].map(|()| match attempt() {
            Ok(TriedFault::Blocked(mut wait)) => {
                assert!(matches!(wait.poll(), Ok(FaultPoll::Pending(_))));
                wait
            }
            tried => panic!("{tried:?}"),
        });
        assert_eq!(pager.log().len(), 1);
        let [first, mut second, third] = waits;
        // The wait that started the read is dropped; the read continues.
        drop(first);
        assert!(matches!(second.poll(), Ok(FaultPoll::Pending(_))));
        pager.answer_all(memory);
        assert!(matches!(second.poll(), Ok(FaultPoll::Ready(_))));
        // A wait can also be passed to a thread.
        drop(third.wait().unwrap());
        assert!(matches!(attempt(), Ok(TriedFault::Resolved(_))));
        assert_eq!(pager.log().len(), 1);
    });
}

#[test]
fn a_polled_wait_reports_the_error() {
    with_delayed(|space, memory, pager| {
        let attempt = |number| space.try_fault(page(number), Access::Read, KeyRights::ALL);
        let fail = |number: u64| {
            let kept = pager.take(|asked| asked.first == number);
            pager.answer(memory, kept, Err(PagerError::InputOutput));
        };
        let Ok(TriedFault::Blocked(mut wait)) = attempt(0) else { panic!("no page is in memory") };
        assert!(matches!(wait.poll(), Ok(FaultPoll::Pending(_))));
        fail(0);
        assert_eq!(wait.poll().err(), Some(FaultError::Bus));
        drop(wait);
        // A request for several pages is followed by a request for only this page.
        space.madvise(page(0), PAGES * PAGE, bindery::Advice::Sequential).unwrap();
        let Ok(TriedFault::Blocked(mut wait)) = attempt(0) else { panic!("no page is in memory") };
        assert!(matches!(wait.poll(), Ok(FaultPoll::Pending(_))));
        fail(0);
        assert!(matches!(wait.poll(), Ok(FaultPoll::Pending(_))));
        let asked: Vec<_> = pager.log().iter().map(|asked| asked.pages).collect();
        assert_eq!(asked, [1, PAGES, 1]);
        pager.answer_all(memory);
        assert!(matches!(wait.poll(), Ok(FaultPoll::Ready(_))));
    });
}

#[test]
fn reclaim_leaves_the_answer_of_a_polled_wait() {
    with_delayed(|space, memory, pager| {
        let attempt = || space.try_fault(page(2), Access::Read, KeyRights::ALL);
        let Ok(TriedFault::Blocked(mut wait)) = attempt() else { panic!("no page is in memory") };
        assert!(matches!(wait.poll(), Ok(FaultPoll::Pending(_))));
        pager.answer_all(memory);
        memory.reclaim(1);
        let Ok(FaultPoll::Ready(ready)) = wait.poll() else { panic!("the answer is there") };
        memory.reclaim(1);
        assert!(matches!(attempt(), Ok(TriedFault::Resolved(Resolved::Mapped(_)))));
        drop(ready);
        assert_eq!(pager.log().len(), 1);
    });
}

#[test]
fn a_bad_page_fails_only_itself() {
    with_delayed(|space, memory, pager| {
        use_object_order(memory, 3);
        let attempt = |number| space.try_fault(page(number), Access::Read, KeyRights::ALL);
        let answer = |first: u64, pages: u64, answer| {
            let kept = pager.take(|asked| (asked.first, asked.pages) == (first, pages));
            pager.answer(memory, kept, answer);
        };
        let bad = Err(PagerError::InputOutput);
        let Ok(TriedFault::Blocked(mut wait)) = attempt(3) else { panic!("no page is in memory") };
        assert!(matches!(wait.poll(), Ok(FaultPoll::Pending(_))));
        answer(0, PAGES, bad);
        assert!(matches!(wait.poll(), Ok(FaultPoll::Pending(_))));
        answer(3, 1, Ok(()));
        assert!(matches!(wait.poll(), Ok(FaultPoll::Ready(_))));
        assert!(matches!(attempt(3), Ok(TriedFault::Resolved(_))));
        let Ok(TriedFault::Blocked(mut wait)) = attempt(5) else { panic!("it is not in memory") };
        assert!(matches!(wait.poll(), Ok(FaultPoll::Pending(_))));
        answer(5, 1, bad);
        assert_eq!(wait.poll().err(), Some(FaultError::Bus));
    });
}
