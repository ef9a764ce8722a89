//! A leaf of 1 GiB that one call cuts or moves while another maps, copies, or revokes it. Each call
//! is held at each of its steps while every other runs. The auditor counts the tables on deposit,
//! and the strict TLB, in which CPU 2 keeps what it has loaded, finds translations that are left.
//!
//! ```text
//! MAPPED     1 GiB   the device's frames, in one leaf
//! ELSEWHERE  1 GiB   free, congruent with them
//! ```

use std::sync::{Arc, Mutex};
use std::thread;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, MemoryType, Riscv64, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, FaultError, Inspection, Memory, Object, Protection, Remap, check,
};
use bindery_hosted::{Machine, Walk};

use super::stepped::{Readers, Stepped, stepped};
use super::stops::{HoldAt, Phase, Role, Stops};
use crate::support::devices::{DEVICE, Driver, map, shared};
use crate::support::{GIB, MIB, options};

const MAPPED: u64 = 4 * GIB;
const ELSEWHERE: u64 = 8 * GIB;
const HUGE: u64 = 2 * MIB;
const PAGES: u32 = (GIB / PAGE_SIZE) as u32;
/// The page that the calls on a part concern.
const PART: u64 = 5 * HUGE + 7 * PAGE_SIZE;
/// Pages of the leaf that CPU 2 has loaded.
const PROBES: [u64; 4] = [0, PART, 6 * HUGE, GIB - PAGE_SIZE];

struct World<'m, A: Walk> {
    machine: Machine<A>,
    memory: &'m Memory<Stepped<A>>,
    driver: &'m Driver,
    object: Object<'m, Stepped<A>>,
    space: AddressSpace<'m, Stepped<A>>,
    children: Mutex<Vec<AddressSpace<'m, Stepped<A>>>>,
}

type Call<A> = (&'static str, fn(&World<'_, A>));

fn calls<A: Walk>() -> [Call<A>; 9] {
    [
        ("revoke a page", |world| world.object.revoke(PART, PAGE_SIZE).unwrap()),
        ("revoke all", |world| {
            world.driver.set(&[(0, DEVICE.plus(PAGES), PAGES)]);
            world.object.revoke(0, GIB).unwrap();
        }),
        ("fault", |world| {
            let found = world.space.fault(VirtAddr(MAPPED + PART), Access::Write);
            let expected = [FaultError::NotMapped, FaultError::Protection];
            assert!(found.err().is_none_or(|error| expected.contains(&error)), "{found:?}");
        }),
        ("fork", |world| {
            let child = world.space.fork().unwrap();
            world.children.lock().unwrap().push(child);
        }),
        ("unmap a page", |world| {
            world.space.munmap(VirtAddr(MAPPED + PART), PAGE_SIZE).unwrap();
        }),
        ("unmap all", |world| world.space.munmap(VirtAddr(MAPPED), GIB).unwrap()),
        ("hide 2 MiB", |world| {
            let at = VirtAddr(MAPPED + 5 * HUGE);
            // Another call may have unmapped the mapping.
            _ = world.space.mprotect(at, HUGE, Protection::empty());
        }),
        ("move all", |world| {
            _ = world.space.mremap(VirtAddr(MAPPED), GIB, GIB, Remap::To(VirtAddr(ELSEWHERE)));
        }),
        ("move by 2 MiB", |world| {
            let to = Remap::To(VirtAddr(ELSEWHERE + HUGE));
            _ = world.space.mremap(VirtAddr(MAPPED), GIB, GIB, to);
        }),
    ]
}

