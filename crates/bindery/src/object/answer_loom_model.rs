//! Reads that a wait follows, under loom: the words of [`super::answer`] and the wait of
//! [`super::polled_wait`], while a pager answers concurrently.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p bindery --release --lib answer_loom_model`.
//!
//! The bytes that the pager fills, the page index and the record of the read are loom cells. Each
//! access to a word of the record reads the record's cell, and the thread that frees the record
//! writes it. So loom reports an access to a freed record as a race and a lost wake-up as a
//! deadlock. The last tests each leave out one rule ([`Omit`]) and must fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool as Flag, Ordering::Relaxed};

use crate::sync::completions::Completions;
use crate::sync::model::cell::UnsafeCell;
use crate::sync::model::sync::atomic::{AtomicU32, Ordering};
use crate::sync::model::{self, thread};
use crate::sync::parking::Parking;
use crate::sync::parking::model::{SecondLook, Sleepers};

use super::answer::{Answer, Settled, TransferEnd};

/// The rule that a model leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Omit {
    Nothing,
    /// An answer wakes threads.
    NoteAtAnswer,
    /// The end of a settlement wakes threads.
    NoteAfterSettlement,
    /// A wait counts itself before its first check.
    Enter,
    /// A wait reads the word before it checks the read.
    WordBeforeLook,
    /// A wait is a holder of the record.
    Follow,
    /// Reclaim wakes threads after it has put an answer back.
    NoteAfterPutBack,
}

struct World {
    omit: Omit,
    answer: Answer<AtomicU32>,
    end: TransferEnd<AtomicU32>,
    /// 1 while the memory has the answer.
    answers: AtomicU32,
    completions: Completions<AtomicU32>,
    sleepers: Sleepers,
    record: UnsafeCell<u32>,
    bytes: UnsafeCell<u32>,
    index: UnsafeCell<u32>,
}

// SAFETY: the model tracks each access to the cells and reports races.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

impl World {
    fn new(omit: Omit) -> Self {
        let end = TransferEnd::of_words(AtomicU32::new);
        if omit != Omit::Follow {
            end.follow();
        }
        Self {
            omit,
            answer: Answer::of_words(AtomicU32::new),
            end,
            answers: AtomicU32::new(0),
            completions: Completions::of_words(AtomicU32::new),
            sleepers: Sleepers::new(SecondLook::Taken),
            record: UnsafeCell::new(0),
            bytes: UnsafeCell::new(0),
            index: UnsafeCell::new(0),
        }
    }

    /// An access to a word of the record.
    fn record<R>(&self, access: impl FnOnce() -> R) -> R {
        // SAFETY: as for `Sync`.
        self.record.with(|record| assert_eq!(unsafe { record.read() }, 0, "freed"));
        access()
    }

    /// The pager fills the folios and answers.
    fn supply(&self) {
        // SAFETY: as for `Sync`.
        self.bytes.with_mut(|bytes| unsafe { bytes.write(7) });
        self.record(|| self.answer.give(Ok(())));
        self.answers.swap(1, Ordering::AcqRel);
        if self.omit != Omit::NoteAtAnswer {
            self.completions.note(&self.sleepers);
        }
    }

    /// `settle_answered`.
    fn settle(&self) {
        if self.answers.load(Ordering::Relaxed) == 0 || self.answers.swap(0, Ordering::Acquire) == 0
        {
            return;
        }
        assert_eq!(self.record(|| self.answer.get()), Some(Ok(())));
        // SAFETY: as for `Sync`.
        let bytes = self.bytes.with_mut(|bytes| unsafe { bytes.read() });
        // SAFETY: as for `Sync`.
        self.index.with_mut(|index| unsafe { index.write(bytes) });
        self.record(|| self.end.settle(Settled::Answered));
        self.leave();
        if self.omit != Omit::NoteAfterSettlement {
            self.completions.note(&self.sleepers);
        }
    }

    /// `drop_answered` for a read that a wait follows.
    fn put_back(&self) {
        if self.answers.swap(0, Ordering::Acquire) == 0 {
            return;
        }
        self.answers.swap(1, Ordering::AcqRel);
        if self.omit != Omit::NoteAfterPutBack {
            self.completions.note(&self.sleepers);
        }
    }

