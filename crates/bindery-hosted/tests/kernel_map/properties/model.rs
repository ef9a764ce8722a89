//! A simple model of a kernel map: the pages of each area; the target and the permissions of each
//! page; the last content of each frame.

use std::collections::{BTreeMap, HashMap};

use bindery::addr::{Frame, PAGE_SIZE, PhysAddr, VirtAddr, VirtRange};
use bindery::arch::{Attributes, Entry, Level, MemoryType, Permissions};
use bindery::{AreaKind, KernelAddress, KernelArea, KernelMap, KernelMapError, Pauses, Resolution};
use bindery_hosted::{AccessKind, Machine, Walk};

use crate::support::kernel::{self, translate};

/// One page of an area.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Page {
    pub to: u64,
    pub permissions: Permissions,
    pub memory: MemoryType,
}

#[derive(Clone, Debug)]
pub struct Area {
    pub kind: AreaKind,
    pub pages: Vec<Page>,
    /// The end, including the guard page and the unused rest after the area has shrunk.
    pub end: u64,
    pub pauses: Pauses,
    /// The address that the caller got; `ioremap` may return an address within the first page.
    pub given: VirtAddr,
}

impl Area {
    pub fn told(&self, start: u64) -> KernelArea {
        let range = kernel::pages(VirtAddr(start), self.pages.len() as u64);
        KernelArea { range, kind: self.kind }
    }
}

/// The model's knowledge of a kernel map.
#[derive(Default)]
pub struct Model {
    pub areas: BTreeMap<u64, Area>,
    /// Areas that wait for a purge, and their ends.
    pub freed: BTreeMap<u64, Area>,
    /// The content of frames, if known.
    pub contents: HashMap<u64, u64>,
}

/// The actual attributes of a leaf for these requested ones.
pub fn as_told<A: Walk>(permissions: Permissions, memory: MemoryType) -> (Permissions, MemoryType) {
    let attributes = Attributes { permissions, accessed: true, ..Attributes::default() };
    let leaf = A::page_entry(Frame(0), Level::PTE, attributes).0;
    let typed = Entry(leaf | A::memory_type(memory).expect("a type that there is"));
    (A::attributes(Entry(leaf)).permissions, A::memory_type_of(typed))
}

impl Model {
    /// The area with this number, modulo their count.
    pub fn pick(&self, which: u8) -> Option<(u64, &Area)> {
        let nth = usize::from(which) % self.areas.len().max(1);
        self.areas.iter().nth(nth).map(|(start, area)| (*start, area))
    }

    /// Adds a new area. It must overlap nothing, not even an area that waits for a purge.
    #[track_caller]
    pub fn add(&mut self, arena: VirtRange, start: u64, area: Area) {
        let whole = VirtRange::new(VirtAddr(start), VirtAddr(area.end)).unwrap();
        assert!(arena.covers(whole), "{whole} lies outside of {arena}");
        for (other, there) in self.areas.iter().chain(&self.freed) {
            let apart = area.end <= *other || there.end <= start;
            assert!(apart, "{whole} overlaps {other:#x}..{:#x}", there.end);
        }
        self.areas.insert(start, area);
    }

    /// Frees an area. It waits for a purge, unless one has already happened.
    pub fn free(&mut self, start: u64) {
        let area = self.areas.remove(&start).expect("an area");
        if area.kind == AreaKind::Vmalloc {
            for page in &area.pages {
                self.contents.remove(&page.to);
            }
        }
        self.freed.insert(start, area);
    }

    /// Removes the purged areas; the map reports the remaining ones.
    #[track_caller]
    pub fn look_for_purges<A: Walk>(&mut self, map: &KernelMap<'_, Machine<A>>) {
        self.freed.retain(|start, area| {
            let now = map.explain(VirtAddr(*start));
            now == KernelAddress::Freed { area: area.told(*start) }
        });
        let waiting: u64 = self.freed.values().map(|area| area.pages.len() as u64).sum();
        assert_eq!(map.freed_pages(), waiting, "pages that wait for a purge");
    }

    /// The error of a call that needs the start of an area of this kind; `None` if `at` is the
    /// start of one.
    pub fn refusal(&self, at: u64, expected: AreaKind) -> Option<KernelMapError> {
        let around = |areas: &BTreeMap<u64, Area>| {
            let found = areas.range(..=at).next_back().filter(|(_, area)| at < area.end);
            found.map(|(start, area)| area.told(*start))
        };
        if let Some(area) = around(&self.freed) {
            return Some(KernelMapError::Freed { area });
        }
        let Some(area) = around(&self.areas) else {
            return Some(KernelMapError::NotAnArea(VirtAddr(at)));
        };
        if area.kind != expected {
            Some(KernelMapError::WrongKind { area, expected })
        } else if area.range.start().0 != at {
            Some(KernelMapError::NotTheStart { area })
        } else {
            None
        }
    }

