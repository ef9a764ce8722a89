//! Requests to a [`super::KernelMap`], and their results.

use crate::addr::{PAGE_SIZE, PhysAddr, VirtAddr, VirtRange};
use crate::arch::{MemoryType, Permissions};

/// How large the pieces of a mapping may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pieces {
    /// Base pages alone: each page can be changed without a pause.
    Base,
    /// The largest that addresses and frames allow (Linux: `VM_ALLOW_HUGE_VMAP`).
    Largest,
}

/// What new memory holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Whatever it held before.
    Any,
    /// Zeroes (Linux: `vzalloc`).
    Zeroes,
}

/// Whether accesses may have to pause while the protection of a part is being changed; see
/// [`super::KernelMap::resolve`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pauses {
    /// They may: a fault handler waits.
    Allowed,
    /// They may not: a change that would need a pause is refused
    /// ([`super::KernelMapError::WouldPause`]).
    Never,
}

/// When the TLBs forget what was mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UnmapTime {
    /// At the next purge, together with others. Until then nobody may touch the addresses, and
    /// frames that go to somebody else could still be reached by a wild access through them.
    Later,
    /// Before the call returns: the frames may go to anybody. (It is a purge of all that waits.)
    Now,
}

/// How memory is allocated and mapped by [`super::KernelMap::vmalloc`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VmallocOptions {
    /// The start is a multiple of this: a power of two, at least a page.
    pub align: u64,
    /// What may be done with the memory; [`Permissions::USER`] may not be among them.
    pub permissions: Permissions,
    /// How large the pieces may be.
    pub pieces: Pieces,
    /// What the memory holds at first.
    pub content: Content,
    /// Whether accesses may have to pause later.
    pub pauses: Pauses,
    /// The node that the memory should come from. There is one node: the hint is ignored.
    pub node: Option<u32>,
}

impl Default for VmallocOptions {
    /// Pages to read and write, with any content, in base pages (Linux: `vmalloc`).
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
    /// As the default, in the largest pieces (Linux: `vmalloc_huge`).
    pub fn huge() -> Self {
        Self { pieces: Pieces::Largest, ..Self::default() }
    }
}

/// How frames are mapped by [`super::KernelMap::vmap`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VmapOptions {
    /// What may be done with the memory; [`Permissions::USER`] may not be among them.
    pub permissions: Permissions,
    /// How the processor may treat accesses.
    pub memory: MemoryType,
    /// How large the pieces may be.
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

/// What an area was made by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AreaKind {
    /// [`super::KernelMap::vmalloc`]: it owns its frames.
    Vmalloc,
    /// [`super::KernelMap::vmap`].
    Vmap,
    /// [`super::KernelMap::ioremap`].
    Ioremap,
}

/// An area: a stretch of addresses with one purpose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelArea {
    /// Its addresses, without the guard page behind them.
    pub range: VirtRange,
    /// What it was made by.
    pub kind: AreaKind,
}

/// What an address of the kernel is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KernelAddress {
    /// Not one of the map's.
    Outside,
    /// Nothing's.
    Free,
    /// In an area, and mapped.
    Mapped {
        /// The area.
        area: KernelArea,
        /// What the address leads to.
        to: PhysAddr,
    },
    /// In an area that is being made, and not mapped yet.
    Unmapped {
        /// The area.
        area: KernelArea,
    },
    /// In the guard page behind an area.
    Guard {
        /// The area.
        area: KernelArea,
    },
    /// In an area that was given back, and will be used again after a purge.
    Freed {
        /// The area.
        area: KernelArea,
    },
}

/// What a fault handler learns of [`super::KernelMap::resolve`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resolution {
    /// The address is mapped and allows the access, now: do it again.
    Retry,
    /// It is mapped, and does not allow the access.
    Denied,
    /// It is not mapped: [`super::KernelMap::explain`] says more.
    NotMapped,
}

/// A piece that is mapped: leaves next to each other that agree in everything and lead to
/// consecutive frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelPiece {
    /// Its addresses.
    pub range: VirtRange,
    /// What the first of them leads to.
    pub to: PhysAddr,
    /// Bytes that each translation covers: a page, a contiguous run, 2 MiB, ...
    pub size: u64,
    /// What it allows.
    pub permissions: Permissions,
    /// How the processor treats accesses.
    pub memory: MemoryType,
}

impl KernelPiece {
    /// Whether `next` continues this one.
    pub(super) fn continues(&self, next: &Self) -> bool {
        self.range.end() == next.range.start()
            && self.to.0 + self.range.len() == next.to.0
            && (self.size, self.permissions, self.memory)
                == (next.size, next.permissions, next.memory)
    }

    /// Adds one that continues it.
    pub(super) fn extend(&mut self, next: &Self) {
        self.range = VirtRange::raw(self.range.start().0, next.range.end().0);
    }

    /// What `at`, one of its addresses, leads to.
    pub fn translate(&self, at: VirtAddr) -> PhysAddr {
        PhysAddr(self.to.0 + (at.0 - self.range.start().0))
    }
}
