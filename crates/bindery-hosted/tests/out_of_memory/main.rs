//! Allocations fail one at a time; no data is lost, and nothing leaks.

#[macro_use]
extern crate bindery_scenarios as support;

mod calls;
mod linux_calls;
mod moves;
mod reclaim;
mod shortage;
mod tries;
