//! [`FileSystem`]: finds the object of a file by its number.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::fmt;
use core::ptr::NonNull;

use crate::Memory;
use crate::error::Error;
use crate::memory::{DirtyLimit, Name};
use crate::platform::Platform;

use super::backing::Backing;
use super::create::add;
use super::lent::Lent;
use super::registry::{Found, Registry};
use super::seals::Seals;
use super::weak::WeakObject;
use super::{Object, Pager};

/// The files of a pager, each with at most one object: the core's view of a mounted file system
/// (Linux: a superblock and its inodes, whose `i_mapping` is the object). Copies denote the same
/// file system; each call of [`Memory::file_system`] creates another file system with its own
/// objects.
///
/// ```
/// use bindery::{Error, FileSystem, Platform};
///
/// /// Two opens of a file share its pages.
/// fn open_twice<P: Platform>(disk: FileSystem<'_, P>) -> Result<(), Error> {
///     let one = disk.file(7, 0x1000)?;
///     let other = disk.file(7, 0x1000)?;
///     assert_eq!(one.identity(), other.identity());
///     drop((one, other));
///     assert!(disk.find(7).is_none()); // its pages are saved, and `Pager::removed` was called
///     Ok(())
/// }
/// ```
///
/// A file system does not outlive its pager, so no later pager at the same address gets its
/// objects:
///
/// ```compile_fail,E0597
/// # use bindery::{FileSystem, Memory, Pager, Platform};
/// fn mount<'m, P: Platform, D: Pager>(memory: &'m Memory<P>, disk: D) -> FileSystem<'m, P> {
///     let borrowed: &'m dyn Pager = &disk;
///     memory.file_system(borrowed)
/// }
/// ```
pub struct FileSystem<'m, P: Platform> {
    memory: &'m Memory<P>,
    pager: &'m dyn Pager,
    /// The number of the number space; not 0.
    number: u64,
    dirty_limit: Option<&'m DirtyLimit>,
    /// Whether the pager and the limit exist forever.
    lasts: bool,
}

impl<P: Platform> Memory<P> {
    /// Creates a file system whose files are stored by `pager`, which outlives the file system and
    /// all objects of its files.
    ///
    /// Context: any.
    pub fn file_system<'m>(&'m self, pager: &'m dyn Pager) -> FileSystem<'m, P> {
        let number = self.new_identity();
        FileSystem { memory: self, pager, number, dirty_limit: None, lasts: false }
    }

    /// Like [`Memory::file_system`], with a limit for the dirty pages of its files in addition to
    /// the limit for all files ([`Memory::dirty_limit`]). The limit also outlives the objects of
    /// its files. Two file systems with the same limit count together, but each waits only for its
    /// own stores. Passing the memory's own limit adds no second limit.
    ///
    /// Context: any.
    pub fn file_system_within<'m>(
        &'m self,
        pager: &'m dyn Pager,
        dirty_limit: &'m DirtyLimit,
    ) -> FileSystem<'m, P> {
        // The limit for all files already counts the pages.
        let is_own = !core::ptr::eq(dirty_limit, self.dirty_limit());
        FileSystem { dirty_limit: is_own.then_some(dirty_limit), ..self.file_system(pager) }
    }

    /// As [`Memory::file_system_within`], for a pager and a limit that exist forever. Reclaim, which
    /// has no handle to a file, may then store dirty pages: it asks the pager for up to eight
    /// batches of each limit at a time, waits for none of them, and frees the pages once they are
    /// stored. Without this, dirty pages stay in memory until a writer finds no room, or the
    /// embedder stores them ([`Object::sync`], [`FileSystem::write_back`]).
    ///
    /// The thread that reclaims calls [`Pager::begin_write`], without locks, in any call that may
    /// find no memory. So the method must not wait for its device, and should need no memory that
    /// it has not reserved. A thread that works for the pager must not enter it again, which the
    /// platform reports ([`Platform::works_for_pager`]).
    ///
    /// ```
    /// use bindery::{DirtyLimit, FileSystem, Memory, Pager, Platform};
    ///
    /// static LIMIT: DirtyLimit = DirtyLimit::new(1024);
    ///
    /// /// The root file system, which is never unmounted.
    /// fn mount<'m, P: Platform>(
    ///     memory: &'m Memory<P>,
    ///     disk: &'static dyn Pager,
    /// ) -> FileSystem<'m, P> {
    ///     memory.lasting_file_system(disk, Some(&LIMIT))
    /// }
    /// ```
    ///
    /// Context: any.
    pub fn lasting_file_system<'m>(
        &'m self,
        pager: &'static dyn Pager,
        dirty_limit: Option<&'static DirtyLimit>,
    ) -> FileSystem<'m, P> {
        let system = match dirty_limit {
            Some(limit) => self.file_system_within(pager, limit),
            None => self.file_system(pager),
        };
        FileSystem { lasts: true, ..system }
    }
}

