//! The length of one search for memory.
//!
//! A page that was used and hot is cold after three visits, so a search makes four turns. It ends
//! earlier if another turn would find nothing more: if this turn has freed nothing, no page is in
//! flight, and no folio stays only because it was used or locked. This outcome is recorded
//! ([`crate::swap::exhausted`]), and each later search makes only one step until a change occurs.
//! So a program whose calls fail does not scan all of memory each time.
//!
//! Before a search fails, it makes one more turn, at most the fifth, to examine the folios that it
//! has skipped because they were previously found locked into memory ([`crate::frame`],
//! `unevictable`).

use core::ops::Range;

use crate::Memory;
use crate::folio::Turn;
use crate::frame::FrameRange;
use crate::platform::Platform;
use crate::swap::exhausted::Supply;

use super::pressure::EvictionBatch;

/// The number of frames that one step of the hand passes.
const STEP: u32 = 64;
/// The maximum number of turns of the hand.
const TURNS: u64 = 4;

/// A part of the frames, which no other step examines in this turn.
pub(super) struct ScanPart {
    pub(super) begin: u32,
    pub(super) end: u32,
    pub(super) turn: Turn,
    /// Whether to examine folios that were found locked into memory, too.
    pub(super) all: bool,
    /// Whether a page without a slot may be swapped out.
    pub(super) room_in_swap: bool,
}

/// The state at the start of a turn.
struct Begin {
    supply: Supply,
    /// The position of the hand, and the number of frames that this search has passed.
    hand: u64,
    scanned: u64,
    freed: u64,
}

/// A search for pages to free.
pub(super) struct Search {
    /// The number of frames that the search has passed.
    pub(super) scanned: u64,
    /// The maximum number of frames to pass.
    most: u64,
    /// The number of frames of a turn: all frames.
    all: u64,
    begin: Begin,
    /// Whether the previous search found nothing left, in which case the only step examines all
    /// folios.
    looks_at_all: bool,
    /// Whether the caller has chosen the length of the search.
    is_short: bool,
    /// Whether a turn was added for folios that were found locked into memory.
    is_longer: bool,
    /// The number of pages in flight on which the search no longer relies.
    of_others: u64,
    /// The number of completions that may still free nothing before the search stops relying on the
    /// pages in flight.
    patience: Option<u32>,
    /// The number of writes that the search may still wait for, once it is over.
    waits: Option<u64>,
}

impl Search {
    /// A search. With a limit, the search passes this number of frames, in whole steps.
    pub(super) fn new<P: Platform>(memory: &Memory<P>, limit: Option<u64>) -> Self {
        let all = u64::from(memory.frames.span().count);
        let supply = supply(memory);
        let nothing_left = memory.clock.exhausted.is(supply);
        let most = if nothing_left { all.min(u64::from(STEP)) } else { all * TURNS };
        // A short search gives no information about all of memory, so it is neither extended nor
        // recorded.
        let is_short = limit.is_some();
        let most = limit.map_or(most, |limit| most.min(limit));
        let begin = Begin { supply, hand: memory.clock.hand(), scanned: 0, freed: 0 };
        Self {
            scanned: 0,
            most,
            all,
            begin,
            looks_at_all: nothing_left && !is_short,
            is_short,
            is_longer: false,
            of_others: 0,
            patience: None,
            waits: None,
        }
    }

    /// Whether the caller has chosen the length of the search.
    pub(super) fn is_short(&self) -> bool {
        self.is_short
    }

    pub(super) fn is_over(&self) -> bool {
        self.scanned >= self.most
    }

    /// The next frames to examine.
    pub(super) fn step<P: Platform>(&mut self, memory: &Memory<P>) -> ScanPart {
        self.step_of(memory, STEP)
    }

