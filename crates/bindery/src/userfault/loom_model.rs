//! The queue of a userfaultfd under loom: the code of [`super::state`] and of [`super::queue`]
//! itself, with threads that fault, change mappings, read, serve and close.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p bindery --release --lib userfault::loom_model`.
//!
//! A page is a word: 0 if it is not mapped. It is accessed with relaxed order, so that only the
//! queue orders the accesses. A missing wake-up shows as a deadlock, which loom reports. The last
//! tests each leave out one rule ([`Omit`]) and must fail. The other tests also require that a
//! thread slept and that the queue is empty in the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool as Flag, Ordering::Relaxed as Plain};
use std::vec::Vec;

use crate::sync::model::sync::atomic::AtomicU32;
use crate::sync::model::sync::atomic::Ordering::Relaxed;
use crate::sync::model::{self, thread};

use super::queue::{Ending, Forks, QueuedMessage, Waiter};
use super::{UserfaultFault, UserfaultFeatures, UserfaultKind, UserfaultScope, UserfaultState};
use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::sync::parking::model::{SecondLook, Sleepers};

/// The rule that a model leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Omit {
    Nothing,
    /// A fault checks its page again after its message is queued.
    SecondLook,
    /// A handler maps the page before it wakes the threads that wait for it.
    MapBeforeWake,
    /// A thread that queues a message checks with the lock held whether the userfaultfd is closed.
    ClosedUnderLock,
    /// A reader reads the count of messages before it checks for one.
    CountBeforeLook,
    /// A thread that queues a message wakes the waiting readers.
    Arrival,
    /// The readers are woken after the message can be read.
    ReadableBeforeArrival,
    /// A change ends before its thread continues.
    OverBeforeWake,
    /// A parking thread checks its word once more after it can be found.
    LookBeforeSleep,
}

struct World {
    omit: Omit,
    state: UserfaultState<AtomicU32>,
    sleepers: Sleepers,
    pages: [AtomicU32; 2],
}

fn range_of(page: usize) -> VirtRange {
    VirtRange::from_len(VirtAddr(page as u64 * PAGE_SIZE), PAGE_SIZE).unwrap()
}

impl World {
    fn new(omit: Omit) -> Self {
        let look = match omit {
            Omit::LookBeforeSleep => SecondLook::LeftOut,
            _ => SecondLook::Taken,
        };
        let (features, scope) = (UserfaultFeatures::empty(), UserfaultScope::All);
        Self {
            omit,
            state: UserfaultState::of_words(1, features, scope, || AtomicU32::new(0)),
            sleepers: Sleepers::new(look),
            pages: [AtomicU32::new(0), AtomicU32::new(0)],
        }
    }

    fn is_mapped(&self, page: usize) -> bool {
        self.pages[page].load(Relaxed) != 0
    }

    /// Queues a message. Returns whether it will be read.
    fn queue(&self, waiter: &Waiter<AtomicU32>) -> bool {
        // SAFETY: 1. callers keep the waiter alive until `wait` or `withdraw` has returned.
        let add = |queues: &mut super::queue::Queues<AtomicU32>| unsafe { queues.add(waiter) };
        match self.omit {
            Omit::ClosedUnderLock if self.state.is_closed() => false,
            Omit::ClosedUnderLock | Omit::Arrival => {
                self.state.with_queues(&self.sleepers, add);
                true
            }
            Omit::ReadableBeforeArrival => {
                self.state.with_queues(&self.sleepers, |queues| {
                    add(queues);
                    self.state.note_arrival(&self.sleepers);
                });
                true
            }
            // SAFETY: 1. as above.
            _ => unsafe { self.state.add(&self.sleepers, waiter) },
        }
    }

    /// Like `AddressSpace::serve_by_userfault`, until the page is mapped or the userfaultfd is
    /// closed. Returns whether the thread continued without its page.
    fn fault(&self, page: usize, is_interrupted: bool) -> bool {
        while !self.is_mapped(page) && !self.state.is_closed() {
            let address = range_of(page).start();
            let kind = UserfaultKind::Missing;
            let fault = UserfaultFault { address, kind, is_write: false, thread: 0 };
            let waiter = Waiter::of_word(QueuedMessage::Fault(fault), AtomicU32::new(0));
            if !self.queue(&waiter) {
                continue;
            }
            if self.omit != Omit::SecondLook && self.is_mapped(page) {
                self.state.withdraw(&self.sleepers, &waiter);
                continue;
            }
            if self.state.wait(&self.sleepers, &waiter, || is_interrupted) == Ending::Interrupted {
                return true;
            }
        }
        false
    }

    /// Like `Notices::deliver`, for one message.
    fn change(&self) {
        self.state.begin_change();
        let waiter = Waiter::of_word(QueuedMessage::Remove(range_of(0)), AtomicU32::new(0));
        let ending = match self.queue(&waiter) {
            true => self.state.wait(&self.sleepers, &waiter, || false),
            false => Ending::Closed,
        };
        if ending != Ending::Woken {
            self.state.end_change();
        }
        assert!(!self.state.is_changing(), "handlers have to try again for nothing");
    }

