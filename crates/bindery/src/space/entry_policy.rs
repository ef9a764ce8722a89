//! The permissions that entries get from their mapping, for faults and for calls that change the
//! mapping.

use crate::table::protect::{EntryPolicy, Watched, Writable};
use crate::vma::{MappingFlags, Vma};

/// The permissions and write policy for entries of a mapping.
pub(in crate::space) fn entry_policy(vma: &Vma) -> EntryPolicy {
    // Read once, because the compiler does not merge loads of an atomic word.
    let flags = vma.flags();
    let writable = match vma.object() {
        _ if !flags.contains(MappingFlags::SHARED) => Writable::Exclusive,
        Some(object) if object.notices_writes() => Writable::Noticed,
        _ => Writable::All,
    };
    let soft_dirty = flags.contains(MappingFlags::SOFT_DIRTY);
    EntryPolicy {
        permissions: flags.protection().permissions(),
        key: flags.key(),
        writable,
        watched: if soft_dirty { Watched::No } else { Watched::SoftDirty },
    }
}
