//! Shootdowns under loom: the code itself, with a page that one CPU unmaps while another uses it.
//!
//! Run with `scripts/loom shootdown`.
//!
//! The page's frame is a loom cell: a CPU that uses a translation reads it, and freeing it writes
//! it, so a frame freed under a translation is a race. A CPU's TLB has one entry, of root P. The
//! walker fills it while the root is loaded, also while the CPU loads another. Interrupts arrive
//! where a thread polls them. The last tests of each file leave out one rule each and must fail.
//!
//! | file | contents |
//! |---|---|
//! | `queue` | models of the queue by itself |
//! | `world` | CPUs with a TLB and a walker each, and the page |

mod queue;
mod world;

use std::sync::atomic::Ordering::Relaxed;

use loom::thread;

use crate::rule::Rule;

use world::{Machine, P, Q, explore, is_used_and_freed, page};

fn unmap(cpu: &Machine) {
    cpu.unmap(&[1]);
    cpu.stop();
}

/// Runs, uses the page, serves, uses it again.
fn run(cpu: &Machine) {
    cpu.run(P);
    cpu.touch();
    cpu.poll_interrupt();
    cpu.touch();
    cpu.stop();
}

/// As [`run`], but serves without an interrupt, as a CPU that waits does. An interrupt would order
/// the request before its handler.
fn run_and_serve(cpu: &Machine) {
    cpu.run(P);
    cpu.touch();
    cpu.here().serve();
    cpu.touch();
    cpu.stop();
}

fn run_then_run_another(cpu: &Machine) {
    cpu.run(P);
    cpu.run(Q);
    cpu.stop();
}

fn keep_and_run_again(cpu: &Machine) {
    cpu.run(P);
    cpu.keep();
    cpu.run(P);
    cpu.touch();
    cpu.stop();
}

fn serve_while_kept(cpu: &Machine) {
    cpu.run(P);
    cpu.keep();
    cpu.here().serve();
    cpu.run(P);
    cpu.touch();
    cpu.stop();
}

/// Uses P again between two times that it keeps the tag.
fn keep_twice(cpu: &Machine) {
    cpu.run(P);
    cpu.keep();
    cpu.run(P);
    cpu.keep();
    cpu.stop();
}

fn keep_and_run_two(cpu: &Machine) {
    cpu.run(P);
    cpu.keep();
    cpu.run(P);
    cpu.run(Q);
    cpu.stop();
}

fn unmap_kernel(cpu: &Machine) {
    cpu.unmap_kernel();
    cpu.stop();
}

fn come_online_and_touch(cpu: &Machine) {
    cpu.here().offline();
    cpu.here().online();
    cpu.touch_kernel();
    cpu.stop();
}

fn touch_and_come_back(cpu: &Machine) {
    cpu.touch_kernel();
    come_online_and_touch(cpu);
}

fn run_and_invalidate(cpu: &Machine) {
    cpu.run(P);
    cpu.invalidate(&[0]);
    cpu.stop();
}

fn run_and_unmap(cpu: &Machine) {
    cpu.run(P);
    cpu.unmap(&[0, 1]);
    cpu.stop();
}

fn invalidate(cpu: &Machine) {
    cpu.invalidate(&[1]);
    cpu.stop();
}

/// A request to a CPU that goes offline, then one to the same CPU.
fn ask_twice(cpu: &Machine) {
    cpu.here().invalidate_kernel(&page());
    cpu.unmap(&[1]);
    cpu.stop();
}

fn go_offline_and_come_back(cpu: &Machine) {
    cpu.here().offline();
    cpu.here().online();
    cpu.run(P);
    cpu.touch();
    cpu.stop();
}

fn finish(cpu: &Machine) {
    cpu.world.finished.store(true, Relaxed);
    cpu.stop();
}

