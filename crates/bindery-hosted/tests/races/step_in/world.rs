//! The initial state of every run: a file, two address spaces that share it, a child, and a third
//! CPU that has touched every page.
//!
//! ```text
//! space FILE    4 MiB, shared     pages 0, 1, 513, 769 written
//!       PRIVATE 4 MiB, private    page 3 copied, pages 0, 600, 601 the file's
//!       ANON    4 MiB, anonymous  pages 0, 1 the space's own, pages 5, 512 shared with the child;
//!                                 pages 560 to 567 in swap and shared, 576 to 583 in swap and own;
//!                                 guards at 776 and 777
//!       SHARED  memory that is shared, 16 pages: 0 to 3 of both spaces, 4 to 7 the space's,
//!               8 to 15 in swap
//! other FILE    4 MiB, shared
//!       SHARED  the same
//! child as the space when it forked
//! ```
//!
//! CPU 2 loads and stores at the *probes*, as its TLB and the tables allow, without a fault
//! handler.

use std::sync::Mutex;

use bindery::addr::{Frame, Order, PAGE_SIZE, VirtAddr};
use bindery::{
    Access, Accounting, AddressSpace, Advice, FileAccess, MapObject, MapRequest, Memory, Object,
    Place, Sealing, Sharing, SizeMode, SwapArea,
};
use bindery_hosted::{Machine, Walk};

use super::stepped::{Stepped, SteppedFiles};
use crate::support::{GIB, MIB, READ_WRITE, fixed, options};

pub const FILE: u64 = GIB;
pub const PRIVATE: u64 = GIB + 8 * MIB;
pub const ANON: u64 = 2 * GIB;
/// Shared memory.
pub const SHARED: u64 = GIB + 32 * MIB;
pub const SHARED_LENGTH: u64 = 16 * PAGE_SIZE;
/// A mapping that keeps the upper-level table of `ANON` in use after `ANON` has moved.
const ANCHOR: u64 = ANON + 16 * MIB;
pub const ELSEWHERE: u64 = 3 * GIB;
pub const LENGTH: u64 = 4 * MIB;
/// The first pages of the two ranges in `ANON` that are in swap, and their lengths.
pub const SWAPPED_PAGES: [u64; 2] = [560, 576];
pub const SWAPPED: u64 = 8;
/// Slots of the swap area.
pub const SLOTS: u64 = 4096;
/// The file's number.
pub const NUMBER: u64 = 1;

/// The address spaces that CPU 2 accesses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Which {
    Space,
    Other,
    Child,
}

/// An address that CPU 2 accesses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Probe {
    pub which: Which,
    pub at: u64,
}

const fn probe(which: Which, base: u64, page: u64) -> Probe {
    Probe { which, at: base + page * PAGE_SIZE + 8 }
}

pub const PROBES: [Probe; 28] = [
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
    probe(Which::Space, SHARED, 1),
    probe(Which::Space, SHARED, 5),
    probe(Which::Space, SHARED, 9),
    probe(Which::Other, SHARED, 1),
    probe(Which::Other, SHARED, 9),
];

/// Whether the address is in [`SHARED`].
pub fn is_shared(at: u64) -> bool {
    (SHARED..SHARED + SHARED_LENGTH).contains(&at)
}

/// The value that the probe stores in a round, the same at all addresses of one page of an object.
pub fn value(probe: Probe, round: u64) -> u64 {
    round << 32 | probe.at
}

/// The round of the writes before the fork.
pub const BEFORE: u64 = 0;

/// The file's pages that contain probes.
pub const FILE_PAGES: [u64; 4] = [0, 1, 513, 769];

pub struct World<'m, A: Walk> {
    pub machine: Machine<A>,
    pub files: &'m SteppedFiles,
    pub space: AddressSpace<'m, Stepped<A>>,
    pub other: AddressSpace<'m, Stepped<A>>,
    pub file: Object<'m, Stepped<A>>,
    pub shared: Object<'m, Stepped<A>>,
    pub children: Mutex<Vec<AddressSpace<'m, Stepped<A>>>>,
    pub area: SwapArea,
    child_root: Frame,
}

