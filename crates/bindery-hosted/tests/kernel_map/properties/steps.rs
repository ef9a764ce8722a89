//! A kernel that makes the generated calls, and the model's counterpart of each.

use bindery::addr::{Frame, PAGE_SIZE, PhysAddr, VirtAddr};
use bindery::arch::{MemoryType, Permissions};
use bindery::{
    AreaKind, Content, FrameRange, KernelMap, KernelMapError, Memory, Pauses, UnmapTime,
    VmallocOptions, VmapOptions,
};
use bindery_hosted::{Machine, Walk};

use super::generate::{Run, Step, pool_pages};
use super::model::{Area, Model, Page, as_told};
use crate::support::MIB;
use crate::support::areas::Areas;
use crate::support::kernel::{audit, check_core, pages as page_range, scattered};

pub struct Kernel<'k, 'm, A: Walk> {
    machine: &'k Machine<A>,
    memory: &'m Memory<Machine<A>>,
    map: &'k KernelMap<'m, Machine<A>>,
    model: Model,
    /// Frames to be mapped; `owner` is the map that owns them.
    pool: Vec<Frame>,
    owner: &'k KernelMap<'m, Machine<A>>,
}

impl<'k, 'm, A: Walk> Kernel<'k, 'm, A> {
    pub fn new(
        machine: &'k Machine<A>,
        memory: &'m Memory<Machine<A>>,
        owner: &'k KernelMap<'m, Machine<A>>,
        map: &'k KernelMap<'m, Machine<A>>,
    ) -> Self {
        let (_, pool) = scattered(owner, pool_pages::<A>(), 1);
        Self { machine, memory, map, model: Model::default(), pool, owner }
    }

    pub fn step(&mut self, step: &Step, number: u64) {
        match *step {
            Step::Vmalloc(pages, less, align, pieces, content, permissions, pauses) => {
                let align = 1_u64.checked_shl(align).unwrap_or(3);
                let options =
                    VmallocOptions { align, permissions, pieces, content, pauses, node: None };
                self.vmalloc(pages, pages * PAGE_SIZE - less, &options);
            }
            Step::Vmap(ref runs, permissions, memory, pieces) => {
                let pauses = Pauses::Allowed;
                let list: Vec<_> = runs.iter().flat_map(|run| self.frames(*run)).collect();
                let options = VmapOptions { permissions, memory, pieces, pauses };
                let result = self.map.vmap(&list, &options);
                self.mapped(result, &list, &options);
            }
            Step::VmapRanges(ref runs, pieces) => {
                let ranges: Vec<_> = runs.iter().map(|run| self.range(*run)).collect();
                let all = |range: &FrameRange| {
                    let first = range.first;
                    (0..range.count).map(move |ahead| first.plus(ahead))
                };
                let list: Vec<_> = ranges.iter().flat_map(all).collect();
                let options = VmapOptions { pieces, ..VmapOptions::default() };
                let result = self.map.vmap_ranges(&ranges, &options);
                self.mapped(result, &list, &options);
            }
            Step::Ioremap(device, offset, size, memory) => {
                self.ioremap(device, offset, size, memory);
            }
            Step::Protect(which, first, count, permissions) => {
                self.protect(which, u64::from(first), u64::from(count), permissions);
            }
            Step::Vrealloc(which, pages, align) => {
                self.vrealloc(which, pages, 1_u64.checked_shl(align).unwrap_or(3));
            }
            Step::Free(which, time) => self.free(which, time),
            Step::FreeWrongly(which, page, kind) => {
                let Some((start, _)) = self.model.pick(which) else { return };
                let at = start.wrapping_add_signed(i64::from(page) * PAGE_SIZE as i64);
                if let Some(refusal) = self.model.refusal(at, kind) {
                    let at = VirtAddr(at);
                    let result = match kind {
                        AreaKind::Vmalloc => self.map.free_vmalloc(at),
                        AreaKind::Vmap => self.map.free_vmap(at, UnmapTime::Later),
                        AreaKind::Ioremap => self.map.free_ioremap(at),
                    };
                    assert_eq!(result, Err(refusal));
                }
            }
            Step::Write(which, page) => self.write(which, u64::from(page), number),
            Step::Purge => {
                self.map.purge();
                self.model.after_purge(self.machine, self.map);
            }
            Step::Check => {
                self.model.compare(self.machine, self.map);
                check_core(self.memory, &[self.map, self.owner]);
            }
        }
        self.model.look_for_purges(self.map);
    }

