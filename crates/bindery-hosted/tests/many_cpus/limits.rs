//! A limit that several CPUs reach at once. No CPU gives anything back, so the granted requests
//! add up to the limit exactly: less would mean that a request was refused without cause.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{
    Access, Accounting, AddressSpace, Error, Limits, LockPages, Memory, Object, Overcommit,
    PinError, PinTime, Quota, Sealing,
};
use bindery_hosted::{Config, Machine};

use super::on_cpus;
use crate::support::objects::PAGE;
use crate::support::{GIB, MIB, audit, fixed, memory_with, options};

const CPUS: u16 = 3;
const LIMIT: u64 = 600;
/// The repetitions of each race.
const ROUNDS: u64 = 20;

type Hosted = Machine<X86_64>;
type Space<'m> = AddressSpace<'m, Hosted>;

fn machine() -> (Hosted, Memory<Hosted>) {
    memory_with(Config { memory: 32 * MIB, cpus: CPUS, ..Config::default() })
}

fn file<'m>(memory: &'m Memory<Hosted>, quota: &'m Quota) -> Object<'m, Hosted> {
    memory.shared_memory_within(quota, 0, Sealing::Forbidden, Accounting::PerPage).unwrap()
}

/// The first page of a range of `LIMIT` pages, and of a gap, for one CPU.
fn start(cpu: u16) -> u64 {
    GIB + u64::from(cpu) * 4 * LIMIT * PAGE_SIZE
}

/// Repeats `request`, with numbers from 0 on, until it is refused. Returns the granted number.
fn until_refused<T>(refusal: Error, request: impl Fn(u64) -> Result<T, Error>) -> u64 {
    for number in 0.. {
        match request(number) {
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error, refusal, "request {number}");
                return number;
            }
        }
    }
    unreachable!("a limit ends the loop");
}

/// Runs `race` on fresh address spaces that have a range for each CPU. The race returns the numbers
/// that were granted.
fn races(limits: &Limits, race: impl Fn(&Hosted, &Space<'_>) -> Vec<u64>) {
    let (machine, memory) = machine();
    for _ in 0..ROUNDS {
        let space = AddressSpace::new(&memory, options()).unwrap();
        for cpu in 0..CPUS {
            space.mmap(&fixed(start(cpu), 2 * LIMIT * PAGE_SIZE)).unwrap();
        }
        space.set_limits(limits);
        let granted = race(&machine, &space);
        assert_eq!(granted.iter().sum::<u64>(), LIMIT, "{granted:?}");
        audit(&machine, &memory, &[&space]);
    }
}

#[test]
fn locked_pages_reach_their_limit_exactly() {
    let limits = Limits { locked: LIMIT * PAGE_SIZE, ..Limits::default() };
    races(&limits, |machine, space| {
        on_cpus(machine, CPUS, |cpu| {
            until_refused(Error::LockLimit, |page| {
                let at = VirtAddr(start(cpu) + page * PAGE_SIZE);
                space.mlock(at, PAGE_SIZE, LockPages::Now)
            })
        })
    });
}

#[test]
fn pinned_pages_reach_their_limit_exactly() {
    let limits = Limits { pinned: LIMIT * PAGE_SIZE, ..Limits::default() };
    races(&limits, |machine, space| {
        let pins = on_cpus(machine, CPUS, |cpu| {
            let mut pins = Vec::new();
            loop {
                let at = VirtAddr(start(cpu) + pins.len() as u64 * PAGE_SIZE);
                match space.pin(at, 1, Access::Write, PinTime::Long) {
                    Ok(pin) => pins.push(pin),
                    Err(error) => {
                        assert_eq!(error, PinError::LimitReached);
                        return pins;
                    }
                }
            }
        });
        pins.iter().map(|pins| pins.len() as u64).collect()
    });
}

#[test]
fn mappings_reach_their_maximum_exactly() {
    let (machine, memory) = machine();
    for _ in 0..ROUNDS {
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.set_maximum_mappings(LIMIT as usize);
        let granted = on_cpus(&machine, CPUS, |cpu| {
            until_refused(Error::TooManyMappings, |number| {
                // A gap keeps the mappings apart.
                space.mmap(&fixed(start(cpu) + 2 * number * PAGE_SIZE, PAGE_SIZE))
            })
        });
        // As on Linux, `mmap` fails only above the maximum.
        assert_eq!(granted.iter().sum::<u64>(), LIMIT + 1, "{granted:?}");
        audit(&machine, &memory, &[&space]);
    }
}

#[test]
fn the_address_space_reaches_its_limit_exactly() {
    let (machine, memory) = machine();
    for _ in 0..ROUNDS {
        let space = AddressSpace::new(&memory, options()).unwrap();
        let limit = LIMIT * PAGE_SIZE;
        space.set_limits(&Limits { address_space: limit, ..space.limits() });
        let granted = on_cpus(&machine, CPUS, |cpu| {
            until_refused(Error::LimitReached, |page| {
                space.mmap(&fixed(start(cpu) + page * PAGE_SIZE, PAGE_SIZE))
            })
        });
        assert_eq!(granted.iter().sum::<u64>(), LIMIT, "{granted:?}");
        audit(&machine, &memory, &[&space]);
    }
}

#[test]
fn files_reach_their_quota_exactly() {
    let (machine, memory) = machine();
    for _ in 0..ROUNDS {
        let quota = Quota::new(LIMIT);
        let files = [(); CPUS as usize].map(|()| file(&memory, &quota));
        let granted = on_cpus(&machine, CPUS, |cpu| {
            let file = &files[usize::from(cpu)];
            until_refused(Error::NoSpace, |page| file.write(page * PAGE, &[1; PAGE as usize]))
        });
        assert_eq!(granted.iter().sum::<u64>(), LIMIT, "{granted:?}");
        assert_eq!(quota.used(), LIMIT);
        audit(&machine, &memory, &[]);
    }
}

#[test]
fn processes_reach_the_commit_limit_exactly() {
    let (machine, memory) = machine();
    memory.commitment().set_mode(Overcommit::Never);
    for _ in 0..ROUNDS {
        let spaces = [(); CPUS as usize].map(|()| AddressSpace::new(&memory, options()).unwrap());
        let free = memory.commitment().limit() - memory.commitment().committed();
        let granted = on_cpus(&machine, CPUS, |cpu| {
            until_refused(Error::Overcommitted, |page| {
                spaces[usize::from(cpu)].mmap(&fixed(GIB + page * PAGE_SIZE, PAGE_SIZE))
            })
        });
        assert_eq!(granted.iter().sum::<u64>(), free, "{granted:?}");
        audit(&machine, &memory, &spaces.each_ref());
    }
}

/// CPUs that do nothing any more hold credit, which is not committed.
#[test]
fn the_credit_of_idle_cpus_is_no_refusal() {
    let (machine, memory) = machine();
    memory.commitment().set_mode(Overcommit::Never);
    let spaces = [(); CPUS as usize].map(|()| AddressSpace::new(&memory, options()).unwrap());
    let map = |cpu: u16, page: u64| {
        spaces[usize::from(cpu)].mmap(&fixed(GIB + page * PAGE_SIZE, PAGE_SIZE))
    };
    for cpu in 1..CPUS {
        machine.on_cpu(Cpu(cpu), || map(cpu, 0).unwrap());
    }
    let free = memory.commitment().limit() - memory.commitment().committed();
    let granted =
        machine.on_cpu(Cpu(0), || until_refused(Error::Overcommitted, |page| map(0, page)));
    assert_eq!(granted, free);
    audit(&machine, &memory, &spaces.each_ref());
}
