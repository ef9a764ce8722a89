//! The two calls that collapse, and the collapse of one table span.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::addr::{Orders, PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Absent, Arch, Kind, Level, Marker};
use crate::error::{CallError, Error, Failure, NoMemory};
use crate::events::RareEvents;
use crate::folio::MAX_FOLIO_ORDER;
use crate::interrupt;
use crate::object::{self, Object};
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::stats::Counts;
use crate::table::collapse::JoinError;
use crate::table::collapse::Replacement;
use crate::table::look;
use crate::table::look::MappedRun;
use crate::table::{free_table, new_table};
use crate::vma::{MappingFlags, Vma};
use crate::vmas::{Parts, VmaView};

use super::scan_pmd::scan_pmd;
use super::{CollapseLimits, CollapseProgress};
use crate::space::AddressSpace;
use crate::space::call::madvise::drop_contents;
use crate::space::call::swap_off::swap_in_range;
use crate::space::op::Op;
use crate::space::userfault::shared::populate_collapsed;

/// The reason why a span was not collapsed.
pub(super) enum Refusal {
    /// The call continues with the next span and fails at the end of the range.
    Here(Error),
    /// The call ends immediately, as on Linux.
    Ends(Error),
    /// Some pages are in swap, but no more than the limit allows.
    InSwap,
}

impl CallError for Refusal {
    const OUT_OF_MEMORY: Self = Self::Ends(Error::OUT_OF_MEMORY);
}

impl From<Error> for Failure<Refusal> {
    fn from(error: Error) -> Self {
        Self::Refused(Refusal::Here(error))
    }
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Collapses every whole table span in `range` into a large folio that a huge leaf maps,
    /// regardless of the policy (Linux: `madvise(2)` with `MADV_COLLAPSE`).
    ///
    /// Context: may sleep. Complexity: linear in the number of pages.
    ///
    /// # Errors
    /// Spans that were collapsed before an error stay collapsed.
    ///
    /// - [`Error::NotMapped`]: the range has holes.
    /// - [`Error::Invalid`]: a mapping is too small, refuses large folios, is a private mapping of
    ///   an object, or is write-protected by a userfaultfd. Also if a span is empty or has entries
    ///   that cannot be collapsed. (Pages of an object around guards are collapsed into one folio,
    ///   but a huge leaf cannot map it.)
    /// - [`Error::Busy`]: a userfaultfd serves the missing pages.
    /// - [`Error::TryAgain`]: a page is pinned.
    /// - [`Error::OutOfMemory`]: no folio of that size is free.
    /// - [`Error::Interrupted`]: a fatal signal was pending before a span. (Linux does not check.)
    pub fn collapse_range(&self, range: VirtRange) -> Result<(), Error> {
        collapse_range(self, range)
    }

    /// Examines up to `spans` table spans from `from` on, and collapses those that the policy and
    /// `limits` allow. Spans of anonymous memory get a huge leaf immediately, spans of shared
    /// memory at the next access. A low-priority thread of the embedder calls this (Linux:
    /// `khugepaged`). If a fatal signal is pending for that thread, or no folio is free, the call
    /// stops after one span.
    ///
    /// Context: may sleep. Complexity: linear in the number of entries of the examined spans.
    pub fn collapse_some(
        &self,
        from: VirtAddr,
        spans: u32,
        limits: &CollapseLimits,
    ) -> CollapseProgress {
        collapse_some(self, from, spans, limits)
    }
}

fn collapse_some<P: Platform>(
    space: &AddressSpace<'_, P>,
    from: VirtAddr,
    spans: u32,
    limits: &CollapseLimits,
) -> CollapseProgress {
    let span = P::Arch::PMD.span();
    let collapser = Collapser { space, limits: Some(limits) };
    let mut progress =
        CollapseProgress { looked_at: 0, collapsed: 0, next: from, out_of_memory: false };
    while progress.looked_at < spans {
        let next = {
            let vmas = space.vmas.lock();
            collapser.next_candidate(vmas.view(), progress.next.0)
        };
        let Some(base) = next else {
            progress.next = VirtAddr(0);
            break;
        };
        let result = collapser.collapse_in_background(VirtAddr(base));
        progress.looked_at += 1;
        progress.collapsed += u32::from(result.is_ok());
        progress.next = VirtAddr(base + span);
        progress.out_of_memory = matches!(result, Err(Failure::NoMemory));
        if progress.out_of_memory || interrupt::check(space.platform()).is_err() {
            break;
        }
    }
    progress
}

fn collapse_range<P: Platform>(space: &AddressSpace<'_, P>, range: VirtRange) -> Result<(), Error> {
    let collapser = Collapser { space, limits: None };
    let mut parts = Parts::of(range);
    while let Some(part) = next_part(space, &mut parts)? {
        collapser.collapse_part(part)?;
    }
    parts.end()
}

