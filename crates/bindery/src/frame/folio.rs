//! Folios: memory that users map, in blocks of 1 to 512 pages that live and die together.
//!
//! A folio is freed by whoever takes away its last mapping or reference. The count is one word
//! ([`super::meta`]), so that is exactly one caller, and the caller knows:
//!
//! ```text
//!            references  mappings
//! new_folio       1          0      the fault that asked for it holds it
//! first_map       0         16      ... and maps all 16 pages: a plain store, nobody else knows it
//! map             0         32      fork: the child maps them too
//! hold            1         32      reclaim looks at it
//! unmap           1         16      the child exits
//! unmap           1          0      the parent exits; not freed
//! release         0          0      freed
//! ```
//!
//! Whoever adds a mapping or a reference has one already, or holds the lock of a table that has:
//! the count never rises from zero. Taking away releases what the caller did to the folio's bytes,
//! and the one who frees acquires it, so the next owner's writes come after all of it.
//!
//! Mappings are taken away only after the flush that revoked them, so that freed frames are in no
//! TLB (invariant 1); see `tlb/`.

use core::sync::atomic::{AtomicU64, Ordering, Ordering::Relaxed, fence};

use super::meta::{DIRTY, EXCLUSIVE, Kind, LAZY, LOCK, is_kind, order_in, state_of};
use super::{Frames, FreeBatch};
use crate::addr::Frame;
use crate::platform::Platform;

/// The largest order of a folio: 512 pages, 2 MiB.
pub const MAX_FOLIO_ORDER: u8 = 9;

/// Mappings stand in the upper half of `count`.
pub(super) const MAPPING: u64 = 1 << 32;
pub(super) const REFERENCE: u64 = 1;
/// Pins stand in the upper half of the references: holders that read or write the pages behind the
/// back of the page tables.
const PIN: u64 = 1 << 16;
/// More pins than this are refused, which leaves every CPU room to add some and find out.
const TOO_MANY_PINS: u32 = 1 << 15;
/// A folio has fewer mappings than this, which leaves every CPU room to add some and find out.
const TOO_MANY_MAPPINGS: u32 = 1 << 31;

/// Pages in one word of anon-exclusive bits.
pub(super) const WORD_PAGES: u32 = u64::BITS;
pub(super) const MAX_WORDS: usize = (1 << MAX_FOLIO_ORDER) / WORD_PAGES as usize;

/// A block of 2^order pages that users may map: a name for it, which keeps nothing alive.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Folio {
    /// The first frame, aligned to the folio's size.
    pub(crate) head: Frame,
    /// Base-2 logarithm of the number of pages, at most [`MAX_FOLIO_ORDER`].
    pub(crate) order: u8,
}

impl Folio {
    /// How many pages it has, 1 to 512.
    #[inline]
    pub const fn pages(self) -> u32 {
        1 << self.order
    }

    /// How many words of anon-exclusive bits it has.
    #[inline]
    pub(super) fn words(self) -> usize {
        (self.pages() as usize).div_ceil(WORD_PAGES as usize)
    }
}

/// Whether a call took away the last that kept a folio, which is free now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Freed {
    /// Others still map or hold it.
    No,
    /// Its frames are back in the allocator.
    Yes,
}

/// The folio would have 2^31 mappings; none was added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TooManyMappings;

/// `count` bits from bit `first`; `count` is 1 to 64, and both fit in the word.
#[inline]
pub(super) const fn bits(first: u32, count: u32) -> u64 {
    (u64::MAX >> (WORD_PAGES - count)) << first
}

