//! Three calls meet: the first is held at a step, the second at a step of its own, and the third
//! runs to its end or waits. Then all continue.
//!
//! ```text
//! FROM   32 pages   anonymous, registered; each holds its number; 8 to 15 are being written to the
//!                   device, 16 to 23 are in compressed swap, and a child has all of them
//! TO     32 pages   anonymous, registered, empty
//! NONE   16 pages   PROT_NONE, registered, empty
//! NAMED  16 pages   PROT_NONE, shared, registered for minor faults; the object has all pages
//! ```
//!
//! At the end the auditor finds nothing, no page of `PROT_NONE` is accessible, and each page of
//! `FROM` holds its number, there or at its place in `TO`.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Access, Accounting, AddressSpace, Advice, FileAccess, FillMode, MapObject, MapRequest, Memory,
    MoveMode, Protection, Sealing, Sharing, SwapArea, Userfault, UserfaultFeatures, UserfaultModes,
    UserfaultScope, check,
};
use bindery_hosted::{AccessKind, Machine, Walk};

use super::late_device::LateDevice;
use super::stepped::{Readers, Stepped, stepped};
use super::stops::{HoldAt, Phase, Role, Stops};
use crate::support::kernel::Finished;
use crate::support::{GIB, MIB, fixed, options};

const FROM: u64 = GIB;
const TO: u64 = GIB + 2 * MIB;
const NONE: u64 = GIB + 4 * MIB;
const NAMED: u64 = GIB + 6 * MIB;
const PAGES: u64 = 32;
const FEW: u64 = 16;
const LENGTH: u64 = PAGES * PAGE_SIZE;
const FEW_LENGTH: u64 = FEW * PAGE_SIZE;
/// Slots of the area in compressed memory.
const SLOTS: u64 = 512;
/// The approximate number of steps of a call at which the subset holds it.
const ENOUGH_STEPS: u32 = 12;

type Space<'m, A> = AddressSpace<'m, Stepped<A>>;

struct World<'m, A: Walk> {
    memory: &'m Memory<Stepped<A>>,
    device: &'m LateDevice,
    fd: Userfault<'m, Stepped<A>>,
    space: Space<'m, A>,
    children: Mutex<Vec<Space<'m, A>>>,
    /// The area in compressed memory and the device's area.
    areas: [SwapArea; 2],
}

fn at(base: u64, page: u64) -> VirtAddr {
    VirtAddr(base + page * PAGE_SIZE)
}

fn content(page: u64) -> u64 {
    0xc0de_0000 + page
}

impl<'m, A: Walk> World<'m, A> {
    fn new(memory: &'m Memory<Stepped<A>>, device: &'static LateDevice) -> Self {
        let space = AddressSpace::new(memory, options()).unwrap();
        let features = UserfaultFeatures::SIGBUS;
        let fd = space.userfault(features, UserfaultScope::All).unwrap();
        space.mmap(&fixed(FROM, LENGTH)).unwrap();
        space.mmap(&fixed(TO, LENGTH)).unwrap();
        let nothing = Protection::empty();
        space.mmap(&MapRequest { protection: nothing, ..fixed(NONE, FEW_LENGTH) }).unwrap();
        let object = memory.shared_memory(FEW_LENGTH, Sealing::Allowed, Accounting::PerPage);
        let object = object.unwrap();
        for page in 0..FEW {
            object.write(page * PAGE_SIZE, &content(page).to_ne_bytes()).unwrap();
        }
        let named = MapRequest {
            protection: nothing,
            sharing: Sharing::Shared,
            ..fixed(NAMED, FEW_LENGTH)
        };
        let access = FileAccess::READ | FileAccess::WRITE;
        let file = MapObject { object: &object, offset: 0, access };
        space.mmap_object(&named, &file).unwrap();
        for page in 0..PAGES {
            space.write_user(at(FROM, page), &content(page).to_ne_bytes()).unwrap();
        }
        let missing = UserfaultModes::MISSING;
        let minor = UserfaultModes::MINOR;
        for (start, length, modes) in [
            (FROM, LENGTH, missing),
            (TO, LENGTH, missing),
            (NONE, FEW_LENGTH, missing),
            (NAMED, FEW_LENGTH, minor),
        ] {
            space.register_userfault(&fd, VirtAddr(start), length, modes).unwrap();
        }
        let compressed = memory.swap_on(SLOTS, 2).unwrap();
        let out = |first| space.madvise(at(FROM, first), 8 * PAGE_SIZE, Advice::PageOut);
        out(16).unwrap();
        memory.stop_swapping_to(&compressed);
        let late = memory.swap_on_device(device, 1).unwrap();
        out(8).unwrap();
        memory.resume_swapping_to(&compressed);
        let child = space.fork().unwrap();
        // These pages are private to the space again; only such pages can be moved.
        for page in (0..8).chain(24..PAGES) {
            space.fault(at(FROM, page), Access::Write).unwrap();
        }
        let areas = [compressed, late];
        Self { memory, device, fd, space, children: Mutex::new(vec![child]), areas }
    }

