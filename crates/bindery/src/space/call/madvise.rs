//! `madvise(2)`.

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{Arch, KeyRights};
use crate::error::{Error, Failure, NoMemory};
use crate::interrupt;
use crate::object::ObjectState;
use crate::platform::Platform;
use crate::table::look;
use crate::table::rewrite::use_bits::UseBits;
use crate::table::zap::Flush;
use crate::table::zap_except::{Exceptions, Protected, Spared};
use crate::vma::{MappingFlags, Protection, Vma};
use crate::vmas::Parts;

use super::advice::{Advice, AdviceChange, Call, Effect, EntryChange, Loss, VmaChange};
use super::cold_or_free::cold_or_free;
use super::collapse::PendingCollapse;
use super::guard_pages;
use super::page_out::PageOut;
use super::range::page_range;
use super::remove::{Removal, refusal_of_removal, remove_contents};
use super::steps::{CallReady, CallWait, Step};
use crate::space::AddressSpace;
use crate::space::call::populate::Populate;
use crate::space::call::will_need::will_need;
use crate::space::op::Op;
use crate::space::userfault::events::{RemovalNotices, notify_removed};

/// Advice on the VMAs of a range, from a thread with `rights` to the VMAs' protection keys.
#[derive(Clone, Copy)]
struct VmaAdvice {
    change: VmaChange,
    loss: Loss,
    rights: KeyRights,
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Applies advice to `length` bytes (rounded up to pages) at `start`.
    ///
    /// Context: may sleep. Complexity: linear in the number of mappings and runs in the range;
    /// contents are dropped by whole tables.
    ///
    /// # Errors
    /// [`Error::Unaligned`]; [`Error::OutOfRange`] if the range wraps; [`Error::Invalid`] if the
    /// advice does not apply to a mapping's kind, or the mapping is locked; [`Error::AccessDenied`]
    /// for [`Advice::Remove`] of memory that may not be written; [`Error::Sealed`];
    /// [`Error::NotMapped`] if the range has holes, after the advice was applied to the mapped
    /// parts; [`Error::TryAgain`] if a mapping cannot be split; the errors of
    /// [`AddressSpace::collapse_range`]; [`Error::Fault`] and [`Error::OutOfMemory`] if a page is
    /// not available; [`Error::Interrupted`] if a fatal signal came before all pages of
    /// [`Advice::PopulateRead`] or [`Advice::PopulateWrite`], before a run of [`Advice::WillNeed`],
    /// or before a mapping of [`Advice::Free`], [`Advice::Cold`] or [`Advice::PageOut`]. The advice
    /// was applied to the part before an error.
    pub fn madvise(&self, start: VirtAddr, length: u64, advice: Advice) -> Result<(), Error> {
        self.madvise_with_keys(start, length, advice, KeyRights::ALL)
    }

    /// As [`AddressSpace::madvise`], for a thread with these `rights` to the memory of each
    /// protection key. The thread may discard contents of a sealed mapping only if it could
    /// overwrite these contents.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// As [`AddressSpace::madvise`].
    pub fn madvise_with_keys(
        &self,
        start: VirtAddr,
        length: u64,
        advice: Advice,
        rights: KeyRights,
    ) -> Result<(), Error> {
        madvise(self, page_range::<P::Arch>(start, length)?, advice, rights)
    }

