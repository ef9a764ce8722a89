//! Calls on shared memory and files, and pins.

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::{
    Access, Accounting, Advice, Error, FileAccess, Growth, MapObject, MapRequest, Object, PinTime,
    Sealing, Sharing, SizeMode, SyncFlags,
};
use bindery_hosted::{MemoryFiles, Walk};

use super::Extent;
use super::meter::Meter;
use super::shapes::{AT, Space, map, new_space, range, request, touch, use_order};
use crate::size::{MIB, show_bytes};
use bindery_cli::measured::Measured;

/// Processes that map one object.
const PROCESSES: u64 = 8;

fn cannot(what: &'static str) -> impl Fn(Error) -> String {
    move |error| format!("{what}: {error}")
}

fn map_shared<'m, A: Walk>(
    space: &Space<'m, A>,
    object: &Object<'m, Measured<A>>,
    at: u64,
    length: u64,
) -> Result<(), String> {
    let request = MapRequest { sharing: Sharing::Shared, ..request(range(at, length)) };
    let access = FileAccess::READ | FileAccess::WRITE;
    let source = MapObject { object, offset: 0, access };
    space.mmap_object(&request, &source).map(|_| ()).map_err(cannot("mmap"))
}

/// # Errors
/// A call that failed, by name.
pub fn measure<'m, A: Walk>(
    meter: &mut Meter<'m, A>,
    files: &'m MemoryFiles,
    extent: &Extent,
) -> Result<(), String> {
    for order in [0, 9] {
        for policy in [meter.memory.shared_folio_policy(), meter.memory.file_folio_policy()] {
            policy.set(Order(9), if order == 9 { SizeMode::Always } else { SizeMode::Never });
        }
        let folio = show_bytes(PAGE_SIZE << order);
        let name = format!("{} in folios of {folio}", show_bytes(extent.dense));
        shared_memory(meter, extent.dense, &name)?;
        file(meter, files, extent.dense, &name)?;
        pins(meter, extent.dense, order, &name)?;
    }
    Ok(())
}

/// Shared memory of this size, all of it in memory.
fn allocated<'m, A: Walk>(
    meter: &Meter<'m, A>,
    bytes: u64,
) -> Result<Object<'m, Measured<A>>, String> {
    let object = meter
        .memory
        .shared_memory(bytes, Sealing::Allowed, Accounting::PerPage)
        .map_err(cannot("shared memory"))?;
    object.allocate(0, bytes, Growth::Forbidden).map_err(cannot("fallocate"))?;
    Ok(object)
}

fn shared_memory<'m, A: Walk>(
    meter: &mut Meter<'m, A>,
    bytes: u64,
    name: &str,
) -> Result<(), String> {
    let new = meter.memory.shared_memory(bytes, Sealing::Allowed, Accounting::PerPage);
    let object = new.map_err(cannot("shared memory"))?;
    meter.measure("fallocate", name, || object.allocate(0, bytes, Growth::Forbidden))?;
    meter.measure("fallocate, all there", name, || object.allocate(0, bytes, Growth::Forbidden))?;
    let space = new_space(meter)?;
    map_shared(&space, &object, AT, bytes)?;
    let at = VirtAddr(AT);
    meter.measure("mincore, no tables", name, || space.mincore(at, bytes, |_, _| ()))?;
    meter.measure("fault, shared memory", name, || space.fault(at, Access::Write))?;
    let mut buffer = vec![1; 4 << 20];
    meter.measure("read of 4 MiB", name, || object.read(0, &mut buffer))?;
    meter.measure("write of 4 MiB", name, || object.write(0, &buffer))?;
    meter.measure("punch a hole, not mapped", name, || object.punch_hole(bytes / 2, bytes / 2))?;
    drop(space);
    drop(object);

    let object = allocated(meter, bytes)?;
    let mut spaces = Vec::new();
    for _ in 0..PROCESSES {
        let space = new_space(meter)?;
        map_shared(&space, &object, AT, bytes)?;
        touch(&space, range(AT, bytes), PAGE_SIZE)?;
        spaces.push(space);
    }
    let by_all = format!("{name}, mapped by {PROCESSES}");
    if let Some(space) = spaces.first() {
        meter.measure("fork, shared memory", name, || space.fork().map(drop))?;
        meter.measure("MADV_COLLAPSE, shared memory", &by_all, || {
            space.madvise(at, bytes, Advice::Collapse)
        })?;
    }
    for space in &spaces {
        touch(space, range(AT, bytes), PAGE_SIZE)?;
    }
    meter.measure("punch a hole", &by_all, || object.punch_hole(MIB, bytes / 2))?;
    meter.measure("truncate", &by_all, || object.set_size(0))?;
    Ok(())
}

fn file<'m, A: Walk>(
    meter: &mut Meter<'m, A>,
    files: &'m MemoryFiles,
    bytes: u64,
    name: &str,
) -> Result<(), String> {
    let file = meter.memory.file(files, 1, bytes).map_err(cannot("a file"))?;
    let mut buffer = vec![0; 4 << 20];
    meter.measure("read of 4 MiB, not in memory", name, || file.read(0, &mut buffer))?;
    for offset in (0..bytes).step_by(buffer.len()) {
        file.read(offset, &mut buffer).map_err(cannot("read"))?;
    }
    meter.measure("sync, clean", name, || file.sync(0, u64::MAX))?;
    let space = new_space(meter)?;
    map_shared(&space, &file, AT, bytes)?;
    let at = VirtAddr(AT);
    meter.measure("fault, read of a file", name, || space.fault(at, Access::Read))?;
    meter.measure("fault, write to a file", name, || space.fault(at, Access::Write))?;
    touch(&space, range(AT, bytes), PAGE_SIZE)?;
    meter.measure("msync, all dirty", name, || space.msync(at, bytes, SyncFlags::SYNC))?;
    meter.measure("msync, clean", name, || space.msync(at, bytes, SyncFlags::SYNC))?;
    touch(&space, range(AT, bytes), 2 * PAGE_SIZE)?;
    meter.measure("sync, every second page dirty", name, || file.sync(0, u64::MAX))?;
    meter.measure("truncate, file", name, || file.set_size(bytes / 2 + 1))?;
    meter.measure("munmap, file", name, || space.munmap(at, bytes))?;
    meter.measure("close of a dirty file", name, || {
        file.write(0, &buffer)?;
        drop(file);
        Ok::<(), Error>(())
    })
}

fn pins<'m, A: Walk>(
    meter: &mut Meter<'m, A>,
    bytes: u64,
    order: u8,
    name: &str,
) -> Result<(), String> {
    let space = new_space(meter)?;
    use_order(&space, order);
    map(&space, range(AT, bytes))?;
    touch(&space, range(AT, bytes), PAGE_SIZE)?;
    let mut pins = Vec::new();
    let pin = |at: u64| space.pin(VirtAddr(at), 512, Access::Write, PinTime::Long);
    pins.push(meter.measure("pin", name, || pin(AT))?);
    // At most 32 folios: their copies take memory, too.
    let step = PAGE_SIZE << order;
    for at in (AT + step..AT + bytes).step_by(step as usize).take(31) {
        pins.push(pin(at).map_err(|error| format!("pin: {error}"))?);
    }
    meter.measure("fork, pinned folios", name, || space.fork().map(drop))?;
    meter.measure("unpin", name, || {
        pins.clear();
        Ok::<(), Error>(())
    })
}
