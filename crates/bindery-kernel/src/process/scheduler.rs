//! The scheduler: one run queue for all CPUs, time slices of ten milliseconds, no preemption in the
//! kernel.
//!
//! A thread sleeps in three steps, so that no wake-up is lost: it enters a queue or sets a timer,
//! checks the condition once more, and sleeps. Interrupts are off during all three. A wake-up
//! before the sleep makes the sleep return at once.

use alloc::sync::Arc;
use core::cell::UnsafeCell;
use core::ops::Deref;
use core::ptr;
use core::sync::atomic::{AtomicU32, Ordering};

use bindery::platform::MAX_CPUS;

use spin::Once;

use crate::arch;
use crate::kernel_lock;
use crate::memory::{self, Space};
use crate::time::{self, Sleeper};

use super::thread::{NO_CPU, Saved, Thread, work};
use super::{Process, cpus, ready, timer};

/// The action of [`idle`] whenever no thread is ready or runs.
static AT_REST: Once<fn()> = Once::new();

/// The length of a time slice while others wait, in nanoseconds.
const TURN: u64 = 10_000_000;

/// The number of threads that have yielded the CPU in the middle of a call of the core
/// ([`yield_if_due`]).
static YIELDED: AtomicU32 = AtomicU32::new(0);

/// The scheduler's part of a CPU's state: the running thread, and the loaded address space.
struct Running {
    thread: Option<Arc<Thread>>,
    /// The previous thread; it must not be dropped while the CPU is still on its stack.
    previous: Option<Arc<Thread>>,
    space: Option<Arc<Space>>,
    idle: arch::Context,
}

struct OfCpu(UnsafeCell<Running>);

// SAFETY: touched only by the CPU itself, in the kernel, which nothing preempts. (A switch leaves
// the CPU as it is: the next thread runs on the same one.)
unsafe impl Sync for OfCpu {}

static CPUS: [OfCpu; MAX_CPUS] = [const {
    OfCpu(UnsafeCell::new(Running {
        thread: None,
        previous: None,
        space: None,
        idle: arch::Context::EMPTY,
    }))
}; MAX_CPUS];

/// The state of the calling CPU. After a sleep the caller may run on another CPU.
#[inline]
fn of_this_cpu() -> *mut Running {
    CPUS[usize::from(arch::cpu()) % MAX_CPUS].0.get()
}

/// The running thread; null in the idle loop. Points into the [`Arc`] of [`Running`].
#[inline]
fn running() -> *const Thread {
    arch::running().cast_const().cast()
}