/// The next part of the range, which lies in one mapping that may have large folios.
pub(super) fn next_part<P: Platform>(
    space: &AddressSpace<'_, P>,
    parts: &mut Parts,
) -> Result<Option<VirtRange>, Error> {
    let vmas = space.vmas.lock();
    let Some((vma, part)) = parts.next(vmas.view()) else { return Ok(None) };
    if !space.settings.may_collapse_on_demand() {
        return Err(Error::Invalid);
    }
    check_collapsible::<P>(vma)?;
    Ok(Some(part))
}

/// The whole table spans of a part of one mapping.
pub(super) fn spans_of<P: Platform>(part: VirtRange) -> Result<VirtRange, Error> {
    let span = P::Arch::PMD.span();
    let first = part.start().0.next_multiple_of(span);
    let end = part.end().0 & !(span - 1);
    // A range within one span is an error, but a range that ends at the edge of a span is not. Linux
    // makes the same distinction.
    if first > end { Err(Error::Invalid) } else { Ok(VirtRange::raw(first, end)) }
}

/// The progress of [`Collapser::collapse`].
pub(super) enum Collapsed<'m, P: Platform> {
    Done,
    /// The span maps shared memory, starting at this page of the object. The caller collapses the
    /// span without the mutex.
    OfObject(Object<'m, P>, u64),
}

/// Collapses table spans, on demand or in the background.
pub(super) struct Collapser<'a, 'm, P: Platform> {
    pub(super) space: &'a AddressSpace<'m, P>,
    /// The limits of the background collapser; `None` on demand.
    pub(super) limits: Option<&'a CollapseLimits>,
}

