//! Direct reclaim: a call that would fail for lack of memory first frees some, with no lock held.
//!
//! Every public call acquires all its locks inside the closure that it passes to [`Memory::retry`].
//! When the closure fails with "out of memory", it has released them. So reclaim never runs with a
//! lock of a table, a VMA or an object held, in a read section or in a pager, and cannot wait for a
//! lock that its caller holds. It does not call itself either, because it does not use `retry`.

use super::reclaim_until;
use crate::Memory;
use crate::deferred;
use crate::error::{CallError, Failure};
use crate::object::settle_written;
use crate::platform::Platform;

/// The number of pages that the first round tries to free; each later round may try twice the
/// number of the previous one.
const FIRST_ROUND: u64 = 32;
/// The number of rounds before a call fails. Together they may request more than 2 million pages.
const ROUNDS: u8 = 16;

/// The number of brief waits of a call for pagers that store pages.
const PAUSES: u8 = 32;
/// The number of those waits that an answer to another request may end early.
const WAKES: u16 = 10_000;

impl<P: Platform> Memory<P> {
    /// Runs a call of the embedder, which acquires and releases all its locks. If it fails for lack
    /// of memory, frees memory and repeats the call. Afterwards, frees some of the deferred items
    /// that wait for readers.
    ///
    /// A call that fails in this way has changed nothing, or repeats its changes; its documentation
    /// specifies which.
    #[inline]
    pub(crate) fn outermost<T, E: CallError>(
        &self,
        call: impl FnMut() -> Result<T, Failure<E>>,
    ) -> Result<T, E> {
        let result = self.retry(call);
        finish(self, result.is_ok());
        result
    }

    /// As [`Memory::outermost`], for a call that unlinks nothing.
    #[inline]
    pub(crate) fn retry<T, E: CallError>(
        &self,
        call: impl FnMut() -> Result<T, Failure<E>>,
    ) -> Result<T, E> {
        Attempts::default().repeat(self, call)
    }

    /// As [`Memory::retry`], for a call that allocates memory for the content of files. If frames
    /// are reserved for faults ([`Memory::set_fault_reserve`]), the call fails before the embedder
    /// is asked to end a program for it (Linux: `__GFP_RETRY_MAYFAIL`).
    #[inline]
    pub(crate) fn retry_for_content<T, E: CallError>(
        &self,
        call: impl FnMut() -> Result<T, Failure<E>>,
    ) -> Result<T, E> {
        Attempts::for_content(self).repeat(self, call)
    }

    /// As [`Memory::retry`], but the embedder is not asked to end a program.
    pub(crate) fn retry_without_hook<T, E: CallError>(
        &self,
        call: impl FnMut() -> Result<T, Failure<E>>,
    ) -> Result<T, E> {
        Attempts { hook: true, ..Attempts::default() }.repeat(self, call)
    }
}

/// Ends an outermost call.
#[inline]
fn finish<P: Platform>(memory: &Memory<P>, has_succeeded: bool) {
    if has_succeeded {
        // The call may have unlocked, unmapped or protected pages, so reclaim must search again.
        memory.clock.exhausted.forget();
    }
    deferred::free_some(memory);
}

/// The measures that were taken so far for a call that finds no memory.
// Fits into a register, because each call begins with one.
#[derive(Debug, Default)]
pub(crate) struct Attempts {
    rounds: u8,
    /// The number of waits for pagers in which no answer came.
    pauses: u8,
    /// The number of waits for pagers that an answer ended.
    wakes: u16,
    /// Whether items that waited for readers were freed.
    drain: bool,
    /// Whether the embedder's caches were freed, including the purge of its kernel map.
    collect: bool,
    /// Whether the call was repeated once more before the hook.
    last: bool,
    /// Whether the embedder's hook was called.
    hook: bool,
}

impl Attempts {
    /// The measures of [`Memory::retry_for_content`].
    #[inline]
    pub(crate) fn for_content<P: Platform>(memory: &Memory<P>) -> Self {
        Self { hook: memory.fault_reserve() > 0, ..Self::default() }
    }

    /// Repeats the call until it does not fail for lack of memory, or no measure is left. The steps
    /// of one call share the measures, and each measure is taken once.
    #[inline]
    pub(crate) fn repeat<P: Platform, T, E: CallError>(
        &mut self,
        memory: &Memory<P>,
        mut call: impl FnMut() -> Result<T, Failure<E>>,
    ) -> Result<T, E> {
        loop {
            match call() {
                Ok(value) => return Ok(value),
                Err(Failure::Refused(error)) => return Err(error),
                Err(Failure::NoMemory) if self.free_memory(memory) => {}
                Err(Failure::NoMemory) => return Err(E::OUT_OF_MEMORY),
            }
        }
    }

    /// Frees memory for a failed call. Returns whether a repetition may succeed.
    #[cold]
    #[inline(never)]
    fn free_memory<P: Platform>(&mut self, memory: &Memory<P>) -> bool {
        let first = |tried: &mut bool| !core::mem::replace(tried, true);
        if first(&mut self.drain) && deferred::has_items(memory) {
            memory.drain_deferred();
            return true;
        }
        if self.rounds == ROUNDS {
            return false;
        }
        self.rounds += 1;
        let returned = memory.frames.traffic().returned;
        // The call has failed with this number of free frames and has released its own. If the
        // number is small, the call needs few frames, and other calls have allocated those that the
        // last round freed.
        let available = memory.free_frame_count().saturating_sub(memory.frames.reserve());
        let target = (FIRST_ROUND << (self.rounds - 1)).min((2 * available).max(FIRST_ROUND));
        let enough = memory.free_frame_count() + target;
        loop {
            if reclaim_until(memory, target, enough, None).freed > 0
                || memory.free_frame_count() >= enough
            {
                return true;
            }
            if !self.wait_for_stores(memory) {
                break;
            }
        }
        if first(&mut self.collect) {
            let before = memory.free_frame_count();
            memory.collect();
            if memory.free_frame_count() > before {
                return true;
            }
        }
        // The hook may end a program, so it is not called if another CPU has freed some frames
        // since the call failed.
        if memory.frames.traffic().returned > returned && first(&mut self.last) {
            return true;
        }
        first(&mut self.hook) && memory.platform().out_of_memory()
    }

    /// Waits for a pager that stores pages for reclaim. Returns whether some of the stores have
    /// ended, so that their pages may be freed. A pager that does not answer delays the call by
    /// [`PAUSES`] brief waits, and later calls not at all until it has answered. Only waits in which
    /// no answer came count for that, since answers to other requests end many of them early.
    fn wait_for_stores<P: Platform>(&mut self, memory: &Memory<P>) -> bool {
        let (platform, writes) = (memory.platform(), &memory.answers.reclaim);
        let before = writes.ended();
        while self.pauses < PAUSES
            && self.wakes < WAKES
            && writes.may_end()
            && !platform.works_for_pager()
            && !platform.fatal_signal()
        {
            let is_quiet = memory.answers.completions.wait_briefly(platform, &mut || {
                settle_written(memory);
                writes.ended() != before
            });
            if is_quiet {
                self.pauses += 1;
            } else {
                self.wakes += 1;
            }
            settle_written(memory);
            if writes.ended() != before {
                return true;
            }
        }
        if self.pauses == PAUSES && writes.may_end() {
            writes.note_silence(before);
        }
        false
    }
}