    /// Whether this number of pages and their guard fit at this alignment.
    pub fn has_room(&self, arena: VirtRange, pages: u64, align: u64) -> bool {
        let mut low = arena.start().0;
        let ends = self.areas.iter().map(|(start, area)| (*start, area.end));
        for (start, end) in ends.chain([(arena.end().0, arena.end().0)]) {
            let first = low.checked_next_multiple_of(align);
            let end_of_it = first.and_then(|first| first.checked_add((pages + 1) * PAGE_SIZE));
            if end_of_it.is_some_and(|end| end <= start) {
                return true;
            }
            low = end;
        }
        false
    }

    /// Compares all queries, and all accesses through the MMU.
    #[track_caller]
    pub fn compare<A: Walk>(&self, machine: &Machine<A>, map: &KernelMap<'_, Machine<A>>) {
        let mut areas = Vec::new();
        map.for_each_area(|area| areas.push(area));
        let expected: Vec<_> = self.areas.iter().map(|(start, area)| area.told(*start)).collect();
        assert_eq!(areas, expected);
        let mut mapped = BTreeMap::new();
        for piece in kernel::pieces(map, map.arena()) {
            assert!(piece.size.is_power_of_two(), "{piece:?}");
            for at in (piece.range.start().0..piece.range.end().0).step_by(PAGE_SIZE as usize) {
                let to = piece.translate(VirtAddr(at)).0;
                let page = Page { to, permissions: piece.permissions, memory: piece.memory };
                assert_eq!(mapped.insert(at, page), None, "told twice");
            }
        }
        let mut expected = BTreeMap::new();
        for (start, area) in &self.areas {
            let pages = (*start..).step_by(PAGE_SIZE as usize).zip(&area.pages);
            expected.extend(pages.map(|(at, page)| (at, *page)));
            self.compare_area(machine, map, *start, area);
        }
        let differs = mapped.iter().zip(&expected).find(|(told, known)| told != known);
        assert!(mapped.len() == expected.len() && differs.is_none(), "{differs:x?}");
    }

    #[track_caller]
    fn compare_area<A: Walk>(
        &self,
        machine: &Machine<A>,
        map: &KernelMap<'_, Machine<A>>,
        start: u64,
        area: &Area,
    ) {
        let told = area.told(start);
        for (at, page) in (start..).step_by(PAGE_SIZE as usize).map(VirtAddr).zip(&area.pages) {
            assert_eq!(map.physical(at), Some(PhysAddr(page.to)), "{at}");
            let has = |permission| page.permissions.contains(permission);
            if has(Permissions::READ) {
                let mut bytes = [0; 8];
                machine.read_kernel(map.root(), at, &mut bytes).unwrap();
                if let Some(known) = self.contents.get(&page.to) {
                    assert_eq!(u64::from_ne_bytes(bytes), *known, "the content at {at}");
                }
                assert_eq!(translate(machine, map, at), Ok(PhysAddr(page.to)));
            }
            if !has(Permissions::WRITE) {
                assert!(machine.translate_kernel(map.root(), at, AccessKind::Write).is_err());
            }
            if (at.0 >> 12).is_multiple_of(7) {
                let executed = machine.execute_kernel(map.root(), at);
                assert_eq!(executed.is_ok(), has(Permissions::EXECUTE), "{at}");
            }
        }
        let last = VirtAddr(told.range.end().0 - PAGE_SIZE);
        let to = PhysAddr(area.pages[area.pages.len() - 1].to);
        assert_eq!(map.explain(last), KernelAddress::Mapped { area: told, to });
        for guard in [told.range.end().0, area.end - PAGE_SIZE] {
            let guard = VirtAddr(guard);
            assert_eq!(map.explain(guard), KernelAddress::Guard { area: told });
            assert!(translate(machine, map, guard).is_err(), "the guard page at {guard}");
            assert_eq!(map.physical(guard), None);
            assert_eq!(map.resolve(guard, Permissions::READ), Resolution::NotMapped);
        }
    }

    /// After a purge, all freed areas are reusable and have no mappings.
    #[track_caller]
    pub fn after_purge<A: Walk>(&mut self, machine: &Machine<A>, map: &KernelMap<'_, Machine<A>>) {
        for (start, area) in std::mem::take(&mut self.freed) {
            for at in [start, start + (area.pages.len() as u64 - 1) * PAGE_SIZE].map(VirtAddr) {
                assert!(translate(machine, map, at).is_err(), "{at} was purged");
                assert_eq!(map.explain(at), KernelAddress::Free);
            }
        }
        assert_eq!(map.freed_pages(), 0);
    }
}
