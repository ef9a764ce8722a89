//! The calls for embedders: areas, devices, limits, usage.

use super::usage;
use super::{CompressedUsage, SwapArea, SwapDeviceError, SwapError, SwapRequest, SwapUsage};
use super::{turn_off, writeback};
use crate::Memory;
use crate::error::Error;
use crate::platform::Platform;

impl<P: Platform> Memory<P> {
    /// The number of free frames reserved for reclaim, which uses them to free others (Linux:
    /// `min_free_kbytes`); 0 while no area is on.
    ///
    /// Context: any.
    pub fn reserved_frames(&self) -> u64 {
        self.frames.reserve()
    }

    /// Sets the number of frames that compressed memory may use; initially half of the memory. If
    /// it already uses more, no page is swapped out to it until enough frames are freed.
    ///
    /// Context: spins.
    pub fn set_compressed_limit(&self, frames: u64) {
        self.swap.store.set_limit(frames);
    }

    /// The limit set by [`Memory::set_compressed_limit`], in frames.
    ///
    /// Context: spins.
    pub fn compressed_limit(&self) -> u64 {
        self.swap.store.limit()
    }

    /// The usage of compressed memory.
    ///
    /// Context: spins.
    pub fn compressed_usage(&self) -> CompressedUsage {
        self.swap.store.usage()
    }

    /// Stops the allocation of slots in the area, which is the first step of `swapoff(2)`. Once the
    /// call has returned, no slot is allocated, not even for a page that has kept its slots since
    /// it was last in swap. Two things may still make entries that refer to slots: `fork(2)` copies
    /// some, and a swap-out that runs beside this call uses the slots that it has allocated for the
    /// page table at hand. So [`Memory::swap_off`] may find the area in use after everything was
    /// swapped in once; the caller then repeats that.
    ///
    /// Context: spins. Complexity: one lock for each 512 slots of the area.
    pub fn stop_swapping_to(&self, area: &SwapArea) {
        if let Some(area) = self.swap.area(area.number) {
            area.stop();
        }
    }

    /// Resumes the allocation of slots in the area.
    ///
    /// Context: any.
    pub fn resume_swapping_to(&self, area: &SwapArea) {
        if self.swap.resume(area) {
            self.clock.exhausted.forget();
        }
    }

    /// Waits for the device and removes an area without taken slots. This is the last step of
    /// `swapoff(2)`, after [`Memory::stop_swapping_to`], [`AddressSpace::swap_in_area`] of each
    /// address space, and [`Memory::swap_in_objects`].
    ///
    /// [`AddressSpace::swap_in_area`]: crate::AddressSpace::swap_in_area
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`SwapError::InUse`] if a slot is taken: another address space or object uses it, or a
    /// concurrent fork has copied it. After a concurrent [`Memory::resume_swapping_to`], a call may
    /// also have allocated it. [`SwapError::NotThere`]. [`SwapError::Interrupted`].
    pub fn swap_off(&self, area: &SwapArea) -> Result<(), SwapError> {
        turn_off(self, area.number)
    }

    /// The swap areas.
    ///
    /// Context: spins. Complexity: linear in the clusters of 512 slots.
    pub fn swap_areas(&self) -> impl Iterator<Item = SwapArea> + '_ {
        self.swap.areas()
    }

    /// Counts the slots of all areas by their content. The call reads all cells, so no counters are
    /// maintained. A slot that changes during the call is counted in its state either before or
    /// after the change.
    ///
    /// Context: spins. Complexity: linear in the clusters of 512 slots and in the slots of clusters
    /// in use.
    pub fn swap_usage(&self) -> SwapUsage {
        usage::usage(self)
    }

    /// Sets the maximum number of pages that a fault reads from a swap device: 2^`order` (Linux:
    /// `vm.page-cluster`). Initially 3; with 0, a fault reads only its page. Compressed memory and
    /// synchronous devices have no read-around. More than 16 pages are never read.
    ///
    /// Context: any.
    pub fn set_page_cluster(&self, order: u8) {
        self.swap.set_page_cluster(order);
    }

    /// The order set by [`Memory::set_page_cluster`].
    ///
    /// Context: any.
    pub fn page_cluster(&self) -> u8 {
        self.swap.page_cluster()
    }

    /// Completes a request of a device, with its result. After an error, a page that was to be
    /// written stays in memory, and a read raises SIGBUS for the access that needed the page. The
    /// remaining work is done by a thread that waits for the page, by reclaim, or by
    /// [`Memory::finish_swap_writes`].
    ///
    /// The call acquires no lock except inside [`Platform::unpark`]. A driver that calls it in an
    /// interrupt handler needs an `unpark` that may be called there.
    ///
    /// Context: any. Constant time.
    pub fn complete_swap_request(&self, request: SwapRequest, result: Result<(), SwapDeviceError>) {
        writeback::complete(self, request, result);
    }

    /// Frees the folios that devices have written, unless they are needed again. The embedder may
    /// call this from a thread after completions; reclaim calls it, too. Returns the number of
    /// freed pages.
    ///
    /// Context: may sleep. Complexity: linear in the completed requests.
    #[inline]
    pub fn finish_swap_writes(&self) -> u64 {
        if self.swap.has_devices() { writeback::finish_writes(self, None) } else { 0 }
    }

    /// Waits until all writes, and all reads for which no thread waits, are complete, and frees the
    /// written folios.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`Error::Interrupted`] for a fatal signal; the writes continue.
    pub fn wait_for_swap_writes(&self) -> Result<(), Error> {
        writeback::wait_for_writes(self)
    }

    /// Discards free slots on the devices that request it
    /// ([`SwapDevice::discards`](crate::SwapDevice::discards)), in runs of 512. A run with a taken
    /// slot is left for later. Reclaim also discards slots; an embedder may call this from its own
    /// thread after large unmappings. Returns the number of discarded slots. The caller holds no
    /// lock of the core.
    ///
    /// Context: may sleep. Complexity: linear in the discarded runs.
    pub fn discard_free_slots(&self) -> u64 {
        self.swap.discard_free_slots(self)
    }
}
