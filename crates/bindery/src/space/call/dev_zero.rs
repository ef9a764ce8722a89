//! `mmap(2)` of `/dev/zero`.

use super::mmap::{map_length, may_skip_reserve};
use crate::addr::VirtAddr;
use crate::error::Error;
use crate::object::{Accounting, Sealing};
use crate::platform::Platform;
use crate::userfault::Notices;

use super::map_request::{FileAccess, MapFlags, MapObject, MapRequest, Sharing};
use super::mmap::MapSource;
use crate::space::AddressSpace;
use crate::space::call::mmap::{map_unpopulated, mmap_object};
use crate::space::call::populate::{Populate, populated};
use crate::space::userfault::pending_events::PendingEvents;
use crate::vma::{MappingFlags, Protection};

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Maps `/dev/zero`, opened for `access`, from `offset` (in bytes): anonymous memory with the
    /// permission checks of a file.
    ///
    /// A shared mapping that can never be written needs no shared memory, because each page is the
    /// zero page, as on Linux. (Linux still reports the mapping as shared.)
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::mmap_object`].
    ///
    /// # Errors
    /// As [`AddressSpace::mmap_object`].
    pub fn mmap_zeroes(
        &self,
        request: &MapRequest,
        offset: u64,
        access: FileAccess,
    ) -> Result<VirtAddr, Error> {
        let begin = |notices: &mut _| map_zeroes(self, request, offset, access, notices);
        populated(self, self.deliver_after(begin))
    }

    /// As [`AddressSpace::mmap_zeroes`], up to the waits; see [`AddressSpace::begin_mmap`].
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::mmap_object`].
    ///
    /// # Errors
    /// As [`AddressSpace::mmap_object`].
    pub fn begin_mmap_zeroes(
        &self,
        request: &MapRequest,
        offset: u64,
        access: FileAccess,
    ) -> (Result<(VirtAddr, Populate), Error>, PendingEvents<'m, P>) {
        PendingEvents::of(self, |notices| map_zeroes(self, request, offset, access, notices))
    }
}

fn map_zeroes<P: Platform>(
    space: &AddressSpace<'_, P>,
    request: &MapRequest,
    offset: u64,
    access: FileAccess,
    notices: &mut Notices,
) -> Result<(VirtAddr, Populate), Error> {
    let shared = request.sharing == Sharing::Shared;
    let writable = access.contains(FileAccess::WRITE);
    if shared && writable {
        let length = map_length::<P>(request)?;
        let accounting = if may_skip_reserve(space.page_table.memory, request) {
            Accounting::None
        } else {
            Accounting::Whole
        };
        // The object has the length of the mapping even if the offset is not zero, as on Linux, so
        // accesses beyond the object's end fail.
        let object = space.memory().shared_memory(length, Sealing::Forbidden, accounting)?;
        let source = MapObject { object: &object, offset, access };
        return mmap_object(space, request, &source, notices);
    }
    let writes = shared && request.protection.contains(Protection::WRITE);
    let refused = if !access.contains(FileAccess::READ) || writes {
        Some(Error::AccessDenied)
    } else if request.flags.contains(MapFlags::GROWS_DOWN) {
        Some(Error::Invalid)
    } else {
        None
    };
    if let Some(error) = refused {
        // Linux also searches for an address first, so address errors take precedence.
        space.check_place(request)?;
        return Err(error);
    }
    let mut may = MappingFlags::MAY_ALL;
    may.set(MappingFlags::MAY_WRITE, !shared);
    let request = MapRequest { sharing: Sharing::Private, ..*request };
    map_unpopulated(space, &request, MapSource::anonymous(may), notices)
}
