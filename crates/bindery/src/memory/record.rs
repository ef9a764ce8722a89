//! The records of the higher layers: each type has its own slab.
//!
//! A [`Memory`] contains the slabs, because address spaces, objects and kernel maps share them. It
//! identifies the types only by number ([`RecordKind`]): a layer assigns a number to its type
//! ([`Record`]) and gets the corresponding typed slab.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr;
use core::sync::atomic::AtomicU64;

use crate::frame::slab::Slab;
use crate::platform::Platform;
use crate::sync::Mutex;

use super::Memory;
use super::named::Records;

/// The number of a record type. Records of the first [`DEFERRED_KINDS`] may wait for a grace
/// period.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RecordKind {
    Vma,
    AnonGroup,
    KernelArea,
    PageTable,
    CpuCounts,
    Object,
    PageIndexNode,
    PinCount,
    Userfault,
    UserfaultNotice,
    PageRead,
    DetachedBatch,
}

/// The number of record kinds that may wait for a grace period.
pub(crate) const DEFERRED_KINDS: usize = RecordKind::KernelArea as usize + 1;
const KINDS: usize = RecordKind::DetachedBatch as usize + 1;

impl RecordKind {
    const ALL: [Self; KINDS] = [
        Self::Vma,
        Self::AnonGroup,
        Self::KernelArea,
        Self::PageTable,
        Self::CpuCounts,
        Self::Object,
        Self::PageIndexNode,
        Self::PinCount,
        Self::Userfault,
        Self::UserfaultNotice,
        Self::PageRead,
        Self::DetachedBatch,
    ];

    /// The slab of the kind. Kinds that calls and faults of one program allocate frequently have
    /// magazines.
    const fn new_slab<P: Platform>(self) -> Slab<Opaque, P> {
        match self {
            Self::Vma => Slab::with_magazine(0),
            Self::AnonGroup => Slab::with_magazine(1),
            Self::PageTable => Slab::with_magazine(2),
            Self::PageIndexNode => Slab::with_magazine(3),
            Self::KernelArea
            | Self::CpuCounts
            | Self::Object
            | Self::PinCount
            | Self::Userfault
            | Self::UserfaultNotice
            | Self::PageRead
            | Self::DetachedBatch => Slab::new(),
        }
    }
}

/// A type with a slab of its own.
///
/// # Safety
/// 1. No other type has the same kind.
pub(crate) unsafe trait Record: Sized {
    /// The number of its slab.
    const KIND: RecordKind;
}

/// A record whose type is known only to a higher layer.
pub(crate) struct Opaque;

/// One slab for each kind.
pub(super) struct Slabs<P: Platform>([Slab<Opaque, P>; KINDS]);

impl<P: Platform> Slabs<P> {
    pub(super) fn new() -> Self {
        Self(RecordKind::ALL.map(RecordKind::new_slab))
    }
}

impl<P: Platform> Memory<P> {
    /// The slab of a type.
    #[inline(always)]
    pub(crate) fn slab<T: Record>(&self) -> &Slab<T, P> {
        let slab = ptr::from_ref(&self.slabs.0[T::KIND as usize]);
        // SAFETY: a slab is the same in memory whatever it holds (`repr(C)`, and no field is of the
        // objects' type). All records in this slab were allocated through this method and, by
        // obligation 1 of `Record`, have exactly this type.
        unsafe { &*slab.cast::<Slab<T, P>>() }
    }

    /// All slabs, for uses that need no type.
    pub(crate) fn slabs(&self) -> impl Iterator<Item = &Slab<Opaque, P>> {
        self.slabs.0.iter()
    }
}

/// The anchor of a layer's records of one type.
pub(crate) struct Anchor<P: Platform> {
    pub(crate) records: Mutex<P::SpinLock, Records>,
    /// The last identity that a record received.
    pub(crate) last_identity: AtomicU64,
    /// The number of records that have left the list but are kept by weak handles.
    pub(crate) kept: AtomicU64,
}

impl<P: Platform> Anchor<P> {
    pub(super) const fn new() -> Self {
        Self {
            records: Mutex::new(Records::new()),
            last_identity: AtomicU64::new(0),
            kept: AtomicU64::new(0),
        }
    }
}
