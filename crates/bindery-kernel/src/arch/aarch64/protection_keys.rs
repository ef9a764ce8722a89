//! Protection keys: none, as the kernel does not use permission overlays (FEAT_S1POE).

use bindery::arch::KeyRights;

/// No protection keys, because the kernel does not use permission overlays (FEAT_S1POE).
#[inline]
pub fn protection_keys() -> u8 {
    1
}

/// All rights, since no leaf has a key.
#[inline]
pub fn key_rights() -> KeyRights {
    KeyRights::ALL
}

/// No operation: the architecture has no keys.
pub fn set_key_rights(_rights: KeyRights) {}