/// A call whose interrupts wait until a handler has made another.
fn unmap_above_a_call(cpu: &Machine) {
    cpu.handler.set(Some(|cpu| cpu.unmap(&[1])));
    cpu.invalidate(&[1]);
    finish(cpu);
}

fn invalidate_kernel(cpu: &Machine) {
    cpu.here().invalidate_kernel(&page());
    finish(cpu);
}

/// Serves only when it is interrupted.
fn run_with_interrupts(cpu: &Machine) {
    cpu.run(P);
    cpu.touch();
    while !cpu.world.finished.load(Relaxed) {
        cpu.poll_interrupt();
        thread::yield_now();
    }
    cpu.stop();
}

/// Interrupts that were sent to it while it was offline are lost.
fn come_back_with_interrupts(cpu: &Machine) {
    cpu.here().offline();
    cpu.lose_interrupts();
    cpu.here().online();
    run_with_interrupts(cpu);
}

/// Of two CPUs, only one executes a barrier, and makes the other execute one.
fn write_order_others_and_read(cpu: &Machine) {
    cpu.write_and_read(|| cpu.here().order_others());
    cpu.stop();
}

/// Serves before its accesses, between them or after them.
fn write_and_read(cpu: &Machine) {
    cpu.here().serve();
    cpu.write_and_read(|| cpu.here().serve());
    cpu.stop();
}

#[test]
fn one_barrier_orders_two_cpus() {
    explore(None, Some(3), [write_order_others_and_read, write_and_read]);
}

#[test]
fn no_frame_is_freed_under_a_translation() {
    let seen = explore(None, Some(3), [unmap, run]);
    assert!(is_used_and_freed(&seen) && seen.served.load(Relaxed));
    assert!(is_used_and_freed(&explore(None, Some(3), [unmap, run_and_serve])));
    assert!(is_used_and_freed(&explore(None, Some(3), [unmap, run_then_run_another])));
}

#[test]
fn a_kept_tag_is_flushed_before_use() {
    assert!(is_used_and_freed(&explore(None, Some(4), [unmap, keep_and_run_again])));
    assert!(is_used_and_freed(&explore(None, Some(3), [unmap, serve_while_kept])));
    assert!(is_used_and_freed(&explore(None, Some(4), [unmap, keep_twice])));
    assert!(is_used_and_freed(&explore(None, Some(3), [unmap, keep_and_run_two])));
}

#[test]
fn two_cpus_that_ask_each_other_finish() {
    let seen = explore(None, Some(2), [run_and_unmap, run_and_invalidate]);
    assert!(is_used_and_freed(&seen));
}

/// The queue has one slot here: the second request finds none and flushes everything.
#[test]
fn two_requests_to_one_cpu_are_served() {
    assert!(is_used_and_freed(&explore(None, Some(2), [unmap, run, invalidate])));
}

#[test]
fn a_request_to_an_offline_cpu_is_withdrawn() {
    assert!(is_used_and_freed(&explore(None, Some(3), [ask_twice, go_offline_and_come_back])));
}

#[test]
fn a_cpu_may_come_online_beside_a_call() {
    assert!(is_used_and_freed(&explore(None, Some(3), [unmap_kernel, come_online_and_touch])));
    assert!(is_used_and_freed(&explore(None, Some(3), [unmap_kernel, touch_and_come_back])));
}

#[test]
fn a_handler_waits_for_no_interrupt_owed_below() {
    let seen = explore(None, Some(2), [unmap_above_a_call, run_with_interrupts]);
    assert!(is_used_and_freed(&seen));
}

#[test]
fn a_cpu_back_online_serves_what_it_missed() {
    explore(None, Some(3), [invalidate_kernel, come_back_with_interrupts]);
}

// Each rule is necessary: without it, one of the models above fails.

