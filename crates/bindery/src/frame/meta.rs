//! The metadata of each frame: [`FrameMeta`], 32 bytes, in one array from the lowest to the highest
//! frame of the machine's memory.
//!
//! Every frame of the array is in exactly one state: *Reserved* (not managed by the allocator), the
//! *head* of a block, or a *Tail* in the block of a lower head. `state` contains the kind, which
//! determines the meaning of the other fields:
//!
//! | kind | `state` | `next`, `previous` | `owner` | `count` | `word` |
//! |---|---|---|---|---|---|
//! | Reserved: a hole, or the array itself | | | | | |
//! | Free: block of the buddy allocator | order | the free list of its order | | | |
//! | Raw: allocated, no meaning yet | order | [`NONE`] | 0 | 0 | 0 |
//! | Table: node of a page table | level, [`LOCK`], [`STRAY`], [`GUARDS`] | `next`: link in a gather or in the deposit; `previous`: pending flushes, see `frame::pending` | first of the deposit | 0 | entry count |
//! | Folio: head of user memory | order, [`FOLIO_LOCK`], [`ORPHAN`], [`FOLIO_PARKED`], [`DIRTY`], [`LAZY`], [`FETCHABLE`], [`SWAP_CACHED`], [`REFERENCED`], [`HOT`], [`LOOKED`], [`UNEVICTABLE`], [`WRITEBACK`], [`SHARED_EIGHTHS`], [`EXCLUSIVE`] (order 0) | with [`SWAP_CACHED`]: its swap slots, see `folio::swap_place` | with `word`: the anon group or object, see `folio::owner` | references, pins, mappings, see `folio::count`; 0 while fresh | kind of owner, index of the first page there |
//! | Tail of a folio | order of the head | | number of the head | 0 | of `head + 1` to `head + 8`: anon-exclusive bits |
//! | Tail of another block | unspecified | | unspecified | | |
//! | Slab: frame full of small objects | order 0 | list of frames with room | | 0 | free slots and objects in use, see [`super::slab`] |
//! | Zero: the shared zero page, or the huge one | order | | | 0: never counted | |
//! | Embedder: block that the embedder asked for | order | | | 0 | leaves of programs |
//! | Swap: clusters of swap slots, or their cells and values | order | | | | |
//! | Front: head of a free run in the front of a CPU | order 0 | | | | length of the run in frames |
//! | Cpu: records of CPUs, see [`crate::cpu`] | order | | | | |
//! | Kernel: block of an area of the kernel | order | `next`: the next block of the area | | | |
//! | Compressed: frame of compressed pages, or a block that compressors work in | order | list of frames with as large a hole | number of the pool | 0 | chunks in use, see `swap::compressed` |
//!
//! ```text
//! state   31          30      29            28         27 .. 25  24           23 .. 20        19           18      17   16          15           14         13      12    11         10     9      8     7 .. 4          3 .. 0
//!         FOLIO_LOCK  ORPHAN  FOLIO_PARKED  WRITEBACK  spare     UNEVICTABLE  SHARED_EIGHTHS  READ_AROUND  LOOKED  HOT  REFERENCED  SWAP_CACHED  FETCHABLE  GUARDS  LAZY  EXCLUSIVE  DIRTY  STRAY  LOCK  order or level  kind
//! ```
//!
//! `count` is zero in every frame except the head of a published folio. So a walker that has only a
//! frame number changes nothing in a head that has become a table since.
//!
//! **References and mappings** share one word. So one atomic instruction changes them for a batch
//! of any size, and its result shows whether the folio is now unused, which means that the whole
//! word is zero. A *mapping* is a pair of a page and an entry that maps it (a huge leaf counts each
//! page that it maps). A *reference* is any other holder.
//!
//! **Anon-exclusive** means that no other process shares a page, so that a write fault may reuse
//! it. The bits of a folio are not in the metadata of each frame but combined, 64 pages in one word
//! (page `i`: bit `i % 64` of `word` in frame `head + 1 + i / 64`). So a batch over 16 pages
//! touches one word of one cache line instead of 16. A folio of order 9 has 512 pages: eight words,
//! and always enough tails to hold them. Order 0 has no tail, and has its bit in `state`.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::marker::PhantomData;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::FrameRange;
use crate::addr::{Frame, Order};
use crate::arch::Level;

