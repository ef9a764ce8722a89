//! Tests of folios, on the machine of [`crate::frame::tests`].
#![allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")]

extern crate std;

mod alone;
mod folio;
mod reference;

use super::{Folio, FolioLock, Freed, FreshFolio};
use crate::frame::Frames;
use crate::frame::tests::{Machine, assert_all_free, blocks, free, new_frames};

/// The fresh folio with a number that a test has recorded for inspection.
fn fresh(frames: &Frames<Machine>, folio: Folio) -> FreshFolio<'_, Machine> {
    // SAFETY: 1. the tests record the numbers of fresh folios and make one value of each.
    unsafe { frames.fresh(folio) }
}

/// Drops mappings of a folio that no table maps.
fn unmap(frames: &Frames<Machine>, folio: Folio, pages: u32) -> Freed {
    // SAFETY: 1. the tests count the mappings that they drop; 2. no TLB holds the folio.
    unsafe { frames.folio(folio).unmap(pages) }
}

/// Locks a folio by its number.
fn try_lock(frames: &Frames<Machine>, folio: Folio) -> Option<FolioLock<'_, Machine>> {
    // SAFETY: 1. the tests release no folio before its lock is released.
    unsafe { frames.folio(folio).try_lock() }
}

/// Releases a reference that a test has taken.
fn release(frames: &Frames<Machine>, folio: Folio) -> Freed {
    // SAFETY: 1. the tests count the references that they release.
    unsafe { frames.folio(folio).release() }
}
