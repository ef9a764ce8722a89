//! The content of a device in memory.

use core::ops::Deref;

use bindery::Object;

use crate::errno::Errno;
use crate::platform::Machine;

use super::super::memory::new_content;

/// The pages that a swap device holds. They stay in memory: pages that went to a swap area on their
/// own device would keep the area in use for as long as the device has them, and the device for as
/// long as the area is in use.
pub struct DeviceContent(Object<'static, Machine>);

impl DeviceContent {
    /// Content of `size` bytes, all zeroes, of the file system's share of memory.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new(size: u64) -> Result<Self, Errno> {
        let object = new_content(size)?;
        // Before it has a page.
        object.keep_in_memory();
        Ok(Self(object))
    }
}

impl Deref for DeviceContent {
    type Target = Object<'static, Machine>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}
