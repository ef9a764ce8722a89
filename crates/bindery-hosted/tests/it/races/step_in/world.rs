//! What every run begins with: a file, two address spaces that share it, a child, and a third CPU
//! that has touched every page.
//!
//! ```text
//! space   FILE     4 MiB, shared     pages 0, 1, 513, 769 written
//!         PRIVATE  4 MiB, private    page 3 copied, pages 0, 600, 601 the file's
//!         ANON     4 MiB, anonymous  pages 0, 1 the space's own, pages 5, 512 shared with the child;
//!                                    pages 560 to 567 in swap and shared, 576 to 583 in swap and own;
//!                                    guards at 776 and 777
//! other   FILE     4 MiB, shared
//! child   as the space when it forked
//! ```
//!
//! CPU 2 loads and stores at the *probes*, with what its TLB and the tables allow and no fault
//! handler behind it.

use std::sync::Mutex;

use bindery::addr::{Frame, Order, PAGE_SIZE, VirtAddr};
use bindery::{
    Access, AddressSpace, Advice, FileAccess, MapObject, MapRequest, Memory, Object, Place,
    Sharing, SizeMode, SwapArea,
};
use bindery_hosted::{Machine, Walk};

use super::stepped::{Stepped, SteppedFiles};
use crate::support::{GIB, MIB, READ_WRITE, fixed, options};

pub const FILE: u64 = GIB;
pub const PRIVATE: u64 = GIB + 8 * MIB;
pub const ANON: u64 = 2 * GIB;
/// Keeps the upper table of `ANON` when that has moved: a table is freed after a grace period.
const ANCHOR: u64 = ANON + 16 * MIB;
pub const ELSEWHERE: u64 = 3 * GIB;
pub const LENGTH: u64 = 4 * MIB;
/// Where in `ANON` the two stretches begin that are in swap, and how many pages each has.
pub const SWAPPED_PAGES: [u64; 2] = [560, 576];
pub const SWAPPED: u64 = 8;
/// Slots of the swap area.
pub const SLOTS: u64 = 4096;
/// The file's number.
pub const NUMBER: u64 = 1;

/// The address spaces that CPU 2 looks at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Which {
    Space,
    Other,
    Child,
}

/// Where CPU 2 touches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Probe {
    pub which: Which,
    pub at: u64,
}

const fn probe(which: Which, base: u64, page: u64) -> Probe {
    Probe { which, at: base + page * PAGE_SIZE + 8 }
}

pub const PROBES: [Probe; 23] = [
    probe(Which::Space, FILE, 0),
    probe(Which::Space, FILE, 1),
    probe(Which::Space, FILE, 513),
    probe(Which::Space, FILE, 769),
    probe(Which::Space, PRIVATE, 0),
    probe(Which::Space, PRIVATE, 3),
    probe(Which::Space, PRIVATE, 600),
    probe(Which::Space, PRIVATE, 601),
    probe(Which::Space, ANON, 0),
    probe(Which::Space, ANON, 5),
    probe(Which::Space, ANON, 561),
    probe(Which::Space, ANON, 577),
    probe(Which::Space, ANON, 512),
    probe(Which::Other, FILE, 0),
    probe(Which::Other, FILE, 1),
    probe(Which::Other, FILE, 513),
    probe(Which::Other, FILE, 769),
    probe(Which::Child, FILE, 513),
    probe(Which::Child, PRIVATE, 3),
    probe(Which::Child, ANON, 0),
    probe(Which::Child, ANON, 5),
    probe(Which::Child, ANON, 561),
    probe(Which::Child, ANON, 577),
];

/// What the probe stores in a round: the same at all addresses of one page of the file.
pub fn value(probe: Probe, round: u64) -> u64 {
    round << 32 | probe.at
}

/// The round of the writes before the child is made.
pub const BEFORE: u64 = 0;

/// The file's pages that probes are in.
pub const FILE_PAGES: [u64; 4] = [0, 1, 513, 769];

pub struct World<'m, A: Walk> {
    pub machine: Machine<A>,
    pub files: &'m SteppedFiles,
    pub space: AddressSpace<'m, Stepped<A>>,
    pub other: AddressSpace<'m, Stepped<A>>,
    pub file: Object<'m, Stepped<A>>,
    pub children: Mutex<Vec<AddressSpace<'m, Stepped<A>>>>,
    pub area: SwapArea,
    child_root: Frame,
}

