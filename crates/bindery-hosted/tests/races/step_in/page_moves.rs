//! Moves of pages between two addresses of one address space (`UFFDIO_MOVE`) concurrent with other
//! calls: no page is lost or visible twice, and no TLB has a page at its old address.
//!
//! ```text
//! FROM   4 MiB   pages 0, 1, 2, 16 to 31, 511, 512, 600 written; 700 to 707 in swap
//! TO     4 MiB   nothing
//! ```
//!
//! CPU 2 holds every page in its TLB and stores to it while the first call is held. The stored
//! value must be found in the end, wherever the page has moved.

use std::sync::{Arc, Mutex};
use std::thread;

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery::platform::Cpu;
use bindery::testing::{PageMove, move_pages};
use bindery::{
    Access, AddressSpace, Advice, Errno, Inspection, PinTime, Protection, Remap, SizeMode, check,
};
use bindery_hosted::{Machine, Walk};

use super::stepped::{Readers, Stepped, stepped};
use super::stops::{HoldAt, Phase, Role, Stops};
use crate::support::{GIB, MIB, fixed, options};

const FROM: u64 = 4 * GIB;
const TO: u64 = 8 * GIB;
const ELSEWHERE: u64 = 12 * GIB;
const LENGTH: u64 = 4 * MIB;
/// The length of a partial move, and the distance of its shift.
const PART: u64 = 32 * PAGE_SIZE;
const SHIFT: u64 = 5 * PAGE_SIZE;
const SWAPPED: std::ops::Range<u64> = 700..708;
/// The value that a fault stores at the beginning of the source.
const STORED: u64 = 0xface;

fn pages() -> impl Iterator<Item = u64> {
    [0, 1, 2].into_iter().chain(16..32).chain([511, 512, 600]).chain(SWAPPED)
}

fn stamp(page: u64, round: u64) -> u64 {
    round << 32 | (page + 1)
}

struct World<'m, A: Walk> {
    machine: Machine<A>,
    space: AddressSpace<'m, Stepped<A>>,
    children: Mutex<Vec<AddressSpace<'m, Stepped<A>>>>,
}

/// A call, the pages that it may remove, and whether it leaves no page at the source.
struct Call<A: Walk> {
    name: &'static str,
    call: fn(&World<'_, A>) -> bool,
    loses: bool,
    empties: Option<u64>,
}

fn call<A: Walk>(name: &'static str, call: fn(&World<'_, A>) -> bool) -> Call<A> {
    Call { name, call, loses: false, empties: None }
}

fn moves<A: Walk>(world: &World<'_, A>, source: u64, destination: u64, length: u64) -> bool {
    let (source, destination) = (VirtAddr(source), VirtAddr(destination));
    let what = PageMove { source, destination, length, allows_holes: true, ..PageMove::default() };
    let (moved, result) = move_pages(&world.space, &what);
    // Errors of a move that conflicts with another call, which has changed a mapping, shared or
    // pinned a page, or filled the destination.
    let expected = [Errno::EINVAL, Errno::ENOENT, Errno::EBUSY, Errno::EEXIST];
    assert!(result.is_err_and(|errno| expected.contains(&errno)) || moved == length);
    moved == length
}

