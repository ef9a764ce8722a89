//! Flags of a folio's content: dirty, lazy, fetchable, read around.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::count::{MAPPING, REFERENCES};
use super::handle::{FolioHandle, change_flag};
use crate::addr::Frame;
use crate::frame::Frames;
use crate::frame::meta::{
    DIRTY, FETCHABLE, FrameMeta, KIND_AND_ORDER, LAZY, MetaKind, READ_AROUND,
};
use crate::platform::Platform;

impl<P: Platform> FolioHandle<'_, P> {
    /// Marks the folio dirty. Only a load if it is marked.
    #[inline]
    pub(crate) fn mark_dirty(self) {
        change_flag(self.state(), DIRTY, true);
    }

    /// Whether the folio was written since [`FolioHandle::clear_dirty`].
    #[inline]
    pub(crate) fn is_dirty(self) -> bool {
        self.state().load(Relaxed) & DIRTY != 0
    }

    /// Clears the dirty mark before the content is saved; later writes count as new.
    #[inline]
    #[cfg_attr(not(test), expect(dead_code, reason = "reclaim will need it"))]
    pub(crate) fn clear_dirty(self) {
        change_flag(self.state(), DIRTY, false);
    }

    /// Whether instruction fetches see the folio's content.
    pub(crate) fn is_fetchable(self) -> bool {
        // Acquire: the synchronization by the thread that set the flag precedes the caller's entry.
        self.state().load(Acquire) & FETCHABLE != 0
    }

    /// Records that instruction fetches see the folio's content.
    pub(crate) fn mark_fetchable(self) {
        self.state().fetch_or(FETCHABLE, Release);
    }

    /// Records that the folio was written. Called after the store: a CPU that concurrently makes an
    /// executable entry either sees the cleared flag or runs a program that executes memory while
    /// another call writes it.
    pub(crate) fn clear_fetchable(self) {
        change_flag(self.state(), FETCHABLE, false);
    }

    /// Records that the folio's content may be dropped unless it is written first (`MADV_FREE`).
    pub(crate) fn mark_lazy(self) {
        change_flag(self.state(), DIRTY, false);
        change_flag(self.state(), LAZY, true);
    }

    /// Whether the folio's content may be dropped, unless it was written since
    /// [`FolioHandle::mark_lazy`].
    pub(crate) fn is_lazy(self) -> bool {
        self.state().load(Relaxed) & LAZY != 0
    }

    /// Records that readahead read the folio from swap along with another page.
    pub(crate) fn mark_read_around(self) {
        change_flag(self.state(), READ_AROUND, true);
    }

    /// Returns and clears the mark of [`FolioHandle::mark_read_around`]. The caller has the folio's
    /// lock.
    #[inline]
    pub(crate) fn take_read_around(self) -> bool {
        let is_noted = self.state().load(Relaxed) & READ_AROUND != 0;
        if is_noted {
            change_flag(self.state(), READ_AROUND, false);
        }
        is_noted
    }
}

/// As [`FolioHandle::mark_lazy`], for the folio of one page in `frame`, if it has one mapping and
/// no pins. For any other folio, and for a frame of any other kind, returns `false` and changes
/// nothing.
#[inline(always)]
pub(crate) fn mark_single_lazy<P: Platform>(frames: &Frames<P>, frame: Frame) -> bool {
    if !frames.covers(frame) {
        return false;
    }
    let FrameMeta { state, count, .. } = frames.meta(frame);
    let old = state.load(Relaxed);
    let is_single = old & KIND_AND_ORDER == MetaKind::Folio as u32;
    if !is_single || count.load(Relaxed) & !REFERENCES != MAPPING {
        return false;
    }
    let lazy = old & !DIRTY | LAZY;
    old == lazy || state.compare_exchange(old, lazy, Relaxed, Relaxed).is_ok()
}
