//! Reclaim: chooses victims and evicts them when memory is short.
//!
//! # The policy
//! A *clock* (Corbató 1968) scans the metadata of all frames in order. Without lists, no other path
//! pays for reclaim. A folio is *cold*, *referenced*, *hot* or *passing* (`folio/aging.rs`,
//! `ReclaimState::update_age`): a folio that was used twice in a row is hot, and it must be found
//! unused twice in a row before it is evicted. Passing folios are evicted first
//! (`swap/passing.rs`). An evicted page leaves a *shadow*: the number of pages evicted until then.
//! If fewer than half as many pages have been evicted since then as frames are in use, the page
//! returns as hot, because it would have stayed if the hot pages had not displaced it (refault
//! distance; Linux: `workingset.c`; CLOCK-Pro, USENIX 2005, has a corresponding test period).
//!
//! # Windows
//! The hand leads to a folio, and the reverse map leads to a VMA that maps the folio. Reclaim then
//! works on the surrounding run of entries in one page table: it harvests the accessed bits of the
//! window, and replaces the mappings of folios that are cold and mapped only there with swap
//! entries. A folio is examined once in a turn of the clock, whichever neighbor the hand reached
//! first. The folios of several windows, 32 or more, form a batch, with one flush for each address
//! space ([`pressure`]). So the cost is proportional to the examined runs. (Linux's
//! multi-generational LRU examines neighbors in the same way.)
//!
//! # It cannot deadlock
//! Reclaim runs when its caller holds no lock ([`direct`]). It only tries the locks of folios and
//! of the reverse map. While a page is written out, it holds only the lock of the page's folio. It
//! allocates frames from a reserve that no other allocation may use, and never calls itself. It
//! waits for a swap device when enough pages are in flight or no other folio is left to examine; a
//! device completes its requests without any lock or memory of the core.
//!
//! A pager needs memory and locks of its own, and may never answer. So reclaim only asks it to store
//! dirty pages, in a thread that does not work for a pager, between two batches, with no lock held
//! ([`EvictionBatch::store_dirty`]). The pages are found again once they are clean. A call that
//! would fail otherwise waits for the answers, a limited number of times and briefly ([`direct`]).
//!
//! | file | idea |
//! |---|---|
//! | `direct` | reclaim by a call that would fail for lack of memory |
//! | `anonymous` | folios of anonymous memory |
//! | `family` | anonymous folios that several VMAs map |
//! | `files` | folios of files: clean ones need no swap |
//! | `pressure` | batches of folios, flushed and written out together |
//! | `search` | the length of a search, and its end when nothing is left |
//! | `sweep` | pages that programs have passed, reclaimed before the clock moves |
//! | `swap_on` | adding swap areas |

mod anonymous;
mod direct;
mod family;
mod files;
mod pressure;
mod search;
mod swap_on;
mod sweep;

use crate::Memory;
use crate::addr::Frame;
use crate::folio::{Folio, OwnerKind};
use crate::frame::Frames;
use crate::object::reclaim::Spare;
use crate::object::{drop_answered, settle_written};
use crate::platform::Platform;
use crate::swap::wait_for_a_write;

pub(crate) use direct::Attempts;
use pressure::EvictionBatch;
use search::{ScanPart, Search};
use sweep::Which;

/// The result of a call of [`Memory::reclaim`], in pages.
///
/// ```
/// use bindery::{Memory, Platform};
///
/// /// Whether reclaim still finds something worth its time.
/// fn pays<P: Platform>(memory: &Memory<P>) -> bool {
///     let reclaimed = memory.reclaim(32);
///     8 * reclaimed.freed > reclaimed.scanned
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Reclaimed {
    /// The number of pages that were freed.
    pub freed: u64,
    /// The number of frames that the clock passed.
    pub scanned: u64,
}

