//! Drivers that call the core at random until a failure.
//!
//! | file | contents |
//! |---|---|
//! | `step` | one call or access, with all its arguments |
//! | `generate`, `rng` | random steps |
//! | `world`, `perform` | a machine with processes, files and swap, and the execution of steps |
//! | `devices` | objects of frames that are not the core's |
//! | `bystander`, `look` | a process that shares nothing; checks of the MMU's rights |
//! | `sequence` | steps on one CPU, with everything verified after each |
//! | `shrink` | a short sequence in place of a long one |
//! | `calls` | the driver on one CPU |
//! | `threads`, `trace` | the driver on several CPUs; their last steps |
//! | `panics` | panics, caught or not |
//!
//! Only the functions for an architecture are generic: the caller of a driver passes them as a
//! [`calls::Target`].

mod bystander;
pub mod calls;
mod devices;
mod generate;
mod look;
mod panics;
mod perform;
pub mod rng;
pub mod sequence;
pub mod shrink;
pub mod step;
pub mod threads;
mod trace;
mod world;

pub use world::Setup;
