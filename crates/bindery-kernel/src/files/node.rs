//! A file of any kind is a [`Node`]; a [`Place`] is a node with the path that led to it.

use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::any::Any;
use core::fmt;

use bindery::{FileAccess, Object, ReadPattern};
use bindery_linux::OpenFile;
use linux_raw_sys::general::{O_ACCMODE, O_RDONLY, O_RDWR, O_WRONLY, POLLIN, POLLOUT};

use crate::errno::{Errno, Outcome};
use crate::platform::Machine;
use crate::process::Process;

use super::attributes::{self, Attributes, Change, Entry, Kind, Patience};
use super::inode::Common;
use super::segments::Segments;
use super::sequence::SequenceBuffer;

/// The maximum length of a path in bytes, with the zero at its end.
pub const PATH_MAX: usize = 4096;

/// A file behind a descriptor, for `mmap`.
pub enum Mappable {
    /// A file with an object.
    File(OpenFile<'static, Machine>),
    /// `/dev/zero`, opened so.
    Zeroes(FileAccess),
}

/// Advice about a file's content (`posix_fadvise(2)`): about a range of it, or the order of reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Advice {
    /// The range will be needed soon.
    WillNeed,
    /// The range will not be needed soon.
    DontNeed,
    /// The order in which this opening reads the file, whatever the range.
    Order(ReadPattern),
}

/// Anything with a name or a descriptor. By default each operation is refused with Linux's error.
pub trait Node: Send + Sync {
    /// The kind.
    fn kind(&self) -> Kind;

    /// The attributes.
    fn attributes(&self) -> Attributes;

    /// Permission bits, owner and group, as in [`Node::attributes`]; each path lookup needs them.
    fn permissions(&self) -> (u32, (u32, u32)) {
        let Attributes { mode, owner, .. } = self.attributes();
        (mode, owner)
    }

    /// Whether this is a program that runs as its owner or its group; each write asks.
    fn sets_ids(&self) -> bool {
        self.kind() == Kind::Regular && attributes::sets_ids(self.permissions().0)
    }

    /// Changes attributes.
    fn change(&self, _change: &Change) -> Result<(), Errno> {
        Err(Errno::EPERM)
    }

    /// The node of this name in the directory.
    fn child(&self, _name: &[u8]) -> Result<Arc<dyn Node>, Errno> {
        Err(Errno::ENOTDIR)
    }

    /// The directory's entries, without `.` and `..`, by rising cookie.
    fn children(&self) -> Result<Vec<Entry>, Errno> {
        Err(Errno::ENOTDIR)
    }

    /// The count of the node's names.
    fn links(&self) -> Option<&Common> {
        None
    }

    /// The target of a symbolic link.
    fn target(&self) -> Result<Vec<u8>, Errno> {
        Err(Errno::EINVAL)
    }

    /// The place to which a link of `/proc` leads without a path.
    fn jump(&self) -> Option<Arc<Place>> {
        None
    }

    /// Called by `open`. Returns the node that this opening reads and writes, if it is not the node
    /// itself.
    fn open(&self, _flags: u32) -> Result<Option<Arc<dyn Node>>, Errno> {
        Ok(None)
    }

    /// Called when the last descriptor of one opening is closed.
    fn closed(&self, _flags: u32) {}

    /// Reads; 0 at the end.
    fn read(&self, _at: u64, _into: &mut [u8], _patience: Patience) -> Result<usize, Errno> {
        Err(if self.kind() == Kind::Directory { Errno::EISDIR } else { Errno::EINVAL })
    }

    /// Writes.
    fn write(&self, _at: u64, _from: &[u8], _patience: Patience) -> Result<usize, Errno> {
        Err(Errno::EINVAL)
    }

    /// Reads directly into a program's memory. `None` if the node implements only [`Node::read`].
    fn read_into(&self, _at: u64, _to: &Segments, _patience: Patience) -> Option<Outcome> {
        None
    }

    /// Writes directly from a program's memory. `None` if the node implements only [`Node::write`].
    fn write_from(&self, _at: u64, _from: &Segments, _patience: Patience) -> Option<Outcome> {
        None
    }

    /// As [`Node::write_from`], at the end of the file and within `RLIMIT_FSIZE`. No other writer
    /// moves the end until the write is done. Returns the old end, and the count.
    fn append_from(&self, _from: &Segments) -> Option<Result<(u64, u64), Errno>> {
        None
    }

