//! Every invariant, broken on purpose. The auditor or the strict TLB names it.

#[macro_use]
extern crate bindery_scenarios as support;

mod auditor;
mod strict_tlb;
mod swap;