fn calls<A: Walk>() -> Vec<Call<A>> {
    let whole = Call {
        empties: Some(LENGTH),
        ..call("move all", |world: &World<'_, A>| moves(world, FROM, TO, LENGTH))
    };
    let part = Call {
        empties: Some(PART),
        ..call("move a part", |world: &World<'_, A>| moves(world, FROM, TO + SHIFT, PART))
    };
    let lost = |name, work| Call { loses: true, ..call::<A>(name, work) };
    vec![
        whole,
        part,
        call("move back", |world| moves(world, TO, FROM, LENGTH)),
        call("fault at the source", |world| {
            let value = STORED.to_ne_bytes();
            world.space.write_user(VirtAddr(FROM), &value).is_ok()
        }),
        call("read the destination", |world| {
            world.space.fault(VirtAddr(TO + 2 * PAGE_SIZE), Access::Read).is_ok()
        }),
        call("mremap the source", |world| {
            let to = Remap::To(VirtAddr(ELSEWHERE));
            world.space.mremap(VirtAddr(FROM), LENGTH, LENGTH, to).is_ok()
        }),
        call("mremap the destination", |world| {
            let to = Remap::To(VirtAddr(ELSEWHERE));
            world.space.mremap(VirtAddr(TO), LENGTH, LENGTH, to).is_ok()
        }),
        call("fork", |world| {
            let child = world.space.fork();
            child.map(|child| world.children.lock().unwrap().push(child)).is_ok()
        }),
        call("page out", |world| {
            world.space.madvise(VirtAddr(FROM), LENGTH, Advice::PageOut).is_ok()
        }),
        call("reclaim", |world| {
            world.space.memory().reclaim(64);
            true
        }),
        call("pin", |world| {
            let at = VirtAddr(FROM + PAGE_SIZE);
            world.space.pin(at, 1, Access::Read, PinTime::Short).is_ok()
        }),
        call("mprotect the source", |world| {
            world.space.mprotect(VirtAddr(FROM), LENGTH, Protection::READ).is_ok()
        }),
        lost("discard the source", |world| world.space.discard(VirtAddr(FROM), LENGTH).is_ok()),
        lost("unmap the source", |world| world.space.munmap(VirtAddr(FROM), LENGTH).is_ok()),
        lost("unmap the destination", |world| world.space.munmap(VirtAddr(TO), LENGTH).is_ok()),
    ]
}

impl<A: Walk> World<'_, A> {
    /// A load or store of CPU 2 with the rights of its TLB and the tables.
    fn load(&self, at: u64) -> Option<u64> {
        self.machine.load_user(self.space.root(), VirtAddr(at), |_| Err(())).ok()
    }

    fn store(&self, at: u64, value: u64) -> bool {
        self.machine.store_user(self.space.root(), VirtAddr(at), value, |_| Err(())).is_ok()
    }

    /// The addresses in the space that hold the stamp of a page, from any round.
    fn places(&self, space: &AddressSpace<'_, Stepped<A>>, page: u64) -> Vec<(u64, u64)> {
        let places = [FROM, TO, ELSEWHERE];
        let bases = places.iter().flat_map(|base| [*base, base + SHIFT]);
        let at = bases.map(|base| base + page * PAGE_SIZE);
        let stands = |at: &u64| {
            matches!(space.inspect(VirtAddr(*at)), Inspection::Page { .. } | Inspection::Absent(_))
        };
        let content = |at: u64| {
            let mut bytes = [0; 8];
            space.read_user(VirtAddr(at), &mut bytes).unwrap();
            (at, u64::from_ne_bytes(bytes))
        };
        let found = at.filter(stands).map(content);
        found.filter(|(_, value)| value & 0xffff_ffff == page + 1).collect()
    }
}

/// One run: `held` at a step, with `other` in between. `None` if `held` was never held.
fn run<A: Walk>(held: &Call<A>, other: &Call<A>, hold_at: HoldAt, order: u8) -> Option<Phase> {
    let (machine, memory) = stepped::<A>(24 * MIB, Readers::Told);
    if order > 0 {
        memory.folio_policy().set(Order(order), SizeMode::Always);
    }
    memory.swap_on(4096, 0).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(FROM, LENGTH)).unwrap();
    space.mmap(&fixed(TO, LENGTH)).unwrap();
    for page in pages() {
        let value = stamp(page, 1).to_ne_bytes();
        space.write_user(VirtAddr(FROM + page * PAGE_SIZE), &value).unwrap();
    }
    let out = VirtAddr(FROM + SWAPPED.start * PAGE_SIZE);
    let length = (SWAPPED.end - SWAPPED.start) * PAGE_SIZE;
    space.madvise(out, length, Advice::PageOut).unwrap();
    let world = World { machine: machine.clone(), space, children: Mutex::default() };
    let _watcher = machine.bind(Cpu(2));
    world.space.enter();
    pages().for_each(|page| _ = world.load(FROM + page * PAGE_SIZE));
    let stops = Arc::new(Stops::default());
    let act = |role, cpu, hold_at, call: &Call<A>| {
        let done = machine.on_cpu(Cpu(cpu), || stops.act(role, hold_at, || (call.call)(&world)));
        done.unwrap_or_else(|| panic!("{} panicked", call.name))
    };
    let mut newest: Vec<(u64, u64)> = pages().map(|page| (page, stamp(page, 1))).collect();
    let phase = thread::scope(|scope| {
        let first = scope.spawn(|| act(Role::Held, 0, hold_at, held));
        let phase = (stops.wait_for(Role::Held) == Phase::Held).then(|| {
            for (page, value) in &mut newest {
                let next = stamp(*page, 2);
                if world.store(FROM + *page * PAGE_SIZE, next) {
                    *value = next;
                }
            }
            let second = scope.spawn(|| act(Role::Meanwhile, 1, HoldAt::Nowhere, other));
            let phase = stops.wait_for(Role::Meanwhile);
            if phase == Phase::Finished
                && second.join().unwrap()
                && let Some(length) = other.empties
            {
                for page in pages().filter(|page| *page * PAGE_SIZE < length) {
                    let seen = world.load(FROM + page * PAGE_SIZE);
                    assert_eq!(seen, None, "page {page} is still at the source");
                }
            }
            phase
        });
        stops.release(Role::Held);
        first.join().unwrap();
        phase
    });
    println!("{}, and {} meanwhile, at {hold_at:?}", held.name, other.name);
    verify(&world, &newest, held.loses || other.loses);
    phase
}

