//! Tests of folios, on the machine of [`crate::frame::tests`].
#![allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")]

extern crate std;

mod alone;
mod folio;
mod reference;

use crate::frame::tests::{Machine, assert_all_free, blocks, free, new_frames};
