//! Writes in steps that meet other calls, and a lack of memory.

use std::ptr::NonNull;
use std::thread;

use bindery::platform::Cpu;
use bindery::{CallWait, PendingWrite, Step, testing};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::content_steps::{File, Fixture, P, PAGES, SIZE, bytes, with_file};
use crate::support::objects::PAGE;

const PAGE_BYTES: usize = PAGE as usize;

/// Runs `scenario` with clean pages that reclaim can take.
fn with_clean_pages(scenario: impl for<'m> FnOnce(&Fixture<'m>, File<'m>)) {
    with_file(|fixture, file| {
        let other = 2000 * PAGE_BYTES;
        fixture.pager.keep_reads(false);
        fixture.pager.files.put(2, &bytes(other));
        let clean = fixture.memory.file(fixture.pager, 2, other as u64).unwrap();
        assert_eq!(clean.read(0, &mut vec![0; other]), Ok(other));
        scenario(fixture, file);
    });
}

#[test]
fn lack_of_memory_after_bytes_ends_short() {
    for before in [0, 1, 2] {
        with_clean_pages(|fixture, file| {
            let in_way = |offset: u64, steps: bool| {
                if before == 0 {
                    testing::fail_one_allocation(fixture.memory, Some(0));
                }
                let copy = |done: usize, to: NonNull<u8>, length: usize| {
                    let count = length.min(PAGE_BYTES);
                    // The index already has a node for this page, so the next page's frame
                    // allocation fails.
                    if before > 0 && done / PAGE_BYTES == before {
                        testing::fail_one_allocation(fixture.memory, Some(0));
                    }
                    // SAFETY: the object owns the bytes.
                    unsafe { to.as_ptr().write_bytes(7, count) };
                    count
                };
                let moved = if steps {
                    let mut write = PendingWrite::new(&file, offset, 4 * PAGE_BYTES).unwrap();
                    assert!(matches!(write.step_with(None, copy), Ok(Step::Done)));
                    let moved = write.moved();
                    // The write is complete.
                    assert!(matches!(write.step_with(None, |_, _, _| panic!()), Ok(Step::Done)));
                    moved
                } else {
                    file.write_with(offset, 4 * PAGE_BYTES, copy).unwrap()
                };
                testing::fail_one_allocation(fixture.memory, None);
                moved
            };
            let whole = if before == 0 { 4 } else { before + 1 };
            assert_eq!(in_way(0, false), whole * PAGE_BYTES, "a blocking write");
            assert_eq!(in_way(8 * PAGE, true), whole * PAGE_BYTES, "a write in steps");
        });
    }
}

#[test]
fn bytes_written_renew_the_measures_against_shortage() {
    with_clean_pages(|fixture, file| {
        let length = PAGES as usize * PAGE_BYTES;
        let mut write = PendingWrite::new(&file, 0, length).unwrap();
        for page in 0..PAGES as usize {
            // Each page costs one round of reclaim.
            testing::fail_one_allocation(fixture.memory, Some(0));
            let mut room = PAGE_BYTES;
            let step = write.step_with(None, |_, to, length| {
                let count = length.min(room);
                room -= count;
                // SAFETY: the object owns the bytes.
                unsafe { to.as_ptr().write_bytes(1, count) };
                count
            });
            assert!(matches!(step, Ok(Step::Done)), "{step:?}");
            assert_eq!(write.moved(), (page + 1) * PAGE_BYTES);
        }
        testing::fail_one_allocation(fixture.memory, None);
    });
}

#[test]
fn concurrent_writes_are_seen_whole() {
    with_file(|fixture, file| {
        let length = 40 * PAGE_BYTES + 100;
        fixture.pager.keep_reads(false);
        for round in 0..50 {
            file.sync(0, u64::MAX).unwrap();
            file.evict(0, u64::MAX);
            thread::scope(|scope| {
                let (file, machine) = (&file, fixture.machine);
                let blocks = vec![1; length];
                scope.spawn(move || {
                    machine.on_cpu(Cpu(1), || assert_eq!(file.write(7, &blocks), Ok(length)));
                });
                let steps = vec![2; length];
                let mut write = PendingWrite::new(file, 7, length).unwrap();
                let mut last = None;
                while let Step::Blocked(wait) = write.step(last.take(), &steps).unwrap() {
                    last = Some(wait.wait());
                }
                assert_eq!(write.moved(), length);
            });
            let mut into = vec![0; length];
            assert_eq!(file.read(7, &mut into), Ok(length));
            assert!(into.iter().all(|byte| *byte == into[0]), "{round}");
        }
    });
}