fn verify<A: Walk>(world: &World<'_, A>, newest: &[(u64, u64)], loses: bool) {
    let children = world.children.lock().unwrap();
    let mut spaces = vec![&world.space];
    spaces.extend(children.iter());
    world.machine.assert_clean();
    let memory = world.space.memory();
    let mut scratch = vec![0; check::scratch_words(memory)];
    check::check(memory, &spaces, &mut scratch).unwrap_or_else(|broken| panic!("{broken}"));
    for (page, value) in newest {
        let found = world.places(&world.space, *page);
        let first = found.first().map(|found| found.1);
        assert!(found.len() <= 1, "page {page} is at {found:x?}");
        // A fault may have stored at the beginning of the source.
        let is_lost = loses || *page == 0;
        assert!(first == Some(*value) || is_lost && first.is_none(), "page {page}: {found:x?}");
        for child in children.iter() {
            let found = world.places(child, *page);
            assert!(found.len() == 1 || is_lost && found.is_empty(), "child: {page}: {found:x?}");
        }
    }
    check::check(memory, &spaces, &mut scratch).unwrap_or_else(|broken| panic!("{broken}"));
}

/// Each move is held at each of its steps while every call runs, and each call is held while every
/// move runs.
fn meet<A: Walk>(order: u8) {
    let calls = calls::<A>();
    for (number, first) in calls.iter().enumerate() {
        let others = calls.iter().enumerate().filter(|(other, _)| number < 3 || *other < 3);
        for (_, second) in others {
            let mut ended = 0;
            let mut held = 0;
            for step in 0.. {
                let Some(phase) = run(first, second, HoldAt::Number(step), order) else { break };
                held += 1;
                ended += u32::from(phase == Phase::Finished);
            }
            let (first, second) = (first.name, second.name);
            assert!(held > 0 && ended > 0, "{first} always kept {second} waiting: {held} steps");
        }
    }
}

#[test]
fn on_x86_64() {
    meet::<X86_64<4>>(0);
}

#[test]
fn on_aarch64_with_folios_of_64_kib() {
    meet::<AArch64>(4);
}

#[test]
fn on_riscv64() {
    meet::<Riscv64<3>>(0);
}
