//! The requests of an area that its device is processing: a table of 32, each for one folio, in
//! eight groups.
//!
//! A CPU takes a request from the group that its number selects or, if that group is full, from any
//! other. So the first eight CPUs share no cache line for their requests. CPUs whose numbers are
//! equal modulo eight share a group, with its requests, its cache line and its completions.
//!
//! A folio with word-filled pages is written in *pieces*, the runs between these pages; one request
//! counts the pieces. Nothing is allocated when memory is short, and a thread that finds the table
//! full waits for the device.
//!
//! ```text
//! take        a bit in `taken`                      thread
//! begin       folio, 1 piece: the submitter's own
//! add         one piece more, before each submit
//! complete    one piece less                        any context
//!             the last of one without a waiter: a bit in `done`
//! take_done   `done` is emptied                     thread
//! free        the bit in `taken` goes
//! ```
//!
//! The submitter's own piece keeps a request from completing before all of it is submitted. Each
//! bit of `done` is taken by one thread, which then has the folio's lock. A thread that reads a
//! page waits for its request, which therefore sets no bit; a request of read-around sets one.
//!
//! A completion accesses the request for the last time when it counts its piece or sets the bit.
//! From then on, another request may have the number.

#[cfg(test)]
mod tests;

use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::device::SwapOperation;
use crate::addr::Frame;
use crate::platform::Cpu;
use crate::sync::word::Word;

/// The maximum number of folios of an area in flight.
pub(super) const REQUESTS: usize = GROUP * GROUPS;

/// The number of requests in a group. With the group's other words, they fill a cache line.
const GROUP: usize = 4;
const GROUPS: usize = 8;

/// In `pieces`: one of the pieces failed.
const FAILED: u32 = 1 << 31;
/// In `pieces`: a read for which no thread waits.
const AROUND: u32 = 1 << 30;
const COUNT: u32 = !(FAILED | AROUND);

/// A folio in flight.
struct Request<W> {
    /// The folio's head.
    head: W,
    /// The slot of the folio's first page.
    slot: W,
    /// The number of incomplete pieces, [`FAILED`] and [`AROUND`].
    pieces: W,
}

/// A group of requests, mostly used by the CPUs with the same number modulo `GROUPS`, on a cache
/// line of its own.
#[repr(align(64))]
pub(super) struct Group<W = AtomicU32, const N: usize = GROUP> {
    taken: W,
    done: W,
    /// The number of pages that the device is writing.
    writing: W,
    /// The number of pages that the device is reading without a waiting thread.
    reading: W,
    table: [Request<W>; N],
}

const _: () = assert!(size_of::<Group>() == 64);

impl Group {
    const fn new() -> Self {
        const fn word() -> AtomicU32 {
            AtomicU32::new(0)
        }
        let table = [const { Request { head: word(), slot: word(), pieces: word() } }; GROUP];
        Self { taken: word(), done: word(), writing: word(), reading: word(), table }
    }
}

/// In `for_all`: a group may have requests of CPUs that use another group first.
const OVERFLOWED: u32 = 1 << GROUPS;

/// The table of an area.
pub(super) struct RequestTable {
    groups: [Group; GROUPS],
    /// The groups in which every CPU checks for completions: a bit for each group that no online
    /// CPU uses first, and [`OVERFLOWED`] for all groups. The word is read far more often than
    /// written. It changes only by read-modify-write instructions, so a thread that clears
    /// [`OVERFLOWED`] sees all requests that were taken before it was last set.
    for_all: AtomicU32,
}

impl RequestTable {
    pub(super) const fn new() -> Self {
        // Threads without a CPU use the first group, even if no CPU does.
        Self { groups: [const { Group::new() }; GROUPS], for_all: AtomicU32::new(1) }
    }

    /// The group of a request, and the request's number there.
    pub(super) fn group(&self, number: u32) -> (&Group, u32) {
        let (group, number) = (number as usize / GROUP, number % GROUP as u32);
        (&self.groups[group % GROUPS], number)
    }

    /// The number of the group that a CPU uses first.
    #[inline]
    fn of_cpu(cpu: Option<Cpu>) -> usize {
        usize::from(cpu.map_or(0, |cpu| cpu.0)) % GROUPS
    }

    /// Takes a request, from the CPU's group if one is free there.
    pub(super) fn take(&self, cpu: Option<Cpu>) -> Option<u32> {
        let first = Self::of_cpu(cpu);
        (first..GROUPS).chain(0..first).find_map(|group| {
            let number = self.groups[group].take()?;
            if group != first {
                self.note_overflow();
            }
            Some((group * GROUP) as u32 + number)
        })
    }

