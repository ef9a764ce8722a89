//! Folios under writeback, under loom: the code of [`super::requests`] and of the folio's lock
//! itself, with a device and the threads that wait for it.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p bindery --release --lib swap::loom_model`.
//!
//! The content of a frame is a loom cell. The device reads it for a write, and a thread that has
//! the folio's lock writes it. So loom reports a folio that is unlocked before the device is done
//! as a race, and a missing wake-up as a deadlock. The last tests each leave out one rule
//! ([`Omit`]) and must fail. The other tests also require that a thread slept.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool as Flag, Ordering::Relaxed};

use crate::sync::model::cell::UnsafeCell;
use crate::sync::model::sync::atomic::{AtomicU32, Ordering};
use crate::sync::model::{self, thread};

use super::device::SwapOperation;
use super::requests::Group;
use crate::addr::Frame;
use crate::folio::{begin_writeback, lock_unless_writeback, mark_held, take_from_request, unlock};
use crate::frame::meta::{FOLIO_LOCK, WRITEBACK};
use crate::sync::completions::Completions;
use crate::sync::parking::model::{SecondLook, Sleepers};

/// The rule that a model leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Omit {
    Nothing,
    /// The thread that has finished a request wakes the other threads.
    NoteAfterFinish,
    /// A completion changes the word on which threads park.
    NoteAtCompletion,
    /// The submitter counts a piece for itself.
    OwnPiece,
    /// Threads that need the lock wait for the device instead.
    WritebackBit,
    /// A task that finds the lock held by a thread marks it.
    MarkHeld,
}

struct World {
    omit: Omit,
    state: AtomicU32,
    requests: Group<AtomicU32, 2>,
    completions: Completions<AtomicU32>,
    sleepers: Sleepers,
    content: UnsafeCell<u32>,
}

// SAFETY: the model tracks each access to the cell and reports races.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

impl World {
    fn new(omit: Omit) -> Self {
        Self {
            omit,
            state: AtomicU32::new(FOLIO_LOCK),
            requests: Group::of_words(AtomicU32::new),
            completions: Completions::of_words(AtomicU32::new),
            sleepers: Sleepers::new(SecondLook::Taken),
            content: UnsafeCell::new(0),
        }
    }

    /// The first half of `send_to_device`, for a folio with one piece so far.
    fn submit(&self) -> u32 {
        let number = self.requests.take().expect("one is free");
        self.requests.begin(number, Frame(7), 0);
        if self.omit != Omit::WritebackBit {
            begin_writeback(&self.state, &self.sleepers, || ());
        }
        self.requests.add_piece(number);
        if self.omit == Omit::OwnPiece {
            self.complete(number);
        }
        number
    }

    /// The second half of `send_to_device`.
    fn submitted(&self, number: u32) {
        if self.omit != Omit::OwnPiece {
            self.complete(number);
        }
    }

    /// The device reads the frames of a piece and completes it.
    fn transfer(&self, number: u32) {
        // SAFETY: as for `Sync`.
        self.content.with(|content| unsafe { content.read() });
        self.complete(number);
    }

    fn complete(&self, number: u32) {
        self.requests.complete(number, SwapOperation::Write, false);
        if self.omit != Omit::NoteAtCompletion {
            self.completions.note(&self.sleepers);
        }
    }

    /// `Memory::finish_swap_writes`.
    fn finish(&self) {
        let done = self.requests.take_done();
        if done == 0 {
            return;
        }
        let number = done.trailing_zeros();
        assert_eq!(self.requests.head(number), Frame(7));
        take_from_request(&self.state, || ());
        unlock(&self.state, &self.sleepers, || ());
        self.requests.free(number);
        if self.omit != Omit::NoteAfterFinish {
            self.completions.note(&self.sleepers);
        }
    }

    /// A fault: `lock_folio`, a store to the page, and the unlock.
    fn fault(&self) {
        while !lock_unless_writeback(&self.state, &self.sleepers) {
            self.completions.wait(&self.sleepers, &mut || {
                self.finish();
                self.state.load(Ordering::Acquire) & WRITEBACK == 0
            });
        }
        // SAFETY: as for `Sync`.
        self.content.with_mut(|content| unsafe { content.write(content.read() + 1) });
        unlock(&self.state, &self.sleepers, || ());
    }
}

