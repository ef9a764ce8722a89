//! The memory of a process that is about to exit: some pages are freed, others kept, and no freed
//! page reappears.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, Advice, Errno, FaultError, Inspection, LockPages, MapRequest, PinError,
    PinTime, Sharing,
};
use bindery_hosted::{Config, Machine, Program, Walk};
use bindery_linux::process_mrelease;

use crate::support::kernel::Finished;
use crate::support::{GIB, MIB, audit, fixed, memory_with, options, strict, use_order};

on_every_architecture! {
    private_memory_comes_back_and_none_follows => comes_back;
    programs_fault_while_their_memory_is_taken => under_faults;
}

const AT: u64 = GIB;
const SHARED: u64 = 2 * GIB;

fn resident<A: Walk>(space: &AddressSpace<'_, Machine<A>>, at: u64, pages: u64) -> u64 {
    let is_there = |page: &u64| {
        matches!(space.inspect(VirtAddr(at + page * PAGE_SIZE)), Inspection::Page { .. })
    };
    (0..pages).filter(is_there).count() as u64
}

fn comes_back<A: Walk>() {
    for order in [0, 4, 9] {
        let (machine, memory) = strict::<A>(64 * MIB);
        use_order(&memory, order);
        let space = AddressSpace::new(&memory, options()).unwrap();
        let length = 8 * MIB;
        space.mmap(&fixed(AT, length)).unwrap();
        space.mmap(&MapRequest { sharing: Sharing::Shared, ..fixed(SHARED, PAGE_SIZE) }).unwrap();
        space.write_user(VirtAddr(SHARED), b"shared").unwrap();
        space.mlock(VirtAddr(AT), MIB, LockPages::Now).unwrap();
        space.madvise(VirtAddr(AT), length, Advice::PopulateWrite).unwrap();
        let guard = VirtAddr(AT + 4 * MIB);
        space.madvise(guard, PAGE_SIZE, Advice::GuardInstall).unwrap();
        let free = memory.free_frame_count();
        let reaped = process_mrelease(0, || Ok(&space));
        assert_eq!(reaped, 0);
        assert!(memory.free_frame_count() >= free + (length >> 12) - 1, "all is back");
        assert_eq!(resident(&space, AT, length >> 12), 0);
        for access in [Access::Read, Access::Write, Access::Execute] {
            assert_eq!(space.fault(VirtAddr(AT), access), Err(FaultError::Bus));
        }
        let mut byte = [0];
        assert_eq!(space.read_user(VirtAddr(AT + MIB), &mut byte), Err(FaultError::Bus));
        assert_eq!(space.write_user(guard, &byte), Err(FaultError::Bus));
        let pinned = space.pin(VirtAddr(AT), 1, Access::Read, PinTime::Short).map(drop);
        assert_eq!(pinned, Err(PinError::Fault(FaultError::Bus)));
        assert!(space.madvise(VirtAddr(AT), length, Advice::PopulateRead).is_err());
        let mut shared = [0; 6];
        assert_eq!(space.read_user(VirtAddr(SHARED), &mut shared), Ok(()));
        assert_eq!(&shared, b"shared");
        assert_eq!(space.reap(), Ok(()), "once more");
        audit(&machine, &memory, &[&space]);
        // The last calls of the process.
        space.munmap(VirtAddr(AT + MIB), MIB).unwrap();
        audit(&machine, &memory, &[&space]);
        drop(space);
        audit(&machine, &memory, &[]);
    }
}

/// Stores to pages of the range, chosen at random, until `stop` is set.
fn touch<A: Walk>(
    machine: &Machine<A>,
    space: &AddressSpace<'_, Machine<A>>,
    stop: &AtomicBool,
    cpu: u16,
) {
    machine.on_cpu(Cpu(cpu), || {
        let program = Program::new(machine, space);
        let mut at = u64::from(cpu);
        while !stop.load(Ordering::Relaxed) {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let page = (at >> 33) % 1024;
            // The store is refused once the memory is reaped.
            let _ = program.store(VirtAddr(AT + page * PAGE_SIZE), at);
        }
    });
}

fn under_faults<A: Walk>() {
    for order in [0, 4] {
        let (machine, memory) =
            memory_with::<A>(Config { memory: 64 * MIB, cpus: 4, ..Config::default() });
        use_order(&memory, order);
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&fixed(AT, 4 * MIB)).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let finished = Finished(&stop);
            for cpu in 1..4 {
                let (machine, space, stop) = (&machine, &space, &stop);
                scope.spawn(move || touch(machine, space, stop, cpu));
            }
            while resident(&space, AT, 1024) < 100 {
                thread::yield_now();
            }
            let reaped = space.reap();
            let left = resident(&space, AT, 1024);
            drop(finished);
            assert_eq!((reaped, left), (Ok(()), 0));
        });
        assert_eq!(resident(&space, AT, 1024), 0, "nothing has come back");
        audit(&machine, &memory, &[&space]);
    }
}

#[test]
fn a_process_not_ending_keeps_its_memory() {
    let (_machine, memory) = strict::<bindery::arch::X86_64>(4 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT, PAGE_SIZE)).unwrap();
    space.write_user(VirtAddr(AT), b"kept").unwrap();
    assert_eq!(process_mrelease(1, || Ok(&space)), -(Errno::EINVAL as i64));
    let refuse = || Err::<&AddressSpace<'_, _>, _>(Errno::ESRCH);
    let none = process_mrelease::<Machine<bindery::arch::X86_64>, _>(0, refuse);
    assert_eq!(none, -(Errno::ESRCH as i64));
    let mut kept = [0; 4];
    space.read_user(VirtAddr(AT), &mut kept).unwrap();
    assert_eq!(&kept, b"kept");
}
