//! The root that a CPU has loaded, and walks on its own account.
//!
//! Without [`Strict::load`], each root that a CPU has used counts as loaded, and the CPU walks only
//! for accesses. From the first `load` on:
//! - **The CPU walks at any time.** After a flush, before other CPUs invalidate and before frames
//!   are freed, it walks again to all pages that it has ever accessed under the loaded root. An
//!   idle CPU does so, too. A real one follows stale predictions of branches, and prefetches.
//! - **Entries of other roots are dormant**: nothing uses them, so frames to which they lead may be
//!   freed. They must be gone when their root is loaded again.

use std::collections::BTreeSet;

use bindery::addr::{Frame, PAGE_SIZE};

use super::strict::Strict;
use crate::mmu::walk::{End, World};
use crate::mmu::{Access, AccessKind, Mode, Walk};
use crate::violation::{Place, Violation};

/// The maximum number of pages of one root to which a CPU walks on its own account.
const MOST_PAGES: usize = 256;

/// The roots that a CPU may walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Loaded {
    /// All: the machine does not record what the CPU loads.
    NotRecorded,
    /// This one; `None` for the kernel's.
    Root(Option<Frame>),
}

/// The past of one root on a CPU that records what it loads.
#[derive(Debug, Default)]
pub(super) struct Past {
    /// Pages that the CPU has accessed.
    pages: BTreeSet<u64>,
    /// The first frame that was freed below a dormant entry.
    missed: Option<Violation>,
}

impl Loaded {
    /// Whether entries of `root` can be used.
    pub(super) fn allows(self, root: Frame) -> bool {
        match self {
            Self::NotRecorded => true,
            Self::Root(loaded) => loaded == Some(root),
        }
    }
}

impl<A: Walk> Strict<A> {
    /// Loads a root, or the kernel's, without a flush. Reports a frame that was freed while an
    /// entry of the root was dormant.
    pub(crate) fn load(&mut self, world: World<'_>, root: Option<Frame>) {
        self.loaded = Loaded::Root(root);
        let missed = root.and_then(|root| self.past(root).missed.take());
        missed.into_iter().for_each(|violation| world.log.report(violation));
    }

    /// Drops all entries of a root, or of all roots. The walker brings those of the loaded root
    /// back at once.
    pub(crate) fn flush_root(&mut self, world: World<'_>, root: Option<Frame>) {
        let all: Vec<_> = self.spaces.keys().copied().map(Frame).collect();
        let chosen = all.into_iter().filter(|each| root.is_none_or(|root| root == *each));
        chosen.for_each(|root| self.flush_tag(root));
        self.speculate(world);
    }

    fn flush_tag(&mut self, root: Frame) {
        self.forget_all(root);
        let space = self.space(root);
        space.invalid.iter_mut().for_each(BTreeSet::clear);
        space.past.missed = None;
    }

    /// Records an access.
    pub(super) fn note_access(&mut self, root: Frame, addr: u64) {
        let Loaded::Root(loaded) = self.loaded else { return };
        assert_eq!(loaded, Some(root), "CPU {} accesses a root that is not loaded", self.cpu.0);
        let pages = &mut self.past(root).pages;
        if pages.len() < MOST_PAGES {
            pages.insert(addr & !(PAGE_SIZE - 1));
        }
    }

    /// Walks to all pages that the CPU has accessed under the loaded root, and caches what it
    /// finds.
    pub(crate) fn speculate(&mut self, world: World<'_>) {
        let Loaded::Root(Some(root)) = self.loaded else { return };
        let access = Access { kind: AccessKind::Read, mode: Mode::User };
        let pages: Vec<_> = self.past(root).pages.iter().copied().collect();
        for addr in pages {
            if self.has_entry(root, addr) {
                continue;
            }
            let walked = self.walk(world, root, addr, access);
            self.remember_tables(root, addr, &walked);
            // Nothing faults, so what was denied or is invalid has no effect.
            if let End::Leaf(leaf) = walked.end {
                self.fill(world, Place { cpu: self.cpu, root, addr }, leaf);
            }
        }
    }

    /// Reports an entry for a frame that was freed, now or when the root is loaded again.
    pub(super) fn report_released(&mut self, world: World<'_>, root: Frame, violation: Violation) {
        if self.loaded.allows(root) {
            world.log.report(violation);
        } else {
            self.past(root).missed.get_or_insert(violation);
        }
    }

    fn past(&mut self, root: Frame) -> &mut Past {
        &mut self.space(root).past
    }
}
