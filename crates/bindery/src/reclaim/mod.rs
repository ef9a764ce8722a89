//! Reclaim: pages leave memory when it is short.
//!
//! # The policy
//! A *clock* (Corbató 1968) goes over the metadata of all frames, in their order; there are no
//! lists, so no other path pays for them. A folio is *cold*, *referenced* or *hot*
//! ([`Frames::look`](crate::frame::Frames::look)): used twice in a row it is hot, and it must be
//! found unused twice in a row before it is evicted. An evicted page leaves a *shadow*: how much
//! was evicted until then. If it comes back after less was evicted than is in use, it comes back
//! hot: it would have stayed if the hot pages had not kept it out (refault distance; Linux:
//! `workingset.c`; CLOCK-Pro, USENIX 2005, has its test period).
//!
//! # Windows
//! The hand leads to a folio, the reverse map to a VMA that maps it, and there reclaim works on the
//! run of the page table around it, of one table: it harvests the accessed bits of the window, and
//! makes swap entries of the folios that are cold and mapped there alone. A folio is looked at once
//! in a turn of the clock, whichever neighbor the hand has come to. The folios of several windows,
//! 32 and more, are a batch, with one flush for each address space ([`pressure`]). So the cost is in
//! the runs that are looked at. (Linux's multi-generational LRU looks around in the same way.)
//!
//! # It cannot deadlock
//! Reclaim runs when its caller has no lock ([`direct`]). It only tries the locks of folios and of
//! the reverse map, enters no pager, and holds none of them while a page is written out but the
//! lock of its folio. It takes frames from a reserve that no other allocation may take, and never
//! calls itself. It waits for a swap device when enough pages are on their way, or nothing else is
//! left to look at: a device needs no lock and no memory of the core's to be done.
//!
//! | file | idea |
//! |---|---|
//! | `direct` | a call that would fail for lack of memory |
//! | `anonymous` | folios of anonymous memory |
//! | `files` | folios of files: what is clean needs no swap |
//! | `pressure` | folios of any place, flushed and written out together |
//! | `swap_on` | swap areas that are added |

mod anonymous;
mod direct;
mod files;
mod pressure;
mod swap_on;

use crate::Memory;
use crate::addr::Frame;
use crate::frame::{FrameRange, OwnerKind, Turn};
use crate::platform::Platform;

use pressure::Batch;

/// What a call of [`Memory::reclaim`] has done, in pages.
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
    /// Frames that the clock has passed.
    pub scanned: u64,
}

/// Frames that one step of the hand passes.
const STEP: u32 = 64;
/// How often the hand goes round at the most: a page that was used and hot is cold after three
/// looks.
const TURNS: u64 = 4;

impl<P: Platform> Memory<P> {
    /// Frees at least `target` pages if it can: cached tables and slabs, then pages that were not
    /// used lately. Anonymous pages go to swap, clean pages of files can be read again. An embedder
    /// calls it from a thread of its own when memory gets short ([`Memory::shortage`]); calls of
    /// the core do when they would fail otherwise. The caller holds no lock of the core and is in
    /// no read section.
    ///
    /// Context: may sleep. Complexity: in the frames that the clock passes and the runs of the
    /// windows; at most four turns of the clock.
    #[inline(never)]
    pub fn reclaim(&self, target: u64) -> Reclaimed {
        let before = self.free_frame_count();
        self.trim();
        let mut done =
            Reclaimed { freed: self.free_frame_count().saturating_sub(before), scanned: 0 };
        let FrameRange { first, count } = self.frames.span();
        let most = u64::from(count) * TURNS;
        done.freed += self.finish_swap_writes();
        self.discard_free_slots();
        let mut batch = Batch::new(self);
        while done.freed < target {
            let over = done.scanned >= most;
            let written = self.pages_under_writeback();
            if over || done.freed + batch.pages() + written >= target {
                if !batch.is_empty() {
                    done.freed += batch.finish();
                    continue;
                }
                if written > 0 {
                    done.freed += self.wait_for_a_write();
                    continue;
                }
                if over {
                    break;
                }
            }
            let (begin, turn) = self.clock.advance(STEP, count);
            let end = (begin + STEP).min(count);
            let mut at = begin;
            while at < end && done.freed + batch.pages() < target {
                let frame = first.plus(at);
                at += self.frames.pages_of_block(frame);
                let left = target - done.freed - batch.pages();
                done.freed += self.reclaim_at(frame, turn, left, &mut batch);
                if batch.is_due(done.scanned) {
                    done.freed += batch.finish();
                }
            }
            done.scanned += u64::from(STEP);
        }
        done.freed += batch.finish();
        done
    }

    /// Looks at the folio that begins at `frame`, if one does.
    fn reclaim_at<'m>(
        &'m self,
        frame: Frame,
        turn: Turn,
        target: u64,
        batch: &mut Batch<'m, P>,
    ) -> u64 {
        let Some(folio) = self.frames.folio_of(frame).filter(|folio| folio.head == frame) else {
            return 0;
        };
        let anonymous = self.frames.is_anonymous(folio);
        let cached = self.frames.is_swap_cached(folio);
        if anonymous && self.frames.is_looked_at(folio, turn) {
            return 0;
        }
        if anonymous && !cached && !self.frames.is_lazy(folio) && !self.has_swap() {
            // It has nowhere to go, so nobody needs to know whether it is used.
            return 0;
        }
        if anonymous || cached {
            return self.reclaim_anonymous(frame, turn, target, batch);
        }
        if self.frames.is_of_object(folio) {
            if self.frames.owner_kind(folio) != OwnerKind::SharedMemory {
                return self.reclaim_of_file(frame);
            }
            if !self.has_swap() || self.frames.is_looked_at(folio, turn) {
                return 0;
            }
            // A device may have to be waited for, which a batch must not.
            return batch.finish() + self.reclaim_shared_memory(frame, turn, target);
        }
        0
    }
}
