//! The `/proc` files of address spaces and frames.

#[macro_use]
extern crate bindery_scenarios as support;

mod clear_refs;
mod fixture;
mod host;
mod kpageflags;
mod listings;
mod maps_entries;
mod pagemap;
