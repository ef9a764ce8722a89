//! Faults on files that do not wait for the pager.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::{KeyRights, X86_64};
use bindery::platform::Cpu;
use bindery::{Access, AddressSpace, Error, FaultError, Resolved, Sharing, TriedFault};
use bindery_hosted::{Config, Program};

use super::held_pager::{HeldFiles, Io};
use crate::support::objects::{Failing, PAGE};
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
    // Given up: the pager was not asked.
    let Ok(TriedFault::Blocked(wait)) = attempt() else { panic!("no page is in memory") };
    assert!(wait.is_for_storage());
    drop(wait);
    assert!(pager.asked.lock().unwrap().is_empty());
    let Ok(TriedFault::Blocked(wait)) = attempt() else { panic!("no page is in memory") };
    pager.hold_next(Io::Read, 0);
    let ready = thread::scope(|scope| {
        let waits = scope.spawn(|| machine.on_cpu(Cpu(1), || wait.wait()));
        pager.wait_until_held();
        // Another attempt has to wait too. Its wait finds that the pager works already.
        let Ok(TriedFault::Blocked(second)) = attempt() else { panic!("the pager is held") };
        // The handler goes on with other things, in the same address space.
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
