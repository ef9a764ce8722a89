//! `MADV_PAGEOUT`: swaps out the anonymous pages and the shared memory of a range, in steps.
//!
//! ```text
//! mutex held   | look the mapping up, one set of table locks: entries change, one flush  |
//! no lock held | each folio is stored, or a device gets a request for it                 |
//! ```
//!
//! The two alternate until the range is complete. If all requests of a device are in use, the
//! remaining folios stay in the swap cache, unmapped and unlocked. The step ends there, and the
//! next one finds these folios by the range's entries or by the object's index. A thread that
//! needs such a page maps it again, and then it stays in memory.
//!
//! | file | contents |
//! |---|---|
//! | `private` | the private pages of a mapping, and the folios that wait for a request |
//! | `shared` | the shared memory of a mapping |

mod private;
mod shared;

use crate::addr::{VirtAddr, VirtRange};
use crate::error::{Error, Failure};
use crate::folio::Folio;
use crate::interrupt;
use crate::object::{PolledWait, Wait};
use crate::platform::Platform;
use crate::swap::AllInUse;
use crate::table::out_batch::OutBatch;
use crate::table::rewrite::use_bits::UseBits;
use crate::vma::{MappingFlags, Vma};
use crate::vmas::Parts;

use super::cold_or_free::cold_or_free;
use super::madvise::{drop_contents, shared_memory};
use super::steps::{CallWait, Step};
use crate::space::AddressSpace;
use crate::space::op::Op;
use shared::UnmappedPages;

/// A `MADV_PAGEOUT`, and its progress. It names mappings by their addresses, and looks them up
/// again in each set of locks: a mapping that another thread unmaps after the call has reached it
/// counts as present, and one that is unmapped earlier as a hole.
#[derive(Debug)]
pub(super) struct PageOut {
    parts: Parts,
    /// The rest of the current mapping whose private pages are to be swapped out.
    private: VirtRange,
    /// The rest whose shared memory is to be swapped out, after the private pages.
    shared: VirtRange,
    /// A folio that is partly mapped at the start of `private` and that must be split.
    cut: Option<(Folio, VirtAddr)>,
    /// A folio that could not be split.
    unsplittable: Option<Folio>,
    /// Pages at the start of `shared` that this call has unmapped.
    unmapped: Option<UnmappedPages>,
    /// The pages that the last set of locks has unmapped.
    sent: Sent,
    /// For shared memory: the difference of its addresses and the offsets in the object.
    skew: u64,
    /// The pages of which some may have to wait for a request.
    unwritten: Sent,
    /// Whether the call has reached the last mapping.
    is_at_end: bool,
}

/// Pages whose folios were sent to the swap cache.
#[derive(Clone, Copy, Debug)]
enum Sent {
    /// Pages to whose slots the entries of this range refer.
    Private(VirtRange),
    /// Pages of the object that is mapped there, whose index refers to their slots.
    Shared(VirtRange),
}

const NOWHERE: VirtRange = VirtRange::raw(0, 0);

impl Sent {
    fn range(self) -> VirtRange {
        match self {
            Self::Private(range) | Self::Shared(range) => range,
        }
    }

    /// The part from `at` on.
    fn from(self, at: VirtAddr) -> Self {
        let rest = VirtRange::raw(at.0.min(self.range().end().0), self.range().end().0);
        match self {
            Self::Private(_) => Self::Private(rest),
            Self::Shared(_) => Self::Shared(rest),
        }
    }
}

impl PageOut {
    /// The advice for `range`. Nothing is swapped out yet.
    pub(super) fn new(range: VirtRange) -> Self {
        Self {
            parts: Parts::of(range),
            private: NOWHERE,
            shared: NOWHERE,
            cut: None,
            unsplittable: None,
            unmapped: None,
            sent: Sent::Private(NOWHERE),
            skew: 0,
            unwritten: Sent::Private(NOWHERE),
            is_at_end: range.is_empty(),
        }
    }

