//! `msync(2)`.

use bitflags::bitflags;

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::error::Error;
use crate::platform::Platform;

use crate::vmas::Parts;

use crate::space::AddressSpace;
use crate::vma::MappingFlags;

bitflags! {
    /// Flags of [`AddressSpace::msync`].
    ///
    /// ```
    /// use bindery::addr::VirtAddr;
    /// use bindery::{AddressSpace, Error, Platform, SyncFlags};
    ///
    /// /// Saves one page of a mapped file, and waits for it.
    /// fn save<P: Platform>(space: &AddressSpace<'_, P>, page: VirtAddr) -> Result<(), Error> {
    ///     space.msync(page, 4096, SyncFlags::SYNC)
    /// }
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct SyncFlags: u8 {
        /// Begin to save (`MS_ASYNC`). Has no effect: the object tracks dirty pages anyway.
        const ASYNC = 1 << 0;
        /// Make writes visible to other mappings of the object (`MS_INVALIDATE`). They always are.
        const INVALIDATE = 1 << 1;
        /// Save, and wait for it (`MS_SYNC`).
        const SYNC = 1 << 2;
    }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Saves the dirty pages of shared file mappings in `length` bytes (rounded up to pages) at
    /// `start`. May wait for storage.
    ///
    /// Context: may sleep. Complexity: linear in the runs of dirty pages.
    ///
    /// # Errors
    /// [`Error::Unaligned`]; [`Error::Invalid`] for both kinds at once; [`Error::OutOfRange`];
    /// [`Error::Locked`] if [`SyncFlags::INVALIDATE`] meets locked memory; [`Error::InputOutput`];
    /// [`Error::Interrupted`] as [`crate::Object::sync`]; [`Error::NotMapped`] if the range has
    /// holes, after the rest is saved.
    pub fn msync(&self, start: VirtAddr, length: u64, flags: SyncFlags) -> Result<(), Error> {
        msync(self, start, length, flags)
    }
}

fn msync<P: Platform>(
    space: &AddressSpace<'_, P>,
    start: VirtAddr,
    length: u64,
    flags: SyncFlags,
) -> Result<(), Error> {
    if !start.is_aligned(PAGE_SIZE) {
        return Err(Error::Unaligned(start));
    }
    if flags.contains(SyncFlags::ASYNC | SyncFlags::SYNC) {
        return Err(Error::Invalid);
    }
    let limit = space.limit();
    // A length that overflows when it is rounded up becomes zero, as on Linux.
    let length = length.wrapping_add(PAGE_SIZE - 1) & !(PAGE_SIZE - 1);
    let range = VirtRange::from_len(start, length).ok_or(Error::OutOfRange { limit })?;
    let mut parts = Parts::of(range);
    loop {
        let (object, offset, length) = {
            let vmas = space.vmas.lock();
            let Some((vma, part)) = parts.next(vmas.view()) else { break };
            if flags.contains(SyncFlags::INVALIDATE) && vma.has(MappingFlags::LOCKED) {
                return Err(Error::Locked(part.start()));
            }
            let object = space.object_of(vma).filter(|_| vma.is_shared());
            // `mremap` may extend a mapping beyond the largest offset of an object.
            let offset = vma.page_offset_of(part.start()).saturating_mul(PAGE_SIZE);
            (object, offset, part.len())
        };
        if let Some(object) = object
            && flags.contains(SyncFlags::SYNC)
        {
            object.sync(offset, length)?;
        }
    }
    parts.end()
}
