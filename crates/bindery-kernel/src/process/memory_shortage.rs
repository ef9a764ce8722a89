//! Who goes when memory runs out.

use alloc::sync::Arc;
use alloc::vec::Vec;

use bindery::linux::proc;

use crate::memory::kernel_map;
use crate::{log, time};

use super::{Process, all, end, scheduler, signal, thread};

/// Makes room when a fault found no memory: takes back what the kernel has unmapped, and where that
/// is nothing, ends the process that has the most. `true` where the running thread is to end
/// itself.
pub fn memory_ran_out() -> bool {
    thread::forget_spare_stacks();
    if kernel_map().freed_pages() > 0 {
        kernel_map().purge();
        return false;
    }
    let thread = scheduler::current_thread();
    if signal::must_end(&thread) {
        return true;
    }
    let living: Vec<_> =
        all().into_iter().filter(|process| process.try_space().is_some()).collect();
    // One that ends already only needs the CPU.
    let victim = living.iter().find(|process| process.state.lock().status.is_some());
    let victim = match victim.or_else(|| largest(&living)) {
        Some(victim) => victim.clone(),
        None => return true,
    };
    drop(living);
    if victim.state.lock().status.is_none() {
        let name = victim.name();
        log!("memory has run out: process {} ({}) is killed", victim.id, name.escape_ascii());
        end::kill_group(&victim);
    }
    // The victim may wait for something that the running thread holds: after a while the thread goes
    // back instead, and tries again from the beginning.
    let patience = time::now() + time::SECOND;
    while victim.try_space().is_some() && !signal::must_end(&thread) {
        if time::now() > patience {
            return true;
        }
        scheduler::yield_now();
    }
    signal::must_end(&thread)
}

/// The process with the most memory that is its own; the first process only where it is alone.
fn largest(living: &[Arc<Process>]) -> Option<&Arc<Process>> {
    let resident = |process: &&Arc<Process>| {
        let pages = process.try_space().map_or(0, |space| proc::resident(&space).total());
        (process.id != 1, pages)
    };
    living.iter().max_by_key(resident)
}