    /// The object that holds a regular file's contents.
    fn object(&self) -> Option<&Object<'static, Machine>> {
        None
    }

    /// The errno of `mmap` if there is no object.
    fn unmappable(&self) -> Errno {
        Errno::ENODEV
    }

    /// Stores the changes of the content (`fsync(2)`).
    fn synchronize(&self) -> Result<(), Errno> {
        Ok(())
    }

    /// Reports a failed store of the content that this opening has not reported yet.
    ///
    /// # Errors
    /// The store's error.
    fn check_errors(&self) -> Result<(), bindery::Error> {
        Ok(())
    }

    /// Accepts advice about the content.
    fn advise(&self, _at: u64, _length: u64, _advice: Advice) {}

    /// Whether the node has positions.
    fn is_seekable(&self) -> bool {
        matches!(self.kind(), Kind::Regular | Kind::Directory)
    }

    /// Whether the node's only position is 0, whatever the target of `lseek`.
    fn ignores_seeks(&self) -> bool {
        false
    }

    /// The node's length in bytes, for `lseek`.
    fn length(&self) -> u64 {
        self.attributes().size
    }

    /// Whether `lseek` can find the node's end.
    fn has_end(&self) -> bool {
        true
    }

    /// Whether the node is `/dev/zero`.
    fn is_zeroes(&self) -> bool {
        false
    }

    /// The operations that would not wait: bits of `poll(2)`.
    fn ready(&self) -> u32 {
        POLLIN | POLLOUT
    }

    /// `ioctl(2)`.
    fn control(&self, _request: u32, _argument: u64) -> Outcome {
        Err(Errno::ENOTTY)
    }

    /// Writes the node's lines of `/proc/PID/fdinfo`.
    fn tell(&self, _out: &mut SequenceBuffer<'_>) -> fmt::Result {
        Ok(())
    }

    /// The process that a pidfd names.
    fn process(&self) -> Option<&Weak<Process>> {
        None
    }

    /// As [`Node::ready`], for an opening with these flags; `None` if the flags only mask bits.
    fn ready_as_opened(&self, _flags: u32) -> Option<u32> {
        None
    }

    /// What an opening for reading that waits for no writer remembers of a pipe's writers so far.
    fn writers_so_far(&self) -> u64 {
        0
    }

    /// Whether a pipe has had no writer before or since the opening that remembers this.
    fn lacks_writer_since(&self, _remembered: u64) -> bool {
        false
    }

    /// The node itself, for calls that need its type: a directory in memory, a pipe, an epoll
    /// instance.
    fn special(&self) -> Option<&dyn Any> {
        None
    }
}

/// A node, and the path to it.
pub struct Place {
    /// The node.
    pub node: Arc<dyn Node>,
    /// The node's name in the directory above; empty for the root.
    pub name: Vec<u8>,
    /// The directory above; `None` for the root and for files without a path.
    pub above: Option<Arc<Place>>,
}

impl Place {
    /// The root, or a node without a path that is described by `name`.
    pub fn alone(node: Arc<dyn Node>, name: &[u8]) -> Arc<Self> {
        Arc::new(Self { node, name: name.into(), above: None })
    }

    /// A place below this one.
    pub fn below(self: &Arc<Self>, node: Arc<dyn Node>, name: &[u8]) -> Arc<Self> {
        Arc::new(Self { node, name: name.into(), above: Some(self.clone()) })
    }

    /// The length of the path in bytes. Directories may be nested deeper than a path can express.
    pub fn path_length(&self) -> usize {
        let (mut place, mut length) = (self, 1);
        while let Some(above) = &place.above {
            length += place.name.len() + 1;
            place = above;
        }
        length
    }

    /// The absolute path, or Linux's text `(unreachable)` if the result would be too long for a
    /// path.
    pub fn path(&self) -> Vec<u8> {
        if self.path_length() > PATH_MAX {
            return b"(unreachable)".to_vec();
        }
        let mut names: Vec<&[u8]> = Vec::new();
        let mut place = self;
        while let Some(above) = &place.above {
            names.push(&place.name);
            place = above;
        }
        if names.is_empty() {
            return if place.name.is_empty() { b"/".to_vec() } else { place.name.clone() };
        }
        names.iter().rev().flat_map(|name| b"/".iter().chain(name.iter())).copied().collect()
    }
}

impl Drop for Place {
    /// Drops a chain of places in a loop, because the chain may be as long as a path, too long for
    /// recursion.
    fn drop(&mut self) {
        let mut above = self.above.take();
        while let Some(place) = above {
            above = Arc::into_inner(place).and_then(|mut place| place.above.take());
        }
    }
}

/// The access to an object that flags of `open` permit.
pub fn file_access(flags: u32) -> FileAccess {
    let opened = match flags & O_ACCMODE {
        O_RDONLY => FileAccess::READ,
        O_WRONLY => FileAccess::WRITE,
        _ => FileAccess::READ | FileAccess::WRITE,
    };
    opened | FileAccess::OWNER
}

/// Whether flags of `open` allow reading.
pub fn may_read(flags: u32) -> bool {
    matches!(flags & O_ACCMODE, O_RDONLY | O_RDWR)
}

/// Whether flags of `open` allow writing.
pub fn may_write(flags: u32) -> bool {
    matches!(flags & O_ACCMODE, O_WRONLY | O_RDWR)
}

/// Counts a node's names, if it has a link count.
pub fn count_links(node: &dyn Node, by: i32) {
    if let Some(common) = node.links() {
        common.count_links(by);
    }
}
