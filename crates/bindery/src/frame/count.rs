//! The count word of a folio, and every transition that it makes.
//!
//! ```text
//! 63 .......... 32   31 ..... 16   15 ........ 0
//! mappings           pins          references
//! ```
//!
//! Zero means that nobody has the frame, or that only its maker knows it; every kind of frame but
//! the head of a live folio has zero there. Four rules follow, and each has its function here:
//!
//! 1. *Zero is left by one release store* ([`publish`]), by the only one who knows the folio. All
//!    else that the metadata says of the folio was written before.
//! 2. *Nothing is added to zero.* [`refer`], which needs neither a mapping nor a reference, adds by
//!    compare-exchange; whoever finds something there has read what rule 1 published.
//! 3. *Zero is reached by a read-modify-write of the whole word* ([`take`], [`take_all`]), so that of
//!    an attempt at a reference and a freeing one comes first: either the reference is counted and
//!    the folio stays, or the attempt finds zero.
//! 4. *Who cuts a folio freezes it*: the word goes to zero first ([`take_all`]), and each part is
//!    published on its own.
//!
//! # The fields do not overflow into each other
//! | field | bits | bound |
//! |---|---|---|
//! | references | 16 | an index publishes at most 512; [`refer`] refuses from 2^15 on by compare-exchange; each CPU in [`unmap_owned`] adds one for a moment |
//! | pins | 16 | refused from 2^15 on, after they were added: 2^15 CPUs may find out at once |
//! | mappings | 32 | refused from 2^31 on, after they were added: 512 for each CPU that finds out at once |

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// One reference.
pub(super) const REFERENCE: u64 = 1;
/// Pins stand above the references: holders that read or write the pages behind the back of the
/// page tables.
pub(super) const PIN: u64 = 1 << 16;
/// The upper half counts mappings.
pub(super) const MAPPING: u64 = 1 << 32;

/// Nobody adds a reference to so many.
pub(super) const TOO_MANY_REFERENCES: u32 = 1 << 15;
const TOO_MANY_PINS: u32 = 1 << 15;
const TOO_MANY_MAPPINGS: u32 = 1 << 31;

/// The folio would have 2^31 mappings; none was added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TooManyMappings;

/// More is taken away than was there; nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NotThere;

/// What the transitions need of an atomic word: that of the core library, and loom's.
pub(super) trait Word<V> {
    fn load(&self, order: Ordering) -> V;
    fn store(&self, value: V, order: Ordering);
    fn exchange(&self, from: V, to: V, success: Ordering, failure: Ordering) -> Result<V, V>;
    fn add(&self, value: V, order: Ordering) -> V;
    fn sub(&self, value: V, order: Ordering) -> V;
    fn set(&self, bits: V, order: Ordering) -> V;
}

/// Implements [`Word`] for an atomic type by its methods of the core library's names.
macro_rules! word {
    ($atomic:ty, $value:ty) => {
        impl $crate::frame::count::Word<$value> for $atomic {
            #[inline]
            fn load(&self, order: core::sync::atomic::Ordering) -> $value {
                self.load(order)
            }
            #[inline]
            fn store(&self, value: $value, order: core::sync::atomic::Ordering) {
                self.store(value, order);
            }
            #[inline]
            fn exchange(
                &self,
                from: $value,
                to: $value,
                success: core::sync::atomic::Ordering,
                failure: core::sync::atomic::Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(from, to, success, failure)
            }
            #[inline]
            fn add(&self, value: $value, order: core::sync::atomic::Ordering) -> $value {
                self.fetch_add(value, order)
            }
            #[inline]
            fn sub(&self, value: $value, order: core::sync::atomic::Ordering) -> $value {
                self.fetch_sub(value, order)
            }
            #[inline]
            fn set(&self, bits: $value, order: core::sync::atomic::Ordering) -> $value {
                self.fetch_or(bits, order)
            }
        }
    };
}
#[cfg(all(test, loom))]
pub(super) use word;

word!(AtomicU32, u32);
word!(AtomicU64, u64);

/// The references in a value of the word.
#[inline]
pub(super) const fn references_in(count: u64) -> u32 {
    count as u32 & (PIN as u32 - 1)
}

