//! `mprotect`, and protection keys: `pkey_mprotect`, `pkey_alloc`, `pkey_free`.

use linux_raw_sys::general as raw;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{Arch, ProtectionKey};
use bindery::{AddressSpace, Errno, Operation, PendingProtect, Platform, ProtectFrom, Protection};

use super::map::protection;
use super::{Outcome, Process, errno};

pub(super) fn mprotect<P: Platform>(
    space: &AddressSpace<'_, P>,
    arguments: [u64; 3],
    key: i32,
) -> Outcome {
    let Some(Change { from, protection, key }) = change(space, arguments, key)? else {
        return Ok(0);
    };
    let done = match key {
        None => space.mprotect_from(from, arguments[1], protection),
        Some(key) => space.pkey_mprotect(from, arguments[1], protection, key),
    };
    done.map(|()| 0).map_err(errno(Operation::Mprotect))
}

/// As [`mprotect`], up to its waits. `None`: it has nothing to do.
pub(super) fn begin_mprotect<P: Platform>(
    space: &AddressSpace<'_, P>,
    arguments: [u64; 3],
    key: i32,
) -> Result<Option<PendingProtect>, Errno> {
    let change = change(space, arguments, key)?;
    Ok(change.map(|Change { from, protection, key }| {
        space.begin_mprotect(from, arguments[1], protection, key)
    }))
}

/// The change that valid arguments request.
struct Change {
    from: ProtectFrom,
    protection: Protection,
    key: Option<ProtectionKey>,
}

/// Decodes the arguments. `None`: they name no page, which is checked first.
#[inline]
fn change<P: Platform>(
    space: &AddressSpace<'_, P>,
    [addr, length, bits]: [u64; 3],
    key: i32,
) -> Result<Option<Change>, Errno> {
    let (down, up) = (u64::from(raw::PROT_GROWSDOWN), u64::from(raw::PROT_GROWSUP));
    if bits & down != 0 && bits & up != 0 {
        return Err(Errno::EINVAL);
    }
    let mut known =
        down | up | u64::from(raw::PROT_READ | raw::PROT_WRITE | raw::PROT_EXEC | raw::PROT_SEM);
    if space.branch_target_identification() {
        known |= u64::from(Protection::BTI.bits());
    }
    let named = named(key);
    if bits & !known != 0 || key != NO_KEY && named.is_none() {
        // Linux checks the range first, so its errors take precedence.
        let aligned = addr.is_multiple_of(PAGE_SIZE);
        let end = length.checked_next_multiple_of(PAGE_SIZE).and_then(|n| addr.checked_add(n));
        return match end {
            _ if aligned && length == 0 => Ok(None),
            None if aligned => Err(Errno::ENOMEM),
            _ => Err(Errno::EINVAL),
        };
    }
    let (at, protection) = (VirtAddr(addr), protection(bits));
    let from = match (bits & down != 0, bits & up != 0) {
        (true, _) => ProtectFrom::GrowingStart(at),
        (_, true) => ProtectFrom::GrowingEnd(at),
        _ => ProtectFrom::Address(at),
    };
    Ok(Some(Change { from, protection, key: named }))
}

/// `pkey_mprotect` with this key is `mprotect`.
pub(super) const NO_KEY: i32 = -1;

fn named(key: i32) -> Option<ProtectionKey> {
    u8::try_from(key).ok().and_then(ProtectionKey::new)
}

pub(super) fn pkey_alloc<'m, P: Platform>(
    process: &impl Process<'m, P>,
    flags: u64,
    forbidden: u64,
) -> Outcome {
    let known = if P::Arch::NAME.starts_with("aarch64") {
        // Only on this architecture can keys forbid the other rights.
        raw::PKEY_DISABLE_ACCESS | raw::PKEY_DISABLE_WRITE | FURTHER_RIGHTS
    } else {
        raw::PKEY_DISABLE_ACCESS | raw::PKEY_DISABLE_WRITE
    };
    if flags != 0 || forbidden & !u64::from(known) != 0 {
        return Err(Errno::EINVAL);
    }
    let key = process.space().pkey_alloc().map_err(errno(Operation::Mprotect))?;
    process.set_key_rights(key, forbidden as u32);
    Ok(u64::from(key.number()))
}

/// `PKEY_DISABLE_EXECUTE` and `PKEY_DISABLE_READ`, on AArch64 only.
const FURTHER_RIGHTS: u32 = 4 | 8;

pub(super) fn pkey_free<P: Platform>(space: &AddressSpace<'_, P>, key: i32) -> Outcome {
    let key = named(key).ok_or(Errno::EINVAL)?;
    space.pkey_free(key).map(|()| 0).map_err(errno(Operation::Mprotect))
}
