//! The state of a swap slot: the references to the slot, and the location of its content. It is
//! held in the slot's *cell*, a word of the cluster.
//!
//! ```text
//! 63 ........... 32   31 ... 26   25 .. 22   21        20     19       18       17       16       15 ... 0
//! frame or shadow     spare       order      WRITING   LOST   STORED   FILLED   BUSY     CACHED   entries
//! ```
//!
//! The *order* is that of the last folio that had the page in memory. A fault reads no larger folio
//! ([`super::streak`]).
//!
//! | the slot is | the word |
//! |---|---|
//! | free | 0 |
//! | reserved: allocated, no reference yet | 0, with its bit set in the cluster's bitmap |
//! | being swapped out or in | `CACHED`, `BUSY`: the folio's locker writes or reads the content |
//! | in swap and in memory | `CACHED`, and the place of the content |
//! | only in swap | the place of the content, and the time of its eviction: the *shadow* |
//! | wanted again while a device writes it | `WRITING`, and if the cache has the page, `CACHED` |
//!
//! A slot is free when entries, cache and I/O have all released it: the count is 0, and `CACHED`,
//! `BUSY` and `WRITING` are clear.

use core::sync::atomic::Ordering::Relaxed;

use crate::addr::{Frame, Order};
use crate::folio::MAX_FOLIO_ORDER;
use crate::sync::word::Word;

/// The maximum number of entries that may refer to a slot.
pub(crate) const MAX_ENTRIES: u64 = 1 << 15;

const ENTRIES_MASK: u64 = 0xffff;
const ORDER_SHIFT: u32 = 22;
const ORDER_MASK: u64 = 0xf << ORDER_SHIFT;
const FRAME_SHIFT: u32 = 32;
const _: () = assert!(MAX_FOLIO_ORDER.0 as u64 <= ORDER_MASK >> ORDER_SHIFT);

/// The value of a slot's cell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SlotState(pub(crate) u64);

impl SlotState {
    /// The slot is free or reserved.
    pub(crate) const FREE: Self = Self(0);
    /// The swap cache has the page; the upper half of the cell is its frame.
    pub(crate) const CACHED: u64 = 1 << 16;
    /// The holder of the cached folio's lock is working on the content, and releases the slot last.
    pub(crate) const BUSY: u64 = 1 << 17;
    /// The content is one repeated word, which is the slot's value.
    pub(crate) const FILLED: u64 = 1 << 18;
    /// The area's store has the content; the slot's value is its handle.
    pub(crate) const STORED: u64 = 1 << 19;
    /// The content could not be read: an access gets SIGBUS.
    pub(crate) const LOST: u64 = 1 << 20;
    /// A device is writing content to the slot that is no longer needed ([`super::take_over`]). It
    /// releases the slot last.
    pub(crate) const WRITING: u64 = 1 << 21;
    /// The bits that specify the location of the content.
    pub(crate) const CONTENT: u64 = Self::FILLED | Self::STORED | Self::LOST;

    /// The initial cell when the page at `frame`, of a folio of this order, is swapped out: the
    /// swap cache has the page, and `entries` entries refer to the slot.
    #[inline]
    pub(crate) fn going_out(frame: Frame, order: Order, entries: u32) -> Self {
        Self(u64::from(entries)).cached(frame, order)
    }

    /// The cell, busy, with the page in the cache.
    #[inline(always)]
    fn cached(self, frame: Frame, order: Order) -> Self {
        let page = u64::from(frame.0) << FRAME_SHIFT | u64::from(order.0) << ORDER_SHIFT;
        Self(self.0 | Self::CACHED | Self::BUSY | page)
    }

    /// The order of the folio that has the page in the cache, or had it in memory last.
    #[inline]
    pub(crate) fn order(self) -> Order {
        Order(((self.0 & ORDER_MASK) >> ORDER_SHIFT) as u8)
    }

    /// The number of entries that refer to the slot.
    #[inline]
    pub(crate) fn entries(self) -> u32 {
        (self.0 & ENTRIES_MASK) as u32
    }

    /// The cell with one entry fewer.
    #[inline]
    pub(crate) fn without_entry(self) -> Self {
        Self(self.0.wrapping_sub(1))
    }

