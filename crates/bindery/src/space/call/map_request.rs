//! The arguments of `mmap(2)`.

use core::fmt;

use bitflags::bitflags;

use crate::object::Object;
use crate::platform::Platform;

#[cfg(doc)]
use crate::space::AddressSpace;
use crate::vma::Protection;
use crate::vmas::place::Place;

/// Whether writes are visible to other mappings.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, Error, MapRequest, Platform, Protection, Sharing};
///
/// /// Memory that a program shares with its children.
/// fn shared<P: Platform>(space: &AddressSpace<'_, P>, length: u64) -> Result<VirtAddr, Error> {
///     let protection = Protection::READ | Protection::WRITE;
///     space.mmap(&MapRequest { length, protection, sharing: Sharing::Shared, ..Default::default() })
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Sharing {
    /// Writes change copies of the pages that are visible only to this mapping (`MAP_PRIVATE`).
    #[default]
    Private,
    /// Writes change the object, and therefore all its mappings, including those of children
    /// (`MAP_SHARED`).
    Shared,
}

bitflags! {
    /// Further flags of a new mapping.
    ///
    /// ```
    /// use bindery::{MapFlags, MapRequest};
    ///
    /// /// A stack that grows, up to its limit.
    /// let stack = MapRequest {
    ///     length: 128 << 10,
    ///     flags: MapFlags::GROWS_DOWN | MapFlags::STACK,
    ///     ..MapRequest::default()
    /// };
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct MapFlags: u8 {
        /// The call populates the pages and locks them into memory (`MAP_LOCKED`).
        const LOCKED = 1 << 0;
        /// The mapping does not count as committed, unless overcommit is forbidden
        /// (`MAP_NORESERVE`).
        const NO_RESERVE = 1 << 1;
        /// An access just below the mapping extends it (`MAP_GROWSDOWN`).
        const GROWS_DOWN = 1 << 2;
        /// The call populates the pages (`MAP_POPULATE`).
        const POPULATE = 1 << 3;
        /// Reclaim may drop the pages without saving them (`MAP_DROPPABLE`).
        const DROPPABLE = 1 << 4;
        /// The mapping is a stack and does not use large folios (`MAP_STACK`).
        const STACK = 1 << 5;
        /// A mapping that the embedder creates for itself in each program, like a vDSO: it never
        /// grows, merges with no neighbor, and ignores locks (Linux: `VM_DONTEXPAND`). No flag of
        /// `mmap(2)` requests this.
        const DONT_EXPAND = 1 << 6;
    }
}

bitflags! {
    /// The access mode of an open file, and whether the caller owns the file.
    ///
    /// ```
    /// use bindery::FileAccess;
    ///
    /// // open(2) with O_RDWR, by the file's owner.
    /// let access = FileAccess::READ | FileAccess::WRITE | FileAccess::OWNER;
    /// assert!(access.contains(FileAccess::WRITE));
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct FileAccess: u8 {
        /// For reading.
        const READ = 1 << 0;
        /// For writing.
        const WRITE = 1 << 1;
        /// The caller owns the file or has permission to write it, whatever the access mode.
        /// Without this flag, [`AddressSpace::mincore`] hides the residence of the file's pages,
        /// which would reveal the reads of other processes (Linux: `can_do_mincore`).
        const OWNER = 1 << 2;
    }
}

/// A request for a mapping.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{MapRequest, Place, Protection, Sharing};
///
/// let stack = MapRequest {
///     length: 8 << 20,
///     protection: Protection::READ | Protection::WRITE,
///     place: Place::Fixed(VirtAddr(0x7000_0000)),
///     ..MapRequest::default()
/// };
/// assert_eq!(stack.sharing, Sharing::Private);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MapRequest {
    /// Length in bytes, rounded up to pages.
    pub length: u64,
    /// The program's permissions.
    pub protection: Protection,
    /// The requested address.
    pub place: Place,
    /// Whether other mappings see writes.
    pub sharing: Sharing,
    /// Further flags.
    pub flags: MapFlags,
}

/// The part of an object to map.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, Error, FileAccess, MapObject, MapRequest, Object, Platform, Protection};
///
/// fn text<'m, P: Platform>(
///     space: &AddressSpace<'m, P>,
///     file: &Object<'m, P>,
/// ) -> Result<VirtAddr, Error> {
///     let protection = Protection::READ | Protection::EXECUTE;
///     let request = MapRequest { length: 64 << 10, protection, ..MapRequest::default() };
///     let access = FileAccess::READ;
///     space.mmap_object(&request, &MapObject { object: file, offset: 4096, access })
/// }
/// ```
pub struct MapObject<'a, 'm, P: Platform> {
    /// The object.
    pub object: &'a Object<'m, P>,
    /// The offset of the mapping in the object, in bytes; a multiple of the page size.
    pub offset: u64,
    /// The access mode in which the caller has opened the object.
    pub access: FileAccess,
}

impl<P: Platform> fmt::Debug for MapObject<'_, '_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MapObject")
            .field("object", &self.object)
            .field("offset", &self.offset)
            .field("access", &self.access)
            .finish()
    }
}
