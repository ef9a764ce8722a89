//! The engine's [`KernelMap`] as a subject.

use std::collections::VecDeque;

use bindery::addr::{Frame, PAGE_SHIFT, VirtAddr, VirtRange};
use bindery::arch::{Arch, MemoryType, Permissions};
use bindery::{
    FrameRange, KernelMap, KernelMapError, Memory, Reach, UnmapTime, VmallocOptions, VmapOptions,
};
use bindery_hosted::{Machine, Walk};

use super::{Area, KernelCall, Operation, PURGED_TOGETHER, Source};
use crate::bench::measure::{Subject, Tally};
use crate::bench::workload::{Call, Script};
use crate::size::{GIB, MIB};

/// The kernel's half, or its beginning.
fn arena<A: Walk>() -> VirtRange {
    let top = PAGE_SHIFT + <A as Arch>::INDEX_BITS * u32::from(A::LEVELS);
    let start = VirtAddr(u64::MAX << (top - 1));
    VirtRange::from_len(start, 4 * GIB).expect("the half has more than 4 GiB")
}

/// Frames that a script maps without allocating them.
pub struct Frames<'m, A: Walk> {
    lists: Vec<List>,
    /// Owns the frames.
    _owner: KernelMap<'m, Machine<A>>,
}

/// The frames of one kind of area.
struct List {
    area: Area,
    pages: Vec<Frame>,
    ranges: Vec<FrameRange>,
}

impl<'m, A: Walk> Frames<'m, A> {
    /// Takes the frames of all lists.
    ///
    /// # Errors
    /// If memory has too few frames.
    pub fn take(memory: &'m Memory<Machine<A>>, script: &Script) -> Result<Self, String> {
        let cannot = |error: KernelMapError| format!("frames for the lists: {error}");
        let owner = KernelMap::new(memory, arena::<A>()).map_err(cannot)?;
        let listed = script.steps.iter().filter_map(|step| {
            let Call::Kernel(KernelCall { operation: Operation::Map, area }) = step.call else {
                return None;
            };
            match area.source {
                Source::Pages { order } | Source::Ranges { order, .. } => Some((area, order)),
                Source::Device(_) | Source::New(_) => None,
            }
        });
        let listed: Vec<_> = listed.collect();
        let bytes = listed.iter().map(|(area, _)| area.bytes.next_multiple_of(2 * MIB)).max();
        let Some(bytes) = bytes else { return Ok(Self { lists: Vec::new(), _owner: owner }) };
        let start = owner.vmalloc(bytes, &VmallocOptions::huge()).map_err(cannot)?;
        let frame = |page: u64| {
            let physical = owner.physical(VirtAddr(start.0 + (page << PAGE_SHIFT)));
            physical.map(|physical| Frame((physical.0 >> PAGE_SHIFT) as u32))
        };
        let mut lists = Vec::new();
        for (area, order) in listed {
            let count = 1_u32 << order;
            let mut list = List { area, pages: Vec::new(), ranges: Vec::new() };
            for block in area.blocks(order) {
                let page = block << order;
                let ends = frame(page).zip(frame(page + u64::from(count) - 1));
                let first = ends.filter(|(first, last)| first.plus(count - 1) == *last);
                let (first, _) = first.ok_or("the machine's memory is in pieces")?;
                list.pages.extend((0..count).map(|ahead| first.plus(ahead)));
                list.ranges.push(FrameRange { first, count });
            }
            lists.push(list);
        }
        Ok(Self { lists, _owner: owner })
    }

    fn of(&self, area: Area) -> Result<&List, String> {
        let list = self.lists.iter().find(|list| list.area == area);
        list.ok_or_else(|| format!("no frames were taken for {area:?}"))
    }
}

/// A kernel map, and its areas.
pub struct KernelEngine<'m, A: Walk> {
    memory: &'m Memory<Machine<A>>,
    map: KernelMap<'m, Machine<A>>,
    frames: &'m Frames<'m, A>,
    /// The areas, oldest first.
    areas: VecDeque<VirtAddr>,
}

