//! Random sequences of calls, each blocking or in steps. Between two steps other calls change the
//! memory. The pager and the swap device answer at once, late, with an error or never.

extern crate bindery_scenarios as support;

mod action;
mod answers;
mod blocking;
mod calls;
mod flight;
mod handlers;
mod model;
mod properties;
mod server;
mod verify;
mod world;