impl World {
    /// A task in the place of [`World::fault`]: `PolledSlot::poll`.
    fn task(&self) {
        self.completions.enter();
        loop {
            let (mut word, mut expected) = self.completions.word();
            self.finish();
            if self.state.fetch_or(FOLIO_LOCK, Ordering::Acquire) & FOLIO_LOCK == 0 {
                break;
            }
            if self.state.load(Ordering::Acquire) & WRITEBACK == 0 {
                let held = match self.omit {
                    Omit::MarkHeld => Some(FOLIO_LOCK),
                    _ => mark_held(&self.state),
                };
                let Some(held) = held else {
                    thread::yield_now();
                    continue;
                };
                (word, expected) = (&self.state, held);
            }
            self.sleepers.park(word, || word.load(Ordering::Acquire) == expected);
        }
        self.completions.leave();
        // SAFETY: as for `Sync`.
        self.content.with_mut(|content| unsafe { content.write(content.read() + 1) });
        unlock(&self.state, &self.sleepers, || ());
    }
}

fn check(omit: Omit, scenario: impl Fn(&Arc<World>) + Send + Sync + 'static) {
    let slept = Arc::new(Flag::new(false));
    let seen = Arc::clone(&slept);
    model::check(Some(2), move || {
        let world = Arc::new(World::new(omit));
        scenario(&world);
        assert!(world.requests.is_idle(), "a request was not freed");
        assert_eq!(world.state.load(Ordering::Acquire), 0, "the folio stays locked");
        slept.fetch_or(world.sleepers.sleeps.load(Relaxed) > 0, Relaxed);
    });
    assert!(seen.load(Relaxed), "no thread slept");
}

fn spawn(world: &Arc<World>, work: impl FnOnce(&World) + Send + 'static) -> thread::JoinHandle<()> {
    let world = Arc::clone(world);
    thread::spawn(move || work(&world))
}

/// A device completes a folio while two threads fault on it.
fn two_faults(omit: Omit) {
    check(omit, |world| {
        let number = world.submit();
        world.submitted(number);
        let device = spawn(world, move |world| world.transfer(number));
        let fault = spawn(world, World::fault);
        world.fault();
        fault.join().unwrap();
        device.join().unwrap();
    });
}

/// The fault comes first and waits for the thread that swaps the folio out.
fn a_fault_before_the_write(omit: Omit) {
    check(omit, |world| {
        let fault = spawn(world, World::fault);
        let number = world.submit();
        let device = spawn(world, move |world| world.transfer(number));
        world.submitted(number);
        fault.join().unwrap();
        device.join().unwrap();
    });
}

/// As [`a_fault_before_the_write`], for a task.
fn a_task_before_the_write(omit: Omit) {
    check(omit, |world| {
        let task = spawn(world, World::task);
        let number = world.submit();
        let device = spawn(world, move |world| world.transfer(number));
        world.submitted(number);
        task.join().unwrap();
        device.join().unwrap();
    });
}

/// A folio in two pieces; the second is submitted after the device has completed the first.
fn two_pieces(omit: Omit) {
    check(omit, |world| {
        let fault = spawn(world, World::fault);
        let number = world.submit();
        world.transfer(number);
        world.requests.add_piece(number);
        let device = spawn(world, move |world| world.transfer(number));
        world.submitted(number);
        fault.join().unwrap();
        device.join().unwrap();
    });
}

#[test]
fn two_faults_wait_for_a_device() {
    two_faults(Omit::Nothing);
}

#[test]
fn a_fault_waits_for_thread_then_device() {
    a_fault_before_the_write(Omit::Nothing);
}

#[test]
fn a_task_waits_for_thread_then_device() {
    a_task_before_the_write(Omit::Nothing);
}

#[test]
fn a_folio_is_done_with_its_last_piece() {
    two_pieces(Omit::Nothing);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_a_later_note_a_fault_sleeps_on() {
    two_faults(Omit::NoteAfterFinish);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_a_note_at_completion_nobody_wakes() {
    two_faults(Omit::NoteAtCompletion);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_bit_a_fault_sleeps_forever() {
    a_fault_before_the_write(Omit::WritebackBit);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_mark_a_task_sleeps_forever() {
    a_task_before_the_write(Omit::MarkHeld);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_its_own_piece_a_folio_ends_early() {
    two_pieces(Omit::OwnPiece);
}
