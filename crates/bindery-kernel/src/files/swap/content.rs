//! The content of a device in memory.

use core::ops::Deref;

use bindery::Object;

use crate::errno::Errno;
use crate::platform::Machine;

use super::super::memory::new_content;

/// The pages that a swap device holds. They are never swapped out. If they lay in a swap area on
/// their own device, they would keep the area in use as long as the device holds them, and the area
/// would keep the device in use.
pub struct DeviceContent(Object<'static, Machine>);

impl DeviceContent {
    /// `size` bytes of zeroes, charged to the file system's share of memory.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new(size: u64) -> Result<Self, Errno> {
        let object = new_content(size)?;
        // Called before the object has a page.
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