impl<'m, P: Platform> Collapser<'_, 'm, P> {
    /// Collapses the whole table spans of a part of one mapping.
    fn collapse_part(&self, part: VirtRange) -> Result<(), Error> {
        let (span, spans) = (P::Arch::PMD.span(), spans_of::<P>(part)?);
        let end = spans.end().0;
        let mut result = Ok(());
        let mut base = spans.start().0;
        while base < end {
            interrupt::check(self.space.platform())?;
            let filled = self.first_collapsible(VirtRange::raw(base, end));
            if filled > base {
                result = Err(Error::Invalid);
                base = filled;
                continue;
            }
            let collapsed = self.collapse_span(VirtAddr(base));
            base += span;
            match collapsed {
                Err(Refusal::Ends(error)) => return Err(error),
                Err(Refusal::Here(error)) => result = Err(error),
                // The pages have been swapped out again since.
                Err(Refusal::InSwap) => result = Err(Error::TryAgain),
                Ok(()) => {}
            }
        }
        result
    }

    /// The start of the first table span in `range` that may have pages. An empty span of anonymous
    /// memory cannot be collapsed. Pages of an object may exist even if no table exists for the
    /// range.
    pub(super) fn first_collapsible(&self, range: VirtRange) -> u64 {
        let vmas = self.space.vmas.lock();
        let vma = vmas.view().at(range.start());
        if !vma.is_some_and(|vma| vma.is_anonymous() && vma.range().covers(range)) {
            return range.start().0;
        }
        let span = P::Arch::PMD.span();
        let part = self.space.page_table.first_part(range, span, None);
        part.map_or(range.end().0, |part| part.start().align_down(span).0)
    }

    fn collapse_in_background(&self, base: VirtAddr) -> Result<(), Failure<Refusal>> {
        let memory = self.space.page_table.memory;
        let result = self.collapse_once(base);
        crate::deferred::free_some(memory);
        match result {
            Err(Failure::NoMemory) if self.limits.is_some_and(|limits| limits.collects) => {
                memory.collect();
                Ok(self.collapse_span(base)?)
            }
            result => result,
        }
    }

    /// The start of the first table span from `at` on that lies in one mapping whose policy allows
    /// large folios.
    fn next_candidate(&self, vmas: VmaView<'_, P>, at: u64) -> Option<u64> {
        let span = P::Arch::PMD.span();
        let order = P::Arch::PMD.order();
        let memory = self.space.page_table.memory;
        let mut at = at;
        loop {
            let vma = vmas.first_ending_after(at)?;
            let base = at.max(vma.start()).next_multiple_of(span);
            let orders = match vma.object() {
                None => memory.folio_policy().orders(vma.flags().huge_advice()),
                Some(object) if object.is_file() => Orders::default(),
                Some(object) => object.orders(memory, vma.flags()),
            };
            let wanted = self.space.settings.used_orders(orders, vma.flags()).contains(order);
            let served = vma.has(MappingFlags::USERFAULT_MINOR);
            let possible = !served && check_collapsible::<P>(vma).is_ok();
            if wanted && possible && base + span <= vma.end() {
                return Some(base);
            }
            at = vma.end();
        }
    }

    fn collapse_span(&self, base: VirtAddr) -> Result<(), Refusal> {
        self.space.page_table.memory.outermost(|| self.collapse_once(base))
    }

    fn collapse_once(&self, base: VirtAddr) -> Result<(), Failure<Refusal>> {
        let range = VirtRange::raw(base.0, base.0 + P::Arch::PMD.span());
        let result = self.try_collapse(range);
        if let Err(Failure::Refused(Refusal::InSwap)) = result {
            swap_in_range(self.space, range)?;
            return self.try_collapse(range);
        }
        result
    }

    fn try_collapse(&self, range: VirtRange) -> Result<(), Failure<Refusal>> {
        match self.begin(range)? {
            Collapsed::Done => Ok(()),
            Collapsed::OfObject(object, first) => self.collapse_object(range, &object, first),
        }
    }

    /// Collapses a span of anonymous memory. The result tells of another one's object.
    pub(super) fn begin(&self, range: VirtRange) -> Result<Collapsed<'m, P>, Failure<Refusal>> {
        self.space.operate(|op| self.collapse(op, range))
    }

    /// Collapses the pages of the object behind `range`, which lies in a shared mapping. The pages
    /// start at page `first` of the object.
    fn collapse_object(
        &self,
        range: VirtRange,
        object: &Object<'m, P>,
        first: u64,
    ) -> Result<(), Failure<Refusal>> {
        let missing = self.limits.map(|limits| limits.missing);
        self.map_collapsed(range, object::collapse(object, first, missing))
    }

    /// Ends the collapse of the pages of the object behind `range`, with this result.
    pub(super) fn map_collapsed(
        &self,
        range: VirtRange,
        collapsed: Result<(), Failure>,
    ) -> Result<(), Failure<Refusal>> {
        let is_retracted = matches!(collapsed, Ok(()) | Err(Failure::Refused(Error::Busy)))
            && self.space.operate(|op| retract(op, range));
        match collapsed {
            Err(Failure::Refused(Error::Busy)) if is_retracted => {}
            Err(failure) => {
                return Err(failure.map(|error| {
                    let here = error == Error::TryAgain;
                    if here { Refusal::Here(error) } else { Refusal::Ends(error) }
                }));
            }
            Ok(()) => {}
        }
        if self.limits.is_some() {
            return Ok(());
        }
        if self.has_guards(range) {
            // The pages are now in one folio, but a huge leaf would map pages in place of the
            // guards. As on Linux, the call fails in this case.
            return Err(Error::Invalid.into());
        }
        // Maps the huge leaf before the call returns, as Linux does. The collapse has succeeded
        // even if the population fails.
        let _ = populate_collapsed(self.space, range);
        Ok(())
    }

    /// Whether `range`, a part of one mapping, has a guard.
    fn has_guards(&self, range: VirtRange) -> bool {
        let vmas = self.space.vmas.lock();
        let mut found = false;
        let vma = vmas.view().at(range.start());
        if vma.is_some_and(|vma| vma.has(MappingFlags::MAYBE_GUARDS)) {
            look::survey(&self.space.page_table, range, |stretch| {
                found |= stretch.what == MappedRun::Absent(Absent::Marker(Marker::Guard));
            });
        }
        found
    }

    fn collapse(
        &self,
        op: &mut Op<'_, 'm, P>,
        range: VirtRange,
    ) -> Result<Collapsed<'m, P>, Failure<Refusal>> {
        let base = range.start();
        let vma = op.vmas.at(base).filter(|vma| vma.range().covers(range));
        // The mutex was released since the last check, so the mapping may have changed.
        let vma = vma.ok_or(Error::NotMapped(base))?;
        let demanded = self.limits.is_none();
        check_collapsible::<P>(vma)?;
        if vma.has(MappingFlags::USERFAULT_MINOR) && !demanded {
            return Err(Error::Invalid.into());
        }
        if let Some(object) = op.space.object_of(vma).filter(|_| vma.is_shared()) {
            return Ok(Collapsed::OfObject(object, vma.page_offset_of(base)));
        }
        let locked = vma.lock_write(op.platform());
        op.edit.uncharge_before_unlock();
        let result = self.collapse_anonymous(op, &locked, range);
        op.edit.flush();
        drop(locked);
        result.map(|()| Collapsed::Done)
    }

    fn collapse_anonymous(
        &self,
        op: &mut Op<'_, 'm, P>,
        vma: &Vma,
        range: VirtRange,
    ) -> Result<(), Failure<Refusal>> {
        let scan = scan_pmd(op.edit.table(), range);
        if scan.huge {
            // The background collapser must not count this span as collapsed.
            return if self.limits.is_some() { Err(Error::Busy.into()) } else { Ok(()) };
        }
        if scan.present + scan.swapped == 0 || scan.absent {
            return Err(Error::Invalid.into());
        }
        if self.limits.is_some_and(|limits| scan.exceeds(limits, range.pages() as u32)) {
            return Err(Error::Busy.into());
        }
        if scan.swapped > 0 {
            return Err(Refusal::InSwap.into());
        }
        match op.edit.join_leaves(range.start()) {
            Ok(()) => return Ok(()),
            Err(JoinError::NoMemory) => return Err(Failure::NoMemory),
            Err(JoinError::NotUniform) => {}
        }
        if scan.pinned {
            return Err(Error::TryAgain.into());
        }
        collapse_by_copy(op, vma, range)
    }
}

