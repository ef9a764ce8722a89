//! Messages about changes of the address space.
//!
//! A call prepares its messages under the mutex, before its first change, and delivers them after
//! it has released all locks. Until a handler has read the message, the handler cannot fill or
//! protect pages; otherwise it could act on memory that the call has unmapped.
//!
//! A call sends each userfaultfd one message for all its VMAs. The state of a userfaultfd records
//! the last call that prepared a message for it, so the check takes constant time even if a program
//! has thousands of userfaultfds.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;

use core::sync::atomic::Ordering;

use crate::addr::{VirtAddr, VirtRange};
use crate::error::{Error, NoMemory};
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::space::call::steps::{CallEnd, CallReady, CallWait};
use crate::space::op::Op;
use crate::userfault::{Notices, QueuedMessage, UserfaultFeatures, UserfaultState};
use crate::vma::Vma;

/// The VMA's userfaultfd, if the userfaultfd has subscribed to this event.
fn subscriber(vma: &Vma, feature: UserfaultFeatures) -> Option<NonNull<UserfaultState>> {
    let state = vma.userfault()?;
    if state.has(feature) && !state.is_closed() { vma.userfault_pointer() } else { None }
}

/// Prepares the messages about the unmapping of `range`.
#[cold]
pub(in crate::space) fn prepare_unmap<P: Platform>(
    op: &Op<'_, '_, P>,
    range: VirtRange,
    notices: &mut Notices,
) -> Result<(), NoMemory> {
    let memory = op.memory();
    let call = memory.new_identity();
    let mut prepared = Notices::default();
    for vma in op.vmas.overlapping(range) {
        let Some(state) = subscriber(vma, UserfaultFeatures::EVENT_UNMAP) else { continue };
        if vma.userfault().is_some_and(|state| state.has_notice_of(call)) {
            continue;
        }
        // SAFETY: 1. the VMA holds the userfaultfd, and the operation holds the mutex.
        let pushed = unsafe { prepared.push(memory, call, state, QueuedMessage::Unmap(range)) };
        if pushed.is_err() {
            prepared.cancel(memory);
            return Err(NoMemory);
        }
    }
    notices.append(prepared);
    Ok(())
}

/// Prepares the messages about a move of `source`, a part of the VMA, to `to`. `unmapped`: the
/// source does not stay mapped. Returns whether the destination stays registered.
#[cold]
pub(in crate::space) fn prepare_move<P: Platform>(
    op: &Op<'_, '_, P>,
    vma: &Vma,
    (source, to): (VirtRange, VirtAddr),
    unmapped: bool,
) -> Result<(Notices, bool), NoMemory> {
    let mut notices = Notices::default();
    if source.is_empty() {
        return Ok((notices, false));
    }
    let memory = op.memory();
    let call = memory.new_identity();
    let moved = subscriber(vma, UserfaultFeatures::EVENT_REMAP);
    let unmapped = subscriber(vma, UserfaultFeatures::EVENT_UNMAP).filter(|_| unmapped);
    let (from, length) = (source.start(), source.len());
    let contents = [
        moved.map(|state| (state, QueuedMessage::Remap { from, to, length })),
        unmapped.map(|state| (state, QueuedMessage::Unmap(source))),
    ];
    for (state, content) in contents.into_iter().flatten() {
        // SAFETY: 1. the VMA holds the userfaultfd, and the operation holds the mutex.
        if unsafe { notices.push(memory, call, state, content) }.is_err() {
            notices.cancel(memory);
            return Err(NoMemory);
        }
    }
    Ok((notices, moved.is_some()))
}

/// The userfaultfd state that serves the child's copy of a VMA, if the VMA's userfaultfd has
/// subscribed to forks. The state belongs to the message, which is prepared with the first such
/// VMA.
#[cold]
pub(in crate::space) fn child_userfault<P: Platform>(
    child: &AddressSpace<'_, P>,
    vma: &Vma,
    notices: &mut Notices,
) -> Result<Option<NonNull<UserfaultState>>, NoMemory> {
    let Some(parent) = subscriber(vma, UserfaultFeatures::EVENT_FORK) else { return Ok(None) };
    let Some(state) = vma.userfault() else { return Ok(None) };
    // Each attempt of a fork creates an address space, whose number identifies the attempt.
    let identity = child.userfaults.get_or_make(child.page_table.memory);
    if let Some(found) = state.child_of(identity) {
        return Ok(Some(found));
    }
    let memory = child.page_table.memory;
    memory.may_wait();
    let make = || UserfaultState::new(identity, state.features(), state.scope());
    let made = memory.slab().allocate_with(&memory.frames, make);
    let made = made.ok_or(NoMemory)?;
    child.userfaults.note(state.features());
    // SAFETY: 1. the VMA holds the userfaultfd, and the fork holds the mutex.
    if unsafe { notices.push(memory, identity, parent, QueuedMessage::Fork(made)) }.is_err() {
        // SAFETY: 1. this is the only reference, and no other thread knows of the state.
        unsafe { crate::userfault::release(memory, made) };
        return Err(NoMemory);
    }
    Ok(Some(made))
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Whether the address space ever had a userfaultfd. Calls check this first.
    #[inline]
    pub(in crate::space) fn has_userfaults(&self) -> bool {
        cfg!(feature = "userfault") && self.userfaults.get() != 0
    }

    /// Whether a userfaultfd of the address space ever subscribed to removals of contents.
    #[inline]
    pub(in crate::space) fn hears_of_removals(&self) -> bool {
        cfg!(feature = "userfault") && self.userfaults.hears_of_removals.load(Ordering::Relaxed)
    }
}