    /// As [`AddressSpace::madvise_with_keys`], but the steps of the result do the work of
    /// [`Advice::PopulateRead`], [`Advice::PopulateWrite`], [`Advice::PageOut`], [`Advice::Remove`]
    /// and [`Advice::Collapse`], and return their errors. So do they for advice that drops contents,
    /// once a userfaultfd of the address space has subscribed to removals. Other advice is carried
    /// out immediately.
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::madvise`].
    ///
    /// # Errors
    /// As [`AddressSpace::madvise`].
    pub fn begin_madvise(
        &self,
        start: VirtAddr,
        length: u64,
        advice: Advice,
        rights: KeyRights,
    ) -> Result<PendingMadvise<'m, P>, Error> {
        PendingMadvise::begin(self, page_range::<P::Arch>(start, length)?, advice, rights)
    }

    /// Drops the contents of `length` bytes (rounded up to pages) at `start`. The bytes then read
    /// as zeroes again, or as the object's content. Frees the tables whose whole span is dropped.
    ///
    /// Context: may sleep. Complexity: linear in the number of mappings and whole tables, and in
    /// the number of runs in the tables at the edges.
    ///
    /// # Errors
    /// As [`AddressSpace::madvise`] with [`Advice::DontNeed`].
    pub fn discard(&self, start: VirtAddr, length: u64) -> Result<(), Error> {
        self.madvise(start, length, Advice::DontNeed)
    }
}

/// The part of a `madvise` that may have to wait ([`AddressSpace::begin_madvise`]). Each step looks
/// up the mappings again. So a mapping that another thread unmaps after the call has reached it
/// counts as present, and one that is unmapped earlier as a hole. (Linux excludes the `munmap`
/// until `MADV_PAGEOUT` is complete, or begins with the hole.)
///
/// If a userfaultfd is to hear of the removal of contents, the call first stops at each mapping until
/// the message is read. Then it does its work.
///
/// The value holds no lock. For [`Advice::Remove`], it holds a handle to the object of the mapping
/// that it has reached: the step continues with this object, whatever has happened to the mapping.
/// Each mapping's hole is punched in one step, after the pager has stored the pages that it was
/// storing. For [`Advice::Collapse`], it holds a handle to the object of the table span that waits:
/// the object's pages are collapsed, whatever has happened to the mapping. A span of private memory
/// is collapsed if its mapping still allows that when its pages are back.
///
/// Dropping the value ends the call. Pages that were unmapped for [`Advice::PageOut`] but not
/// written yet then stay in the swap cache, until reclaim writes them or a thread needs them.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::arch::KeyRights;
/// use bindery::{AddressSpace, Advice, Error, Platform, Step};
///
/// /// Swaps memory out; another thread does the waiting.
/// fn page_out<P: Platform>(
///     space: &AddressSpace<'_, P>, at: VirtAddr, size: u64,
/// ) -> Result<(), Error> {
///     let mut pending = space.begin_madvise(at, size, Advice::PageOut, KeyRights::ALL)?;
///     let mut ready = None;
///     while let Step::Blocked(wait) = pending.step(space, ready.take())? {
///         // On another thread, or polled, in a kernel that needs this call.
///         ready = Some(wait.wait());
///     }
///     Ok(())
/// }
/// ```
///
/// # Context
/// Context: may sleep. The drop may also sleep, like that of an [`crate::Object`].
#[derive(Debug)]
#[must_use = "the result of the call is that of its last step"]
pub struct PendingMadvise<'m, P: Platform> {
    /// The messages to userfaultfds, which come before `rest`.
    notices: RemovalNotices,
    advice: Advice,
    rights: KeyRights,
    rest: Rest<'m, P>,
}

/// The advice that is carried out in steps.
#[derive(Debug)]
enum Rest<'m, P: Platform> {
    Maps(Populate),
    PagesOut(PageOut),
    Removes(Removal<'m, P>),
    Collapses(PendingCollapse<'m, P>),
    /// The advice for this range is carried out in one step, after the messages.
    Follows(VirtRange),
}

impl<'m, P: Platform> PendingMadvise<'m, P> {
    /// As [`AddressSpace::begin_madvise`].
    fn begin(
        space: &AddressSpace<'m, P>,
        range: VirtRange,
        advice: Advice,
        rights: KeyRights,
    ) -> Result<Self, Error> {
        let is_told = is_told(space, advice);
        let rest = match advice.effect().change {
            AdviceChange::Call(Call::Populate(want)) => Rest::Maps(Populate::all_of(range, want)),
            AdviceChange::Call(Call::PageOut) => Rest::PagesOut(PageOut::new(range)),
            AdviceChange::Call(Call::Remove) => Rest::Removes(Removal::new(range)),
            AdviceChange::Call(Call::Collapse) => Rest::Collapses(PendingCollapse::new(range)),
            AdviceChange::Vmas(_) if is_told => Rest::Follows(range),
            AdviceChange::Call(Call::WillNeed) | AdviceChange::Vmas(_) => {
                carry_out(space, range, advice, rights)?;
                Rest::Maps(Populate::default())
            }
        };
        let told = if is_told { range } else { NOWHERE };
        Ok(Self { notices: RemovalNotices::of(told), advice, rights, rest })
    }

    /// Carries out the advice until it is complete or has to wait. `ready` is the end of the wait
    /// that the last step returned ([`Populate::step`]).
    ///
    /// Sleeps for no pager, device or handler: no lock is held while these work. Stops for locks as
    /// `docs/lock-order.md` says. A swap device that sleeps in [`crate::SwapDevice::submit`] does so in the step, and a
    /// pager in [`crate::Pager::discard`].
    ///
    /// Complexity: linear in the number of mappings and folios.
    ///
    /// # Errors
    /// As [`AddressSpace::madvise`].
    pub fn step<'s>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
    ) -> Result<Step<'s, 'm, P>, Error> {
        let mut ready = ready;
        // `Populate` and `Removal` look at the mutex themselves.
        let locks = match self.rest {
            Rest::Maps(_) | Rest::Removes(_) => !self.notices.is_complete(),
            Rest::PagesOut(_) | Rest::Collapses(_) | Rest::Follows(_) => true,
        };
        if locks && let Some(wait) = space.wait_for_mutex(&mut ready) {
            return Ok(Step::Blocked(wait));
        }
        if !self.notices.is_complete()
            && let Some(wait) = self.tell(space, ready.take())?
        {
            return Ok(Step::Blocked(wait));
        }
        match &mut self.rest {
            Rest::Maps(populate) => populate.step(space, ready),
            Rest::PagesOut(page_out) => page_out.step(space),
            Rest::Removes(removal) => removal.step(space),
            Rest::Collapses(collapse) => collapse.step(space, ready),
            Rest::Follows(range) => {
                let range = core::mem::replace(range, NOWHERE);
                carry_out(space, range, self.advice, self.rights).map(|()| Step::Done)
            }
        }
    }

    /// Sends the next message to a userfaultfd.
    #[cold]
    fn tell<'s>(
        &mut self,
        space: &AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
    ) -> Result<Option<CallWait<'s, 'm, P>>, Error> {
        let (effect, rights) = (self.advice.effect(), self.rights);
        let told = self.notices.step(space, ready, &|vma| refusal(vma, effect, rights).is_some());
        if told.is_err() {
            (self.notices, self.rest) = (RemovalNotices::of(NOWHERE), Rest::Follows(NOWHERE));
        }
        told
    }
}

