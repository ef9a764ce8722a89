//! Directories whose files something else than memory keeps.

use alloc::sync::Arc;

use crate::errno::Errno;

use super::node::Node;

/// The storage of a directory's files, where that is not memory.
pub trait Store: Sync {
    /// Reserves room for a write of `length` bytes at `at` to the file of this number. Returns the
    /// number of bytes that may be written: their store finds room. The write ends with
    /// [`Store::end_write`], and a file has one at a time.
    ///
    /// # Errors
    /// `ENOSPC` if there is room for none of them; `ENOMEM`.
    fn reserve(&self, file: u64, at: u64, length: u64) -> Result<u64, Errno>;

    /// Ends a write that [`Store::reserve`] began, which has written up to `end`, a place in the
    /// file: the room for the rest is free again.
    fn end_write(&self, file: u64, end: u64);

    /// Makes an empty regular file.
    ///
    /// # Errors
    /// `ENOSPC`, `EIO`, `ENAMETOOLONG`, `ENOMEM`.
    fn create(&self, name: &[u8], mode: u32) -> Result<Arc<dyn Node>, Errno>;

    /// Takes a file's name away.
    ///
    /// # Errors
    /// `EIO`.
    fn remove(&self, node: &dyn Node) -> Result<(), Errno>;

    /// Gives a file another name, which it takes from `replaced`.
    ///
    /// # Errors
    /// `EIO`.
    fn rename(
        &self,
        node: &dyn Node,
        name: &[u8],
        replaced: Option<&dyn Node>,
    ) -> Result<(), Errno>;
}