fn collapse_by_copy<P: Platform>(
    op: &mut Op<'_, '_, P>,
    vma: &Vma,
    range: VirtRange,
) -> Result<(), Failure<Refusal>> {
    let memory = op.memory();
    let order = P::Arch::PMD.order().min(MAX_FOLIO_ORDER);
    let mut counts = Counts::default();
    memory.may_wait();
    let deposit = new_table(memory, Level::PTE, &mut counts).ok_or(NoMemory)?;
    let Some(fresh) = memory.frames.new_exclusive_folio(order) else {
        // SAFETY: 1. allocated above; 2. no other thread has seen it.
        unsafe { free_table(memory, deposit, &mut counts) };
        op.edit.count(&counts);
        return Err(Failure::NoMemory);
    };
    RareEvents::note(&memory.rare.huge_collapses);
    let owner = AnonGroup::as_owner(vma.group());
    fresh.set_owner(owner, vma.folio_index_at(range.start()));
    let attributes = vma.flags().attributes().written().get();
    let what = Replacement { base: range.start(), attributes, deposit };
    let left = op.edit.replace_by_copy(&what, fresh);
    let done = left.is_none();
    if let Some(folio) = left {
        folio.discard();
        // SAFETY: 1. allocated above; 2. a replacement that was not completed has not published it.
        unsafe { free_table(memory, deposit, &mut counts) };
    }
    op.edit.count(&counts);
    if done { Ok(()) } else { Err(Error::Invalid.into()) }
}

/// Unmaps the small leaves of an object's large folio, so that the next access maps a huge leaf.
/// Returns `false`, and changes nothing, if the span has no such leaves or also has other entries.
fn retract<P: Platform>(op: &mut Op<'_, '_, P>, range: VirtRange) -> bool {
    let Some(vma) = op.vmas.at(range.start()).filter(|vma| vma.range().covers(range)) else {
        return false;
    };
    let frames = &op.memory().frames;
    let order = P::Arch::PMD.order().min(MAX_FOLIO_ORDER);
    let (mut small, mut fits) = (false, vma.is_shared() && check_collapsible::<P>(vma).is_ok());
    look::look(op.edit.table(), range, |looked| {
        match looked.node.level.kind(looked.raw) {
            Kind::Leaf if looked.node.level == Level::PTE => {
                let folio = frames.folio_of(P::Arch::frame(looked.entry));
                small = true;
                fits &= folio.is_some_and(|folio| folio.order == order);
            }
            Kind::Leaf | Kind::Absent => fits = false,
            Kind::Empty | Kind::Table => {}
        }
        fits
    });
    small && fits && drop_contents(op, vma, range).is_ok()
}

/// Checks whether a mapping may have large folios. The mapping must cover the last whole table span
/// before its end (Linux checks the same span), all its pages must have one owner, and no
/// userfaultfd may supply or write-protect the pages.
///
/// # Errors
/// [`Error::Invalid`]; [`Error::Busy`] if a userfaultfd serves missing pages.
fn check_collapsible<P: Platform>(vma: &Vma) -> Result<(), Error> {
    let span = P::Arch::PMD.span();
    let last = vma.end() & !(span - 1);
    let fits = last >= span && last - span >= vma.start();
    // A huge leaf can map pages of an object only if address and offset have the same alignment.
    let skew = (vma.start() >> PAGE_SHIFT).wrapping_sub(vma.page_offset());
    let aligned = vma.is_anonymous() || skew.is_multiple_of(span >> PAGE_SHIFT);
    // A folio belongs to either an object or an anon group. A private mapping of an object has
    // pages of both kinds, which cannot share a large folio.
    let uniform = vma.is_anonymous() || vma.is_shared();
    let possible = fits
        && aligned
        && uniform
        && !vma.flags().intersects(MappingFlags::NO_HUGE | MappingFlags::DONT_EXPAND)
        && (!vma.is_anonymous() || vma.group_pointer().is_some());
    // In minor mode, the object's existing pages may become one folio.
    if !possible || vma.has(MappingFlags::USERFAULT_WRITE_PROTECT) {
        return Err(Error::Invalid);
    }
    if vma.has(MappingFlags::USERFAULT_MISSING) { Err(Error::Busy) } else { Ok(()) }
}
