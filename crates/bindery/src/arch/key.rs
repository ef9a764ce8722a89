//! Protection keys (`pkeys(7)`): a number in each leaf, and a thread's rights for each number.
//!
//! The kernel gives a mapping a key, and every leaf of the mapping carries it. The program sets a
//! thread's rights to the memory of each key in a CPU register (x86-64: PKRU), without a system
//! call or a change of entries.

/// The number of a key. New mappings have key 0, which always exists.
///
/// ```
/// use bindery::arch::ProtectionKey;
///
/// // Key 0 is that of all memory without another one.
/// assert_eq!(ProtectionKey::new(0), Some(ProtectionKey::default()));
/// assert_eq!(ProtectionKey::new(16), None);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct ProtectionKey(u8);

impl ProtectionKey {
    /// The number of keys that the entries of any architecture can hold.
    pub const COUNT: u8 = 16;

    /// The key with this number, below [`ProtectionKey::COUNT`].
    #[inline]
    pub const fn new(number: u8) -> Option<Self> {
        if number < Self::COUNT { Some(Self(number)) } else { None }
    }

    /// The key whose number is the lowest four bits.
    #[inline]
    pub(crate) const fn truncated(bits: u64) -> Self {
        Self(bits as u8 & (Self::COUNT - 1))
    }

    /// The key's number.
    #[inline]
    pub const fn number(self) -> u8 {
        self.0
    }
}

/// The accesses that a thread must not make to the memory of each key: two bits for each key, from
/// key 0 on. The lower bit forbids loads and stores (`PKEY_DISABLE_ACCESS`), the upper bit forbids
/// stores (`PKEY_DISABLE_WRITE`). This is the format of x86-64's PKRU. Keys do not restrict
/// fetches.
///
/// ```
/// use bindery::arch::{KeyRights, ProtectionKey};
///
/// let key = ProtectionKey::new(3).expect("below 16");
/// let rights = KeyRights::ALL.with(key, 2); // PKEY_DISABLE_WRITE
/// assert!(rights.may_load(key) && !rights.may_store(key));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct KeyRights(pub u32);

impl KeyRights {
    /// No access is forbidden.
    pub const ALL: Self = Self(0);

    /// Whether loads from memory of the key are allowed.
    #[inline]
    pub const fn may_load(self, key: ProtectionKey) -> bool {
        self.0 >> (2 * key.0) & 1 == 0
    }

    /// Whether stores to memory of the key are allowed.
    #[inline]
    pub const fn may_store(self, key: ProtectionKey) -> bool {
        self.0 >> (2 * key.0) & 3 == 0
    }

    /// The same rights with those to one key replaced: `forbidden` is the key's two bits.
    #[inline]
    #[must_use]
    pub const fn with(self, key: ProtectionKey, forbidden: u32) -> Self {
        let shift = 2 * key.0;
        Self(self.0 & !(3 << shift) | (forbidden & 3) << shift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_two_bits_of_its_own() {
        let three = ProtectionKey::new(3).unwrap();
        let no_stores = KeyRights::ALL.with(three, 2);
        assert_eq!(no_stores, KeyRights(0x80));
        assert!(no_stores.may_load(three) && !no_stores.may_store(three));
        let nothing = no_stores.with(three, 1);
        assert!(!nothing.may_load(three) && !nothing.may_store(three));
        for other in (0..16).filter(|number| *number != 3).filter_map(ProtectionKey::new) {
            assert!(nothing.may_load(other) && nothing.may_store(other));
        }
        assert_eq!(nothing.with(three, 0), KeyRights::ALL);
        assert_eq!(ProtectionKey::new(16), None);
    }
}
