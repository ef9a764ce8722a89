//! Kernel mappings: `vmalloc`, `vmap`, `ioremap`, and their purges.

#[macro_use]
extern crate bindery_scenarios as support;

mod bad_input;
mod calls;
mod counts;
mod exhausted;
mod invariants;
mod out_of_memory;
mod properties;
mod races;
mod vmalloc_cases;
