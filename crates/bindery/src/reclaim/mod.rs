//! Reclaim: pages leave memory when it is short.
//!
//! # The policy
//! A *clock* (Corbató 1968) scans the metadata of all frames, in their order. Without lists, no
//! other path pays for reclaim. A folio is *cold*, *referenced* or *hot*
//! (`ReclaimState::update_age`): used twice in a row it is hot, and it must be
//! found unused twice in a row before it is evicted. An evicted page leaves a *shadow*: the number
//! of pages evicted until then. If fewer pages were evicted since than are in use, the page comes
//! back hot: it would have stayed if the hot pages had not displaced it (refault distance; Linux:
//! `workingset.c`; CLOCK-Pro, USENIX 2005, has its test period).
//!
//! # Windows
//! The hand leads to a folio, and the reverse map to a VMA that maps it. Reclaim then works on the
//! run of entries around it in one page table: it harvests the accessed bits of the window, and
//! makes swap entries of the folios that are cold and mapped only there. A folio is examined once
//! in a turn of the clock, whichever neighbor the hand reached first. The folios of several
//! windows, 32 and more, are a batch, with one flush for each address space ([`pressure`]). So the
//! cost is proportional to the examined runs. (Linux's multi-generational LRU looks around in the
//! same way.)
//!
//! # It cannot deadlock
//! Reclaim runs when its caller has no lock ([`direct`]). It only tries the locks of folios and of
//! the reverse map, and enters no pager. While a page is written out, it holds only the lock of
//! that folio. It takes frames from a reserve that no other allocation may take, and never calls
//! itself. It waits for a swap device when enough pages are in flight, or no other folio is left to
//! examine: a device completes without any lock or memory of the core.
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
use crate::object::reclaim::Spare;
use crate::platform::Platform;

use pressure::Batch;
use search::{Search, Step};
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
    /// Pages that were freed.
    pub freed: u64,
    /// Frames that the clock passed.
    pub scanned: u64,
}

impl<P: Platform> Memory<P> {
    /// Frees at least `target` pages if it can: cached tables and slabs, then pages that were not
    /// used recently. Anonymous pages are swapped out; clean pages of files can be read again. An
    /// embedder calls it from a dedicated thread when memory gets short ([`Memory::shortage`]);
    /// calls of the core do so when they would fail otherwise. The caller holds no lock of the core
    /// and is in no read section.
    ///
    /// Once its search has ended, the call waits for at most as many writes as were in flight then:
    /// a steady writer does not hold it.
    ///
    /// Context: may sleep. Complexity: linear in the frames that the clock passes and the runs of
    /// the windows; at most five turns of the clock, two if nothing is left to reclaim, and 64
    /// frames if an earlier search found nothing and nothing has been freed since.
    #[inline(never)]
    pub fn reclaim(&self, target: u64) -> Reclaimed {
        self.reclaim_until(target, u64::MAX)
    }

    /// Like [`Memory::reclaim`]; also ends when `enough` frames are free, including frames that
    /// other CPUs freed.
    pub(super) fn reclaim_until(&self, target: u64, enough: u64) -> Reclaimed {
        let before = self.free_frame_count();
        self.trim();
        let freed = self.free_frame_count().saturating_sub(before) + self.finish_swap_writes();
        let mut done = Reclaimed { freed, scanned: 0 };
        self.discard_free_slots();
        self.clock.note_use(self.total_frames() - self.free_frame_count());
        let mut search = Search::new(self);
        let mut batch = Batch::new(self);
        done.freed += self.sweep(target.saturating_sub(done.freed), &mut search, &mut batch);
        while done.freed < target && self.free_frame_count() < enough {
            let coming = batch.pages() + self.pages_under_writeback();
            if search.is_over() || done.freed + coming >= target {
                if !batch.is_empty() {
                    done.freed += batch.finish();
                    continue;
                }
                if search.may_wait(self) {
                    done.freed += self.wait_for_a_write();
                    continue;
                }
                if search.is_over() {
                    break;
                }
            }
            let step = search.step(self);
            done.freed += self.pass_over(&step, target - done.freed, &search, &mut batch);
            search.end_step(self, done.freed, &mut batch);
            // Never in the middle of a batch. Without the condition, on a CPU without preemption:
            // 1. Thread A has VMAs of a program locked for reading, and yields the CPU.
            // 2. Thread B drops the program's address space. It spins until no VMA is locked.
            if batch.is_empty() {
                self.platform().yield_if_due();
            }
        }
        done.freed += batch.finish();
        done.scanned = search.scanned;
        done
    }