impl<P: Platform> Memory<P> {
    /// Frees at least `target` pages if possible: cached tables and slabs first, then pages that
    /// were not used recently. Anonymous pages are swapped out; clean pages of files can be read
    /// again. An embedder calls this from a dedicated thread when memory becomes short
    /// ([`Memory::shortage`]); calls of the core perform the same reclaim when they would otherwise
    /// fail. The caller holds no lock of the core and is not in a read section.
    ///
    /// Pages in flight count as freed, until completions equal in number to the requests have freed
    /// no page for this call. Once its search has ended, the call waits for at most the number of
    /// writes that were in flight at that time, so a steady writer does not delay it.
    ///
    /// Context: may sleep. Complexity: linear in the frames that the clock passes and in the runs
    /// of the windows; at most five turns of the clock, two if nothing is left to reclaim, and 64
    /// frames if an earlier search found nothing and nothing has been freed since.
    #[inline(never)]
    pub fn reclaim(&self, target: u64) -> Reclaimed {
        reclaim_until(self, target, u64::MAX, None)
    }

    /// As [`Memory::reclaim`], but the clock passes at most `frames` frames, rounded up to 64. (The
    /// clock passes more if programs have left many pages behind them since then.) The call
    /// waits for no write, unless all requests of a swap device are in use. It is intended for a
    /// thread of the embedder that also has other work, or that runs at a low priority: the thread
    /// repeats the call while [`Memory::shortage`] requires it. Pages whose writes are in flight
    /// are counted by a later call.
    ///
    /// A search that spans several calls never fails, so an embedder that gets no page for a turn
    /// of all frames should wait before it continues.
    ///
    /// Context: may sleep. Complexity: linear in `frames`, in the runs of their windows, and in the
    /// frames that caches retain.
    pub fn reclaim_step(&self, target: u64, frames: u64) -> Reclaimed {
        reclaim_until(self, target, u64::MAX, Some(frames))
    }

    /// Drops the clean pages of all files, whether recently used or not
    /// (`/proc/sys/vm/drop_caches`). Dirty, locked and pinned pages stay, as do pages that another
    /// thread is using. Returns the number of freed pages.
    ///
    /// Context: may sleep. Complexity: linear in the frames, plus the reclaim of each folio of a
    /// file.
    pub fn drop_clean_pages(&self) -> u64 {
        files::drop_clean_pages(self)
    }
}

/// Like [`Memory::reclaim`]; also ends when `enough` frames are free, including frames that other
/// CPUs freed, and when the clock has passed `most` frames, if given.
fn reclaim_until<P: Platform>(
    memory: &Memory<P>,
    target: u64,
    enough: u64,
    most: Option<u64>,
) -> Reclaimed {
    let before = memory.free_frame_count();
    // Answers to reads ahead hold pages that no access has needed yet.
    drop_answered(memory);
    settle_written(memory);
    memory.trim();
    let freed = memory.free_frame_count().saturating_sub(before) + memory.finish_swap_writes();
    let mut done = Reclaimed { freed, scanned: 0 };
    memory.discard_free_slots();
    memory.clock.note_use(memory.total_frames().saturating_sub(memory.free_frame_count()));
    let mut search = Search::new(memory, most);
    let mut batch = EvictionBatch::new(memory);
    done.freed += batch.sweep(target.saturating_sub(done.freed), &mut search);
    while done.freed < target && memory.free_frame_count() < enough {
        let coming = batch.pages() + search.coming(memory);
        if search.is_over() || done.freed + coming >= target {
            if !batch.is_empty() {
                done.freed += batch.finish();
                continue;
            }
            if search.may_wait(memory) {
                let freed = wait_for_a_write(memory);
                search.end_wait(memory, freed);
                done.freed += freed;
                continue;
            }
            if search.is_over() || search.is_short() {
                break;
            }
        }
        let step = search.step(memory);
        done.freed += batch.pass_over(&step, target - done.freed, &search);
        if batch.is_empty() && !batch.dirty.is_empty() {
            batch.store_dirty();
        }
        search.end_step(memory, done.freed, &mut batch);
        // Never in the middle of a batch. Without this condition, the following could happen on a
        // CPU without preemption:
        // 1. Thread A has VMAs of a program locked for reading and yields the CPU.
        // 2. Thread B drops the program's address space. It spins until no VMA is locked.
        if batch.is_empty() {
            memory.platform().yield_if_due();
        }
    }
    done.freed += batch.finish();
    if !batch.dirty.is_empty() {
        batch.store_dirty();
    }
    done.scanned = search.scanned;
    done
}

