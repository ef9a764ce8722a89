//! How far the clock goes in one search for memory.
//!
//! A page that was used and hot is cold after three looks, so a search goes round four times. It ends
//! sooner where another turn would see the same: nothing was freed in this one, nothing is on its
//! way, and nothing stays only because it was used or locked. Then that is noted
//! ([`crate::swap::exhausted`]): each later search looks at one step, until something has changed. So
//! a program whose calls fail does not look at all of memory with each.
//!
//! A search that would give up, and has passed over folios that were found locked into memory before
//! ([`crate::frame`], `unevictable`), looks at them too for a turn: the fifth at the most.

use crate::Memory;
use crate::frame::{FrameRange, Turn};
use crate::platform::Platform;
use crate::swap::exhausted::Supply;

use super::pressure::Batch;

/// Frames that one step of the hand passes.
const STEP: u32 = 64;
/// How often the hand goes round at the most.
const TURNS: u64 = 4;

/// A part of the frames that nothing else looks at in this turn.
pub(super) struct Step {
    pub(super) begin: u32,
    pub(super) end: u32,
    pub(super) turn: Turn,
    /// Whether to look at folios too that were found locked into memory.
    pub(super) all: bool,
    /// Whether a page without a slot may go out.
    pub(super) room_in_swap: bool,
}

/// What is known when a turn begins.
struct Begin {
    supply: Supply,
    /// The hand, and the search's share of what it has passed.
    hand: u64,
    scanned: u64,
    freed: u64,
}

/// A search for pages to free.
pub(super) struct Search {
    /// Frames that it has passed.
    pub(super) scanned: u64,
    /// Frames that it passes at most.
    most: u64,
    /// Frames of a turn: all, in whole steps.
    all: u64,
    begin: Begin,
    /// Nothing was left before: the one step looks at all folios.
    looks_at_all: bool,
    /// A turn was added for folios that were found locked into memory.
    is_longer: bool,
    /// Writes that may still be waited for, once it is over.
    waits: Option<u64>,
}

impl Search {
    pub(super) fn new<P: Platform>(memory: &Memory<P>) -> Self {
        let all = u64::from(memory.frames.span().count).next_multiple_of(u64::from(STEP));
        let supply = memory.supply();
        let nothing_left = memory.clock.exhausted.is(supply);
        let most = if nothing_left { u64::from(STEP) } else { all * TURNS };
        let begin = Begin { supply, hand: memory.clock.hand(), scanned: 0, freed: 0 };
        Self {
            scanned: 0,
            most,
            all,
            begin,
            looks_at_all: nothing_left,
            is_longer: false,
            waits: None,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.scanned >= self.most
    }

    /// The next frames to look at.
    pub(super) fn step<P: Platform>(&mut self, memory: &Memory<P>) -> Step {
        self.step_of(memory, STEP)
    }

    /// As [`Search::step`], of so many frames.
    pub(super) fn step_of<P: Platform>(&mut self, memory: &Memory<P>, frames: u32) -> Step {
        let FrameRange { count, .. } = memory.frames.span();
        let all = self.looks_at_all || memory.clock.looks_at_all();
        let (begin, turn) = memory.clock.advance(frames, count);
        self.scanned += u64::from(frames);
        let room_in_swap = memory.has_room_in_swap();
        Step { begin, end: (begin + frames).min(count), turn, all, room_in_swap }
    }

    /// The step is done, and `freed` pages were freed in all.
    pub(super) fn end_step<P: Platform>(
        &mut self,
        memory: &Memory<P>,
        freed: u64,
        batch: &mut Batch<'_, P>,
    ) {
        let found = batch.later
            || !batch.is_empty()
            || freed > self.begin.freed
            || memory.pages_under_writeback() > 0;
        if self.most < self.all && found {
            // Something has changed that did not say so.
            memory.clock.exhausted.forget();
            self.most = self.all * TURNS;
        }
        let passed = self.scanned - self.begin.scanned;
        if passed < self.all {
            return;
        }
        // Another CPU that was searching may have found what this one has not.
        let alone = memory.clock.hand() == self.begin.hand + passed;
        let freed_nothing = freed == self.begin.freed && batch.is_empty();
        let gives_up = !found || freed_nothing && self.is_over();
        if gives_up && batch.passed_over && !self.is_longer {
            // The clock says it, and not this search: another one has its share of the turn.
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
            supply: memory.supply(),
            hand: memory.clock.hand(),
            scanned: self.scanned,
            freed,
        };
    }

    /// Whether to wait for a device. Before the search is over, the pages that are under way may be
    /// all that is wanted.
    pub(super) fn may_wait<P: Platform>(&mut self, memory: &Memory<P>) -> bool {
        let writes = memory.pages_under_writeback();
        if writes == 0 || !self.is_over() {
            return writes > 0;
        }
        let left = self.waits.get_or_insert(writes);
        let may = *left > 0;
        *left = left.saturating_sub(1);
        may
    }
}

impl<P: Platform> Memory<P> {
    /// Notes that pages are not locked into memory any more.
    #[cold]
    pub(crate) fn note_unlocked(&self) {
        self.clock.exhausted.forget();
        self.clock.look_at_all(self.frames.span().count);
    }

    fn supply(&self) -> Supply {
        let returned = self.frames.traffic().returned;
        Supply { returned, room_in_swap: self.has_room_in_swap() }
    }
}
