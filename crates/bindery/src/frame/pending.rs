//! The count of pending flushes of one table, separate from its storage, so that the same code runs
//! under a model checker (`loom_model`). [`crate::tlb`] explains its use.
//!
//! ```text
//! raise     under the table's lock, before the first narrowing store     0 -> 1
//! lower     after the flush, with no lock                                1 -> 0
//! release   the table was detached, and no reader can reach it           1 -> RELEASED | 1
//! lower     the last one frees the table                                 RELEASED | 1 -> freed
//! ```
//!
//! The count of a detached table never rises, because a thread that locks the table finds it stray.
//! So if the count is zero when the table is released, it remains zero.

use core::sync::atomic::Ordering;

/// A bit in the count: the thread that lowers the count to zero frees the table.
const RELEASED: u32 = 1 << 31;

/// The operations of an atomic word that the protocol uses.
pub(crate) trait PendingWord {
    fn load(&self, order: Ordering) -> u32;
    fn fetch_add(&self, value: u32, order: Ordering) -> u32;
    fn fetch_sub(&self, value: u32, order: Ordering) -> u32;
    fn fetch_or(&self, value: u32, order: Ordering) -> u32;
}

macro_rules! word {
    ($word:ty) => {
        impl PendingWord for $word {
            fn load(&self, order: Ordering) -> u32 {
                <$word>::load(self, order)
            }

            fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
                <$word>::fetch_add(self, value, order)
            }

            fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
                <$word>::fetch_sub(self, value, order)
            }

            fn fetch_or(&self, value: u32, order: Ordering) -> u32 {
                <$word>::fetch_or(self, value, order)
            }
        }
    };
}

word!(core::sync::atomic::AtomicU32);
#[cfg(all(test, any(loom, shuttle)))]
word!(crate::sync::model::sync::atomic::AtomicU32);

/// Whether the caller frees the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) enum Last {
    /// No: a later thread frees the table.
    No,
    /// Yes: no other thread can find the table.
    Yes,
}

/// The number of pending flushes.
#[inline]
pub(crate) fn count(word: &impl PendingWord) -> u32 {
    // Acquire: the flushes happen before a thread that finds zero continues.
    word.load(Ordering::Acquire) & !RELEASED
}

/// Whether a flush is pending for a table that is linked into the tree.
#[inline]
pub(crate) fn is_any(word: &impl PendingWord) -> bool {
    word.load(Ordering::Acquire) != 0
}

/// Counts another pending flush. Called under the table's lock.
#[inline]
pub(crate) fn raise(word: &impl PendingWord) {
    // Relaxed: the release of the lock publishes the count, as does the store that clears an entry.
    word.fetch_add(1, Ordering::Relaxed);
}

/// Counts one completed flush.
pub(crate) fn lower(word: &impl PendingWord) -> Last {
    // Release: the flush happens before a thread that finds zero continues. Acquire: the free
    // happens after all flushes.
    let before = word.fetch_sub(1, Ordering::AcqRel);
    debug_assert_ne!(before & !RELEASED, 0, "no flush was pending");
    if before == RELEASED | 1 { Last::Yes } else { Last::No }
}

/// Called when the table was detached and no reader can reach it.
#[inline]
pub(crate) fn release(word: &impl PendingWord) -> Last {
    if word.load(Ordering::Acquire) == 0 || word.fetch_or(RELEASED, Ordering::AcqRel) == 0 {
        return Last::Yes;
    }
    Last::No
}
