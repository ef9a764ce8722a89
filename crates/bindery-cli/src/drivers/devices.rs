//! Devices whose frames programs map: blocks of memory that are shown and revoked at random.

use std::sync::Mutex;

use bindery::addr::{Frame, Order, PAGE_SIZE};
use bindery::arch::MemoryType;
use bindery::{FileAccess, FramePiece, FrameRange, FrameSource, Memory, Object, Platform};
use bindery_hosted::{Machine, Walk};
use bindery_linux::OpenFile;

use super::world::lock;

/// The pieces that a device may have at once, each in pages of its own.
const SLOTS: usize = 8;

/// The pages of a slot.
const SLOT_PAGES: u64 = 512;

/// A device: the frames that it shows, and those that it no longer shows.
#[derive(Debug, Default)]
pub(super) struct Device(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    shown: [Option<FramePiece>; SLOTS],
    /// Revoked blocks; a thread may be about to count the last unmapping of one.
    revoked: Vec<FrameRange>,
}

// SAFETY: 1. only programs use the frames; 2. `show` frees a block after its revoke, and only if no
// program maps it.
unsafe impl FrameSource for Device {
    fn piece(&self, page: u64) -> Option<FramePiece> {
        let slot = usize::try_from(page / SLOT_PAGES).ok()?;
        let piece = (*lock(&self.0).shown.get(slot)?)?;
        piece.frame_of(page).map(|_| piece)
    }
}

impl Device {
    /// Shows a new block of 2^`order` frames in a slot, starting at page `page` of the slot, or no
    /// block; frees the slot's current block.
    pub(super) fn show<A: Walk>(
        &self,
        (object, memory): (&Object<'_, Machine<A>>, &Memory<Machine<A>>),
        machine: &Machine<A>,
        slot: usize,
        (order, page): (Option<Order>, u64),
    ) {
        let slot = slot % SLOTS;
        let start = slot as u64 * SLOT_PAGES;
        let frames = order.and_then(|order| memory.allocate_frames(order));
        let piece = frames.map(|frames| {
            // Programs see the whole block, and an earlier process may have used its frames.
            machine.zero(frames.first, frames.count);
            let room = SLOT_PAGES - u64::from(frames.count);
            FramePiece { page: start + if room == 0 { 0 } else { page % room }, frames }
        });
        let old = std::mem::replace(&mut lock(&self.0).shown[slot], piece);
        // The whole slot is revoked, although part of it would suffice for most blocks.
        let revoked = object.revoke(start * PAGE_SIZE, SLOT_PAGES * PAGE_SIZE);
        revoked.expect("an object that shows frames");
        lock(&self.0).revoked.extend(old.map(|piece| piece.frames));
        self.free_revoked(memory);
    }

    /// Frees the revoked blocks that no program maps.
    fn free_revoked<A: Walk>(&self, memory: &Memory<Machine<A>>) {
        // SAFETY: 1. allocated in `show`; 2. revoked, and removed from the list that holds them.
        lock(&self.0).revoked.retain(|block| !unsafe { memory.free_frames(*block) });
    }

    /// Frees all blocks. No program maps the device at this point.
    pub(super) fn finish<A: Walk>(&self, memory: &Memory<Machine<A>>) {
        {
            let mut state = lock(&self.0);
            let shown = std::mem::take(&mut state.shown);
            state.revoked.extend(shown.into_iter().flatten().map(|piece| piece.frames));
        }
        self.free_revoked(memory);
        let left: Vec<Frame> = lock(&self.0).revoked.iter().map(|block| block.first).collect();
        assert!(left.is_empty(), "blocks of a device are counted as mapped: {left:?}");
    }
}

/// Two devices: one of normal memory, whose private mappings may be written, and one of another
/// memory type, if the architecture has one.
pub(super) const DEVICES: usize = 2;

/// The devices as open files.
pub(super) fn open<'m, A: Walk>(
    memory: &'m Memory<Machine<A>>,
    devices: &'m [Device; DEVICES],
) -> Vec<OpenFile<'m, Machine<A>>> {
    let access = FileAccess::READ | FileAccess::WRITE;
    let size = SLOTS as u64 * SLOT_PAGES * PAGE_SIZE;
    let types = [MemoryType::Normal, MemoryType::WriteCombining];
    let open = |(device, memory_type): (&'m Device, MemoryType)| {
        let object = memory
            .frame_object(device, size, memory_type)
            .or_else(|_| memory.frame_object(device, size, MemoryType::Normal));
        OpenFile { object: object.expect("memory enough"), access }
    };
    devices.iter().zip(types).map(open).collect()
}
