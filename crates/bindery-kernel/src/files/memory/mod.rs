//! The file system in memory: regular files whose contents are objects of the core, symbolic links,
//! and directories ([`directory`](mod@directory)). `/proc`, `/sys` and `/dev` have their own
//! modules.

use alloc::sync::Arc;
use alloc::vec::Vec;

use bindery::{Access, Accounting, Object, Operation, Quota, Sealing};
use bindery_linux as linux;

use crate::errno::{Errno, Outcome, from_raw};
use crate::memory::memory;
use crate::platform::Machine;
use crate::process;
use crate::sync::SleepingMutex;

use super::attributes::{self, Attributes, Change, Kind, Patience};
use super::inode::{Common, new_number};
use super::manner::limited;
use super::node::{Node, file_access};
use super::segments::Segments;
use super::store::Store;
use super::transfer::{Step, by_steps};
use linux_raw_sys::general::{O_RDWR, O_TRUNC};

mod directory;

pub use directory::{ChangeGuard, Directory, directory};

/// The common quota of all regular files. Unlimited while the initramfs is unpacked.
static QUOTA: Quota = Quota::new(u64::MAX);

/// The share of frames that writers leave for faults, as a divisor.
const FAULT_RESERVE_SHARE: u64 = 64;

/// Sets the limit of the file system, once the initramfs is unpacked: half of memory (as Linux's
/// tmpfs), plus the present content.
pub fn begin() {
    let memory = memory();
    QUOTA.set_limit(QUOTA.used() + memory.total_frames() / 2);
    memory.set_fault_reserve(memory.total_frames() / FAULT_RESERVE_SHARE);
}

/// The size of the file system, and its free part, in pages.
pub fn size_and_free() -> (u64, u64) {
    (QUOTA.limit(), QUOTA.limit().saturating_sub(QUOTA.used()))
}

/// An object within the file system's quota, for the content of a device.
///
/// # Errors
/// `ENOMEM`.
pub fn new_content(size: u64) -> Result<Object<'static, Machine>, Errno> {
    memory()
        .shared_memory_within(&QUOTA, size, Sealing::Forbidden, Accounting::PerPage)
        .map_err(|_| Errno::ENOMEM)
}

/// A regular file.
pub struct Regular {
    common: Common,
    object: Object<'static, Machine>,
    /// A second handle to the object for the writer, locked during each write.
    writer: SleepingMutex<Object<'static, Machine>>,
    /// The storage of the content, and the file's number there.
    store: Option<(&'static dyn Store, u64)>,
}

/// The errno of an error of an object.
fn refused(error: bindery::Error) -> Errno {
    error.errno(Operation::Object).into()
}

/// Repeats a read of an object that ran out of memory, after memory was freed. A read needs memory
/// only for a page in swap. Like a fault on that page, the read waits instead of failing (Linux
/// retries an allocation of one page until the OOM killer has freed memory).
///
/// # Errors
/// The errors of `read`. `ENOMEM` only if the running thread is about to end, or if the victim may
/// be waiting for a lock of the running call.
#[inline]
fn with_room(mut read: impl FnMut() -> Result<usize, Errno>) -> Result<usize, Errno> {
    loop {
        match read() {
            Err(Errno::ENOMEM) if !process::memory_ran_out() => {}
            outcome => return outcome,
        }
    }
}

impl Regular {
    /// An empty file.
    pub fn new(mode: u32) -> Result<Arc<Self>, Errno> {
        Self::of(new_content(0)?, mode)
    }

    /// A file on an existing object (`memfd_create`).
    pub fn of(object: Object<'static, Machine>, mode: u32) -> Result<Arc<Self>, Errno> {
        Self::with_store(object, mode, None)
    }

    /// A file whose content a store keeps under this number.
    pub fn stored(
        object: Object<'static, Machine>,
        store: &'static dyn Store,
        number: u64,
    ) -> Result<Arc<Self>, Errno> {
        Self::with_store(object, 0, Some((store, number)))
    }

