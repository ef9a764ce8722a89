//! Verifies that the reverse map leads from every folio to the entries that map it.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::addr::VirtAddr;
use crate::folio::{Folio, FolioIndex, FolioOwner, Owner};
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::space::{AddressSpace, MappingFlags};
use crate::vma::Vma;

use super::{Audit, Violation};

impl<P: Platform> Audit<'_, '_, P> {
    /// Whether a walk from the owner of `folio`, whose page `number` is mapped at `at`, finds that
    /// entry.
    pub(super) fn owner(
        &self,
        vma: &Vma,
        at: VirtAddr,
        folio: Folio,
        number: u32,
    ) -> Result<(), Violation> {
        let memory = self.memory;
        let FolioOwner { owner, first } = memory.frames.folio(folio).owner();
        let found = match owner {
            Owner::None => false,
            // SAFETY: the folio is mapped, so a VMA below the anon group holds the group. 1. No
            // other call runs during an audit.
            Owner::Group(group) => unsafe { group.cast::<AnonGroup>().as_ref().leads_to(vma) },
            Owner::Memory(object) | Owner::File(object) => {
                vma.object_pointer() == Some(object.cast())
            }
        };
        // The index is compared as in a walk, by arithmetic that does not wrap.
        let same = first.page(number) == vma.page_offset_of(at);
        // SAFETY: 1. no other call runs.
        let listed = unsafe { vma.is_listed() };
        if found && same && listed { Ok(()) } else { Err(Violation::WrongOwner(at)) }
    }

    /// Verifies that the address space's accounts equal the sums over its VMAs.
    pub(super) fn accounts(&mut self, space: &AddressSpace<'_, P>) -> Result<(), Violation> {
        // The pins of an address space are in no list; only the pinning caller has them.
        let pinned = space.usage().pinned;
        let mut sums = crate::Usage { pinned, ..crate::Usage::default() };
        let vmas = space.vmas.lock();
        for vma in vmas.view().iter() {
            let (flags, pages) = (vma.flags(), vma.pages());
            sums.total += pages;
            sums.data += if flags.is_data() { pages } else { 0 };
            sums.locked += if flags.contains(MappingFlags::LOCKED) { pages } else { 0 };
            sums.stack += if flags.contains(MappingFlags::GROWS_DOWN) { pages } else { 0 };
            sums.committed += if flags.contains(MappingFlags::ACCOUNT) { pages } else { 0 };
            // Owners cannot represent a higher index.
            let end = vma.page_offset().checked_add(pages);
            // SAFETY: 1. no other call runs.
            if !unsafe { vma.is_listed() } || end.is_none_or(|end| end > FolioIndex::END) {
                return Err(Violation::WrongOwner(VirtAddr(vma.start())));
            }
            // SAFETY: 1. no other call runs.
            if let Some(group) = vma.group().filter(|group| unsafe { group.is_first(vma) }) {
                // SAFETY: 1. as above.
                if !unsafe { group.vmas.locked() }.check() {
                    return Err(Violation::WrongOwner(VirtAddr(vma.start())));
                }
                self.groups += counted_with(group);
            }
        }
        if sums != space.usage() {
            return Err(Violation::Accounts { says: space.usage(), holds: sums });
        }
        Ok(())
    }
}

/// Counts the anon group and those groups above it that are found only through it: they have no
/// VMAs, and it is their first child.
fn counted_with(group: &AnonGroup) -> u64 {
    let mut count = 1;
    let mut at = group;
    // SAFETY: 1. no other call runs during an audit.
    while let Some(parent) = unsafe { at.parent() } {
        if !parent.is_traced_by(at) {
            break;
        }
        count += 1;
        at = parent;
    }
    count
}
