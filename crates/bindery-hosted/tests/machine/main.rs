//! The hosted machine itself: its MMUs, with handwritten table entries, and its TLBs.

#![allow(clippy::unusual_byte_groupings, reason = "frame numbers, then offsets or flags")]

#[macro_use]
extern crate bindery_scenarios as support;

mod aarch64;
mod control_bits;
mod cpus;
mod hand;
mod instructions;
mod kernel_half;
mod parking;
mod repeats;
mod riscv64;
mod strict;
mod tiny;
mod users;
mod x86_64;
