//! The front of the allocator: free frames that one CPU keeps for itself.
//!
//! Each allocation from the free lists writes to their lock and may return frames that another CPU
//! wrote last. So an online CPU ([`crate::cpu`]) keeps some frames in front of the lists, as runs:
//! frames that it has freed together remain together. The most recently freed run is used first,
//! from its lowest frame on. So a program that unmaps memory and touches it again gets consecutive
//! frames that are still in this CPU's cache. An empty front takes one block off the lists as a
//! run. If memory is fragmented, it takes further blocks for single pages, up to [`LEAST_FRAMES`]
//! frames.
//!
//! ```text
//! runs    oldest | 0x40 +16 | 0x91 +1 | 0x60 +64 | newest     allocations <--> frees
//!            |
//!            v  when the front is full
//!         free lists
//! ```
//!
//! # Size
//! A front holds at most a 64th of the memory divided by the number of online CPUs, and at most
//! [`MOST_FRAMES`]. If that is below [`LEAST_FRAMES`], no CPU has a front. The limit of 1,024 lets
//! a program of 2 MiB find its own frames again. If the lists hold less than three times the
//! reserve, allocations and frees bypass the fronts, so reclaim finds freed frames.
//!
//! # A folio of 2 MiB
//! A front also keeps one block of [`HUGE`], beyond its limit, so that a program that repeatedly
//! touches and unmaps folios of this size does not take the lock of the lists each time. A CPU
//! keeps such a block if it has requested one since its front was last emptied, and if its limit is
//! at least the size of the block.
//!
//! # The last frame
//! Frames in a front are free, so an allocation must not fail while any CPU has some. An allocation
//! that finds nothing on the lists drains all fronts ([`super::drains`]).
//!
//! # Metadata
//! The head of a run is [`MetaKind::Front`], with the length of the run in `word`. All other frames
//! of the run are [`MetaKind::Tail`], so a second free of any of them is recognized.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::meta::{MetaKind, Metas, state_of};
use crate::addr::{Frame, Order};
use crate::platform::Platform;
use crate::sync::{Mutex, MutexGuard};

/// The order of the largest blocks that a front allocates and accepts: 16 frames.
pub(super) const LARGEST: Order = Order(4);
/// The maximum number of frames in a front.
pub(crate) const MOST_FRAMES: u32 = 1024;
/// The minimum limit: a smaller front would be useless.
pub(super) const LEAST_FRAMES: u32 = 16;

/// The block that a front keeps whole: 2 MiB.
pub(super) const HUGE: Order = Order(9);

/// The number of runs of a front.
const RUNS: usize = 128;
/// The number of runs that an allocation of several frames examines.
const LOOKED_AT: usize = 4;

/// Consecutive free frames.
#[derive(Clone, Copy)]
struct FreeRun {
    first: u32,
    count: u32,
}

impl FreeRun {
    const NONE: Self = Self { first: 0, count: 0 };

    fn huge(first: Frame) -> Self {
        Self { first: first.0, count: HUGE.pages() }
    }
}

/// The front of one CPU.
#[repr(C)]
pub(crate) struct Front<P: Platform> {
    /// The sum of `runs`, for readers without the lock.
    held: AtomicU32,
    /// The number of frames allocated from this front so far; changed under the lock.
    taken: AtomicU64,
    runs: Mutex<P::SpinLock, FreedRuns>,
}

impl<P: Platform> Front<P> {
    pub(crate) const fn new() -> Self {
        Self {
            held: AtomicU32::new(0),
            taken: AtomicU64::new(0),
            runs: Mutex::new(FreedRuns::new()),
        }
    }

    /// Locks the front. The free lists' lock may be acquired inside, but not the lock of another
    /// front.
    #[inline]
    pub(super) fn lock(&self) -> Locked<'_, P> {
        Locked { front: self, runs: self.runs.lock() }
    }

    /// The number of frames in the front.
    pub(super) fn held(&self) -> u32 {
        self.held.load(Relaxed)
    }

    /// The number of frames allocated from the front so far.
    pub(super) fn taken(&self) -> u64 {
        self.taken.load(Relaxed)
    }
}

/// A front whose lock is held.
pub(super) struct Locked<'a, P: Platform> {
    front: &'a Front<P>,
    runs: MutexGuard<'a, P::SpinLock, FreedRuns>,
}

