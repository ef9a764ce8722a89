//! Sequences of calls, compared with a model: all of them up to a depth, and random ones.

mod exhaustive;
mod properties;
mod shadow;
