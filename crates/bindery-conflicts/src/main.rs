//! Pairs of operations of the core on two CPUs, for the plugin under `tools/conflicts`.
//!
//! `bindery bench conflicts` runs this program under QEMU and reads both outputs. Standard output
//! has one line for each fact:
//!
//! ```text
//! repetitions WARM COUNTED                    of each operation that follows
//! main ADDRESS                                where `main` of this program is
//! region NAME START END                       a piece of memory with a name
//! operation threads|processes quiet|readers NAME
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `marks` | the instructions that the plugin finds |
//! | `platform` | a machine whose CPUs share nothing |
//! | `device` | its swap device |
//! | `side` | one CPU: addresses and calls |
//! | `operations` | the operations |

#![deny(clippy::wildcard_enum_match_arm, clippy::match_wildcard_for_single_variants)]

mod device;
mod marks;
mod operations;
mod platform;
mod side;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use bindery::addr::Order;
use bindery::platform::Cpu;
use bindery::{Accounting, Memory, Object, Overcommit, Sealing, SizeMode, SpaceOptions};

use device::Copies;
use marks::{Turn, marked};
use operations::{OPERATIONS, Operation};
use platform::{Apart, FRAMES, TwoCpus};
use side::{Areas, MIB, Side, Space};

/// Warm-up repetitions, which fill caches; their figures are discarded.
const WARM: u64 = 10;
/// Repetitions whose figures are used.
const COUNTED: u64 = 50;

fn main() {
    println!("repetitions {WARM} {COUNTED}");
    println!("main {:x}", main as fn() as usize);
    let memory = memory();
    let [start, end] = memory.platform().frames();
    println!("region frames {start:x} {end:x}");
    report_region("Memory", memory);
    let object = memory.shared_memory(4 * MIB, Sealing::Allowed, Accounting::PerPage);
    let object = object.expect("the memory is new");
    let areas = areas(memory);
    for readers in [false, true] {
        platform::set_readers(readers);
        for has_own_spaces in [false, true] {
            run_all(memory, &object, &areas, has_own_spaces, readers);
        }
    }
}

/// The memory of the machine. It uses base pages unless a program requests others, as in the Linux
/// measurement.
fn memory() -> &'static Memory<TwoCpus> {
    // SAFETY: the frames are the machine's, and no other code uses them.
    let memory = unsafe { Memory::new(TwoCpus::new(), &[FRAMES]) };
    let memory: &'static _ = Box::leak(Box::new(memory.expect("288 MiB are enough")));
    for cpu in 0..2 {
        memory.cpu_online(Cpu(cpu)).expect("the memory is new");
    }
    memory.commitment().set_mode(Overcommit::Always);
    memory.folio_policy().set_global(SizeMode::Never);
    memory.folio_policy().set(Order(9), SizeMode::Madvise);
    memory
}

/// Turns swap on.
fn areas(memory: &Memory<TwoCpus>) -> Areas {
    let device = memory.swap_on_device(Copies::leaked(), 0).expect("the device has slots");
    let compressed = memory.swap_on(4096, 0).expect("memory is free for the slots");
    Areas { device, compressed }
}

/// Runs all operations, with one address space or two.
fn run_all(
    memory: &'static Memory<TwoCpus>,
    object: &Object<'static, TwoCpus>,
    areas: &Areas,
    has_own_spaces: bool,
    readers: bool,
) {
    // Both spaces are created in any case, far apart, because the address of a space determines
    // which lines it shares with its neighbors.
    let spaces = [(); 2].map(|()| {
        let space = Space::new(memory, SpaceOptions::default()).expect("memory is free");
        Box::new(Apart(space))
    });
    for space in &spaces {
        report_region("AddressSpace", &space.0);
    }
    // One CPU freed the frames of the earlier spaces. Without this call, both CPUs would allocate
    // runs that end within a line of the frame metadata.
    memory.collect();
    let sides = [0, 1].map(|number: u64| Side {
        number,
        space: &spaces[if has_own_spaces { number as usize } else { 0 }].0,
        has_own_space: has_own_spaces,
        object,
        areas,
        result: Cell::new(0),
        child: RefCell::new(None),
    });
    let steps = Apart(AtomicU64::new(0));
    let sharing = if has_own_spaces { "processes" } else { "threads" };
    let readers = if readers { "readers" } else { "quiet" };
    let operations =
        OPERATIONS.iter().filter(|operation| has_own_spaces || !operation.needs_own_spaces);
    for operation in operations.clone() {
        println!("operation {sharing} {readers} {}", operation.name);
    }
    thread::scope(|scope| {
        for side in sides {
            let (operations, steps) = (operations.clone(), &steps.0);
            scope.spawn(move || run_side(&side, operations, steps));
        }
    });
}

/// Alternates with the other side: each step of side 1 follows the same step of side 0.
fn run_side<'o>(
    side: &Side<'_>,
    operations: impl Iterator<Item = &'o Operation>,
    steps: &AtomicU64,
) {
    platform::become_cpu(side.number as u16);
    side.space.enter();
    let turn = if side.number == 0 { Turn::First } else { Turn::Second };
    let next = Cell::new(side.number);
    let step = |work: &dyn Fn()| {
        while steps.load(Ordering::Acquire) != next.get() {
            thread::yield_now();
        }
        work();
        platform::end_step();
        steps.store(next.get() + 1, Ordering::Release);
        next.set(next.get() + 2);
    };
    for operation in operations {
        step(&|| (operation.start)(side, 0));
        for number in 0..WARM + COUNTED {
            step(&|| (operation.before)(side, number));
            step(&|| marked(turn, || (operation.run)(side, number)));
            step(&|| (operation.after)(side, number));
        }
        step(&|| (operation.end)(side, 0));
    }
}

/// Prints the location of a value.
fn report_region<T>(name: &str, value: &T) {
    let start = std::ptr::from_ref(value).addr();
    println!("region {name} {start:x} {:x}", start + size_of::<T>());
}
