//! Memory of several shapes, and the calls that are made on each.

use bindery::addr::{Order, PAGE_SIZE, VirtAddr, VirtRange};
use bindery::{
    Access, AddressSpace, Advice, Error, FaultError, Limits, LockPages, Locking, MapRequest, Place,
    Protection, Remap, Resolved, SizeMode, SpaceOptions,
};
use bindery_hosted::Walk;
use bindery_linux::proc::{self, ClearRefs};

use super::Extent;
use super::meter::Meter;
use crate::size::{GIB, MIB, show_bytes};
use bindery_cli::measured::Measured;

/// An address space on the measured machine.
pub type Space<'m, A> = AddressSpace<'m, Measured<A>>;

/// The address of the measured mappings, a multiple of all spans except the root's.
pub const AT: u64 = GIB;
/// The span of one entry of level 2.
const TABLE: u64 = 2 * MIB;

pub const READ_WRITE: Protection = Protection::READ.union(Protection::WRITE);

/// The memory on which a call is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Shape {
    /// Sixteen base pages.
    Small,
    /// Folios of this order, one after the other.
    Dense { order: u8, bytes: u64 },
    /// One base page in each table.
    Sparse { bytes: u64 },
}

impl Shape {
    fn all(extent: &Extent) -> [Self; 5] {
        let dense = |order| Self::Dense { order, bytes: extent.dense };
        [Self::Small, dense(0), dense(4), dense(9), Self::Sparse { bytes: extent.sparse }]
    }

    fn range(self) -> VirtRange {
        let length = match self {
            Self::Small => 16 * PAGE_SIZE,
            Self::Dense { bytes, .. } | Self::Sparse { bytes } => bytes,
        };
        range(AT, length)
    }

    fn name(self) -> String {
        match self {
            Self::Small => "16 pages".to_owned(),
            Self::Dense { order, bytes } => {
                let folio = show_bytes(PAGE_SIZE << order);
                format!("{} in folios of {folio}", show_bytes(bytes))
            }
            Self::Sparse { bytes } => format!("{}, a page in each table", show_bytes(bytes)),
        }
    }

    fn step(self) -> u64 {
        if let Self::Sparse { .. } = self { TABLE } else { PAGE_SIZE }
    }

    fn order(self) -> u8 {
        if let Self::Dense { order, .. } = self { order } else { 0 }
    }

    /// Maps the shape and touches its pages.
    fn make<A: Walk>(self, space: &Space<'_, A>) -> Result<VirtRange, String> {
        let range = self.range();
        use_order(space, self.order());
        map(space, range)?;
        touch(space, range, self.step())?;
        Ok(range)
    }
}

/// Allows faults only folios of this order, besides base pages.
pub fn use_order<A: Walk>(space: &Space<'_, A>, order: u8) {
    for each in 1..=9 {
        let mode = if each == order { SizeMode::Always } else { SizeMode::Never };
        space.memory().folio_policy().set(Order(each), mode);
    }
}

pub fn range(at: u64, length: u64) -> VirtRange {
    VirtRange::from_len(VirtAddr(at), length).expect("it ends in user space")
}

/// A request for private memory at exactly this range.
pub fn request(range: VirtRange) -> MapRequest {
    MapRequest {
        length: range.len(),
        protection: READ_WRITE,
        place: Place::Fixed(range.start()),
        ..MapRequest::default()
    }
}

pub fn map<A: Walk>(space: &Space<'_, A>, range: VirtRange) -> Result<(), String> {
    space.mmap(&request(range)).map(|_| ()).map_err(|error| format!("mmap: {error}"))
}

/// Writes to a page in each `step` bytes, unless the previous fault has mapped it.
pub fn touch<A: Walk>(space: &Space<'_, A>, range: VirtRange, step: u64) -> Result<(), String> {
    let mut at = range.start();
    while at < range.end() {
        let next = VirtAddr(at.0 + step);
        at = match space.fault(at, Access::Write) {
            Ok(Resolved::New(new) | Resolved::Mapped(new)) => new.end().max(next),
            Ok(_) => next,
            Err(error) => return Err(format!("a touch of {at}: {error}")),
        };
    }
    Ok(())
}

