//! Seals: permanently forbidden changes of an object (`fcntl(2)`, `F_ADD_SEALS`).

use core::sync::atomic::{AtomicU32, Ordering};

use bitflags::bitflags;

use crate::addr::{PAGE_SIZE, PageRange};
use crate::error::Error;
use crate::platform::Platform;

use super::{Object, ObjectState, pages};
use crate::collections::page_tree::PAGE_LIMIT;

bitflags! {
    /// Permanently forbidden changes of an object; the bits are those of Linux's `F_SEAL_*`.
    ///
    /// ```
    /// use bindery::{Error, Object, Platform, Seals};
    ///
    /// /// Makes a memfd safe to receive: its size is fixed from here on.
    /// fn fix_size<P: Platform>(object: &Object<'_, P>) -> Result<(), Error> {
    ///     object.add_seals(Seals::SHRINK | Seals::GROW)
    /// }
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct Seals: u32 {
        /// No further seal can be added (`F_SEAL_SEAL`).
        const SEAL = 1 << 0;
        /// The object cannot become smaller (`F_SEAL_SHRINK`).
        const SHRINK = 1 << 1;
        /// The object cannot become larger (`F_SEAL_GROW`).
        const GROW = 1 << 2;
        /// The content cannot change (`F_SEAL_WRITE`).
        const WRITE = 1 << 3;
        /// The content can change only through existing mappings (`F_SEAL_FUTURE_WRITE`).
        const FUTURE_WRITE = 1 << 4;
        /// The execute permission cannot change (`F_SEAL_EXEC`). Only recorded: the embedder, which
        /// owns the file's mode, must keep the mode unchanged and add the seals that Linux adds for
        /// an executable file ([`Seals::SHRINK`], [`Seals::GROW`], [`Seals::WRITE`],
        /// [`Seals::FUTURE_WRITE`]).
        const EXECUTE = 1 << 5;
    }
}

impl Seals {
    /// Both seals that forbid new writes.
    const WRITING: Self = Self::WRITE.union(Self::FUTURE_WRITE);
}

/// Whether seals can be added to a new object.
///
/// ```
/// use bindery::{Accounting, Error, Memory, Object, Platform, Sealing};
///
/// /// `memfd_create(2)` with `MFD_ALLOW_SEALING`.
/// fn memfd<P: Platform>(memory: &Memory<P>) -> Result<Object<'_, P>, Error> {
///     memory.shared_memory(0, Sealing::Allowed, Accounting::PerPage)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Sealing {
    /// Seals can be added (`MFD_ALLOW_SEALING`).
    Allowed,
    /// No seals can be added: the object is created with [`Seals::SEAL`].
    #[default]
    Forbidden,
}

impl Sealing {
    /// The seals of a new object.
    pub(super) fn seals(self) -> Seals {
        match self {
            Self::Allowed => Seals::empty(),
            Self::Forbidden => Seals::SEAL,
        }
    }
}

/// The seals, and the number of shared mappings that block [`Seals::WRITE`].
pub(super) struct SealState {
    seals: AtomicU32,
    /// The number of shared mappings that are or may become writable; [`DENIED`] once no more are
    /// allowed.
    writable: AtomicU32,
}

/// No shared mapping may be writable from now on.
const DENIED: u32 = 1 << 31;

impl SealState {
    pub(super) const fn new(seals: Seals) -> Self {
        Self { seals: AtomicU32::new(seals.bits()), writable: AtomicU32::new(0) }
    }

    pub(super) fn get(&self) -> Seals {
        Seals::from_bits_truncate(self.seals.load(Ordering::Acquire))
    }

    /// Fails if one of `seals` is set.
    pub(super) fn forbid(&self, seals: Seals) -> Result<(), Error> {
        if self.get().intersects(seals) { Err(Error::SealForbids) } else { Ok(()) }
    }

    /// Fails if the content may not be changed from outside mappings.
    pub(super) fn forbid_writing(&self) -> Result<(), Error> {
        self.forbid(Seals::WRITING)
    }