/// The running thread, valid until the thread yields the CPU for the last time.
pub struct Current(&'static Thread, core::marker::PhantomData<*const ()>);

impl Deref for Current {
    type Target = Thread;

    #[inline]
    fn deref(&self) -> &Thread {
        self.0
    }
}

/// The running thread.
///
/// # Panics
/// In the idle loop, which is not a thread.
#[inline]
pub fn current() -> Current {
    let thread = running();
    assert!(!thread.is_null(), "no thread runs");
    // SAFETY: `Running` holds the thread's `Arc` as long as it runs, and the caller is that
    // thread: `Current` can be sent to no other.
    Current(unsafe { &*thread }, core::marker::PhantomData)
}

/// As [`current`], but as a handle that can be stored.
pub fn current_thread() -> Arc<Thread> {
    let thread = current();
    // SAFETY: the pointer came from an `Arc` that lives (see `current`).
    unsafe {
        Arc::increment_strong_count(ptr::from_ref(thread.0));
        Arc::from_raw(ptr::from_ref(thread.0))
    }
}

/// Whether a thread runs (not the idle loop, and not the boot).
pub fn is_in_thread() -> bool {
    !running().is_null()
}

/// Panics if the unusable `address` shows that the running thread's kernel stack has overflowed.
pub fn check_stack(address: u64) {
    if is_in_thread() {
        current().check_stack(address);
    }
}

/// The number of faults of all programs so far.
pub fn page_faults() -> u64 {
    if kernel_lock::is_used() {
        return cpus::page_faults();
    }
    arch::this_cpu().page_faults.load(Ordering::Relaxed)
}

/// Counts a fault of the running program.
#[inline]
pub fn count_page_fault() {
    // The CPU's own counter, and nothing interrupts the kernel, so no atomic addition is needed.
    let count = &arch::this_cpu().page_faults;
    count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

/// Nanoseconds since the thread got a CPU; 0 for a thread that does not have a CPU.
pub(super) fn time_of_this_run(thread: &Thread) -> u64 {
    cpus::record_of(thread)
        .map_or(0, |record| time::now().saturating_sub(record.runs_since.load(Ordering::Relaxed)))
}

/// Faults of the thread since it was scheduled; 0 if it does not run.
pub(super) fn faults_of_this_run(thread: &Thread) -> u64 {
    cpus::record_of(thread).map_or(0, |record| {
        let before = record.faults_at_switch.load(Ordering::Relaxed);
        record.page_faults.load(Ordering::Relaxed) - before
    })
}

/// Whether the running thread is one of the process.
pub(super) fn is_running(process: &Process) -> bool {
    is_in_thread() && ptr::eq(Arc::as_ptr(&current().process), process)
}

/// Whether a thread of the process runs, on any CPU.
pub(super) fn runs_anywhere(process: &Process) -> bool {
    is_running(process)
        || kernel_lock::is_used()
            && process.threads().iter().any(|thread| cpus::record_of(thread).is_some())
}

/// The address space whose tables are loaded: that of the running thread.
#[inline]
pub fn with_space<T>(use_it: impl FnOnce(&Space) -> T) -> T {
    let space = arch::loaded_space().cast_const().cast::<Space>();
    assert!(!space.is_null(), "no address space is loaded");
    // SAFETY: `load` has put the address of the space there, whose `Arc` the CPU holds. It may be
    // replaced while `use_it` sleeps, but the running thread's process keeps its space for as long
    // as the thread is in a call.
    let space: &Space = unsafe { &*space };
    use_it(space)
}

impl Sleeper for Thread {
    fn wake(self: Arc<Self>) {
        wake(&self);
    }
}

/// Makes a sleeping thread ready. The caller may be in the core without the kernel's lock, and may
/// hold spin locks.
pub fn wake(thread: &Arc<Thread>) {
    if ready::push_sleeper(thread) {
        // The running thread was the only ready one; from now on it has time slices.
        if time::turn_ends().is_none() && is_in_thread() {
            time::set_turn_end(Some(time::now() + TURN));
        }
        if kernel_lock::is_used() {
            cpus::call_for(thread);
        }
    } else if kernel_lock::is_used() {
        cpus::kick(thread);
    }
}

/// Called when another CPU has interrupted this one: the running thread gets time slices if others
/// wait.
pub fn look() {
    if is_in_thread() && time::turn_ends().is_none() {
        begin_turn();
    }
}

/// Called by the timer's interrupt in a program, to mark the time slice as over. The caller then
/// calls [`time::expired`].
pub fn tick() {
    if time::end_turn() {
        current().work.fetch_or(work::RESCHEDULE, Ordering::Relaxed);
    }
}

/// Announces that the running thread is about to sleep, so that [`wake`] has an effect from here
/// on. The caller then checks the condition once more and calls [`sleep`] or [`stay_awake`].
pub fn prepare_to_sleep() {
    current().asleep.store(true, Ordering::Release);
}

/// Cancels [`prepare_to_sleep`].
pub fn stay_awake() {
    ready::keep_awake(current().0);
}

/// Yields the CPU until [`wake`].
pub fn sleep() {
    switch();
}

/// Lets the other threads run first, and the CPUs that wait for the kernel's lock. No operation in
/// the idle loop and at boot.
pub fn yield_now() {
    if !is_in_thread() {
        return;
    }
    kernel_lock::offer();
    let leaves = || kernel_lock::is_used() && !cpus::is_allowed_here(&current());
    if ready::is_any_for_this_cpu() || leaves() {
        let thread = current_thread();
        ready::push(thread);
        // For another CPU, if one idles or if this one may not run the thread.
        if kernel_lock::is_used() {
            cpus::call_for(&current());
        }
        switch();
    }
}

/// Lets other threads run first if the time slice is over. Called in the middle of long work of the
/// core. No interrupt arrives in the kernel, so due events are handled here.
///
/// # Panics
/// If the running thread is about to sleep. Checked before the time slice is over, so that each
/// call detects such a defect.
pub fn yield_if_due() {
    if !is_in_thread() {
        return;
    }
    assert!(!current().asleep.load(Ordering::Relaxed), "a thread about to sleep calls the core");
    if kernel_lock::is_wanted() {
        YIELDED.fetch_add(1, Ordering::Relaxed);
        kernel_lock::offer();
        YIELDED.fetch_sub(1, Ordering::Relaxed);
    }
    if !time::is_due() {
        return;
    }
    let is_over = time::end_turn();
    time::expired();
    if is_over {
        YIELDED.fetch_add(1, Ordering::Relaxed);
        yield_now();
        YIELDED.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The number of threads that have yielded the CPU in the middle of long work of the core. Some of
/// them may be about to free memory.
pub fn yielded() -> u32 {
    YIELDED.load(Ordering::Relaxed)
}

/// Ends the running thread, which never runs again. The last handle frees the thread. The caller
/// must hold no value that needs to be dropped.
pub fn exit() -> ! {
    current().asleep.store(true, Ordering::Release);
    switch();
    unreachable!("a thread that has ended was woken");
}

/// Reloads the tables of the running thread's process if they are not loaded, which is the case
/// after `exec`.
pub fn reload_space() {
    let space = current().process.space();
    load(Some(space));
}

/// Unloads a program's tables, so that an address space can be dropped.
pub fn unload_space() {
    load(None);
}

fn load(space: Option<Arc<Space>>) {
    // SAFETY: see `OfCpu`; the reference ends before anything else runs.
    let loaded = unsafe { &mut (*of_this_cpu()).space };
    if let (Some(new), Some(old)) = (&space, &*loaded)
        && Arc::ptr_eq(new, old)
    {
        return;
    }
    match &space {
        Some(new) => {
            new.enter();
            arch::load_root(new.root());
        }
        None => arch::unload_root(),
    }
    let pointer = space.as_ref().map_or(ptr::null(), Arc::as_ptr);
    arch::this_cpu().space.store(pointer.cast_mut().cast(), Ordering::Relaxed);
    let old = core::mem::replace(loaded, space);
    if let Some(old) = old {
        // SAFETY: loading another root has flushed all entries that are not global
        // (`arch::load_root`, `arch::unload_root`). Interrupts are off.
        unsafe { old.leave() };
    }
}

/// The idle loop of the first CPU, on its boot stack. `at_rest` is called whenever no thread is
/// ready or runs. From here on, the other CPUs run threads, too.
pub fn idle(at_rest: fn()) -> ! {
    AT_REST.call_once(|| at_rest);
    cpus::join();
    let others = arch::others().min(cpus::MOST as u32 - 1);
    if others > 0 {
        memory::announce_cpus(others as u16 + 1);
        kernel_lock::begin();
        (1..=others as u16).for_each(arch::interrupt);
    }
    run_threads()
}

/// The idle loop of another CPU, on its boot stack. It only sleeps until the first CPU has called
/// [`idle`].
pub fn run_other() -> ! {
    while !kernel_lock::is_used() || usize::from(arch::cpu()) >= cpus::MOST {
        arch::sleep();
        arch::after_sleep();
    }
    kernel_lock::lock();
    cpus::join();
    run_threads()
}

/// Runs threads, and sleeps when none is ready.
fn run_threads() -> ! {
    loop {
        if ready::is_any_for_this_cpu() {
            switch();
            continue;
        }
        if cpus::all_others_idle() && ready::is_empty() {
            AT_REST.get().inspect(|at_rest| at_rest());
        }
        let is_alone = !kernel_lock::is_used();
        cpus::count_idle_time();
        if !is_alone {
            cpus::begin_to_idle();
            // A CPU without the kernel's lock may have made a thread ready before it could see
            // that this one idles.
            if ready::is_any_for_this_cpu() {
                cpus::end_to_idle();
                cpus::end_idle_time();
                continue;
            }
            kernel_lock::unlock();
        }
        arch::sleep();
        if !is_alone {
            kernel_lock::lock();
        }
        cpus::end_idle_time();
        // While the CPU is marked as idle: it runs the threads itself that this makes ready, and
        // calls no other CPU for them.
        if arch::after_sleep() {
            time::expired();
        }
        if !is_alone {
            cpus::end_to_idle();
        }
    }
}

/// Runs the next thread. The running thread is in the queue, asleep, or at its end.
fn switch() {
    let next = ready::take();
    let cpu = of_this_cpu();
    // SAFETY: see `OfCpu`; all references here end before the switch.
    let (from, to) = unsafe {
        let running = &mut *cpu;
        if let (Some(next), Some(now)) = (&next, &running.thread)
            && Arc::ptr_eq(next, now)
        {
            begin_turn();
            return;
        }
        let previous = running.thread.take();
        let from = match &previous {
            Some(thread) => {
                save(thread);
                &raw mut (*thread.saved()).context
            }
            None => &raw mut running.idle,
        };
        if previous.is_none() && next.is_none() {
            return;
        }
        if kernel_lock::is_used() {
            note_switch(previous.as_deref(), next.as_deref());
        }
        let to = match &next {
            Some(thread) => {
                restore(thread);
                &raw const (*thread.saved()).context
            }
            None => &raw const running.idle,
        };
        let pointer = next.as_ref().map_or(ptr::null(), Arc::as_ptr);
        let record = arch::this_cpu();
        record.running.store(pointer.cast_mut().cast(), Ordering::Relaxed);
        record.runs_since.store(time::now(), Ordering::Relaxed);
        let switches = record.switches.load(Ordering::Relaxed);
        record.switches.store(switches + 1, Ordering::Relaxed);
        let faults = record.page_faults.load(Ordering::Relaxed);
        record.faults_at_switch.store(faults, Ordering::Relaxed);
        running.thread = next;
        running.previous = previous;
        (from, to)
    };
    begin_turn();
    // SAFETY: both contexts live: the one in the idle place, or in a thread that `thread` or
    // `previous` holds; interrupts are off.
    unsafe { arch::switch(from, to) };
    finish_switch();
}

/// Records a switch among several CPUs.
fn note_switch(previous: Option<&Thread>, next: Option<&Thread>) {
    if let Some(thread) = previous {
        thread.runs_on.store(NO_CPU, Ordering::Relaxed);
    }
    match next {
        Some(thread) => thread.runs_on.store(arch::cpu().into(), Ordering::Relaxed),
        // The end of a process waits for no idle CPU to give up the tables. The process still has
        // its space, or it has ended: so this handle is never the last.
        None => load(None),
    }
}

/// Completes a switch on the stack of the new thread. The previous thread may now be dropped. A new
/// thread calls it from its first instruction in the kernel (`arch::prepare`).
pub extern "C" fn finish_switch() {
    // SAFETY: see `OfCpu`.
    let previous = unsafe { (*of_this_cpu()).previous.take() };
    drop(previous);
    if is_in_thread() {
        timer::arrived();
    }
}

fn begin_turn() {
    let contended = ready::is_any_for_this_cpu();
    let has_turn = contended && is_in_thread();
    time::set_turn_end(has_turn.then(|| time::now() + TURN));
}

/// # Safety
/// 1. `thread` is the running thread, which is about to stop.
unsafe fn save(thread: &Thread) {
    thread.run_time.fetch_add(time_of_this_run(thread), Ordering::Relaxed);
    thread.faults_before.fetch_add(faults_of_this_run(thread), Ordering::Relaxed);
    let saved: *mut Saved = thread.saved();
    // SAFETY: the thread's own place (see `Thread`).
    unsafe {
        (*saved).floating_point.save();
        (*saved).thread_pointer = arch::thread_pointer();
    }
}

/// # Safety
/// 1. `thread` runs next.
unsafe fn restore(thread: &Thread) {
    let saved: *mut Saved = thread.saved();
    // A thread that ends its process no longer has memory.
    load(thread.process.try_space());
    arch::set_kernel_stack(thread.stack_top());
    // SAFETY: the thread's own place (see `Thread`).
    unsafe {
        (*saved).floating_point.restore();
        arch::set_thread_pointer((*saved).thread_pointer);
    }
}
