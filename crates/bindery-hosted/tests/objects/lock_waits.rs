//! Faults that wait for locks without a thread.

use std::fmt::Debug;
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::{KeyRights, X86_64};
use bindery::platform::{Cpu, Platform};
use bindery::testing::{
    with_family_locked, with_mutex, with_pages_locked, with_vma_read, with_vma_written,
};
use bindery::{
    Access, Accounting, AddressSpace, Advice, FaultError, FaultPoll, FaultWait, MapFlags,
    MapRequest, Protection, Resolved, Sealing, Sharing, TriedFault,
};
use bindery_hosted::{Config, Machine};

use super::word_lock::{Word, memory_with_words};
use crate::support::objects::PAGE;
use crate::support::objects_fixture::{AT, Fixture, map, with_fixture};
use crate::support::{MIB, fixed, memory_with, options};

type A = X86_64<4>;

fn attempt<'s, 'm, P: Platform + Debug>(
    space: &'s AddressSpace<'m, P>,
    at: u64,
    access: Access,
) -> TriedFault<'s, 'm, P> {
    space.try_fault(VirtAddr(at), access, KeyRights::ALL).unwrap()
}

#[track_caller]
fn blocked<'s, 'm, P: Platform + Debug>(
    space: &'s AddressSpace<'m, P>,
    at: u64,
    access: Access,
) -> FaultWait<'s, 'm, P> {
    match attempt(space, at, access) {
        TriedFault::Blocked(wait) => wait,
        tried => panic!("{tried:?}"),
    }
}

#[track_caller]
fn assert_resolves<P: Platform + Debug>(space: &AddressSpace<'_, P>, at: u64, access: Access) {
    let tried = attempt(space, at, access);
    assert!(matches!(tried, TriedFault::Resolved(_)), "{tried:?}");
}

#[track_caller]
fn assert_ready<P: Platform + Debug>(wait: &mut FaultWait<'_, '_, P>) {
    let polled = wait.poll();
    assert!(matches!(polled, Ok(FaultPoll::Ready(_))), "{polled:?}");
}

#[track_caller]
fn assert_needs_thread<P: Platform + Debug>(wait: &mut FaultWait<'_, '_, P>) {
    let polled = wait.poll();
    assert!(matches!(polled, Ok(FaultPoll::NeedsThread)), "{polled:?}");
}

/// Polls until the wait is over, and sleeps like a task in between.
fn finish<P: Platform + Debug>(
    platform: &P,
    wait: &mut FaultWait<'_, '_, P>,
) -> Result<(), FaultError> {
    loop {
        match wait.poll()? {
            FaultPoll::Ready(_) => return Ok(()),
            FaultPoll::Pending(on) => platform.park(on.word(), on.expected()),
            FaultPoll::NeedsThread => panic!("no thread is needed"),
        }
    }
}

/// Runs `tasks` and `hold`, which holds a lock until that many threads sleep.
fn beside(
    machine: &Machine<A>,
    sleepers: u32,
    tasks: &[&(dyn Fn() + Sync)],
    hold: impl FnOnce(&mut dyn FnMut()),
) {
    thread::scope(|scope| {
        hold(&mut || {
            for (task, cpu) in tasks.iter().zip(1..) {
                scope.spawn(move || machine.on_cpu(Cpu(cpu), task));
            }
            while machine.parked_threads() < sleepers {
                thread::yield_now();
            }
        });
    });
}

/// Three CPUs, and anonymous memory whose first page was written.
fn with_cpus(scenario: impl FnOnce(&Machine<A>, &AddressSpace<'_, Machine<A>>)) {
    let config = Config { memory: 32 * MIB, cpus: 3, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT, 4 * PAGE)).unwrap();
    space.fault(VirtAddr(AT), Access::Write).unwrap();
    scenario(&machine, &space);
}

