//! Locks: the trait that an embedder's locks implement, the mutex of the core, and lock
//! implementations.
//!
//! | file | contents |
//! |---|---|
//! | `raw_lock` | [`RawLock`]: the lock that a [`Platform`](crate::Platform) supplies |
//! | `mutex` | [`Mutex`]: a value and the lock that guards it |
//! | `rw_lock` | the core's own reader-writer lock: one word, for VMAs, objects and anon groups |
//! | `spin_lock` | [`SpinLock`]: spins, with interrupts off if the platform provides that |
//! | `parking` | threads that sleep until a word changes |
//! | `completions` | threads that wait for work of a device or a pager |
//! | `model` | threads, locks and words of a model checker, for tests |
//! | `loom_model_threads` | the threads of a model, which share its world, for tests |
//! | `word` | an atomic word of the core library or of a model checker |
//! | `lock_api` | `LockApi04` and `LockApi05`: any lock of the `lock_api` crate |
//!
//! `docs/lock-order.md` specifies the order in which the core acquires its locks.
//!
//! A platform provides two locks. [`Platform::Mutex`](crate::Platform::Mutex) may put a waiter to
//! sleep. [`Platform::SpinLock`](crate::Platform::SpinLock) is held for a few hundred instructions:
//!
//! | the embedder has | it uses |
//! |---|---|
//! | a lock of a crate that implements `lock_api` 0.4 (`spin`, `parking_lot` 0.12) | `LockApi04<L>`, feature `lock_api_04` |
//! | a lock of a crate that implements `lock_api` 0.5 (`parking_lot` 0.13) | `LockApi05<L>`, feature `lock_api_05` |
//! | interrupts that it can turn off | [`SpinLock<I>`](SpinLock), `I` an implementation of [`Interrupts`] |
//! | no interrupts, or all kernel code runs with interrupts off | [`SpinLock`] |
//! | a lock of its own | an implementation of [`RawLock`] for it |

pub(crate) mod completions;
#[cfg(any(feature = "lock_api_04", feature = "lock_api_05"))]
mod lock_api;
#[cfg(all(test, any(loom, shuttle)))]
mod loom_model_threads;
#[cfg(all(test, any(loom, shuttle)))]
pub(crate) mod model;
mod mutex;
pub(crate) mod parking;
mod raw_lock;
pub(crate) mod rw_lock;
mod spin_lock;
#[cfg(test)]
mod tests;
pub(crate) mod word;

#[cfg(feature = "lock_api_04")]
pub use lock_api::LockApi04;
#[cfg(feature = "lock_api_05")]
pub use lock_api::LockApi05;
pub use mutex::{Mutex, MutexGuard};
pub use raw_lock::RawLock;
pub use spin_lock::{AlwaysOff, Interrupts, SpinLock};
