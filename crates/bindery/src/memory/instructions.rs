//! Makes new code visible to instruction fetches on processors that do not do so themselves.

use crate::Memory;
use crate::addr::Frame;
use crate::arch::{Arch, Permissions};
use crate::folio::Folio;
use crate::platform::Platform;

/// Makes the complete content of `folio` visible to instruction fetches, once. Called before a leaf
/// with these permissions maps one of its pages. Has no effect for a leaf that is not executable.
#[inline]
pub(crate) fn before_execution<P: Platform>(
    memory: &Memory<P>,
    permissions: Permissions,
    folio: Folio,
) {
    if !P::Arch::COHERENT_FETCHES && permissions.contains(Permissions::EXECUTE) {
        synchronize_instructions(memory, folio);
    }
}

/// Like [`before_execution`], for a frame that need not belong to a folio. The zero page is
/// synchronized at boot, other frames by the embedder.
#[inline]
pub(crate) fn before_execution_of<P: Platform>(
    memory: &Memory<P>,
    permissions: Permissions,
    frame: Frame,
) {
    if !P::Arch::COHERENT_FETCHES
        && permissions.contains(Permissions::EXECUTE)
        && let Some(folio) = memory.frames.folio_of(frame)
    {
        synchronize_instructions(memory, folio);
    }
}

#[cold]
#[inline(never)]
fn synchronize_instructions<P: Platform>(memory: &Memory<P>, folio: Folio) {
    if !memory.frames.folio(folio).is_fetchable() {
        memory.platform().synchronize_instructions(folio.head, folio.pages());
        memory.frames.folio(folio).mark_fetchable();
    }
}

/// Records that frames from `frame` on, all in one folio, were written, so the folio's next
/// executable leaf is created only after instruction fetches see the content.
#[inline]
pub(crate) fn written_by_call<P: Platform>(memory: &Memory<P>, frame: Frame) {
    if !P::Arch::COHERENT_FETCHES
        && let Some(folio) = memory.frames.folio_of(frame)
    {
        memory.frames.folio(folio).clear_fetchable();
    }
}

/// Records that a page that may be mapped executable was written on behalf of another process
/// or a debugger, which cannot synchronize it.
#[inline]
pub(crate) fn written_for_another<P: Platform>(memory: &Memory<P>, frame: Frame) {
    if !P::Arch::COHERENT_FETCHES
        && memory
            .frames
            .folio_of(frame)
            .is_some_and(|folio| memory.frames.folio(folio).is_fetchable())
    {
        memory.platform().synchronize_instructions(frame, 1);
    }
}
