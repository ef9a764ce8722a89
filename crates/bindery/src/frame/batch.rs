//! Frames that are freed together.
//!
//! An unmapping finds frames one by one, but usually in order, because first touches allocated them
//! in order. A batch remembers one range of consecutive frames and frees the range in a few large
//! blocks. Otherwise each frame would be joined with its buddy, and each pair with the next.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use super::buddy::MAX_ORDER;
use super::{Allocator, Frames};
use crate::addr::Frame;
use crate::platform::Platform;

/// Frames without a user. They are freed when the batch is dropped, or earlier.
pub(crate) struct FreeBatch<'a, P: Platform> {
    frames: &'a Frames<P>,
    first: u32,
    count: u32,
}

/// A batch of this size is freed at once, so that the allocator's lock is held for a few steps.
const FULL: u32 = MAX_ORDER.pages();

impl<'a, P: Platform> FreeBatch<'a, P> {
    pub(crate) fn new(frames: &'a Frames<P>) -> Self {
        Self { frames, first: 0, count: 0 }
    }

    /// Takes over `count` frames from `first`.
    ///
    /// # Safety
    /// 1. All of them are tails in the metadata of this batch's frames.
    /// 2. They have no user, and no other code frees them.
    #[inline]
    pub(crate) unsafe fn push(&mut self, first: Frame, count: u32) {
        if self.first + self.count == first.0 && self.count < FULL {
            self.count += count;
        } else if first.0 + count == self.first && self.count < FULL {
            self.first = first.0;
            self.count += count;
        } else {
            self.free_all();
            (self.first, self.count) = (first.0, count);
        }
    }

    /// Frees all frames at once.
    #[inline(always)]
    pub(crate) fn free_all(&mut self) {
        // An empty batch needs no call.
        if self.count > 0 {
            // SAFETY: 1. and 2. `push` required both of each frame; the batch is empty afterwards.
            unsafe { self.frames.free_run(Frame(self.first), self.count) };
            self.count = 0;
        }
    }
}

impl<P: Platform> Drop for FreeBatch<'_, P> {
    fn drop(&mut self) {
        self.free_all();
    }
}

impl<P: Platform> Allocator<P> {
    /// Frees `count` consecutive frames.
    ///
    /// # Safety
    /// 1. All of them are `MetaKind::Tail`.
    /// 2. They have no user, and no other code frees them.
    #[inline(never)]
    unsafe fn free_run(&self, first: Frame, count: u32) {
        self.platform.frames_released(first, count);
        if self.has_fronts() {
            // SAFETY: 1. and 2. the caller's.
            unsafe { self.free_run_with_fronts(first, count) };
            return;
        }
        let mut buddy = self.lists.buddy.lock();
        buddy.free_run(self.metas(), first, count);
        self.publish(&buddy);
    }
}