    pub fn finish(mut self) {
        self.model.compare(self.machine, self.map);
        audit(self.machine, self.memory, &[self.map, self.owner]);
        self.model.after_purge(self.machine, self.map);
        self.model.compare(self.machine, self.map);
    }

    fn frames(&self, (first, count, step): Run) -> Vec<Frame> {
        let length = self.pool.len() as i64;
        let place =
            |ahead: i64| (i64::from(first) + ahead * i64::from(step)).rem_euclid(length) as usize;
        let count = i64::from(count).min(length);
        (0..count).map(|ahead| self.pool[place(ahead)]).collect()
    }

    /// Consecutive frames of the pool.
    fn range(&self, (first, count, step): Run) -> FrameRange {
        let first = usize::from(first) % self.pool.len();
        let head = self.pool[first];
        let follows = |(frame, ahead): &(&Frame, u32)| **frame == head.plus(*ahead);
        let run = self.pool[first..].iter().zip(0..).take_while(follows).count();
        let count = if step == 0 { 0 } else { run.min(usize::from(count)) };
        FrameRange { first: head, count: count as u32 }
    }

    /// Frames or addresses may run out; no other failure is accepted.
    fn short(&mut self, problem: KernelMapError, pages: u64, align: u64) {
        self.model.look_for_purges(self.map);
        match problem {
            KernelMapError::OutOfAddresses => {
                assert!(!self.model.has_room(self.map.arena(), pages, align), "there is room");
            }
            KernelMapError::OutOfMemory => assert!(self.memory.free_frame_count() < pages + 8),
            other => panic!("refused: {other}"),
        }
    }

    /// The errors that every caller must get.
    fn expected(&self, pages: u64, permissions: Permissions) -> Option<KernelMapError> {
        if permissions.is_empty() || permissions.contains(Permissions::USER) {
            Some(KernelMapError::BadPermissions)
        } else if pages >= self.map.arena().pages() {
            Some(KernelMapError::TooLarge)
        } else if pages == 0 {
            Some(KernelMapError::Empty)
        } else {
            None
        }
    }

    fn vmalloc(&mut self, pages: u64, size: u64, options: &VmallocOptions) {
        let result = self.map.vmalloc(size, options);
        let bad_align = !options.align.is_power_of_two() || options.align < PAGE_SIZE;
        if pages >= self.map.arena().pages() {
            return assert_eq!(result, Err(KernelMapError::TooLarge));
        }
        if bad_align {
            return assert_eq!(result, Err(KernelMapError::BadAlignment));
        }
        if let Some(expected) = self.expected(pages, options.permissions) {
            return assert_eq!(result, Err(expected));
        }
        match result {
            Err(problem) => self.short(problem, pages, options.align),
            Ok(at) => {
                assert!(at.is_aligned(options.align));
                let new = self.adopt(at, 0..pages, options);
                let end = at.0 + (pages + 1) * PAGE_SIZE;
                let (kind, pauses) = (AreaKind::Vmalloc, options.pauses);
                let area = Area { kind, pages: new, end, pauses, given: at };
                self.model.look_for_purges(self.map);
                self.model.add(self.map.arena(), at.0, area);
            }
        }
    }

    /// New pages; the model accepts any frames.
    fn adopt(
        &mut self,
        at: VirtAddr,
        pages: std::ops::Range<u64>,
        options: &VmallocOptions,
    ) -> Vec<Page> {
        let (permissions, memory) = as_told::<A>(options.permissions, MemoryType::Normal);
        let mut new = Vec::new();
        for page in pages {
            let at = VirtAddr(at.0 + page * PAGE_SIZE);
            let to = self.map.physical(at).expect("a page of a new area").0;
            assert!(!self.pool.contains(&Frame((to / PAGE_SIZE) as u32)), "a frame of the pool");
            self.model.contents.remove(&to);
            if options.content == Content::Zeroes {
                self.model.contents.insert(to, 0);
            }
            new.push(Page { to, permissions, memory });
        }
        new
    }

