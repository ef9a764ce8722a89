//! Makes new code visible to instruction fetches, if the processor does not do so itself.

use crate::Memory;
use crate::addr::Frame;
use crate::arch::{Arch, Permissions};
use crate::folio::Folio;
use crate::platform::Platform;

impl<P: Platform> Memory<P> {
    /// Makes the content of `folio`, which is complete, visible to instruction fetches, once.
    /// Called before a leaf with these permissions maps one of its pages. Does nothing for a leaf
    /// that is not executable.
    #[inline]
    pub(crate) fn before_execution(&self, permissions: Permissions, folio: Folio) {
        if !P::Arch::COHERENT_FETCHES && permissions.contains(Permissions::EXECUTE) {
            self.synchronize_instructions(folio);
        }
    }

    /// Like [`Memory::before_execution`], for a frame that may belong to no folio: the zero page is
    /// synchronized at boot, other frames by the embedder.
    #[inline]
    pub(crate) fn before_execution_of(&self, permissions: Permissions, frame: Frame) {
        if !P::Arch::COHERENT_FETCHES
            && permissions.contains(Permissions::EXECUTE)
            && let Some(folio) = self.frames.folio_of(frame)
        {
            self.synchronize_instructions(folio);
        }
    }

    #[cold]
    #[inline(never)]
    fn synchronize_instructions(&self, folio: Folio) {
        if !self.frames.folio(folio).is_fetchable() {
            self.platform().synchronize_instructions(folio.head, folio.pages());
            self.frames.folio(folio).mark_fetchable();
        }
    }

    /// Records that frames from `frame` on, all of one folio, were written: its next executable
    /// leaf is made only after instruction fetches see the content.
    #[inline]
    pub(crate) fn written_by_call(&self, frame: Frame) {
        if !P::Arch::COHERENT_FETCHES
            && let Some(folio) = self.frames.folio_of(frame)
        {
            self.frames.folio(folio).clear_fetchable();
        }
    }

    /// Records that a page that may be mapped executable was written on behalf of another process
    /// or a debugger, which cannot synchronize it.
    #[inline]
    pub(crate) fn written_for_another(&self, frame: Frame) {
        if !P::Arch::COHERENT_FETCHES
            && self
                .frames
                .folio_of(frame)
                .is_some_and(|folio| self.frames.folio(folio).is_fetchable())
        {
            self.platform().synchronize_instructions(frame, 1);
        }
    }
}
