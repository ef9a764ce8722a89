//! Userfaults (`userfaultfd(2)`): faults in a registered range wait until a program has served
//! them.
//!
//! A [`Userfault`] is a userfaultfd without the descriptor: a queue of messages that belongs to one
//! address space. Registered VMAs refer to it. `space::userfault` contains the calls; this module
//! contains the queue.
//!
//! ```text
//! fault: VMA locked     | queue a message | look again | unlock | park ...       | come again
//! handler                                                 read | COPY, wake ----^
//! ```
//!
//! 1. *A waiting thread holds no lock.* It queues its message with the VMA locked for reading, and
//!    parks after it has unlocked the VMA.
//! 2. *No wake-up is lost.* The thread reads the entry again after it has queued its message.
//!    Without this second check, the following could happen:
//!    1. CPU A finds the entry empty.
//!    2. CPU B fills the page and finds no waiting thread to wake.
//!    3. CPU A queues its message and waits forever.
//! 3. *A message lies in memory of the waiting thread*, on its stack or in a slab; the message of a
//!    polled wait ([`PolledMessage`], [`PolledEvent`]) lies in a slab. A thread that wakes another
//!    first removes that thread's message from the queue, and does not use it afterwards.
//!
//! A state lives while a handle, a VMA, a waiting thread or a queued fork refers to it. When the
//! handle is dropped, the userfaultfd is *closed*: all waiting threads are woken, and its VMAs
//! count as not registered.

mod built;
mod features;
mod handle;
#[cfg(all(test, any(loom, shuttle)))]
mod loom_model;
mod message;
mod notice;
mod polled;
mod queue;
mod state;

pub(crate) use built::Built;
pub use features::{UserfaultFeatures, UserfaultModes, UserfaultScope};
pub use handle::{Userfault, WaitingFaults};
pub use message::{UserfaultFault, UserfaultKind, UserfaultMessage};
pub(crate) use notice::Notices;
pub(crate) use polled::{PolledEvent, PolledMessage};
pub use queue::ForkIsNext;
pub(crate) use queue::{Ending, QueuedMessage};
pub(crate) use state::{QueuedFault, UserfaultState, WaitSignals, release};