impl<'m, A: Walk> World<'m, A> {
    /// Made on CPU 2, where the calling thread is.
    pub fn new(
        machine: &Machine<A>,
        memory: &'m Memory<Stepped<A>>,
        files: &'m SteppedFiles,
        folio_order: u8,
    ) -> Self {
        if folio_order > 0 {
            memory.folio_policy().set(Order(folio_order), SizeMode::Always);
            memory.file_folio_policy().set(Order(folio_order), SizeMode::Always);
        }
        let area = memory.swap_on(SLOTS, 0).unwrap();
        let file = memory.file(files, NUMBER, LENGTH).unwrap();
        let space = AddressSpace::new(memory, options()).unwrap();
        let other = AddressSpace::new(memory, options()).unwrap();
        map_file(&space, &file, FILE, Sharing::Shared);
        map_file(&other, &file, FILE, Sharing::Shared);
        map_file(&space, &file, PRIVATE, Sharing::Private);
        space.mmap(&fixed(ANON, LENGTH)).unwrap();
        space.mmap(&fixed(ANCHOR, PAGE_SIZE)).unwrap();
        space.enter();
        other.enter();
        let child = Self::fault_in(&space, &other);
        child.enter();
        let child_root = child.root();
        let children = Mutex::new(vec![child]);
        let machine = machine.clone();
        Self { machine, files, space, other, file, children, area, child_root }
    }

    fn fault_in(
        space: &AddressSpace<'m, Stepped<A>>,
        other: &AddressSpace<'m, Stepped<A>>,
    ) -> AddressSpace<'m, Stepped<A>> {
        let touch = |space: &AddressSpace<'m, _>, base, pages: &[u64], access| {
            for page in pages {
                space.fault(VirtAddr(base + page * PAGE_SIZE), access).unwrap();
            }
        };
        touch(space, FILE, &FILE_PAGES, Access::Write);
        touch(other, FILE, &FILE_PAGES, Access::Read);
        touch(space, PRIVATE, &[3], Access::Write);
        touch(space, PRIVATE, &[0, 600, 601], Access::Read);
        touch(space, ANON, &[0, 1, 5, 512], Access::Write);
        for first in SWAPPED_PAGES {
            let pages: Vec<u64> = (first..first + SWAPPED).collect();
            touch(space, ANON, &pages, Access::Write);
        }
        touch(space, ANCHOR, &[0], Access::Write);
        let guards = VirtAddr(ANON + 776 * PAGE_SIZE);
        space.madvise(guards, 2 * PAGE_SIZE, Advice::GuardInstall).unwrap();
        for probe in PROBES.into_iter().filter(|probe| probe.which == Which::Space) {
            if probe.at < PRIVATE || probe.at >= ANON || probe.at == PRIVATE + 3 * PAGE_SIZE + 8 {
                let content = value(probe, BEFORE).to_ne_bytes();
                space.write_user(VirtAddr(probe.at), &content).unwrap();
            }
        }
        let page_out = |page: u64| {
            let at = VirtAddr(ANON + page * PAGE_SIZE);
            space.madvise(at, SWAPPED * PAGE_SIZE, Advice::PageOut).unwrap();
        };
        page_out(SWAPPED_PAGES[0]);
        let child = space.fork().unwrap();
        // Copied before they go out: the child's are in memory.
        let own: Vec<u64> = (SWAPPED_PAGES[1]..SWAPPED_PAGES[1] + SWAPPED).collect();
        touch(space, ANON, &own, Access::Write);
        page_out(SWAPPED_PAGES[1]);
        touch(space, PRIVATE, &[3], Access::Write);
        touch(space, ANON, &[0, 1], Access::Write);
        touch(&child, FILE, &[513], Access::Read);
        child
    }

    pub fn root(&self, which: Which) -> Frame {
        match which {
            Which::Space => self.space.root(),
            Which::Other => self.other.root(),
            Which::Child => self.child_root,
        }
    }

    /// What CPU 2 loads at the probe, if it may.
    pub fn load(&self, probe: Probe) -> Option<u64> {
        self.load_at(self.root(probe.which), probe.at)
    }

    pub fn load_at(&self, root: Frame, at: u64) -> Option<u64> {
        self.machine.load_user(root, VirtAddr(at), |_| Err(())).ok()
    }

    /// Whether CPU 2 may store at the probe; if so, it has.
    pub fn store(&self, probe: Probe, value: u64) -> bool {
        let root = self.root(probe.which);
        self.machine.store_user(root, VirtAddr(probe.at), value, |_| Err(())).is_ok()
    }

    /// Stores at all probes, and says what was stored, or else what is there to be loaded. The
    /// child is only looked at.
    pub fn touch(&self, round: u64, with_child: bool) -> Vec<Option<u64>> {
        let stored = PROBES.map(|probe| {
            let value = value(probe, round);
            let stored = probe.which != Which::Child && self.store(probe, value);
            stored.then_some(value)
        });
        let look = |(probe, stored): (Probe, Option<u64>)| {
            let seen = probe.which != Which::Child || with_child;
            stored.or(seen.then(|| self.load(probe)).flatten())
        };
        PROBES.into_iter().zip(stored).map(look).collect()
    }
}

fn map_file<'m, A: Walk>(
    space: &AddressSpace<'m, Stepped<A>>,
    object: &Object<'m, Stepped<A>>,
    at: u64,
    sharing: Sharing,
) {
    let place = Place::Fixed(VirtAddr(at));
    let request = MapRequest {
        length: LENGTH,
        protection: READ_WRITE,
        place,
        sharing,
        ..MapRequest::default()
    };
    let access = FileAccess::READ | FileAccess::WRITE;
    space.mmap_object(&request, &MapObject { object, offset: 0, access }).unwrap();
}
