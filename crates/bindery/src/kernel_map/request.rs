//! Requests to a [`super::KernelMap`], and their results.

use crate::addr::{PAGE_SIZE, PhysAddr, VirtAddr, VirtRange};
use crate::arch::{MemoryType, Permissions};

/// The size of a mapping's pieces.
///
/// ```
/// use bindery::{Pieces, VmallocOptions};
///
/// /// Memory for code that is patched at run time, page by page.
/// let options = VmallocOptions { pieces: Pieces::Base, ..VmallocOptions::default() };
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pieces {
    /// Only base pages, so that each page can be changed without a pause.
    Base,
    /// The largest pieces that addresses and frames allow (Linux: `VM_ALLOW_HUGE_VMAP`).
    Largest,
}

/// The content of new memory.
///
/// ```
/// use bindery::{Content, VmallocOptions};
///
/// /// `vzalloc`
/// let options = VmallocOptions { content: Content::Zeroes, ..VmallocOptions::default() };
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Unspecified: the previous content of the frames.
    Any,
    /// Zeroes (Linux: `vzalloc`).
    Zeroes,
}

/// Whether accesses may have to pause while the protection of a part changes; see
/// [`super::KernelMap::resolve`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pauses {
    /// Accesses may pause: a fault handler waits.
    Allowed,
    /// Accesses never pause: a change that would need a pause is refused
    /// ([`super::KernelMapError::WouldPause`]).
    Never,
}

/// When the TLB entries of an unmapped area are invalidated.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{KernelMap, KernelMapError, Platform, UnmapTime};
///
/// /// Unmaps frames that go to a program next.
/// ///
/// /// # Safety
/// /// The area is not used any more.
/// unsafe fn unmap_now<P: Platform>(
///     map: &KernelMap<'_, P>,
///     area: VirtAddr,
/// ) -> Result<(), KernelMapError> {
///     // SAFETY: the caller's obligation is that of `vunmap`.
///     unsafe { map.vunmap(area, UnmapTime::Now) }
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UnmapTime {
    /// At the next purge, together with those of other areas. Until then the addresses must not be
    /// used: a stray access could still reach frames that have another owner.
    Later,
    /// Before the call returns, so the frames may then have another owner. (The call purges all
    /// waiting areas.)
    Now,
}

/// How memory is allocated and mapped by [`super::KernelMap::vmalloc`].
///
/// ```
/// use bindery::{Content, VmallocOptions};
///
/// let stack = VmallocOptions { align: 16 << 10, ..VmallocOptions::default() };
/// let table = VmallocOptions { content: Content::Zeroes, ..VmallocOptions::huge() };
/// assert_ne!(stack.pieces, table.pieces);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VmallocOptions {
    /// The alignment of the start: a power of two, at least a page.
    pub align: u64,
    /// The allowed accesses, without [`Permissions::USER`].
    pub permissions: Permissions,
    /// The size of the pieces.
    pub pieces: Pieces,
    /// The initial content of the memory.
    pub content: Content,
    /// Whether accesses may have to pause later.
    pub pauses: Pauses,
    /// The NUMA node of the memory, ignored: there is one node.
    pub node: Option<u32>,
}

impl Default for VmallocOptions {
    /// Readable and writable memory with unspecified content, in base pages (Linux: `vmalloc`).
    fn default() -> Self {
        Self {
            align: PAGE_SIZE,
            permissions: Permissions::READ.union(Permissions::WRITE),
            pieces: Pieces::Base,
            content: Content::Any,
            pauses: Pauses::Allowed,
            node: None,
        }
    }
}

impl VmallocOptions {
    /// Like the default, in the largest pieces (Linux: `vmalloc_huge`).
    ///
    /// Context: any.
    pub fn huge() -> Self {
        Self { pieces: Pieces::Largest, ..Self::default() }
    }
}

/// How frames are mapped by [`super::KernelMap::vmap`].
///
/// ```
/// use bindery::VmapOptions;
/// use bindery::arch::{MemoryType, Permissions};
///
/// let frame_buffer = VmapOptions { memory: MemoryType::WriteCombining, ..VmapOptions::default() };
/// assert!(frame_buffer.permissions.contains(Permissions::WRITE));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VmapOptions {
    /// The allowed accesses, without [`Permissions::USER`].
    pub permissions: Permissions,
    /// The memory type.
    pub memory: MemoryType,
    /// The size of the pieces.
    pub pieces: Pieces,
    /// Whether accesses may have to pause later.
    pub pauses: Pauses,
}

