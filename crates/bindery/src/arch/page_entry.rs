//! The entry of a page. Only this file decides between a leaf and a `PROT_NONE` entry.
//!
//! A leaf that allows no access cannot be encoded. On x86-64 and AArch64, its bits would be those
//! of a readable page. On RISC-V, they would be those of a table whose entries are the bytes of the
//! page. So a format builds a leaf only from [`LeafAttributes`], which allow some access, and for
//! program mappings only [`Arch::page_entry`] builds these attributes.

use super::{AbsentFormat, Arch, Attributes, Entry, Level, Permissions};
use crate::addr::Frame;

/// The attributes of a leaf that allows loads, stores or fetches. [`Arch::page_entry`] builds this
/// value from [`Attributes`] that allow an access; its callers never see the value.
///
/// # Context
/// Context: any.
///
/// ```
/// use bindery::arch::{Attributes, LeafAttributes};
///
/// /// As an entry format of one's own would ask.
/// fn is_dirty(attributes: LeafAttributes) -> bool {
///     attributes.get().dirty
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeafAttributes(Attributes);

impl LeafAttributes {
    /// The attributes, if they allow some access.
    #[inline(always)]
    pub(super) const fn new(attributes: Attributes) -> Option<Self> {
        let allowed = attributes.permissions.bits() & Permissions::ACCESS.bits();
        if allowed != 0 { Some(Self(attributes)) } else { None }
    }

    /// The attributes of a kernel leaf that the MMU never has to update, if it allows some access.
    pub(super) const fn of_kernel(permissions: Permissions) -> Option<Self> {
        Self::new(Attributes::of_kernel(permissions))
    }

    /// The attributes as a plain value.
    #[inline(always)]
    pub const fn get(self) -> Attributes {
        self.0
    }
}

/// See [`Arch::page_entry`].
// Always inlined: callers of first accesses know most of the attributes at compile time.
#[inline(always)]
pub(super) fn page_entry<A: Arch>(frame: Frame, level: Level<A>, attributes: Attributes) -> Entry {
    match LeafAttributes::new(attributes) {
        Some(attributes) => A::leaf(frame, level, attributes),
        None => prot_none::<A>(frame, attributes),
    }
}

/// Rare: few programs fill memory that they may not access.
#[cold]
fn prot_none<A: Arch>(frame: Frame, attributes: Attributes) -> Entry {
    A::encode_prot_none(frame, attributes)
}
