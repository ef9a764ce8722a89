//! Requests of lower layers to higher ones: each lower layer has a trait for them, and one type
//! here implements all three.

use core::sync::atomic::{AtomicU32, Ordering};

use bindery::addr::VirtAddr;
use bindery::{Access, FaultError};

use crate::arch;
use crate::files::{self, poll};
use crate::platform::{self, Threads};
use crate::process::{self, background, parking, scheduler, signal};
use crate::sync::{self, Parking};
use crate::user::{self, Faults};

/// The kernel in the form that its lower layers need.
struct Kernel;

/// Registers the kernel with the lower layers.
pub fn begin() {
    sync::set_parking(&Kernel);
    platform::set_threads(&Kernel);
    user::set_faults(&Kernel);
}

impl Parking for Kernel {
    fn park(&self, word: &AtomicU32, expected: u32) {
        // A thread that is about to end must not wait for a silent device. The failed request
        // changes the word.
        if self.fatal_signal() {
            files::give_up_silent(self.thread());
        }
        parking::park(word, expected);
    }

    fn unpark(&self, word: *const AtomicU32) {
        parking::unpark(word);
    }
}

impl Threads for Kernel {
    fn park_for_handler(&self, word: &AtomicU32, expected: u32) {
        // The thread may have been killed since the core asked, when it held no lock: its killer
        // has found it awake. With the kernel's lock, no kill comes in between.
        if !self.fatal_signal() {
            parking::park_for_handler(word, expected);
        }
    }

    fn yield_if_due(&self) {
        scheduler::yield_if_due();
    }

    fn fatal_signal(&self) -> bool {
        scheduler::is_in_thread() && signal::is_fatal_waiting(&scheduler::current())
    }

    fn signal(&self) -> bool {
        scheduler::is_in_thread() && signal::is_waiting(&scheduler::current())
    }

    fn thread(&self) -> u32 {
        if scheduler::is_in_thread() { scheduler::current().id() } else { 0 }
    }

    fn major_fault(&self) {
        scheduler::current().major_faults.fetch_add(1, Ordering::Relaxed);
    }

    fn userfault_arrived(&self) {
        poll::changed();
    }

    fn collect_memory(&self) {
        process::free_kept();
    }

    fn collect_memory_later(&self) {
        background::collect();
    }
}

impl Faults for Kernel {
    fn resolve(&self, at: VirtAddr, access: Access) -> Result<(), FaultError> {
        let rights = arch::key_rights();
        scheduler::with_space(|space| space.fault_for_kernel(at, access, rights).map(drop))
    }

    fn make_room(&self) -> bool {
        process::memory_ran_out()
    }
}