impl<P: Platform> Frames<P> {
    /// A fresh folio with one reference, the caller's, and no mapping; not dirty, not locked,
    /// every page anon-exclusive, contents unspecified. `None` where there is no memory, or
    /// `order` is above [`MAX_FOLIO_ORDER`].
    ///
    /// Does not sleep. O(pages): each tail learns its head.
    pub(crate) fn new_folio(&self, order: u8) -> Option<Folio> {
        if order > MAX_FOLIO_ORDER {
            return None;
        }
        let folio = Folio { head: self.allocate(order)?, order };
        let head = self.meta(folio.head);
        let exclusive = if order == 0 { EXCLUSIVE } else { 0 };
        head.count.store(REFERENCE, Relaxed);
        self.write_tails(folio);
        self.write_words(folio, |_| bits(0, folio.pages().min(WORD_PAGES)));
        head.state.store(state_of(Kind::Folio, order) | exclusive, Relaxed);
        Some(folio)
    }

    pub(super) fn write_tails(&self, folio: Folio) {
        let state = state_of(Kind::Tail, folio.order);
        for page in 1..folio.pages() {
            let tail = self.meta(folio.head.plus(page));
            tail.owner.store(folio.head.0, Relaxed);
            tail.state.store(state, Relaxed);
        }
    }

    /// Stores all anon-exclusive words of a folio above order 0 that nobody else knows.
    pub(super) fn write_words(&self, folio: Folio, value: impl Fn(usize) -> u64) {
        if folio.order > 0 {
            for index in 0..folio.words() {
                self.word(folio, index).store(value(index), Relaxed);
            }
        }
    }

    /// The word with the anon-exclusive bits of pages `64 * index` and on; order 1 and above.
    #[inline]
    pub(super) fn word(&self, folio: Folio, index: usize) -> &AtomicU64 {
        &self.meta(folio.head.plus(1 + index as u32)).word
    }

    /// The folio that `frame` is a page of. `None` for anything else: tables, the zero page, free
    /// memory, memory that is not ours. O(1).
    ///
    /// The answer lasts only while the caller keeps the folio from being freed or split.
    #[inline]
    pub(crate) fn folio_of(&self, frame: Frame) -> Option<Folio> {
        if !self.metas.covers(frame) {
            return None;
        }
        let meta = self.meta(frame);
        let state = meta.state.load(Relaxed);
        if is_kind(state, Kind::Folio) {
            return Some(Folio { head: frame, order: order_in(state) });
        }
        if is_kind(state, Kind::Tail) {
            return self.folio_of_tail(frame, Frame(meta.owner.load(Relaxed)));
        }
        None
    }

    /// A tail may be left over from a folio that was freed, with whatever in its `owner`. But a
    /// folio that does reach to `frame` has written its head there.
    #[inline]
    fn folio_of_tail(&self, frame: Frame, head: Frame) -> Option<Folio> {
        if !self.metas.covers(head) {
            return None;
        }
        let state = self.meta(head).state.load(Relaxed);
        let folio = Folio { head, order: order_in(state) };
        let reaches = is_kind(state, Kind::Folio) && frame.0.wrapping_sub(head.0) < folio.pages();
        reaches.then_some(folio)
    }

    /// Turns the one reference of a folio fresh from [`Frames::new_folio`] into `pages` mappings.
    /// The caller is its only owner, so this is a plain store.
    #[inline]
    pub(crate) fn first_map(&self, folio: Folio, pages: u32) {
        let count = &self.meta(folio.head).count;
        debug_assert_eq!(count.load(Relaxed), REFERENCE, "{folio:?} is not fresh");
        debug_assert!(pages >= 1 && pages <= folio.pages());
        count.store(u64::from(pages) * MAPPING, Relaxed);
    }

    /// Adds `pages` mappings, at most as many as the folio has pages. One atomic instruction.
    ///
    /// # Errors
    ///
    /// [`TooManyMappings`] where the folio would have 2^31 or more; nothing has changed.
    #[inline]
    pub(crate) fn map(&self, folio: Folio, pages: u32) -> Result<(), TooManyMappings> {
        debug_assert!(pages <= folio.pages());
        let count = &self.meta(folio.head).count;
        let added = u64::from(pages) * MAPPING;
        let before = count.fetch_add(added, Relaxed);
        debug_assert_ne!(before, 0, "{folio:?} was free");
        if mappings_in(before) >= TOO_MANY_MAPPINGS - pages {
            count.fetch_sub(added, Relaxed);
            return Err(TooManyMappings);
        }
        Ok(())
    }