/// The pins in a value of the word.
#[inline]
pub(super) const fn pins_in(count: u64) -> u32 {
    count as u32 >> 16
}

/// The mappings in a value of the word.
#[inline]
pub(super) const fn mappings_in(count: u64) -> u32 {
    (count >> 32) as u32
}

/// Shows a folio that only the caller knew to everybody, with what keeps it from now on.
#[inline]
pub(super) fn publish(count: &impl Word<u64>, value: u64) {
    debug_assert_eq!(count.load(Ordering::Relaxed), 0, "the folio is not fresh");
    count.store(value, Ordering::Release);
}

/// Adds a reference, unless there is nothing or there are too many. Says whether it did.
#[inline]
pub(super) fn refer(count: &impl Word<u64>) -> bool {
    let mut seen = count.load(Ordering::Relaxed);
    loop {
        if seen == 0 || references_in(seen) >= TOO_MANY_REFERENCES {
            return false;
        }
        // Acquire: what was published with the folio, or with its parts.
        match count.exchange(seen, seen + REFERENCE, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(now) => seen = now,
        }
    }
}

/// Adds mappings; the caller has one, or another way to keep the folio.
#[inline]
pub(super) fn map(count: &impl Word<u64>, pages: u32) -> Result<(), TooManyMappings> {
    let added = u64::from(pages) * MAPPING;
    let before = count.add(added, Ordering::Relaxed);
    debug_assert_ne!(before, 0, "the folio was free");
    if mappings_in(before) >= TOO_MANY_MAPPINGS - pages {
        count.sub(added, Ordering::Relaxed);
        return Err(TooManyMappings);
    }
    Ok(())
}

/// Adds a pin; the caller has a mapping. Says whether that was possible.
#[inline]
pub(super) fn pin(count: &impl Word<u64>) -> bool {
    let before = count.add(PIN, Ordering::AcqRel);
    debug_assert_ne!(before, 0, "the folio was free");
    if pins_in(before) >= TOO_MANY_PINS {
        count.sub(PIN, Ordering::Relaxed);
        return false;
    }
    true
}

/// Takes away what the caller has: so many of one field. Says whether that was the last of all, so
/// that the folio is the caller's alone.
#[inline]
pub(super) fn take(
    count: &impl Word<u64>,
    taken: u64,
    field: fn(u64) -> u32,
) -> Result<bool, NotThere> {
    let before = count.sub(taken, Ordering::Release);
    if field(before) < field(taken) {
        // A bug elsewhere. Put it back, so that the fields do not borrow from each other.
        count.add(taken, Ordering::Relaxed);
        return Err(NotThere);
    }
    if before != taken {
        return Ok(false);
    }
    // What others did to the folio before they let go comes before its next use: our own zero
    // stands in the release sequences of them all.
    count.load(Ordering::Acquire);
    Ok(true)
}

/// Freezes the word, if `all` is what it holds: afterwards the folio is the caller's alone.
#[inline]
pub(super) fn take_all(count: &impl Word<u64>, all: u64) -> bool {
    // The load spares a folio that is shared the atomic instruction. Acquire: as in `take`.
    count.load(Ordering::Relaxed) == all
        && count.exchange(all, 0, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

/// What [`unmap_owned`] left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Left {
    /// Others map the folio.
    Mapped,
    /// Nobody maps it, but somebody holds it; the caller does too, by a reference that its mappings
    /// became.
    Held,
    /// Nobody has it.
    Nothing,
}

/// Takes mappings away. The last ones, if anybody holds the folio besides, become a reference of the
/// caller's, who has something to do for the folio that nobody maps.
#[inline]
pub(super) fn unmap_owned(count: &impl Word<u64>, pages: u32) -> Result<Left, NotThere> {
    let mut seen = count.load(Ordering::Relaxed);
    loop {
        if mappings_in(seen) < pages {
            return Err(NotThere);
        }
        let rest = seen - u64::from(pages) * MAPPING;
        let (to, left) = match rest {
            0 => (0, Left::Nothing),
            rest if mappings_in(rest) > 0 => (rest, Left::Mapped),
            rest => (rest + REFERENCE, Left::Held),
        };
        match count.exchange(seen, to, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return Ok(left),
            Err(now) => seen = now,
        }
    }
}