#[test]
fn a_task_waits_for_a_vma() {
    with_cpus(|machine, space| {
        let at = AT + PAGE;
        let (mut late, mut wait) = (None, None);
        with_vma_written(space, VirtAddr(AT), || {
            late = Some(blocked(space, at, Access::Write));
            let wait = wait.insert(blocked(space, at, Access::Write));
            for _ in 0..2 {
                let Ok(FaultPoll::Pending(on)) = wait.poll() else { panic!("a writer has it") };
                assert!(!on.has_changed());
            }
        });
        assert_ready(&mut wait.unwrap());
        // Its first poll finds that the writer has left.
        assert_ready(&mut late.unwrap());
        let task = || finish(machine, &mut blocked(space, at, Access::Write)).unwrap();
        beside(machine, 1, &[&task], |inside| with_vma_written(space, VirtAddr(AT), inside));
        assert_resolves(space, at, Access::Write);
    });
}

#[test]
fn a_dropped_wait_takes_no_wakeup() {
    with_cpus(|machine, space| {
        let task = || finish(machine, &mut blocked(space, AT + PAGE, Access::Write)).unwrap();
        beside(machine, 2, &[&task, &task], |inside| {
            with_vma_written(space, VirtAddr(AT), || {
                let mut wait = blocked(space, AT + PAGE, Access::Write);
                assert!(matches!(wait.poll(), Ok(FaultPoll::Pending(_))));
                inside();
                drop(wait);
            });
        });
    });
}

#[test]
fn a_task_outlives_the_vma_it_waits_for() {
    with_cpus(|machine, space| {
        let at = VirtAddr(AT);
        let unmap = || space.munmap(at, 4 * PAGE).unwrap();
        let task = || {
            while !bindery::testing::is_mutex_locked(space) {
                thread::yield_now();
            }
            // The call waits for the reader, so its VMA cannot be locked.
            let mut wait = loop {
                if let TriedFault::Blocked(wait) = attempt(space, AT, Access::Write) {
                    break wait;
                }
            };
            assert_eq!(finish(machine, &mut wait), Err(FaultError::NotMapped));
        };
        beside(machine, 2, &[&unmap, &task], |inside| with_vma_read(space, at, inside));
    });
}

#[test]
fn a_task_waits_for_an_objects_pages() {
    let config = Config { memory: 32 * MIB, cpus: 3, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let object = memory.shared_memory(4 * PAGE, Sealing::Allowed, Accounting::None).unwrap();
    map(&space, &object, AT, 4 * PAGE, Sharing::Shared).unwrap();
    let mut wait = None;
    with_pages_locked(&object, || {
        let wait = wait.insert(blocked(&space, AT, Access::Write));
        let Ok(FaultPoll::Pending(on)) = wait.poll() else { panic!("a writer has it") };
        assert!(!on.has_changed());
    });
    assert_ready(&mut wait.unwrap());
    // A task that gives up, one that waits on, and a thread that sleeps in the lock.
    let task = || finish(&machine, &mut blocked(&space, AT, Access::Write)).unwrap();
    let fault = || {
        space.fault(VirtAddr(AT + PAGE), Access::Write).unwrap();
    };
    beside(&machine, 2, &[&task, &fault], |inside| {
        with_pages_locked(&object, || {
            let mut wait = blocked(&space, AT, Access::Write);
            assert!(matches!(wait.poll(), Ok(FaultPoll::Pending(_))));
            inside();
            drop(wait);
        });
    });
    assert_resolves(&space, AT, Access::Write);
    // The wait keeps the object.
    let mut wait = None;
    with_pages_locked(&object, || wait = Some(blocked(&space, AT + 2 * PAGE, Access::Read)));
    drop(object);
    space.munmap(VirtAddr(AT), 4 * PAGE).unwrap();
    assert_ready(&mut wait.unwrap());
}

#[test]
fn a_first_write_needs_no_thread() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 2 * PAGE)).unwrap();
        assert_ready(&mut blocked(&space, AT, Access::Write));
        let tried = attempt(&space, AT, Access::Write);
        assert!(matches!(tried, TriedFault::Resolved(Resolved::New(_))), "{tried:?}");
        // A guard gives its mapping no anon group.
        let object = fixture.memory.shared_memory(PAGE, Sealing::Allowed, Accounting::None);
        map(&space, &object.unwrap(), AT + MIB, PAGE, Sharing::Private).unwrap();
        space.madvise(VirtAddr(AT + MIB), PAGE, Advice::GuardInstall).unwrap();
        let tried = space.try_fault(VirtAddr(AT + MIB), Access::Write, KeyRights::ALL);
        assert_eq!(tried.err(), Some(FaultError::NotMapped));
        fixture.audit(&[&space]);
    });
}

