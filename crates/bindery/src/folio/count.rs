//! The count word of a folio, and each of its transitions.
//!
//! ```text
//! 63 .......... 32   31 ..... 16   15 ........ 0
//! mappings           pins          references
//! ```
//!
//! Zero means that the frame has no holder, or that only its creator can find the folio. In every
//! frame that is not the head of a live folio, the word is zero. Four rules follow from this, each
//! implemented by a function of this file:
//!
//! 1. *One release store leaves zero* ([`publish`]), by the only thread that can find the folio.
//!    The store follows all other writes of the folio's metadata.
//! 2. *Nothing is added to zero.* [`refer`] needs neither a mapping nor a reference and adds by
//!    compare-exchange. A thread that finds a nonzero count sees the metadata that rule 1
//!    published.
//! 3. *A read-modify-write of the whole word reaches zero* ([`take`], [`take_all`]). So an attempt
//!    to take a reference and the freeing of the folio are ordered: either the reference is counted
//!    and the folio is kept, or the attempt finds zero.
//! 4. *A split freezes the folio*: the word becomes zero first ([`take_all`]), and each part is
//!    published separately.
//!
//! # The fields do not overflow into each other
//! | field | bits | bound |
//! |---|---|---|
//! | references | 16 | a page index publishes at most 512; under the folio's lock, the index adds its own, and the swap cache two ([`refer_locked`]); [`refer`] refuses from 2^15 on by compare-exchange; each CPU in [`unmap_owned`] adds one for a moment |
//! | pins | 16 | refused from 2^15 on ([`PinRoom`]), after they were added: 2^15 CPUs may find out at once |
//! | mappings | 32 | refused from 2^31 on, after they were added: 512 for each CPU that finds out at once |

use core::sync::atomic::Ordering;

use super::handle::MAX_FOLIO_ORDER;
use crate::platform::MAX_CPUS;
use crate::sync::word::Word;

/// One reference.
pub(crate) const REFERENCE: u64 = 1;
/// The bits that count references.
pub(super) const REFERENCES: u64 = PIN - 1;
/// Pins are counted above the references. A pin's holder accesses the pages without the page
/// tables.
pub(super) const PIN: u64 = 1 << 16;
/// The upper half counts mappings.
pub(super) const MAPPING: u64 = 1 << 32;

/// A folio with this many references gets no further reference.
pub(super) const TOO_MANY_REFERENCES: u32 = 1 << 15;
const TOO_MANY_PINS: u32 = 1 << 15;

/// The share of a folio's room for pins that the caller may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PinRoom {
    /// All of it.
    All,
    /// Its lower half; the upper half is reserved for other callers.
    LowerHalf,
}

impl PinRoom {
    const fn pins(self) -> u32 {
        match self {
            Self::All => TOO_MANY_PINS,
            Self::LowerHalf => TOO_MANY_PINS / 2,
        }
    }
}

const TOO_MANY_MAPPINGS: u32 = 1 << 31;

/// The folio would have 2^31 mappings; no mapping was added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TooManyMappings;

/// The folio is free, or its count has no room: no reference was added. A caller that holds the
/// folio's lock gets this error only if a count is wrong, and then leaves the folio unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReferencesRefused;

/// The caller drops more than the field contains; nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NotThere;