/// An operation of the random test.
#[derive(Clone, Copy, Debug)]
enum Op {
    /// Begins a write at this byte, with this length.
    Begin(usize, usize),
    /// Continues one of the writes or its wait.
    Step(usize),
    /// Drops one of the writes.
    Drop(usize),
    Resize(usize),
    Evict,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..SIZE, 1..5 * PAGE_BYTES).prop_map(|(at, length)| Op::Begin(at, length)),
        8 => any::<usize>().prop_map(Op::Step),
        1 => any::<usize>().prop_map(Op::Drop),
        1 => (0..SIZE + 3 * PAGE_BYTES).prop_map(Op::Resize),
        1 => Just(Op::Evict),
    ]
}

/// A write in progress.
struct Underway<'m> {
    write: PendingWrite<'m, P>,
    wait: Option<CallWait<'m, 'm, P>>,
    at: usize,
    from: Vec<u8>,
}

impl<'m> Underway<'m> {
    /// Continues the write or its wait. Returns whether the write is complete.
    fn step(&mut self, fixture: &Fixture<'m>) -> bool {
        let ready = self.wait.take().map(|wait| fixture.somehow(wait));
        match self.write.step(ready, &self.from).unwrap() {
            Step::Blocked(wait) => {
                self.wait = Some(wait);
                assert_eq!(self.write.moved(), 0, "others see all of it or nothing");
                false
            }
            Step::Done => {
                assert_eq!(self.write.moved(), self.from.len());
                true
            }
        }
    }
}

/// Performs the operations and compares the file with a copy to which each write is applied when it
/// completes.
fn agree(fixture: &Fixture<'_>, file: &File<'_>, ops: &[Op]) {
    let mut expected = bytes(SIZE);
    let mut writes: Vec<Underway<'_>> = Vec::new();
    for (number, op) in (0_u8..).zip(ops) {
        match *op {
            Op::Begin(at, length) => {
                let write = PendingWrite::new(file, at as u64, length).unwrap();
                writes.push(Underway { write, wait: None, at, from: vec![number; length] });
            }
            Op::Step(chosen) if !writes.is_empty() => {
                let chosen = chosen % writes.len();
                if writes[chosen].step(fixture) {
                    let Underway { at, from, .. } = writes.swap_remove(chosen);
                    expected.resize(expected.len().max(at + from.len()), 0);
                    expected[at..][..from.len()].copy_from_slice(&from);
                }
            }
            Op::Drop(chosen) if !writes.is_empty() => {
                let chosen = chosen % writes.len();
                assert_eq!(writes.swap_remove(chosen).write.moved(), 0);
            }
            Op::Step(_) | Op::Drop(_) => {}
            Op::Resize(size) => {
                fixture.at_once(|| file.set_size(size as u64).unwrap());
                expected.resize(size, 0);
            }
            Op::Evict => fixture.at_once(|| {
                file.sync(0, u64::MAX).unwrap();
                file.evict(0, u64::MAX);
            }),
        }
    }
    drop(writes);
    assert_eq!(file.size(), expected.len() as u64);
    let mut into = vec![0; expected.len()];
    assert_eq!(fixture.read(file, 0, &mut into), Ok(expected.len()));
    assert!(into == expected);
}

#[test]
fn writes_in_steps_agree_with_a_copy() {
    let config = Config { cases: 60, failure_persistence: None, ..Config::default() };
    let ops = prop::collection::vec(op(), 1..120);
    let agreed = TestRunner::new_with_rng(
        config,
        proptest::test_runner::TestRng::deterministic_rng(
            proptest::test_runner::RngAlgorithm::ChaCha,
        ),
    )
    .run(&ops, |ops| {
        with_file(|fixture, file| agree(fixture, &file, &ops));
        Ok(())
    });
    if let Err(error) = agreed {
        panic!("{error}");
    }
}