/// A null link. No frame has this number.
pub(crate) const NONE: u32 = u32::MAX;

/// The frame that a link in the metadata refers to, if any.
pub(crate) fn link(value: u32) -> Option<Frame> {
    (value != NONE).then_some(Frame(value))
}

const KIND_MASK: u32 = 0xf;
/// The shift of the order, or a table's level, in `state`.
pub(crate) const ORDER_SHIFT: u32 = 4;
/// The bits of `state` that hold the order, or a table's level.
pub(crate) const ORDER_MASK: u32 = 0xf << ORDER_SHIFT;
/// The bits of `state` that encode the kind of a frame.
pub(crate) const KIND_AND_ORDER: u32 = KIND_MASK | ORDER_MASK;
/// Bit lock of a table.
pub(crate) const LOCK: u32 = 1 << 8;
/// The table was detached; a thread that finds it restarts from the root.
pub(crate) const STRAY: u32 = 1 << 9;
/// The folio was written since its content was last saved.
pub(crate) const DIRTY: u32 = 1 << 10;
/// The anon-exclusive bit of a folio of order 0.
pub(crate) const EXCLUSIVE: u32 = 1 << 11;
/// The content may be dropped unless it is written again.
pub(crate) const LAZY: u32 = 1 << 12;
/// The table may hold a guard marker. Set under the table's lock, and never cleared.
pub(crate) const GUARDS: u32 = 1 << 13;
/// Instruction fetches see the folio's contents: the core has not written to it since the caches
/// were synchronized.
pub(crate) const FETCHABLE: u32 = 1 << 14;

/// Slots of a swap area hold the folio: `next` and `previous` name them, see `folio::swap_place`.
pub(crate) const SWAP_CACHED: u32 = 1 << 15;

/// Reclaim's last examination found the folio used. Combined with [`HOT`] it has another meaning:
/// see `folio::aging`.
pub(crate) const REFERENCED: u32 = 1 << 16;
/// The folio was found used twice, or was swapped in soon after its eviction.
pub(crate) const HOT: u32 = 1 << 17;

/// Whether the last turn of reclaim's clock that examined the folio has an odd number.
pub(crate) const LOOKED: u32 = 1 << 18;

/// The folio was read from swap along with another page, and no fault has needed it yet.
pub(crate) const READ_AROUND: u32 = 1 << 19;
/// The shift of [`SHARED_EIGHTHS`] in `state`.
pub(crate) const SHARED_SHIFT: u32 = 20;
/// The number of mappings, in eighths of its pages, that the folio must lose before one process may
/// have all of them. A walk over the entries of one process determines it, see `folio::alone`.
pub(crate) const SHARED_EIGHTHS: u32 = 0xf << SHARED_SHIFT;
/// Reclaim's examination found the folio locked into memory, see `folio::unevictable`.
pub(crate) const UNEVICTABLE: u32 = 1 << 24;
/// The lock of the folio is held by a request that a swap device is writing. Set only together with
/// the lock, and cleared with it.
pub(crate) const WRITEBACK: u32 = 1 << 28;
/// A thread may be parked on `state`, for the folio's lock. Set only together with the lock, and
/// cleared with it or right after it (`folio::lock::see_to_marks`).
pub(crate) const FOLIO_PARKED: u32 = 1 << 29;
/// The folio loses its owner when the lock is released. Set only together with the lock, and
/// cleared as [`FOLIO_PARKED`] is.
pub(crate) const ORPHAN: u32 = 1 << 30;
/// Bit lock of a folio, taken only by a holder of a reference or a mapping. Tables have a separate
/// lock bit.
pub(crate) const FOLIO_LOCK: u32 = 1 << 31;

