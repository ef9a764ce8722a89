//! The protection keys of a process: `pkey_alloc(2)`, `pkey_free(2)`.
//!
//! The keys belong to the address space, but each thread has its own rights to them. The embedder
//! keeps the rights in a register that it switches with the thread. The core receives the rights
//! only with a fault ([`AddressSpace::fault_with_keys`]).

use core::sync::atomic::{AtomicU16, Ordering};

use crate::arch::{Arch, ProtectionKey};
use crate::error::Error;
use crate::platform::Platform;

use crate::space::AddressSpace;

/// The allocated keys, one bit each. The bits change only under the address space's mutex.
pub(in crate::space) struct Keys(AtomicU16);

impl Keys {
    /// Key 0 is allocated initially.
    pub(in crate::space) const fn new() -> Self {
        Self(AtomicU16::new(1))
    }

    pub(in crate::space) fn copy_from(&self, other: &Self) {
        self.0.store(other.0.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    pub(in crate::space) fn has(&self, key: ProtectionKey) -> bool {
        self.0.load(Ordering::Relaxed) & 1 << key.number() != 0
    }

    /// Allocates the lowest free key of the first `count`.
    fn allocate(&self, count: u8) -> Result<ProtectionKey, Error> {
        let mut keys = (0..count).filter_map(ProtectionKey::new);
        let free = keys.find(|key| !self.has(*key)).ok_or(Error::NoSpace)?;
        self.0.fetch_or(1 << free.number(), Ordering::Relaxed);
        Ok(free)
    }

    fn free(&self, key: ProtectionKey) -> Result<(), Error> {
        if !self.has(key) {
            return Err(Error::Invalid);
        }
        self.0.fetch_and(!(1 << key.number()), Ordering::Relaxed);
        Ok(())
    }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// The number of protection keys of a process, including key 0; 1 if the machine or its entry
    /// format has none.
    ///
    /// Context: any.
    pub fn protection_keys(&self) -> u8 {
        self.platform().protection_keys().clamp(1, P::Arch::PROTECTION_KEYS)
    }

    /// Allocates the lowest free key (`pkey_alloc(2)`). Children inherit the key. The caller must
    /// set the thread's rights to the key, since they may be left over from an earlier use.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if all keys are allocated, and always on a machine without keys.
    pub fn pkey_alloc(&self) -> Result<ProtectionKey, Error> {
        let _guard = self.vmas.lock();
        self.keys.allocate(self.protection_keys())
    }

    /// Frees a key (`pkey_free(2)`). As on Linux, mappings retain the key, even after it is
    /// allocated again, and key 0 can also be freed.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the key is not allocated.
    pub fn pkey_free(&self, key: ProtectionKey) -> Result<(), Error> {
        let _guard = self.vmas.lock();
        self.keys.free(key)
    }
}
