//! `kernel-map`: the kernel's own mappings (system 5): `vmalloc`, `vmap`, `ioremap`.
//!
//! ```text
//! Map     | area | area | area | ...   32 of 1 MiB, each at addresses of its own
//! Unmap | the first in, the first out; the last one makes the purge due
//! ```
//!
//! Addresses are reused only after a purge, which a kernel makes once for many areas. So a call is
//! made for all areas that share a purge: time is for one call, with its share of the purge; counts
//! are for all.
//!
//! | file | contents |
//! |---|---|
//! | `script` | the calls |
//! | `floor` | their minimum work |
//! | `engine` | the engine as their subject |

mod engine;
mod floor;
mod script;

use bindery::Pieces;
use bindery::addr::{PAGE_SHIFT, PhysAddr};

pub use engine::{Frames, KernelEngine};
pub use floor::floor;
pub use script::script;

/// The reason why Linux has no figures.
pub const NO_LINUX: &str = "none: kernel-internal";

/// Bytes of areas that share a purge. At this limit a map of the engine purges by itself if the
/// machine has 2 GiB or more.
const PURGED_TOGETHER: u64 = 32 << 20;

/// One call to a kernel map, made for several areas of one kind in a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelCall {
    pub operation: Operation,
    pub area: Area,
}

/// The operation on the areas.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Create them.
    Map,
    /// Make the areas' memory read-only.
    Protect,
    /// Free them.
    Unmap,
}

/// The composition of an area.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Area {
    pub bytes: u64,
    pub source: Source,
}

/// The source of the frames of an area, and the call for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// Registers of a device: `ioremap`.
    Device(PhysAddr),
    /// New frames: `vmalloc`.
    New(Pieces),
    /// A list of pages with blocks of 2^order: `vmap`.
    Pages { order: u8 },
    /// The necessary number of ranges of 2^order pages: `vmap_ranges`.
    Ranges { order: u8, pieces: Pieces },
}

impl KernelCall {
    /// The number of areas that it is made for.
    pub fn areas(self) -> u64 {
        (PURGED_TOGETHER / self.area.bytes).max(1)
    }

    /// The call's name in error messages.
    pub fn name(self) -> &'static str {
        match (self.operation, self.area.source) {
            (Operation::Map, Source::Device(_)) => "ioremap",
            (Operation::Map, Source::New(_)) => "vmalloc",
            (Operation::Map, Source::Pages { .. }) => "vmap",
            (Operation::Map, Source::Ranges { .. }) => "vmap_ranges",
            (Operation::Protect, _) => "protect",
            (Operation::Unmap, Source::Device(_)) => "iounmap",
            (Operation::Unmap, Source::New(_)) => "vfree",
            (Operation::Unmap, Source::Pages { .. } | Source::Ranges { .. }) => "vunmap",
        }
    }
}

impl Area {
    /// Blocks of 2^`order` pages of consecutive memory, by their position in a range of memory:
    /// neighbors are swapped, so that no block continues the previous one.
    ///
    /// ```text
    /// the list   | 1 | 0 | 3 | 2 | 5 | 4 | ...
    /// ```
    fn blocks(self, order: u8) -> impl Iterator<Item = u64> {
        (0..self.bytes >> PAGE_SHIFT >> order).map(|block| block ^ 1)
    }
}
