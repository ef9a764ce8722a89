//! Directories whose files are stored elsewhere than in memory.

use alloc::sync::Arc;

use crate::errno::Errno;

use super::node::Node;

/// The storage of a directory's files, if that is not memory. The directory makes one change of
/// its names at a time.
pub trait Store: Sync {
    /// Reserves room for a write of `length` bytes at `at` to the file of this number. Returns the
    /// number of bytes for which the storage has room. A file has one write at a time; it ends with
    /// [`Store::end_write`].
    ///
    /// # Errors
    /// `ENOSPC` if there is no room for the first byte; `ENOMEM`.
    fn reserve(&self, file: u64, at: u64, length: u64) -> Result<u64, Errno>;

    /// Ends a write that [`Store::reserve`] began. The write has reached `end`, a position in the
    /// file; the room reserved for the rest is free again.
    fn end_write(&self, file: u64, end: u64);

    /// Creates an empty regular file under a name that no file has.
    ///
    /// # Errors
    /// `ENOSPC`, `EIO`, `ENAMETOOLONG`, `ENOMEM`.
    fn create(&self, name: &[u8], mode: u32) -> Result<Arc<dyn Node>, Errno>;

    /// Removes a file's name.
    ///
    /// # Errors
    /// `EIO`.
    fn remove(&self, node: &dyn Node) -> Result<(), Errno>;

    /// Renames a file. `replaces` says that another file has the new name: [`Store::remove`] of the
    /// other file follows, and one of the two has the name at any time.
    ///
    /// # Errors
    /// `EIO`. The file then keeps its old name.
    fn rename(&self, node: &dyn Node, name: &[u8], replaces: bool) -> Result<(), Errno>;

    /// Makes all names durable.
    ///
    /// # Errors
    /// `EIO`.
    fn synchronize(&self) -> Result<(), Errno>;
}
