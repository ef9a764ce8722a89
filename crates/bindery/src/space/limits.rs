//! The limits of an address space, and its usage.

use crate::platform::Platform;

use super::AddressSpace;

pub use crate::vmas::limits::{Limits, Locking, Usage};

impl<P: Platform> AddressSpace<'_, P> {
    /// Sets the limits. Existing mappings stay.
    ///
    /// Context: any.
    pub fn set_limits(&self, limits: &Limits) {
        self.vmas.account().set_limits(limits);
    }

    /// The current limits.
    ///
    /// Context: any.
    pub fn limits(&self) -> Limits {
        self.vmas.account().limits()
    }

    /// The usage of the address space.
    ///
    /// Context: any.
    pub fn usage(&self) -> Usage {
        Usage { pinned: self.pin_counts.pages(), ..self.vmas.account().usage() }
    }
}
