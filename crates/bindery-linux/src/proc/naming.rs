//! [`Naming`]: the embedder's names of mapped objects.

use core::fmt::{self, Write};

use bindery::addr::VirtAddr;
use bindery::{Accounting, ObjectView, Platform, SegmentId};

/// The kind of object behind a mapping.
///
/// ```
/// use bindery_linux::proc::NameSource;
///
/// /// Whether a mapping of the object shows up under a path of the file system.
/// fn has_path(backing: NameSource) -> bool {
///     backing == NameSource::File
/// }
/// assert!(!has_path(NameSource::Secret));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NameSource {
    /// The shared memory of a shared anonymous mapping, which is committed as a whole or not at
    /// all.
    SharedAnonymous,
    /// A memfd: shared memory that is committed page by page.
    SharedMemory,
    /// A segment of System V shared memory ([`Segments`](crate::Segments)).
    Segment {
        /// Its identifier.
        id: u32,
        /// The key that it was created with.
        key: u32,
    },
    /// Secret memory ([`Memory::secret_memory`](bindery::Memory::secret_memory)).
    Secret,
    /// A file behind a pager.
    File,
}

impl NameSource {
    pub(super) fn of<P: Platform>(object: ObjectView<'_, P>) -> Self {
        if object.is_file() {
            Self::File
        } else if object.is_secret() {
            Self::Secret
        } else if let Some(SegmentId { segment, key }) = object.segment() {
            Self::Segment { id: segment as u32, key }
        } else if object.accounting() == Accounting::PerPage {
            Self::SharedMemory
        } else {
            Self::SharedAnonymous
        }
    }
}

/// The numbers that identify a file to programs.
///
/// ```
/// use bindery_linux::proc::FileId;
///
/// let console = FileId { major: 5, minor: 1, inode: 4 };
/// assert_eq!(format!("{:02x}:{:02x} {}", console.major, console.minor, console.inode), "05:01 4");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileId {
    /// The device's major number.
    pub major: u32,
    /// The device's minor number.
    pub minor: u32,
    /// The inode's number.
    pub inode: u64,
}

/// The embedder's names of mapped objects, each identified by its
/// [`identity`](bindery::Object::identity). Every function has a default answer for embedders
/// without names.
///
/// # Context
/// Context: may sleep. The functions are called without locks of the core.
///
/// ```
/// use std::fmt::{self, Write};
///
/// use bindery_linux::proc::{NameSource, Naming};
///
/// /// An embedder with one file.
/// struct Names;
///
/// impl Naming for Names {
///     fn write_path(&self, _identity: u64, _backing: NameSource, out: &mut dyn Write) -> fmt::Result {
///         out.write_str("/init")
///     }
/// }
/// ```
pub trait Naming {
    /// The device and inode of the object's file. By default, shared memory has device 0:1, as on
    /// Linux, and files have device 0:0. The inode is the identifier of a segment, and the identity
    /// of other objects.
    fn file_id(&self, identity: u64, backing: NameSource) -> FileId {
        let minor = u32::from(backing != NameSource::File);
        let inode = match backing {
            NameSource::Segment { id, .. } => id.into(),
            NameSource::SharedAnonymous
            | NameSource::SharedMemory
            | NameSource::Secret
            | NameSource::File => identity,
        };
        FileId { major: 0, minor, inode }
    }

    /// Writes the path of the object's file. Linux appends ` (deleted)` to the path of an unlinked
    /// file. Listings show a line feed as `\012`.
    ///
    /// The defaults are Linux's, other than that of files: `/dev/zero (deleted)` for shared
    /// anonymous memory, `/memfd: (deleted)` for a memfd, `/SYSV01234567 (deleted)` for a segment
    /// with its key in hexadecimal, `/secretmem (deleted)` for secret memory, and `file:[identity]`
    /// for a file.
    ///
    /// # Errors
    /// Only errors of `out`, which end the listing.
    fn write_path(&self, identity: u64, backing: NameSource, out: &mut dyn Write) -> fmt::Result {
        match backing {
            NameSource::SharedAnonymous => out.write_str("/dev/zero (deleted)"),
            NameSource::SharedMemory => out.write_str("/memfd: (deleted)"),
            NameSource::Segment { key, .. } => write!(out, "/SYSV{key:08x} (deleted)"),
            NameSource::Secret => out.write_str("/secretmem (deleted)"),
            NameSource::File => write!(out, "file:[{identity}]"),
        }
    }

    /// An address in the program's initial stack. Listings call the mapping around it `[stack]`.
    fn stack(&self) -> Option<VirtAddr> {
        None
    }
}

/// The default names, for an embedder without names of its own.
///
/// ```
/// use std::fmt;
///
/// use bindery_linux::proc::{Unnamed, maps};
/// use bindery::{AddressSpace, Platform};
///
/// /// `/proc/PID/maps`
/// fn listing<P: Platform>(space: &AddressSpace<'_, P>) -> Result<String, fmt::Error> {
///     let mut text = String::new();
///     maps(space, &Unnamed, &mut text)?;
///     Ok(text)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Unnamed;

impl Naming for Unnamed {}
