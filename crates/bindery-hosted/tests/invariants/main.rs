//! Every invariant, broken on purpose: the auditor or the strict TLB says which.

#[macro_use]
extern crate bindery_scenarios as support;

mod auditor;
mod strict_tlb;
mod swap;