#[test]
#[should_panic(expected = "each missed the other's word")]
fn a_barrier_without_acquire_orders_nothing() {
    explore(Some(Rule::AcquireRequest), Some(3), [write_order_others_and_read, write_and_read]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn roots_read_without_fence_miss_a_cpu() {
    explore(Some(Rule::FenceBeforeRoots), Some(3), [unmap, run]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_root_seen_without_acquire_is_early() {
    explore(Some(Rule::AcquireRoot), Some(3), [unmap, run_then_run_another]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_tag_kept_twice_needs_acquire() {
    explore(Some(Rule::AcquireKept), Some(4), [unmap, keep_twice]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_root_seen_again_needs_acquire() {
    explore(Some(Rule::AcquireAgain), Some(3), [unmap, keep_and_run_two]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn cpus_read_without_fence_are_missed() {
    explore(Some(Rule::FenceBeforeOnline), Some(3), [unmap_kernel, come_online_and_touch]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_cpu_online_without_fence_is_missed() {
    explore(Some(Rule::FenceAtOnline), Some(3), [unmap_kernel, come_online_and_touch]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_cpu_online_without_flush_uses_the_old() {
    explore(Some(Rule::FlushAtOnline), Some(3), [unmap_kernel, touch_and_come_back]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_cpu_gone_without_release_is_early() {
    explore(Some(Rule::ReleaseGone), Some(3), [unmap_kernel, touch_and_come_back]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_cpu_gone_without_acquire_is_early() {
    explore(Some(Rule::AcquireGone), Some(3), [unmap_kernel, touch_and_come_back]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_request_without_acquire_is_read_early() {
    explore(Some(Rule::AcquireRequest), Some(3), [unmap, run_and_serve]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_request_done_without_acquire_is_early() {
    explore(Some(Rule::AcquireDone), Some(3), [unmap, run]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_root_loaded_without_fence_is_missed() {
    explore(Some(Rule::FenceBeforeLoad), Some(3), [unmap, run]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_switch_without_announcement_is_missed() {
    explore(Some(Rule::AnnounceSwitch), Some(3), [unmap, run]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_root_announced_without_release_is_early() {
    explore(Some(Rule::ReleaseAfterLoad), Some(3), [unmap, run_then_run_another]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_tag_made_stale_by_a_store_runs() {
    explore(Some(Rule::ExchangeKept), Some(3), [unmap, keep_and_run_again]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_failed_exchange_spares_no_interrupt() {
    explore(Some(Rule::LookAgain), Some(4), [unmap, keep_and_run_again]);
}

#[test]
#[should_panic(expected = "used and freed")]
fn a_stale_tag_without_flush_is_used() {
    explore(Some(Rule::FlushStale), Some(3), [unmap, keep_and_run_again]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_request_served_late_leaves_the_tag() {
    explore(Some(Rule::StaleWhenServed), Some(3), [unmap, serve_while_kept]);
}

#[test]
#[should_panic(expected = "exceeded maximum number of branches")]
fn waiters_that_do_not_serve_wait_forever() {
    explore(Some(Rule::ServeWhileWaiting), Some(2), [run_and_unmap, run_and_invalidate]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_request_without_release_is_read_early() {
    explore(Some(Rule::ReleaseRequest), Some(3), [unmap, run_and_serve]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_request_done_without_release_is_early() {
    explore(Some(Rule::ReleaseDone), Some(3), [unmap, run]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_slot_reused_too_early_is_done() {
    explore(Some(Rule::TakeBack), Some(3), [ask_twice, go_offline_and_come_back]);
}

#[test]
#[should_panic(expected = "exceeded maximum number of branches")]
fn an_interrupt_owed_below_spares_none() {
    let rule = Some(Rule::SentBeforeSpared);
    explore(rule, Some(2), [unmap_above_a_call, run_with_interrupts]);
}

#[test]
#[should_panic(expected = "exceeded maximum number of branches")]
fn a_cpu_back_online_must_serve() {
    let rule = Some(Rule::ServeAtOnline);
    explore(rule, Some(3), [invalidate_kernel, come_back_with_interrupts]);
}
