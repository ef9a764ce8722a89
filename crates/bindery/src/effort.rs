//! A fault's effort to get a large folio if no block for it is free.

use core::sync::atomic::{AtomicU8, Ordering};

use crate::memory::{HugeAdvice, Memory};
use crate::platform::Platform;

/// A fault's effort in anonymous memory if no block is free for a large folio (Linux:
/// `transparent_hugepage/defrag`).
///
/// To *collect* is to free frames that are unused but still held: by caches of the core
/// ([`Memory::trim`]), until the end of a grace period ([`Memory::drain_deferred`]), and by the
/// embedder ([`Platform::collect_memory`]). These frames may complete a block. No page moves.
///
/// ```
/// use bindery::{LargeFolioEffort, Memory, Platform};
///
/// fn default<P: Platform>(memory: &Memory<P>) {
///     memory.set_large_folio_effort(LargeFolioEffort::default());
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum LargeFolioEffort {
    /// The fault collects memory and retries.
    Always,
    /// The fault uses a smaller folio and has another thread collect
    /// ([`Platform::collect_memory_later`]).
    Defer,
    /// Like [`LargeFolioEffort::Always`] in mappings for which the program has asked for large
    /// folios (`MADV_HUGEPAGE`), otherwise like [`LargeFolioEffort::Defer`].
    DeferMadvise,
    /// Like [`LargeFolioEffort::Always`] in mappings for which the program has asked for large
    /// folios (`MADV_HUGEPAGE`), otherwise like [`LargeFolioEffort::Never`].
    #[default]
    Madvise,
    /// The fault uses a smaller folio.
    Never,
}

const ALL: [LargeFolioEffort; 5] = [
    LargeFolioEffort::Always,
    LargeFolioEffort::Defer,
    LargeFolioEffort::DeferMadvise,
    LargeFolioEffort::Madvise,
    LargeFolioEffort::Never,
];

/// When memory is collected for a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Collecting {
    /// At once, by the fault.
    Now,
    /// Later, by another thread.
    Later,
    /// Not at all.
    Never,
}

/// A [`LargeFolioEffort`] that may be changed at any time.
pub(crate) struct EffortSetting(AtomicU8);

impl EffortSetting {
    pub(crate) const fn new() -> Self {
        Self(AtomicU8::new(LargeFolioEffort::Madvise as u8))
    }

    fn set(&self, effort: LargeFolioEffort) {
        self.0.store(effort as u8, Ordering::Relaxed);
    }

    fn get(&self) -> LargeFolioEffort {
        ALL.get(usize::from(self.0.load(Ordering::Relaxed))).copied().unwrap_or_default()
    }

    /// When memory is collected for a mapping with this advice.
    pub(crate) fn collecting(&self, advice: HugeAdvice) -> Collecting {
        let advised = advice == HugeAdvice::Use;
        match self.get() {
            LargeFolioEffort::Always => Collecting::Now,
            LargeFolioEffort::DeferMadvise | LargeFolioEffort::Madvise if advised => {
                Collecting::Now
            }
            LargeFolioEffort::Defer | LargeFolioEffort::DeferMadvise => Collecting::Later,
            LargeFolioEffort::Madvise | LargeFolioEffort::Never => Collecting::Never,
        }
    }
}

impl<P: Platform> Memory<P> {
    /// Sets the effort of faults if no block is free for a large folio.
    ///
    /// Context: any.
    pub fn set_large_folio_effort(&self, effort: LargeFolioEffort) {
        self.effort.set(effort);
    }

    /// The value of [`Memory::set_large_folio_effort`]; initially [`LargeFolioEffort::Madvise`].
    ///
    /// Context: any.
    pub fn large_folio_effort(&self) -> LargeFolioEffort {
        self.effort.get()
    }

    /// Frees all frames that are unused but still held: those in the core's caches, those that wait
    /// for a grace period, and the embedder's ([`Platform::collect_memory`]).
    ///
    /// Call it without locks, outside read sections.
    ///
    /// Context: may sleep. Complexity: linear in the frames freed.
    pub fn collect(&self) {
        self.drain_deferred();
        self.platform().collect_memory();
        self.trim();
    }
}