    /// Counts one more writable shared mapping.
    pub(super) fn writable_added(&self) {
        self.writable.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn writable_removed(&self) {
        self.writable.fetch_sub(1, Ordering::Release);
    }

    /// The number of writable shared mappings.
    pub(crate) fn writable(&self) -> u32 {
        self.writable.load(Ordering::Relaxed) & !DENIED
    }

    /// Forbids writable shared mappings from now on; fails if one exists.
    fn deny_writable(&self) -> Result<(), Error> {
        let denied = self.writable.compare_exchange(0, DENIED, Ordering::AcqRel, Ordering::Relaxed);
        denied.map(|_| ()).map_err(|_| Error::Busy)
    }

    fn allow_writable(&self) {
        self.writable.fetch_and(!DENIED, Ordering::Release);
    }
}

/// Blocks [`Seals::WRITE`] until the writable mapping is inserted and itself blocks the seal.
pub(crate) struct WritableMapping<'a>(&'a SealState);

impl Drop for WritableMapping<'_> {
    fn drop(&mut self) {
        self.0.writable_removed();
    }
}

impl ObjectState {
    /// Admits a writable shared mapping, or refuses it because of a seal. A mere check of the seals
    /// would not suffice:
    /// 1. CPU A is about to map the object and sees no seal.
    /// 2. CPU B adds [`Seals::WRITE`], because the object has no mapping.
    /// 3. CPU A maps the object and writes.
    pub(crate) fn admit_writable(&self) -> Result<WritableMapping<'_>, Error> {
        self.seals.forbid_writing()?;
        let admit = |count: u32| (count & DENIED == 0).then_some(count + 1);
        let admitted = self.seals.writable.fetch_update(Ordering::AcqRel, Ordering::Relaxed, admit);
        admitted.map(|_| WritableMapping(&self.seals)).map_err(|_| Error::SealForbids)
    }
}

impl ObjectState {
    /// The number of bytes, of `length`, that [`Seals::GROW`] allows to be written at `offset`.
    /// Linux writes page by page and stops at the first piece that would extend past the end.
    pub(super) fn within_seal(&self, offset: u64, length: usize) -> Result<usize, Error> {
        let size = self.size();
        if !self.seals.get().contains(Seals::GROW) || offset + length as u64 <= size {
            return Ok(length);
        }
        let end = size - size % PAGE_SIZE;
        match end.checked_sub(offset) {
            Some(part) if part > 0 => Ok(length.min(part as usize)),
            _ => Err(Error::SealForbids),
        }
    }
}

impl<P: Platform> Object<'_, P> {
    /// The seals that were added so far; none for files (Linux: `F_GET_SEALS`).
    ///
    /// Context: any.
    pub fn seals(&self) -> Seals {
        self.state().seals.get()
    }

    /// Whether new writable shared mappings are refused.
    ///
    /// Context: any.
    pub fn is_sealed_for_writing(&self) -> bool {
        self.seals().intersects(Seals::WRITING)
    }

    /// Adds seals (Linux: `fcntl(2)` with `F_ADD_SEALS`).
    ///
    /// Context: may sleep. Complexity: constant; for [`Seals::WRITE`] linear in the resident pages.
    ///
    /// # Errors
    /// [`Error::Invalid`] for unknown bits and for files; [`Error::SealForbids`] if [`Seals::SEAL`]
    /// is set; [`Error::Busy`] for [`Seals::WRITE`] while a writable shared mapping exists or pages
    /// are pinned. On an error, no seal is added.
    pub fn add_seals(&self, seals: Seals) -> Result<(), Error> {
        let object = self.state();
        if seals.bits() & !Seals::all().bits() != 0
            || !object.is_shared_memory()
            || object.is_secret()
        {
            return Err(Error::Invalid);
        }
        object.changes.with_write(self.memory.platform(), || {
            object.seals.forbid(Seals::SEAL)?;
            let had = object.seals.get();
            if seals.contains(Seals::WRITE) && !had.contains(Seals::WRITE) {
                object.seals.deny_writable()?;
                if let Err(error) = self.refuse_pinned() {
                    object.seals.allow_writable();
                    return Err(error);
                }
            }
            object.seals.seals.fetch_or(seals.bits(), Ordering::Release);
            Ok(())
        })
    }

    /// Fails if a pinned page may be written without the page tables.
    fn refuse_pinned(&self) -> Result<(), Error> {
        let (memory, object) = (self.memory, self.state());
        // A page is pinned for writing only through a writable shared mapping, and no new one can
        // be created.
        object.invalidate_lock.with_write(memory.platform(), |_| {
            let all = PageRange { first: 0, end: PAGE_LIMIT };
            let pinned = pages::any_folio(memory, object, all, |folio| {
                memory.frames.folio(folio).pins() > 0
            });
            if pinned { Err(Error::Busy) } else { Ok(()) }
        })
    }
}