/// The references in a value of the word.
#[inline]
pub(super) const fn references_in(count: u64) -> u32 {
    (count & REFERENCES) as u32
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

/// Publishes a folio that only the caller could find, with the count that holds it from now on.
#[inline]
pub(crate) fn publish(count: &impl Word<u64>, value: u64) {
    debug_assert_eq!(count.load(Ordering::Relaxed), 0, "the folio is not fresh");
    count.store(value, Ordering::Release);
}

/// Adds a reference, unless the count is zero or too high. Returns whether the reference was added.
#[inline]
pub(crate) fn refer(count: &impl Word<u64>) -> bool {
    let mut seen = count.load(Ordering::Relaxed);
    loop {
        if seen == 0 || references_in(seen) >= TOO_MANY_REFERENCES {
            return false;
        }
        // Acquire: the caller sees the metadata that was published with the folio or its parts.
        match count.exchange(seen, seen + REFERENCE, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(now) => seen = now,
        }
    }
}

/// The maximum number of references beyond [`TOO_MANY_REFERENCES`]: one for each page in an index,
/// two for the swap cache and the thread that writes the folio out, and one for each CPU in
/// [`unmap_owned`].
const BEYOND: usize = MAX_FOLIO_ORDER.pages() as usize + 2 + MAX_CPUS;
const _: () = assert!(TOO_MANY_REFERENCES as usize + BEYOND <= REFERENCES as usize);

/// Adds references that must succeed even if others hold many: the room beyond
/// [`TOO_MANY_REFERENCES`] is reserved for such references. The caller has the folio's lock.
/// Refuses if the count is zero or if the references would overflow into the pins.
#[inline]
pub(super) fn refer_locked(
    count: &impl Word<u64>,
    references: u32,
) -> Result<(), ReferencesRefused> {
    let mut seen = count.load(Ordering::Relaxed);
    loop {
        let room = REFERENCES as u32 - references_in(seen);
        if seen == 0 || references > room {
            return Err(ReferencesRefused);
        }
        let more = seen + u64::from(references) * REFERENCE;
        match count.exchange(seen, more, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return Ok(()),
            Err(now) => seen = now,
        }
    }
}

/// Adds mappings; the caller has a mapping, or otherwise prevents the folio from being freed.
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

/// Adds a pin if its field has room; the caller has a mapping. Returns whether the pin was added.
#[inline]
pub(super) fn pin(count: &impl Word<u64>, room: PinRoom) -> bool {
    let before = count.add(PIN, Ordering::AcqRel);
    debug_assert_ne!(before, 0, "the folio was free");
    if pins_in(before) >= room.pins() {
        count.sub(PIN, Ordering::Relaxed);
        return false;
    }
    true
}

/// Drops the caller's share of one field. Returns whether the whole word is zero now, so that only
/// the caller owns the folio.
#[inline]
pub(super) fn take(
    count: &impl Word<u64>,
    taken: u64,
    field: fn(u64) -> u32,
) -> Result<bool, NotThere> {
    let before = count.sub(taken, Ordering::Release);
    if field(before) < field(taken) {
        // A bug elsewhere. Add the share again, so that the fields do not borrow from each other.
        count.add(taken, Ordering::Relaxed);
        return Err(NotThere);
    }
    if before != taken {
        return Ok(false);
    }
    // Accesses of other holders before their releases happen before the folio's next use: the
    // caller's zero belongs to all their release sequences.
    count.load(Ordering::Acquire);
    Ok(true)
}

/// Freezes the word if its value is `all`: afterwards only the caller has the folio.
#[inline]
pub(crate) fn take_all(count: &impl Word<u64>, all: u64) -> bool {
    // The load avoids the atomic instruction for a shared folio. Acquire: as in `take`.
    count.load(Ordering::Relaxed) == all
        && count.exchange(all, 0, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

/// Replaces `from` by `to` if the word is `from`. Returns whether the word was replaced.
#[inline]
pub(super) fn exchange(count: &impl Word<u64>, from: u64, to: u64) -> bool {
    // Acquire: the accesses of other holders before their releases; release: the caller's accesses
    // before this step.
    count.exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Drops one mapping if others remain. Returns whether it was dropped. Fails spuriously if another
/// thread changes the word.
#[inline]
pub(super) fn unmap_one_of_several(count: &impl Word<u64>) -> bool {
    let seen = count.load(Ordering::Relaxed);
    // Release: as in `take`.
    mappings_in(seen) > 1
        && count.exchange(seen, seen - MAPPING, Ordering::Release, Ordering::Relaxed).is_ok()
}

/// The outcome of [`unmap_owned`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Left {
    /// Other mappings remain.
    Mapped,
    /// No mapping remains, but other holders do. The caller's mappings became a reference.
    Held,
    /// The folio has no holder.
    Nothing,
}

/// Drops mappings. If these were the last mappings and other holders remain, converts them into one
/// reference of the caller, which holds the folio until the caller has removed the folio's owner.
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
