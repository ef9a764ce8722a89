//! `/proc/kpageflags` and `/proc/kpagecount`: one word for each frame of physical memory.
//!
//! The bits are those of Linux's documentation of both files ("pagemap, from the userspace
//! perspective"). The core never sets bits for states that it does not track: pages on reclaim
//! lists, pages locked into memory, pages that the MMU has marked as referenced.

use bindery::addr::Frame;
use bindery::{FrameUse, FrameView, Memory, Platform};

/// The page is locked.
pub const KPF_LOCKED: u32 = 0;
/// The page's content is valid.
pub const KPF_UPTODATE: u32 = 3;
/// The page was written since its content was saved.
pub const KPF_DIRTY: u32 = 4;
/// The frame is a slab of the kernel.
pub const KPF_SLAB: u32 = 7;
/// Part of a free block.
pub const KPF_BUDDY: u32 = 10;
/// Programs map the page.
pub const KPF_MMAP: u32 = 11;
/// Anonymous memory.
pub const KPF_ANON: u32 = 12;
/// The page has swap as its backing store: anonymous and shared memory.
pub const KPF_SWAPBACKED: u32 = 14;
/// The first page of a block.
pub const KPF_COMPOUND_HEAD: u32 = 15;
/// Another page of a block.
pub const KPF_COMPOUND_TAIL: u32 = 16;
/// No such frame exists.
pub const KPF_NOPAGE: u32 = 20;
/// Part of a large folio, or of the huge zero page.
pub const KPF_THP: u32 = 22;
/// The zero page, or a page of the huge zero page.
pub const KPF_ZERO_PAGE: u32 = 24;
/// A page table.
pub const KPF_PGTABLE: u32 = 26;

/// Fills `into` with the words of `/proc/kpageflags` from frame number `first` on. Returns the
/// number of words, which is less than `into.len()` only after the last frame, where the file ends.
///
/// Context: any. Complexity: linear in the words, without a lock.
pub fn kpageflags<P: Platform>(memory: &Memory<P>, first: u64, into: &mut [u64]) -> usize {
    fill(memory, first, into, flags)
}

/// As [`kpageflags`], for `/proc/kpagecount`: the number of entries that map each page. The core
/// counts the mappings of a folio, not of each page. So every page of a large folio gets the mean,
/// and at least 1 if any page is mapped (as on Linux without `CONFIG_PAGE_MAPCOUNT`).
///
/// Context: any. Complexity: linear in the words, without a lock.
pub fn kpagecount<P: Platform>(memory: &Memory<P>, first: u64, into: &mut [u64]) -> usize {
    fill(memory, first, into, |_, view| mean_mappings(view))
}

fn fill<P: Platform>(
    memory: &Memory<P>,
    first: u64,
    into: &mut [u64],
    word: impl Fn(Frame, &FrameView) -> u64,
) -> usize {
    let all = memory.frame_span();
    let end = u64::from(all.first.0) + u64::from(all.count);
    let left = end.saturating_sub(first);
    let count = usize::try_from(left).map_or(into.len(), |left| left.min(into.len()));
    for (slot, number) in into[..count].iter_mut().zip(first..) {
        // The number is below the end, and frame numbers have 32 bits.
        let frame = Frame(number as u32);
        *slot = word(frame, &memory.frame_view(frame));
    }
    count
}

fn mean_mappings(view: &FrameView) -> u64 {
    let (mappings, pages) = (u64::from(view.mappings), u64::from(view.block.count));
    if mappings == 0 { 0 } else { ((mappings + pages / 2) / pages).max(1) }
}

fn flags(frame: Frame, view: &FrameView) -> u64 {
    let mut word = 0;
    let mut set = |bit: u32, holds: bool| word |= u64::from(holds) << bit;
    let folio = view.usage.is_folio();
    match view.usage {
        FrameUse::NotManaged => set(KPF_NOPAGE, true),
        FrameUse::Free => set(KPF_BUDDY, true),
        FrameUse::Slab => set(KPF_SLAB, true),
        FrameUse::Table => set(KPF_PGTABLE, true),
        FrameUse::Zero => set(KPF_ZERO_PAGE, true),
        FrameUse::Anonymous | FrameUse::SharedMemory => {
            set(KPF_ANON, view.usage == FrameUse::Anonymous);
            set(KPF_SWAPBACKED, !view.lazy);
        }
        FrameUse::File
        | FrameUse::Allocated
        | FrameUse::Kernel
        | FrameUse::Embedder
        | FrameUse::Compressed
        | FrameUse::Swap => {}
    }
    set(KPF_LOCKED, view.locked);
    set(KPF_UPTODATE, folio);
    set(KPF_DIRTY, view.dirty);
    set(KPF_MMAP, view.mappings > 0);
    if view.block.count > 1 && view.usage != FrameUse::Free {
        let head = frame == view.block.first;
        set(KPF_COMPOUND_HEAD, head);
        set(KPF_COMPOUND_TAIL, !head);
        set(KPF_THP, folio || view.usage == FrameUse::Zero);
    }
    word
}
