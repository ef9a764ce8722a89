//! Frames that are not the core's, as a driver shows them to programs.

use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};

use bindery::addr::{Frame, VirtAddr, VirtRange};
use bindery::arch::MemoryType;
use bindery::{
    AddressSpace, Error, FileAccess, FramePiece, FrameRange, FrameSource, Inspection, MapObject,
    MapRequest, Object, Platform, Sharing,
};

use crate::fixed;

pub const BOTH: FileAccess = FileAccess::READ.union(FileAccess::WRITE);
/// A device's frames, far above the memory of every machine here, aligned to 1 GiB.
pub const DEVICE: Frame = Frame(0x20_0000);

/// A driver's frames, which a test changes.
#[derive(Default)]
pub struct Driver {
    pieces: Mutex<Vec<FramePiece>>,
    mappings: AtomicI64,
    /// The number of mappings that were made.
    made: AtomicI64,
    /// The number of mappings at the last count.
    counted: AtomicI64,
    moves: Mutex<Vec<(VirtRange, VirtAddr)>>,
    /// The error of each move, and of each cut.
    refusals: Mutex<[Option<Error>; 2]>,
    /// The cuts that the driver was asked about.
    cuts: Mutex<Vec<u64>>,
}

// SAFETY: 1. only programs use the frames of the tests' devices, and blocks of the memory that the
// test allocated; 2. the tests free such a block only after they have revoked it, or verify that
// the free fails.
unsafe impl FrameSource for Driver {
    fn piece(&self, page: u64) -> Option<FramePiece> {
        let pieces = self.pieces.lock().unwrap();
        pieces.iter().find(|piece| piece.frame_of(page).is_some()).copied()
    }

    fn mapped(&self) {
        self.mappings.fetch_add(1, Ordering::Relaxed);
        self.made.fetch_add(1, Ordering::Relaxed);
    }

    fn unmapped(&self) {
        self.mappings.fetch_sub(1, Ordering::Relaxed);
    }

    fn moved(&self, from: VirtRange, to: VirtAddr) {
        self.moves.lock().unwrap().push((from, to));
    }

    fn may_move(&self, _: VirtRange, _: VirtAddr) -> Result<(), Error> {
        self.refusals.lock().unwrap()[0].map_or(Ok(()), Err)
    }

    fn may_split(&self, mapping: VirtRange, at: VirtAddr) -> Result<(), Error> {
        assert!(mapping.start() < at && at < mapping.end(), "{at} is not inside {mapping}");
        self.cuts.lock().unwrap().push(at.0);
        self.refusals.lock().unwrap()[1].map_or(Ok(()), Err)
    }
}

impl Driver {
    pub fn of(pieces: &[(u64, Frame, u32)]) -> Self {
        let driver = Self::default();
        driver.set(pieces);
        driver
    }

    pub fn set(&self, pieces: &[(u64, Frame, u32)]) {
        let piece = |&(page, first, count): &(u64, Frame, u32)| FramePiece {
            page,
            frames: FrameRange { first, count },
        };
        *self.pieces.lock().unwrap() = pieces.iter().map(piece).collect();
    }

    /// Refuses all moves and all cuts from now on with these errors, or allows them.
    pub fn refuse(&self, moves: Option<Error>, cuts: Option<Error>) {
        *self.refusals.lock().unwrap() = [moves, cuts];
    }

    /// The addresses of the cuts that the driver was asked about since the last call.
    pub fn take_cuts(&self) -> Vec<u64> {
        std::mem::take(&mut *self.cuts.lock().unwrap())
    }

    /// The number of mappings that were made and of those that were removed, since the last call.
    pub fn take_made_and_removed(&self) -> (i64, i64) {
        let (made, now) = (self.made.swap(0, Ordering::Relaxed), self.mappings());
        (made, made - (now - self.counted.swap(now, Ordering::Relaxed)))
    }

    /// The moves since the last call: the start and the pages of the source, and the destination.
    pub fn take_moves(&self) -> Vec<(u64, u64, u64)> {
        let moves = std::mem::take(&mut *self.moves.lock().unwrap());
        moves.iter().map(|(from, to)| (from.start().0, from.pages(), to.0)).collect()
    }

    pub fn mappings(&self) -> i64 {
        self.mappings.load(Ordering::Relaxed)
    }
}

pub fn shared(at: u64, length: u64) -> MapRequest {
    MapRequest { sharing: Sharing::Shared, ..fixed(at, length) }
}

pub fn map<'m, P: Platform>(
    space: &AddressSpace<'m, P>,
    object: &Object<'m, P>,
    request: &MapRequest,
) -> Result<VirtAddr, Error> {
    space.mmap_object(request, &MapObject { object, offset: 0, access: BOTH })
}

/// The frame, the memory type and the level of the leaf at an address.
pub fn leaf<P: Platform>(space: &AddressSpace<'_, P>, at: u64) -> Option<(Frame, MemoryType, u8)> {
    match space.inspect(VirtAddr(at)) {
        Inspection::Page { frame, attributes, level, .. } => {
            Some((frame, attributes.memory, level.number()))
        }
        Inspection::Absent(_) | Inspection::Empty => None,
    }
}
