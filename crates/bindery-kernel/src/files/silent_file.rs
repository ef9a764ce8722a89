//! `/dev/silent`: a file whose pager answers stores only after an `ioctl`. It has its own file
//! system and limit for dirty pages. Tests use it to find the programs that a silent device blocks
//! (`silent-file=yes` on the command line). The stores of a thread that is killed fail.

use alloc::sync::Arc;
use alloc::vec::Vec;

use bindery::{
    DirtyLimit, KeptWrite, Object, Pager, PagerError, Platform, ReadBuffer, StoredBytes,
    WriteRequest,
};

use crate::disk;
use crate::errno::{Errno, Outcome};
use crate::kernel_lock;
use crate::memory::memory;
use crate::platform::Machine;
use crate::sync::Mutex;

use super::attributes::{Attributes, Kind, Patience};
use super::memory::Regular;
use super::node::Node;
use super::segments::Segments;

/// The request of `ioctl` that fails all stores, pending and future. The number is our own.
const FAIL: u32 = 0x5f00;

/// The maximum number of dirty pages of the file.
static LIMIT: DirtyLimit = DirtyLimit::new(64);

/// The maximum number of pending stores. A sync has at most 32 in flight.
const KEPT: usize = 64;

/// The storage.
struct Silent(Mutex<Device>);

struct Device {
    /// Each with the thread that requested it.
    kept: Vec<(u32, KeptWrite)>,
    fails: bool,
}

static SILENT: Silent = Silent(Mutex::new(Device { kept: Vec::new(), fails: false }));

impl Pager for Silent {
    /// The file reads as zeroes, because nothing was ever stored.
    fn read(&self, _: u64, _: u64, _: &mut ReadBuffer<'_>) -> Result<(), PagerError> {
        Ok(())
    }

    fn begin_write(&self, request: WriteRequest<'_>) {
        kernel_lock::inside(|| {
            let mut device = self.0.lock();
            if device.fails || device.kept.len() == device.kept.capacity() {
                drop(device);
                request.fail(PagerError::InputOutput);
            } else {
                device.kept.push((Machine.thread(), request.keep()));
            }
        });
    }

    fn write(&self, _: u64, _: u64, _: &[StoredBytes<'_>]) -> Result<(), PagerError> {
        Err(PagerError::NotSupported)
    }

    fn resize(&self, _: u64, _: u64) -> Result<(), PagerError> {
        Ok(())
    }

    fn removed(&self, _: u64) {}
}

/// Fails all pending stores, and all later ones.
fn fail() {
    SILENT.0.lock().fails = true;
    fail_some(|_| true);
}

/// Fails the pending requests of a thread that is about to be killed, or ends. The core
/// continues once the pager has answered, and only the pager knows that the device no longer uses
/// the memory.
pub fn give_up_silent(thread: u32) {
    disk::give_up(thread);
    fail_some(|asker| asker == thread);
}

/// Fails all pending requests of a silent device, because the machine ends.
pub fn end_silence() {
    disk::end_silence();
    fail();
}

fn fail_some(is_failed: impl Fn(u32) -> bool) {
    loop {
        // The request leaves the list first, so that the lock is not held when its answer wakes
        // threads.
        let write = {
            let kept = &mut SILENT.0.lock().kept;
            let Some(at) = kept.iter().position(|(asker, _)| is_failed(*asker)) else { return };
            kept.swap_remove(at).1
        };
        if let Ok(request) = memory().resume_write(write) {
            request.fail(PagerError::InputOutput);
        }
    }
}

/// The node.
pub struct SilentFile(Arc<Regular>);

impl SilentFile {
    /// The file, empty.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new() -> Result<Arc<Self>, Errno> {
        SILENT.0.lock().kept.reserve_exact(KEPT);
        let system = memory().file_system_within(&SILENT, &LIMIT);
        let object = system.file(1, 0).map_err(|_| Errno::ENOMEM)?;
        Ok(Arc::new(Self(Regular::of(object, 0o600)?)))
    }
}

impl Node for SilentFile {
    fn kind(&self) -> Kind {
        Kind::Regular
    }

    fn attributes(&self) -> Attributes {
        self.0.attributes()
    }

    fn read(&self, at: u64, into: &mut [u8], patience: Patience) -> Result<usize, Errno> {
        self.0.read(at, into, patience)
    }

    fn write(&self, at: u64, from: &[u8], patience: Patience) -> Result<usize, Errno> {
        self.0.write(at, from, patience)
    }

    fn write_from(&self, at: u64, from: &Segments, patience: Patience) -> Option<Outcome> {
        self.0.write_from(at, from, patience)
    }

    fn object(&self) -> Option<&Object<'static, Machine>> {
        self.0.object()
    }

    fn control(&self, request: u32, _: u64) -> Outcome {
        if request != FAIL {
            return Err(Errno::ENOTTY);
        }
        fail();
        Ok(0)
    }
}
