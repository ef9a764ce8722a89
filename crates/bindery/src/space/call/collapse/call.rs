//! The two calls that collapse, and one table span.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::addr::{Orders, PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Absent, Arch, Attributes, Kind, Level, Marker};
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
use crate::table::look::MappedRun;
use crate::table::{free_table, new_table};
use crate::vma::{MappingFlags, Vma};
use crate::vmas::{Parts, VmaView};

use super::scan_pmd::scan_pmd;
use super::{CollapseLimits, CollapseProgress};
use crate::space::AddressSpace;
use crate::space::call::madvise::drop_contents;
use crate::space::op::Op;

/// Why a span was not collapsed.
enum Refusal {
    /// The call goes on with the next one, and fails at its end.
    Here(Error),
    /// The call ends, as on Linux.
    Ends(Error),
    /// Pages are in swap, and no more than may be.
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
    /// Makes large folios, mapped by huge leaves, of all whole table spans in `range`, whatever the
    /// policy says (Linux: `madvise(2)` with `MADV_COLLAPSE`).
    ///
    /// Context: may sleep. Complexity: linear in the pages.
    ///
    /// # Errors
    /// [`Error::NotMapped`] for holes; [`Error::Invalid`] if a mapping is too small, has said that
    /// it wants no large folios, or is a private one of an object, or nothing is there to be
    /// collapsed, or what is there cannot be (guards among it: pages of an object come into one
    /// folio, but are not mapped large), or a userfaultfd write-protects it; [`Error::Busy`] if a
    /// userfaultfd serves what is missing; [`Error::TryAgain`] if somebody has pinned a page;
    /// [`Error::OutOfMemory`] if there is no folio of that size; [`Error::Interrupted`] if a fatal
    /// signal came first, which is asked for before each span (Linux does not ask). What could be
    /// collapsed is.
    pub fn collapse_range(&self, range: VirtRange) -> Result<(), Error> {
        let mut parts = Parts::of(range);
        loop {
            let part = {
                let vmas = self.vmas.lock();
                let Some((vma, part)) = parts.next(vmas.view()) else { break };
                if !self.may_collapse_on_demand() {
                    return Err(Error::Invalid);
                }
                check_collapsible::<P>(vma)?;
                part
            };
            self.collapse_part(part)?;
        }
        parts.end()
    }

    /// Collapses the whole table spans of a part of one mapping.
    fn collapse_part(&self, part: VirtRange) -> Result<(), Error> {
        let span = P::Arch::PMD.span();
        let first = part.start().0.next_multiple_of(span);
        let end = part.end().0 & !(span - 1);
        if first > end {
            // As Linux: a range inside of one span is an error, one that touches its edge is not.
            return Err(Error::Invalid);
        }
        let mut result = Ok(());
        let mut base = first;
        while base < end {
            interrupt::check(self.platform())?;
            let filled = self.first_collapsible(VirtRange::raw(base, end));
            if filled > base {
                result = Err(Error::Invalid);
                base = filled;
                continue;
            }
            let collapsed = self.collapse_span(VirtAddr(base), None);
            base += span;
            match collapsed {
                Err(Refusal::Ends(error)) => return Err(error),
                Err(Refusal::Here(error)) => result = Err(error),
                // It has gone there again.
                Err(Refusal::InSwap) => result = Err(Error::TryAgain),
                Ok(()) => {}
            }
        }
        result
    }

    /// The first table span of a range of whole ones that is not known to be empty: of anonymous
    /// memory, such a span cannot be collapsed. An object's pages need no table here.
    fn first_collapsible(&self, range: VirtRange) -> u64 {
        let vmas = self.vmas.lock();
        let vma = vmas.view().at(range.start());
        if !vma.is_some_and(|vma| vma.is_anonymous() && vma.range().covers(range)) {
            return range.start().0;
        }
        let span = P::Arch::PMD.span();
        let part = self.page_table.first_part(range, span, None);
        part.map_or(range.end().0, |part| part.start().align_down(span).0)
    }

    /// Looks at up to `spans` table spans from `from` on, and collapses those that the policy and
    /// `limits` allow: of anonymous memory, and of shared memory, whose pages then come into one
    /// folio and are mapped large by the next access. It is for a low-priority thread of the
    /// embedder (Linux: `khugepaged`). If a fatal signal waits for that thread, or no folio is
    /// free, it stops after one span.
    ///
    /// Context: may sleep. Complexity: linear in the entries looked at.
    pub fn collapse_some(
        &self,
        from: VirtAddr,
        spans: u32,
        limits: &CollapseLimits,
    ) -> CollapseProgress {
        let span = P::Arch::PMD.span();
        let mut progress =
            CollapseProgress { looked_at: 0, collapsed: 0, next: from, out_of_memory: false };
        while progress.looked_at < spans {
            let next = {
                let vmas = self.vmas.lock();
                self.next_candidate(vmas.view(), progress.next.0)
            };
            let Some(base) = next else {
                progress.next = VirtAddr(0);
                break;
            };
            let result = self.collapse_in_background(VirtAddr(base), limits);
            progress.looked_at += 1;
            progress.collapsed += u32::from(result.is_ok());
            progress.next = VirtAddr(base + span);
            progress.out_of_memory = matches!(result, Err(Failure::NoMemory));
            if progress.out_of_memory || interrupt::check(self.platform()).is_err() {
                break;
            }
        }
        progress
    }

