//! The setting that allows pages with equal contents to be merged (Linux: KSM). The setting is
//! stored and reported, but no pages are merged, as on a Linux system whose `ksmd` was not started,
//! which is the default.

use crate::platform::Platform;

use super::AddressSpace;
use super::settings::Settings;
use crate::vma::MappingFlags;

/// [`MappingFlags::MERGEABLE`] for a mapping with these flags, or no flag if merging does not
/// apply: only private memory is merged, except droppable memory and the embedder's own memory.
pub(super) fn mergeable(flags: MappingFlags) -> MappingFlags {
    let others = MappingFlags::SHARED | MappingFlags::DROPPABLE | MappingFlags::DONT_EXPAND;
    if flags.intersects(others) { MappingFlags::empty() } else { MappingFlags::MERGEABLE }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Allows or forbids merging of pages with equal contents in all private mappings, present and
    /// future (`PR_SET_MEMORY_MERGE`). Setting the current value changes nothing.
    ///
    /// Context: may sleep. Complexity: linear in the number of mappings.
    pub fn set_merging(&self, merges: bool) {
        set_merging(self, merges)
    }

    /// Whether pages with equal contents may be merged in all private mappings
    /// (`PR_GET_MEMORY_MERGE`).
    ///
    /// Context: any.
    pub fn merging(&self) -> bool {
        self.settings.merges()
    }
}

fn set_merging<P: Platform>(space: &AddressSpace<'_, P>, merges: bool) {
    space.operate(|op| {
        if space.settings.merges() == merges {
            return;
        }
        space.settings.set_merges(merges);
        op.vmas.set_all_flags(|vma| match merges {
            true => vma.flags() | mergeable(vma.flags()),
            false => vma.flags() - MappingFlags::MERGEABLE,
        });
    });
    crate::deferred::free_some(space.page_table.memory);
}

impl Settings {
    /// The merging flag that a new mapping with these flags gets. The caller holds the mutex.
    pub(super) fn future_merging(&self, flags: MappingFlags) -> MappingFlags {
        if self.merges() { mergeable(flags) } else { MappingFlags::empty() }
    }
}
