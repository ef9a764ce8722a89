//! Calls on the kernel's own mappings.

use bindery::addr::{Frame, PAGE_SHIFT, PAGE_SIZE, PhysAddr, VirtAddr, VirtRange};
use bindery::arch::{Arch, MemoryType, Permissions};
use bindery::{KernelMap, KernelMapError, UnmapTime, VmallocOptions, VmapOptions};
use bindery_hosted::Walk;

use super::Extent;
use super::meter::Meter;
use crate::size::{GIB, MIB, show_bytes};

/// # Errors
/// A call that failed, by name.
pub fn measure<A: Walk>(meter: &mut Meter<'_, A>, extent: &Extent) -> Result<(), String> {
    let top = PAGE_SHIFT + <A as Arch>::INDEX_BITS * u32::from(A::LEVELS);
    let arena = VirtRange::from_len(VirtAddr(u64::MAX << (top - 1)), 8 * GIB)
        .ok_or("the kernel's half has no 8 GiB")?;
    let map =
        KernelMap::new(meter.memory, arena).map_err(|error| format!("a kernel map: {error}"))?;
    for size in [MIB, extent.dense] {
        for (options, pieces) in
            [(VmallocOptions::default(), "base pages"), (VmallocOptions::huge(), "huge pieces")]
        {
            let name = format!("{} in {pieces}", show_bytes(size));
            let at = meter.measure("vmalloc", &name, || map.vmalloc(size, &options))?;
            let middle = VirtRange::from_len(VirtAddr(at.0 + PAGE_SIZE), size / 2);
            let middle = middle.ok_or("a range")?;
            meter.measure("protect a part", &name, || map.protect(middle, Permissions::READ))?;
            let larger = size + 2 * MIB;
            let at =
                meter.measure("vrealloc, larger", &name, || map.vrealloc(at, larger, &options))?;
            let at =
                meter.measure("vrealloc, smaller", &name, || map.vrealloc(at, MIB, &options))?;
            let at = map.vrealloc(at, size, &options).map_err(|error| error.to_string())?;
            meter.measure("vfree", &name, || map.vfree(at))?;
            purge(meter, &map, &name)?;
        }
        vmap(meter, &map, size)?;
    }
    Ok(())
}

fn purge<A: Walk>(
    meter: &mut Meter<'_, A>,
    map: &KernelMap<'_, super::platform::Measured<A>>,
    name: &str,
) -> Result<(), String> {
    meter.measure("purge", name, || {
        map.purge();
        Ok::<(), KernelMapError>(())
    })
}

/// A list of single pages that do not follow each other, and a device.
fn vmap<A: Walk>(
    meter: &mut Meter<'_, A>,
    map: &KernelMap<'_, super::platform::Measured<A>>,
    size: u64,
) -> Result<(), String> {
    let cannot = |error: KernelMapError| format!("pages for a list: {error}");
    let owner = map.vmalloc(size, &VmallocOptions::default()).map_err(cannot)?;
    let frame = |page: u64| {
        let physical = map.physical(VirtAddr(owner.0 + (page << PAGE_SHIFT)));
        physical.map(|physical| Frame((physical.0 >> PAGE_SHIFT) as u32))
    };
    let pages: Option<Vec<_>> = (0..size >> PAGE_SHIFT).rev().map(frame).collect();
    let pages = pages.ok_or("a page of an area is not mapped")?;
    let name = format!("{} of single pages", show_bytes(size));
    let at = meter.measure("vmap", &name, || map.vmap(&pages, &VmapOptions::default()))?;
    meter.measure("vunmap", &name, || map.vunmap(at, UnmapTime::Now))?;
    map.vfree(owner).map_err(cannot)?;
    let name = format!("{} of a device", show_bytes(size));
    let device = PhysAddr(3 * GIB / 2);
    let at = meter.measure("ioremap", &name, || map.ioremap(device, size, MemoryType::Device))?;
    meter.measure("iounmap", &name, || map.iounmap(at))?;
    purge(meter, map, &name)
}
