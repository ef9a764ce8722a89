//! Address spaces: the effects, the errors and the costs of each system call.

#[macro_use]
extern crate bindery_scenarios as support;

mod advice;
mod bad_input;
mod bad_input_moves;
mod branch_targets;
mod commitment;
mod entries;
mod families;
mod forced;
mod fork_chains;
mod fork_overlaps;
mod frames;
mod frames_in_calls;
mod frames_refused;
mod frames_revoked;
mod gibibyte_frames;
mod huge_zero_page;
mod interrupted;
mod linux_errno;
mod mincore;
mod moves;
mod moves_of_several;
mod pin_limits;
mod pins;
mod prctl;
mod private_frames;
mod protection_keys;
mod reap;
mod refusal;
mod remap_file_pages;
mod scattered;
mod scene;
mod secret;
mod segments;
mod splits;
mod vm_copy;