    /// Swaps pages out until all are swapped out or a device has no free request.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a locked mapping or one of frames outside the core's memory;
    /// [`Error::NotMapped`] for a hole, at the end; [`Error::OutOfMemory`]; [`Error::Interrupted`].
    pub(super) fn step<'s, 'm, P: Platform>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
    ) -> Result<Step<'s, 'm, P>, Error> {
        let memory = space.page_table.memory;
        loop {
            if !self.unwritten.range().is_empty() {
                interrupt::check(memory.platform())?;
            }
            if let Err(AllInUse { area }) = self.write_rest(space) {
                let wait = PolledWait::of_call(memory, Wait::SwapRequest { area });
                return Ok(Step::Blocked(CallWait::for_request(wait)));
            }
            if self.is_complete() {
                return self.parts.clone().end().map(|()| Step::Done);
            }
            interrupt::check(memory.platform())?;
            memory.outermost(|| {
                let mut batch = OutBatch::new();
                let done = space.operate(|op| self.send(op, &mut batch));
                // No lock is held, because a device may have to work.
                if let Some(first) = batch.try_write_out(memory) {
                    self.note_unwritten(first);
                }
                done
            })?;
        }
    }

    fn is_complete(&self) -> bool {
        self.private.is_empty() && self.shared.is_empty() && self.is_at_end
    }

    /// Records that folios of the last set of locks are not written out, from the one on to which
    /// the batch gives this address. An attempt that found no memory may have recorded some before.
    fn note_unwritten(&mut self, first: VirtAddr) {
        let sent = self.sent.range();
        let at = match self.sent {
            Sent::Private(_) => first,
            Sent::Shared(_) => VirtAddr(first.0.wrapping_add(self.skew)),
        };
        let before = self.unwritten.range();
        let before = if before.is_empty() { sent.end() } else { before.start() };
        let start = at.max(sent.start()).min(before);
        self.unwritten = match self.sent {
            Sent::Private(_) => Sent::Private(VirtRange::raw(start.0, sent.end().0)),
            Sent::Shared(_) => Sent::Shared(VirtRange::raw(start.0, sent.end().0)),
        };
    }

    /// Unmaps the folios of one set of table locks, and adds them to the batch.
    fn send<P: Platform>(
        &mut self,
        op: &mut Op<'_, '_, P>,
        batch: &mut OutBatch,
    ) -> Result<(), Failure> {
        if self.private.is_empty() && self.shared.is_empty() {
            self.begin_part(op)?;
        }
        if !self.private.is_empty() {
            let Some((vma, rest)) = find(op, &mut self.private)? else { return Ok(()) };
            if vma.group_pointer().is_none() {
                self.private = after(self.private, rest.end());
                return Ok(());
            }
            return self.send_private(op, vma, rest, batch);
        }
        if !self.shared.is_empty() {
            let Some((vma, rest)) = find(op, &mut self.shared)? else { return Ok(()) };
            let Some(object) = shared_memory(vma).filter(|object| object.may_be_swapped()) else {
                self.shared = after(self.shared, rest.end());
                return Ok(());
            };
            return self.send_shared(op, (vma, object), rest, batch);
        }
        Ok(())
    }

    /// Looks up the next mapping. Completes the advice for a mapping without pages that may be
    /// swapped out.
    fn begin_part<P: Platform>(&mut self, op: &mut Op<'_, '_, P>) -> Result<(), Failure> {
        // An attempt that finds no memory is repeated for the same mapping.
        let mut parts = self.parts.clone();
        if let Some((vma, part)) = parts.next(*op.vmas) {
            refuse(vma)?;
            let has_private = vma.group_pointer().is_some();
            let has_shared = shared_memory(vma).is_some();
            if vma.has(MappingFlags::DROPPABLE) {
                // Droppable pages are never saved.
                drop_contents(op, vma, part)?;
            } else if !op.memory().swap.is_on() || !has_private && !has_shared {
                cold_or_free(op, vma, part, UseBits::Accessed)?;
            } else {
                self.unsplittable = None;
                self.private = if has_private { part } else { NOWHERE };
                self.shared = if has_shared { part } else { NOWHERE };
            }
            self.is_at_end = parts.is_at_end();
        } else {
            self.is_at_end = true;
        }
        self.parts = parts;
        Ok(())
    }
}

/// The first mapping in the range, and its part there. The range then begins with that part.
/// `None` if another thread has unmapped the range, or if its pages must not be saved.
fn find<'op, P: Platform>(
    op: &Op<'op, '_, P>,
    range: &mut VirtRange,
) -> Result<Option<(&'op Vma, VirtRange)>, Failure> {
    let Some(vma) = op.vmas.first_in(*range) else {
        *range = NOWHERE;
        return Ok(None);
    };
    refuse(vma)?;
    let part = vma.range().intersection(*range);
    *range = after(*range, part.start());
    if vma.has(MappingFlags::DROPPABLE) {
        *range = after(*range, part.end());
        return Ok(None);
    }
    Ok(Some((vma, part)))
}

/// The part of the range from `at` on.
fn after(range: VirtRange, at: VirtAddr) -> VirtRange {
    VirtRange::raw(at.0.min(range.end().0), range.end().0)
}

/// # Errors
/// [`Error::Invalid`] for a mapping whose pages may not leave memory.
fn refuse(vma: &Vma) -> Result<(), Error> {
    let stays = vma.flags().intersects(MappingFlags::FRAMES | MappingFlags::LOCKED);
    if stays { Err(Error::Invalid) } else { Ok(()) }
}