    fn collapse_in_background(
        &self,
        base: VirtAddr,
        limits: &CollapseLimits,
    ) -> Result<(), Failure<Refusal>> {
        let memory = self.page_table.memory;
        let result = self.collapse_once(base, Some(limits));
        memory.free_some();
        match result {
            Err(Failure::NoMemory) if limits.collects => {
                memory.collect();
                Ok(self.collapse_span(base, Some(limits))?)
            }
            result => result,
        }
    }

    /// The first table span from `at` on that lies whole in a mapping whose policy wants it.
    fn next_candidate(&self, vmas: VmaView<'_, P>, at: u64) -> Option<u64> {
        let span = P::Arch::PMD.span();
        let order = P::Arch::PMD.order();
        let memory = self.page_table.memory;
        let mut at = at;
        loop {
            let vma = vmas.first_ending_after(at)?;
            let base = at.max(vma.start()).next_multiple_of(span);
            let orders = match vma.object() {
                None => memory.folio_policy().orders(vma.flags().huge_advice()),
                Some(object) if object.is_file() => Orders::default(),
                Some(object) => object.orders(memory, vma.flags()),
            };
            let wanted = self.used_orders(orders, vma.flags()).contains(order);
            let served = vma.has(MappingFlags::USERFAULT_MINOR);
            let possible = !served && check_collapsible::<P>(vma).is_ok();
            if wanted && possible && base + span <= vma.end() {
                return Some(base);
            }
            at = vma.end();
        }
    }

    fn collapse_span(
        &self,
        base: VirtAddr,
        limits: Option<&CollapseLimits>,
    ) -> Result<(), Refusal> {
        self.page_table.memory.outermost(|| self.collapse_once(base, limits))
    }

    fn collapse_once(
        &self,
        base: VirtAddr,
        limits: Option<&CollapseLimits>,
    ) -> Result<(), Failure<Refusal>> {
        let range = VirtRange::raw(base.0, base.0 + P::Arch::PMD.span());
        let result = self.try_collapse(range, limits);
        if let Err(Failure::Refused(Refusal::InSwap)) = result {
            self.swap_in_range(range)?;
            return self.try_collapse(range, limits);
        }
        result
    }

    fn try_collapse(
        &self,
        range: VirtRange,
        limits: Option<&CollapseLimits>,
    ) -> Result<(), Failure<Refusal>> {
        match self.operate(|op| collapse(op, range, limits))? {
            Collapsed::Done => Ok(()),
            Collapsed::OfObject(object, first) => {
                self.collapse_object(range, (&object, first), limits)
            }
        }
    }

    /// Collapses the pages that a shared mapping shows of an object, from page `first` on.
    fn collapse_object(
        &self,
        range: VirtRange,
        (object, first): (&Object<'m, P>, u64),
        limits: Option<&CollapseLimits>,
    ) -> Result<(), Failure<Refusal>> {
        let missing = limits.map(|limits| limits.missing);
        let collapsed = object::collapse(object, first, missing);
        let is_retracted = matches!(collapsed, Ok(()) | Err(Failure::Refused(Error::Busy)))
            && self.operate(|op| retract(op, range));
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
        if limits.is_some() {
            return Ok(());
        }
        if self.has_guards(range) {
            // As Linux: the pages are in one folio, but a huge leaf cannot map them there.
            return Err(Error::Invalid.into());
        }
        // As Linux: the huge leaf is there when the call returns, if it can be had.
        let _ = self.populate_collapsed(range);
        Ok(())
    }

    /// Whether `range` has a guard, a part of one mapping.
    fn has_guards(&self, range: VirtRange) -> bool {
        let vmas = self.vmas.lock();
        let mut found = false;
        let vma = vmas.view().at(range.start());
        if vma.is_some_and(|vma| vma.has(MappingFlags::MAYBE_GUARDS)) {
            self.page_table.survey(range, |stretch| {
                found |= stretch.what == MappedRun::Absent(Absent::Marker(Marker::Guard));
            });
        }
        found
    }
}

/// The progress of [`collapse`].
enum Collapsed<'m, P: Platform> {
    Done,
    /// The span shows shared memory, from this page on, which is collapsed without the mutex.
    OfObject(Object<'m, P>, u64),
}

fn collapse<'m, P: Platform>(
    op: &mut Op<'_, 'm, P>,
    range: VirtRange,
    limits: Option<&CollapseLimits>,
) -> Result<Collapsed<'m, P>, Failure<Refusal>> {
    let base = range.start();
    let vma = op.vmas.at(base).filter(|vma| vma.range().covers(range));
    // Asked again: the mutex was free since, and another mapping may be here.
    let vma = vma.ok_or(Error::NotMapped(base))?;
    let demanded = limits.is_none();
    check_collapsible::<P>(vma)?;
    if vma.has(MappingFlags::USERFAULT_MINOR) && !demanded {
        return Err(Error::Invalid.into());
    }
    if let Some(object) = op.space.object_of(vma).filter(|_| vma.is_shared()) {
        return Ok(Collapsed::OfObject(object, vma.page_offset_of(base)));
    }
    let locked = vma.lock_write(op.platform());
    op.edit.uncharge_before_unlock();
    let result = collapse_anonymous(op, &locked, range, limits);
    op.edit.flush();
    drop(locked);
    result.map(|()| Collapsed::Done)
}

