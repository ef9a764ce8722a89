//! The name of a folio, and the handle that provides its methods.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::reference;
use crate::addr::{Frame, Order, Orders};
use crate::frame::Frames;
use crate::frame::meta::FrameMeta;
use crate::platform::Platform;

/// The largest order of a folio: 512 pages, 2 MiB.
pub const MAX_FOLIO_ORDER: Order = Order(9);

/// The orders that a folio can have.
pub(crate) const FOLIO_ORDERS: Orders = Orders::up_to(MAX_FOLIO_ORDER);

/// A block of 2^order pages that users may map. The number does not prevent the folio from being
/// freed. A value means that a folio began at this frame, and that its frames have metadata: only
/// this folder creates such values, from a block that it has allocated or split, or from metadata.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) struct Folio {
    /// The first frame, aligned to the folio's size.
    pub(crate) head: Frame,
    /// Base-2 logarithm of the number of pages, at most [`MAX_FOLIO_ORDER`].
    pub(crate) order: Order,
    /// Prevents other folders from creating a value.
    _made: (),
}

/// A folio of one page, in four bytes, for large batches.
pub(crate) struct OnePage(Frame);

impl OnePage {
    /// The value for `folio`, if it has one page.
    #[inline(always)]
    pub(crate) fn of(folio: Folio) -> Option<Self> {
        (folio.order == Order::PAGE).then_some(Self(folio.head))
    }

    /// The folio.
    #[inline(always)]
    pub(crate) const fn folio(&self) -> Folio {
        Folio::of(self.0, Order::PAGE)
    }
}

impl Folio {
    /// The folio that begins at `head`, as the metadata or the allocator says.
    #[inline(always)]
    pub(super) const fn of(head: Frame, order: Order) -> Self {
        Self { head, order, _made: () }
    }

    /// The number of its pages, 1 to 512.
    #[inline]
    pub const fn pages(self) -> u32 {
        self.order.pages()
    }
}

/// Whether a call dropped the folio's last holder, so that the folio is now free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Freed {
    /// Other holders remain.
    No,
    /// The caller has dropped the last mapping of an anonymous folio, and other holders remain.
    Unmapped,
    /// The folio's frames are back in the allocator.
    Yes,
}

/// A folio with the frames that hold its metadata. The files of this folder contain its methods. A
/// handle is two words and does not prevent the folio from being freed, so loops copy it freely.
/// Each method's documentation names the required hold.
pub(crate) struct FolioHandle<'a, P: Platform> {
    pub(super) frames: &'a Frames<P>,
    pub(super) folio: Folio,
}

impl<P: Platform> Clone for FolioHandle<'_, P> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for FolioHandle<'_, P> {}

impl<P: Platform> Frames<P> {
    /// The handle of `folio`.
    #[inline(always)]
    pub(crate) fn folio(&self, folio: Folio) -> FolioHandle<'_, P> {
        FolioHandle { frames: self, folio }
    }

    /// The folio that contains `frame`. `None` for anything else: tables, zero pages, free memory,
    /// frames outside the managed memory. O(1).
    ///
    /// The answer lasts only while the caller keeps the folio from being freed or split.
    #[inline]
    pub(crate) fn folio_of(&self, frame: Frame) -> Option<Folio> {
        reference::guess(self, frame)
    }
}

impl<'a, P: Platform> FolioHandle<'a, P> {
    #[inline(always)]
    pub(super) fn platform(self) -> &'a P {
        self.frames.platform()
    }

    /// The metadata of the folio's first frame.
    #[inline(always)]
    pub(super) fn head(self) -> &'a FrameMeta {
        self.frames.meta(self.folio.head)
    }

    /// The kind, the order, the lock and the flags.
    #[inline(always)]
    pub(super) fn state(self) -> &'a AtomicU32 {
        let head = self.head();
        &head.state
    }

    /// References, pins and mappings ([`super::count`]).
    #[inline(always)]
    pub(super) fn count(self) -> &'a AtomicU64 {
        let head = self.head();
        &head.count
    }
}

/// Sets or clears a flag of a folio's state. Only a load if nothing changes.
#[inline]
pub(super) fn change_flag(state: &AtomicU32, flag: u32, set: bool) {
    if (state.load(Relaxed) & flag != 0) == set {
        return;
    }
    if set {
        state.fetch_or(flag, Relaxed);
    } else {
        state.fetch_and(!flag, Relaxed);
    }
}
