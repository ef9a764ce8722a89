//! `kernel-map`: the kernel's own mappings (system 5): `vmalloc`, `vmap`, `ioremap`.
//!
//! ```text
//! Map     | area | area | area | ...   32 of 1 MiB, each at addresses of its own
//! Unmap   |  the first in, the first out; the last one makes the purge due
//! ```
//!
//! Addresses are used again only after a purge, which a kernel makes once for many areas. So a call
//! is made for as many areas as share a purge: time is that of one call, with its share of the
//! purge; counts are those of all.
//!
//! | file | what |
//! |---|---|
//! | `script` | what is called |
//! | `floor` | the least that it needs |
//! | `engine` | who makes the calls |

mod engine;
mod floor;
mod script;

use bindery::Pieces;
use bindery::addr::{PAGE_SHIFT, PhysAddr};

pub use engine::{Frames, KernelEngine};
pub use floor::floor;
pub use script::script;

/// Why there are no figures of Linux.
pub const NO_LINUX: &str = "none: kernel-internal";

/// Bytes of areas that share a purge: after so many, a map of the engine purges by itself where the
/// machine has 2 GiB or more.
const PURGED_TOGETHER: u64 = 32 << 20;

/// One call to a kernel map, made for several areas of one kind, one after the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelCall {
    pub operation: Operation,
    pub area: Area,
}

/// What is done with the areas.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// They are made.
    Map,
    /// Their memory becomes read-only.
    Protect,
    /// They are given back.
    Unmap,
}

/// What an area is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Area {
    pub bytes: u64,
    pub source: Source,
}

/// Where the frames of an area come from, and by which call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// Registers of a device: `ioremap`.
    Device(PhysAddr),
    /// New frames: `vmalloc`.
    New(Pieces),
    /// A list of pages, blocks of 2^order among them: `vmap`.
    Pages { order: u8 },
    /// As many ranges of 2^order pages as it takes: `vmap_ranges`.
    Ranges { order: u8, pieces: Pieces },
}

impl KernelCall {
    /// For how many areas it is made.
    pub fn areas(self) -> u64 {
        (PURGED_TOGETHER / self.area.bytes).max(1)
    }

    /// The name that error messages give it.
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
    /// Blocks of 2^`order` pages that are consecutive memory, by their position in a stretch of
    /// memory: neighbors have changed places, so that none continues the one before.
    ///
    /// ```text
    /// the list   | 1 | 0 | 3 | 2 | 5 | 4 | ...
    /// ```
    fn blocks(self, order: u8) -> impl Iterator<Item = u64> {
        (0..self.bytes >> PAGE_SHIFT >> order).map(|block| block ^ 1)
    }
}
