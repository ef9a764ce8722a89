//! Directories whose files something else than memory keeps.

use alloc::sync::Arc;

use crate::errno::Errno;

use super::node::Node;

/// The storage of a directory's files, where that is not memory.
pub trait Store: Sync {
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
