//! The end of a read: its folios enter the page index or are freed ([`super::page_read`]).

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;

use crate::Memory;
use crate::addr::{PAGE_SHIFT, PageRange};
use crate::collections::page_tree::PAGE_LIMIT;
use crate::error::Failure;
use crate::folio::FolioRef;
use crate::platform::Platform;

use super::ObjectState;
use super::answer::Settled;
use super::arrival::Arrival;
use super::fetch::discard;
use super::in_flight::TransferKind;
use super::page_read::{PageRead, Taker, buffer_of, release};
use super::pager::PagerError;
use super::supply::add;

/// The fate of the folios of a read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadFate {
    /// They enter the page index, unless they are stale. With a page, the folio with that page is
    /// kept, and only its insertion can fail. Without a page, any insertion can fail.
    Enters(Option<u64>),
    /// They are freed.
    Dropped,
}

/// Ends a read: its folios enter the page index or are freed, and the record leaves the list.
///
/// # Errors
/// The pager's error; [`Failure::NoMemory`].
///
/// # Safety
/// 1. The pager has answered, the answer belongs to the caller, and the object lives until the
///    record has left the object's list.
pub(super) unsafe fn settle<P: Platform>(
    memory: &Memory<P>,
    read: NonNull<PageRead>,
    fate: ReadFate,
) -> Result<Option<FolioRef<'_, P>>, Failure> {
    // SAFETY: the read lives until it is freed below; the object lives until its list lacks the
    // record (obligation 1).
    let (state, object) = unsafe { (read.as_ref(), read.as_ref().object().as_ref()) };
    let answer = state.answer.get().unwrap_or(Err(PagerError::InputOutput));
    let result = match (answer, fate) {
        // SAFETY: 1. the caller's obligation 1.
        (Ok(()), ReadFate::Enters(page)) => unsafe { enter(memory, object, state, page) },
        (answer, _) => {
            for unread in state.fresh() {
                // SAFETY: 1. the caller's obligation 1: the read ends here.
                discard(memory, object, unsafe { unread.take(memory) }.folio);
            }
            answer.map(|()| None).map_err(Failure::from)
        }
    };
    let taker = state.taker();
    let is_awaited = object.pages.alone(memory.platform(), |_, in_flight, ends| {
        // SAFETY: 1. `NewRead::begin` has inserted the record, and only the thread with the answer,
        // the caller, removes it.
        unsafe { in_flight.take(ends, &state.record) }
    });
    if taker == Taker::Beginner && is_awaited {
        // The caller's handle keeps the object.
        object.pages.ends.wake(memory.platform());
    }
    // Without a handle, the object may be freed from here on. Threads wait for the answers in that
    // case.
    let lacks_memory = answer.is_ok() && matches!(result, Err(Failure::NoMemory));
    state.end.settle(if lacks_memory { Settled::NoMemory } else { Settled::Answered });
    // SAFETY: 1. the settling thread's reference, released once.
    unsafe { release(memory, read) };
    if taker != Taker::Beginner {
        memory.answers.completions.note(memory.platform());
    }
    result
}

/// Inserts the folios of a successful read into the index, unless the read was canceled. Returns a
/// reference to the folio with `page`; without a page, whether all were inserted.
///
/// # Safety
/// 1. The pager has answered, and the caller ends the read.
unsafe fn enter<'m, P: Platform>(
    memory: &'m Memory<P>,
    object: &ObjectState,
    read: &PageRead,
    page: Option<u64>,
) -> Result<Option<FolioRef<'m, P>>, Failure> {
    // SAFETY: 1. the pager has answered (obligation 1).
    let buffer = unsafe { buffer_of(memory.platform(), read) };
    buffer.zero_rest(read.size.get().saturating_sub(read.pages().first << PAGE_SHIFT));
    let (mut wanted, mut all) = (Ok(None), Ok(()));
    for unread in read.fresh() {
        let pages = unread.first..unread.end();
        let arrival = memory
            .clock
            .has_reclaimed()
            .then(|| Arrival::of(memory, object, unread.first, unread.folio));
        // SAFETY: 1. the caller's obligation 1; each folio is taken only here.
        let fresh = unsafe { unread.take(memory) };
        let added = add(memory, object, fresh, Some(&read.record));
        if let (Ok(Some(kept)), Some(arrival)) = (&added, arrival) {
            arrival.note(memory, **kept);
        }
        match page {
            Some(page) if !pages.contains(&page) => {}
            Some(_) => wanted = added,
            None => all = all.and(added.map(drop)),
        }
    }
    all.and(wanted)
}

/// Takes all answers to reads ahead and inserts their folios into the page indexes. Called without
/// locks. May wait for memory.
pub(super) fn settle_answered<P: Platform>(memory: &Memory<P>) {
    settle_all(memory, ReadFate::Enters(None));
}

/// Takes all answers to reads ahead and frees their folios, except those that a polled wait needs.
/// Acquires only spin locks and allocates nothing, so reclaim may call it.
pub(crate) fn drop_answered<P: Platform>(memory: &Memory<P>) {
    settle_all(memory, ReadFate::Dropped);
}

fn settle_all<P: Platform>(memory: &Memory<P>, fate: ReadFate) {
    let mut next = memory.answers.reads.take_all();
    let mut puts_back = false;
    while let Some(record) = next {
        let read: NonNull<PageRead> = record.cast();
        // SAFETY: `answer` has added the read, which lives until `settle`.
        let state = unsafe { read.as_ref() };
        next = state.earlier.get();
        if fate == ReadFate::Dropped && state.end.is_followed() {
            let earlier = NonNull::from(&state.earlier);
            // SAFETY: 1. the read was removed from the list, and lives until it is taken again.
            unsafe { memory.answers.reads.add(record, earlier) };
            puts_back = true;
            continue;
        }
        // An error concerns only the access that needs a page, and that access requests the page
        // again. SAFETY: 1. the pager has answered, and the taken answers belong to the caller. The
        // last holder of the object waits for the object's list.
        drop(unsafe { settle(memory, read, fate) });
    }
    if puts_back {
        // A thread that the answer woke may have checked while the list lacked the answer, and may
        // sleep again.
        memory.answers.completions.note(memory.platform());
    }
}

/// Waits for the reads ahead that overlap the pages. Called without locks.
pub(super) fn wait_for_reads_ahead<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
) {
    let platform = memory.platform();
    let is_read = || {
        object.pages.alone(platform, |_, in_flight, _| {
            in_flight.overlaps(pages, &[TransferKind::ReadAhead])
        })
    };
    loop {
        settle_answered(memory);
        if !is_read() {
            return;
        }
        let completions = &memory.answers.completions;
        completions.wait(platform, &mut || memory.answers.reads.has_any() || !is_read());
    }
}

/// Makes sure that an object without holders has no read left. The last holder has waited for the
/// reads before it ended its hold, and only holders start reads.
pub(super) fn end_reads<P: Platform>(memory: &Memory<P>, object: &ObjectState) {
    let all = PageRange { first: 0, end: PAGE_LIMIT };
    let is_read = object.pages.alone(memory.platform(), |_, in_flight, _| {
        in_flight.overlaps(all, &[TransferKind::ReadAhead])
    });
    debug_assert!(!is_read, "a read of an object without holders");
    if is_read {
        wait_for_reads_ahead(memory, object, all);
    }
}
