//! The counters of an address space that several CPUs use concurrently: each CPU has its own
//! counters, and their sum is exact.

use std::thread;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::platform::Cpu;
use bindery::{Access, AddressSpace, Memory};
use bindery_hosted::{Config, Machine, Walk};

use crate::support::{GIB, MIB, audit, fixed, memory_with, options, use_order};

on_every_architecture! {
    counts_of_several_cpus_are_exact => exact;
    counts_are_exact_without_memory_for_counters => without_memory;
    the_peak_is_exact_for_one_cpu => peak_of_one;
    the_peak_misses_at_most_31_pages_of_each_other_cpu => peak_of_several;
}

const CPUS: u16 = 4;
/// The number of pages of each CPU, not a multiple of the batch that is folded into the shared
/// counter.
const PAGES: u64 = 333;

type Space<'m, A> = AddressSpace<'m, Machine<A>>;

fn on_four_cpus<A: Walk>(work: impl Fn(&Machine<A>, &Memory<Machine<A>>, &Space<'_, A>)) {
    let config = Config { memory: 32 * MIB, cpus: CPUS, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    use_order(&memory, 0);
    let space = AddressSpace::new(&memory, options()).unwrap();
    work(&machine, &memory, &space);
    audit(&machine, &memory, &[&space]);
    drop(space);
    audit(&machine, &memory, &[]);
}

/// The addresses of a CPU.
fn area(cpu: u16) -> VirtAddr {
    VirtAddr(GIB * (1 + u64::from(cpu)))
}

fn touch<A: Walk>(space: &Space<'_, A>, cpu: u16, pages: u64) {
    space.mmap(&fixed(area(cpu).0, PAGES * PAGE_SIZE)).unwrap();
    for page in 0..pages {
        space.fault(VirtAddr(area(cpu).0 + page * PAGE_SIZE), Access::Write).unwrap();
    }
}

/// Runs `work` on all CPUs at once, with each CPU's number.
fn on_each<A: Walk>(machine: &Machine<A>, work: impl Fn(u16) + Sync) {
    thread::scope(|scope| {
        for cpu in 0..CPUS {
            let work = &work;
            scope.spawn(move || machine.on_cpu(Cpu(cpu), || work(cpu)));
        }
    });
}

/// Touches and unmaps pages on all CPUs at once and compares the counters after each step.
fn touch_and_unmap<A: Walk>(machine: &Machine<A>, space: &Space<'_, A>) {
    let before = space.counts();
    let all = u64::from(CPUS) * PAGES;
    on_each(machine, |cpu| touch(space, cpu, PAGES));
    let touched = space.counts() - before;
    assert_eq!(touched.anonymous_pages, all);
    assert_eq!(touched.bytes_zeroed, all * PAGE_SIZE);
    assert_eq!(touched.folios_touched, all);
    assert_eq!(space.resident().total(), all);
    assert_eq!(space.resident_peak(), all);
    // Each CPU unmaps the pages that another CPU has mapped.
    on_each(machine, |cpu| {
        space.munmap(area((cpu + 1) % CPUS), PAGES * PAGE_SIZE).unwrap();
    });
    let unmapped = space.counts() - before;
    assert_eq!(unmapped.anonymous_pages, 0);
    assert_eq!(unmapped.folios_touched, 2 * all);
    assert_eq!(space.resident().total(), 0);
}

fn exact<A: Walk>() {
    on_four_cpus::<A>(|machine, _, space| {
        on_each(machine, |_| space.enter());
        touch_and_unmap(machine, space);
        // Repeats with existing counters and with CPUs that go offline and return.
        on_each(machine, |_| space.enter());
        touch_and_unmap(machine, space);
    });
}

fn without_memory<A: Walk>() {
    on_four_cpus::<A>(|machine, memory, space| {
        memory.fail_allocations_after(Some(0));
        on_each(machine, |_| space.enter());
        memory.fail_allocations_after(None);
        touch_and_unmap(machine, space);
        // Now the CPUs get their own counters in addition to their counts in the shared counters.
        on_each(machine, |_| space.enter());
        touch_and_unmap(machine, space);
    });
}

fn peak_of_one<A: Walk>() {
    on_four_cpus::<A>(|machine, _, space| {
        machine.on_cpu(Cpu(2), || {
            space.enter();
            touch(space, 0, 100);
            space.munmap(area(0), PAGES * PAGE_SIZE).unwrap();
            touch(space, 1, 50);
            space.munmap(area(1), PAGES * PAGE_SIZE).unwrap();
        });
        assert_eq!(space.resident_peak(), 100);
    });
}

fn peak_of_several<A: Walk>() {
    on_four_cpus::<A>(|machine, _, space| {
        // All CPUs except the last hold up to 31 pages in their own counters.
        let pages = |cpu: u16| 63 + 20 * u64::from(cpu);
        for cpu in 0..CPUS {
            machine.on_cpu(Cpu(cpu), || {
                space.enter();
                touch(space, cpu, pages(cpu));
            });
        }
        let peak: u64 = (0..CPUS).map(pages).sum();
        machine.on_cpu(Cpu(CPUS - 1), || {
            for cpu in 0..CPUS {
                space.munmap(area(cpu), PAGES * PAGE_SIZE).unwrap();
            }
        });
        let noted = space.resident_peak();
        assert!(peak.abs_diff(noted) <= 31 * u64::from(CPUS - 1), "{noted} of {peak} pages");
    });
}
