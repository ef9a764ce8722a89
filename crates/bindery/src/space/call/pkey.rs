//! The protection keys of a process: `pkey_alloc(2)`, `pkey_free(2)`.
//!
//! The keys belong to the address space; the rights to them belong to each thread. So rights are
//! the embedder's matter, in a register that it switches with the thread, and the core gets them
//! only with a fault ([`AddressSpace::fault_with_keys`]).

use core::sync::atomic::{AtomicU16, Ordering};

use crate::arch::{Arch, ProtectionKey};
use crate::error::Error;
use crate::platform::Platform;

use crate::space::AddressSpace;

/// The keys that are taken, a bit each. Changes with the mutex of the address space held.
pub(in crate::space) struct Keys(AtomicU16);

impl Keys {
    /// Key 0 is taken from the beginning.
    pub(in crate::space) const fn new() -> Self {
        Self(AtomicU16::new(1))
    }

    pub(in crate::space) fn copy_from(&self, other: &Self) {
        self.0.store(other.0.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    pub(in crate::space) fn has(&self, key: ProtectionKey) -> bool {
        self.0.load(Ordering::Relaxed) & 1 << key.number() != 0
    }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// How many protection keys a process can have, key 0 included; 1 if the machine or its entries
    /// have none.
    ///
    /// Context: any.
    pub fn protection_keys(&self) -> u8 {
        self.platform().protection_keys().clamp(1, P::Arch::PROTECTION_KEYS)
    }

    /// Allocates the lowest free key (`pkey_alloc(2)`). A fork inherits it. The caller sets the
    /// thread's rights to the key, which may be those that an earlier owner of the key had.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if all are allocated, and always on a machine without keys.
    pub fn pkey_alloc(&self) -> Result<ProtectionKey, Error> {
        let _guard = self.vmas.lock();
        let free = (0..self.protection_keys())
            .filter_map(ProtectionKey::new)
            .find(|key| !self.keys.has(*key))
            .ok_or(Error::NoSpace)?;
        self.keys.0.fetch_or(1 << free.number(), Ordering::Relaxed);
        Ok(free)
    }

    /// Frees a key (`pkey_free(2)`). As on Linux, mappings that carry the key keep it, and so does
    /// its next owner; even key 0 can be freed.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it was not allocated.
    pub fn pkey_free(&self, key: ProtectionKey) -> Result<(), Error> {
        let _guard = self.vmas.lock();
        if !self.keys.has(key) {
            return Err(Error::Invalid);
        }
        self.keys.0.fetch_and(!(1 << key.number()), Ordering::Relaxed);
        Ok(())
    }
}
