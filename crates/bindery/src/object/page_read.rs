//! A read of pages of a file, from the first folio to the page index.
//!
//! ```text
//! drawn up   its folios are allocated; no other thread knows it                 [`NewRead`]
//! begun      in the list of the object                                          [`BegunRead`]
//! asked      the pager has the request                                          [`AskedRead`]
//! answered   the pager has filled the folios, or failed                         any context
//! settled    the folios are in the page index, or free; out of the list         a thread
//! ```
//!
//! A thread that waits for a read settles it. A read *ahead* has no such thread. Its answer stays
//! in the memory ([`crate::memory::Answers`]) until it is taken by a thread that needs a page, a
//! thread that reclaims, or the last holder of the object. Only a thread may settle a read, because
//! interrupt handlers cannot acquire the lock of the page index.
//!
//! # The object lives as long as the read
//! A thread that waits has a handle. The last holder of an object waits until the object's list has
//! no read ahead ([`super::last_holder`]). So the settling thread's last access to the object
//! removes the record from the list, with the index lock held.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, Ordering};

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::{PAGE_SHIFT, PageRange};
use crate::collections::page_tree::PageIndex;
use crate::error::{Failure, NoMemory};
use crate::folio::{Folio, FolioRef};
use crate::memory::Earlier;
use crate::platform::Platform;

use super::ObjectState;
use super::answer::{Answer, Settled, TransferEnd};
use super::fetch::{Fresh, discard};
use super::in_flight::{FlightRecord, TransferKind};
use super::pager::PagerError;
use super::read_buffer::{FOLIOS, ReadBuffer};
use super::read_end::{ReadFate, settle};
use super::read_request::ReadRequest;
use super::transfers::Refused;

/// The thread that takes the answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Taker {
    /// Only the thread that started the read.
    Beginner,
    /// Any thread, because the wait for the pages is polled.
    Follower,
    /// Any thread, because no thread waits for the pages yet.
    Any,
}

/// A read that is not yet started, in progress or answered.
pub(crate) struct PageRead {
    /// The record is in the object's list from the start to the end of the read.
    pub(super) record: FlightRecord,
    object: NonNull<ObjectState>,
    taker: Taker,
    /// The folios, for consecutive pages. Constant while the pager has the request.
    fresh: ArrayVec<Unread, FOLIOS>,
    /// The size of the file in bytes when the read began.
    pub(super) size: Cell<u64>,
    /// The number of bytes that the pager has filled, counted from the first. Accessed by the
    /// request until the answer, and afterwards by the settling thread.
    filled: Cell<usize>,
    pub(super) answer: Answer,
    pub(super) end: TransferEnd,
    pub(super) earlier: Earlier,
}

// SAFETY: 1. No other type has this kind.
unsafe impl crate::memory::Record for PageRead {
    const KIND: crate::memory::RecordKind = crate::memory::RecordKind::PageRead;
}

/// A fresh folio of a read, stored as a folio number.
pub(super) struct Unread {
    pub(super) first: u64,
    pub(super) folio: Folio,
}

impl Unread {
    pub(super) fn end(&self) -> u64 {
        self.first + u64::from(self.folio.pages())
    }

    /// Returns ownership of the folio.
    ///
    /// # Safety
    /// 1. The folio is taken once: the caller ends the read, and no other thread uses the folio.
    pub(super) unsafe fn take<'m, P: Platform>(&self, memory: &'m Memory<P>) -> Fresh<'m, P> {
        // SAFETY: 1. `NewRead::push` has stored the folio, and it is taken once (obligation 1).
        Fresh { first: self.first, folio: unsafe { memory.frames.fresh(self.folio) } }
    }
}

impl PageRead {
    /// The pages of the read's folios.
    pub(super) fn pages(&self) -> PageRange {
        let first = self.fresh.first().map_or(0, |fresh| fresh.first);
        PageRange { first, end: self.fresh.last().map_or(first, Unread::end) }
    }