    /// Makes all CPUs check the requests in all groups until the device is idle: a request taken
    /// earlier may be in a group that their CPUs do not check.
    fn note_overflow(&self) {
        // Release: a thread that reads the flag sees that the request is taken.
        self.for_all.fetch_or(OVERFLOWED, Release);
    }

    /// Whether two CPUs use the same group first.
    pub(super) fn share_a_group(one: Cpu, other: Cpu) -> bool {
        Self::of_cpu(Some(one)) == Self::of_cpu(Some(other))
    }

    /// Called when `cpu` goes offline and no online CPU shares its group: makes all CPUs check the
    /// group's requests. They continue to do so even while the device is idle, because a thread
    /// that still has the CPU's number may take a request there later.
    pub(super) fn share_group(&self, cpu: Cpu) {
        self.for_all.fetch_or(1 << Self::of_cpu(Some(cpu)), Relaxed);
    }

    /// Ends [`RequestTable::share_group`], because `cpu` is online and checks its group.
    pub(super) fn adopt_group(&self, cpu: Cpu) {
        self.for_all.fetch_and(!(1 << Self::of_cpu(Some(cpu))), Relaxed);
    }

    /// Whether [`RequestTable::take`] would find a free request; may be outdated.
    pub(super) fn has_free(&self) -> bool {
        self.groups.iter().any(Group::has_free)
    }

    /// Whether the device is idle and all its completions were processed.
    pub(super) fn is_idle(&self) -> bool {
        self.groups.iter().all(Group::is_idle)
    }

    /// The number of taken requests; may be outdated.
    pub(super) fn count(&self) -> u32 {
        self.groups.iter().map(|group| group.taken.load(Relaxed).count_ones()).sum()
    }

    /// The number of pages that the device is writing, and the number that it is reading without a
    /// waiting thread. Acquire: a thread that reads 0 finds the folios unlocked.
    pub(super) fn pages(&self) -> (u64, u64) {
        let sum = |word: fn(&Group) -> &AtomicU32| {
            self.groups.iter().map(|group| u64::from(word(group).load(Acquire))).sum()
        };
        (sum(|group| &group.writing), sum(|group| &group.reading))
    }

    /// Takes the completed writes, and the completed reads for which no thread waits. With a CPU,
    /// takes only those of its group and of groups that no CPU has, unless requests have overflowed
    /// a group, because the group of such a request may have no CPU.
    pub(super) fn take_done(&self, cpu: Option<Cpu>) -> u32 {
        let done = |group: usize| self.groups[group].take_done() << (group * GROUP);
        let for_all = self.for_all.load(Relaxed);
        if let Some(cpu) = cpu
            && for_all & OVERFLOWED == 0
        {
            let own = Self::of_cpu(Some(cpu));
            let others = (0..GROUPS).filter(|group| for_all & !(1 << own) & 1 << group != 0);
            return others.fold(done(own), |all, group| all | done(group));
        }
        let all = (0..GROUPS).fold(0, |all, group| all | done(group));
        if for_all & OVERFLOWED != 0 && all == 0 && self.is_idle() {
            // Cleared before the second check: a request that is taken afterwards marks the table
            // again. Acquire: the check sees the requests of earlier marks.
            self.for_all.fetch_and(!OVERFLOWED, Acquire);
            if !self.is_idle() {
                self.note_overflow();
            }
        }
        all
    }
}

impl<W: Word<u32>, const N: usize> Group<W, N> {
    /// A group of words of another type.
    #[cfg(all(test, any(loom, shuttle)))]
    pub(super) fn of_words(word: impl Fn(u32) -> W) -> Self {
        let request = |_| Request { head: word(0), slot: word(0), pieces: word(0) };
        let [taken, done, writing, reading] = [0; 4].map(&word);
        Self { taken, done, writing, reading, table: core::array::from_fn(request) }
    }

    fn request(&self, number: u32) -> &Request<W> {
        &self.table[number as usize % N]
    }

    /// Takes a request, if one is free.
    pub(super) fn take(&self) -> Option<u32> {
        let mut taken = self.taken.load(Relaxed);
        loop {
            let number = taken.trailing_ones();
            if number as usize >= N {
                return None;
            }
            // Acquire: all work on the previous request is over.
            match self.taken.exchange(taken, taken | 1 << number, Acquire, Relaxed) {
                Ok(_) => return Some(number),
                Err(now) => taken = now,
            }
        }
    }

