//! What a search for memory that found nothing leaves behind: the next one need not look at all of it
//! again.
//!
//! Two things are compared: the frames that have come back until then, and whether swap had room. What
//! makes a folio reclaimable without either (a page is unlocked, a file is saved) says so by
//! [`Exhausted::forget`]. A call that does not is found out late, not never: each further search looks
//! at a few frames, and goes on if it finds something there.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What is compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Supply {
    /// Frames that have come back to the allocator.
    pub(crate) returned: u64,
    /// Whether a page without a slot may find room in swap.
    pub(crate) room_in_swap: bool,
}

impl Supply {
    /// Never 0.
    fn packed(self) -> u64 {
        (self.returned << 2) | (u64::from(self.room_in_swap) << 1) | 1
    }
}

/// The supply with which nothing could be freed.
pub(crate) struct Exhausted(AtomicU64);

impl Exhausted {
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// All memory was looked at, and there was nothing to free. `supply` is of before that look.
    pub(crate) fn note(&self, supply: Supply) {
        self.0.store(supply.packed(), Relaxed);
    }

    /// Whether that was noted, and the supply is the same.
    pub(crate) fn is(&self, supply: Supply) -> bool {
        self.0.load(Relaxed) == supply.packed()
    }

    /// Something may be freed now.
    #[inline]
    pub(crate) fn forget(&self) {
        // Most often nothing is noted: then the line stays where it is.
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
