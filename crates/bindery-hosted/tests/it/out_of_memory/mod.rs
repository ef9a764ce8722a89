//! Allocations fail, each in its turn: nothing is lost, and nothing leaks.

mod calls;
mod linux_calls;
mod moves;
mod reclaim;
mod shortage;
mod tries;
