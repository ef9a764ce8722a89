//! New objects: shared memory, System V segments, files.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::marker::PhantomData;
use core::ptr::NonNull;

use crate::Memory;
use crate::error::{Error, NoMemory};
use crate::platform::Platform;

use super::attachments::{Attachments, SegmentId, SegmentMark};
use super::backing::{Accounting, Backing, Secrecy};
use super::detached_batch;
use super::file_system::held;
use super::lent::Lent;
use super::pager::Pager;
use super::quota::Quota;
use super::read_ahead::ReadPattern;
use super::registry::{Found, Registry};
use super::seals::{Sealing, Seals};
use super::state::ObjectState;
use super::{MAX_SIZE, Object};

impl<P: Platform> Memory<P> {
    /// Creates shared memory of `size` bytes, all zeroes. Memory is allocated at the first access
    /// to each page. (Linux: `memfd_create(2)`, or the object of a shared anonymous mapping.)
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`Error::TooLarge`] above 2^63 - 1 bytes; [`Error::Overcommitted`] if the whole size counts
    /// as committed and exceeds the limit; [`Error::OutOfMemory`].
    pub fn shared_memory(
        &self,
        size: u64,
        sealing: Sealing,
        accounting: Accounting,
    ) -> Result<Object<'_, P>, Error> {
        let content = Secrecy::None;
        let backing = Backing::Memory { accounting, quota: None, segment: None, content };
        add(self, backing, size, sealing.seals())
    }

    /// Like [`Memory::shared_memory`], in a file system of limited size. The object's commitments
    /// are charged to `quota`, which outlives the object and all its holders. All objects that
    /// share a quota belong to this memory.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// As [`Memory::shared_memory`]; [`Error::NoSpace`] if the whole size counts as committed and
    /// the quota has no room for it.
    pub fn shared_memory_within<'m>(
        &'m self,
        quota: &'m Quota,
        size: u64,
        sealing: Sealing,
        accounting: Accounting,
    ) -> Result<Object<'m, P>, Error> {
        // SAFETY: 1. the quota is lent for 'm, the lifetime of all holders and of the last release.
        let quota = Some(unsafe { Lent::new(NonNull::from(quota)) });
        let content = Secrecy::None;
        let backing = Backing::Memory { accounting, quota, segment: None, content };
        add(self, backing, size, sealing.seals())
    }

    /// Creates empty secret memory. Its size can be set once, and it is mapped shared and locked.
    /// Only programs that map it see its content, through their own accesses and the copies that
    /// they request. Handles cannot read or write it ([`Error::Invalid`]); pins and copies by other
    /// processes are refused. (Linux: `memfd_secret(2)`.)
    ///
    /// The secrecy guards against the users of this library, not against the embedder's own bugs:
    /// the frames stay in [`Platform::direct_map`], whereas Linux removes them from its own map.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn secret_memory(&self) -> Result<Object<'_, P>, Error> {
        let (accounting, content) = (Accounting::None, Secrecy::Secret);
        let backing = Backing::Memory { accounting, quota: None, segment: None, content };
        add(self, backing, 0, Seals::SEAL)
    }

    /// Creates the memory of a System V segment of `size` bytes. `follower` is notified of its
    /// mappings, under the number in `id`, which [`crate::ObjectView::segment`] returns. `follower`
    /// outlives the object and all its holders.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// As [`Memory::shared_memory`].
    pub fn segment_memory<'m>(
        &'m self,
        follower: &'m dyn Attachments,
        id: SegmentId,
        size: u64,
        accounting: Accounting,
    ) -> Result<Object<'m, P>, Error> {
        // SAFETY: 1. as for a quota.
        let follower = unsafe { Lent::follower(follower) };
        let (segment, content) = (Some(SegmentMark { follower, id }), Secrecy::None);
        let backing = Backing::Memory { accounting, quota: None, segment, content };
        add(self, backing, size, Seals::SEAL)
    }

    /// Creates the object of a file of `size` bytes, which `pager` knows under the number `file`.
    /// Its pages are fetched when they are accessed or read. A file must have at most one object at
    /// a time, because two objects would each cache their own pages. [`Memory::file_system`]
    /// guarantees this.
    ///
    /// The pager outlives the object and all its holders, because the lifetimes of handles and
    /// address spaces cannot be shortened.
    ///
    /// ```
    /// # use bindery::{AddressSpace, FileAccess, MapObject, MapRequest, Object, Platform};
    /// fn keep<'long, P: Platform>(space: &AddressSpace<'long, P>, object: &Object<'long, P>) {
    ///     let source = MapObject { object, offset: 0, access: FileAccess::READ };
    ///     let _ = space.mmap_object(&MapRequest::default(), &source);
    /// }
    /// ```
    ///
    /// With an object of a shorter lifetime, this does not compile:
    ///
    /// ```compile_fail
    /// # use bindery::{AddressSpace, FileAccess, MapObject, MapRequest, Object, Platform};
    /// fn keep<'long, 'short, P: Platform>(
    ///     space: &AddressSpace<'long, P>, object: &Object<'short, P>,
    /// ) where 'long: 'short {
    ///     let source = MapObject { object, offset: 0, access: FileAccess::READ };
    ///     let _ = space.mmap_object(&MapRequest::default(), &source);
    /// }
    /// ```
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`Error::TooLarge`] above 2^63 - 1 bytes; [`Error::OutOfMemory`].
    pub fn file<'m>(
        &'m self,
        pager: &'m dyn Pager,
        file: u64,
        size: u64,
    ) -> Result<Object<'m, P>, Error> {
        // SAFETY: 1. as for a quota.
        let pager = unsafe { Lent::pager(pager) };
        let (file_system, dirty_limit, lasts) = (0, None, false);
        let backing = Backing::File { pager, file, file_system, dirty_limit, lasts };
        add(self, backing, size, Seals::empty())
    }
}

