//! Every invariant, broken on purpose. The auditor or the strict TLB reports which one.

#[macro_use]
extern crate bindery_scenarios as support;

mod auditor;
mod strict_tlb;
mod swap;
