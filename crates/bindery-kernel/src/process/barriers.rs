//! `membarrier(2)`. A context switch is a barrier of every kind. So the kernel has to record which
//! process has registered for which barriers, and to make all other CPUs execute one.

use alloc::sync::Arc;
use core::sync::atomic::{self, AtomicU32, Ordering};

use crate::errno::{Errno, Outcome};
use crate::{arch, kernel_lock};

use super::scheduler;

// The commands, by their numbers in membarrier(2), except those of restartable sequences, which the
// kernel does not support.
const QUERY: u32 = 0;
const GLOBAL: u32 = 1 << 0;
const GLOBAL_EXPEDITED: u32 = 1 << 1;
const REGISTER_GLOBAL_EXPEDITED: u32 = 1 << 2;
const PRIVATE_EXPEDITED: u32 = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: u32 = 1 << 4;
const PRIVATE_EXPEDITED_SYNC_CORE: u32 = 1 << 5;
const REGISTER_PRIVATE_EXPEDITED_SYNC_CORE: u32 = 1 << 6;
const GET_REGISTRATIONS: u32 = 1 << 9;

/// The result of `QUERY`: every supported command.
const KNOWN: u32 = GLOBAL
    | GLOBAL_EXPEDITED
    | REGISTER_GLOBAL_EXPEDITED
    | PRIVATE_EXPEDITED
    | REGISTER_PRIVATE_EXPEDITED
    | PRIVATE_EXPEDITED_SYNC_CORE
    | REGISTER_PRIVATE_EXPEDITED_SYNC_CORE
    | GET_REGISTRATIONS;

/// The barriers for which the programs of one address space have registered, stored as the
/// registering commands. All threads of the address space share them.
#[derive(Clone, Default)]
pub(super) struct Barriers(Arc<AtomicU32>);

impl Barriers {
    /// The registrations of a copy of the address space (`fork`).
    pub(super) fn duplicate(&self) -> Self {
        Self(Arc::new(AtomicU32::new(self.registered())))
    }

    fn registered(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    fn register(&self, command: u32) {
        self.0.fetch_or(command, Ordering::Relaxed);
    }

    fn is_registered(&self, command: u32) -> Result<(), Errno> {
        if self.registered() & command != 0 { Ok(()) } else { Err(Errno::EPERM) }
    }
}

/// A barrier on all CPUs. The entry to the kernel and the return from it are those of this one.
fn order_all() {
    atomic::fence(Ordering::SeqCst);
    if kernel_lock::is_used() {
        arch::order_others();
    }
}

/// `membarrier(2)`.
///
/// # Errors
/// `EINVAL` for an unknown command or flags; `EPERM` for a private expedited barrier that no
/// process with this memory has registered for.
pub(super) fn membarrier(command: u64, flags: u64) -> Outcome {
    if flags as u32 != 0 {
        return Err(Errno::EINVAL);
    }
    let barriers = scheduler::current().process.barriers.lock().clone();
    match command as u32 {
        QUERY => return Ok(u64::from(KNOWN)),
        GET_REGISTRATIONS => {
            let registered = barriers.registered();
            // As on Linux, a process that has registered for the core-serializing barrier is also
            // listed for the plain barrier, and still may not use it.
            let synchronized = registered & REGISTER_PRIVATE_EXPEDITED_SYNC_CORE != 0;
            let plain = if synchronized { REGISTER_PRIVATE_EXPEDITED } else { 0 };
            return Ok(u64::from(registered | plain));
        }
        GLOBAL | GLOBAL_EXPEDITED => order_all(),
        PRIVATE_EXPEDITED => {
            barriers.is_registered(REGISTER_PRIVATE_EXPEDITED)?;
            order_all();
        }
        PRIVATE_EXPEDITED_SYNC_CORE => {
            barriers.is_registered(REGISTER_PRIVATE_EXPEDITED_SYNC_CORE)?;
            order_all();
        }
        register @ (REGISTER_GLOBAL_EXPEDITED
        | REGISTER_PRIVATE_EXPEDITED
        | REGISTER_PRIVATE_EXPEDITED_SYNC_CORE) => barriers.register(register),
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}