#[test]
fn a_first_write_only_tries_the_family() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        let protection = Protection::READ | Protection::WRITE | Protection::EXECUTE;
        space.mmap(&fixed(AT, PAGE)).unwrap();
        space.fault(VirtAddr(AT), Access::Write).unwrap();
        // A neighbor that may become one mapping with the first, and so shares its family.
        space.mmap(&MapRequest { protection, ..fixed(AT + PAGE, PAGE) }).unwrap();
        let mut wait = blocked(&space, AT + PAGE, Access::Write);
        with_family_locked(&space, VirtAddr(AT), || assert_needs_thread(&mut wait));
        assert_ready(&mut wait);
        assert_resolves(&space, AT + PAGE, Access::Write);
        fixture.audit(&[&space]);
    });
}

fn with_stack(scenario: impl FnOnce(&Fixture<'_, A>, &AddressSpace<'_, Machine<A>>)) {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        let stack = MapRequest { flags: MapFlags::GROWS_DOWN, ..fixed(AT + 8 * PAGE, PAGE) };
        space.mmap(&stack).unwrap();
        scenario(fixture, &space);
        fixture.audit(&[&space]);
    });
}

#[test]
fn a_stack_grows_without_a_thread() {
    with_stack(|_, space| {
        assert_ready(&mut blocked(space, AT + 4 * PAGE, Access::Write));
        assert_resolves(space, AT + 4 * PAGE, Access::Write);
        assert_eq!(space.mapping_count(), 1);
        let mut wait = blocked(space, AT - MIB, Access::Write);
        // A fault in progress keeps the bounds of its mapping.
        with_vma_read(space, VirtAddr(AT + 4 * PAGE), || assert_needs_thread(&mut wait));
        assert_ready(&mut wait);
        assert_resolves(space, AT - MIB, Access::Write);
    });
}

#[test]
fn an_unmapped_address_fails_the_poll() {
    with_stack(|_, space| {
        let mut wait = blocked(space, AT + 9 * PAGE, Access::Read);
        assert_eq!(wait.poll().err(), Some(FaultError::NotMapped));
        // A mapping that has come since is found.
        let mut wait = blocked(space, AT + 9 * PAGE, Access::Read);
        space.mmap(&fixed(AT + 9 * PAGE, PAGE)).unwrap();
        assert_ready(&mut wait);
    });
}

#[test]
fn a_mutex_without_a_word_needs_a_thread() {
    with_cpus(|_, space| {
        let mut wait = blocked(space, AT - PAGE, Access::Write);
        with_mutex(space, || assert_needs_thread(&mut wait));
        assert_eq!(wait.poll().err(), Some(FaultError::NotMapped));
    });
}

#[test]
fn a_task_waits_for_the_mutex() {
    let memory = memory_with_words();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT, PAGE)).unwrap();
    for (at, outcome) in [(AT, Ok(())), (AT + MIB, Err(FaultError::NotMapped))] {
        let mut wait = blocked(&space, at, Access::Write);
        let word = with_mutex(&space, || {
            let Ok(FaultPoll::Pending(on)) = wait.poll() else { panic!("the mutex is taken") };
            assert!(!on.has_changed());
            Word::of(on)
        });
        // SAFETY: the word is in a lock of the address space, which lives.
        assert!(unsafe { word.has_changed() }, "the release changes the word");
        let Ok(polled) = wait.poll().map(|polled| matches!(polled, FaultPoll::Ready(_))) else {
            assert!(outcome.is_err());
            continue;
        };
        assert!(polled && outcome.is_ok());
        assert_resolves(&space, at, Access::Write);
    }
}
