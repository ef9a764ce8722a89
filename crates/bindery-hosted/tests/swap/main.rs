//! Swap: swapping out and in, and the state of the slots.

#[macro_use]
extern crate bindery_scenarios as support;

mod after_fork;
mod collapse;
mod cpus;
mod device;
mod device_errors;
mod device_unlocked;
mod direct;
mod discard;
mod exhausted;
mod failures;
mod faults;
mod fixture;
mod flags;
mod interposed;
mod long_work;
mod no_access;
mod no_block;
mod no_vma_lock;
mod owners;
mod page_out;
mod parts;
mod passed_over;
mod patterns;
mod pending_calls;
mod pending_collapses;
mod pending_page_outs;
mod pending_reads;
mod pending_writes;
mod pieces;
mod read_around;
mod reclaim;
mod restored;
mod shared;
mod shared_ahead;
mod shared_device;
mod shared_failures;
mod shared_flushes;
mod shrink;
mod sizes;
mod slots;
mod swap_off;
mod try_fault;
mod unstable_pages;
mod willneed;
