//! The property: each call of a random sequence has a result that Linux allows, the contents are
//! those of the model after each of them, and nothing is left at the end.

use std::array::from_fn;
use std::cell::OnceCell;
use std::mem::ManuallyDrop;

use bindery::{Accounting, Sealing};
use bindery_hosted::{Config, DelayedFiles};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config as Cases, RngAlgorithm, TestError, TestRng, TestRunner};

use super::action::{Provided, Span, Step, What, sequence};
use super::model::{CELL, CELLS, FIRST_PAGES, Kind, first_cell};
use super::server::Server;
use super::world::{Callers, PAGE, World};
use crate::support::kernel::rounds;
use crate::support::objects::use_object_order;
use crate::support::{MIB, audit, memory_with};

/// The number of steps between two audits.
const AUDITED: usize = 32;

/// The mappings of a sequence: memory, a private and a shared file, and shared memory.
fn first_mappings() -> [What; 5] {
    let span = |number: u64| Span::of(number * 12, 12);
    let map = |number, kind| What::Map(span(number), kind, 0, Provided::None);
    [
        map(0, Kind::Anonymous),
        map(1, Kind::Private),
        map(2, Kind::Shared(0)),
        map(3, Kind::Shared(1)),
        What::MapLarge,
    ]
}

/// Runs a sequence. If a check fails, nothing is dropped, because the drop of a handle may wait for
/// the event that is missing.
fn scenario(order: u8, steps: &[Step]) {
    let (machine, memory) = memory_with(Config { memory: 32 * MIB, ..Config::default() });
    let (machine, memory) = (ManuallyDrop::new(machine), ManuallyDrop::new(memory));
    use_object_order(&memory, order);
    let free = memory.free_frame_count();
    let files = ManuallyDrop::new(DelayedFiles::new());
    let content = (0..FIRST_PAGES * CELLS).flat_map(|cell| [first_cell(cell); CELL as usize]);
    files.files.put(1, &content.collect::<Vec<u8>>());
    let server = ManuallyDrop::new(Server::new(&memory, &files, order == 1));
    let area = memory.swap_on_device(server.device, 0).expect("a swap area");
    let callers: ManuallyDrop<Callers<'_>> = ManuallyDrop::new(from_fn(|_| OnceCell::new()));
    {
        let file = memory.file(&*files, 1, FIRST_PAGES * PAGE).unwrap();
        let shared =
            memory.shared_memory(FIRST_PAGES * PAGE, Sealing::Allowed, Accounting::PerPage);
        let objects = [file, shared.unwrap()];
        let world = World::new((&machine, &memory, area), &server, &callers, objects);
        let mut world = ManuallyDrop::new(world);
        first_mappings().into_iter().for_each(|what| world.block(0, what));
        files.keep_reads(true);
        files.keep_writes(true);
        for (number, step) in steps.iter().enumerate() {
            world.step(*step);
            world.compare_counts();
            if number % AUDITED == AUDITED - 1 {
                world.end_calls(number % (2 * AUDITED) < AUDITED);
                world.audit();
            }
        }
        world.end_calls(steps.len().is_multiple_of(2));
        world.close_handlers();
        server.be_kind();
        world.audit();
        world.assert_none_waits();
        world.read_all();
        world.audit();
        server.with(|| server.serve(), || drop(ManuallyDrop::into_inner(world)));
    }
    server.with(|| server.serve(), || drop(ManuallyDrop::into_inner(callers)));
    assert_eq!(machine.parked_threads(), 0);
    let report = audit(&machine, &memory, &[]);
    assert_eq!((report.objects, report.object_pages), (0, 0));
    server.with(|| server.serve(), || memory.swap_off(&area)).expect("slots have leaked");
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
    assert_eq!(memory.commitment().committed(), 0);
    ManuallyDrop::into_inner(server).end();
    drop(ManuallyDrop::into_inner(files));
    drop(ManuallyDrop::into_inner(memory));
    drop(ManuallyDrop::into_inner(machine));
}

fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
}

/// From the environment: `BINDERY_IN_STEPS_CASES`, the number of sequences, and
/// `BINDERY_IN_STEPS_SEED`, the first seed. Each seed has its own sequence.
#[test]
fn calls_in_steps_agree_with_the_model() {
    let count = setting("BINDERY_IN_STEPS_CASES").unwrap_or(rounds(120));
    let first = setting("BINDERY_IN_STEPS_SEED").unwrap_or(0);
    for seed in first..first + count {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        // A failed sequence leaks its machine, so that the limits of the host bound the attempts.
        let cases = Cases { failure_persistence: None, max_shrink_iters: 200, ..Cases::default() };
        let mut runner = TestRunner::new_with_rng(cases, rng);
        let tree = sequence().new_tree(&mut runner).expect("a sequence");
        let run = |(order, steps): (u8, Vec<Step>)| {
            scenario(order, &steps);
            Ok(())
        };
        match runner.run_one(tree, run) {
            Ok(_) => {}
            Err(TestError::Fail(reason, (order, steps))) => {
                let lines: Vec<_> = steps.iter().map(|step| format!("    {step:?},")).collect();
                panic!(
                    "BINDERY_IN_STEPS_SEED={seed}: {reason}, with order {order}, after\n{}",
                    lines.join("\n")
                );
            }
            Err(error) => panic!("{error}"),
        }
    }
}
