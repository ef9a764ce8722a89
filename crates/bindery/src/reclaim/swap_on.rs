//! Adds swap areas. The calls are in this module because they reclaim memory for the tables of
//! large areas.

use crate::Memory;
use crate::platform::Platform;
use crate::swap::{SwapArea, SwapDevice, SwapError, turn_on_once};

impl<P: Platform> Memory<P> {
    /// Adds a swap area of `slots` pages in compressed memory (Linux: `swapon(2)` of a zram
    /// device).
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// See [`SwapError`]; nothing has changed.
    pub fn swap_on(&self, slots: u64, priority: i16) -> Result<SwapArea, SwapError> {
        turn_area_on(self, slots, priority, None)
    }

    /// Adds a swap area on a device (Linux: `swapon(2)` of a partition or a file). Areas of both
    /// kinds may be on at once; slots come from those with the highest priority first. The device
    /// must be `'static`, because completions may arrive at any time.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// See [`SwapError`]; nothing has changed.
    pub fn swap_on_device(
        &self,
        device: &'static dyn SwapDevice<P>,
        priority: i16,
    ) -> Result<SwapArea, SwapError> {
        turn_area_on(self, device.slots(), priority, Some(device))
    }
}

fn turn_area_on<P: Platform>(
    memory: &Memory<P>,
    slots: u64,
    priority: i16,
    device: Option<&'static dyn SwapDevice<P>>,
) -> Result<SwapArea, SwapError> {
    let is_compressed = device.is_none();
    if cfg!(not(feature = "swap")) || is_compressed && cfg!(not(feature = "compression")) {
        return Err(SwapError::NotBuilt);
    }
    if slots == 0 || slots > 1 << 30 {
        return Err(SwapError::Size);
    }
    memory.retry(|| turn_on_once(memory, slots, priority, device))
}
