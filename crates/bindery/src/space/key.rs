//! Which protection keys a process has: `pkey_alloc(2)`, `pkey_free(2)`.
//!
//! The keys belong to the address space, what may be done with them to each thread. So rights are
//! the embedder's affair, in a register that it switches with the thread, and come into the core
//! with a fault alone ([`AddressSpace::fault_with_keys`]).

use core::sync::atomic::{AtomicU16, Ordering};

use crate::arch::{Arch, ProtectionKey};
use crate::error::Error;
use crate::platform::Platform;

use super::AddressSpace;

/// The keys that are taken, a bit each. Changes with the mutex of the address space held.
pub(super) struct Keys(AtomicU16);

impl Keys {
    /// Key 0 is taken from the beginning.
    pub(super) const fn new() -> Self {
        Self(AtomicU16::new(1))
    }

    pub(super) fn copy_from(&self, other: &Self) {
        self.0.store(other.0.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    pub(super) fn has(&self, key: ProtectionKey) -> bool {
        self.0.load(Ordering::Relaxed) & 1 << key.number() != 0
    }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// How many protection keys a process can have here, key 0 among them; 1 where the machine or
    /// its entries have none.
    pub fn protection_keys(&self) -> u8 {
        self.platform().protection_keys().clamp(1, P::Arch::PROTECTION_KEYS)
    }

    /// Takes the lowest key that is free (`pkey_alloc(2)`). A fork inherits it. The caller gives the
    /// thread its rights to the key, which may be those that an earlier owner of the key had.
    ///
    /// # Errors
    /// [`Error::NoSpace`] where all are taken, so always on a machine without keys.
    pub fn pkey_alloc(&self) -> Result<ProtectionKey, Error> {
        let _guard = self.mutex.lock();
        let free = (0..self.protection_keys())
            .filter_map(ProtectionKey::new)
            .find(|key| !self.keys.has(*key))
            .ok_or(Error::NoSpace)?;
        self.keys.0.fetch_or(1 << free.number(), Ordering::Relaxed);
        Ok(free)
    }

    /// Gives a key back (`pkey_free(2)`). As on Linux, mappings that carry it keep it, and so does
    /// whoever takes it next; and even key 0 can be given back.
    ///
    /// # Errors
    /// [`Error::Invalid`] where it was not taken.
    pub fn pkey_free(&self, key: ProtectionKey) -> Result<(), Error> {
        let _guard = self.mutex.lock();
        if !self.keys.has(key) {
            return Err(Error::Invalid);
        }
        self.keys.0.fetch_and(!(1 << key.number()), Ordering::Relaxed);
        Ok(())
    }
}