    /// Takes away `pages` mappings; the folio is freed with the last one if nobody holds a
    /// reference. One atomic instruction where it is not. Mappings that the folio does not have
    /// are not taken away but counted in [`Frames::refused`].
    #[inline]
    pub(crate) fn unmap(&self, platform: &P, folio: Folio, pages: u32) -> Freed {
        let taken = u64::from(pages) * MAPPING;
        let before = self.meta(folio.head).count.fetch_sub(taken, Ordering::Release);
        self.after_taking(platform, folio, before, taken, mappings_in(before) >= pages)
    }

    /// As [`Frames::unmap`], for whoever unmaps many: a folio that becomes free goes into the batch.
    /// With `dirty`, whoever has the folio from now on is told that it was written.
    ///
    /// No atomic instruction where the mappings are all that keep the folio. Nobody else can come
    /// by it then: who adds a mapping or a reference has one already, which would count, or holds
    /// the lock of a table that maps it, and the caller's is unhooked or locked.
    #[inline]
    pub(crate) fn unmap_into(
        &self,
        batch: &mut FreeBatch<'_, P>,
        platform: &P,
        folio: Folio,
        pages: u32,
        dirty: impl FnOnce() -> bool,
    ) {
        let head = self.meta(folio.head);
        // What others did to the folio before they let go comes before its next use.
        if head.count.load(Ordering::Acquire) == u64::from(pages) * MAPPING {
            head.count.store(0, Relaxed);
            head.state.store(state_of(Kind::Tail, 0), Relaxed);
            batch.push(folio.head, folio.pages());
            return;
        }
        if dirty() {
            // Before the mapping goes: afterwards the folio may be somebody else's.
            self.mark_dirty(folio);
        }
        self.unmap(platform, folio, pages);
    }

    /// Adds a reference. The caller has one, or knows by a table's lock that a mapping stays.
    #[inline]
    pub(crate) fn hold(&self, folio: Folio) {
        let before = self.meta(folio.head).count.fetch_add(REFERENCE, Relaxed);
        debug_assert_ne!(before, 0, "{folio:?} was free");
        debug_assert_ne!(before as u16, u16::MAX, "{folio:?} has too many references");
    }

    /// Adds `count` references, one for each page that an object keeps of the folio. The caller has
    /// one already.
    pub(crate) fn hold_pages(&self, folio: Folio, count: u32) {
        let before = self.meta(folio.head).count.fetch_add(u64::from(count), Relaxed);
        debug_assert_ne!(before, 0, "{folio:?} was free");
    }

    /// Takes away `count` references at once, as [`Frames::release`] does with one.
    pub(crate) fn release_pages(&self, platform: &P, folio: Folio, count: u32) -> Freed {
        let taken = u64::from(count);
        let before = self.meta(folio.head).count.fetch_sub(taken, Ordering::Release);
        self.after_taking(platform, folio, before, taken, u32::from(before as u16) >= count)
    }

    /// Takes away a reference; the folio is freed with the last one if it is not mapped. A
    /// reference that the folio does not have is counted in [`Frames::refused`].
    #[inline]
    pub(crate) fn release(&self, platform: &P, folio: Folio) -> Freed {
        let before = self.meta(folio.head).count.fetch_sub(REFERENCE, Ordering::Release);
        self.after_taking(platform, folio, before, REFERENCE, before as u16 != 0)
    }

    #[inline]
    fn after_taking(
        &self,
        platform: &P,
        folio: Folio,
        before: u64,
        taken: u64,
        was_there: bool,
    ) -> Freed {
        if !was_there {
            // A bug elsewhere. Put it back, so that the halves do not borrow from each other.
            self.meta(folio.head).count.fetch_add(taken, Relaxed);
            self.refuse();
            return Freed::No;
        }
        if before != taken {
            return Freed::No;
        }
        // What others did to the folio before they let go comes before its next use.
        fence(Ordering::Acquire);
        self.free(platform, folio.head, folio.order);
        Freed::Yes
    }

