//! Code shared by the program `bindery` and its tests: it builds a kernel and programs for a
//! machine inside QEMU, starts the machine and judges the result. It also contains the drivers of
//! random calls.
//!
//! | module | contents |
//! |---|---|
//! | [`drivers`] | random calls and random threads |
//! | [`guest`] | kernel, programs, initial file system and machine |
//! | [`measured`] | the hosted machine, with a meter in its read sections |
//! | [`size`] | sizes in bytes, as users type and read them |

#![deny(
    clippy::wildcard_enum_match_arm,
    clippy::match_wildcard_for_single_variants,
    reason = "a new variant leads by errors to each place that must decide about it"
)]

pub mod drivers;
pub mod guest;
pub mod measured;
pub mod size;
