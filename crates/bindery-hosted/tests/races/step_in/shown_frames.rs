//! Revokes of the embedder's frames concurrent with faults, forks, moves and unmappings. When a
//! revoke has returned, no program reaches an earlier frame, and the copies of private mappings
//! still exist.
//!
//! ```text
//! SHARED    4 MiB   pages 0 to 511 a block of 2 MiB, 600 to 615 a block of 64 KiB
//! PRIVATE   4 MiB   the same; pages 1 and 601 are copies
//! child             as the space when it forked
//! ```
//!
//! CPU 2 holds every probe in its TLB. The frames before the revoke and the frames after it have
//! different contents.

use std::sync::{Arc, Mutex};
use std::thread;

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, MemoryType, Riscv64, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, Advice, FaultError, FrameRange, Memory, Object, Protection, Remap, check,
};
use bindery_hosted::{Machine, Walk};

use super::stepped::{Readers, Stepped, stepped};
use super::stops::{HoldAt, Phase, Role, Stops};
use crate::support::devices::{Driver, map, shared};
use crate::support::{GIB, MIB, READ_WRITE, fixed, options};

const SHARED: u64 = 4 * GIB;
const PRIVATE: u64 = SHARED + 8 * MIB;
const ELSEWHERE: u64 = 12 * GIB;
const SHIFTED: u64 = ELSEWHERE + 8 * MIB + 3 * PAGE_SIZE;
const LENGTH: u64 = 4 * MIB;
const PROBES: [u64; 7] = [0, 1, 2, 511, 600, 601, 615];
/// The probes that the private mapping has copied.
const COPIED: [u64; 2] = [1, 601];
/// The first pages of the two blocks.
const PLACES: [u64; 2] = [0, 600];

/// The bits of a stored value that identify where it was stored.
const OLD: u64 = 1 << 32;
const NEW: u64 = 2 << 32;
const COPY: u64 = 3 << 32;

struct World<'m, A: Walk> {
    machine: Machine<A>,
    memory: &'m Memory<Stepped<A>>,
    driver: &'m Driver,
    object: Object<'m, Stepped<A>>,
    /// The frames that are shown after a revoke.
    new: [FrameRange; 2],
    space: AddressSpace<'m, Stepped<A>>,
    children: Mutex<Vec<AddressSpace<'m, Stepped<A>>>>,
}