    /// How many hold the folio without mapping or pinning it. Old news unless the caller keeps
    /// others out.
    #[inline]
    pub(crate) fn references(&self, folio: Folio) -> u32 {
        self.meta(folio.head).count.load(Relaxed) as u32 & (PIN as u32 - 1)
    }

    /// Pins the folio: it stays where it is until it is unpinned. The caller keeps it mapped
    /// meanwhile. Says whether that was possible.
    pub(crate) fn pin(&self, folio: Folio) -> bool {
        let before = self.meta(folio.head).count.fetch_add(PIN, Ordering::AcqRel);
        if pins_in(before) >= TOO_MANY_PINS {
            self.meta(folio.head).count.fetch_sub(PIN, Relaxed);
            return false;
        }
        true
    }

    /// Takes back a pin; the folio is freed with the last if nobody else has it.
    pub(crate) fn unpin(&self, platform: &P, folio: Folio) -> Freed {
        let before = self.meta(folio.head).count.fetch_sub(PIN, Ordering::Release);
        self.after_taking(platform, folio, before, PIN, pins_in(before) > 0)
    }

    /// How many have pinned the folio.
    #[inline]
    pub(crate) fn pins(&self, folio: Folio) -> u32 {
        pins_in(self.meta(folio.head).count.load(Relaxed))
    }

    /// How many pairs of a page and an entry that maps it. Old news unless the caller keeps
    /// others out.
    #[inline]
    pub(crate) fn mappings(&self, folio: Folio) -> u32 {
        mappings_in(self.meta(folio.head).count.load(Relaxed))
    }

    /// Whether exactly `mappings` entries map pages of the folio, and nobody holds it.
    pub(crate) fn is_mapped_only(&self, folio: Folio, mappings: u32) -> bool {
        self.meta(folio.head).count.load(Relaxed) == u64::from(mappings) * MAPPING
    }

    /// Whether `page` (an index in the folio) is anon-exclusive, and how many of the `count`
    /// pages from there agree with it, at least 1. `(false, 0)` where `page` is not in the folio
    /// or `count` is 0; pages behind the folio's end are not counted. O(words touched).
    pub(crate) fn exclusive_run(&self, folio: Folio, page: u32, count: u32) -> (bool, u32) {
        let count = count.min(folio.pages().saturating_sub(page));
        if count == 0 {
            return (false, 0);
        }
        if folio.order == 0 {
            return (self.meta(folio.head).state.load(Relaxed) & EXCLUSIVE != 0, 1);
        }
        let mut index = (page / WORD_PAGES) as usize;
        let mut word = self.word(folio, index).load(Relaxed) >> (page % WORD_PAGES);
        let exclusive = word & 1 != 0;
        let mut run = 0;
        let mut room = WORD_PAGES - page % WORD_PAGES;
        loop {
            let equal = if exclusive { word.trailing_ones() } else { word.trailing_zeros() };
            run += equal.min(room);
            if equal < room || run >= count {
                return (exclusive, run.min(count));
            }
            index += 1;
            room = WORD_PAGES;
            word = self.word(folio, index).load(Relaxed);
        }
    }

    /// Marks `count` pages from `page` (an index in the folio) anon-exclusive; pages behind the
    /// folio's end are ignored. One store or atomic instruction for each 64 pages, none where
    /// they are so already.
    pub(crate) fn set_exclusive(&self, folio: Folio, page: u32, count: u32) {
        self.change_exclusive(folio, page, count, u64::MAX);
    }

    /// As [`Frames::set_exclusive`], but the pages are no longer anon-exclusive.
    pub(crate) fn clear_exclusive(&self, folio: Folio, page: u32, count: u32) {
        self.change_exclusive(folio, page, count, 0);
    }

