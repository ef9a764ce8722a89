//! Several CPUs in one address space at once, under the strict TLB: programs that fault and write
//! while others map, unmap, protect, move and fork around them, in the same page tables.
//!
//! Every page has its own stamp. A successful access sees the stamp or, if the page was never
//! written, zero, whatever changes the tables undergo.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::platform::Cpu;
use bindery::{AddressSpace, Error, FaultError, Memory, Protection, Remap};
use bindery_hosted::{Config, Machine, Program, Walk};

use crate::support::kernel::Finished;
use crate::support::{
    GIB, KIB, MIB, READ_WRITE, READ_WRITE_EXECUTE, audit, fixed, memory_with, options, use_order,
};

on_every_architecture! {
    programs_fault_beside_a_thread_that_changes_mappings => beside;
    a_range_is_touched_while_it_moves => while_it_moves;
    a_range_is_touched_while_it_is_replaced => while_it_is_replaced;
    a_range_is_touched_while_its_contents_leave => while_contents_leave;
    a_child_is_frozen_while_the_parent_writes => while_it_forks;
    two_threads_change_neighboring_mappings => two_changers;
}

/// Folio sizes to try: base pages, contiguous runs, huge leaves.
const ORDERS: [u8; 3] = [0, 4, 9];

type Space<'m, A> = AddressSpace<'m, Machine<A>>;

