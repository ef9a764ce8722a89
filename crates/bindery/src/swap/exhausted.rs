//! The record of a search for memory that found nothing, which saves the next search a full pass.
//!
//! Two values are compared: the number of frames returned so far, and whether swap had room. An
//! operation that makes a folio reclaimable without changing either (a page is unlocked, a file is
//! saved) calls [`Exhausted::forget`]. A missing call only delays reclaim: each further search
//! examines a few frames and continues if it finds something there.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The values that are compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Supply {
    /// The number of frames returned to the allocator so far.
    pub(crate) returned: u64,
    /// Whether a page without a slot may find room in swap.
    pub(crate) room_in_swap: bool,
}

impl Supply {
    /// The values in one word, which is never 0.
    fn packed(self) -> u64 {
        (self.returned << 2) | (u64::from(self.room_in_swap) << 1) | 1
    }
}

/// The supply for which the last full search could free nothing.
pub(crate) struct Exhausted(AtomicU64);

impl Exhausted {
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Records that all memory was searched and nothing could be freed. `supply` was read before
    /// the search.
    pub(crate) fn note(&self, supply: Supply) {
        self.0.store(supply.packed(), Relaxed);
    }

    /// Whether a failed search was recorded for the same supply.
    pub(crate) fn is(&self, supply: Supply) -> bool {
        self.0.load(Relaxed) == supply.packed()
    }

    /// Clears the record, because something may be freeable now.
    #[inline]
    pub(crate) fn forget(&self) {
        // The record is usually clear, and an unconditional store would dirty the cache line.
        if self.0.load(Relaxed) != 0 {
            self.0.store(0, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_supply_that_changed_is_not_exhausted() {
        let (exhausted, then) = (Exhausted::new(), Supply { returned: 0, room_in_swap: false });
        assert!(!exhausted.is(then));
        exhausted.note(then);
        assert!(exhausted.is(then));
        assert!(!exhausted.is(Supply { returned: 1, ..then }));
        assert!(!exhausted.is(Supply { room_in_swap: true, ..then }));
        exhausted.forget();
        assert!(!exhausted.is(then));
    }
}