impl Default for VmapOptions {
    /// Normal memory to read and write, in the largest pieces.
    fn default() -> Self {
        Self {
            permissions: Permissions::READ.union(Permissions::WRITE),
            memory: MemoryType::Normal,
            pieces: Pieces::Largest,
            pauses: Pauses::Allowed,
        }
    }
}

/// The function that made an area.
///
/// ```
/// use bindery::{AreaKind, KernelArea};
///
/// /// For an area listing, as Linux's /proc/vmallocinfo.
/// fn word(area: &KernelArea) -> &'static str {
///     match area.kind {
///         AreaKind::Vmalloc => "vmalloc",
///         AreaKind::Vmap => "vmap",
///         AreaKind::Ioremap => "ioremap",
///     }
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AreaKind {
    /// [`super::KernelMap::vmalloc`]: the area owns its frames.
    Vmalloc,
    /// [`super::KernelMap::vmap`].
    Vmap,
    /// [`super::KernelMap::ioremap`].
    Ioremap,
}

/// An area: a range of addresses with one purpose.
///
/// ```
/// use bindery::KernelArea;
/// use bindery::addr::VirtAddr;
///
/// /// Whether a wild access hit the guard page after the area.
/// fn is_overrun(area: &KernelArea, at: VirtAddr) -> bool {
///     at >= area.range.end() && at < area.range.end() + 4096
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelArea {
    /// The area's addresses, without the guard page after them.
    pub range: VirtRange,
    /// The function that made the area.
    pub kind: AreaKind,
}

/// Describes a kernel address.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{KernelAddress, KernelMap, Platform};
///
/// /// For the message of a kernel that has faulted.
/// fn cause<P: Platform>(map: &KernelMap<'_, P>, at: VirtAddr) -> &'static str {
///     match map.explain(at) {
///         KernelAddress::Guard { .. } => "ran over the end of an area",
///         KernelAddress::Freed { .. } => "use after free",
///         _ => "wild pointer",
///     }
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KernelAddress {
    /// The address is not in the map's arena.
    Outside,
    /// In the arena, but in no area.
    Free,
    /// In an area, and mapped.
    Mapped {
        /// The area.
        area: KernelArea,
        /// The physical address of the byte at this address.
        to: PhysAddr,
    },
    /// In an area that is being made, and not mapped yet.
    Unmapped {
        /// The area.
        area: KernelArea,
    },
    /// In the guard page after an area.
    Guard {
        /// The area.
        area: KernelArea,
    },
    /// In a freed area, whose addresses are reused after a purge.
    Freed {
        /// The area.
        area: KernelArea,
    },
}

/// The answer of [`super::KernelMap::resolve`].
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::arch::Permissions;
/// use bindery::{KernelMap, Platform, Resolution};
///
/// /// Whether the kernel's page fault at `at` is over.
/// fn is_resolved<P: Platform>(map: &KernelMap<'_, P>, at: VirtAddr) -> bool {
///     map.resolve(at, Permissions::WRITE) == Resolution::Retry
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resolution {
    /// The address is mapped and allows the access now: retry.
    Retry,
    /// The address is mapped, but does not allow the access.
    Denied,
    /// The address is not mapped; [`super::KernelMap::explain`] returns the reason.
    NotMapped,
}

/// A mapped piece: adjacent leaves with equal attributes that lead to consecutive frames.
///
/// ```
/// use bindery::KernelPiece;
///
/// /// Translations that the piece takes in a TLB.
/// fn translations(piece: &KernelPiece) -> u64 {
///     piece.range.len() / piece.size
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelPiece {
    /// The piece's addresses.
    pub range: VirtRange,
    /// The physical address of the first byte.
    pub to: PhysAddr,
    /// Bytes that each translation covers: a page, a contiguous run, 2 MiB, ...
    pub size: u64,
    /// The allowed accesses.
    pub permissions: Permissions,
    /// The memory type.
    pub memory: MemoryType,
}

impl KernelPiece {
    /// Whether `next` continues this piece.
    pub(super) fn continues(&self, next: &Self) -> bool {
        self.range.end() == next.range.start()
            && self.to.0 + self.range.len() == next.to.0
            && (self.size, self.permissions, self.memory)
                == (next.size, next.permissions, next.memory)
    }

    /// Appends `next`, which continues this piece.
    pub(super) fn extend(&mut self, next: &Self) {
        self.range = VirtRange::raw(self.range.start().0, next.range.end().0);
    }

    /// The physical address of `at`, which is in the piece's range.
    ///
    /// Context: any.
    pub fn translate(&self, at: VirtAddr) -> PhysAddr {
        PhysAddr(self.to.0 + (at.0 - self.range.start().0))
    }
}
