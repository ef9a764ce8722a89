//! `remap_file_pages(2)`.

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::error::{Error, Failure};
use crate::platform::Platform;

use super::map_request::{FileAccess, MapFlags, MapObject, MapRequest, Sharing};
use super::mlock::LOCKS;
use super::mmap::{Backing, admit, map};
use crate::space::AddressSpace;
use crate::space::op::Op;
use crate::vma::{MappingFlags, Protection};
use crate::vmas::place::Place;

impl<P: Platform> AddressSpace<'_, P> {
    /// Lets `length` bytes at `start` of a shared mapping (both rounded down to pages) show what
    /// its object has from page `page` on. As Linux since 4.0, it is a new mapping in place of what
    /// was there: the protection is kept, and locks are. With [`MapFlags::POPULATE`] its pages are
    /// there at once; other flags mean nothing here.
    ///
    /// The range may reach over several mappings that touch, all of one object and with the same
    /// flags.
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::mmap_object`], and in the pages that have
    /// to be made.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the range is empty or wraps, the page numbers wrap, or what is mapped
    /// there is not as said above, or its object cannot be written through it; those of
    /// [`AddressSpace::mmap_object`]. Nothing is changed then.
    pub fn remap_file_pages(
        &self,
        start: VirtAddr,
        length: u64,
        page: u64,
        flags: MapFlags,
    ) -> Result<(), Error> {
        let start = start.align_down(PAGE_SIZE);
        let length = length & !(PAGE_SIZE - 1);
        let range = VirtRange::from_len(start, length).filter(|range| !range.is_empty());
        let range = range.ok_or(Error::Invalid)?;
        page.checked_add(range.pages()).ok_or(Error::Invalid)?;
        let now = self.page_table.memory.outermost(|| self.operate(|op| remap(op, range, page)))?;
        if flags.contains(MapFlags::POPULATE) || now & LOCKS == MappingFlags::LOCKED {
            // As Linux: the mapping is there, whether its pages could be had or not.
            let _ = self.populate(range);
        }
        Ok(())
    }
}

/// If it fails, nothing has changed. Returns the flags of the new mapping.
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
        // As Linux, which asks for the accesses alone.
        protection: flags.protection() - Protection::BTI,
        place: Place::Fixed(range.start()),
        sharing: Sharing::Shared,
        flags: asked,
    };
    let offset = page.checked_mul(PAGE_SIZE).ok_or(Error::TooLarge)?;
    let access = FileAccess::READ | FileAccess::WRITE;
    let source = MapObject { object: &object, offset, access };
    let (may, _admitted) = admit(&request, &source)?;
    let is_secret = object.state().is_secret();
    let offset = Some(offset >> PAGE_SHIFT);
    let backing = Backing { object: Some(object.state), offset, may, is_secret };
    map(op, &request, range.len(), &backing).map(|(_, flags)| flags)
}
