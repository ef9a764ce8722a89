//! Sequences of calls, compared with a model: exhaustive ones up to a depth, and random ones.

#[macro_use]
extern crate bindery_scenarios as support;

mod exhaustive;
mod properties;
mod shadow;