/// The use of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum MetaKind {
    /// Not managed: a hole between ranges, or the metadata itself.
    Reserved = 0,
    /// Head of a block on a free list.
    Free,
    /// Head of a block that was allocated and has no use yet.
    Raw,
    /// A page-table node.
    Table,
    /// Head of a folio.
    Folio,
    /// Part of a block with a lower head.
    Tail,
    /// A frame of small objects.
    Slab,
    /// The shared zero page, or the head of the huge one.
    Zero,
    /// Head of a block owned by an area of the kernel.
    Kernel,
    /// Head of a block allocated by the embedder.
    Embedder,
    /// Compressed pages, or a working block of the compressors.
    Compressed,
    /// Head of a block of swap slot records.
    Swap,
    /// Head of a block with records of CPUs.
    Cpu,
    /// Head of a free run in the front of a CPU.
    Front,
}

impl MetaKind {
    /// Whether the frame is the head of a block whose order is in `state`. All other heads are
    /// single frames or runs: a table stores its level in place of the order, and a run in a front,
    /// which need not be a block, has its length in `word`.
    #[inline]
    pub(crate) const fn has_order(self) -> bool {
        match self {
            Self::Free
            | Self::Raw
            | Self::Folio
            | Self::Slab
            | Self::Zero
            | Self::Kernel
            | Self::Embedder
            | Self::Compressed
            | Self::Swap
            | Self::Cpu => true,
            Self::Reserved | Self::Table | Self::Tail | Self::Front => false,
        }
    }
}

/// The value of `state` for a `kind`, not a table, of an order, with no flag set.
#[inline]
pub(crate) const fn state_of(kind: MetaKind, order: Order) -> u32 {
    kind as u32 | (order.0 as u32) << ORDER_SHIFT & ORDER_MASK
}

/// The value of `state` for a table, with no flag set. The level replaces the order.
#[inline]
pub(crate) const fn state_of_table<A>(level: Level<A>) -> u32 {
    state_of(MetaKind::Table, Order(level.number()))
}

/// The kind in a value of `state`.
#[inline]
pub(crate) const fn kind_in(state: u32) -> MetaKind {
    match state & KIND_MASK {
        1 => MetaKind::Free,
        2 => MetaKind::Raw,
        3 => MetaKind::Table,
        4 => MetaKind::Folio,
        5 => MetaKind::Tail,
        6 => MetaKind::Slab,
        7 => MetaKind::Zero,
        8 => MetaKind::Kernel,
        9 => MetaKind::Embedder,
        10 => MetaKind::Compressed,
        11 => MetaKind::Swap,
        12 => MetaKind::Cpu,
        13 => MetaKind::Front,
        _ => MetaKind::Reserved,
    }
}

/// Whether a value of `state` is of this kind. Cheaper than [`kind_in`].
#[inline]
pub(crate) const fn is_kind(state: u32, kind: MetaKind) -> bool {
    state & KIND_MASK == kind as u32
}

/// The order in a value of `state`, not of a table.
#[inline]
pub(crate) const fn order_in(state: u32) -> Order {
    Order(((state & ORDER_MASK) >> ORDER_SHIFT) as u8)
}

/// The level in a value of `state` of a table.
#[inline]
pub(crate) const fn level_in<A>(state: u32) -> Level<A> {
    Level::new(order_in(state).0)
}

/// The metadata of one frame. The module documentation explains the fields of each kind.
#[derive(Debug)]
#[repr(C, align(32))]
pub(crate) struct FrameMeta {
    pub state: AtomicU32,
    pub next: AtomicU32,
    pub previous: AtomicU32,
    pub owner: AtomicU32,
    pub count: AtomicU64,
    pub word: AtomicU64,
}

