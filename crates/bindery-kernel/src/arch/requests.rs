//! Requests of one CPU to others, each of which answers before the asking CPU continues: to flush
//! their TLBs (x86-64), and to make their accesses ordered (`membarrier`).
//!
//! The asking CPU counts the request and interrupts the others. Each answers with the number of the
//! last request that it has seen, so one answer serves all requests before it. A CPU answers in its
//! interrupt handler or, with interrupts off, by [`pending`] and [`answer`] where it waits for the
//! kernel's lock or for answers of its own.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use bindery::platform::MAX_CPUS;

/// The number of CPUs besides the first that answer.
static OTHERS: AtomicU32 = AtomicU32::new(0);

/// The number of requests so far. It never wraps: a CPU that is rarely asked may be any number of
/// requests behind.
static ASKED: AtomicU64 = AtomicU64::new(0);
/// The number of the last request that each CPU has answered.
static ANSWERED: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];

/// The number of CPUs besides the first that answer.
pub fn others() -> u32 {
    OTHERS.load(Ordering::Acquire)
}

/// Counts the calling CPU, whose interrupts are set up: from here on it answers.
pub fn join() {
    OTHERS.fetch_add(1, Ordering::AcqRel);
}

/// Whether CPU `own`, the caller, has a request to answer.
#[inline]
pub fn pending(own: u16) -> bool {
    ASKED.load(Ordering::Acquire) != ANSWERED[usize::from(own)].load(Ordering::Relaxed)
}

/// Does what all requests ask for, and answers them. `own` is the calling CPU.
pub fn answer(own: u16, act: impl FnOnce()) {
    // Read before the action: a request that is counted during it is not answered by it.
    let asked = ASKED.load(Ordering::Acquire);
    act();
    ANSWERED[usize::from(own)].store(asked, Ordering::Release);
}

/// Asks the CPUs for which `wanted` holds, except the caller, CPU `own`, and waits for their
/// answers. Meanwhile the caller answers requests of others by `act`.
pub fn ask(own: u16, wanted: impl Fn(u16) -> bool, interrupt: impl Fn(u16), act: fn()) {
    let cpus = || (0..=others() as u16).filter(|cpu| *cpu != own && wanted(*cpu));
    if cpus().next().is_none() {
        return;
    }
    // Orders the writes that the request is about before it.
    let number = ASKED.fetch_add(1, Ordering::AcqRel) + 1;
    cpus().for_each(&interrupt);
    for cpu in cpus() {
        let answered = &ANSWERED[usize::from(cpu)];
        while answered.load(Ordering::Acquire) < number {
            if pending(own) {
                answer(own, act);
            }
            super::pause();
        }
    }
}
