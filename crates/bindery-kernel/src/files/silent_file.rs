//! `/dev/silent`: a file whose pager answers stores only after an `ioctl`. It has a file system and a
//! limit for dirty pages of its own. Tests show by it which programs a device without answers stops
//! (`silent-file=yes` on the command line).

use alloc::sync::Arc;
use alloc::vec::Vec;

use bindery::{
    DirtyLimit, KeptWrite, Object, Pager, PagerError, ReadBuffer, StoredBytes, WriteRequest,
};

use crate::errno::{Errno, Outcome};
use crate::memory::memory;
use crate::platform::Machine;
use crate::sync::Mutex;

use super::attributes::{Attributes, Kind, Patience};
use super::memory::Regular;
use super::node::Node;
use super::segments::Segments;

/// The request of `ioctl` that fails all stores, those that wait and those to come: a number of our
/// own.
const FAIL: u32 = 0x5f00;

/// The most pages of the file that may be dirty.
static LIMIT: DirtyLimit = DirtyLimit::new(64);

/// The most stores that are kept. A sync has at most 32 under way.
const KEPT: usize = 64;

/// The storage.
struct Silent(Mutex<Device>);

struct Device {
    kept: Vec<KeptWrite>,
    fails: bool,
}

static SILENT: Silent = Silent(Mutex::new(Device { kept: Vec::new(), fails: false }));

impl Pager for Silent {
    /// Zeroes: nothing was ever stored.
    fn read(&self, _: u64, _: u64, _: &mut ReadBuffer<'_>) -> Result<(), PagerError> {
        Ok(())
    }

    fn begin_write(&self, request: WriteRequest<'_>) {
        let mut device = self.0.lock();
        if device.fails || device.kept.len() == device.kept.capacity() {
            drop(device);
            request.fail(PagerError::InputOutput);
        } else {
            device.kept.push(request.keep());
        }
    }

    fn write(&self, _: u64, _: u64, _: &[StoredBytes<'_>]) -> Result<(), PagerError> {
        Err(PagerError::NotSupported)
    }

    fn resize(&self, _: u64, _: u64) -> Result<(), PagerError> {
        Ok(())
    }

    fn removed(&self, _: u64) {}
}

/// Fails the stores that are kept, and all later ones.
fn fail() {
    let kept = {
        let mut device = SILENT.0.lock();
        device.fails = true;
        core::mem::take(&mut device.kept)
    };
    for write in kept {
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