impl<'m, A: Walk> World<'m, A> {
    /// Creates the world on CPU 2, the calling thread's CPU.
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
        map(&space, &file, FILE, LENGTH, Sharing::Shared);
        map(&other, &file, FILE, LENGTH, Sharing::Shared);
        map(&space, &file, PRIVATE, LENGTH, Sharing::Private);
        let shared = memory.shared_memory(SHARED_LENGTH, Sealing::Allowed, Accounting::PerPage);
        let shared = shared.unwrap();
        map(&space, &shared, SHARED, SHARED_LENGTH, Sharing::Shared);
        map(&other, &shared, SHARED, SHARED_LENGTH, Sharing::Shared);
        space.mmap(&fixed(ANON, LENGTH)).unwrap();
        space.mmap(&fixed(ANCHOR, PAGE_SIZE)).unwrap();
        space.enter();
        other.enter();
        let child = Self::fault_in(&space, &other);
        child.enter();
        let child_root = child.root();
        let children = Mutex::new(vec![child]);
        let machine = machine.clone();
        Self { machine, files, space, other, file, shared, children, area, child_root }
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
        touch(space, SHARED, &(0..16).collect::<Vec<_>>(), Access::Write);
        touch(space, ANCHOR, &[0], Access::Write);
        let guards = VirtAddr(ANON + 776 * PAGE_SIZE);
        space.madvise(guards, 2 * PAGE_SIZE, Advice::GuardInstall).unwrap();
        for probe in PROBES.into_iter().filter(|probe| probe.which == Which::Space) {
            let own = probe.at == PRIVATE + 3 * PAGE_SIZE + 8;
            if probe.at < PRIVATE || probe.at >= ANON || is_shared(probe.at) || own {
                let content = value(probe, BEFORE).to_ne_bytes();
                space.write_user(VirtAddr(probe.at), &content).unwrap();
            }
        }
        let page_out = |page: u64| {
            let at = VirtAddr(ANON + page * PAGE_SIZE);
            space.madvise(at, SWAPPED * PAGE_SIZE, Advice::PageOut).unwrap();
        };
        page_out(SWAPPED_PAGES[0]);
        let swapped = VirtAddr(SHARED + 8 * PAGE_SIZE);
        space.madvise(swapped, 8 * PAGE_SIZE, Advice::PageOut).unwrap();
        for page in 0..4 {
            touch(other, SHARED, &[page], Access::Write);
        }
        let child = space.fork().unwrap();
        // The space's pages are copied before they are swapped out; the child's pages are in
        // memory.
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

    /// The value that CPU 2 loads at the probe, if it may.
    pub fn load(&self, probe: Probe) -> Option<u64> {
        self.load_at(self.root(probe.which), probe.at)
    }

    pub fn load_at(&self, root: Frame, at: u64) -> Option<u64> {
        self.machine.load_user(root, VirtAddr(at), |_| Err(())).ok()
    }

    /// Stores at the probe on CPU 2 if allowed. Returns whether it was.
    pub fn store(&self, probe: Probe, value: u64) -> bool {
        let root = self.root(probe.which);
        self.machine.store_user(root, VirtAddr(probe.at), value, |_| Err(())).is_ok()
    }

    /// Stores at all probes and returns the stored or, where a store is refused, the loaded values.
    /// The child's probes are only loaded.
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

fn map<'m, A: Walk>(
    space: &AddressSpace<'m, Stepped<A>>,
    object: &Object<'m, Stepped<A>>,
    at: u64,
    length: u64,
    sharing: Sharing,
) {
    let place = Place::Fixed(VirtAddr(at));
    let request =
        MapRequest { length, protection: READ_WRITE, place, sharing, ..MapRequest::default() };
    let access = FileAccess::READ | FileAccess::WRITE;
    space.mmap_object(&request, &MapObject { object, offset: 0, access }).unwrap();
}