    pub(super) fn fresh(&self) -> &[Unread] {
        &self.fresh
    }

    pub(super) fn filled(&self) -> &Cell<usize> {
        &self.filled
    }

    pub(super) fn taker(&self) -> Taker {
        self.taker
    }

    /// The object, which lives until the read is settled.
    pub(super) fn object(&self) -> NonNull<ObjectState> {
        self.object
    }
}

/// Stores the pager's answer, in any context. The caller no longer accesses the read.
///
/// # Safety
/// 1. The read was begun and was not answered before.
pub(super) unsafe fn answer<P: Platform>(
    memory: &Memory<P>,
    read: NonNull<PageRead>,
    answer: Result<(), PagerError>,
) {
    let earlier = {
        // SAFETY: a read that was begun lives until it is settled, which happens after the answer
        // (obligation 1).
        let state = unsafe { read.as_ref() };
        let earlier = (state.taker != Taker::Beginner).then(|| NonNull::from(&state.earlier));
        // From here on, the thread that began the read may free it.
        state.answer.give(answer);
        earlier
    };
    if let Some(earlier) = earlier {
        // SAFETY: 1. the read is answered once, and a read that any thread may take lives until a
        // thread has taken it.
        unsafe { memory.answers.reads.add(read.cast(), earlier) };
    }
    memory.answers.completions.note(memory.platform());
}

/// A read that no other thread knows. Dropping it frees its folios.
pub(super) struct NewRead<'o, 'm, P: Platform> {
    pub(super) memory: &'m Memory<P>,
    pub(super) object: &'o ObjectState,
    read: NonNull<PageRead>,
}

impl<'o, 'm, P: Platform> NewRead<'o, 'm, P> {
    /// A read without folios.
    pub(super) fn new(
        memory: &'m Memory<P>,
        object: &'o ObjectState,
        taker: Taker,
    ) -> Result<Self, NoMemory> {
        let read = memory.slab::<PageRead>().allocate_with(&memory.frames, || PageRead {
            record: FlightRecord::new(),
            object: NonNull::from(object),
            taker,
            fresh: ArrayVec::new(),
            size: Cell::new(0),
            filled: Cell::new(0),
            answer: Answer::new(),
            end: TransferEnd::new(),
            earlier: Earlier::new(),
        });
        Ok(Self { memory, object, read: read.ok_or(NoMemory)? })
    }

    fn get(&self) -> &PageRead {
        // SAFETY: this is the only pointer to the read, which is freed when this is dropped.
        unsafe { self.read.as_ref() }
    }

    /// The pages of the read's folios.
    pub(super) fn pages(&self) -> PageRange {
        self.get().pages()
    }

    /// The first page of the first folio at or after `page`.
    pub(super) fn folio_from(&self, page: u64) -> Option<u64> {
        self.get().fresh.iter().map(|fresh| fresh.first).find(|first| *first >= page)
    }

    pub(super) fn is_full(&self) -> bool {
        self.get().fresh.is_full()
    }

    /// Adds the folio of the pages that follow, or frees it if the read is full.
    pub(super) fn push(&mut self, Fresh { first, folio }: Fresh<'_, P>) {
        // SAFETY: as in `get`; `self` is borrowed exclusively.
        let read = unsafe { self.read.as_mut() };
        if read.fresh.is_full() {
            discard(self.memory, self.object, folio);
        } else {
            read.fresh.push(Unread { first, folio: folio.leave() });
        }
    }

    /// Inserts the read into the object's list, under the same lock as `needed`, which receives the
    /// size of the file in bytes.
    pub(super) fn begin(
        self,
        needed: impl FnOnce(&PageIndex, u64) -> bool,
    ) -> Result<BegunRead<'o, 'm, P>, Refused> {
        let (read, object) = (self.get(), self.object);
        let needed = |index: &PageIndex| {
            read.size.set(object.size());
            needed(index, read.size.get())
        };
        let kind = match read.taker {
            Taker::Beginner => TransferKind::Read,
            Taker::Follower | Taker::Any => TransferKind::ReadAhead,
        };
        // SAFETY: 1. the record is new. It lies in a slab, where it stays until `settle` has
        // removed it from the list and frees it.
        unsafe {
            object.pages.begin_read(
                self.memory.platform(),
                &read.record,
                (kind, read.pages()),
                needed,
            )
        }?;
        let (memory, taker, read) = (self.memory, read.taker, self.read);
        core::mem::forget(self);
        Ok(BegunRead { memory, object, read, taker })
    }
}