/// A call, and whether it unmaps copies.
struct Call<A: Walk> {
    name: &'static str,
    call: fn(&World<'_, A>) -> bool,
    loses: bool,
}

/// The number of calls that revoke; they come first.
const REVOKES: usize = 3;

fn calls<A: Walk>() -> Vec<Call<A>> {
    let call = |name, call| Call::<A> { name, call, loses: false };
    let loses = |name, call| Call::<A> { name, call, loses: true };
    vec![
        call("revoke all, for others", |world| {
            show(world.driver, &world.new);
            world.object.revoke(0, LENGTH).is_ok()
        }),
        call("revoke all, for none", |world| {
            world.driver.set(&[]);
            world.object.revoke(0, u64::MAX).is_ok()
        }),
        call("revoke one table, then the other", |world| {
            show(world.driver, &world.new);
            let tables = [0, 2 * MIB].map(|offset| world.object.revoke(offset, 2 * MIB).is_ok());
            tables == [true; 2]
        }),
        call("fault shared, write", |world| touch(world, SHARED, &[0, 511, 601], Access::Write)),
        call("fault shared, read", |world| touch(world, SHARED, &[3, 602], Access::Read)),
        call("fault private, write", |world| touch(world, PRIVATE, &[3, 604], Access::Write)),
        call("fault private, read", |world| touch(world, PRIVATE, &[0, 2, 600], Access::Read)),
        call("fork", |world| {
            let child = world.space.fork();
            child.map(|child| world.children.lock().unwrap().push(child)).is_ok()
        }),
        call("drop child", |world| {
            let children = std::mem::take(&mut *world.children.lock().unwrap());
            !children.is_empty()
        }),
        call("move shared, congruent", |world| remap(world, SHARED, ELSEWHERE)),
        call("move shared", |world| remap(world, SHARED, SHIFTED)),
        call("move private", |world| remap(world, PRIVATE, SHIFTED)),
        call("unmap shared", |world| world.space.munmap(VirtAddr(SHARED), LENGTH).is_ok()),
        loses("unmap a part", |world| {
            let (at, length) = (SHARED + MIB, PRIVATE + 3 * MIB - (SHARED + MIB));
            world.space.munmap(VirtAddr(at), length).is_ok()
        }),
        // Splits the huge leaf, whose entry is empty until the TLBs are flushed.
        call("unmap a page", |world| {
            world.space.munmap(VirtAddr(SHARED + 3 * PAGE_SIZE), PAGE_SIZE).is_ok()
        }),
        call("mprotect none", |world| protect(world, Protection::empty())),
        call("mprotect read", |world| protect(world, Protection::READ)),
        call("mprotect and back", |world| {
            protect(world, Protection::empty()) & protect(world, READ_WRITE)
        }),
        call("map once more", |world| {
            let mapped = map(&world.space, &world.object, &shared(ELSEWHERE, LENGTH));
            mapped.is_ok() & touch(world, ELSEWHERE, &[0, 600], Access::Write)
        }),
        call("dontneed", |world| {
            world.space.madvise(VirtAddr(PRIVATE), LENGTH, Advice::DontNeed).is_err()
        }),
        call("reclaim", |world| world.memory.reclaim(64).scanned > 0),
    ]
}

fn show(driver: &Driver, blocks: &[FrameRange; 2]) {
    let pieces = [0, 1].map(|number| (PLACES[number], blocks[number].first, blocks[number].count));
    driver.set(&pieces);
}

fn touch<A: Walk>(world: &World<'_, A>, base: u64, pages: &[u64], access: Access) -> bool {
    let touched = |page: &u64| world.space.fault(VirtAddr(base + page * PAGE_SIZE), access);
    let expected = |result: &Result<_, _>| {
        // The source has no frames, or another call has moved or protected the mapping.
        let errors = [FaultError::Bus, FaultError::NotMapped, FaultError::Protection];
        result.as_ref().err().is_none_or(|error| errors.contains(error))
    };
    let results: Vec<_> = pages.iter().map(touched).collect();
    assert!(results.iter().all(expected), "{results:?}");
    results.iter().all(Result::is_ok)
}

fn remap<A: Walk>(world: &World<'_, A>, from: u64, to: u64) -> bool {
    world.space.mremap(VirtAddr(from), LENGTH, LENGTH, Remap::To(VirtAddr(to))).is_ok()
}

fn protect<A: Walk>(world: &World<'_, A>, protection: Protection) -> bool {
    let both = [SHARED, PRIVATE].map(|at| world.space.mprotect(VirtAddr(at), LENGTH, protection));
    both.iter().all(Result::is_ok)
}

impl<A: Walk> World<'_, A> {
    /// The values that CPU 2 loads with the rights of its TLB and the tables.
    fn load(&self, space: &AddressSpace<'_, Stepped<A>>, at: u64) -> Option<u64> {
        self.machine.load_user(space.root(), VirtAddr(at), |_| Err(())).ok()
    }

    fn store(&self, at: u64, value: u64) {
        let space = &self.space;
        let handle = |fault: bindery_hosted::MmuFault| {
            space.fault(fault.addr, Access::Write).map(|_| ()).map_err(|_| ())
        };
        self.machine.store_user(space.root(), VirtAddr(at), value, handle).unwrap();
    }

    /// Verifies that no program reaches a frame from before the revoke, even through cached
    /// translations.
    fn shows_nothing_old(&self, when: &str) {
        let children = self.children.lock().unwrap();
        for space in children.iter().chain([&self.space]) {
            for base in [SHARED, PRIVATE, ELSEWHERE, SHIFTED] {
                for page in PROBES {
                    let found = self.load(space, base + page * PAGE_SIZE);
                    let is_old = found.is_some_and(|found| found & (3 << 32) == OLD);
                    assert!(!is_old, "{when}: {base:#x}, page {page}: {found:x?}");
                }
            }
        }
    }

    /// Verifies that the copies are where the mapping is, in memory or in swap.
    fn has_copies(&self) {
        let children = self.children.lock().unwrap();
        for space in children.iter().chain([&self.space]) {
            let copies = COPIED.map(|page| {
                let places = [PRIVATE, SHIFTED].map(|base| VirtAddr(base + page * PAGE_SIZE));
                let found = places.map(|at| {
                    let readable = space.fault(at, Access::Read).is_ok();
                    space.enter();
                    if readable { self.load(space, at.0) } else { None }
                });
                found.contains(&Some(COPY | page))
            });
            assert_eq!(copies, [true; 2], "a copy is lost");
        }
    }
}

/// Releases the calls at the end of the run, even after a panic.
struct Releases<'a>(&'a Stops);

impl Drop for Releases<'_> {
    fn drop(&mut self) {
        [Role::Held, Role::Meanwhile].into_iter().for_each(|role| self.0.release(role));
    }
}

