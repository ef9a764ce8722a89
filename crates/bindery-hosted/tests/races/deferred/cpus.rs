//! Each online CPU has its own queue.

use super::*;

/// A machine of three online CPUs.
fn online() -> (Machine<Arch>, Memory<Watched<Arch>>) {
    let (machine, memory) = watched::<Arch>(64 * MIB);
    (0..3).for_each(|cpu| memory.cpu_online(Cpu(cpu)).unwrap());
    (machine, memory)
}

#[test]
fn a_drain_frees_all_cpus_items() {
    let (machine, memory) = online();
    let spaces = [(); 2].map(|()| AddressSpace::new(&memory, options()).unwrap());
    spaces.iter().for_each(round);
    memory.collect();
    let free = memory.free_frame_count();
    let waits = memory.platform().waits();
    let (leave, told) = channel();
    until_told(&machine, told, || {
        (0..10).for_each(|_| round(&spaces[0]));
        machine.on_cpu(Cpu(2), || (0..10).for_each(|_| round(&spaces[1])));
        assert!(memory.deferred().tables >= 20, "{:?}", memory.deferred());
        audit(&memory, &spaces.iter().collect::<Vec<_>>());
        let mut leave = Some(leave);
        memory.platform().before_waiting(move || drop(leave.take()));
        memory.drain_deferred();
        nothing_waits(&memory);
    });
    memory.trim();
    assert_eq!((memory.free_frame_count(), memory.platform().waits()), (free, waits + 1));
}

#[test]
fn a_cpu_frees_only_its_own_items() {
    let (machine, memory) = online();
    let spaces = [(); 2].map(|()| AddressSpace::new(&memory, options()).unwrap());
    memory.platform().tell_nothing();
    machine.on_cpu(Cpu(2), || (0..5).for_each(|_| round(&spaces[1])));
    let others = memory.deferred().tables;
    memory.platform().tell();
    (0..20).for_each(|_| round(&spaces[0]));
    assert_eq!(memory.deferred().tables, others, "{:?}", memory.deferred());
    memory.trim();
    nothing_waits(&memory);
    assert_eq!(memory.platform().waits(), 0);
}

#[test]
fn an_offline_cpu_hands_over_its_items() {
    let (machine, memory) = online();
    let spaces = [(); 2].map(|()| AddressSpace::new(&memory, options()).unwrap());
    beside_a_reader(&machine, || {
        machine.on_cpu(Cpu(2), || (0..5).for_each(|_| round(&spaces[1])));
        let before = memory.deferred();
        memory.cpu_offline(Cpu(2)).unwrap();
        assert_eq!(memory.deferred(), before);
        (0..5).for_each(|_| round(&spaces[0]));
        assert!(memory.deferred().tables > before.tables, "the reader is inside");
        audit(&memory, &spaces.iter().collect::<Vec<_>>());
    });
    (0..20).for_each(|_| round(&spaces[0]));
    nothing_waits(&memory);
    assert_eq!(memory.platform().waits(), 0);
}

#[test]
fn the_limit_holds_for_all_queues_together() {
    let (machine, memory) = online();
    let spaces = [(); 2].map(|()| AddressSpace::new(&memory, options()).unwrap());
    memory.platform().tell_nothing();
    let limit = memory.deferred_limit();
    let mut most = 0;
    for number in 0..600 {
        // One CPU fills its queue faster than the other.
        let cpu = if number % 4 == 0 { Cpu(2) } else { Cpu(0) };
        machine.on_cpu(cpu, || round(&spaces[usize::from(cpu.0) / 2]));
        most = most.max(waiting(&memory));
        assert!(waiting(&memory) <= limit, "{} frames wait", waiting(&memory));
    }
    assert!(memory.platform().waits() >= 1);
    assert!(most > limit / 4, "calls waited for readers when {most} frames did");
    memory.drain_deferred();
    nothing_waits(&memory);
}

#[test]
fn the_only_cpu_frees_at_once() {
    let (_machine, memory) = watched::<Arch>(64 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    memory.platform().tell_nothing();
    (0..3).for_each(|_| round(&space));
    assert!(waiting(&memory) > 0, "no CPU is online");
    memory.platform().tell();
    memory.cpu_online(Cpu(0)).unwrap();
    round(&space);
    nothing_waits(&memory);
    memory.platform().tell_nothing();
    round(&space);
    nothing_waits(&memory);
    memory.cpu_online(Cpu(1)).unwrap();
    round(&space);
    assert!(waiting(&memory) > 0, "the other CPU may read");
    memory.drain_deferred();
    memory.cpu_offline(Cpu(1)).unwrap();
    round(&space);
    nothing_waits(&memory);
}
