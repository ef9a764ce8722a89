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
            // SAFETY: 1. the area of this loop; 2. and 3. nothing is kept in it.
            let protect = || unsafe { map.protect(middle, Permissions::READ) };
            meter.measure("protect a part", &name, protect)?;
            let larger = size + 2 * MIB;
            // SAFETY: 1. the area of this loop; 2. and 3. nothing is kept in it, and no other area
            // has its frames.
            let resize = |at, size| unsafe { map.vrealloc(at, size, &options) };
            let at = meter.measure("vrealloc, larger", &name, || resize(at, larger))?;
            let at = meter.measure("vrealloc, smaller", &name, || resize(at, MIB))?;
            let at = resize(at, size).map_err(|error| error.to_string())?;
            // SAFETY: as above.
            meter.measure("vfree", &name, || unsafe { map.vfree(at) })?;
            purge(meter, &map, &name)?;
        }
        vmap(meter, &map, size)?;
    }
    Ok(())
}

fn purge<A: Walk>(
    meter: &mut Meter<'_, A>,
    map: &KernelMap<'_, bindery_cli::measured::Measured<A>>,
    name: &str,
) -> Result<(), String> {
    meter.measure("purge", name, || {
        map.purge();
        Ok::<(), KernelMapError>(())
    })
}

/// A list of single pages that are not consecutive, and a device.
fn vmap<A: Walk>(
    meter: &mut Meter<'_, A>,
    map: &KernelMap<'_, bindery_cli::measured::Measured<A>>,
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
    // SAFETY: 1. made above; 2. nothing is accessed by it.
    meter.measure("vunmap", &name, || unsafe { map.vunmap(at, UnmapTime::Now) })?;
    // SAFETY: 1. made above; 2. nothing is kept in it; 3. the other area that had its frames was
    // freed.
    unsafe { map.vfree(owner) }.map_err(cannot)?;
    let name = format!("{} of a device", show_bytes(size));
    let device = PhysAddr(3 * GIB / 2);
    let at = meter.measure("ioremap", &name, || map.ioremap(device, size, MemoryType::Device))?;
    // SAFETY: 1. made above; 2. nothing is accessed by it.
    meter.measure("iounmap", &name, || unsafe { map.iounmap(at) })?;
    purge(meter, map, &name)
}