/// One run: `held` at a step, with `other` in between. `None` if `held` was never held.
fn run<A: Walk>(held: &Call<A>, other: &Call<A>, hold_at: HoldAt) -> Option<Phase> {
    let (machine, memory) = stepped::<A>(24 * MIB, Readers::Told);
    memory.swap_on(512, 0).unwrap();
    let blocks = || [9, 4].map(|order| memory.allocate_frames(Order(order)).unwrap());
    let (new, old) = (blocks(), blocks());
    let driver = Driver::default();
    let object = memory.frame_object(&driver, LENGTH, MemoryType::Normal).unwrap();
    let _watcher = machine.bind(Cpu(2));
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(SHARED, LENGTH)).unwrap();
    // A private mapping is shown whole when it is made. No access maps these frames.
    driver.set(&[0, 512].map(|page| (page, new[0].first, new[0].count)));
    map(&space, &object, &fixed(PRIVATE, LENGTH)).unwrap();
    space.enter();
    let (machine, memory, driver) = (machine.clone(), &memory, &driver);
    let children = Mutex::default();
    let world = World { machine: machine.clone(), memory, driver, object, new, space, children };
    for (blocks, stamp) in [(&new, NEW), (&old, OLD)] {
        world.object.revoke(0, LENGTH).unwrap();
        show(driver, blocks);
        PROBES.iter().for_each(|page| world.store(SHARED + page * PAGE_SIZE, stamp | page));
    }
    COPIED.iter().for_each(|page| world.store(PRIVATE + page * PAGE_SIZE, COPY | page));
    let child = world.space.fork().unwrap();
    child.enter();
    for page in PROBES {
        child.fault(VirtAddr(SHARED + page * PAGE_SIZE), Access::Read).unwrap();
        for at in [SHARED, PRIVATE].map(|base| base + page * PAGE_SIZE) {
            assert!(world.load(&child, at).is_some() && world.load(&world.space, at).is_some());
        }
    }
    world.children.lock().unwrap().push(child);
    let revokes = |call: &Call<A>| call.name.starts_with("revoke");
    let stops = Arc::new(Stops::default());
    let act = |role, cpu, hold_at, call: &Call<A>| {
        let done = machine.on_cpu(Cpu(cpu), || stops.act(role, hold_at, || (call.call)(&world)));
        done.unwrap_or_else(|| panic!("{} panicked", call.name))
    };
    println!("{}, and {} meanwhile, at {hold_at:?}", held.name, other.name);
    let phase = thread::scope(|scope| {
        let _releases = Releases(&stops);
        let first = scope.spawn(|| act(Role::Held, 0, hold_at, held));
        let phase = (stops.wait_for(Role::Held) == Phase::Held).then(|| {
            let second = scope.spawn(|| act(Role::Meanwhile, 1, HoldAt::Nowhere, other));
            let phase = stops.wait_for(Role::Meanwhile);
            if phase == Phase::Finished && second.join().unwrap() && revokes(other) {
                world.shows_nothing_old("the revoke has returned");
            }
            phase
        });
        stops.release(Role::Held);
        first.join().unwrap();
        phase
    });
    if phase.is_some() {
        world.shows_nothing_old("both are over");
        verify(&world);
        if !held.loses && !other.loses {
            // A protection may hide the copies.
            world.space.mprotect(VirtAddr(PRIVATE), LENGTH, READ_WRITE).unwrap_or(());
            world.has_copies();
        }
        verify(&world);
    }
    let World { space, children, object, .. } = world;
    drop((space, children, object));
    for block in new.into_iter().chain(old) {
        // SAFETY: 1. the block was allocated above; 2. no program is left.
        assert!(unsafe { memory.free_frames(block) }, "{block:?} is counted as mapped");
    }
    phase
}

fn verify<A: Walk>(world: &World<'_, A>) {
    let children = world.children.lock().unwrap();
    let spaces: Vec<_> = children.iter().chain([&world.space]).collect();
    world.machine.assert_clean();
    let mut scratch = vec![0; check::scratch_words(world.memory)];
    check::check(world.memory, &spaces, &mut scratch).unwrap_or_else(|broken| panic!("{broken}"));
}

/// Each revoke is held at each of its steps while every call runs, and each call is held while
/// every revoke runs.
fn meet<A: Walk>() {
    let calls = calls::<A>();
    for (number, first) in calls.iter().enumerate() {
        let others = calls.iter().enumerate();
        for (_, second) in others.filter(|(other, _)| number < REVOKES || *other < REVOKES) {
            for step in 0.. {
                if run(first, second, HoldAt::Number(step)).is_none() {
                    assert!(step > 0, "{} was never held", first.name);
                    break;
                }
            }
        }
    }
}

#[test]
fn on_x86_64() {
    meet::<X86_64<4>>();
}

#[test]
fn on_aarch64() {
    meet::<AArch64>();
}

#[test]
fn on_riscv64() {
    meet::<Riscv64<3>>();
}
