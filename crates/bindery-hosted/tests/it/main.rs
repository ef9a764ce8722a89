//! All tests of the core on the hosted machine, in one program: it is linked once.
//!
//! `cargo test -p bindery-hosted --test it NAME` runs those with `NAME` in their paths: a folder
//! (`races`), a file (`oracle`, `step_in`), or a test.
//!
//! | folder | what |
//! |---|---|
//! | `space` | address spaces: what each system call does, refuses and costs, and what it leaves. |
//! | `kernel_map` | kernel mappings: `vmalloc`, `vmap`, `ioremap`, and their purges. |
//! | `swap` | swap: out, in, shared, moved, partly gone; areas and their slots. |
//! | `userfault` | userfaults: registration, faults that wait, filling, events. |
//! | `objects` | objects: files and shared memory, with and without mappings. |
//! | `move_pages` | pages that move between two places, beside faults (`UFFDIO_MOVE`) |
//! | `procfs` | what `/proc` says of address spaces and frames. |
//! | `oracle` | random sequences of memory calls, and Linux as the judge |
//! | `model` | sequences of calls, compared with a model: all of them up to a depth, and random ones. |
//! | `invariants` | every invariant, broken on purpose: the auditor or the strict TLB says which. |
//! | `costs` | work, counted: entries, tables, invalidations, steps. |
//! | `out_of_memory` | allocations fail, each in its turn: nothing is lost, and nothing leaks. |
//! | `races` | several CPUs at once, under the strict TLB. |
//! | `machine` | the hosted machine itself: its MMUs, by tables whose bits are written by hand, and its TLBs. |
//! | `support` | what the others share |

#[macro_use]
mod support;

mod costs;
mod invariants;
mod kernel_map;
mod machine;
mod model;
mod move_pages;
mod objects;
mod oracle;
mod out_of_memory;
mod procfs;
mod races;
mod space;
mod swap;
mod userfault;