impl<'m, A: Walk> KernelEngine<'m, A> {
    /// A map without areas.
    ///
    /// # Errors
    /// If the kernel map cannot be created.
    pub fn new(
        memory: &'m Memory<Machine<A>>,
        frames: &'m Frames<'m, A>,
        reach: Reach,
    ) -> Result<Self, String> {
        let map = KernelMap::with_reach(memory, arena::<A>(), reach)
            .map_err(|error| error.to_string())?;
        // The last area that shares a purge makes it due.
        map.set_purge_limit((PURGED_TOGETHER >> PAGE_SHIFT) - 1);
        Ok(Self { memory, map, frames, areas: VecDeque::new() })
    }

    /// Makes the areas that share a purge.
    fn map(
        &mut self,
        areas: u64,
        make: impl Fn(&KernelMap<'m, Machine<A>>) -> Result<VirtAddr, KernelMapError>,
    ) -> Result<(), KernelMapError> {
        for _ in 0..areas {
            self.areas.push_back(make(&self.map)?);
        }
        Ok(())
    }

    fn make(&mut self, call: KernelCall) -> Result<Result<(), KernelMapError>, String> {
        let (area, areas, frames) = (call.area, call.areas(), self.frames);
        Ok(match area.source {
            Source::Device(from) => {
                self.map(areas, |map| map.ioremap(from, area.bytes, MemoryType::Device))
            }
            Source::New(pieces) => {
                let options = VmallocOptions { pieces, ..VmallocOptions::default() };
                self.map(areas, |map| map.vmalloc(area.bytes, &options))
            }
            Source::Pages { .. } => {
                let list = &frames.of(area)?.pages;
                self.map(areas, |map| map.vmap(list, &VmapOptions::default()))
            }
            Source::Ranges { pieces, .. } => {
                let list = &frames.of(area)?.ranges;
                let options = VmapOptions { pieces, ..VmapOptions::default() };
                self.map(areas, |map| map.vmap_ranges(list, &options))
            }
        })
    }

    fn protect(&self, bytes: u64) -> Result<(), KernelMapError> {
        self.areas.iter().try_for_each(|start| {
            let range = VirtRange::from_len(*start, bytes).ok_or(KernelMapError::Empty)?;
            // SAFETY: 1. an area of this list; 2. and 3. nothing is kept in it.
            unsafe { self.map.protect(range, Permissions::READ) }
        })
    }

    fn unmap(&mut self, source: Source) -> Result<(), KernelMapError> {
        for start in self.areas.drain(..) {
            // SAFETY: 1. an area of this list, which was made from `source`; 2. and 3. nothing is
            // kept in it, and no other area has its frames.
            unsafe {
                match source {
                    Source::Device(_) => self.map.iounmap(start),
                    Source::New(_) => self.map.vfree(start),
                    Source::Pages { .. } | Source::Ranges { .. } => {
                        self.map.vunmap(start, UnmapTime::Later)
                    }
                }
            }?;
        }
        Ok(())
    }
}

impl<A: Walk> Subject for KernelEngine<'_, A> {
    fn perform(&mut self, call: Call) -> Result<(), String> {
        let Call::Kernel(call) = call else {
            return Err(format!("{}: not a call to a kernel map", call.name()));
        };
        let result = match call.operation {
            Operation::Map => self.make(call)?,
            Operation::Protect => self.protect(call.area.bytes),
            Operation::Unmap => self.unmap(call.area.source),
        };
        // Deferred work of the calls counts, too.
        self.memory.drain_deferred();
        result.map_err(|error| format!("{}: {error}", call.name()))
    }

    fn tally(&self) -> Option<Tally> {
        Some(Tally { counts: self.map.counts(), local_invalidations: 0 })
    }
}