    fn leave(&self) {
        if self.end.leave() {
            // SAFETY: as for `Sync`.
            self.record.with_mut(|record| unsafe { record.write(1) });
        }
    }

    /// Polls until the read is settled; sleeps between polls.
    fn wait(&self) {
        if self.omit != Omit::Enter {
            self.completions.enter();
        }
        loop {
            let before = self.completions.word();
            self.settle();
            if self.record(|| self.end.settled()).is_some() {
                break;
            }
            let after = self.completions.word();
            let (word, seen) = if self.omit == Omit::WordBeforeLook { after } else { before };
            Parking::park(&self.sleepers, word, seen);
        }
        // SAFETY: as for `Sync`.
        assert_eq!(self.index.with(|index| unsafe { index.read() }), 7);
        if self.omit != Omit::Enter {
            self.completions.leave();
        }
        if self.omit != Omit::Follow {
            self.leave();
        }
    }
}

fn check(omit: Omit, scenario: impl Fn(&Arc<World>) + Send + Sync + 'static) -> bool {
    let slept = Arc::new(Flag::new(false));
    let seen = Arc::clone(&slept);
    model::check(Some(3), move || {
        let world = Arc::new(World::new(omit));
        scenario(&world);
        slept.fetch_or(world.sleepers.sleeps.load(Relaxed) > 0, Relaxed);
    });
    seen.load(Relaxed)
}

fn spawn(world: &Arc<World>, work: impl FnOnce(&World) + Send + 'static) -> thread::JoinHandle<()> {
    let world = Arc::clone(world);
    thread::spawn(move || work(&world))
}

/// A wait concurrent with the answer.
fn wait_beside_answer(omit: Omit) {
    let slept = check(omit, |world| {
        let pager = spawn(world, World::supply);
        world.wait();
        pager.join().unwrap();
    });
    assert!(slept, "no wait slept");
}

/// A wait concurrent with the answer and with another thread that settles the read.
fn wait_beside_settlement(omit: Omit) {
    let slept = check(omit, |world| {
        let other = spawn(world, |world| {
            world.supply();
            world.settle();
        });
        world.wait();
        other.join().unwrap();
    });
    assert!(slept, "no wait slept");
}

/// A wait concurrent with the answer, which reclaim removes and puts back.
fn wait_beside_reclaim(omit: Omit) {
    let slept = check(omit, |world| {
        let other = spawn(world, |world| {
            world.supply();
            world.put_back();
        });
        world.wait();
        other.join().unwrap();
    });
    assert!(slept, "no wait slept");
}

#[test]
fn an_answer_put_back_ends_the_wait() {
    wait_beside_reclaim(Omit::Nothing);
}

#[test]
#[should_panic(expected = "deadlock")]
fn an_unnoted_put_back_loses_a_wait() {
    wait_beside_reclaim(Omit::NoteAfterPutBack);
}

#[test]
fn a_wait_is_over_after_the_answer() {
    wait_beside_answer(Omit::Nothing);
}

#[test]
fn a_wait_is_over_after_a_settlement_elsewhere() {
    wait_beside_settlement(Omit::Nothing);
}

#[test]
fn a_dropped_wait_leaves_the_record_behind() {
    check(Omit::Nothing, |world| {
        let other = spawn(world, |world| {
            world.supply();
            world.settle();
        });
        world.leave();
        other.join().unwrap();
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn an_unnoted_answer_loses_a_wait() {
    wait_beside_answer(Omit::NoteAtAnswer);
}

#[test]
#[should_panic(expected = "deadlock")]
fn an_unnoted_settlement_loses_a_wait() {
    wait_beside_settlement(Omit::NoteAfterSettlement);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_counting_itself_a_wait_sleeps_on() {
    wait_beside_answer(Omit::Enter);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "deadlock")]
fn a_word_read_late_loses_a_wait() {
    wait_beside_answer(Omit::WordBeforeLook);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn a_wait_without_holder_reads_freed_memory() {
    wait_beside_settlement(Omit::Follow);
}
