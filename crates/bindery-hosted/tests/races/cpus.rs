//! CPUs that come and go: their records.

use bindery::addr::PAGE_SIZE;
use bindery::arch::X86_64;
use bindery::platform::{Cpu, MAX_CPUS};
use bindery::{Error, FrameRange, Memory};
use bindery_hosted::{Config, Machine};

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
    // One frame belongs to both.
    let each = both - first;
    assert!(each * PAGE_SIZE <= 32 << 10 && first == each + 1, "{each} of {first} frames");
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
fn a_cpu_without_memory_for_its_records_stays_offline() {
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
