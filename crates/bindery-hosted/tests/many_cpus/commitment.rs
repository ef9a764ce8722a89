//! Processes at the limit of committed memory. Each stays within its share of the limit, so none
//! may be refused. Memory that is only moved, replaced or protected stays committed, so no other
//! process gets its pages.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::X86_64;
use bindery::{
    Access, AddressSpace, Error, MapFlags, MapRequest, Memory, Overcommit, Protection, Remap,
};
use bindery_hosted::{Config, Machine};

use super::on_cpus;
use crate::support::kernel::Finished;
use crate::support::{
    GIB, MIB, READ_WRITE, READ_WRITE_EXECUTE, audit, fixed, memory_with, options,
};

const CPUS: u16 = 3;
/// The pages that a process may commit. More than a CPU takes from the machine's count at once.
const SHARE: u64 = 600;
const PART: u64 = SHARE / 3;
const AT: u64 = GIB;
const ELSEWHERE: u64 = 2 * GIB;
const HEAP: u64 = 4 * GIB;
const ROUNDS: usize = 5000;

type Hosted = Machine<X86_64>;
type Space<'m> = AddressSpace<'m, Hosted>;
type Call = fn(&Space<'_>) -> Result<(), Error>;

fn page(from: u64, number: u64) -> VirtAddr {
    VirtAddr(from + number * PAGE_SIZE)
}

fn map(space: &Space<'_>, at: VirtAddr, pages: u64) -> Result<(), Error> {
    space.mmap(&fixed(at.0, pages * PAGE_SIZE)).map(|_| ())
}

fn unmap(space: &Space<'_>, at: VirtAddr, pages: u64) {
    space.munmap(at, pages * PAGE_SIZE).unwrap();
}

fn remap(
    space: &Space<'_>,
    from: VirtAddr,
    pages: [u64; 2],
    remap: Remap,
) -> Result<VirtAddr, Error> {
    let [old, new] = pages.map(|pages| pages * PAGE_SIZE);
    space.mremap(from, old, new, remap)
}

/// The last mapping joins its neighbors.
fn join(space: &Space<'_>) -> Result<(), Error> {
    for part in [0, 2, 1] {
        map(space, page(AT, part * PART), PART)?;
    }
    unmap(space, page(AT, 0), SHARE);
    Ok(())
}

/// Memory is committed when it becomes writable, and returned with its flags.
fn protect(space: &Space<'_>) -> Result<(), Error> {
    let request = fixed(AT, SHARE * PAGE_SIZE);
    space.mmap(&MapRequest { protection: Protection::READ, ..request })?;
    for part in [1, 0, 2] {
        space.mprotect(page(AT, part * PART), PART * PAGE_SIZE, READ_WRITE)?;
    }
    space.mprotect(page(AT, 0), SHARE * PAGE_SIZE, Protection::READ)?;
    unmap(space, page(AT, 0), SHARE);
    Ok(())
}

fn replace(space: &Space<'_>) -> Result<(), Error> {
    map(space, page(AT, 0), 2 * PART)?;
    map(space, page(AT, PART), PART)?;
    map(space, page(AT, PART), 2 * PART)?;
    map(space, page(AT, 0), SHARE)?;
    unmap(space, page(AT, 0), SHARE);
    Ok(())
}

/// In place, at another address, and over a mapping that is unmapped first.
fn grow(space: &Space<'_>) -> Result<(), Error> {
    map(space, page(AT, 0), PART)?;
    remap(space, page(AT, 0), [PART, SHARE], Remap::InPlace)?;
    remap(space, page(AT, 0), [SHARE, PART], Remap::InPlace)?;
    remap(space, page(AT, 0), [PART, 2 * PART], Remap::To(page(ELSEWHERE, 0)))?;
    map(space, page(AT, 0), PART)?;
    remap(space, page(AT, 0), [PART, SHARE], Remap::To(page(ELSEWHERE, 0)))?;
    unmap(space, page(ELSEWHERE, 0), SHARE);
    Ok(())
}

fn grow_heap(space: &Space<'_>) -> Result<(), Error> {
    for pages in [PART, SHARE, 0] {
        if space.set_break(page(HEAP, pages)) != page(HEAP, pages) {
            return Err(Error::Overcommitted);
        }
    }
    Ok(())
}

fn grow_stack(space: &Space<'_>) -> Result<(), Error> {
    let top = page(AT, SHARE - 1);
    space.mmap(&MapRequest { flags: MapFlags::GROWS_DOWN, ..fixed(top.0, PAGE_SIZE) })?;
    space.fault(page(AT, 0), Access::Write).map_err(|_| Error::Overcommitted)?;
    unmap(space, page(AT, 0), SHARE);
    Ok(())
}

fn fork(space: &Space<'_>) -> Result<(), Error> {
    map(space, page(AT, 0), SHARE / 2)?;
    space.write_user(page(AT, 0), &[1]).unwrap();
    drop(space.fork()?);
    unmap(space, page(AT, 0), SHARE / 2);
    Ok(())
}

/// A machine that may commit a share for each CPU.
fn machine() -> (Hosted, Memory<Hosted>) {
    let (machine, memory) =
        memory_with(Config { memory: 32 * MIB, cpus: CPUS, ..Config::default() });
    memory.commitment().set_mode(Overcommit::Never);
    memory.commitment().set_limit(u64::from(CPUS) * SHARE);
    assert_eq!(memory.commitment().committed(), 0);
    (machine, memory)
}

fn spaces<'m>(memory: &'m Memory<Hosted>) -> [Space<'m>; CPUS as usize] {
    [(); CPUS as usize].map(|()| AddressSpace::new(memory, options()).unwrap())
}

