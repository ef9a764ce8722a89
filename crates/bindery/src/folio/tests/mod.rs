//! Tests of folios, on the machine of [`crate::frame::tests`].
#![allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")]

extern crate std;

mod alone;
mod folio;
mod reference;

use super::{Folio, FreshFolio};
use crate::frame::Frames;
use crate::frame::tests::{Machine, assert_all_free, blocks, free, new_frames};

/// The fresh folio whose number a test has kept, to look at it by that.
fn fresh(frames: &Frames<Machine>, folio: Folio) -> FreshFolio<'_, Machine> {
    // SAFETY: 1. the tests keep the numbers of fresh folios, and make one of each.
    unsafe { frames.fresh(folio) }
}