    /// Whether neither entries nor I/O hold the slot. The cache may still have the page, which must
    /// then leave it.
    #[inline]
    pub(crate) fn is_unheld(self) -> bool {
        self.0 & (ENTRIES_MASK | Self::BUSY | Self::WRITING) == 0
    }

    /// Whether entries refer to the slot or a device is writing to it.
    #[inline]
    pub(crate) fn is_named_or_written(self) -> bool {
        self.0 & (ENTRIES_MASK | Self::WRITING) != 0
    }

    /// Whether all the bits are set.
    #[inline]
    pub(crate) fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }

    /// The cached page.
    #[inline]
    pub(crate) fn frame(self) -> Option<Frame> {
        self.has(Self::CACHED).then_some(Frame((self.0 >> FRAME_SHIFT) as u32))
    }

    /// The cell, busy, with the page in the cache, in a folio of this order.
    #[inline(always)]
    pub(crate) fn coming_in(self, frame: Frame, order: Order) -> Self {
        Self(self.0 & (ENTRIES_MASK | Self::CONTENT)).cached(frame, order)
    }

    /// The cell after the page has left the cache, with its shadow.
    #[inline]
    pub(crate) fn uncached(self, shadow: u32) -> Self {
        let rest = self.0 & (ENTRIES_MASK | Self::CONTENT | ORDER_MASK);
        Self(rest | u64::from(shadow) << FRAME_SHIFT)
    }

    /// The shadow that [`SlotState::uncached`] has stored.
    #[inline]
    pub(crate) fn shadow(self) -> Option<u32> {
        (!self.has(Self::CACHED)).then_some((self.0 >> FRAME_SHIFT) as u32)
    }
}

/// Adds a reference of an entry to each cell, or to none. Returns whether the references were
/// added. The lock of the cells' cluster is held.
#[inline]
pub(super) fn name_all(cells: &[impl Word<u64>]) -> bool {
    if cells.iter().any(|cell| u64::from(SlotState(cell.load(Relaxed)).entries()) >= MAX_ENTRIES) {
        return false;
    }
    for cell in cells {
        cell.store(cell.load(Relaxed) + 1, Relaxed);
    }
    true
}

/// The reason why content cannot be swapped in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ClaimError {
    /// A slot of the run is in the cache, or busy.
    Cached,
    /// No entry refers to a slot of the run any longer.
    Gone,
}

/// Enters the pages from `head` on, of a folio of this order, into the cache for the cells of a
/// run, and makes the cells busy. Changes nothing if no entry refers to a slot or another thread
/// has a slot. The lock of the cells' cluster is held.
#[inline]
pub(super) fn claim_all(
    cells: &[impl Word<u64>],
    head: Frame,
    order: Order,
) -> Result<(), ClaimError> {
    let look =
        |(least, any): (u32, u64), cell: SlotState| (least.min(cell.entries()), any | cell.0);
    let none = (u32::MAX, 0);
    // Base pages are the most frequent folios, and for them the loop costs more than the work.
    let (least, any) = match cells {
        [cell] => look(none, SlotState(cell.load(Relaxed))),
        _ => cells.iter().fold(none, |seen, cell| look(seen, SlotState(cell.load(Relaxed)))),
    };
    if least == 0 {
        return Err(ClaimError::Gone);
    }
    if any & (SlotState::CACHED | SlotState::BUSY) != 0 {
        return Err(ClaimError::Cached);
    }
    for (page, cell) in (0..).zip(cells) {
        let now = SlotState(cell.load(Relaxed)).coming_in(head.plus(page), order);
        // Release, by the lock: a thread that finds the folio also finds it locked.
        cell.store(now.0, Relaxed);
    }
    Ok(())
}

/// Calls `hold` with the frame that the cache has for a slot, if `look` finds the same frame before
/// and after the call. Between the two lookups, the page may leave the cache, and its frame may get
/// another owner.
#[inline]
pub(super) fn hold_cached<R>(
    look: impl Fn() -> Option<Frame>,
    hold: impl FnOnce(Frame) -> Option<R>,
) -> Option<R> {
    let frame = look()?;
    let held = hold(frame)?;
    (look() == Some(frame)).then_some(held)
}