    fn mapped(
        &mut self,
        result: Result<VirtAddr, KernelMapError>,
        list: &[Frame],
        options: &VmapOptions,
    ) {
        let count = list.len() as u64;
        let device = matches!(options.memory, MemoryType::Device | MemoryType::Uncached);
        let runs_a_device = device && options.permissions.contains(Permissions::EXECUTE);
        let bad_permissions = self
            .expected(1, options.permissions)
            .or(runs_a_device.then_some(KernelMapError::BadPermissions));
        if bad_permissions.is_none() && A::memory_type(options.memory).is_none() {
            return assert_eq!(result, Err(KernelMapError::NoSuchMemoryType));
        }
        if let Some(expected) = bad_permissions.or(self.expected(count, options.permissions)) {
            return assert_eq!(result, Err(expected));
        }
        match result {
            Err(problem) => self.short(problem, count, PAGE_SIZE),
            Ok(at) => {
                let list = list.iter().map(|frame| frame.start().0);
                self.enter(AreaKind::Vmap, at, at, list, options);
            }
        }
    }

    fn enter(
        &mut self,
        kind: AreaKind,
        start: VirtAddr,
        given: VirtAddr,
        list: impl Iterator<Item = u64>,
        options: &VmapOptions,
    ) {
        let (permissions, memory) = as_told::<A>(options.permissions, options.memory);
        let pages: Vec<_> = list.map(|to| Page { to, permissions, memory }).collect();
        let end = start.0 + (pages.len() as u64 + 1) * PAGE_SIZE;
        let area = Area { kind, pages, end, pauses: options.pauses, given };
        self.model.look_for_purges(self.map);
        self.model.add(self.map.arena(), start.0, area);
    }

    fn ioremap(&mut self, device: u8, offset: u64, size: u64, memory: MemoryType) {
        let devices = [0x3_0000_0000, 0xfd00_0000_0000 >> 4, (1 << 44) - 8 * MIB];
        let from = devices[usize::from(device) % 3] + offset;
        let result = self.map.ioremap(PhysAddr(from), size, memory);
        let count = (from % PAGE_SIZE + size).div_ceil(PAGE_SIZE);
        let read_write = Permissions::READ | Permissions::WRITE;
        if A::memory_type(memory).is_none() {
            return assert_eq!(result, Err(KernelMapError::NoSuchMemoryType));
        }
        if let Some(expected) = self.expected(count, read_write) {
            return assert_eq!(result, Err(expected));
        }
        match result {
            // The first access would be a violation, because no memory backs a mapping of the
            // normal type.
            Ok(at) if memory == MemoryType::Normal => self.map.free_ioremap(at).unwrap(),
            Err(problem) => self.short(problem, count, PAGE_SIZE),
            Ok(given) => {
                let start = given.align_down(PAGE_SIZE);
                assert_eq!(given.0 - start.0, from % PAGE_SIZE);
                let list = (0..count).map(|page| (from & !(PAGE_SIZE - 1)) + page * PAGE_SIZE);
                let options = VmapOptions { permissions: read_write, memory, ..Default::default() };
                self.model.contents.extend(list.clone().map(|to| (to, u64::MAX)));
                self.enter(AreaKind::Ioremap, start, given, list, &options);
            }
        }
        if memory == MemoryType::Normal {
            self.map.purge();
            self.model.after_purge(self.machine, self.map);
        }
    }