    /// Whether [`Group::take`] would find a free request; may be outdated.
    fn has_free(&self) -> bool {
        (self.taken.load(Relaxed).trailing_ones() as usize) < N
    }

    /// Frees a request that is complete or was not begun.
    pub(super) fn free(&self, number: u32) {
        // The bit is set, so the subtraction clears it.
        self.taken.sub(1 << number, Release);
    }

    /// Assigns the request to this folio and its slots from `slot` on. The number of pieces begins
    /// with the submitter's own.
    pub(super) fn begin(&self, number: u32, head: Frame, slot: u64) {
        let request = self.request(number);
        request.head.store(head.0, Relaxed);
        // An area has at most 2^30 slots.
        request.slot.store(slot as u32, Relaxed);
        request.pieces.store(1, Relaxed);
    }

    /// Like [`Group::begin`], for a read for which no thread waits.
    pub(super) fn begin_around(&self, number: u32, head: Frame) {
        let request = self.request(number);
        request.head.store(head.0, Relaxed);
        request.pieces.store(AROUND | 1, Relaxed);
    }

    /// Whether [`Group::begin_around`] began the request.
    pub(super) fn is_around(&self, number: u32) -> bool {
        self.request(number).pieces.load(Relaxed) & AROUND != 0
    }

    /// Counts pages that the device will write.
    pub(super) fn begin_writing(&self, pages: u32) {
        self.writing.add(pages, Relaxed);
    }

    /// Ends [`Group::begin_writing`].
    pub(super) fn end_writing(&self, pages: u32) {
        // Release: the folio is unlocked.
        self.writing.sub(pages, Release);
    }

    /// Counts pages that the device will read without a waiting thread.
    pub(super) fn begin_reading(&self, pages: u32) {
        self.reading.add(pages, Relaxed);
    }

    /// Ends [`Group::begin_reading`].
    pub(super) fn end_reading(&self, pages: u32) {
        // Release: the folio is unlocked.
        self.reading.sub(pages, Release);
    }

    /// Counts one more submitted piece.
    pub(super) fn add_piece(&self, number: u32) {
        // Relaxed: the submitter's own piece keeps the count above zero.
        self.request(number).pieces.add(1, Relaxed);
    }

    /// Completes a piece, in any context.
    pub(super) fn complete(&self, number: u32, operation: SwapOperation, failed: bool) {
        let pieces = &self.request(number).pieces;
        if failed {
            pieces.set(FAILED, Relaxed);
        }
        // Release: orders the transfer before the count. Acquire: likewise orders the transfers of
        // the other pieces.
        let before = pieces.sub(1, AcqRel);
        let awaited = operation == SwapOperation::Read && before & AROUND == 0;
        if before & COUNT == 1 && !awaited {
            self.done.set(1 << number, Release);
        }
    }

    /// Whether all pieces of the caller's request were transferred; `None` while a piece is
    /// incomplete.
    pub(super) fn result(&self, number: u32) -> Option<bool> {
        // Acquire: the frames hold the data that the device has read.
        let pieces = self.request(number).pieces.load(Acquire);
        (pieces & COUNT == 0).then_some(pieces & FAILED == 0)
    }

    /// Takes a request as [`Group::take_done`] does, if it is complete and no thread has taken it.
    pub(super) fn take_done_one(&self, number: u32) -> bool {
        let mut done = self.done.load(Relaxed);
        while done & 1 << number != 0 {
            match self.done.exchange(done, done & !(1 << number), Acquire, Relaxed) {
                Ok(_) => return true,
                Err(now) => done = now,
            }
        }
        false
    }

    /// Takes the completed writes, and the completed reads for which no thread waits, as one bit
    /// each.
    pub(super) fn take_done(&self) -> u32 {
        if self.done.load(Relaxed) == 0 { 0 } else { self.done.swap(0, Acquire) }
    }

    /// Whether the device is idle and all its completions were processed.
    pub(super) fn is_idle(&self) -> bool {
        // Acquire: all work on the folios is over, too.
        self.taken.load(Acquire) == 0
    }

    /// The folio's head.
    pub(super) fn head(&self, number: u32) -> Frame {
        Frame(self.request(number).head.load(Relaxed))
    }

    /// The slot of the folio's first page, as passed to [`Group::begin`].
    pub(super) fn first_slot(&self, number: u32) -> u64 {
        u64::from(self.request(number).slot.load(Relaxed))
    }
}
