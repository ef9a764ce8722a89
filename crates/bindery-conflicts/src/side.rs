//! One of the two CPUs of a pair: its addresses, and the calls that operations consist of.

use std::cell::{Cell, RefCell};

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{
    Access, AddressSpace, Advice, FileAccess, MapObject, MapRequest, Memory, Object, Place,
    Protection, Sharing, SwapArea,
};

use crate::platform::TwoCpus;

/// An address space of the machine.
pub type Space = AddressSpace<'static, TwoCpus>;

/// 1 KiB.
pub const KIB: u64 = 1 << 10;
/// 1 MiB: the addresses of 256 pages.
pub const MIB: u64 = 1 << 20;
/// 1 GiB.
pub const GIB: u64 = 1 << 30;
/// Addresses that both sides use. They end with the last address of a table.
pub const COMMON: u64 = 0x3000_0000_0000;

/// The two swap areas; only one receives pages.
pub struct Areas {
    /// On a device without a queue.
    pub device: SwapArea,
    /// In compressed memory.
    pub compressed: SwapArea,
}

impl Areas {
    /// Selects the device for the next swap-outs.
    pub fn swap_to_device(&self, memory: &Memory<TwoCpus>) {
        memory.stop_swapping_to(&self.compressed);
        memory.resume_swapping_to(&self.device);
    }

    /// Selects compressed memory for the next swap-outs.
    pub fn swap_to_compressed_memory(&self, memory: &Memory<TwoCpus>) {
        memory.stop_swapping_to(&self.device);
        memory.resume_swapping_to(&self.compressed);
    }
}

/// One CPU of a pair.
pub struct Side<'a> {
    /// 0 or 1.
    pub number: u64,
    /// The side's address space, which the other side may share.
    pub space: &'a Space,
    /// Whether the other side has another address space.
    pub has_own_space: bool,
    /// Shared memory of both sides.
    pub object: &'a Object<'static, TwoCpus>,
    /// The swap areas.
    pub areas: &'a Areas,
    /// The address that the operation returned.
    pub result: Cell<u64>,
    /// The child of a fork.
    pub child: RefCell<Option<Space>>,
}

impl Side<'_> {
    /// The start of the addresses that only this side uses. The sides share none of the tables for
    /// these addresses.
    pub fn own(&self) -> u64 {
        0x1000_0000_0000 + self.number * 64 * GIB
    }

    /// The 64 KiB that most operations use, away from the start of the side's own addresses.
    pub fn piece(&self) -> u64 {
        self.own() + 128 * KIB
    }

    /// Whether this side prepares and removes shared mappings. In a common address space only one
    /// side is in charge.
    pub fn is_in_charge(&self) -> bool {
        self.has_own_space || self.number == 0
    }

    /// mmap(2) at `at`.
    pub fn map(&self, at: u64, length: u64) {
        self.space.mmap(&request(Place::Fixed(VirtAddr(at)), length)).expect("addresses are free");
    }

    /// Maps the shared memory at `at`.
    pub fn map_object(&self, at: u64, length: u64) {
        let place = Place::Fixed(VirtAddr(at));
        let request = MapRequest { sharing: Sharing::Shared, ..request(place, length) };
        let access = FileAccess::READ | FileAccess::WRITE;
        let source = MapObject { object: self.object, offset: 0, access };
        self.space.mmap_object(&request, &source).expect("addresses are free");
    }

    /// munmap(2).
    pub fn unmap(&self, at: u64, length: u64) {
        self.space.munmap(VirtAddr(at), length).expect("the range is valid");
    }

    /// A fault of a write to `at`.
    pub fn touch(&self, at: u64) {
        self.space.fault(VirtAddr(at), Access::Write).expect("memory is mapped and free");
    }

    /// Faults of writes to each page.
    pub fn touch_all(&self, at: u64, length: u64) {
        (0..length / PAGE_SIZE).for_each(|page| self.touch(at + page * PAGE_SIZE));
    }

    /// madvise(2) for the piece.
    pub fn advise(&self, advice: Advice) {
        self.space.madvise(VirtAddr(self.piece()), 64 * KIB, advice).expect("the range is mapped");
    }

    /// Maps and touches another page under the piece's table, so that the table is not freed.
    pub fn keep_table(&self) {
        self.map(self.own(), PAGE_SIZE);
        self.touch(self.own());
    }

    /// Maps the piece.
    pub fn map_piece(&self) {
        self.map(self.piece(), 64 * KIB);
    }

    /// Maps the piece and writes to each page.
    pub fn fill_piece(&self) {
        self.map_piece();
        self.touch_all(self.piece(), 64 * KIB);
    }

    /// Writes pages to the piece that compress to half their size, and differ between repetitions.
    pub fn write_piece(&self, number: u64) {
        let mut next = number << 1 | self.number;
        let mut page = [0; PAGE_SIZE as usize];
        for at in (0..64 * KIB).step_by(PAGE_SIZE as usize) {
            for byte in &mut page[..PAGE_SIZE as usize / 2] {
                next = next.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                *byte = (next >> 56) as u8;
            }
            self.space.write_user(VirtAddr(self.piece() + at), &page).expect("it is mapped");
        }
    }

    /// 2 MiB that a large folio may fill, outside the piece's table.
    pub fn huge(&self) -> u64 {
        self.own() + 4 * MIB
    }

    /// Maps 2 MiB for a large folio.
    pub fn map_huge(&self) {
        self.map(self.huge(), 2 * MIB);
        let advised = self.space.madvise(VirtAddr(self.huge()), 2 * MIB, Advice::Huge);
        advised.expect("the range is mapped");
    }

    /// Unmaps the piece.
    pub fn unmap_piece(&self) {
        self.unmap(self.piece(), 64 * KIB);
    }
}

/// A request for private memory.
pub fn request(place: Place, length: u64) -> MapRequest {
    let protection = Protection::READ | Protection::WRITE;
    MapRequest { length, protection, place, ..MapRequest::default() }
}