pub fn new_space<'m, A: Walk>(meter: &Meter<'m, A>) -> Result<Space<'m, A>, String> {
    let space = AddressSpace::new(meter.memory, SpaceOptions::default())
        .map_err(|error| format!("an address space: {error}"))?;
    space.set_limits(&Limits { locking: Locking::Privileged, ..Limits::default() });
    // Invalidations are really sent.
    space.enter();
    Ok(space)
}

/// A call that is made on each shape.
struct Call<A: Walk> {
    name: &'static str,
    make: fn(&Space<'_, A>, VirtRange) -> Result<(), Error>,
    /// Whether the call would have to allocate a page for each missing one.
    fills: bool,
}

fn call<A: Walk>(
    name: &'static str,
    make: fn(&Space<'_, A>, VirtRange) -> Result<(), Error>,
) -> Call<A> {
    Call { name, make, fills: false }
}

fn filling<A: Walk>(
    name: &'static str,
    make: fn(&Space<'_, A>, VirtRange) -> Result<(), Error>,
) -> Call<A> {
    Call { name, make, fills: true }
}

/// Advice for all of the range.
macro_rules! advice {
    ($advice:ident) => {
        |space, range| space.madvise(range.start(), range.len(), Advice::$advice)
    };
}

fn moved<A: Walk>(space: &Space<'_, A>, range: VirtRange, off: u64) -> Result<(), Error> {
    // The target follows after a gap, at an address congruent modulo the largest span that the
    // range covers.
    let to = VirtAddr((range.end().0 + range.len()).next_multiple_of(GIB) + off);
    space.mremap(range.start(), range.len(), range.len(), Remap::To(to)).map(|_| ())
}

/// The range without its first and last page.
fn inside(range: VirtRange) -> VirtRange {
    let end = range.end().0 - PAGE_SIZE;
    let start = VirtAddr(range.start().0 + PAGE_SIZE);
    VirtRange::from_len(start, end - start.0).expect("the ranges have more than two pages")
}

fn calls<A: Walk>() -> Vec<Call<A>> {
    vec![
        call("munmap", |space, range| space.munmap(range.start(), range.len())),
        call("munmap, all but the edges", |space, range| {
            let inside = inside(range);
            space.munmap(inside.start(), inside.len())
        }),
        call("mmap over it", |space, range| space.mmap(&request(range)).map(|_| ())),
        call("mprotect, read-only", |space, range| {
            space.mprotect(range.start(), range.len(), Protection::READ)
        }),
        call("mprotect, none", |space, range| {
            space.mprotect(range.start(), range.len(), Protection::empty())
        }),
        call("mremap, congruent", |space, range| moved(space, range, 0)),
        call("mremap, off by 64 KiB", |space, range| moved(space, range, 64 << 10)),
        call("mremap, off by 4 KiB", |space, range| moved(space, range, PAGE_SIZE)),
        call("mremap, half goes", |space, range| {
            space.mremap(range.start(), range.len(), range.len() / 2, Remap::InPlace).map(|_| ())
        }),
        call("MADV_DONTNEED", advice!(DontNeed)),
        call("MADV_FREE", advice!(Free)),
        call("MADV_COLD", advice!(Cold)),
        call("MADV_PAGEOUT", advice!(PageOut)),
        call("MADV_GUARD_INSTALL", advice!(GuardInstall)),
        call("MADV_GUARD_REMOVE", advice!(GuardRemove)),
        call("MADV_HUGEPAGE", advice!(Huge)),
        filling("MADV_POPULATE_READ", advice!(PopulateRead)),
        filling("MADV_POPULATE_WRITE", advice!(PopulateWrite)),
        filling("MADV_COLLAPSE", |space, range| {
            match space.madvise(range.start(), range.len(), Advice::Collapse) {
                // Sixteen pages are less than a span.
                Err(Error::Invalid) if range.len() < TABLE => Ok(()),
                other => other,
            }
        }),
        filling("mlock", |space, range| space.mlock(range.start(), range.len(), LockPages::Now)),
        call("munlock", |space, range| space.munlock(range.start(), range.len())),
        call("mincore", |space, range| space.mincore(range.start(), range.len(), |_, _| ())),
        call("fork", |space, _| space.fork().map(drop)),
        call("fork, and a write to each page", |space, range| {
            let _child = space.fork()?;
            touch(space, range, TABLE).map_err(|_| Error::OutOfMemory)
        }),
        call("/proc/self/smaps", |space, _| {
            proc::smaps(space, &proc::Unnamed, &mut String::new()).map_err(|_| Error::Invalid)
        }),
        call("/proc/self/pagemap", |space, range| {
            let mut words = [0; 4096];
            let addresses = proc::PhysicalAddresses::Withheld;
            let mut page = range.start().0 / PAGE_SIZE;
            while page < range.end().0 / PAGE_SIZE {
                page += proc::pagemap(space, page, addresses, &mut words) as u64;
            }
            Ok(())
        }),
        call("/proc/self/clear_refs", |space, _| {
            let all = proc::clear_refs(space, ClearRefs::All);
            all.and(proc::clear_refs(space, ClearRefs::SoftDirty)).map_err(|_| Error::OutOfMemory)
        }),
        call("exit", |_, _| Ok(())),
    ]
}

/// Makes each call on each shape.
///
/// # Errors
/// A call that failed, by name.
pub fn measure<A: Walk>(meter: &mut Meter<'_, A>, extent: &Extent) -> Result<(), String> {
    for shape in Shape::all(extent) {
        for call in calls::<A>() {
            if call.fills && shape.step() > PAGE_SIZE {
                continue;
            }
            let mut space = Some(new_space(meter)?);
            let range = space.as_ref().map(|space| shape.make(space)).transpose()?;
            let Some(range) = range else { continue };
            meter.measure(call.name, &shape.name(), || {
                if call.name == "exit" {
                    drop(space.take());
                }
                space.as_ref().map_or(Ok(()), |space| (call.make)(space, range))
            })?;
        }
    }
    faults(meter)
}

/// Faults of every kind, and reads and writes of a program's memory.
fn faults<A: Walk>(meter: &mut Meter<'_, A>) -> Result<(), String> {
    let at = VirtAddr(AT);
    for (order, name) in [(0, "a page"), (4, "a folio of 64 KiB"), (9, "a folio of 2 MiB")] {
        let space = new_space(meter)?;
        use_order(&space, order);
        map(&space, range(AT, 2 * TABLE))?;
        meter.measure("fault, first write", name, || space.fault(at, Access::Write))?;
        let child = space.fork().map_err(|error| format!("fork: {error}"))?;
        meter.measure("fault, copy on write", name, || space.fault(at, Access::Write))?;
        drop(child);
        meter.measure("fault, last one to share", name, || {
            space.fault(VirtAddr(AT + PAGE_SIZE), Access::Write)
        })?;
        meter.measure("fault, nothing to do", name, || space.fault(at, Access::Write))?;
        let other = VirtAddr(AT + TABLE);
        meter.measure("fault, first read", name, || space.fault(other, Access::Read))?;
        meter.measure("fault, write after read", name, || space.fault(other, Access::Write))?;
        meter.measure("fault, refused", name, || match space.fault(VirtAddr(0), Access::Read) {
            Err(FaultError::NotMapped) => Ok(()),
            _ => Err("the null page can be read"),
        })?;
        let mut bytes = vec![0; TABLE as usize];
        meter.measure("write_user of 2 MiB", name, || space.write_user(at, &bytes))?;
        meter.measure("read_user of 2 MiB", name, || space.read_user(at, &mut bytes))?;
    }
    Ok(())
}