const NOWHERE: VirtRange = VirtRange::raw(0, 0);

/// Swaps the pages out. Waits for devices with no lock held.
#[inline(never)]
fn page_out<P: Platform>(space: &AddressSpace<'_, P>, range: VirtRange) -> Result<(), Error> {
    let mut call = PageOut::new(range);
    while let Step::Blocked(wait) = call.step(space)? {
        let _ = wait.wait();
    }
    Ok(())
}

fn madvise<P: Platform>(
    space: &AddressSpace<'_, P>,
    range: VirtRange,
    advice: Advice,
    rights: KeyRights,
) -> Result<(), Error> {
    if !range.is_empty() && is_told(space, advice) {
        let effect = advice.effect();
        notify_removed(space, range, &|vma: &Vma| refusal(vma, effect, rights).is_some())?;
    }
    carry_out(space, range, advice, rights)
}

/// Whether userfaultfds have to hear of the advice before it is carried out.
fn is_told<P: Platform>(space: &AddressSpace<'_, P>, advice: Advice) -> bool {
    advice.effect().loss == Loss::Contents && space.hears_of_removals()
}

/// Carries the advice out, after the userfaultfds have heard of it.
fn carry_out<P: Platform>(
    space: &AddressSpace<'_, P>,
    range: VirtRange,
    advice: Advice,
    rights: KeyRights,
) -> Result<(), Error> {
    if range.is_empty() {
        return Ok(());
    }
    let effect = advice.effect();
    match effect.change {
        AdviceChange::Call(Call::WillNeed) => will_need(space, range),
        AdviceChange::Call(Call::Populate(want)) => Populate::all_of(range, want).finish(space),
        AdviceChange::Call(Call::Remove) => remove_contents(space, range),
        AdviceChange::Call(Call::Collapse) => space.collapse_range(range),
        AdviceChange::Call(Call::PageOut) => page_out(space, range),
        AdviceChange::Vmas(change) => {
            let advice = VmaAdvice { change, loss: effect.loss, rights };
            // The part before the error is complete; a second attempt repeats it without harm.
            let result = space.operate_with_reclaim(|op| advise(op, range, advice));
            match change {
                VmaChange::Entries(_) => result,
                // A mapping that cannot be split now may be split later. Linux returns
                // `EAGAIN`.
                VmaChange::Flags(_) => result.map_err(|error| {
                    let later = matches!(error, Error::OutOfMemory | Error::TooManyMappings);
                    if later { Error::TryAgain } else { error }
                }),
            }
        }
    }
}

fn advise<P: Platform>(
    op: &mut Op<'_, '_, P>,
    range: VirtRange,
    advice: VmaAdvice,
) -> Result<(), Failure> {
    let mut parts = Parts::of(range);
    while let Some((vma, part)) = parts.next(*op.vmas) {
        if !may_be_advised(vma, advice.loss, advice.rights) {
            return Err(Error::Sealed(part.start()).into());
        }
        match advice.change {
            VmaChange::Entries(change) => {
                if change.is_page_by_page() {
                    interrupt::check(op.platform())?;
                }
                change_entries(op, vma, part, change)?;
            }
            VmaChange::Flags(change) => {
                let flags = change.of(vma)?;
                if flags != vma.flags() {
                    op.vmas.with_flags(vma, part, flags, |_| Ok(()))?;
                }
            }
        }
    }
    Ok(parts.end()?)
}

