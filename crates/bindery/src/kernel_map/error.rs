//! The reasons why a [`super::KernelMap`] refuses a call.

use core::fmt;

use crate::addr::VirtAddr;
use crate::error::CallError;
use crate::error::Errno;

use super::request::{AreaKind, KernelArea};

/// The reason for a refusal. A refused call has changed nothing.
///
/// ```
/// use bindery::KernelMapError;
///
/// /// Whether a call should be made again after memory was freed.
/// fn is_temporary(error: KernelMapError) -> bool {
///     matches!(error, KernelMapError::OutOfMemory | KernelMapError::OutOfAddresses)
/// }
/// assert!(!is_temporary(KernelMapError::Empty));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum KernelMapError {
    /// The arena is not whole pages, begins at 0, has no room for a page and its guard, is not
    /// translated by the MMU, does not fit under one root, or the root has entries there.
    BadArena,
    /// A size of zero, or an empty list.
    Empty,
    /// More pages than the arena has.
    TooLarge,
    /// The alignment is not a power of two, or is smaller than a page.
    BadAlignment,
    /// The address is not a multiple of the page size.
    Unaligned(VirtAddr),
    /// The frames are beyond the physical addresses.
    BadFrames,
    /// The permissions allow no access, or user mode, or execution of device memory.
    BadPermissions,
    /// The architecture or the machine lacks this memory type
    /// ([`crate::Platform::page_based_memory_types`]).
    NoSuchMemoryType,
    /// Physical memory ran out.
    OutOfMemory,
    /// No free range of addresses has that size and alignment.
    OutOfAddresses,
    /// The address is mapped, outside all areas.
    Occupied(VirtAddr),
    /// The address is in no area.
    NotAnArea(VirtAddr),
    /// The address is in the area, but not its start.
    NotTheStart {
        /// The area.
        area: KernelArea,
    },
    /// The area was freed before.
    Freed {
        /// The area.
        area: KernelArea,
    },
    /// Another function made the area.
    WrongKind {
        /// The area.
        area: KernelArea,
        /// The kind of area that the call requires.
        expected: AreaKind,
    },
    /// The range extends beyond the area.
    CrossesArea {
        /// The area.
        area: KernelArea,
    },
    /// The change would pause accesses, which the area's [`super::Pauses::Never`] forbids.
    WouldPause {
        /// The area.
        area: KernelArea,
    },
    /// The thread is about to be killed ([`crate::Platform::fatal_signal`]).
    Interrupted,
}

impl KernelMapError {
    /// The errno that Linux returns for it.
    ///
    /// Context: any.
    pub fn errno(self) -> Errno {
        match self {
            Self::OutOfMemory | Self::OutOfAddresses | Self::TooLarge => Errno::ENOMEM,
            Self::Occupied(_) | Self::WouldPause { .. } => Errno::EBUSY,
            Self::Interrupted => Errno::EINTR,
            Self::NotAnArea(_) | Self::NotTheStart { .. } | Self::Freed { .. } => Errno::EFAULT,
            Self::BadArena
            | Self::Empty
            | Self::BadAlignment
            | Self::Unaligned(_)
            | Self::BadFrames
            | Self::BadPermissions
            | Self::NoSuchMemoryType
            | Self::WrongKind { .. }
            | Self::CrossesArea { .. } => Errno::EINVAL,
        }
    }
}

impl fmt::Display for KernelArea {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            AreaKind::Vmalloc => "vmalloc",
            AreaKind::Vmap => "vmap",
            AreaKind::Ioremap => "ioremap",
        };
        write!(f, "the {kind} area at {}", self.range)
    }
}

impl fmt::Display for KernelMapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadArena => write!(f, "the arena cannot be used for kernel mappings"),
            Self::Empty => write!(f, "nothing to map"),
            Self::TooLarge => write!(f, "more than the kernel's arena has room for"),
            Self::BadAlignment => {
                write!(f, "the alignment is not a power of two, or is below the page size")
            }
            Self::Unaligned(at) => write!(f, "{at} is not at the start of a page"),
            Self::BadFrames => write!(f, "the frames lie beyond the physical address space"),
            Self::BadPermissions => {
                write!(f, "the permissions allow no access, or access from user mode")
            }
            Self::NoSuchMemoryType => write!(f, "the machine has no such type of memory"),
            Self::OutOfMemory => write!(f, "physical memory has run out"),
            Self::OutOfAddresses => write!(f, "the kernel's addresses have run out"),
            Self::Occupied(at) => write!(f, "{at} is mapped already"),
            Self::NotAnArea(at) => write!(f, "{at} is in no area"),
            Self::NotTheStart { area } => {
                write!(f, "the address is inside {area}, not at its start")
            }
            Self::Freed { area } => write!(f, "{area} was freed before"),
            Self::WrongKind { area, expected } => {
                write!(f, "{area} is not one of {expected:?}")
            }
            Self::CrossesArea { area } => write!(f, "the range extends beyond {area}"),
            Self::WouldPause { area } => {
                write!(f, "the change would pause accesses to {area}, which forbids pauses")
            }
            Self::Interrupted => write!(f, "a fatal signal ended the call"),
        }
    }
}

impl core::error::Error for KernelMapError {}

impl CallError for KernelMapError {
    const OUT_OF_MEMORY: Self = Self::OutOfMemory;
}