impl<'m, P: Platform> FileSystem<'m, P> {
    /// The object of file `number`: the existing one that has a handle or a mapping, or a new one
    /// of `size` bytes. The size of an existing object stays. (Linux: `iget_locked`.)
    ///
    /// While the last handle or mapping saves the file's pages, the object is still found. After
    /// that, the call waits until [`Pager::removed`] has returned. So `removed` must not call this
    /// for its own file or wait for a thread that does.
    ///
    /// Context: may sleep. Complexity: logarithmic in the number of objects of all file systems.
    ///
    /// # Errors
    /// As [`Memory::file`].
    pub fn file(&self, number: u64, size: u64) -> Result<Object<'m, P>, Error> {
        open(self, number, size)
    }

    pub(super) fn memory(&self) -> &'m Memory<P> {
        self.memory
    }

    /// The number of the file system's number space.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Finds the object of file `number`, if it has a handle or a mapping.
    ///
    /// Context: spins. Complexity: as [`FileSystem::file`].
    pub fn find(&self, number: u64) -> Option<Object<'m, P>> {
        let found = Registry::of(self.memory).find(Name { space: self.number, number })?;
        held(self.memory, found).ok()
    }
}

fn open<'m, P: Platform>(
    system: &FileSystem<'m, P>,
    number: u64,
    size: u64,
) -> Result<Object<'m, P>, Error> {
    let memory = system.memory;
    if let Some(found) = Registry::of(memory).find(Name { space: system.number, number }) {
        match held(memory, found) {
            Ok(object) => return Ok(object),
            Err(leaving) => leaving.wait_until_left(),
        }
    }
    // SAFETY: 1. the pager is lent for 'm, the lifetime of this handle. Other callers find the
    // object through a copy of the file system, which borrows the pager for as long as it and their
    // handles live.
    let pager = unsafe { Lent::pager(system.pager) };
    // SAFETY: 1. as the pager.
    let lend = |limit| unsafe { Lent::new(NonNull::from(limit)) };
    let dirty_limit = system.dirty_limit.map(lend);
    let (file_system, lasts) = (system.number, system.lasts);
    let backing = Backing::File { pager, file: number, file_system, dirty_limit, lasts };
    add(memory, backing, size, Seals::empty())
}

/// The handle to an object that was found, or an error if the object is leaving.
pub(super) fn held<P: Platform>(
    memory: &Memory<P>,
    found: Found,
) -> Result<Object<'_, P>, WeakObject<'_, P>> {
    match found {
        // SAFETY: 1. the search has made the caller a holder.
        Found::Held(state) => Ok(unsafe { Object::of_holder(memory, state) }),
        // SAFETY: 1. the search keeps the record for the caller.
        Found::Leaving(state) => Err(unsafe { WeakObject::of_record(memory, state) }),
    }
}

impl<P: Platform> Clone for FileSystem<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for FileSystem<'_, P> {}

impl<P: Platform> fmt::Debug for FileSystem<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileSystem").field("number", &self.number).finish_non_exhaustive()
    }
}