/// Bytes of metadata for each frame.
pub(crate) const META_SIZE: usize = 32;
const _: () = assert!(size_of::<FrameMeta>() == META_SIZE);

impl FrameMeta {
    /// The use of the frame.
    #[inline]
    pub(crate) fn kind(&self) -> MetaKind {
        kind_in(self.state.load(Relaxed))
    }

    /// The order of the block, which is not a table.
    #[inline]
    pub(crate) fn order(&self) -> Order {
        order_in(self.state.load(Relaxed))
    }

    /// Clears all fields: the frame becomes the head of a fresh block. Only its owner calls this.
    #[inline]
    pub(crate) fn reset(&self, kind: MetaKind, order: Order) {
        self.state.store(state_of(kind, order), Relaxed);
        self.next.store(NONE, Relaxed);
        self.previous.store(NONE, Relaxed);
        self.owner.store(0, Relaxed);
        self.count.store(0, Relaxed);
        self.word.store(0, Relaxed);
    }
}

/// The array of all metadata, which its owner lends ([`MetaArray::lend`]).
pub(crate) struct MetaArray(Metas<'static>);

/// The array of all metadata, lent for `'a`.
#[derive(Clone, Copy)]
pub(crate) struct Metas<'a> {
    /// The address that the entry of frame 0 would have. It usually lies below the array, so it is
    /// never dereferenced itself.
    bias: *const FrameMeta,
    first: u32,
    count: u32,
    _array: PhantomData<&'a FrameMeta>,
}

// SAFETY: the array holds only atomics, which threads may share; it does not move while it is lent.
unsafe impl Send for Metas<'_> {}
// SAFETY: as above.
unsafe impl Sync for Metas<'_> {}

impl MetaArray {
    /// The array of `count` entries at `base`. Its first entry belongs to frame `first`.
    ///
    /// # Safety
    ///
    /// 1. `base` is aligned to 32 bytes, and `count` entries from there are initialized (zeroes are
    ///    valid) and accessed only as [`FrameMeta`] for as long as the value lives.
    pub(super) unsafe fn new(base: *const FrameMeta, first: Frame, count: u32) -> Self {
        let bias = base.wrapping_sub(first.0 as usize);
        Self(Metas { bias, first: first.0, count, _array: PhantomData })
    }

    /// The array, lent while its owner is borrowed.
    #[inline(always)]
    pub(super) fn lend(&self) -> Metas<'_> {
        self.0
    }
}

impl<'a> Metas<'a> {
    /// The first frame and the number of frames that the array covers.
    #[inline]
    pub(crate) fn span(self) -> FrameRange {
        FrameRange { first: Frame(self.first), count: self.count }
    }

    /// Whether the array has an entry for `frame`.
    #[inline]
    pub(super) fn covers(self, frame: Frame) -> bool {
        frame.0.wrapping_sub(self.first) < self.count
    }

    /// The entry of `frame`, which the array covers.
    #[inline]
    pub(super) fn get(self, frame: Frame) -> &'a FrameMeta {
        debug_assert!(self.covers(frame), "{frame:?} has no metadata");
        // SAFETY: callers in `frame/` pass only numbers below the span's end that came from the
        // allocator, from links and tails that the allocator wrote, or that passed `covers`. So the
        // address lies in the array, which is lent for `'a`.
        unsafe { &*self.bias.wrapping_add(frame.0 as usize) }
    }

    /// The entry of the frame `number` frames after the first.
    ///
    /// # Safety
    /// 1. `number` is below the count of [`Metas::span`].
    #[inline(always)]
    pub(crate) unsafe fn nth(self, number: usize) -> &'a FrameMeta {
        debug_assert!(number < self.count as usize, "frame {number} has no metadata");
        // Two steps, because the first is the same for all frames of a pass.
        let base = self.bias.wrapping_add(self.first as usize);
        // SAFETY: by obligation 1 the address lies in the array, which is lent for `'a`.
        unsafe { &*base.wrapping_add(number) }
    }
}