    /// `to` is all ones or all zeroes.
    #[inline]
    fn change_exclusive(&self, folio: Folio, page: u32, count: u32, to: u64) {
        let end = page.saturating_add(count).min(folio.pages());
        if folio.order == 0 {
            if page < end {
                self.change_state_flag(folio, EXCLUSIVE, to != 0);
            }
            return;
        }
        let mut page = page;
        while page < end {
            let first = page % WORD_PAGES;
            let pages = (end - page).min(WORD_PAGES - first);
            let word = self.word(folio, (page / WORD_PAGES) as usize);
            let mask = bits(first, pages);
            let old = word.load(Relaxed);
            if (old ^ to) & mask == 0 {
                // As it should be: leave the cache line alone.
            } else if pages == folio.pages().min(WORD_PAGES) {
                // Every page of the word is the caller's, so nobody else changes any of it.
                word.store(to & mask, Relaxed);
            } else if to == 0 {
                word.fetch_and(!mask, Relaxed);
            } else {
                word.fetch_or(mask, Relaxed);
            }
            page += pages;
        }
    }

    #[inline]
    fn change_state_flag(&self, folio: Folio, flag: u32, set: bool) {
        let state = &self.meta(folio.head).state;
        if (state.load(Relaxed) & flag != 0) == set {
            return;
        }
        if set {
            state.fetch_or(flag, Relaxed);
        } else {
            state.fetch_and(!flag, Relaxed);
        }
    }

    /// Notes that the folio was written. A load where that is known already.
    #[inline]
    pub(crate) fn mark_dirty(&self, folio: Folio) {
        self.change_state_flag(folio, DIRTY, true);
    }

    /// Whether the folio was written since [`Frames::clear_dirty`].
    #[inline]
    pub(crate) fn is_dirty(&self, folio: Folio) -> bool {
        self.meta(folio.head).state.load(Relaxed) & DIRTY != 0
    }

    /// Notes that the folio's content may be dropped as long as nobody writes it (`MADV_FREE`).
    pub(crate) fn mark_lazy(&self, folio: Folio) {
        self.change_state_flag(folio, DIRTY, false);
        self.change_state_flag(folio, LAZY, true);
    }

    /// Whether the folio's content may be dropped, unless it was written since
    /// [`Frames::mark_lazy`].
    pub(crate) fn is_lazy(&self, folio: Folio) -> bool {
        self.meta(folio.head).state.load(Relaxed) & LAZY != 0
    }

    /// Whether the folio is mapped more often than it has pages: by several processes, for certain.
    pub(crate) fn is_shared(&self, folio: Folio) -> bool {
        self.mappings(folio) > folio.pages()
    }

    /// Forgets that the folio was written: its content is about to be saved, and writes from now
    /// on are new.
    #[inline]
    #[cfg_attr(not(test), expect(dead_code, reason = "reclaim will need it"))]
    pub(crate) fn clear_dirty(&self, folio: Folio) {
        self.change_state_flag(folio, DIRTY, false);
    }

    /// Takes the folio's lock, unless somebody has it. Never waits.
    #[inline]
    #[must_use]
    pub(crate) fn try_lock_folio(&self, folio: Folio) -> bool {
        self.meta(folio.head).state.fetch_or(LOCK, Ordering::Acquire) & LOCK == 0
    }

    /// Gives back the folio's lock, which the caller holds.
    #[inline]
    pub(crate) fn unlock_folio(&self, folio: Folio) {
        let before = self.meta(folio.head).state.fetch_and(!LOCK, Ordering::Release);
        debug_assert_ne!(before & LOCK, 0, "{folio:?} was not locked");
    }
}

/// The pins in a value of `count`.
#[inline]
const fn pins_in(count: u64) -> u32 {
    count as u32 >> 16
}

/// The mappings in a value of `count`.
#[inline]
pub(super) const fn mappings_in(count: u64) -> u32 {
    (count >> 32) as u32
}