/// Runs `work` with a machine of four CPUs and an address space for each folio size, then audits.
fn on_four_cpus<A: Walk>(work: impl Fn(&Machine<A>, &Memory<Machine<A>>, &Space<'_, A>)) {
    for order in ORDERS {
        let config = Config { memory: 128 * MIB, cpus: 4, ..Config::default() };
        let (machine, memory) = memory_with::<A>(config);
        use_order(&memory, order);
        memory.set_huge_zero_page(true);
        let space = AddressSpace::new(&memory, options()).unwrap();
        work(&machine, &memory, &space);
        audit(&machine, &memory, &[&space]);
        drop(space);
        audit(&machine, &memory, &[]);
    }
}

/// The number of repetitions: `BINDERY_DEEPER=1` multiplies it by twenty.
fn rounds(usual: u64) -> u64 {
    if std::env::var_os("BINDERY_DEEPER").is_some() { 20 * usual } else { usual }
}

/// Pseudorandom numbers, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Runs `change` on CPU 0 and, until it returns, repeatedly runs `touch` on CPUs 1 to 3 with the
/// CPU's number. `change` gets a function that waits for a number of touches.
fn until_changed<A: Walk>(
    machine: &Machine<A>,
    change: impl FnOnce(&dyn Fn(u64)),
    touch: impl Fn(u64, &mut Numbers) + Sync,
) {
    let finished = AtomicBool::new(false);
    let touches = AtomicU64::new(0);
    thread::scope(|scope| {
        for cpu in 1..4_u16 {
            let (finished, touches, touch) = (&finished, &touches, &touch);
            scope.spawn(move || {
                let _finished = Finished(finished);
                let mut numbers = Numbers(u64::from(cpu));
                machine.on_cpu(Cpu(cpu), || {
                    while !finished.load(Ordering::Relaxed) {
                        touch(u64::from(cpu), &mut numbers);
                        touches.fetch_add(1, Ordering::Relaxed);
                        // Unbinds from the CPU's TLB for a while, because others may need to
                        // invalidate it.
                        if numbers.below(4) == 0 {
                            thread::yield_now();
                        }
                    }
                });
            });
        }
        let _finished = Finished(&finished);
        let wait = |count: u64| {
            let enough = touches.load(Ordering::Relaxed) + count;
            while touches.load(Ordering::Relaxed) < enough && !finished.load(Ordering::Relaxed) {
                thread::yield_now();
            }
        };
        wait(3);
        machine.on_cpu(Cpu(0), || change(&wait));
    });
}

fn is_segv(error: FaultError) -> bool {
    matches!(error, FaultError::NotMapped | FaultError::Protection)
}

const PAGES: u64 = 2048;
const AREA: u64 = GIB;

/// CPUs 1 to 3 each write and read their own 64 KiB stripes; the stripes in between belong to CPU
/// 0, which changes them in every way. All stripes are in the same four tables.
fn beside<A: Walk>() {
    on_four_cpus::<A>(|machine, memory, space| {
        let stripe = 64 * KIB;
        for at in (0..PAGES * PAGE_SIZE).step_by(stripe as usize) {
            // Different protections keep the stripes' mappings separate.
            let own = if (at / stripe).is_multiple_of(4) { READ_WRITE_EXECUTE } else { READ_WRITE };
            space
                .mmap(&bindery::MapRequest { protection: own, ..fixed(AREA + at, stripe) })
                .unwrap();
        }
        let stripes = PAGES / 16 / 4;
        let written: Vec<_> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
        let touch = |cpu: u64, numbers: &mut Numbers| {
            let page = (numbers.below(stripes) * 4 + cpu) * 16 + numbers.below(16);
            let (at, program) = (VirtAddr(AREA + page * PAGE_SIZE), Program::new(machine, space));
            let known = written[page as usize].load(Ordering::Relaxed);
            assert_eq!(program.load(at), Ok(known), "the page at {at}");
            if numbers.below(2) == 0 {
                let stamp = numbers.below(u64::MAX);
                program.store(at, stamp).unwrap();
                written[page as usize].store(stamp, Ordering::Relaxed);
            }
        };
        let change = |wait: &dyn Fn(u64)| {
            let program = Program::new(machine, space);
            let mut numbers = Numbers(0);
            for round in 0..rounds(80) {
                wait(20);
                let at = VirtAddr(AREA + numbers.below(stripes) * 4 * stripe);
                let away = VirtAddr(4 * GIB + numbers.below(64) * PAGE_SIZE);
                program.fill(at, stripe, round as u8).unwrap();
                space
                    .mprotect(VirtAddr(at.0 + 3 * PAGE_SIZE), 6 * PAGE_SIZE, Protection::READ)
                    .unwrap();
                space.mprotect(at, stripe, Protection::empty()).unwrap();
                space.mprotect(at, stripe, READ_WRITE).unwrap();
                program.fill(at, stripe, round as u8).unwrap();
                space.mremap(at, stripe, stripe, Remap::To(away)).unwrap();
                if round % 8 == 0 {
                    let child = space.fork().unwrap();
                    assert_eq!(Program::new(machine, &child).load(away), program.load(away));
                    drop(child);
                }
                assert!(program.load(at).is_err());
                space.mremap(away, stripe, stripe, Remap::To(at)).unwrap();
                let word = u64::from_ne_bytes([round as u8; 8]);
                assert_eq!(program.load(VirtAddr(at.0 + stripe - 8)), Ok(word));
                space.munmap(VirtAddr(at.0 + PAGE_SIZE), stripe - 2 * PAGE_SIZE).unwrap();
                space.mmap(&fixed(at.0, stripe)).unwrap();
                assert_eq!(program.load(at), Ok(0));
            }
        };
        until_changed(machine, change, touch);
        let program = Program::new(machine, space);
        for (page, stamp) in written.iter().enumerate() {
            if page / 16 % 4 > 0 {
                let at = VirtAddr(AREA + page as u64 * PAGE_SIZE);
                assert_eq!(program.load(at), Ok(stamp.load(Ordering::Relaxed)));
            }
        }
        assert!(memory.free_frame_count() > 0);
    });
}

fn stamp(page: u64) -> u64 {
    0xab00_0000_0000 + page
}

/// Moves 4 MiB between places: congruent, so that tables move; shifted by a block; shifted by a
/// page.
fn while_it_moves<A: Walk>() {
    let length = 4 * MIB;
    let places = [GIB, 4 * GIB, 2 * GIB + 64 * KIB, 2 * GIB + 5 * MIB + PAGE_SIZE];
    on_four_cpus::<A>(|machine, _, space| {
        space.mmap(&fixed(places[0], length)).unwrap();
        let program = Program::new(machine, space);
        for page in 0..length / PAGE_SIZE {
            program.store(VirtAddr(places[0] + page * PAGE_SIZE), stamp(page)).unwrap();
        }
        let seen = AtomicU64::new(0);
        let touch = |_: u64, numbers: &mut Numbers| {
            let page = numbers.below(length / PAGE_SIZE);
            let place = places[numbers.below(places.len() as u64) as usize];
            let at = VirtAddr(place + page * PAGE_SIZE);
            let program = Program::new(machine, space);
            let result = match numbers.below(2) {
                0 => program.load(at).map(|word| assert_eq!(word, stamp(page), "at {at}")),
                _ => program.store(at, stamp(page)),
            };
            match result {
                Ok(()) => drop(seen.fetch_add(1, Ordering::Relaxed)),
                Err(error) => assert!(is_segv(error), "{error} at {at}"),
            }
        };
        let change = |wait: &dyn Fn(u64)| {
            let mut numbers = Numbers(7);
            let mut here = places[0];
            for round in 0..rounds(500) {
                let to = places[numbers.below(places.len() as u64) as usize];
                if to == here {
                    continue;
                }
                wait(4);
                let moved = space.mremap(VirtAddr(here), length, length, Remap::To(VirtAddr(to)));
                here = moved.unwrap().0;
                if round % 5 == 0 {
                    let middle = VirtAddr(here + MIB + 5 * PAGE_SIZE);
                    space.mprotect(middle, MIB, Protection::READ).unwrap();
                    space.mprotect(middle, MIB, READ_WRITE).unwrap();
                }
            }
        };
        until_changed(machine, change, touch);
        assert!(seen.load(Ordering::Relaxed) > 0, "nobody ever met the range");
    });
}

/// `mmap` over a mapping, repeatedly: values written before such a call are never seen after the
/// call has returned. Each page belongs to one CPU, which records its last completed store.
fn while_it_is_replaced<A: Walk>() {
    const REPLACED: u64 = 600;
    on_four_cpus::<A>(|machine, _, space| {
        // The number of calls that have returned.
        let calls = AtomicU64::new(0);
        let over: Vec<_> = (0..REPLACED).map(|_| AtomicU64::new(0)).collect();
        let seen = AtomicU64::new(0);
        let length = REPLACED * PAGE_SIZE;
        space.mmap(&fixed(AREA, length)).unwrap();
        let touch = |cpu: u64, numbers: &mut Numbers| {
            // Uses a few scattered pages, so that both sides contend for them.
            let page = numbers.below(8) * REPLACED / 8 + cpu;
            let (at, over) = (VirtAddr(AREA + page * PAGE_SIZE), &over[page as usize]);
            let program = Program::new(machine, space);
            let returned = calls.load(Ordering::Acquire);
            match program.load(at) {
                Ok(0) => {}
                Ok(_) => {
                    seen.fetch_add(1, Ordering::Relaxed);
                    let last = over.load(Ordering::Relaxed);
                    // The store completed after call n had returned; call n + 1 may have been in
                    // progress.
                    assert!(last + 1 >= returned, "{at} is from {last}, and it is {returned}");
                }
                Err(error) => assert!(is_segv(error), "{error} at {at}"),
            }
            match program.store(at, 1) {
                Ok(()) => over.store(calls.load(Ordering::Acquire), Ordering::Relaxed),
                Err(error) => assert!(is_segv(error), "{error} at {at}"),
            }
        };
        let change = |wait: &dyn Fn(u64)| {
            for round in 1..rounds(200) {
                if round % 3 == 0 {
                    let hole = VirtAddr(AREA + 17 * PAGE_SIZE);
                    space.munmap(hole, 530 * PAGE_SIZE).unwrap();
                    assert_eq!(Program::new(machine, space).load(hole), Err(FaultError::NotMapped));
                }
                space.mmap(&fixed(AREA, length)).unwrap();
                calls.store(round, Ordering::Release);
                wait(60);
            }
        };
        until_changed(machine, change, touch);
        assert!(seen.load(Ordering::Relaxed) > 0, "nobody ever met a page that was written");
    });
}

/// The contents of a mapping repeatedly move out while the mapping stays. Values stored before such
/// a call are at the destination when the call has returned; the source has zeroes or later values.
/// Each page belongs to one CPU, which records its last completed store.
fn while_contents_leave<A: Walk>() {
    const LEFT: u64 = 1100;
    let length = LEFT * PAGE_SIZE;
    // Congruent, so that a whole table moves; shifted by a block; shifted by a page.
    let places = [4 * GIB, 2 * GIB + 64 * KIB, 2 * GIB + 5 * MIB + PAGE_SIZE];
    on_four_cpus::<A>(|machine, _, space| {
        // The number of calls that have returned.
        let calls = AtomicU64::new(0);
        // For the last store to each page: its number, the number of calls that had returned before
        // it, and the number that had returned when it completed.
        let stored: Vec<_> = (0..LEFT).map(|_| AtomicU64::new(0)).collect();
        let over: Vec<_> = (0..LEFT).map(|_| AtomicU64::new(0)).collect();
        let (seen, met) = (AtomicU64::new(0), AtomicU64::new(0));
        space.mmap(&fixed(AREA, length)).unwrap();
        // Uses a few scattered pages, so that both sides contend for them; the middle pages are in
        // a whole table.
        let page_of = |cpu: u64, number: u64| number * (LEFT / 8) + cpu;
        let touch = |cpu: u64, numbers: &mut Numbers| {
            let page = page_of(cpu, numbers.below(8));
            let (at, program) = (VirtAddr(AREA + page * PAGE_SIZE), Program::new(machine, space));
            let (stored, over) = (&stored[page as usize], &over[page as usize]);
            let (last, returned) = (stored.load(Ordering::Relaxed), calls.load(Ordering::Acquire));
            let word = program.load(at).unwrap();
            if word != 0 {
                seen.fetch_add(1, Ordering::Relaxed);
                assert_eq!(word, last, "{at} holds what nobody stored");
                // The store completed after call n had returned; call n + 1 may have been in
                // progress.
                let over = over.load(Ordering::Relaxed);
                assert!(over + 1 >= returned, "{at} is from {over}, and it is {returned}");
            }
            let next = returned * MANY + last % MANY + 1;
            program.store(at, next).unwrap();
            over.store(calls.load(Ordering::Acquire), Ordering::Relaxed);
            stored.store(next, Ordering::Release);
        };
        let change = |wait: &dyn Fn(u64)| {
            let program = Program::new(machine, space);
            for round in 0..rounds(120) {
                wait(40);
                let known: Vec<_> =
                    stored.iter().map(|word| word.load(Ordering::Acquire)).collect();
                let to = VirtAddr(places[round as usize % places.len()]);
                space.mremap(VirtAddr(AREA), length, length, Remap::LeaveTo(to)).unwrap();
                for page in (1..4).flat_map(|cpu| (0..8).map(move |number| page_of(cpu, number))) {
                    let there = program.load(VirtAddr(to.0 + page * PAGE_SIZE)).unwrap();
                    let before = known[page as usize];
                    // The value was stored after the previous call.
                    if before != 0 && before / MANY == round {
                        met.fetch_add(1, Ordering::Relaxed);
                        assert!(
                            there >= before,
                            "the store {before:#x} to {page} is lost: {there:#x}"
                        );
                    }
                }
                calls.store(round + 1, Ordering::Release);
            }
        };
        until_changed(machine, change, touch);
        assert!(seen.load(Ordering::Relaxed) > 0, "nobody ever met what was stored");
        assert!(met.load(Ordering::Relaxed) > 0, "nothing was ever stored between two calls");
    });
}

/// A bound above the number of stores to one page.
const MANY: u64 = 1 << 32;

/// Forks while others write rising numbers: what a child has seen never changes.
fn while_it_forks<A: Walk>() {
    const FORKED: u64 = 600;
    on_four_cpus::<A>(|machine, _, space| {
        space.mmap(&fixed(AREA, FORKED * PAGE_SIZE)).unwrap();
        let counter = AtomicU64::new(1);
        let touch = |cpu: u64, numbers: &mut Numbers| {
            // Each page has one writer.
            let page = numbers.below(FORKED / 3) * 3 + cpu - 1;
            let at = VirtAddr(AREA + page * PAGE_SIZE);
            let program = Program::new(machine, space);
            let next = counter.fetch_add(1, Ordering::Relaxed);
            let old = program.load(at).unwrap();
            assert!(old < next, "{at} holds {old} before it was written");
            program.store(at, next).unwrap();
            assert_eq!(program.load(at), Ok(next), "the write to {at} is lost");
        };
        let change = |wait: &dyn Fn(u64)| {
            for _ in 0..rounds(10) {
                wait(100);
                let child = space.fork().unwrap();
                let limit = counter.load(Ordering::Relaxed);
                let program = Program::new(machine, &child);
                let read = |page: u64| program.load(VirtAddr(AREA + page * PAGE_SIZE)).unwrap();
                let first: Vec<_> = (0..FORKED).map(read).collect();
                assert!(first.iter().all(|word| *word < limit), "the parent's write came through");
                for page in (0..FORKED).step_by(7) {
                    program.store(VirtAddr(AREA + page * PAGE_SIZE), u64::MAX / 2).unwrap();
                }
                let expected = |page: u64| match page % 7 {
                    0 => u64::MAX / 2,
                    _ => first[page as usize],
                };
                for page in 0..FORKED {
                    assert_eq!(read(page), expected(page), "page {page} of the child changed");
                }
            }
        };
        until_changed(machine, change, touch);
    });
}

/// Each of the four CPUs changes mappings in its own range of 1 MiB and 3 pages, so that neighbors
/// share tables. No call fails without a reason.
fn two_changers<A: Walk>() {
    let own = MIB + 3 * PAGE_SIZE;
    on_four_cpus::<A>(|machine, _, space| {
        let work = |cpu: u64, numbers: &mut Numbers| {
            let base = AREA + cpu * own;
            let program = Program::new(machine, space);
            space.mmap(&fixed(base, own)).unwrap();
            let page = numbers.below(own / PAGE_SIZE / 2);
            let at = base + page * PAGE_SIZE;
            let part = (1 + numbers.below(40)) * PAGE_SIZE;
            let part = part.min(base + own / 2 / PAGE_SIZE * PAGE_SIZE - at).max(PAGE_SIZE);
            program.fill(VirtAddr(at), part, cpu as u8 + 1).unwrap();
            let word = u64::from_ne_bytes([cpu as u8 + 1; 8]);
            let to = VirtAddr(at + own / 2 / PAGE_SIZE * PAGE_SIZE);
            match space.mremap(VirtAddr(at), part, part, Remap::To(to)) {
                Ok(moved) => assert_eq!(program.load(moved), Ok(word)),
                Err(error) => assert_eq!(error, Error::Overlap),
            }
            space.mprotect(to, part, Protection::READ).unwrap();
            assert_eq!(program.store(to, 0), Err(FaultError::Protection));
            space.munmap(VirtAddr(base + PAGE_SIZE), own - 2 * PAGE_SIZE).unwrap();
            assert!(program.load(to).is_err());
        };
        let mut numbers = Numbers(99);
        let change = |_: &dyn Fn(u64)| (0..rounds(700)).for_each(|_| work(0, &mut numbers));
        until_changed(machine, change, work);
    });
}
