//! `remap_file_pages(2)`.

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::error::{Error, Failure};
use crate::platform::Platform;

use super::map_request::{FileAccess, MapFlags, MapObject, MapRequest, Sharing};
use super::mlock::LOCKS;
use super::mmap::{MapSource, admit, map};
use crate::space::AddressSpace;
use crate::space::call::populate::{Populate, populated};
use crate::space::op::{Op, Unmappings};
use crate::vma::{MappingFlags, Protection};
use crate::vmas::place::Place;

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Replaces `length` bytes at `start` of a shared mapping (both rounded down to pages) by a
    /// mapping of the same object from page `page` on, with the same protection and locks (as Linux
    /// since 4.0). [`MapFlags::POPULATE`] populates the new mapping; other flags are ignored.
    ///
    /// The range may cover several adjacent mappings of one object with the same flags.
    /// Userfaultfds do not hear of the replaced mappings, as on Linux.
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::mmap_object`], and linear in the number
    /// of pages to populate.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the range is empty or overflows, the page numbers overflow, the range
    /// is not such a mapping, or the mapping can never be written; the errors of
    /// [`AddressSpace::mmap_object`]. An error changes nothing.
    pub fn remap_file_pages(
        &self,
        start: VirtAddr,
        length: u64,
        page: u64,
        flags: MapFlags,
    ) -> Result<(), Error> {
        let begun = self.begin_remap_file_pages(start, length, page, flags);
        populated(self, begun.map(|populate| ((), populate)))
    }

    /// As [`AddressSpace::remap_file_pages`], up to the waits. The steps of the [`Populate`], which
    /// do not fail, map the pages.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// As [`AddressSpace::remap_file_pages`].
    pub fn begin_remap_file_pages(
        &self,
        start: VirtAddr,
        length: u64,
        page: u64,
        flags: MapFlags,
    ) -> Result<Populate, Error> {
        begin(self, pages_of(start, length, page)?, page, flags)
    }
}

/// The pages that the call replaces; from `page` on, an object has numbers for as many.
fn pages_of(start: VirtAddr, length: u64, page: u64) -> Result<VirtRange, Error> {
    let (start, length) = (start.align_down(PAGE_SIZE), length & !(PAGE_SIZE - 1));
    let range = VirtRange::from_len(start, length).ok_or(Error::Invalid)?;
    if range.is_empty() {
        return Err(Error::Invalid);
    }
    page.checked_add(range.pages()).ok_or(Error::Invalid)?;
    Ok(range)
}

fn begin<P: Platform>(
    space: &AddressSpace<'_, P>,
    range: VirtRange,
    page: u64,
    flags: MapFlags,
) -> Result<Populate, Error> {
    let now = space.operate_with_reclaim(|op| remap(op, range, page))?;
    if flags.contains(MapFlags::POPULATE) || now & LOCKS == MappingFlags::LOCKED {
        // The mapping exists, so the call succeeds even if the population fails, as on Linux.
        return Ok(Populate::as_possible(range));
    }
    Ok(Populate::default())
}

/// Replaces the mapping. Returns the flags of the new mapping. A failure changes nothing.
fn remap<P: Platform>(
    op: &mut Op<'_, '_, P>,
    range: VirtRange,
    page: u64,
) -> Result<MappingFlags, Failure> {
    let first = op.vmas.at(range.start()).ok_or(Error::Invalid)?;
    let flags = first.flags();
    let object = op.space.object_of(first).ok_or(Error::Invalid)?;
    if !flags.contains(MappingFlags::SHARED | MappingFlags::MAY_WRITE) {
        return Err(Error::Invalid.into());
    }
    let alike = |flags: MappingFlags| flags - MappingFlags::STICKY;
    let mut end = first.end();
    for vma in op.vmas.overlapping(range).skip(1) {
        let continues = vma.start() == end
            && alike(vma.flags()) == alike(flags)
            && vma.object_pointer() == first.object_pointer();
        if !continues {
            return Err(Error::Invalid.into());
        }
        end = vma.end();
    }
    if end < range.end().0 {
        return Err(Error::Invalid.into());
    }
    let mut asked = MapFlags::empty();
    asked.set(MapFlags::LOCKED, flags.contains(MappingFlags::LOCKED));
    let request = MapRequest {
        length: range.len(),
        // Linux passes only the access bits on to `mmap`.
        protection: flags.protection() - Protection::BTI,
        place: Place::Fixed(range.start()),
        sharing: Sharing::Shared,
        flags: asked,
    };
    let offset = page.checked_mul(PAGE_SIZE).ok_or(Error::TooLarge)?;
    let access = FileAccess::READ | FileAccess::WRITE;
    let source = MapObject { object: &object, offset, access };
    let (may, _admitted) = admit(&request, &source)?;
    let backing = MapSource::of(&object, offset >> PAGE_SHIFT, may);
    op.unmappings = Unmappings::Unreported;
    map(op, &request, range.len(), &backing).map(|(_, flags)| flags)
}
