//! Every invariant, broken on purpose: the auditor or the strict TLB says which.

mod auditor;
mod strict_tlb;
mod swap;
