//! The attributes of the entries of a mapping.

use crate::addr::Frame;
use crate::arch::{Arch, Attributes, Entry, Level, MemoryType, Permissions};
use crate::table::leaf::user_attributes;

use super::MappingFlags;

/// The attributes of an entry, with no permission that its mapping lacks. They are initially the
/// mapping's. The methods only remove permissions.
///
/// Faults and calls build all entries from these attributes (`tests/layers`), so no entry exceeds
/// its mapping's permissions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MappingAttributes(Attributes);

impl MappingFlags {
    /// The attributes of an unused leaf of the mapping: neither accessed nor dirty.
    #[inline]
    pub(crate) fn attributes(self) -> MappingAttributes {
        MappingAttributes(user_attributes(self.protection().permissions(), self.key()))
    }
}

impl MappingAttributes {
    /// The attributes of a page that is about to be written.
    #[inline]
    pub(crate) fn written(self) -> Self {
        Self(Attributes { accessed: true, dirty: true, soft_dirty: true, ..self.0 })
    }

    /// The attributes of a page that is about to be read.
    #[inline]
    pub(crate) fn accessed(self) -> Self {
        Self(Attributes { accessed: true, ..self.0 })
    }

    #[inline]
    pub(crate) fn soft_dirty(self) -> Self {
        Self(Attributes { soft_dirty: true, ..self.0 })
    }

    /// Without write permission.
    #[inline]
    pub(crate) fn read_only(self) -> Self {
        Self(Attributes { permissions: self.0.permissions - Permissions::WRITE, ..self.0 })
    }

    /// Write-protected by a userfaultfd, and therefore without write permission.
    #[inline]
    pub(crate) fn write_protected(self) -> Self {
        Self(Attributes { userfault: true, ..self.read_only().0 })
    }

    #[inline]
    pub(crate) fn of_memory(self, memory: MemoryType) -> Self {
        Self(Attributes { memory, ..self.0 })
    }

    #[inline(always)]
    pub(crate) fn permissions(self) -> Permissions {
        self.0.permissions
    }

    /// For the table, whose functions write entries with arbitrary attributes.
    #[inline(always)]
    pub(crate) fn get(self) -> Attributes {
        self.0
    }

    /// The entry at `level` for `frame`, as [`Arch::page_entry`].
    #[inline(always)]
    pub(crate) fn entry<A: Arch>(self, frame: Frame, level: Level<A>) -> Entry {
        A::page_entry(frame, level, self.0)
    }
}