impl<P: Platform> Drop for NewRead<'_, '_, P> {
    fn drop(&mut self) {
        for unread in self.get().fresh() {
            // SAFETY: 1. the read has not begun and ends here.
            discard(self.memory, self.object, unsafe { unread.take(self.memory) }.folio);
        }
        // SAFETY: the read came from this slab, and no other thread has seen it.
        unsafe { self.memory.slab::<PageRead>().free(&self.memory.frames, self.read) };
    }
}

/// A read in the list. Its request is passed to the pager once, immediately after this.
#[must_use = "a read that is begun and not asked for keeps its pages from other threads forever"]
pub(super) struct BegunRead<'o, 'm, P: Platform> {
    memory: &'m Memory<P>,
    object: &'o ObjectState,
    read: NonNull<PageRead>,
    taker: Taker,
}

/// A read whose request the pager has received. If the pager panics, dropping this takes the answer
/// of a read that the thread waits for; the dropped request has answered it with an error.
struct AskedRead<'m, P: Platform> {
    memory: &'m Memory<P>,
    read: NonNull<PageRead>,
    taker: Taker,
}

/// Whether a pager has kept the request, to answer it later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RequestKept {
    Yes,
    No,
}

impl<'m, P: Platform> BegunRead<'_, 'm, P> {
    /// Passes the request to the pager. Called without locks.
    fn ask(self) -> (RequestKept, AskedRead<'m, P>) {
        let Self { memory, object, read, taker } = self;
        // Created before the pager has the request, because the pager may panic.
        let asked = AskedRead { memory, read, taker };
        let kept = AtomicBool::new(false);
        // SAFETY: 1. the read was begun, and this is its only request, because `self` ends here.
        let request = unsafe { ReadRequest::new(memory, read, &kept) };
        if let Some((pager, _)) = object.file() {
            pager.begin_read(request);
        }
        (if kept.load(Ordering::Relaxed) { RequestKept::Yes } else { RequestKept::No }, asked)
    }

    /// Makes the pager read, waits for its answer and settles the read. The returned reference
    /// holds the folio with `page`. `None` if no such folio was inserted: another thread was
    /// faster, or the read was canceled.
    ///
    /// # Errors
    /// The pager's error; [`Failure::NoMemory`] if the page index lacks memory.
    pub(super) fn finish(
        self,
        page: u64,
    ) -> (RequestKept, Result<Option<FolioRef<'m, P>>, Failure>) {
        let (kept, asked) = self.ask();
        (kept, asked.take_answer(ReadFate::Enters(Some(page))))
    }

    /// As [`BegunRead::leave`], but follows the read.
    pub(super) fn follow(self) -> (RequestKept, FollowedRead<'m, P>) {
        let (memory, read) = (self.memory, self.read);
        // SAFETY: the read is not answered before the pager has it.
        unsafe { read.as_ref() }.end.follow();
        // SAFETY: as above.
        let pages = unsafe { read.as_ref() }.pages();
        let followed = FollowedRead { memory, read, pages: pages.end - pages.first };
        (self.leave(), followed)
    }

    /// Makes the pager read and leaves the answer to another thread.
    pub(super) fn leave(self) -> RequestKept {
        let (kept, asked) = self.ask();
        core::mem::forget(asked);
        kept
    }
}

