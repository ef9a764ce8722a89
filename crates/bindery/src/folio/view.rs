//! The use of each frame, for readers of all memory: `/proc/kpageflags`, `vmstat`, debuggers.
//!
//! No lock is taken. A concurrent change may be seen in its state before or after it. A block that
//! is split or joined concurrently may be shown with its old or new bounds.

use core::sync::atomic::Ordering::Relaxed;

use super::count::{mappings_in, pins_in, references_in};
use super::handle::Folio;
use super::owner::OwnerKind;
use crate::addr::{Frame, Order};
use crate::frame::meta::{DIRTY, FOLIO_LOCK, LAZY, MetaKind, kind_in, order_in};
use crate::frame::{FrameRange, Frames, MAX_ORDER, MOST_FRAMES};
use crate::platform::Platform;

/// The use of a frame.
///
/// ```
/// use bindery::addr::Frame;
/// use bindery::{FrameUse, Memory, Platform};
///
/// /// Whether a wild physical address would hit a page table.
/// fn is_table<P: Platform>(memory: &Memory<P>, frame: Frame) -> bool {
///     memory.frame_view(frame).usage == FrameUse::Table
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameUse {
    /// The frame is not managed memory: it is in a hole, holds the metadata of frames, or is
    /// outside all ranges.
    NotManaged,
    /// Free, in the allocator.
    Free,
    /// Allocated, with no known use yet.
    Allocated,
    /// A page of anonymous memory.
    Anonymous,
    /// A page of shared memory, or a truncated page of it that still has a holder.
    SharedMemory,
    /// A page of a file, or a truncated page of it that still has a holder.
    File,
    /// The shared zero page, or a page of the huge zero page.
    Zero,
    /// A page table of an address space or a kernel map.
    Table,
    /// Small records of the core, such as mappings, objects and anon groups; also the records of
    /// CPUs ([`crate::Memory::cpu_online`]).
    Slab,
    /// An area of the kernel ([`crate::KernelMap`]).
    Kernel,
    /// Frames allocated by the embedder.
    Embedder,
    /// Compressed memory with pages that were swapped out, and the tables of the compressors.
    Compressed,
    /// The swap slot records.
    Swap,
}

impl FrameUse {
    /// Whether user programs may map the frame. `false` for the zero page.
    ///
    /// Context: any.
    pub fn is_folio(self) -> bool {
        matches!(self, Self::Anonymous | Self::SharedMemory | Self::File)
    }
}

/// The use of one frame ([`crate::Memory::frame_view`]).
///
/// ```
/// use bindery::addr::Frame;
/// use bindery::{Memory, Platform};
///
/// fn is_of_a_folio<P: Platform>(memory: &Memory<P>, frame: Frame) -> bool {
///     memory.frame_view(frame).usage.is_folio()
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameView {
    /// The frame's use.
    pub usage: FrameUse,
    /// The block of the frame: a folio, a free block, or another allocated block. If none is found,
    /// only the frame.
    pub block: FrameRange,
    /// The number of entries that map pages of the folio (a huge leaf counts its pages); 0 if the
    /// frame is in no folio.
    pub mappings: u32,
    /// The number of holders that do not map the folio: references and pins.
    pub holders: u32,
    /// Whether the folio is known to have been written since its content was saved. The dirty bits
    /// of the entries that map it are not read.
    pub dirty: bool,
    /// Whether the folio's content may be dropped unless it is written again (`MADV_FREE`).
    pub lazy: bool,
    /// Whether the folio is locked.
    pub locked: bool,
}

/// The number of frames for each use ([`crate::Memory::frame_usage`]).
///
/// ```
/// use bindery::{Memory, Platform};
///
/// fn user_pages<P: Platform>(memory: &Memory<P>) -> u64 {
///     let usage = memory.frame_usage();
///     usage.anonymous + usage.shared_memory + usage.file
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FrameUsage {
    /// Free frames.
    pub free: u64,
    /// Pages of anonymous folios that are mapped.
    pub anonymous: u64,
    /// The part of `anonymous` in folios as large as the span of a level 1 table.
    pub anonymous_huge: u64,
    /// Pages of shared memory, mapped or not.
    pub shared_memory: u64,
    /// Pages of files, mapped or not.
    pub file: u64,
    /// Pages of shared memory and files whose folios are mapped.
    pub mapped: u64,
    /// Page tables, including deposited ones.
    pub tables: u64,
    /// Frames with small records of the core.
    pub slab: u64,
    /// Frames of kernel areas.
    pub kernel: u64,
    /// The embedder's frames.
    pub embedder: u64,
    /// Compressed memory.
    pub compressed: u64,
    /// The swap slot records.
    pub swap: u64,
}

/// The block, of this kind and order, that contains a frame.
struct Block {
    head: Frame,
    order: Order,
    state: u32,
    kind: MetaKind,
}

