//! [`Workspaces`]: the memory that compressors work in, in frames of the core.
//!
//! ```text
//! block of 8 frames   | hash table, 16 KiB | compressed bytes | copy of the page | unused |
//! ```
//!
//! lz4_flex takes a table from its caller ([`CompressTable`]), so it needs neither a heap nor much
//! stack space. (If another crate enables the feature `alloc` of lz4_flex, tables are on the heap
//! and cannot be constants, and the core does not compile.) A workspace has one user at a time.
//! Each online CPU has its own workspace, from the first page that it compresses on, so that CPUs
//! share no cache line of a workspace. A thread that finds its CPU's workspace busy uses another:
//! it allocates one if fewer than [`WORKSPACES`] exist, and otherwise sleeps until one is free.
//! Users of workspaces wait for nothing else, so the wait ends.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::mem::needs_drop;

use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};

use super::pools::StorePart;
use super::{Corrupt, LARGEST};
use crate::addr::{Frame, Order, PAGE_SIZE};
use crate::bytes;
use crate::cpu::CpuTable;
use crate::frame::meta::MetaKind;
use crate::frame::{AllocateFor, Frames};
use crate::platform::Platform;
use crate::sync::Mutex;

const PAGE: usize = PAGE_SIZE as usize;

/// The number of threads that can compress at once, in addition to one for each online CPU.
const WORKSPACES: usize = 4;

/// The memory of one compressor.
pub(super) struct Workspace {
    table: CompressTable,
    /// Room for the compressor's worst case, and for an object in pieces.
    output: [u8; get_maximum_output_size(PAGE)],
    page: [u8; PAGE],
}

const ORDER: Order = Order(size_of::<Workspace>().div_ceil(PAGE).next_power_of_two().ilog2() as u8);
const _: () = assert!(align_of::<Workspace>() <= PAGE && !needs_drop::<Workspace>());

/// The number of frames of a workspace.
#[cfg(test)]
pub(super) const WORKSPACE_FRAMES: u64 = ORDER.pages() as u64;

impl Workspace {
    /// The content of `page`, compressed, or raw if compression does not pay.
    ///
    /// # Safety
    /// As for [`bytes::read`], with `page` as the frame.
    pub(super) unsafe fn compress<P: Platform>(&mut self, platform: &P, page: Frame) -> &[u8] {
        // The copy is stable even if the page is written during the call.
        // SAFETY: 1. and 2. the caller's obligations.
        unsafe { bytes::read(platform, page, 0, &mut self.page) };
        let length = compress_into_with_table(&self.page, &mut self.output, &mut self.table);
        let compressed = length.ok().filter(|length| *length <= LARGEST);
        compressed.and_then(|length| self.output.get(..length)).unwrap_or(&self.page)
    }

    /// Room for an object in pieces.
    pub(super) fn buffer(&mut self) -> &mut [u8] {
        &mut self.output
    }
}

/// Decompresses `compressed` into `page`.
///
/// # Safety
/// 1. `page` is a frame of the memory to which only the caller has access, and does not belong to
///    the store.
pub(super) unsafe fn decompress<P: Platform>(
    from: &[u8],
    platform: &P,
    page: Frame,
) -> Result<(), Corrupt> {
    let mut into = platform.direct_map(page).cast::<[u8; PAGE]>();
    // SAFETY: the direct map shows the frame's bytes, which only the caller uses (obligation 1).
    let into = unsafe { into.as_mut() };
    match decompress_into(from, into) {
        Ok(PAGE) => Ok(()),
        _ => Err(Corrupt),
    }
}

/// A slot for a workspace; it holds the head of the workspace's block.
pub(super) struct WorkspaceSlot<P: Platform>(Mutex<P::Mutex, Option<Frame>>);

impl<P: Platform> WorkspaceSlot<P> {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Frees the workspace. Waits for its user.
    fn free(&self, frames: &Frames<P>) {
        let head = self.0.lock().take();
        free(frames, head);
    }