    fn advise(&self, base: u64, length: u64, advice: Advice) -> bool {
        self.space.madvise(VirtAddr(base), length, advice).is_ok()
    }

    fn swap_off(&self, area: &SwapArea) -> bool {
        self.memory.stop_swapping_to(area);
        let children = std::mem::take(&mut *self.children.lock().unwrap());
        let comes_back = |space: &Space<'m, A>| space.swap_in_area(area).is_ok();
        let back = comes_back(&self.space) && children.iter().all(comes_back);
        self.children.lock().unwrap().extend(children);
        let off = back && self.memory.swap_off(area).is_ok();
        if !off {
            self.memory.resume_swapping_to(area);
        }
        off
    }
}

/// A call, by its name.
struct Verb<A: Walk> {
    name: &'static str,
    call: fn(&World<'_, A>) -> bool,
}

/// All calls.
fn verbs<A: Walk>() -> Vec<Verb<A>> {
    let verb = |name, call| Verb { name, call };
    vec![
        verb("pageout", |w| w.advise(FROM, LENGTH, Advice::PageOut)),
        verb("fault", |w| {
            let touch = |page| w.space.fault(at(FROM, page), Access::Write).is_ok();
            [0, 9, 17, 31].into_iter().map(touch).fold(true, |all, one| all & one)
        }),
        // Pages 8 to 15 are under writeback, and a write fault on one of them reuses its folio.
        verb("take back", |w| w.space.fault(at(FROM, 10), Access::Write).is_ok()),
        verb("complete", |w| w.device.complete(w.memory)),
        verb("fork", |w| {
            let child = w.space.fork();
            child.map(|child| w.children.lock().unwrap().push(child)).is_ok()
        }),
        verb("exit", |w| {
            let child = w.children.lock().unwrap().pop();
            child.is_some()
        }),
        verb("MOVE", |w| {
            let mode = MoveMode::ALLOW_SOURCE_HOLES;
            let moved = [0, 24].map(|page| {
                let (to, from) = (at(TO, page), at(FROM, page));
                w.space.handler(&w.fd).move_pages(to, from, 8 * PAGE_SIZE, mode).is_ok()
            });
            moved == [true; 2]
        }),
        verb("munmap", |w| w.space.munmap(at(TO, 24), 8 * PAGE_SIZE).is_ok()),
        verb("swapoff", |w| w.swap_off(&w.areas[0])),
        verb("swapoff of the device", |w| w.swap_off(&w.areas[1])),
        verb("stop swapping", |w| {
            w.memory.stop_swapping_to(&w.areas[0]);
            true
        }),
        verb("COPY into PROT_NONE", |w| {
            let mut source = |_, bytes: &mut [u8]| {
                bytes.fill(0x99);
                Ok(())
            };
            let mode = FillMode::empty();
            w.space
                .handler(&w.fd)
                .fill_copy(VirtAddr(NONE), 8 * PAGE_SIZE, mode, &mut source)
                .is_ok()
        }),
        verb("ZEROPAGE into PROT_NONE", |w| {
            let mode = FillMode::empty();
            w.space.handler(&w.fd).fill_zeroes(at(NONE, 8), 8 * PAGE_SIZE, mode).is_ok()
        }),
        verb("CONTINUE in PROT_NONE", |w| {
            w.space
                .handler(&w.fd)
                .fill_present(VirtAddr(NAMED), FEW_LENGTH, FillMode::empty())
                .is_ok()
        }),
        verb("pageout of PROT_NONE", |w| w.advise(NONE, FEW_LENGTH, Advice::PageOut)),
        verb("reclaim", |w| w.memory.reclaim(64).scanned > 0),
    ]
}

/// The triples: the call held first, the call held second, and the call that runs.
const TRIPLES: [[&str; 3]; 9] = [
    ["pageout", "fault", "fork"],
    ["MOVE", "pageout", "munmap"],
    ["swapoff", "fork", "exit"],
    ["swapoff", "pageout", "stop swapping"],
    ["swapoff of the device", "take back", "complete"],
    ["pageout", "take back", "complete"],
    ["reclaim", "take back", "exit"],
    ["COPY into PROT_NONE", "fork", "ZEROPAGE into PROT_NONE"],
    ["COPY into PROT_NONE", "CONTINUE in PROT_NONE", "pageout of PROT_NONE"],
];

/// The results of the two held calls.
#[derive(Clone, Copy, Default)]
struct Met {
    held: [bool; 2],
    /// The number of steps that the calls passed, before they were held or in total.
    steps: [u32; 2],
}

impl Met {
    fn were_held(self) -> bool {
        self.held == [true; 2]
    }
}

fn meet<A: Walk>(calls: [&Verb<A>; 3], places: [u32; 2]) -> Met {
    let (machine, memory) = stepped::<A>(16 * MIB, Readers::Told);
    let device: &'static LateDevice = Box::leak(Box::default());
    let _watcher = machine.bind(Cpu(2));
    let world = World::new(&memory, device);
    let stops = Arc::new(Stops::default());
    let roles = [Role::Held, Role::Meanwhile, Role::Obstacle];
    let held = thread::scope(|scope| {
        let start = |number: usize, hold_at: HoldAt| {
            let (stops, machine, world, call) = (&stops, &machine, &world, calls[number].call);
            let cpu = Cpu([0, 1, 3][number]);
            scope.spawn(move || {
                machine.on_cpu(cpu, || stops.act(roles[number], hold_at, || call(world)))
            })
        };
        let mut running = vec![start(0, HoldAt::Number(places[0]))];
        let mut held = [false; 2];
        for number in 0..2 {
            held[number] = stops.wait_for(roles[number]) == Phase::Held;
            let hold_at = if number == 0 { HoldAt::Number(places[1]) } else { HoldAt::Nowhere };
            running.push(start(number + 1, hold_at));
        }
        stops.wait_for(roles[2]);
        for role in [Role::Meanwhile, Role::Held] {
            stops.release(role);
        }
        // Only the test completes requests, and calls may wait for one.
        while running.iter().any(|call| !call.is_finished()) {
            if !device.complete(&memory) {
                thread::sleep(Duration::from_micros(50));
            }
        }
        for call in running {
            assert!(call.join().unwrap().is_some(), "a call panicked");
        }
        held
    });
    while device.complete(&memory) {}
    memory.wait_for_swap_writes().unwrap();
    verify(&machine, &world, calls);
    let steps = [Role::Held, Role::Meanwhile].map(|role| stops.steps(role).1);
    Met { held, steps }
}

fn verify<A: Walk>(machine: &Machine<A>, world: &World<'_, A>, calls: [&Verb<A>; 3]) {
    let names = calls.map(|call| call.name);
    machine.assert_clean();
    let children = world.children.lock().unwrap();
    let spaces: Vec<_> = children.iter().chain([&world.space]).collect();
    for space in &spaces {
        space.enter();
        for page in (0..FEW).flat_map(|page| [at(NONE, page), at(NAMED, page)]) {
            for access in [AccessKind::Read, AccessKind::Write] {
                let translated = machine.translate(space.root(), page, access);
                assert!(translated.is_err(), "{names:?}: {page} is accessible");
            }
        }
    }
    let mut scratch = vec![0; check::scratch_words(world.memory)];
    let checked = check::check(world.memory, &spaces, &mut scratch);
    checked.unwrap_or_else(|violation| panic!("{names:?}: the auditor found: {violation}"));
    // Readers of the pages wait for the device.
    let is_unmapped = names.contains(&"munmap");
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _finished = Finished(&over);
        scope.spawn(|| {
            while !over.load(Relaxed) {
                world.device.complete(world.memory);
                thread::sleep(Duration::from_micros(20));
            }
        });
        let word = |space: &Space<'_, A>, page: VirtAddr| {
            let mut bytes = [0; 8];
            let read = space.read_user(page, &mut bytes);
            read.ok().map(|()| u64::from_ne_bytes(bytes))
        };
        let mut wrong = Vec::new();
        for space in &spaces {
            for page in 0..PAGES {
                let seen = [FROM, TO].map(|base| word(space, at(base, page)));
                let may_be_lost = is_unmapped && page >= 24;
                if !seen.contains(&Some(content(page))) && !may_be_lost {
                    wrong.push((page, seen));
                }
            }
        }
        assert!(wrong.is_empty(), "{names:?}: pages without their content: {wrong:x?}");
    });
}

fn triples_meet<A: Walk>() {
    let verbs = verbs::<A>();
    let all = std::env::var("BINDERY_STEP_IN").is_ok_and(|what| what == "all");
    for names in TRIPLES {
        let find = |name: &str| verbs.iter().find(|verb| verb.name == name).expect("a verb");
        let calls = names.map(find);
        let [first, second] = meet(calls, [u32::MAX; 2]).steps;
        let stride = |steps: u32| if all { 1 } else { (steps / ENOUGH_STEPS).max(1) };
        let mut met = 0;
        for a in (0..first).step_by(stride(first) as usize) {
            for b in (0..second).step_by(stride(second) as usize) {
                met += u32::from(meet(calls, [a, b]).were_held());
            }
        }
        println!("{}: {names:?}: {first} and {second} steps, both held {met} times", A::NAME);
        assert!(met > 0, "{names:?}: the two calls were never held together");
    }
}

#[test]
fn three_calls_lose_no_page_on_x86_64() {
    triples_meet::<X86_64<4>>();
}

#[test]
fn three_calls_lose_no_page_on_aarch64() {
    triples_meet::<AArch64>();
}

#[test]
fn three_calls_lose_no_page_on_riscv64() {
    triples_meet::<Riscv64<3>>();
}
