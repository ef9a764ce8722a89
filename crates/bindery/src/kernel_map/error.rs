//! Why a [`super::KernelMap`] refused.

use core::fmt;

use crate::addr::VirtAddr;
use crate::error::Errno;

use super::request::{AreaKind, KernelArea};

/// Why a call was refused. Whatever is refused has changed nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum KernelMapError {
    /// The arena is no whole pages, begins at 0, has no room for a page and its guard, is none that
    /// the MMU translates, does not fit under one root, or the root has entries there.
    BadArena,
    /// A size of zero, or an empty list.
    Empty,
    /// More pages than the arena has.
    TooLarge,
    /// The alignment is no power of two, or less than a page.
    BadAlignment,
    /// The address is no multiple of the page size.
    Unaligned(VirtAddr),
    /// Frames beyond the physical addresses.
    BadFrames,
    /// Nothing is allowed, or something to user mode; or a device would be executable.
    BadPermissions,
    /// The architecture has no such type of memory.
    NoSuchMemoryType,
    /// Physical memory ran out.
    OutOfMemory,
    /// There is no free stretch of addresses of that size and alignment.
    OutOfAddresses,
    /// Something is mapped at the address, outside of all areas.
    Occupied(VirtAddr),
    /// The address is in no area.
    NotAnArea(VirtAddr),
    /// The address is in the area, and not its start.
    NotTheStart {
        /// The area.
        area: KernelArea,
    },
    /// The area was given back before.
    Freed {
        /// The area.
        area: KernelArea,
    },
    /// The area was made by another function.
    WrongKind {
        /// The area.
        area: KernelArea,
        /// What the call is for.
        expected: AreaKind,
    },
    /// The range runs over the end of the area.
    CrossesArea {
        /// The area.
        area: KernelArea,
    },
    /// The change would make accesses pause, and the area was made with [`super::Pauses::Never`].
    WouldPause {
        /// The area.
        area: KernelArea,
    },
    /// The thread is about to be killed ([`crate::Platform::fatal_signal`]).
    Interrupted,
}

impl KernelMapError {
    /// The errno that Linux has for it.
    pub fn errno(self) -> Errno {
        match self {
            Self::OutOfMemory | Self::OutOfAddresses | Self::TooLarge => Errno::ENOMEM,
            Self::Occupied(_) | Self::WouldPause { .. } => Errno::EBUSY,
            Self::Interrupted => Errno::EINTR,
            Self::NotAnArea(_) | Self::NotTheStart { .. } | Self::Freed { .. } => Errno::EFAULT,
            _ => Errno::EINVAL,
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
                write!(f, "an alignment that is no power of two, or below a page")
            }
            Self::Unaligned(at) => write!(f, "{at} is not at the start of a page"),
            Self::BadFrames => write!(f, "frames beyond the physical addresses"),
            Self::BadPermissions => write!(f, "permissions for nobody, or for user mode"),
            Self::NoSuchMemoryType => write!(f, "the architecture has no such type of memory"),
            Self::OutOfMemory => write!(f, "physical memory has run out"),
            Self::OutOfAddresses => write!(f, "the kernel's addresses have run out"),
            Self::Occupied(at) => write!(f, "something is mapped at {at} already"),
            Self::NotAnArea(at) => write!(f, "{at} is in no area"),
            Self::NotTheStart { area } => write!(f, "an address inside {area}, not its start"),
            Self::Freed { area } => write!(f, "{area} was given back before"),
            Self::WrongKind { area, expected } => {
                write!(f, "{area} is not one of {expected:?}")
            }
            Self::CrossesArea { area } => write!(f, "a range that runs over the end of {area}"),
            Self::WouldPause { area } => {
                write!(f, "{area} may not pause, which the change would take")
            }
            Self::Interrupted => write!(f, "a fatal signal ended the call"),
        }
    }
}

impl core::error::Error for KernelMapError {}
