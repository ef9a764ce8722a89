//! Verifies objects: the frames in their page indexes, their mappings, and the memory committed for
//! them.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::{self, NonNull};

use crate::addr::{Frame, PAGE_SHIFT, VirtAddr};
use crate::collections::page_tree::IndexNode;
use crate::folio::{Folio, FolioOwner, Owner};
use crate::object::Registry;
use crate::object::{Accounting, ObjectState, Quota};
use crate::platform::Platform;
use crate::rmap::Asked;
use crate::space::{AddressSpace, MappingFlags};
use crate::swap::SlotRun;

use super::{Audit, Violation};

/// A bit in the tally of a frame: an object's index contains it.
const NAMED: u32 = 1 << 31;

impl<'m, P: Platform> Audit<'_, 'm, P> {
    /// All objects.
    fn registered(&self) -> impl Iterator<Item = &'m ObjectState> + use<'m, P> {
        // SAFETY: 1. no other call runs during an audit.
        unsafe { Registry::of(self.memory).iter() }
    }

    /// Verifies all objects, and marks the frames in their indexes.
    pub(super) fn objects(&mut self, spaces: &[&AddressSpace<'_, P>]) -> Result<(), Violation> {
        let memory = self.memory;
        let (mut used, mut nodes, mut listed, mut object_pages) = (0, 0, 0, 0);
        let mut unsaved = 0;
        if !Registry::of(memory).agrees_with(self.registered()) {
            return Err(Violation::Registry);
        }
        for object in self.registered() {
            used += 1;
            nodes += self.index(object)?;
            listed += self.mappers(object, spaces)?;
            object_pages += Self::commit(object)?;
            unsaved += object.counted_unsaved();
        }
        let allocated = memory.slab::<ObjectState>().objects(&memory.frames);
        let used = used + Registry::of(memory).kept();
        if allocated != used {
            return Err(Violation::LeakedObjects { allocated, used });
        }
        let allocated = memory.slab::<IndexNode>().objects(&memory.frames);
        if allocated != nodes {
            return Err(Violation::LeakedObjects { allocated, used: nodes });
        }
        // Each VMA is in at most one list, so equal numbers imply equal sets.
        let vmas = |space: &&AddressSpace<'_, P>| {
            let vmas = space.vmas.lock();
            vmas.view().iter().filter(|vma| !vma.is_anonymous()).count() as u64
        };
        let mapping = spaces.iter().map(vmas).sum();
        if listed != mapping {
            return Err(Violation::Unlisted { listed, mapping });
        }
        let committed: u64 = spaces.iter().map(|space| space.usage().committed).sum();
        let (says, holds) = (memory.commitment().committed(), committed + object_pages);
        if says != holds {
            return Err(Violation::Committed { says, holds });
        }
        let says = memory.dirty_limit().pages();
        if says != unsaved {
            return Err(Violation::Unsaved { says, holds: unsaved });
        }
        self.quotas()
    }

    /// Verifies that each quota has charged the number of pages that its objects have committed.
    fn quotas(&self) -> Result<(), Violation> {
        let address = |quota: &Quota| ptr::from_ref(quota).addr();
        let quotas = || self.registered().filter_map(ObjectState::quota);
        let mut last = 0;
        // In ascending address order, so each quota is visited once without a list.
        while let Some(quota) =
            quotas().filter(|quota| address(quota) > last).min_by_key(|quota| address(quota))
        {
            last = address(quota);
            let of = |object: &&ObjectState| object.quota().map(address) == Some(last);
            let holds = self.registered().filter(of).map(ObjectState::committed).sum();
            if quota.used() != holds {
                return Err(Violation::Quota { says: quota.used(), holds });
            }
        }
        Ok(())
    }

    /// Verifies the index of an object and returns its number of nodes.
    fn index(&mut self, object: &ObjectState) -> Result<u64, Violation> {
        let memory = self.memory;
        let broken = Violation::ObjectIndex(object.identity());
        let look =
            |from| object.pages.look(memory.platform(), |index| index.next_run(from, u64::MAX));
        let (sound, nodes) =
            object.pages.look(memory.platform(), |index| (index.check(), index.node_count()));
        let mut next = look(0);
        let counted = object.has_counted_unsaved(memory.platform());
        if !sound || !counted || object.has_in_flight(memory.platform()) || object.holders() == 0 {
            return Err(broken);
        }
        let mut pages = 0;
        while let Some(run) = next {
            for number in 0..run.count {
                self.name(object, run.page + u64::from(number), run.frame.plus(number))?;
            }
            pages += u64::from(run.count);
            next = look(run.page + u64::from(run.count));
        }
        if pages != object.pages.resident() || self.swapped(object)? != object.pages.swapped() {
            return Err(broken);
        }
        self.report.objects += 1;
        self.report.object_pages += pages;
        Ok(nodes)
    }

    /// Verifies the object's slots, which have no other references. Returns their number.
    fn swapped(&mut self, object: &ObjectState) -> Result<u64, Violation> {
        let platform = self.memory.platform();
        let next = |from| object.pages.look(platform, |index| index.next_swapped(from, u64::MAX));
        let (mut pages, mut from) = (0, 0);
        while let Some(run) = next(from) {
            let at = VirtAddr(run.page << PAGE_SHIFT);
            let slots = SlotRun { area: run.first.area, first: run.first.slot, count: run.count };
            self.swap_entry(at, slots, true)?;
            pages += u64::from(run.count);
            from = run.page + u64::from(run.count);
        }
        Ok(pages)
    }

    /// Marks `frame` as the object's `page`. Only one object may contain the frame, and its
    /// metadata must agree.
    fn name(&mut self, object: &ObjectState, page: u64, frame: Frame) -> Result<(), Violation> {
        let frames = &self.memory.frames;
        let broken = Violation::ObjectPage { object: object.identity(), page };
        if !frames.manages(frame) {
            return Err(broken);
        }
        let folio = frames.folio_of(frame).ok_or(broken)?;
        let FolioOwner { owner, first } = frames.folio(folio).owner();
        let place = first.page(frame.0 - folio.head.0);
        if owner != object.as_owner().owner() || place != page {
            return Err(broken);
        }
        match self.count(frame) {
            Some(count) if *count & NAMED == 0 => *count |= NAMED,
            _ => return Err(broken),
        }
        Ok(())
    }

    /// Verifies that the VMAs in the object's list are mappings of it in one of the address spaces.
    /// Returns their number.
    fn mappers(
        &self,
        object: &ObjectState,
        spaces: &[&AddressSpace<'_, P>],
    ) -> Result<u64, Violation> {
        let broken = Violation::ObjectMappers(object.identity());
        let writable = MappingFlags::SHARED | MappingFlags::MAY_WRITE;
        let (mut listed, mut writers) = (0, 0);
        // SAFETY: 1. no other call runs during an audit.
        let mappers = unsafe { object.mappers.locked() };
        if !mappers.check() {
            return Err(broken);
        }
        for vma in mappers.iter(Asked::ALL) {
            let found =
                spaces.iter().filter(|space| space.page_table.state() == vma.tree()).any(|space| {
                    let vmas = space.vmas.lock();
                    let own = vmas.view().first_ending_after(vma.start());
                    own.is_some_and(|own| ptr::eq(own, vma))
                });
            if !found || vma.object_pointer() != Some(NonNull::from(object)) {
                return Err(broken);
            }
            listed += 1;
            writers += u32::from(vma.has(writable));
        }
        if writers != object.writable_mappings() || listed > object.holders() {
            return Err(broken);
        }
        Ok(listed)
    }

    /// Verifies the memory committed for the object and returns its amount.
    fn commit(object: &ObjectState) -> Result<u64, Violation> {
        let should = match object.accounting() {
            Accounting::Whole => object.size_in_pages(),
            Accounting::PerPage => object.pages.resident() + object.pages.swapped(),
            Accounting::None => 0,
        };
        let object_pages = object.committed();
        if object_pages == should {
            Ok(object_pages)
        } else {
            Err(Violation::Committed { says: object_pages, holds: should })
        }
    }

    /// The number of entries that map `frame`, and whether an object contains it.
    pub(super) fn uses(&mut self, frame: Frame) -> (u32, bool) {
        let count = self.count(frame).map_or(0, |count| *count);
        (count & !NAMED, count & NAMED != 0)
    }

    /// Whether the page of `folio` may be mapped. A page of an object must still be in the object
    /// and within its size.
    pub(super) fn may_be_mapped(&self, folio: Folio, page: u32, named: bool) -> bool {
        let FolioOwner { owner, first } = self.memory.frames.folio(folio).owner();
        let (Owner::Memory(object) | Owner::File(object)) = owner else { return true };
        let object = object.cast::<ObjectState>();
        // SAFETY: an object contains the page, and `name` has compared it with the owner; no object
        // is freed during an audit.
        named && first.page(page) < unsafe { object.as_ref() }.size_in_pages()
    }

    /// Whether `folio` may have `named` pages in object indexes.
    pub(super) fn may_be_named(&self, folio: Folio, named: u32) -> bool {
        named == 0 || self.memory.frames.folio(folio).is_of_object()
    }
}