    fn with_store(
        object: Object<'static, Machine>,
        mode: u32,
        store: Option<(&'static dyn Store, u64)>,
    ) -> Result<Arc<Self>, Errno> {
        let common = Common::new(object.identity(), mode)?;
        let writer = SleepingMutex::new(object.clone());
        Ok(Arc::new(Self { common, object, writer, store }))
    }

    /// The number of bytes of a write for which the storage has room. The writer's lock is held.
    fn room(&self, at: u64, length: u64) -> Result<u64, Errno> {
        self.store.map_or(Ok(length), |(store, number)| store.reserve(number, at, length))
    }

    /// Copies from `at` on to a program's memory, page by page, from the pages themselves.
    fn copy_out(&self, at: u64, to: &Segments) -> Outcome {
        let total = to.total() as usize;
        let step = |done: usize| {
            let mut stopped = false;
            let count = with_room(|| {
                let (at, length) = (at + done as u64, total - done);
                let copied = self.object.read_with(at, length, |before, from, length| {
                    // SAFETY: the object has the bytes for us to read.
                    let count = unsafe { to.put(done + before, from, length) };
                    stopped = count < length;
                    count
                });
                copied.map_err(refused)
            })?;
            Ok(Step { count, fault: stopped.then_some(count) })
        };
        let fault_in = |done| to.fault_in(done as u64, Access::Write);
        Ok(by_steps(step, fault_in, |_| false)? as u64)
    }

    /// Reports to the storage how many of the reserved bytes a write has written.
    fn end_write(&self, at: u64, count: u64) {
        if let Some((store, number)) = self.store {
            store.end_write(number, if count > 0 { at + count } else { 0 });
        }
    }

    /// Copies a program's memory to `at` in the object of `writer`, which is locked, so that other
    /// writers see all of the write or nothing, even if the copy has to fault pages in.
    fn copy_in(&self, object: &Object<'static, Machine>, at: u64, from: &Segments) -> Outcome {
        match self.store {
            None => self.copy_all_in(object, at, from),
            Some(_) => self.copy_in_with_room(object, at, from),
        }
    }

    /// [`Regular::copy_in`], limited to the room in the storage.
    // Out of line: files in memory pay only a comparison.
    #[cold]
    fn copy_in_with_room(
        &self,
        object: &Object<'static, Machine>,
        at: u64,
        from: &Segments,
    ) -> Outcome {
        let room = self.room(at, from.total())?;
        let outcome = if room == from.total() {
            self.copy_all_in(object, at, from)
        } else {
            from.first(room).and_then(|first| self.copy_all_in(object, at, &first))
        };
        self.end_write(at, *outcome.as_ref().unwrap_or(&0));
        outcome
    }

    #[inline]
    fn copy_all_in(&self, object: &Object<'static, Machine>, at: u64, from: &Segments) -> Outcome {
        let total = from.total() as usize;
        let step = |done: usize| {
            let mut stopped = false;
            let copied = object.write_with(at + done as u64, total - done, |before, to, length| {
                // SAFETY: the object has the bytes for us to write.
                let count = unsafe { from.take(done + before, to, length) };
                stopped = count < length;
                count
            });
            let count = copied.map_err(refused)?;
            Ok(Step { count, fault: stopped.then_some(count) })
        };
        let fault_in = |done| from.fault_in(done as u64, Access::Read);
        let done = by_steps(step, fault_in, |_| false)?;
        if done > 0 {
            self.common.written();
        }
        Ok(done as u64)
    }

    fn opened(&self, flags: u32) -> linux::OpenFile<'static, Machine> {
        linux::OpenFile { object: self.object.clone(), access: file_access(flags) }
    }
}

impl Node for Regular {
    fn kind(&self) -> Kind {
        Kind::Regular
    }

    fn attributes(&self) -> Attributes {
        let pages = self.object.resident_pages() + self.object.swapped_pages();
        self.common.attributes(self.object.size(), pages * 8)
    }

    fn permissions(&self) -> (u32, (u32, u32)) {
        self.common.permissions()
    }

    fn sets_ids(&self) -> bool {
        attributes::sets_ids(self.common.mode())
    }

    fn change(&self, change: &Change) -> Result<(), Errno> {
        self.common.change(change);
        Ok(())
    }

    fn open(&self, flags: u32) -> Result<Option<Arc<dyn Node>>, Errno> {
        if flags & O_TRUNC != 0 {
            from_raw(linux::ftruncate(&self.opened(O_RDWR), 0))?;
            self.common.written();
        }
        Ok(None)
    }

    fn read(&self, at: u64, into: &mut [u8], _: Patience) -> Result<usize, Errno> {
        let at = i64::try_from(at).map_err(|_| Errno::EINVAL)?;
        let opened = self.opened(O_RDWR);
        with_room(|| Ok(from_raw(linux::pread(&opened, into, at))? as usize))
    }

    fn write(&self, at: u64, from: &[u8], _: Patience) -> Result<usize, Errno> {
        let at = i64::try_from(at).map_err(|_| Errno::EINVAL)?;
        let _writer = self.writer.lock();
        let room = self.room(at.cast_unsigned(), from.len() as u64)?;
        let from = &from[..room as usize];
        let count = from_raw(linux::pwrite(&self.opened(O_RDWR), from, at));
        self.end_write(at.cast_unsigned(), *count.as_ref().unwrap_or(&0));
        let count = count? as usize;
        self.common.written();
        Ok(count)
    }

    fn read_into(&self, at: u64, to: &Segments, _: Patience) -> Option<Outcome> {
        Some(self.copy_out(at, to))
    }

    fn write_from(&self, at: u64, from: &Segments, _: Patience) -> Option<Outcome> {
        Some(self.copy_in(&self.writer.lock(), at, from))
    }

    fn append_from(&self, from: &Segments) -> Option<Result<(u64, u64), Errno>> {
        let object = self.writer.lock();
        // Read under the lock, because the previous writer may have yielded the CPU before the file
        // grew.
        let at = object.size();
        let written = limited(self, at, from, |from| self.copy_in(&object, at, from));
        Some(written.map(|count| (at, count)))
    }

    fn object(&self) -> Option<&Object<'static, Machine>> {
        Some(&self.object)
    }

    fn links(&self) -> Option<&Common> {
        Some(&self.common)
    }

    fn is_seekable(&self) -> bool {
        !self.object.is_secret()
    }
}

/// A symbolic link.
pub struct Link {
    common: Common,
    target: Vec<u8>,
}

impl Link {
    /// A link to a path.
    pub fn new(target: &[u8]) -> Result<Arc<Self>, Errno> {
        Ok(Arc::new(Self { common: Common::new(new_number(), 0o777)?, target: target.into() }))
    }
}

impl Node for Link {
    fn kind(&self) -> Kind {
        Kind::Link
    }

    fn attributes(&self) -> Attributes {
        self.common.attributes(self.target.len() as u64, 0)
    }

    fn change(&self, change: &Change) -> Result<(), Errno> {
        self.common.change(change);
        Ok(())
    }

    fn target(&self) -> Result<Vec<u8>, Errno> {
        Ok(self.target.clone())
    }

    fn links(&self) -> Option<&Common> {
        Some(&self.common)
    }

    fn open(&self, _: u32) -> Result<Option<Arc<dyn Node>>, Errno> {
        Err(Errno::ELOOP)
    }
}
