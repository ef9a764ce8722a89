//! [`CompressedQuota`]: the limit of the frames of all pools, which take from it in batches.
//!
//! If each pool counted its frames in one word, CPUs that store pages would write the same line. So
//! the word counts the frames that were *granted*: those in use, and the *credit* of the pools. A
//! pool takes a frame from its credit, and returns freed frames to it. It reads the word, and
//! writes it once for [`BATCH`] frames.
//!
//! Two rules keep the limit exact:
//! 1. A pool uses its credit only while the granted frames are within the limit, which may have
//!    been lowered since. So the frames in use never pass it.
//! 2. A refusal is justified: a search of all pools ([`super::pools`]) returns all credit before it
//!    fails. No pool keeps credit during the search, nor after one that found nothing, until room
//!    appears.
//!
//! The functions are generic, so that a model checker (`loom_model`) runs the very same code.

use core::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use crossbeam_utils::CachePadded;

use crate::sync::word::Word;

/// The frames that a pool takes from the quota at once.
pub(super) const BATCH: u64 = 16;

/// The limit, and the frames that were granted.
pub(super) struct CompressedQuota<W = AtomicU64> {
    limit: W,
    /// 1 while a search of all pools is under way.
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

    /// Marks that a search of all pools is under way, or not. The lock of a pool orders it: a pool
    /// that the search has visited sees it.
    pub(super) fn set_searching(&self, is_searching: bool) {
        self.searching.store(u64::from(is_searching), Release);
    }

    /// Whether a search of all pools is under way.
    pub(super) fn is_searching(&self) -> bool {
        self.searching.load(Acquire) != 0
    }

    /// The frames in use and the credit of all pools.
    pub(super) fn granted(&self) -> u64 {
        self.written.granted.load(Relaxed)
    }

    /// The maximum of [`CompressedQuota::granted`] so far.
    pub(super) fn most(&self) -> u64 {
        self.written.most.load(Relaxed)
    }

    /// Counts a frame that is in use now.
    pub(super) fn note_used(&self) {
        let (granted, mut most) = (self.granted(), self.most());
        while most < granted {
            match self.written.most.exchange(most, granted, Relaxed, Relaxed) {
                Ok(_) => return,
                Err(now) => most = now,
            }
        }
    }

    /// Grants up to `most` frames, as many as the limit leaves. Returns their number.
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

/// The credit of a pool, which its lock guards.
pub(super) struct FrameCredit {
    frames: u64,
    /// Whether the pool is that of one CPU. The pool of CPUs without their own keeps none.
    batches: bool,
}

impl FrameCredit {
    pub(super) const fn new(batches: bool) -> Self {
        Self { frames: 0, batches }
    }

    pub(super) fn frames(&self) -> u64 {
        self.frames
    }

    /// Takes one frame of the credit or of the quota; `keeps`: with a batch more.
    pub(super) fn take<W: Word<u64>>(&mut self, quota: &CompressedQuota<W>, keeps: bool) -> bool {
        if self.frames > 0 && quota.granted() <= quota.limit() {
            self.frames -= 1;
            return true;
        }
        let granted = quota.grant(if keeps && self.batches { BATCH } else { 1 });
        self.frames += granted.saturating_sub(1);
        granted > 0
    }

    /// Returns one frame to the credit; to the quota, unless `keeps`, or if there is much credit.
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
