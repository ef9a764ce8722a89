//! Several CPUs at once, under the strict TLB.

#[macro_use]
extern crate bindery_scenarios as support;

mod accessed_dirty;
mod counts;
mod cpus;
mod deferred;
mod everything_at_once;
mod moves_in_parts;
mod priorities;
mod read_sections;
mod references;
mod shared_swap;
mod step_in;
mod swap_soak;
mod threads;