/// The use of `frame`, which may be any number. O([`MAX_ORDER`]).
pub(crate) fn frame_view<P: Platform>(frames: &Frames<P>, frame: Frame) -> FrameView {
    let alone = FrameRange { first: frame, count: 1 };
    let unknown = FrameView {
        usage: FrameUse::NotManaged,
        block: alone,
        mappings: 0,
        holders: 0,
        dirty: false,
        lazy: false,
        locked: false,
    };
    if !frames.covers(frame) {
        return unknown;
    }
    if frames.is_kept_free(frame) {
        return FrameView { usage: FrameUse::Free, ..unknown };
    }
    let Some(block) = block_around(frames, frame) else {
        // The block is being split or joined.
        return FrameView { usage: FrameUse::Allocated, ..unknown };
    };
    let range = FrameRange { first: block.head, count: block.order.pages() };
    let view = FrameView { usage: usage_of(frames, &block), block: range, ..unknown };
    if block.kind != MetaKind::Folio {
        return view;
    }
    let count = frames.meta(block.head).count.load(Relaxed);
    FrameView {
        mappings: mappings_in(count),
        holders: references_in(count).saturating_add(pins_in(count)),
        dirty: block.state & DIRTY != 0,
        lazy: block.state & LAZY != 0,
        locked: block.state & FOLIO_LOCK != 0,
        ..view
    }
}

/// The totals over all frames. O(blocks).
pub(crate) fn frame_usage<P: Platform>(frames: &Frames<P>, huge_order: Order) -> FrameUsage {
    let mut sums = FrameUsage { free: frames.free_frame_count(), ..FrameUsage::default() };
    let FrameRange { first, count } = frames.span();
    let FrameRange { first: ready, count: kept } = frames.ready();
    let mut at = 0;
    while at < count {
        let inside = first.plus(at).0.wrapping_sub(ready.0);
        if inside < kept {
            // Free, regardless of their metadata.
            at += kept - inside;
            continue;
        }
        let block = block_at(frames, first.plus(at));
        let pages = if block.kind == MetaKind::Front {
            // The length of a run that changes concurrently may have any value.
            let run = (frames.meta(block.head).word.load(Relaxed) as u32).clamp(1, MOST_FRAMES);
            let is_still_one = frames.meta(block.head).kind() == MetaKind::Front;
            if is_still_one { run } else { 1 }
        } else {
            block.order.pages()
        };
        at = at.saturating_add(pages);
        let pages = u64::from(pages);
        let usage = usage_of(frames, &block);
        let is_mapped = block.kind == MetaKind::Folio
            && mappings_in(frames.meta(block.head).count.load(Relaxed)) > 0;
        match usage {
            FrameUse::Anonymous if is_mapped => {
                sums.anonymous += pages;
                if block.order >= huge_order {
                    sums.anonymous_huge += pages;
                }
            }
            FrameUse::SharedMemory => sums.shared_memory += pages,
            FrameUse::File => sums.file += pages,
            FrameUse::Table => sums.tables += pages,
            FrameUse::Slab => sums.slab += pages,
            FrameUse::Kernel => sums.kernel += pages,
            FrameUse::Embedder => sums.embedder += pages,
            FrameUse::Compressed => sums.compressed += pages,
            FrameUse::Swap => sums.swap += pages,
            FrameUse::Anonymous
            | FrameUse::NotManaged
            | FrameUse::Free
            | FrameUse::Allocated
            | FrameUse::Zero => {}
        }
        if is_mapped && matches!(usage, FrameUse::SharedMemory | FrameUse::File) {
            sums.mapped += pages;
        }
    }
    sums
}

fn usage_of<P: Platform>(frames: &Frames<P>, block: &Block) -> FrameUse {
    match block.kind {
        MetaKind::Reserved => FrameUse::NotManaged,
        MetaKind::Free | MetaKind::Front => FrameUse::Free,
        MetaKind::Raw | MetaKind::Tail => FrameUse::Allocated,
        MetaKind::Table => FrameUse::Table,
        MetaKind::Slab | MetaKind::Cpu => FrameUse::Slab,
        MetaKind::Zero => FrameUse::Zero,
        MetaKind::Kernel => FrameUse::Kernel,
        MetaKind::Embedder => FrameUse::Embedder,
        MetaKind::Compressed => FrameUse::Compressed,
        MetaKind::Swap => FrameUse::Swap,
        MetaKind::Folio => {
            let folio = Folio::of(block.head, block.order);
            match frames.folio(folio).owner_kind() {
                OwnerKind::Anonymous => FrameUse::Anonymous,
                OwnerKind::SharedMemory => FrameUse::SharedMemory,
                OwnerKind::File => FrameUse::File,
            }
        }
    }
}

/// The number of pages from `frame` to the next block: those of the block that begins there, or one
/// page. A guess unless concurrent changes are excluded.
pub(crate) fn pages_of_block<P: Platform>(frames: &Frames<P>, frame: Frame) -> u32 {
    block_at(frames, frame).order.pages()
}

/// The block that begins at `frame`, or `frame` itself as a block of one page.
fn block_at<P: Platform>(frames: &Frames<P>, frame: Frame) -> Block {
    let state = frames.meta(frame).state.load(Relaxed);
    let kind = kind_in(state);
    let order = if kind.has_order() { order_in(state).min(MAX_ORDER) } else { Order::PAGE };
    Block { head: frame, order, state, kind }
}

/// The block that contains the frame. Blocks are aligned to their size, so only a few frames can be
/// the head.
fn block_around<P: Platform>(frames: &Frames<P>, frame: Frame) -> Option<Block> {
    for order in Order::PAGE.up_to(MAX_ORDER) {
        let head = Frame(frame.0 & !(order.pages() - 1));
        if !frames.covers(head) {
            return None;
        }
        let block = block_at(frames, head);
        if block.kind != MetaKind::Tail {
            let reaches = frame.0 - head.0 < block.order.pages();
            return reaches.then_some(block);
        }
    }
    None
}
