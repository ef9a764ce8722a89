//! Models of the queue by itself.

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicBool;
use loom::sync::atomic::fence;
use loom::thread::{self, JoinHandle};

use super::super::queue::{Queue, Request, Ticket};
use super::world::{P, page};
use crate::atomic::Ordering;
use crate::rule::{Rule, omit};

#[test]
fn an_interrupt_spares_only_requests_it_serves() {
    two_requests_with_interrupts(None);
}

/// Each request is served by an interrupt that was sent after it, for it or for the other.
fn two_requests_with_interrupts(rule: Option<Rule>) {
    fn ask(queue: &Queue, interrupt: &AtomicBool) -> Ticket {
        let ticket = queue.post(&Request::Kernel(page()));
        if queue.is_unannounced(ticket) {
            interrupt.swap(true, Ordering::Release);
            queue.announced(ticket);
        }
        ticket
    }
    fn poll(queue: &Queue, interrupt: &AtomicBool) {
        if interrupt.swap(false, Ordering::Acquire) {
            let taken = queue.take();
            queue.full_flush_done(queue.full_flushes_asked());
            queue.finish(taken);
        }
    }
    omit::check(rule, None, || {
        omit::lend((Queue::new(), AtomicBool::new(false)), |(queue, interrupt)| {
            let cpu = thread::spawn(move || poll(queue, interrupt));
            let tickets = [(); 2].map(|()| ask(queue, interrupt));
            cpu.join().unwrap();
            poll(queue, interrupt);
            let is_done = |ticket: Ticket| queue.is_done(ticket.awaited());
            assert!(tickets.into_iter().all(is_done), "a request without an interrupt");
        });
    });
}

#[test]
fn no_request_beside_a_take_is_lost() {
    requests_beside_a_take(None);
}

/// A thread posts two requests, one of them for a flush of everything, while the CPU takes some.
fn requests_beside_a_take(rule: Option<Rule>) {
    fn serve(queue: &Queue) {
        let taken = queue.take();
        if taken.is_for_everything() {
            queue.full_flush_done(queue.full_flushes_asked());
        }
        queue.finish(taken);
    }
    omit::check(rule, None, || {
        omit::lend(Queue::new(), |queue| {
            let request = Request::Kernel(page());
            let post = move || [(); 2].map(|()| queue.post(&request));
            let poster = thread::spawn(post);
            serve(queue);
            let tickets = poster.join().unwrap();
            serve(queue);
            let is_done = |ticket: Ticket| queue.is_done(ticket.awaited());
            assert!(tickets.into_iter().all(is_done), "a request is lost");
        });
    });
}

#[test]
fn a_nested_full_flush_counts() {
    nested_full_flush(None);
}

/// An interrupt handler performs a later flush of everything inside an earlier one.
fn nested_full_flush(rule: Option<Rule>) {
    omit::check(rule, None, || {
        let queue = Queue::new();
        let request = Request::Kernel(page());
        let _slot = queue.post(&request);
        let first = queue.post(&request);
        assert!(queue.take().is_for_everything());
        let number = queue.full_flushes_asked();
        let second = queue.post(&request);
        let later = queue.take();
        queue.full_flush_done(queue.full_flushes_asked());
        queue.finish(later);
        queue.full_flush_done(number);
        assert!(queue.is_done(first.awaited()) && queue.is_done(second.awaited()));
    });
}

#[test]
#[should_panic(expected = "a request is lost")]
fn requests_taken_in_two_steps_are_lost() {
    requests_beside_a_take(Some(Rule::TakeInOneStep));
}

#[test]
#[should_panic(expected = "is_done")]
fn a_flush_number_that_falls_is_lost() {
    nested_full_flush(Some(Rule::FlushedNeverFalls));
}

#[test]
#[should_panic(expected = "a request without an interrupt")]
fn an_interrupt_handled_before_spares_none() {
    two_requests_with_interrupts(Some(Rule::SentWhilePending));
}

/// A page whose translation the CPU uses until it serves a request.
struct Page {
    queue: Queue,
    entry: AtomicBool,
    frame: UnsafeCell<u32>,
}

// SAFETY: the model runs one thread at a time, and the cell reports concurrent accesses.
unsafe impl Sync for Page {}

impl Page {
    fn use_if(&self, cached: bool) {
        if cached {
            // SAFETY: the cell reports a concurrent write.
            self.frame.with(|frame| unsafe { *frame });
        }
    }

    /// As a call that unmaps the page. It frees the page only if the request is done at once.
    fn unmap(&self) {
        self.entry.store(false, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let ticket = self.queue.post(&Request::Program(P, page()));
        if self.queue.is_done(ticket.awaited()) {
            // SAFETY: the cell reports a concurrent access.
            self.frame.with_mut(|frame| unsafe { *frame += 1 });
        }
    }

    /// As a CPU that uses the page before and after it serves its queue. A request for another root
    /// does not invalidate the translation.
    fn serve_between_uses(&self) {
        let mut cached = self.entry.load(Ordering::Relaxed);
        self.use_if(cached);
        let taken = self.queue.take();
        let mut slots = taken.slots();
        if taken.is_for_everything() {
            let number = self.queue.full_flushes_asked();
            cached = self.entry.load(Ordering::Relaxed);
            self.queue.full_flush_done(number);
        } else if slots.any(|slot| matches!(self.queue.request(slot), Request::Program(P, _))) {
            cached = self.entry.load(Ordering::Relaxed);
        }
        self.queue.finish(taken);
        self.use_if(cached);
    }
}

fn unmap_beside_uses(rule: Option<Rule>, others: fn(&'static Page) -> Option<JoinHandle<()>>) {
    omit::check(rule, Some(4), move || {
        let (entry, frame) = (AtomicBool::new(true), UnsafeCell::new(0));
        omit::lend(Page { queue: Queue::new(), entry, frame }, |page| {
            let other = others(page);
            let cpu = thread::spawn(|| page.serve_between_uses());
            page.unmap();
            cpu.join().unwrap();
            other.into_iter().for_each(|other| other.join().unwrap());
        });
    });
}

/// The slot is in use, and one flush of everything is already asked for.
fn two_flushes(page: &'static Page) -> Option<JoinHandle<()>> {
    (0..2).for_each(|_| {
        page.queue.post(&Request::Kernel(super::world::page()));
    });
    None
}

/// Another thread's request is done, and it releases the slot.
fn slot_in_turn(page: &'static Page) -> Option<JoinHandle<()>> {
    let queue = &page.queue;
    let ticket = queue.post(&Request::Kernel(super::world::page()));
    let taken = queue.take();
    Some(thread::spawn(move || {
        queue.finish(taken);
        queue.release(ticket.awaited());
    }))
}

#[test]
fn a_flush_counts_for_threads_it_saw() {
    unmap_beside_uses(None, two_flushes);
}

#[test]
fn a_slot_has_one_request_at_a_time() {
    unmap_beside_uses(None, slot_in_turn);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_flush_counted_without_acquire_is_early() {
    unmap_beside_uses(Some(Rule::AcquireAsked), two_flushes);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_flush_done_without_release_is_early() {
    unmap_beside_uses(Some(Rule::ReleaseFlushed), two_flushes);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_flush_done_without_acquire_is_early() {
    unmap_beside_uses(Some(Rule::AcquireFlushed), two_flushes);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_slot_claimed_without_acquire_is_done() {
    unmap_beside_uses(Some(Rule::AcquireSlot), slot_in_turn);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_slot_released_without_release_is_done() {
    unmap_beside_uses(Some(Rule::ReleaseSlot), slot_in_turn);
}
