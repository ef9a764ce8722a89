//! Kernel mappings: `vmalloc`, `vmap`, `ioremap`, and their purges.

mod bad_input;
mod calls;
mod counts;
mod exhausted;
mod invariants;
mod out_of_memory;
mod properties;
mod races;
mod vmalloc_cases;
