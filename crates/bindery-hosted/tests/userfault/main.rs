//! Userfaults: faults that wait for their handler, the pages that the handler supplies, and its
//! messages.

#[macro_use]
extern crate bindery_scenarios as support;

mod bad_input;
mod bad_moves_and_scans;
mod events;
mod fill;
mod fixture;
mod missing;
mod moves;
mod pending_calls;
mod pending_events;
mod pending_removals;
mod polled;
mod prot_none;
mod protect;
mod scan;
mod shared;
