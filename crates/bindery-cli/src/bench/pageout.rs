//! The extra parts of `pageout`: a swap device without latency, and pages that reach it.

use bindery::addr::PAGE_SIZE;
use bindery::{Memory, SwapDevice, SwapRequest};
use bindery_hosted::{Machine, Walk};

use super::floor::Geometry;
use super::workload::{Call, Effort, Script, Workload, range};
use crate::size::{FolioSize, GIB, MIB, show_bytes};

/// Bytes that are swapped out at a time.
pub const DATA: u64 = 64 * MIB;

/// A device that completes at once and stores nothing, so that the remaining work is the removal of
/// pages from page tables. No page is swapped in from it.
struct Sink;

impl<A: Walk> SwapDevice<Machine<A>> for Sink {
    fn slots(&self) -> u64 {
        2 * DATA / PAGE_SIZE
    }

    fn submit(&self, memory: &Memory<Machine<A>>, request: SwapRequest) {
        memory.complete_swap_request(request, Ok(()));
    }
}

/// Turns the device on.
///
/// # Errors
/// If the engine refuses it.
pub fn swap_on<A: Walk>(memory: &Memory<Machine<A>>) -> Result<(), String> {
    let area = memory.swap_on_device(&Sink, 0);
    area.map(drop).map_err(|error| format!("cannot turn the swap device on: {error:?}"))
}

/// System 3: written memory is swapped out and then unmapped while it is in swap.
pub fn script(folio: FolioSize, geometry: Geometry) -> Script {
    let memory = range(GIB, DATA);
    let variant =
        format!("{} at 1 GiB, MADV_PAGEOUT to a device that takes no time", show_bytes(DATA));
    let mut script = Script::new(Workload::Pageout, variant, folio, geometry);
    script.effort = Effort { turns: 10, repeats: 2 };
    script.untimed(Call::Map(memory));
    script.untimed(Call::Advise(memory));
    script.untimed(Call::Write(memory));
    script.timed("pageout", Call::PageOut(memory));
    script.timed("munmap, swapped", Call::Unmap(memory));
    script
}
