//! Direct reclaim: a call that would fail for lack of memory frees some first, with no lock held.
//!
//! Every public call takes all its locks inside the closure that it hands to [`Memory::retry`].
//! When it fails with "out of memory", it has released them. So reclaim never runs inside a table
//! lock, a read section, a VMA, an object or a pager, and cannot wait for a lock that its caller
//! holds; nor does it call itself, since it does not use `retry`.

use crate::Memory;
use crate::error::{CallError, Failure};
use crate::platform::Platform;

/// Pages that the first round wants; each later round may want twice as much.
const FIRST_ROUND: u64 = 32;
/// Rounds before a call fails: together they may ask for more than 2 million pages.
const ROUNDS: u32 = 16;

impl<P: Platform> Memory<P> {
    /// Runs a call of the embedder's, which takes all its locks and releases them. Where it fails
    /// for want of memory, memory is freed and the call made once more. Frees some of what waits
    /// for readers afterwards.
    ///
    /// A call that fails so has changed nothing, or does what it has done once more: its
    /// documentation says which.
    #[inline]
    pub(crate) fn outermost<T, E: CallError>(
        &self,
        call: impl FnMut() -> Result<T, Failure<E>>,
    ) -> Result<T, E> {
        let result = self.retry(call);
        if result.is_ok() {
            // It may have unlocked, unmapped or protected something: reclaim looks again.
            self.clock.exhausted.forget();
        }
        self.free_some();
        result
    }

    /// As [`Memory::outermost`], for a call that unlinks nothing.
    #[inline]
    pub(crate) fn retry<T, E: CallError>(
        &self,
        call: impl FnMut() -> Result<T, Failure<E>>,
    ) -> Result<T, E> {
        self.retry_from(Tried::default(), call)
    }

    /// As [`Memory::retry`], for a call that takes memory for the content of files. Where frames are
    /// kept for faults ([`Memory::set_fault_reserve`]), it fails before anything else is ended for
    /// its sake (Linux: `__GFP_RETRY_MAYFAIL`).
    #[inline]
    pub(crate) fn retry_for_content<T, E: CallError>(
        &self,
        call: impl FnMut() -> Result<T, Failure<E>>,
    ) -> Result<T, E> {
        self.retry_from(Tried { hook: self.fault_reserve() > 0, ..Tried::default() }, call)
    }

    #[inline]
    fn retry_from<T, E: CallError>(
        &self,
        mut tried: Tried,
        mut call: impl FnMut() -> Result<T, Failure<E>>,
    ) -> Result<T, E> {
        loop {
            match call() {
                Ok(value) => return Ok(value),
                Err(Failure::Refused(error)) => return Err(error),
                Err(Failure::NoMemory) if self.frees_for_call(&mut tried) => {}
                Err(Failure::NoMemory) => return Err(E::OUT_OF_MEMORY),
            }
        }
    }

    /// Frees memory for a call that has failed. Says whether that may help.
    #[cold]
    #[inline(never)]
    fn frees_for_call(&self, tried: &mut Tried) -> bool {
        let first = |tried: &mut bool| !core::mem::replace(tried, true);
        if first(&mut tried.drain) && self.has_deferred() {
            self.drain_deferred();
            return true;
        }
        if tried.rounds == ROUNDS {
            return false;
        }
        tried.rounds += 1;
        let returned = self.frames.traffic().returned;
        // The call has failed with so many free frames, and has given back what it had. Where they are
        // few, it wants few, and others have taken what the last round freed.
        let available = self.free_frame_count().saturating_sub(self.frames.reserve());
        let target = (FIRST_ROUND << (tried.rounds - 1)).min((2 * available).max(FIRST_ROUND));
        let enough = self.free_frame_count() + target;
        if self.reclaim_until(target, enough).freed > 0 || self.free_frame_count() >= enough {
            return true;
        }
        if first(&mut tried.collect) {
            let before = self.free_frame_count();
            self.collect();
            if self.free_frame_count() > before {
                return true;
            }
        }
        // The hook may end a program: not where another CPU has freed some since the call failed.
        if self.frames.traffic().returned > returned && first(&mut tried.last) {
            return true;
        }
        first(&mut tried.hook) && self.platform.out_of_memory()
    }
}

/// What was done for a call that finds no memory.
#[derive(Default)]
struct Tried {
    rounds: u32,
    /// What waited for readers was freed.
    drain: bool,
    /// What the embedder keeps was given back, the purge of its kernel map among it.
    collect: bool,
    /// The call was made once more before that.
    last: bool,
    /// The embedder was told.
    hook: bool,
}