    /// Like `Userfault::read`.
    fn read(&self) -> QueuedMessage {
        loop {
            let mut seen = self.state.messages_seen();
            if self.state.is_readable()
                && let Ok(Some(content)) = self.next()
            {
                return content;
            }
            if self.omit == Omit::CountBeforeLook {
                seen = self.state.messages_seen();
            }
            self.state.await_message(&self.sleepers, seen);
        }
    }

    fn next(&self) -> Result<Option<QueuedMessage>, super::ForkIsNext> {
        if self.omit != Omit::OverBeforeWake {
            return self.state.read(&self.sleepers, Forks::Read);
        }
        let wake = |word| self.sleepers.unpark(word);
        let read =
            self.state.with_queues(&self.sleepers, |queues| queues.read(Forks::Read, || (), wake));
        self.state.end_change();
        read
    }

    /// `UFFDIO_COPY`, of which the waiting thread may not know yet.
    fn fill(&self, page: usize) {
        let map = || self.pages[page].store(1, Relaxed);
        if self.omit == Omit::MapBeforeWake {
            self.state.wake(&self.sleepers, range_of(page));
            map();
        } else {
            map();
            self.state.wake(&self.sleepers, range_of(page));
        }
    }

    /// Serves the fault of the next message.
    fn serve(&self) {
        match self.read() {
            QueuedMessage::Fault(fault) => self.fill((fault.address.0 / PAGE_SIZE) as usize),
            other => panic!("{other:?}"),
        }
    }

    fn close(&self) {
        self.state.end_all(&self.sleepers);
    }
}

type Work = fn(&World);

/// Runs each entry of `work` on its own thread, with three preemptions for two threads, and fewer
/// for more threads. Returns whether any thread slept.
fn explore<const N: usize>(omit: Omit, work: [Work; N]) -> bool {
    let slept = Arc::new(Flag::new(false));
    let seen = Arc::clone(&slept);
    model::check(Some(5 - N), move || {
        let world = Arc::new(World::new(omit));
        let spawn = |work: &Work| {
            let (world, work) = (Arc::clone(&world), *work);
            thread::spawn(move || work(&world))
        };
        let others: Vec<_> = work[1..].iter().map(spawn).collect();
        work[0](&world);
        others.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(world.state.faults(&world.sleepers).all, 0, "a message is left");
        assert!(!world.state.is_readable() && !world.state.is_changing());
        seen.fetch_or(world.sleepers.sleeps.load(Plain) > 0, Plain);
    });
    slept.load(Plain)
}

fn fault(world: &World) {
    world.fault(0, false);
}

fn fault_elsewhere(world: &World) {
    world.fault(1, false);
}

fn interrupted_fault(world: &World) {
    world.fault(0, true);
}

fn fill(world: &World) {
    world.fill(0);
}

fn read_event(world: &World) {
    assert!(matches!(world.read(), QueuedMessage::Remove(_)));
}

#[test]
fn a_fault_is_served() {
    assert!(explore(Omit::Nothing, [fault, World::serve]));
}

#[test]
fn two_faults_are_served_by_two_readers() {
    let work = [fault, fault_elsewhere, World::serve, World::serve];
    assert!(explore(Omit::Nothing, work));
}

#[test]
fn two_faults_of_a_page_wait_together() {
    assert!(explore(Omit::Nothing, [fault, fault, fill]));
}

#[test]
fn a_fault_finds_a_page_filled_early() {
    assert!(explore(Omit::Nothing, [fault, fill]));
}

#[test]
fn an_interrupted_fault_leaves_no_message() {
    explore(Omit::Nothing, [interrupted_fault, fill]);
}

#[test]
fn a_fault_beside_a_close_goes_on() {
    assert!(explore(Omit::Nothing, [fault, World::close]));
}

#[test]
fn faults_and_a_change_survive_a_close() {
    assert!(explore(Omit::Nothing, [fault, World::change, fault_elsewhere, World::close]));
}

#[test]
fn a_change_is_over_before_its_thread_continues() {
    assert!(explore(Omit::Nothing, [World::change, read_event]));
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_a_second_look_mapped_pages_are_awaited() {
    explore(Omit::SecondLook, [fault, fill]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn mapping_after_the_wake_leaves_the_fault_asleep() {
    explore(Omit::MapBeforeWake, [fault, fill]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_message_queued_after_the_close_waits_forever() {
    explore(Omit::ClosedUnderLock, [fault, World::close]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn counting_after_the_look_misses_a_message() {
    explore(Omit::CountBeforeLook, [fault, World::serve]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_message_without_a_wakeup_is_unread() {
    explore(Omit::Arrival, [fault, World::serve]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_reader_woken_early_sleeps_again() {
    explore(Omit::ReadableBeforeArrival, [fault, World::serve]);
}

#[test]
#[should_panic(expected = "try again")]
fn a_change_over_late_refuses_its_thread() {
    explore(Omit::OverBeforeWake, [World::change, read_event]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_thread_sleeping_without_a_look_is_lost() {
    explore(Omit::LookBeforeSleep, [fault, fill]);
}