impl<P: Platform> Locked<'_, P> {
    /// Takes a block of any order up to [`LARGEST`], aligned to its size. Its head is
    /// [`MetaKind::Raw`].
    #[inline]
    pub(super) fn take(&mut self, metas: Metas<'_>, order: Order) -> Option<Frame> {
        let first = self.runs.take(metas, order)?;
        metas.get(first).reset(MetaKind::Raw, order);
        self.show();
        self.note_taken(order);
        Some(first)
    }

    /// Takes the block of [`HUGE`], if the front has one. From now on the front keeps such a block,
    /// until it is emptied.
    pub(super) fn take_huge(&mut self, metas: Metas<'_>) -> Option<Frame> {
        self.runs.keeps_huge = true;
        let first = self.runs.huge.take()?;
        metas.get(first).reset(MetaKind::Raw, HUGE);
        self.show();
        self.note_taken(HUGE);
        Some(first)
    }

    /// Whether the front has room for a block of [`HUGE`].
    pub(super) fn wants_huge(&self) -> bool {
        self.runs.keeps_huge && self.runs.huge.is_none()
    }

    /// Adds a free block of [`HUGE`], which the front wants ([`Locked::wants_huge`]).
    pub(super) fn put_huge(&mut self, metas: Metas<'_>, first: Frame) {
        self.runs.huge = Some(first);
        mark(metas, FreeRun::huge(first));
        self.show();
    }

    /// The lock is held, so plain stores suffice.
    #[inline]
    fn note_taken(&self, order: Order) {
        let taken = &self.front.taken;
        taken.store(taken.load(Relaxed).wrapping_add(u64::from(order.pages())), Relaxed);
    }

    /// Adds free frames. The caller has made room before ([`Locked::is_full`]).
    #[inline]
    pub(super) fn put(&mut self, metas: Metas<'_>, first: Frame, count: u32) {
        self.runs.put(metas, first, count);
        self.show();
    }

    /// Whether the front has no room for another run of `count` frames below the `limit`.
    #[inline]
    pub(super) fn is_full(&self, count: u32, limit: u32) -> bool {
        self.runs.len == RUNS || self.runs.held + count > limit
    }

    /// Passes the oldest runs to `give`, until at most `frames` frames and half of the runs are
    /// left. All frames passed are [`MetaKind::Tail`]. The caller calls [`Locked::show`].
    pub(super) fn shrink(
        &mut self,
        metas: Metas<'_>,
        frames: u32,
        mut give: impl FnMut(Frame, u32),
    ) {
        while self.runs.held > frames || self.runs.len > RUNS / 2 {
            let Some(run) = self.runs.take_oldest(metas) else { break };
            give(Frame(run.first), run.count);
        }
    }

    /// Stops keeping a block of [`HUGE`] until the CPU requests one again.
    pub(super) fn want_no_huge(&mut self) {
        self.runs.keeps_huge = false;
    }

    /// Passes all runs and the block of [`HUGE`] to `give`. All frames passed are
    /// [`MetaKind::Tail`]. The caller calls [`Locked::show`].
    pub(super) fn empty(&mut self, metas: Metas<'_>, mut give: impl FnMut(Frame, u32)) {
        while let Some(run) = self.runs.take_oldest(metas) {
            give(Frame(run.first), run.count);
        }
        self.runs.keeps_huge = false;
        if let Some(first) = self.runs.huge.take() {
            unmark(metas, first);
            give(first, HUGE.pages());
        }
    }

    /// Publishes the number of remaining frames to readers without the lock, after the lists have
    /// published the frames that they received. So a sum over both, with the lists locked, may
    /// briefly count frames twice but misses none.
    #[inline]
    pub(super) fn show(&self) {
        self.front.held.store(self.runs.all(), Relaxed);
    }

    /// Whether one of the runs holds `frame`.
    pub(super) fn contains(&self, frame: Frame) -> bool {
        self.runs.iter().any(|run| frame.0.wrapping_sub(run.first) < run.count)
    }

    /// Compares the runs with the metadata. Returns their number.
    ///
    /// # Errors
    /// A frame at which they disagree.
    pub(super) fn check(&self, metas: Metas<'_>) -> Result<u64, Frame> {
        let (mut runs, mut frames) = (0, 0);
        for run in self.runs.iter() {
            let head = metas.get(Frame(run.first));
            if head.kind() != MetaKind::Front || head.word.load(Relaxed) != u64::from(run.count) {
                return Err(Frame(run.first));
            }
            let mut others = (run.first + 1..run.first + run.count).map(Frame);
            if let Some(frame) = others.find(|frame| metas.get(*frame).kind() != MetaKind::Tail) {
                return Err(frame);
            }
            runs += 1;
            frames += u64::from(run.count);
        }
        let first = metas.span().first;
        let shown = self.front.held();
        if u64::from(shown) == frames && shown == self.runs.all() { Ok(runs) } else { Err(first) }
    }
}

