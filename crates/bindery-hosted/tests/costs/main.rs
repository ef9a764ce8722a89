//! Work, counted: entries, tables, invalidations, steps.

#[macro_use]
extern crate bindery_scenarios as support;

mod copy_on_write;
mod counts;
mod faults;
mod forks;
mod large_folio_effort;
mod locked_memory;
mod nothing_there;
mod reuse;
mod scale;
mod sections;
mod shared_anonymous;
mod stack;
mod userfaults;
