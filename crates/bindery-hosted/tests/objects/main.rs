//! Objects: files and shared memory, with and without mappings.

#[macro_use]
extern crate bindery_scenarios as support;

mod calls;
mod coherence;
mod content_steps;
mod dirty_limits;
mod ends_of_writes;
mod file_systems;
mod files;
mod held_pager;
mod holes_in_use;
mod in_place;
mod invariants;
mod kept_reads;
mod kept_writes;
mod linux;
mod lock_waits;
mod mapped;
mod mapped_files;
mod mapped_writes;
mod out_of_memory;
mod pager_stores;
mod pager_waits;
mod pending_calls;
mod pending_collapses;
mod pending_copies;
mod pending_reads;
mod pending_removals;
mod pending_syncs;
mod pending_writes;
mod properties;
mod quotas;
mod races;
mod read_ahead;
mod read_around;
mod reclaim;
mod reclaim_races;
mod reclaim_stores;
mod refusing_pager;
mod reserving_pager;
mod rmap_walks;
mod try_fault;
mod watermarks;
mod working_sets;
mod write_back;
mod writes_that_meet;