    fn protect(&mut self, which: u8, first: u64, count: u64, permissions: Permissions) {
        let Some((start, area)) = self.model.pick(which) else { return };
        let (length, pauses) = (area.pages.len() as u64, area.pauses);
        let first = first % length;
        let count = if count.is_multiple_of(3) { length - first } else { count % (length - first) };
        let (told, memory) = (area.told(start), area.pages[0].memory);
        let range = page_range(VirtAddr(start + first * PAGE_SIZE), count);
        let result = self.map.protect_part(range, permissions);
        if count == 0 {
            return assert_eq!(result, Err(KernelMapError::Empty));
        }
        if permissions.is_empty() || permissions.contains(Permissions::USER) {
            return assert_eq!(result, Err(KernelMapError::BadPermissions));
        }
        match result {
            Err(KernelMapError::WouldPause { area }) if pauses == Pauses::Never => {
                assert_eq!(area, told);
            }
            Err(KernelMapError::BadPermissions) => {
                let device = matches!(memory, MemoryType::Device | MemoryType::Uncached);
                assert!(device && permissions.contains(Permissions::EXECUTE));
            }
            Err(problem) => self.short(problem, 8, PAGE_SIZE),
            Ok(()) => {
                let (now, _) = as_told::<A>(permissions, MemoryType::Normal);
                let area = self.model.areas.get_mut(&start).expect("an area");
                let part = &mut area.pages[first as usize..(first + count) as usize];
                part.iter_mut().for_each(|page| page.permissions = now);
            }
        }
    }

    fn vrealloc(&mut self, which: u8, pages: u64, align: u64) {
        let Some((start, area)) = self.model.pick(which) else { return };
        if area.kind != AreaKind::Vmalloc {
            return;
        }
        let (before, content) = (area.clone(), Content::Zeroes);
        let options = VmallocOptions { align, content, ..VmallocOptions::huge() };
        let result = self.map.resize_vmalloc(VirtAddr(start), pages * PAGE_SIZE, &options);
        if pages >= self.map.arena().pages() {
            return assert_eq!(result, Err(KernelMapError::TooLarge));
        }
        if !align.is_power_of_two() || align < PAGE_SIZE {
            return assert_eq!(result, Err(KernelMapError::BadAlignment));
        }
        match result {
            Err(KernelMapError::WouldPause { area }) if before.pauses == Pauses::Never => {
                assert_eq!(area, before.told(start));
            }
            Err(problem) => self.short(problem, pages, align),
            Ok(at) => self.resized(start, at, pages, before, &options),
        }
    }

    fn resized(
        &mut self,
        start: u64,
        at: VirtAddr,
        pages: u64,
        before: Area,
        options: &VmallocOptions,
    ) {
        assert!(at.is_aligned(options.align));
        let kept = pages.min(before.pages.len() as u64);
        let mut now = before.clone();
        for gone in now.pages.drain(kept as usize..) {
            self.model.contents.remove(&gone.to);
        }
        let end = at.0 + (pages + 1) * PAGE_SIZE;
        self.model.areas.remove(&start);
        if at.0 == start {
            now.end = now.end.max(end);
        } else {
            (now.end, now.given) = (end, at);
            let purged = self.map.freed_pages() == 0;
            if !purged {
                self.model.freed.insert(start, before);
            }
        }
        let new = self.adopt(at, kept..pages, options);
        now.pages.extend(new);
        self.model.look_for_purges(self.map);
        self.model.add(self.map.arena(), at.0, now);
    }

    fn free(&mut self, which: u8, time: UnmapTime) {
        let Some((start, area)) = self.model.pick(which) else { return };
        match area.kind {
            AreaKind::Vmalloc => self.map.free_vmalloc(area.given),
            AreaKind::Vmap => self.map.free_vmap(area.given, time),
            AreaKind::Ioremap => self.map.free_ioremap(area.given),
        }
        .unwrap();
        let purged = area.kind == AreaKind::Vmap && time == UnmapTime::Now;
        self.model.free(start);
        if purged {
            self.model.after_purge(self.machine, self.map);
        }
    }

    fn write(&mut self, which: u8, page: u64, number: u64) {
        let Some((start, area)) = self.model.pick(which) else { return };
        let page = page % area.pages.len() as u64;
        let at = VirtAddr(start + page * PAGE_SIZE);
        let there = area.pages[page as usize];
        let written = self.machine.write_kernel(self.map.root(), at, &number.to_ne_bytes());
        assert_eq!(written.is_ok(), there.permissions.contains(Permissions::WRITE), "{at}");
        if written.is_ok() && area.kind != AreaKind::Ioremap {
            self.model.contents.insert(there.to, number);
        }
    }
}
