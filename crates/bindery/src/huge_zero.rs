//! The huge zero page: one block of zeroed frames that huge leaves of all address spaces map,
//! read-only, for memory that was read and never written.
//!
//! ```text
//! first read    level 2:  leaf, read-only --> the block    one entry for all pages of the slot
//! first write level 2: leaf ------------> a huge folio, zeroed; or, if none is free:
//!               level 1:  leaves, read-only --> the block's frames, and one page of the program's
//! ```
//!
//! The block is not a folio: it has no counts and no owner, and does not count as resident. When a
//! huge leaf is split, its pages still map the block's frames. These frames are consecutive like
//! those of a folio, so the pages are moved, protected as `PROT_NONE` and folded in runs. The block
//! is allocated when a read first needs it, and is never freed.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::addr::{Frame, Order};
use crate::arch::Arch;
use crate::events::RareEvents;
use crate::frame::{AllocateFor, FrameRange, Frames, meta};
use crate::memory::Memory;
use crate::platform::Platform;

/// The block, if it exists yet, and whether faults may map it.
pub(crate) struct HugeZero {
    used: AtomicBool,
    first: AtomicU32,
}

impl HugeZero {
    pub(crate) const fn new() -> Self {
        Self { used: AtomicBool::new(false), first: AtomicU32::new(meta::NONE) }
    }

    fn set_used(&self, used: bool) {
        self.used.store(used, Ordering::Relaxed);
    }

    fn is_used(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }

    fn first(&self) -> Option<Frame> {
        // Acquire: a thread that finds the block sees its zeroes.
        let first = self.first.load(Ordering::Acquire);
        (first != meta::NONE).then_some(Frame(first))
    }

    /// The first frame of the block, which is allocated if necessary; `None` if no block is free.
    /// Called without table locks and outside read sections.
    pub(crate) fn frame<P: Platform>(
        &self,
        frames: &Frames<P>,
        events: &RareEvents,
    ) -> Option<Frame> {
        if let Some(first) = self.first() {
            return Some(first);
        }
        let (platform, order) = (frames.platform(), P::Arch::PMD.order());
        platform.allocation_may_wait();
        let first = frames.allocate(order, AllocateFor::Use)?;
        platform.zero(first, order.pages());
        if !P::Arch::COHERENT_FETCHES {
            platform.synchronize_instructions(first, order.pages());
        }
        let (none, ours) = (meta::NONE, first.0);
        match self.first.compare_exchange(none, ours, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                let state = meta::state_of(meta::MetaKind::Zero, order);
                frames.meta(first).state.store(state, Ordering::Relaxed);
                RareEvents::note(&events.huge_zero_pages);
                Some(first)
            }
            Err(theirs) => {
                // SAFETY: 1. and 2. allocated above, and never shared.
                unsafe { frames.free(first, order) };
                Some(Frame(theirs))
            }
        }
    }

    /// The number of frames from `frame` to the end of the block of 2^`order` frames; 0 if the
    /// frame is not in the block.
    #[cold]
    pub(crate) fn pages_from(&self, frame: Frame, order: Order) -> u32 {
        let pages: u32 = order.pages();
        let number = self.first().map_or(pages, |first| frame.0.wrapping_sub(first.0));
        pages.saturating_sub(number)
    }
}

impl<P: Platform> Memory<P> {
    /// Sets whether a first read of anonymous memory maps the huge zero page if the first write
    /// would take a huge folio (Linux: `transparent_hugepage/use_zero_page`). Initially off.
    /// Existing mappings are not changed. The page permanently uses the frames of one huge folio
    /// once a read needs it.
    ///
    /// Context: any. Complexity: constant.
    pub fn set_huge_zero_page(&self, used: bool) {
        self.huge_zero.set_used(used);
    }

    /// The value of [`Memory::set_huge_zero_page`].
    ///
    /// Context: any. Complexity: constant.
    pub fn uses_huge_zero_page(&self) -> bool {
        self.huge_zero.is_used()
    }

    /// The frames of the huge zero page, if a read has needed that page; they are never freed.
    ///
    /// Context: any. Complexity: constant.
    pub fn huge_zero_page(&self) -> Option<FrameRange> {
        let first = self.huge_zero.first()?;
        Some(FrameRange { first, count: self.huge_order().pages() })
    }
}