    /// Frees the workspace unless it is in use. Does not sleep.
    pub(super) fn free_if_idle(&self, frames: &Frames<P>) {
        let head = self.0.try_lock().and_then(|mut slot| slot.take());
        free(frames, head);
    }
}

/// Frees a workspace that was removed from its slot.
fn free<P: Platform>(frames: &Frames<P>, head: Option<Frame>) {
    if let Some(head) = head {
        // SAFETY: 1. `make` has allocated the block, and only its slot referred to it. 2. The
        // slot's lock was held, so no thread used the workspace, and no thread can find it any
        // longer.
        unsafe { frames.free(head, ORDER) };
    }
}

/// The shared workspaces of a store. Each online CPU has one more, in its part.
pub(super) struct Workspaces<P: Platform>([WorkspaceSlot<P>; WORKSPACES]);

impl<P: Platform> Workspaces<P> {
    pub(super) const fn new() -> Self {
        Self([const { WorkspaceSlot::new() }; WORKSPACES])
    }

    /// Calls `work` with a workspace that no other thread uses: that of the CPU, if it has one that
    /// is idle. `None`, without a call, if no workspace exists and no memory is available for one.
    /// May sleep until a workspace is free.
    pub(super) fn with<R>(
        &self,
        frames: &Frames<P>,
        own: Option<&StorePart<P>>,
        work: impl FnOnce(&mut Workspace) -> R,
    ) -> Option<R> {
        // The reserve has frames only for the shared workspaces.
        let own = own.map(|part| (&part.workspace, AllocateFor::Use));
        let slots = || {
            let shared = self.0.iter().map(|slot| (slot, AllocateFor::Reclaim));
            own.into_iter().chain(shared)
        };
        let idle = slots().find_map(|(slot, purpose)| {
            let mut head = slot.0.try_lock()?;
            *head = head.or_else(|| make(frames, purpose));
            head.is_some().then_some(head)
        });
        let mut locked = slots().map(|(slot, _)| slot.0.lock());
        let head = idle.or_else(|| locked.find(|head| head.is_some()))?;
        let mut workspace = frames.platform().direct_map((*head)?).cast::<Workspace>();
        // SAFETY: `make` has built the workspace in the block, which is reached only through its
        // slot, and the slot is locked.
        Some(work(unsafe { workspace.as_mut() }))
    }

    fn each<'a>(
        &'a self,
        parts: &'a CpuTable<StorePart<P>>,
    ) -> impl Iterator<Item = &'a WorkspaceSlot<P>> {
        self.0.iter().chain(parts.iter().map(|part| &part.workspace))
    }

    /// Frees all workspaces. Waits for workspaces that are in use.
    pub(super) fn release(&self, frames: &Frames<P>, parts: &CpuTable<StorePart<P>>) {
        self.each(parts).for_each(|slot| slot.free(frames));
    }

    /// The number of frames of all workspaces. Waits for workspaces that are in use.
    pub(super) fn frames(&self, parts: &CpuTable<StorePart<P>>) -> u64 {
        let made = self.each(parts).filter(|slot| slot.0.lock().is_some());
        (made.count() as u64) << ORDER.0
    }
}

/// Builds a workspace in frames of its own and returns the first frame.
#[cold]
fn make<P: Platform>(frames: &Frames<P>, purpose: AllocateFor) -> Option<Frame> {
    let head = frames.allocate(ORDER, purpose)?;
    frames.meta(head).reset(MetaKind::Compressed, ORDER);
    frames.platform().zero(head, ORDER.pages());
    let workspace = frames.platform().direct_map(head).cast::<Workspace>().as_ptr();
    // SAFETY: the block is large enough, aligned to a page and fresh from the allocator, so only
    // this call uses it. The other fields are bytes, which are zero. The constant is written
    // directly to its place, because an intermediate copy would be too large for a kernel's stack.
    unsafe { (&raw mut (*workspace).table).write(const { CompressTable::small() }) };
    Some(head)
}
