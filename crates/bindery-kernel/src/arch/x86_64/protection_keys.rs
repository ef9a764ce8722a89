//! Protection keys: PKRU, the register with a thread's rights to each key (Intel SDM volume 3A,
//! section 4.6.2, here by the number it had as chapter 4).
//!
//! Programs write the register themselves; the kernel switches it with the thread.

use core::arch::asm;
use core::sync::atomic::{AtomicU32, Ordering};

use bindery::arch::KeyRights;
use x86_64::registers::control::{Cr4, Cr4Flags};

use super::cpu_features;

/// PKRU in the bits of an `XSAVE` header.
pub(super) const PART: u64 = 1 << 9;

/// The size of an `XSAVE` image that includes PKRU.
const SIZE: usize = 8;

/// The rights at the start of a program and of each signal handler, as on Linux: no access by any
/// key except key 0.
pub(super) const INITIAL: KeyRights = KeyRights(0x5555_5554);

/// The offset of PKRU in the compacted image of `XSAVE`; 0 without keys.
static OFFSET: AtomicU32 = AtomicU32::new(0);

/// Detects protection keys. CR4 is already set. Part of [`cpu_features::enable`].
pub(super) fn enable() {
    if Cr4::read().contains(Cr4Flags::PROTECTION_KEY_USER) {
        OFFSET.store(cpu_features::leaf(13, 9).ebx, Ordering::Relaxed);
    }
}

/// The offset of PKRU in an image of `XSAVE`, and the end of an image that includes it.
pub(super) fn place() -> Option<(usize, usize)> {
    let offset = OFFSET.load(Ordering::Relaxed) as usize;
    (offset != 0).then_some((offset, offset + SIZE))
}

/// The number of keys, including key 0.
#[inline]
pub fn protection_keys() -> u8 {
    if OFFSET.load(Ordering::Relaxed) == 0 { 1 } else { 16 }
}

/// The rights of the running thread to the memory of each key.
#[inline]
pub fn key_rights() -> KeyRights {
    if OFFSET.load(Ordering::Relaxed) == 0 {
        return KeyRights::ALL;
    }
    let rights;
    // SAFETY: reads a register that the processor has, since CR4.PKE is set.
    unsafe {
        asm!("rdpkru", in("ecx") 0, out("eax") rights, out("edx") _,
            options(nomem, nostack, preserves_flags));
    }
    KeyRights(rights)
}

/// Changes it.
#[inline]
pub fn set_key_rights(rights: KeyRights) {
    // Most threads have the same rights, and a write to PKRU may wait for all earlier accesses, so
    // skip it if it changes nothing.
    if key_rights() == rights || protection_keys() == 1 {
        return;
    }
    // SAFETY: the register exists, as above; the kernel uses no page that it concerns.
    unsafe {
        asm!("wrpkru", in("ecx") 0, in("eax") rights.0, in("edx") 0,
            options(nostack, preserves_flags));
    }
}
