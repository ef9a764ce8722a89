//! [`CompressedQuota`]: the limit for the frames of all pools, which allocate from it in batches.
//!
//! If all pools counted their frames in one word, CPUs that store pages would contend for its cache
//! line. So the word counts the frames that were *granted*: those in use, and the *credit* of the
//! pools. A pool takes a frame from its credit and returns freed frames to the credit. For this it
//! only reads the word, which it writes once for [`BATCH`] frames.
//!
//! Two rules keep the limit exact:
//! 1. A pool uses its credit only while the granted frames are within the limit, which may have
//!    been lowered since the grant. So the frames in use never exceed it.
//! 2. A refusal is justified, because a search of all pools ([`super::pools`]) returns all credit
//!    before it fails. No pool keeps credit during a search, or after a failed search, until room
//!    appears.
//!
//! The functions are generic, so that a model checker (`loom_model`) runs the same code.

use core::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use crossbeam_utils::CachePadded;

use crate::sync::word::Word;

/// The number of frames that a pool takes from the quota at once.
pub(super) const BATCH: u64 = 16;

/// The limit, and the number of granted frames.
pub(super) struct CompressedQuota<W = AtomicU64> {
    limit: W,
    /// 1 while a search of all pools is in progress.
    searching: W,
    written: CachePadded<Written<W>>,
}

/// The words that pools write.
struct Written<W> {
    granted: W,
    /// The maximum of `granted` so far.
    most: W,
}

impl CompressedQuota {
    pub(super) const fn new(limit: u64) -> Self {
        let written = Written { granted: AtomicU64::new(0), most: AtomicU64::new(0) };
        let (limit, searching) = (AtomicU64::new(limit), AtomicU64::new(0));
        Self { limit, searching, written: CachePadded::new(written) }
    }
}

impl<W: Word<u64>> CompressedQuota<W> {
    /// A quota in words of another type.
    #[cfg(all(test, any(loom, shuttle)))]
    pub(super) fn of_words(limit: u64, word: impl Fn(u64) -> W) -> Self {
        let written = Written { granted: word(0), most: word(0) };
        Self { limit: word(limit), searching: word(0), written: CachePadded::new(written) }
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    pub(super) fn set_limit(&self, frames: u64) {
        self.limit.store(frames, Relaxed);
    }

    /// Records whether a search of all pools is in progress. The lock of a pool orders the store: a
    /// pool that the search has visited sees it.
    pub(super) fn set_searching(&self, is_searching: bool) {
        self.searching.store(u64::from(is_searching), Release);
    }

    /// Whether a search of all pools is in progress.
    pub(super) fn is_searching(&self) -> bool {
        self.searching.load(Acquire) != 0
    }

    /// The number of granted frames: the frames in use and the credit of all pools.
    pub(super) fn granted(&self) -> u64 {
        self.written.granted.load(Relaxed)
    }

    /// The maximum of [`CompressedQuota::granted`] so far.
    pub(super) fn most(&self) -> u64 {
        self.written.most.load(Relaxed)
    }

    /// Records that a frame is now in use.
    pub(super) fn note_used(&self) {
        let (granted, mut most) = (self.granted(), self.most());
        while most < granted {
            match self.written.most.exchange(most, granted, Relaxed, Relaxed) {
                Ok(_) => return,
                Err(now) => most = now,
            }
        }
    }

    /// Grants up to `most` frames, within the limit. Returns their number.
    fn grant(&self, most: u64) -> u64 {
        let mut granted = self.granted();
        loop {
            let count = self.limit().saturating_sub(granted).min(most);
            if count == 0 {
                return 0;
            }
            match self.written.granted.exchange(granted, granted + count, Relaxed, Relaxed) {
                Ok(_) => return count,
                Err(now) => granted = now,
            }
        }
    }

    fn release(&self, frames: u64) {
        if frames > 0 {
            self.written.granted.sub(frames, Relaxed);
        }
    }
}

/// The credit of a pool, guarded by the pool's lock.
pub(super) struct FrameCredit {
    frames: u64,
    /// Whether the pool belongs to one CPU. The pool of the CPUs without their own keeps no credit.
    batches: bool,
}

impl FrameCredit {
    pub(super) const fn new(batches: bool) -> Self {
        Self { frames: 0, batches }
    }

    pub(super) fn frames(&self) -> u64 {
        self.frames
    }

    /// Takes one frame from the credit or from the quota. With `keeps`, takes a batch from the
    /// quota.
    pub(super) fn take<W: Word<u64>>(&mut self, quota: &CompressedQuota<W>, keeps: bool) -> bool {
        if self.frames > 0 && quota.granted() <= quota.limit() {
            self.frames -= 1;
            return true;
        }
        let granted = quota.grant(if keeps && self.batches { BATCH } else { 1 });
        self.frames += granted.saturating_sub(1);
        granted > 0
    }

    /// Returns one frame to the credit, or to the quota without `keeps` or if the credit is already
    /// large.
    pub(super) fn put<W: Word<u64>>(&mut self, quota: &CompressedQuota<W>, keeps: bool) {
        if !keeps || !self.batches {
            quota.release(1);
        } else if self.frames < 2 * BATCH {
            self.frames += 1;
        } else {
            self.frames -= BATCH - 1;
            quota.release(BATCH);
        }
    }

    /// Returns all credit to the quota.
    pub(super) fn return_all<W: Word<u64>>(&mut self, quota: &CompressedQuota<W>) {
        quota.release(core::mem::take(&mut self.frames));
    }
}