#[test]
fn no_process_within_its_share_is_refused() {
    let calls: [(&str, Call); 7] = [
        ("join", join),
        ("protect", protect),
        ("replace", replace),
        ("grow", grow),
        ("grow_heap", grow_heap),
        ("grow_stack", grow_stack),
        ("fork", fork),
    ];
    let (machine, memory) = machine();
    let spaces = spaces(&memory);
    on_cpus(&machine, CPUS, |cpu| {
        let space = &spaces[usize::from(cpu)];
        space.set_break_start(VirtAddr(HEAP));
        for round in 0..ROUNDS {
            // Each call meets all others.
            let (name, call) = calls[(round * (1 + usize::from(cpu))) % calls.len()];
            assert_eq!(call(space), Ok(()), "{name} in round {round} on CPU {cpu}");
        }
    });
    assert_eq!(memory.commitment().committed(), 0);
    audit(&machine, &memory, &spaces.each_ref());
}

/// Moves all of the mapping over a neighbor, and its middle out and in again.
fn move_away_and_back(space: &Space<'_>) {
    let (near, far) = (page(AT, 0), page(ELSEWHERE, 0));
    for (from, to) in [(near, far), (far, near)] {
        assert_eq!(remap(space, from, [SHARE; 2], Remap::To(to)), Ok(to));
    }
    let middle = page(AT, PART);
    for (from, to) in [(middle, far), (far, middle)] {
        assert_eq!(remap(space, from, [PART; 2], Remap::To(to)), Ok(to));
    }
}

/// Replaces and protects parts of the mapping, which is split and joined.
fn change(space: &Space<'_>) {
    for part in 0..3 {
        map(space, page(AT, part * PART), PART).unwrap();
        for protection in [READ_WRITE_EXECUTE, READ_WRITE] {
            space.mprotect(page(AT, part * PART), PART * PAGE_SIZE, protection).unwrap();
        }
    }
    map(space, page(AT, 0), SHARE).unwrap();
}

#[test]
fn memory_that_moves_gives_up_no_page() {
    let (machine, memory) = machine();
    let spaces = spaces(&memory);
    for space in &spaces[1..] {
        map(space, page(AT, 0), SHARE).unwrap();
        space.write_user(page(AT, PART), &[1]).unwrap();
        // A neighbor that commits nothing.
        let request = fixed(AT + GIB / 2, PAGE_SIZE);
        space.mmap(&MapRequest { protection: Protection::READ, ..request }).unwrap();
    }
    let over = AtomicBool::new(false);
    on_cpus(&machine, CPUS, |cpu| {
        let _finished = Finished(&over);
        let space = &spaces[usize::from(cpu)];
        if cpu == 0 {
            for round in 0..ROUNDS {
                assert_eq!(map(space, page(AT, 0), SHARE), Ok(()), "free, in round {round}");
                let more = map(space, page(ELSEWHERE, 0), 1);
                assert_eq!(more, Err(Error::Overcommitted), "full, in round {round}");
                unmap(space, page(AT, 0), SHARE);
            }
        } else {
            while !over.load(Relaxed) {
                if cpu == 1 { move_away_and_back(space) } else { change(space) }
            }
        }
    });
    assert_eq!(memory.commitment().committed(), 2 * SHARE);
    audit(&machine, &memory, &spaces.each_ref());
}