impl<P: Platform> EvictionBatch<'_, P> {
    /// Examines the folios of the step until `target` pages are free or in flight. Returns the
    /// number of pages freed.
    fn pass_over(&mut self, step: &ScanPart, target: u64, search: &Search) -> u64 {
        let memory = self.memory;
        let (mut at, mut freed) = (step.begin, 0);
        while at < step.end && freed + self.pages() < target {
            let frame = memory.frames.span().first.plus(at);
            at += crate::folio::pages_of_block(&memory.frames, frame);
            let left = target - freed - self.pages();
            freed += self.reclaim_at(frame, step, left);
            if self.is_due(search.scanned) {
                freed += self.finish();
                memory.platform().yield_if_due();
            }
        }
        if step.all {
            step.clear_marks(&memory.frames, at);
        }
        freed
    }

    /// Examines the folio that begins at `frame`, if any.
    fn reclaim_at(&mut self, frame: Frame, step: &ScanPart, target: u64) -> u64 {
        let memory = self.memory;
        let Some(folio) = memory.frames.folio_of(frame).filter(|folio| folio.head == frame) else {
            return 0;
        };
        let handle = memory.frames.folio(folio);
        let anonymous = handle.is_anonymous();
        let cached = handle.is_swap_cached();
        if anonymous && !cached && !handle.is_lazy() && !step.room_in_swap {
            // Swap has no room for the folio, so its age is irrelevant.
            return 0;
        }
        if handle.reclaim_state().is_unevictable() && self.passes_over(folio, step) {
            return 0;
        }
        if anonymous && handle.reclaim_state().is_looked_at(step.turn) {
            return self.leave_to_next_turn();
        }
        if anonymous || cached {
            return self.reclaim_anonymous(frame, Which::Cold(step.turn), target);
        }
        if !handle.is_of_object() {
            return 0;
        }
        if handle.owner_kind() != OwnerKind::SharedMemory {
            return self.reclaim_of_file(frame, Spare::Used);
        }
        if !step.room_in_swap {
            return 0;
        }
        if handle.reclaim_state().is_looked_at(step.turn) {
            return self.leave_to_next_turn();
        }
        self.reclaim_shared_memory(frame, Which::Cold(step.turn), target)
    }

    /// Whether the hand skips a folio that was found locked into memory. If the folio is not
    /// skipped, clears the mark.
    #[cold]
    fn passes_over(&mut self, folio: Folio, step: &ScanPart) -> bool {
        let state = self.memory.frames.folio(folio).reclaim_state();
        if step.all {
            state.clear_unevictable();
            return false;
        }
        if step.room_in_swap {
            self.passed_over = true;
        }
        state.note_pass(step.turn);
        true
    }
}

impl ScanPart {
    /// Clears the marks from frame `from` on in a step that reached its target early. The rest is
    /// not examined in this turn, so the next turn must examine it.
    #[cold]
    fn clear_marks<P: Platform>(&self, frames: &Frames<P>, from: u32) {
        let mut at = from;
        while at < self.end {
            let frame = frames.span().first.plus(at);
            at += crate::folio::pages_of_block(frames, frame);
            if let Some(folio) = frames.folio_of(frame).filter(|folio| folio.head == frame)
                && frames.folio(folio).reclaim_state().is_unevictable()
            {
                frames.folio(folio).reclaim_state().clear_unevictable();
            }
        }
    }
}
