//! Optional parts for embedders of [Bindery](bindery) whose machines have many CPUs.
//!
//! [`Platform`](bindery::Platform) asks for read sections, grace periods and TLB invalidations. A
//! kernel may implement them itself; this crate has them ready, on the public API of the core. Each
//! part works without the others, allocates nothing, and executes no instruction of any
//! architecture: the embedder supplies memory with a lifetime, and hooks.
//!
//! | part | for |
//! |---|---|
//! | [`FairLock`] | `Platform::SpinLock`, in order of arrival and with interrupts off |
//! | [`ParkingTable`] | `Platform::park`, `unpark` |
//! | [`ReadSections`] | `Platform::enter_read`, `leave_read`, `synchronize`, `grace_period`, `is_over` |
//! | [`Shootdowns`] | `Platform::invalidate`, `invalidate_kernel`, `relax`; the switch of roots |
//! | [`Tags`] | ASIDs and PCIDs: translations that TLBs keep across switches of roots |
//!
//! Every ordering rule of a part has a name, `rule::Rule`, and the code names the rule where it
//! follows it. The models (`scripts/loom`) run this code in every interleaving of small scenarios.
//! For each rule, one model leaves the rule out and must fail. Three orderings have no rule, since
//! no model can show their effect: on x86-64 the entry into a read section is a locked exchange
//! where models run a store and a fence, and twice the compiler must keep an order within one CPU.
//! A test lists them, and finds each other ordering that names no rule.
//!
//! | file | contents |
//! |---|---|
//! | `atomic` | the atomics of the core library, or of the model checker |
//! | `cpu_mask` | a set of CPUs that CPUs change at the same time |
//! | `fair_lock` | [`FairLock`], [`FairLockGuard`], [`FairTicket`] |
//! | `parking` | [`ParkingTable`], [`ParkingBucket`], [`ParkedThread`], [`Scheduler`] |
//! | `read_sections` | [`ReadSections`], [`ReadCpu`] |
//! | `rule` | the ordering rules |
//! | `shootdown` | [`Shootdowns`], [`ShootdownCpu`], [`LocalTlb`] |
//! | `tags` | [`Tags`], [`Tag`], [`TagWord`], [`TagCpu`] |

#![no_std]
#![deny(missing_debug_implementations)]
#![cfg_attr(not(all(test, loom)), deny(unsafe_code, reason = "no part needs any"))]
#![deny(
    clippy::wildcard_enum_match_arm,
    clippy::match_wildcard_for_single_variants,
    reason = "a new variant leads by errors to each place that must decide about it"
)]
#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")
)]

#[cfg(test)]
extern crate std;

mod atomic;
mod cpu_mask;
mod fair_lock;
mod parking;
mod read_sections;
mod rule;
mod shootdown;
mod tags;

pub use fair_lock::{FairLock, FairLockGuard, FairTicket};
pub use parking::{ParkResult, ParkedThread, ParkingBucket, ParkingTable, Scheduler};
pub use read_sections::{ReadCpu, ReadSections};
pub use shootdown::{LocalTlb, OnCpu, ShootdownCounts, ShootdownCpu, Shootdowns, Translations};
pub use tags::{Tag, TagCpu, TagWord, Tags};
