//! Models of the queue by itself.

use loom::sync::atomic::AtomicBool;
use loom::thread;

use super::super::queue::{Queue, Request, Ticket};
use super::world::page;
use crate::atomic::Ordering;
use crate::rule::{Rule, omit};

#[test]
fn an_interrupt_spares_only_requests_it_serves() {
    two_requests_with_interrupts(None);
}

/// Each request is served by an interrupt that was sent after it, for it or for the other.
fn two_requests_with_interrupts(rule: Option<Rule>) {
    fn ask(queue: &Queue, interrupt: &AtomicBool) -> Ticket {
        let ticket = queue.post(&Request { root: None, what: page() });
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
            let is_done = |ticket| queue.is_done(queue.awaited(ticket));
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
            let request = Request { root: None, what: page() };
            let post = move || [(); 2].map(|()| queue.post(&request));
            let poster = thread::spawn(post);
            serve(queue);
            let tickets = poster.join().unwrap();
            serve(queue);
            let is_done = |ticket| queue.is_done(queue.awaited(ticket));
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
        let request = Request { root: None, what: page() };
        let _slot = queue.post(&request);
        let first = queue.post(&request);
        assert!(queue.take().is_for_everything());
        let number = queue.full_flushes_asked();
        let second = queue.post(&request);
        let later = queue.take();
        queue.full_flush_done(queue.full_flushes_asked());
        queue.finish(later);
        queue.full_flush_done(number);
        assert!(queue.is_done(queue.awaited(first)) && queue.is_done(queue.awaited(second)));
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