    /// Like [`Search::step`], with `frames` frames, or fewer at the end of a turn.
    pub(super) fn step_of<P: Platform>(&mut self, memory: &Memory<P>, frames: u32) -> ScanPart {
        let FrameRange { count, .. } = memory.frames.span();
        let all = self.looks_at_all || memory.clock.looks_at_all();
        let (Range { start: begin, end }, turn) = memory.clock.advance(frames, count);
        self.scanned += u64::from(end - begin);
        let room_in_swap = memory.swap.has_room(&memory.frames);
        ScanPart { begin, end, turn, all, room_in_swap }
    }

    /// Ends a step. `freed` is the total number of freed pages.
    pub(super) fn end_step<P: Platform>(
        &mut self,
        memory: &Memory<P>,
        freed: u64,
        batch: &mut EvictionBatch<'_, P>,
    ) {
        if self.is_short {
            return;
        }
        let found = batch.later
            || !batch.is_empty()
            || freed > self.begin.freed
            || memory.swap.pages_under_writeback() > 0;
        if self.most < self.all && found {
            // A change has occurred that did not reset the record.
            memory.clock.exhausted.forget();
            self.most = self.all * TURNS;
        }
        let passed = self.scanned - self.begin.scanned;
        if passed < self.all {
            return;
        }
        // A concurrent search on another CPU may have found folios that this one has not.
        let alone = memory.clock.hand() == self.begin.hand + passed;
        let freed_nothing = freed == self.begin.freed && batch.is_empty();
        let gives_up = !found || freed_nothing && self.is_over();
        if gives_up && batch.passed_over && !self.is_longer {
            // Set in the clock rather than in this search, because another search may process a
            // part of the turn.
            memory.clock.look_at_all(memory.frames.span().count);
            self.is_longer = true;
            self.most = self.most.max(self.scanned + self.all);
        } else if !found && alone {
            memory.clock.exhausted.note(self.begin.supply);
            self.most = self.scanned;
        }
        self.looks_at_all = false;
        (batch.later, batch.passed_over) = (false, false);
        self.begin = Begin {
            supply: supply(memory),
            hand: memory.clock.hand(),
            scanned: self.scanned,
            freed,
        };
    }

    /// The number of pages in flight on which the search relies.
    pub(super) fn coming<P: Platform>(&mut self, memory: &Memory<P>) -> u64 {
        let pages = memory.swap.pages_under_writeback();
        self.of_others = self.of_others.min(pages);
        pages - self.of_others
    }

    /// Records that a wait for a device has freed `freed` pages. Once the number of waits without a
    /// page equals the number of requests, the pages in flight belong to threads that free them
    /// themselves, or to a failing device. The search continues without them, and relies on writes
    /// that begin later. So with a steady writer it may again wait the same number of times between
    /// two of its steps. Without this rule, the following could repeat forever:
    /// 1. Two threads alternate: while one processes its completed write, the other is writing.
    /// 2. The pages of that write would be enough, so this thread waits for the write.
    /// 3. The write completes, and its own thread takes it first: back to 1.
    pub(super) fn end_wait<P: Platform>(&mut self, memory: &Memory<P>, freed: u64) {
        if freed > 0 {
            self.patience = None;
            return;
        }
        let left = self.patience.get_or_insert_with(|| memory.swap.requests_in_flight());
        *left = left.saturating_sub(1);
        if *left == 0 {
            self.of_others = memory.swap.pages_under_writeback();
            self.patience = None;
        }
    }

    /// Whether to wait for a device. Before the search is over, the pages in flight may be
    /// sufficient.
    pub(super) fn may_wait<P: Platform>(&mut self, memory: &Memory<P>) -> bool {
        let writes = memory.swap.pages_under_writeback();
        if self.is_short || writes == 0 || !self.is_over() {
            return writes > 0 && !self.is_short;
        }
        let left = self.waits.get_or_insert(writes);
        let may = *left > 0;
        *left = left.saturating_sub(1);
        may
    }
}

/// The state of memory that a search depends on.
fn supply<P: Platform>(Memory { frames, swap, .. }: &Memory<P>) -> Supply {
    Supply { returned: frames.traffic().returned, room_in_swap: swap.has_room(frames) }
}
