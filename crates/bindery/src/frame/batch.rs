//! Frames that are freed together.
//!
//! An unmapping meets the frames one by one, and usually in order, because first touches allocated
//! them in order. A batch remembers one range of consecutive frames and frees it whole, as few
//! large blocks, instead of joining each frame with its buddy, and each pair with the next.

use super::buddy::MAX_ORDER;
use super::{Allocator, Frames};
use crate::addr::Frame;
use crate::platform::Platform;

/// Frames without a user, which are freed when this is dropped, or before.
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

    /// Takes over `count` frames from `first`, all of them tails in their metadata.
    #[inline]
    pub(crate) fn push(&mut self, first: Frame, count: u32) {
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
        // No call for none.
        if self.count > 0 {
            self.frames.free_run(Frame(self.first), self.count);
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
    /// Frees `count` consecutive frames that are `Kind::Tail` and have no user.
    #[inline(never)]
    fn free_run(&self, first: Frame, count: u32) {
        self.platform.frames_released(first, count);
        if self.has_fronts() {
            self.free_run_with_fronts(first, count);
            return;
        }
        let mut buddy = self.lists.buddy.lock();
        buddy.free_run(self.metas(), first, count);
        self.publish(&buddy);
    }
}
