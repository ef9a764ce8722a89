//! A swap device with errors, to test the effect of errors on programs (`swap-errors=N` on the
//! command line). The device keeps pages uncompressed in memory of its own. It fails every Nth
//! transfer to the device and every Nth from it.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bindery::addr::PAGE_SIZE;
use bindery::{
    Memory, Platform, SwapDevice, SwapDeviceError, SwapOperation, SwapRequest, VmallocOptions,
};

use crate::errno::Errno;
use crate::memory::Pages;
use crate::options;
use crate::platform::Machine;
use crate::sync::SleepingMutex;

const PAGE: usize = PAGE_SIZE as usize;

/// The device. The device completes each request at once, so nothing is in flight after a
/// submission.
pub struct Failing {
    content: SleepingMutex<Option<Pages>>,
    slots: AtomicU64,
    period: AtomicU64,
    reads: AtomicU64,
    writes: AtomicU64,
}

/// The only failing device.
pub static FAILING: Failing = Failing {
    content: SleepingMutex::new(None),
    slots: AtomicU64::new(0),
    period: AtomicU64::new(0),
    reads: AtomicU64::new(0),
    writes: AtomicU64::new(0),
};

impl Failing {
    /// The device with `slots` slots, if the command line asks for it.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn wanted(&'static self, slots: u64) -> Result<Option<&'static Self>, Errno> {
        let period = options::value("swap-errors").and_then(|number| number.parse().ok());
        let Some(period @ 1..) = period else { return Ok(None) };
        let length = usize::try_from(slots * PAGE_SIZE).map_err(|_| Errno::ENOMEM)?;
        let pages = Pages::new(length, &VmallocOptions::huge())?;
        *self.content.lock() = Some(pages);
        self.slots.store(slots, Relaxed);
        self.period.store(period, Relaxed);
        Ok(Some(self))
    }

    /// Frees the memory, if any, because the area was removed.
    pub fn forget(&self) {
        let content = self.content.lock().take();
        drop(content);
    }

    /// Whether the device performs this transfer.
    fn works(&self, operation: SwapOperation) -> bool {
        let count = match operation {
            SwapOperation::Read => &self.reads,
            SwapOperation::Write => &self.writes,
        };
        !(count.fetch_add(1, Relaxed) + 1).is_multiple_of(self.period.load(Relaxed))
    }
}

impl SwapDevice<Machine> for Failing {
    fn slots(&self) -> u64 {
        self.slots.load(Relaxed)
    }

    fn is_synchronous(&self) -> bool {
        true
    }

    fn submit(&self, memory: &Memory<Machine>, request: SwapRequest) {
        let mut result = Err(SwapDeviceError);
        if self.works(request.operation())
            && let Some(content) = &mut *self.content.lock()
        {
            let at = request.slot() as usize * PAGE;
            let slots = &mut content.bytes()[at..at + request.pages() as usize * PAGE];
            let frames = memory.platform().direct_map(request.frame());
            match request.operation() {
                // SAFETY: the frames are the request's until it is complete, and consecutive in the
                // direct map.
                SwapOperation::Read => unsafe { memory.platform().write_bytes(frames, slots) },
                // SAFETY: as above.
                SwapOperation::Write => unsafe { memory.platform().read_bytes(frames, slots) },
            }
            result = Ok(());
        }
        memory.complete_swap_request(request, result);
    }
}
