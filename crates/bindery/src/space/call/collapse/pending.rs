//! `MADV_COLLAPSE` in steps.

use core::mem;

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::Arch;
use crate::error::{Error, Failure};
use crate::interrupt;
use crate::object::{self, Object, PageReady};
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::space::call::steps::{CallReady, CallWait, Step};
use crate::space::call::swap_off::SwapInWait;
use crate::vmas::Parts;

use super::call::{Collapsed, Collapser, Refusal, next_part, spans_of};

/// A collapse on demand, and its progress. Between two steps, no lock is held and nothing is
/// prepared: each step looks the mapping of its span up again. So a span that another thread changes
/// meanwhile is collapsed as it then is, or refused.
#[derive(Debug)]
pub(in crate::space::call) struct PendingCollapse<'m, P: Platform> {
    /// The mappings after the present one; `None` after the end of the call.
    parts: Option<Parts>,
    /// The table spans of the present mapping that are left, the one that waits first.
    spans: VirtRange,
    /// The last error of a span of the present mapping.
    result: Result<(), Error>,
    progress: Progress<'m, P>,
}

/// The progress in the first span that is left.
#[derive(Debug)]
enum Progress<'m, P: Platform> {
    Untried,
    /// Pages were in swap. When they are back, the span is tried once more.
    InSwap,
    /// The span maps the pages of this object from this one on.
    OfObject(Object<'m, P>, u64),
}

impl<'m, P: Platform> PendingCollapse<'m, P> {
    /// The collapse of `range`. Nothing is collapsed yet.
    pub(in crate::space::call) fn new(range: VirtRange) -> Self {
        let (parts, spans) = (Some(Parts::of(range)), VirtRange::default());
        Self { parts, spans, result: Ok(()), progress: Progress::Untried }
    }

    /// Collapses spans until all are done or one has to wait for a page in swap, or for the pager
    /// of a file. `ready` is the end of the wait that the last step returned.
    ///
    /// # Errors
    /// As [`AddressSpace::collapse_range`]. No step after an error does anything.
    pub(in crate::space::call) fn step<'s>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
    ) -> Result<Step<'s, 'm, P>, Error> {
        let result = self.advance(space, ready);
        if !matches!(result, Ok(Step::Blocked(_))) {
            (self.parts, self.progress) = (None, Progress::Untried);
        }
        result
    }

    fn advance<'s>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        ready: Option<CallReady<'m, P>>,
    ) -> Result<Step<'s, 'm, P>, Error> {
        let collapser = Collapser { space, limits: None };
        let mut ready = ready.and_then(CallReady::of_object);
        loop {
            while !self.spans.is_empty() {
                match self.next_span(&collapser, ready.take()) {
                    Ok(Some(wait)) => return Ok(Step::Blocked(wait)),
                    Ok(None) => {}
                    Err(Refusal::Ends(error)) => return Err(error),
                    Err(Refusal::Here(error)) => self.result = Err(error),
                    // The pages have been swapped out again since.
                    Err(Refusal::InSwap) => self.result = Err(Error::TryAgain),
                }
            }
            mem::replace(&mut self.result, Ok(()))?;
            let Some(parts) = &mut self.parts else { return Ok(Step::Done) };
            match next_part(space, parts)? {
                Some(part) => self.spans = spans_of::<P>(part)?,
                None => return parts.clone().end().map(|()| Step::Done),
            }
        }
    }

    /// Collapses the first span that is left, or returns the wait for its pages. Without a wait, the
    /// span is left no more.
    fn next_span<'s>(
        &mut self,
        collapser: &Collapser<'s, 'm, P>,
        ready: Option<PageReady<'m, P>>,
    ) -> Result<Option<CallWait<'s, 'm, P>>, Refusal> {
        let (start, end) = (self.spans.start().0, self.spans.end().0);
        interrupt::check(collapser.space.platform()).map_err(Refusal::Ends)?;
        let mut rest = start + P::Arch::PMD.span();
        let tried = if matches!(self.progress, Progress::Untried) {
            let filled = collapser.first_collapsible(self.spans);
            if filled > start {
                rest = filled;
                Err(Refusal::Here(Error::Invalid))
            } else {
                self.try_span(collapser, VirtRange::raw(start, rest), ready)
            }
        } else {
            self.try_span(collapser, VirtRange::raw(start, rest), ready)
        };
        if !matches!(tried, Ok(Some(_))) {
            (self.progress, self.spans) = (Progress::Untried, VirtRange::raw(rest, end));
        }
        tried
    }

    /// Continues with the span, which may have pages.
    fn try_span<'s>(
        &mut self,
        collapser: &Collapser<'s, 'm, P>,
        range: VirtRange,
        ready: Option<PageReady<'m, P>>,
    ) -> Result<Option<CallWait<'s, 'm, P>>, Refusal> {
        let space = collapser.space;
        let memory = space.page_table.memory;
        // The folio that was waited for is kept until the end of this step.
        let (_kept, mut failed) = match ready {
            Some(Ok(kept)) => (kept, None),
            Some(Err(failure)) => (None, Some(failure)),
            None => (None, None),
        };
        loop {
            let was_in_swap = matches!(self.progress, Progress::InSwap);
            if was_in_swap {
                if let Some(failure) = failed.take() {
                    return Err(Refusal::Here(error_of(failure, range.start())));
                }
                if let Some(wait) = SwapInWait::next(space, range).map_err(Refusal::Here)? {
                    return Ok(Some(CallWait::for_swap_in(wait)));
                }
            }
            if let Progress::OfObject(object, first) = &self.progress {
                return memory.outermost(|| {
                    let tried =
                        failed.take().map_or_else(|| object::try_collapse(object, *first), Err);
                    match tried {
                        Ok(Some(wait)) => Ok(Some(CallWait::for_object(wait))),
                        Ok(None) => collapser.map_collapsed(range, Ok(())).map(|()| None),
                        Err(failure) => collapser.map_collapsed(range, Err(failure)).map(|()| None),
                    }
                });
            }
            match memory.outermost(|| collapser.begin(range)) {
                Ok(Collapsed::Done) => return Ok(None),
                Ok(Collapsed::OfObject(object, first)) => {
                    self.progress = Progress::OfObject(object, first);
                }
                Err(Refusal::InSwap) if !was_in_swap => self.progress = Progress::InSwap,
                Err(refusal) => return Err(refusal),
            }
        }
    }
}

/// The error of a span some page of which cannot be swapped in.
fn error_of(failure: Failure, at: VirtAddr) -> Error {
    match failure {
        Failure::NoMemory => Error::OutOfMemory,
        Failure::Refused(error @ (Error::OutOfMemory | Error::Interrupted | Error::Fault(_))) => {
            error
        }
        Failure::Refused(_) => Error::Fault(at),
    }
}