fn collapse_anonymous<P: Platform>(
    op: &mut Op<'_, '_, P>,
    vma: &Vma,
    range: VirtRange,
    limits: Option<&CollapseLimits>,
) -> Result<(), Failure<Refusal>> {
    let scan = scan_pmd(op.edit.table(), range);
    if scan.huge {
        // Nothing was done, as far as the background is concerned.
        return if limits.is_some() { Err(Error::Busy.into()) } else { Ok(()) };
    }
    if scan.present + scan.swapped == 0 || scan.absent {
        return Err(Error::Invalid.into());
    }
    if limits.is_some_and(|limits| scan.exceeds(limits, range.pages() as u32)) {
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
    let Some(folio) = memory.frames.new_exclusive_folio(order) else {
        // SAFETY: 1. made above; 2. nobody else has seen it.
        unsafe { free_table(memory, deposit, &mut counts) };
        op.edit.stats.add(&counts);
        return Err(Failure::NoMemory);
    };
    RareEvents::note(&memory.rare.huge_collapses);
    let owner = AnonGroup::as_owner(vma.group_pointer());
    memory.frames.fresh(folio).set_owner(owner, vma.folio_index_at(range.start()));
    let attributes =
        Attributes { accessed: true, dirty: true, soft_dirty: true, ..vma.flags().attributes() };
    let what = Replacement { base: range.start(), folio, attributes, deposit };
    let done = op.edit.replace_by_copy(&what);
    if !done {
        memory.frames.fresh(folio).discard(op.platform());
        // SAFETY: 1. made above; 2. what was not done has not shown it to anybody.
        unsafe { free_table(memory, deposit, &mut counts) };
    }
    op.edit.stats.add(&counts);
    if done { Ok(()) } else { Err(Error::Invalid.into()) }
}

/// Unmaps pages of an object that are one folio and mapped one by one, so that the next touch
/// maps them large. False where nothing was done: other entries are there by now, or none.
fn retract<P: Platform>(op: &mut Op<'_, '_, P>, range: VirtRange) -> bool {
    let Some(vma) = op.vmas.at(range.start()).filter(|vma| vma.range().covers(range)) else {
        return false;
    };
    let frames = &op.memory().frames;
    let order = P::Arch::PMD.order().min(MAX_FOLIO_ORDER);
    let (mut small, mut fits) = (false, vma.is_shared() && check_collapsible::<P>(vma).is_ok());
    op.edit.look(range, |looked| {
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

/// Whether large folios may be made in a mapping: it has room for one at its end, as Linux asks it,
/// and a page of its own, and no userfaultfd supplies its pages or guards its writes.
///
/// # Errors
/// [`Error::Invalid`]; [`Error::Busy`] if a userfaultfd serves what is missing.
fn check_collapsible<P: Platform>(vma: &Vma) -> Result<(), Error> {
    let span = P::Arch::PMD.span();
    let last = vma.end() & !(span - 1);
    let fits = last >= span && last - span >= vma.start();
    // Pages of an object have to be where huge leaves could map them.
    let skew = (vma.start() >> PAGE_SHIFT).wrapping_sub(vma.page_offset());
    let aligned = vma.is_anonymous() || skew.is_multiple_of(span >> PAGE_SHIFT);
    // A folio that collapsing makes belongs to the object, or to an anon group of anonymous pages.
    // What a private mapping shows is a mixture of both, which no large folio can be.
    let uniform = vma.is_anonymous() || vma.is_shared();
    let possible = fits
        && aligned
        && uniform
        && !vma.has(MappingFlags::NO_HUGE)
        && (!vma.is_anonymous() || vma.group_pointer().is_some());
    // In minor mode, what the object has may become one folio.
    if !possible || vma.has(MappingFlags::USERFAULT_WRITE_PROTECT) {
        return Err(Error::Invalid);
    }
    if vma.has(MappingFlags::USERFAULT_MISSING) { Err(Error::Busy) } else { Ok(()) }
}