impl<'m, P: Platform> AskedRead<'m, P> {
    /// Waits for the answer of a read that belongs to the caller, and settles the read.
    fn take_answer(self, fate: ReadFate) -> Result<Option<FolioRef<'m, P>>, Failure> {
        // SAFETY: the read lives until the caller, which started it, settles it.
        let is_answered = || unsafe { self.read.as_ref() }.answer.get().is_some();
        if !is_answered() {
            self.memory.answers.completions.wait(self.memory.platform(), &mut || is_answered());
        }
        let (memory, read) = (self.memory, self.read);
        core::mem::forget(self);
        // SAFETY: 1. the answer has arrived and belongs to the caller, whose handle of the object
        // lives.
        unsafe { settle(memory, read, fate) }
    }
}

impl<P: Platform> Drop for AskedRead<'_, P> {
    /// Runs only while a panic of the pager unwinds. The dropped request has failed the read, or
    /// the pager has kept the request.
    fn drop(&mut self) {
        if self.taker == Taker::Beginner {
            let Self { memory, read, taker } = *self;
            drop(AskedRead { memory, read, taker }.take_answer(ReadFate::Dropped));
        }
    }
}

/// Drops a holder of the record; the last one frees it.
///
/// # Safety
/// 1. The caller is one of the counted holders and ends its hold. The record is in no list, unless
///    the settling thread is still a holder.
pub(super) unsafe fn release<P: Platform>(memory: &Memory<P>, read: NonNull<PageRead>) {
    // SAFETY: the caller is a holder (obligation 1).
    if unsafe { read.as_ref() }.end.leave() {
        // SAFETY: the read came from this slab; the settling thread has removed it from all lists.
        unsafe { memory.slab::<PageRead>().free(&memory.frames, read) };
    }
}

/// A read that any thread settles, as seen by a wait that checks whether it has ended.
pub(super) struct FollowedRead<'m, P: Platform> {
    memory: &'m Memory<P>,
    read: NonNull<PageRead>,
    /// The number of requested pages.
    pub(super) pages: u64,
}

// SAFETY: it is a counted holder of the record. It reads only the record's atomic words and its
// constant fields.
unsafe impl<P: Platform> Send for FollowedRead<'_, P> {}
// SAFETY: as above.
unsafe impl<P: Platform> Sync for FollowedRead<'_, P> {}

impl<P: Platform> FollowedRead<'_, P> {
    /// The result of the read, once it is settled: the pager's answer, or [`Failure::NoMemory`].
    pub(super) fn result(&self) -> Option<Result<(), Failure>> {
        // SAFETY: this is a counted holder.
        let read = unsafe { self.read.as_ref() };
        Some(match read.end.settled()? {
            Settled::Answered => read.answer.get()?.map_err(Failure::from),
            Settled::NoMemory => Err(Failure::NoMemory),
        })
    }
}

impl<P: Platform> Drop for FollowedRead<'_, P> {
    fn drop(&mut self) {
        // SAFETY: 1. the holder is `self`, which is dropped.
        unsafe { release(self.memory, self.read) };
    }
}

/// The bytes of a read's folios, including those that are already filled.
///
/// # Safety
/// 1. The caller has the request or the answer, so no other thread accesses the bytes.
pub(super) unsafe fn buffer_of<'a, P: Platform>(
    platform: &P,
    read: &'a PageRead,
) -> ReadBuffer<'a> {
    let mut pieces = ArrayVec::<&mut [u8], FOLIOS>::new();
    for Unread { folio, .. } in &read.fresh {
        let length = (folio.pages() as usize) << PAGE_SHIFT;
        let bytes = platform.direct_map(folio.head).as_ptr();
        // SAFETY: the direct map shows the bytes of the folio's frames, which are consecutive
        // (obligation 1 of `Platform`, and `Frames::new` checked where two ranges touch); memory
        // always holds initialized bytes. The folio is fresh: until it is in the index, only the
        // request or the answer leads to them (obligation 1), and no two folios share any.
        pieces.push(unsafe { core::slice::from_raw_parts_mut(bytes, length) });
    }
    ReadBuffer::new(pieces, read.filled.get())
}