/// Notifies userfaultfds before contents in `range` are dropped, mapping by mapping. Waits until
/// the messages are read. Ends before the first mapping that `refuses` the call: the contents of
/// that mapping and of those after it stay. Called without locks.
#[cold]
pub(in crate::space) fn notify_removed<P: Platform>(
    space: &AddressSpace<'_, P>,
    range: VirtRange,
    refuses: &dyn Fn(&Vma) -> bool,
) -> Result<(), Error> {
    let memory = space.page_table.memory;
    let mut at = range.start();
    while at < range.end() {
        // One mapping at a time, so that a retry does not deliver a message twice.
        let rest = VirtRange::raw(at.0, range.end().0);
        let next = memory.retry::<_, Error>(|| Ok(notice_of_removal(space, rest, refuses)?))?;
        let Some((end, notices)) = next else { break };
        if !notices.is_empty() {
            notices.deliver(memory);
        }
        at = end;
    }
    Ok(())
}

/// As [`notify_removed`], for a call in steps, and its progress. It names mappings by their
/// addresses, and looks each one up when its turn comes.
#[derive(Debug)]
pub(in crate::space) struct RemovalNotices {
    /// The rest of the range, of which no message was read.
    rest: VirtRange,
    /// The end of the first mapping in `rest`, if its message was sent.
    sent: Option<VirtAddr>,
}

impl RemovalNotices {
    /// The messages about `range`. None is sent yet.
    pub(in crate::space) fn of(range: VirtRange) -> Self {
        Self { rest: range, sent: None }
    }

    /// Whether no message is left.
    #[inline]
    pub(in crate::space) fn is_complete(&self) -> bool {
        self.rest.is_empty()
    }

    /// Sends the next message, and returns the wait for its reader; `None` after the last one.
    /// `ready` is the end of the last wait: without it, the last message is sent again, because it
    /// was withdrawn with its wait. Called without locks.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    #[cold]
    pub(in crate::space) fn step<'s, 'm, P: Platform>(
        &mut self,
        space: &AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
        refuses: &dyn Fn(&Vma) -> bool,
    ) -> Result<Option<CallWait<'s, 'm, P>>, Error> {
        let memory = space.page_table.memory;
        let was_read = matches!(ready, Some(CallReady(CallEnd::Message(_))));
        let mut told = self.sent.take().filter(|_| was_read);
        loop {
            if let Some(end) = told.take() {
                self.rest = VirtRange::raw(end.0, self.rest.end().0);
            }
            if self.rest.is_empty() {
                return Ok(None);
            }
            let rest = self.rest;
            let next = memory.retry::<_, Error>(|| Ok(notice_of_removal(space, rest, refuses)?))?;
            let (end, notices) = next.unwrap_or((rest.end(), Notices::default()));
            if let Some(message) = notices.queue_removal(memory) {
                self.sent = Some(end);
                return Ok(Some(CallWait::for_message(message)));
            }
            told = Some(end);
        }
    }
}

/// Prepares the message about the first mapping in `range`, if its userfaultfd has subscribed to
/// removals. Returns the end of that mapping's part of the range; `None` if the range has no
/// mapping or the first mapping refuses the call.
fn notice_of_removal<P: Platform>(
    space: &AddressSpace<'_, P>,
    range: VirtRange,
    refuses: &dyn Fn(&Vma) -> bool,
) -> Result<Option<(VirtAddr, Notices)>, NoMemory> {
    let vmas = space.vmas.lock();
    let Some(vma) = vmas.view().first_in(range).filter(|vma| !refuses(vma)) else {
        return Ok(None);
    };
    let part = vma.range().intersection(range);
    let mut notices = Notices::default();
    if let Some(state) = subscriber(vma, UserfaultFeatures::EVENT_REMOVE) {
        let memory = space.page_table.memory;
        // SAFETY: 1. the VMA holds the userfaultfd, and the mutex is held.
        unsafe { notices.push(memory, memory.new_identity(), state, QueuedMessage::Remove(part)) }?;
    }
    Ok(Some((part.end(), notices)))
}