/// The runs of a front, in a ring; the oldest are removed first.
struct FreedRuns {
    /// The number of frames in all runs of the ring.
    held: u32,
    /// Whether the CPU has requested a block of [`HUGE`] since the front was last emptied.
    keeps_huge: bool,
    /// A block of [`HUGE`], kept outside the ring.
    huge: Option<Frame>,
    /// The index of the oldest run.
    oldest: usize,
    len: usize,
    ring: [FreeRun; RUNS],
}

impl FreedRuns {
    const fn new() -> Self {
        let ring = [FreeRun::NONE; RUNS];
        Self { held: 0, keeps_huge: false, huge: None, oldest: 0, len: 0, ring }
    }

    /// The ring position of the run that was added `back` runs before the newest.
    #[inline]
    fn place(&self, back: usize) -> usize {
        let place = self.oldest + self.len - 1 - back;
        if place < RUNS { place } else { place - RUNS }
    }

    fn iter(&self) -> impl Iterator<Item = FreeRun> {
        let ring = (0..self.len).map(|back| self.ring[self.place(back)]);
        ring.chain(self.huge.map(FreeRun::huge))
    }

    /// The number of all frames, including those of the block of [`HUGE`].
    #[inline]
    fn all(&self) -> u32 {
        self.held + if self.huge.is_some() { HUGE.pages() } else { 0 }
    }

    #[inline]
    fn take(&mut self, metas: Metas<'_>, order: Order) -> Option<Frame> {
        let pages = order.pages();
        let most = if order == Order::PAGE { 1 } else { LOOKED_AT };
        for back in 0..most.min(self.len) {
            let place = self.place(back);
            let FreeRun { first, count } = self.ring[place];
            if count < pages {
                continue;
            }
            let taken = if Frame(first).is_aligned(order) {
                self.ring[place] = FreeRun { first: first + pages, count: count - pages };
                if count > pages {
                    mark(metas, self.ring[place]);
                }
                first
            } else if Frame(first + count).is_aligned(order) {
                self.ring[place].count = count - pages;
                mark(metas, self.ring[place]);
                first + count - pages
            } else {
                continue;
            };
            self.held -= pages;
            if count == pages {
                self.remove(back);
            }
            return Some(Frame(taken));
        }
        None
    }

    /// Removes the run `back` runs before the newest, one of the first [`LOOKED_AT`].
    #[inline]
    fn remove(&mut self, back: usize) {
        for back in (1..=back).rev() {
            let (to, from) = (self.place(back), self.place(back - 1));
            self.ring[to] = self.ring[from];
        }
        self.len -= 1;
    }

    #[inline]
    fn put(&mut self, metas: Metas<'_>, first: Frame, count: u32) {
        self.held += count;
        if self.len > 0 {
            let place = self.place(0);
            let newest = self.ring[place];
            let joined = if newest.first + newest.count == first.0 {
                metas.get(first).state.store(state_of(MetaKind::Tail, Order::PAGE), Relaxed);
                Some(newest.first)
            } else if first.0 + count == newest.first {
                let head = metas.get(Frame(newest.first));
                head.state.store(state_of(MetaKind::Tail, Order::PAGE), Relaxed);
                Some(first.0)
            } else {
                None
            };
            if let Some(first) = joined {
                self.ring[place] = FreeRun { first, count: newest.count + count };
                mark(metas, self.ring[place]);
                return;
            }
        }
        self.len += 1;
        let place = self.place(0);
        self.ring[place] = FreeRun { first: first.0, count };
        mark(metas, self.ring[place]);
    }

    fn take_oldest(&mut self, metas: Metas<'_>) -> Option<FreeRun> {
        if self.len == 0 {
            return None;
        }
        let run = self.ring[self.oldest];
        self.oldest = (self.oldest + 1) % RUNS;
        self.len -= 1;
        self.held -= run.count;
        unmark(metas, Frame(run.first));
        Some(run)
    }
}

/// Turns the head of a run into a tail.
#[inline]
fn unmark(metas: Metas<'_>, head: Frame) {
    metas.get(head).state.store(state_of(MetaKind::Tail, Order::PAGE), Relaxed);
}

/// Writes the metadata of a run's head.
#[inline]
fn mark(metas: Metas<'_>, run: FreeRun) {
    let head = metas.get(Frame(run.first));
    head.word.store(u64::from(run.count), Relaxed);
    head.state.store(state_of(MetaKind::Front, Order::PAGE), Relaxed);
}
