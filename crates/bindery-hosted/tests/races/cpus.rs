//! CPUs that go online and offline: their records and their cached free objects.

use std::thread;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::X86_64;
use bindery::platform::{Cpu, MAX_CPUS};
use bindery::{Access, AddressSpace, Error, FrameRange, Memory, Reclaimed};
use bindery_hosted::{Config, Machine};

use crate::support::{GIB, MIB, audit, fixed, memory_with, options};

/// The machine's memory before any CPU is online.
fn memory_of(machine: &Machine<X86_64>) -> Memory<Machine<X86_64>> {
    let (first, count) = machine.frames();
    // SAFETY: 1. the machine passes its frames on only in `Machine::memory`, which no test calls;
    // 2. no CPU has a table yet.
    unsafe { Memory::new(machine.clone(), &[FrameRange { first, count }]) }.unwrap()
}

#[test]
fn a_cpu_gets_its_records_once() {
    let machine = Machine::<X86_64>::new(Config { cpus: 4, ..Config::default() });
    let memory = memory_of(&machine);
    assert_eq!(memory.online_cpus(), 0);
    let free = memory.free_frame_count();
    memory.cpu_online(Cpu(3)).unwrap();
    let first = free - memory.free_frame_count();
    memory.cpu_online(Cpu(0)).unwrap();
    let both = free - memory.free_frame_count();
    assert_eq!(memory.online_cpus(), 2);
    // Both CPUs share two frames.
    let each = both - first;
    assert!(each * PAGE_SIZE <= 32 << 10 && first == each + 2, "{each} of {first} frames");
    assert_eq!(memory.frame_usage().slab, both);

    assert_eq!(memory.cpu_online(Cpu(3)), Err(Error::Busy));
    assert_eq!(memory.cpu_online(Cpu(MAX_CPUS as u16)), Err(Error::Invalid));
    for cpu in [1, 4, u16::MAX] {
        assert_eq!(memory.cpu_offline(Cpu(cpu)), Err(Error::Invalid));
    }
    memory.cpu_offline(Cpu(3)).unwrap();
    assert_eq!(memory.cpu_offline(Cpu(3)), Err(Error::Invalid));
    assert_eq!(memory.online_cpus(), 1);
    memory.cpu_online(Cpu(3)).unwrap();
    assert_eq!(free - memory.free_frame_count(), both, "the second time it has records");
}

#[test]
fn a_cpu_without_memory_stays_offline() {
    let machine = Machine::<X86_64>::new(Config { cpus: 2, ..Config::default() });
    let memory = memory_of(&machine);
    for allocations in 0..2 {
        memory.fail_allocations_after(Some(allocations));
        assert_eq!(memory.cpu_online(Cpu(1)), Err(Error::OutOfMemory));
        assert_eq!(memory.online_cpus(), 0);
    }
    memory.fail_allocations_after(None);
    memory.cpu_online(Cpu(1)).unwrap();
    assert_eq!(memory.online_cpus(), 1);
}

/// Maps, touches and unmaps 40 separate ranges.
fn map_and_unmap(space: &AddressSpace<'_, Machine<X86_64>>) {
    let at = |number: u64| VirtAddr(GIB + number * 2 * PAGE_SIZE);
    for number in 0..40 {
        space.mmap(&fixed(at(number).0, PAGE_SIZE)).unwrap();
        space.fault(at(number), Access::Write).unwrap();
    }
    for number in 0..40 {
        space.munmap(at(number), PAGE_SIZE).unwrap();
    }
}

#[test]
fn a_cpus_free_objects_go_before_pages() {
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<X86_64>(config);
    memory.trim();
    let records = memory.frame_usage().slab;
    let space = AddressSpace::new(&memory, options()).unwrap();
    machine.on_cpu(Cpu(1), || map_and_unmap(&space));
    drop(space);
    memory.drain_deferred();
    assert!(memory.frame_usage().slab > records, "CPU 1 keeps objects");
    audit(&machine, &memory, &[]);
    let Reclaimed { freed, scanned } = memory.reclaim(1);
    assert!(freed > 0 && scanned == 0, "{freed} freed, {scanned} scanned");
    assert_eq!(memory.frame_usage().slab, records);
}

#[test]
fn a_cpu_that_goes_offline_keeps_no_objects() {
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<X86_64>(config);
    let space = AddressSpace::new(&memory, options()).unwrap();
    map_and_unmap(&space);
    memory.collect();
    let free = memory.free_frame_count();
    let slab = memory.frame_usage().slab;
    for _ in 0..3 {
        machine.on_cpu(Cpu(1), || map_and_unmap(&space));
        memory.drain_deferred();
        memory.cpu_offline(Cpu(1)).unwrap();
        // Each kind of object keeps one spare frame.
        assert!(memory.frame_usage().slab <= slab + 4);
        audit(&machine, &memory, &[&space]);
        memory.collect();
        assert_eq!((memory.free_frame_count(), memory.frame_usage().slab), (free, slab));
        memory.cpu_online(Cpu(1)).unwrap();
    }
}

#[test]
fn cpus_come_and_go_beside_mappings() {
    const CPUS: u16 = 4;
    let config = Config { memory: 32 * MIB, cpus: CPUS, ..Config::default() };
    let (machine, memory) = memory_with::<X86_64>(config);
    memory.trim();
    let records = memory.frame_usage().slab;
    let spaces = [(); CPUS as usize].map(|()| AddressSpace::new(&memory, options()).unwrap());
    thread::scope(|scope| {
        for (cpu, space) in (0..CPUS).zip(&spaces) {
            let (machine, memory) = (&machine, &memory);
            scope.spawn(move || {
                for round in 0..60 {
                    machine.on_cpu(Cpu(cpu), || map_and_unmap(space));
                    // CPUs 0 and 1 are always online, so no CPU frees without waiting for readers.
                    if cpu >= 2 {
                        memory.cpu_offline(Cpu(cpu)).unwrap();
                        memory.cpu_online(Cpu(cpu)).unwrap();
                    } else if round % 8 == 0 {
                        machine.on_cpu(Cpu(cpu), || memory.trim());
                    }
                }
            });
        }
    });
    audit(&machine, &memory, &spaces.each_ref());
    drop(spaces);
    memory.collect();
    audit(&machine, &memory, &[]);
    assert_eq!((memory.online_cpus(), memory.frame_usage().slab), (4, records));
}
