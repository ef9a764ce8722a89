//! Pages that move between two addresses of one address space, concurrently with faults
//! (`UFFDIO_MOVE`).

#[macro_use]
extern crate bindery_scenarios as support;

mod contents;
mod counts;
mod errors;
mod fixture;
mod lowest;
mod properties;
mod stopped;
mod swapped;