/// The error for a mapping whose contents the advice must not drop; for a sealed mapping, the error
/// is [`Error::Sealed`].
#[cold]
fn refusal(vma: &Vma, effect: Effect, rights: KeyRights) -> Option<Error> {
    match effect.change {
        _ if !may_be_advised(vma, effect.loss, rights) => Some(Error::Sealed(vma.range().start())),
        AdviceChange::Call(Call::Remove) => refusal_of_removal(vma),
        AdviceChange::Vmas(VmaChange::Entries(change)) => refusal_of_change(vma, change),
        AdviceChange::Call(Call::WillNeed | Call::Populate(_) | Call::Collapse | Call::PageOut)
        | AdviceChange::Vmas(VmaChange::Flags(_)) => None,
    }
}

/// The error for a mapping whose entries the advice may not change.
#[inline(always)]
fn refusal_of_change(vma: &Vma, change: EntryChange) -> Option<Error> {
    let locked = vma.has(MappingFlags::LOCKED);
    let guards = matches!(change, EntryChange::InstallGuards | EntryChange::RemoveGuards);
    // Only a revoke or an unmapping removes leaves of frames outside the core's memory.
    let refuses = vma.has(MappingFlags::FRAMES)
        || guards && vma.has(MappingFlags::DONT_EXPAND)
        || match change {
            EntryChange::Drop { locked: allows } => locked && !allows,
            EntryChange::Free => locked || !vma.is_anonymous(),
            EntryChange::Cold => locked,
            EntryChange::InstallGuards | EntryChange::RemoveGuards => false,
        };
    refuses.then_some(Error::Invalid)
}

fn change_entries<'op, P: Platform>(
    op: &mut Op<'op, '_, P>,
    vma: &'op Vma,
    part: VirtRange,
    change: EntryChange,
) -> Result<(), Failure> {
    if let Some(error) = refusal_of_change(vma, change) {
        return Err(error.into());
    }
    match change {
        EntryChange::Drop { .. } => Ok(drop_contents(op, vma, part)?),
        EntryChange::Free => Ok(cold_or_free(op, vma, part, UseBits::AccessedAndDirty)?),
        EntryChange::Cold => Ok(cold_or_free(op, vma, part, UseBits::Accessed)?),
        EntryChange::InstallGuards => guard_pages::install(op, vma, part),
        EntryChange::RemoveGuards => Ok(guard_pages::remove(op, vma, part)?),
    }
}

/// Unmaps the pages of a part of a VMA. The VMA stays.
pub(in crate::space) fn drop_contents<P: Platform>(
    op: &mut Op<'_, '_, P>,
    vma: &Vma,
    part: VirtRange,
) -> Result<(), NoMemory> {
    op.note_resident();
    let locked = vma.lock_write(op.platform());
    let edit = &mut op.edit;
    // The VMA lock excludes faults, so nothing is mapped in the VMA during the check. A truncation
    // does not acquire that lock, and it empties the entry of a huge leaf for a moment, but with
    // the table locked.
    if part.len() >= P::Arch::PMD.span() && look::is_under_empty_entry(edit.table(), part) {
        return Ok(());
    }
    edit.uncharge_before_unlock();
    let protected = vma.dropped_protection();
    let spares = vma.has(MappingFlags::MAYBE_GUARDS) || protected == Protected::Marked;
    let zapped = if spares {
        edit.zap_sparing(part, Exceptions { spared: Spared::Guards, protected })
    } else {
        edit.zap(part, part, Flush::BeforeUnlock)
    };
    // Flush before the VMA is unlocked: a fault would otherwise map a new page while stale TLB
    // entries still refer to the old page.
    edit.flush();
    drop(locked);
    zapped
}

/// The object of the mapping, if it is shared memory.
pub(in crate::space) fn shared_memory(vma: &Vma) -> Option<&ObjectState> {
    vma.object().filter(|object| object.is_shared_memory())
}

/// Whether a sealed mapping allows the advice: anonymous contents that the program could not
/// overwrite anyway must not vanish (`mseal(2)`).
pub(super) fn may_be_advised(vma: &Vma, loss: Loss, rights: KeyRights) -> bool {
    !vma.has(MappingFlags::SEALED)
        || loss == Loss::Nothing
        || !vma.is_anonymous()
        || vma.protection().contains(Protection::WRITE) && rights.may_store(vma.flags().key())
}