    /// Examines the folios of the step, until `target` pages are free or in flight. Returns the
    /// number of pages freed.
    fn pass_over<'m>(
        &'m self,
        step: &Step,
        target: u64,
        search: &Search,
        batch: &mut Batch<'m, P>,
    ) -> u64 {
        let (mut at, mut freed) = (step.begin, 0);
        while at < step.end && freed + batch.pages() < target {
            let frame = self.frames.span().first.plus(at);
            at += crate::folio::pages_of_block(&self.frames, frame);
            let left = target - freed - batch.pages();
            freed += self.reclaim_at(frame, step, left, batch);
            if batch.is_due(search.scanned) {
                freed += batch.finish();
                self.platform().yield_if_due();
            }
        }
        if step.all {
            self.clear_marks(at, step.end);
        }
        freed
    }

    /// Examines the folio that begins at `frame`, if any.
    fn reclaim_at<'m>(
        &'m self,
        frame: Frame,
        step: &Step,
        target: u64,
        batch: &mut Batch<'m, P>,
    ) -> u64 {
        let Some(folio) = self.frames.folio_of(frame).filter(|folio| folio.head == frame) else {
            return 0;
        };
        let anonymous = self.frames.folio(folio).is_anonymous();
        let cached = self.frames.folio(folio).is_swap_cached();
        if anonymous && !cached && !self.frames.folio(folio).is_lazy() && !step.room_in_swap {
            // Swap has no room for it, so its age is irrelevant.
            return 0;
        }
        if self.frames.folio(folio).reclaim_state().is_unevictable()
            && self.passes_over(folio, step, batch)
        {
            return 0;
        }
        if anonymous && self.frames.folio(folio).reclaim_state().is_looked_at(step.turn) {
            return batch.leave_to_next_turn();
        }
        if anonymous || cached {
            return self.reclaim_anonymous(frame, Which::Cold(step.turn), target, batch);
        }
        if !self.frames.folio(folio).is_of_object() {
            return 0;
        }
        if self.frames.folio(folio).owner_kind() != OwnerKind::SharedMemory {
            return batch.note(self.reclaim_of_file(frame, Spare::Used));
        }
        if !step.room_in_swap {
            return 0;
        }
        if self.frames.folio(folio).reclaim_state().is_looked_at(step.turn) {
            return batch.leave_to_next_turn();
        }
        self.reclaim_shared_memory(frame, Which::Cold(step.turn), target, batch)
    }

    /// Whether the hand skips a folio that was found locked into memory. If not, clears the mark.
    #[cold]
    fn passes_over(&self, folio: Folio, step: &Step, batch: &mut Batch<'_, P>) -> bool {
        if step.all {
            self.frames.folio(folio).reclaim_state().clear_unevictable();
            return false;
        }
        if step.room_in_swap {
            batch.passed_over = true;
        }
        self.frames.folio(folio).reclaim_state().note_pass(step.turn);
        true
    }

    /// Clears the marks in the rest of a step that reached its target early: the rest is not
    /// examined in this turn, so the next turn does.
    #[cold]
    fn clear_marks(&self, from: u32, to: u32) {
        let mut at = from;
        while at < to {
            let frame = self.frames.span().first.plus(at);
            at += crate::folio::pages_of_block(&self.frames, frame);
            let folio = self.frames.folio_of(frame).filter(|folio| folio.head == frame);
            if let Some(folio) =
                folio.filter(|folio| self.frames.folio(*folio).reclaim_state().is_unevictable())
            {
                self.frames.folio(folio).reclaim_state().clear_unevictable();
            }
        }
    }
}