/// Creates an object of `size` bytes, or returns the existing one of that name. Commits the size if
/// `backing` accounts for it as a whole. May wait until an object of that name has left the
/// registry.
pub(super) fn add<P: Platform>(
    memory: &Memory<P>,
    backing: Backing,
    size: u64,
    seals: Seals,
) -> Result<Object<'_, P>, Error> {
    loop {
        let added = add_or_find(memory, backing, size, seals)?;
        match added.or_else(|found| held(memory, found)) {
            Ok(object) => return Ok(object),
            Err(leaving) => leaving.wait_until_left(),
        }
    }
}

fn add_or_find<P: Platform>(
    memory: &Memory<P>,
    backing: Backing,
    size: u64,
    seals: Seals,
) -> Result<Result<Object<'_, P>, Found>, Error> {
    if size > MAX_SIZE {
        return Err(Error::TooLarge);
    }
    memory.may_wait();
    let identity = Registry::of(memory).new_identity();
    let is_file = matches!(backing, Backing::File { .. });
    let state = memory.retry::<_, Error>(|| {
        if is_file {
            detached_batch::join_pool(memory)?;
        }
        let state = ObjectState::new(identity, backing, size, seals);
        let objects = memory.slab::<ObjectState>();
        let state = objects.allocate(&memory.frames, state);
        if state.is_none() && is_file {
            detached_batch::leave_pool(memory);
        }
        Ok(state.ok_or(NoMemory)?)
    })?;
    // SAFETY: 1. the object is freed here if it is not added, and otherwise by `last_holder`, once
    // the object has left and its name is free.
    if let Err(found) = unsafe { Registry::of(memory).add(state) } {
        if is_file {
            detached_batch::leave_pool(memory);
        }
        // SAFETY: the object came from this slab, and no other thread has seen it.
        unsafe { memory.slab::<ObjectState>().free(&memory.frames, state) };
        return Ok(Err(found));
    }
    let object = Object { memory, state, pattern: ReadPattern::Unknown, pager: PhantomData };
    // On failure the handle is dropped, which frees the object.
    object.state().promise_size(memory, size)?;
    Ok(Ok(object))
}