impl<A: Walk> World<'_, A> {
    /// Loads the probes with the rights of CPU 2's TLB and the tables.
    fn probe(&self) {
        let children = self.children.lock().unwrap();
        for space in children.iter().chain([&self.space]) {
            for at in PROBES.iter().flat_map(|page| [MAPPED, ELSEWHERE].map(|base| base + page)) {
                _ = self.machine.load_user(space.root(), VirtAddr(at), |_| Err::<(), _>(()));
            }
        }
    }

    /// Verifies that no leaf maps a frame of before a revoke of all.
    fn shows_nothing_old(&self) {
        let children = self.children.lock().unwrap();
        for space in children.iter().chain([&self.space]) {
            for at in PROBES.iter().flat_map(|page| [MAPPED, ELSEWHERE].map(|base| base + page)) {
                if let Inspection::Page { frame, .. } = space.inspect(VirtAddr(at)) {
                    assert!(frame >= DEVICE.plus(PAGES), "{at:#x}: {frame:?}");
                }
            }
        }
    }

    fn verify(&self) {
        self.probe();
        self.machine.assert_clean();
        let children = self.children.lock().unwrap();
        let spaces: Vec<_> = children.iter().chain([&self.space]).collect();
        let mut scratch = vec![0; check::scratch_words(self.memory)];
        let checked = check::check(self.memory, &spaces, &mut scratch);
        checked.unwrap_or_else(|broken| panic!("{broken}"));
    }
}

/// Releases the calls at the end of the run, even after a panic.
struct Releases<'a>(&'a Stops);

impl Drop for Releases<'_> {
    fn drop(&mut self) {
        [Role::Held, Role::Meanwhile].into_iter().for_each(|role| self.0.release(role));
    }
}

/// One run: `held` at a step, with `other` in between. Whether `held` was held.
fn run<A: Walk>(held: &Call<A>, other: &Call<A>, hold_at: HoldAt) -> bool {
    let (machine, memory) = stepped::<A>(24 * MIB, Readers::Told);
    let driver = Driver::of(&[(0, DEVICE, PAGES)]);
    let object = memory.frame_object(&driver, GIB, MemoryType::Device).unwrap();
    let _watcher = machine.bind(Cpu(2));
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(MAPPED, GIB)).unwrap();
    space.enter();
    // A fault is held while the leaf is made, and every other call while it exists.
    if held.0 != "fault" {
        space.fault(VirtAddr(MAPPED), Access::Write).unwrap();
    }
    let (machine, memory, driver) = (machine.clone(), &memory, &driver);
    let world = World {
        machine: machine.clone(),
        memory,
        driver,
        object,
        space,
        children: Mutex::default(),
    };
    world.probe();
    let stops = Arc::new(Stops::default());
    let act = |role, cpu, hold_at, call: &Call<A>| {
        let done = machine.on_cpu(Cpu(cpu), || stops.act(role, hold_at, || (call.1)(&world)));
        done.unwrap_or_else(|| panic!("{} panicked", call.0));
    };
    println!("{}, and {} meanwhile, at {hold_at:?}", held.0, other.0);
    let was_held = thread::scope(|scope| {
        let _releases = Releases(&stops);
        let first = scope.spawn(|| act(Role::Held, 0, hold_at, held));
        let was_held = stops.wait_for(Role::Held) == Phase::Held;
        if was_held {
            let second = scope.spawn(|| act(Role::Meanwhile, 1, HoldAt::Nowhere, other));
            if stops.wait_for(Role::Meanwhile) == Phase::Finished {
                second.join().unwrap();
                // Any other held call may have the mutex, for which the look would wait.
                if held.0 == "fault" && other.0 == "revoke all" {
                    world.shows_nothing_old();
                }
            }
        }
        stops.release(Role::Held);
        first.join().unwrap();
        was_held
    });
    if held.0 == "revoke all" || was_held && other.0 == "revoke all" {
        world.shows_nothing_old();
    }
    world.verify();
    let World { space, children, object, .. } = world;
    drop((space, children, object));
    was_held
}

fn meet<A: Walk>() {
    for held in &calls::<A>() {
        for other in &calls::<A>() {
            let held_at = (0..).take_while(|step| run(held, other, HoldAt::Number(*step)));
            assert!(held_at.count() > 0, "{} was never held", held.0);
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
