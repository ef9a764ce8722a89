//! [`FrameSource`]: frames that the core does not own, mapped into programs: device registers,
//! frame buffers, a device's other buffers, pages that a kernel shows (Linux: `VM_PFNMAP`).
//!
//! Leaves of such a mapping have no folio. They are counted only if their frames came from
//! [`crate::Memory::allocate_frames`], so that the frames are not freed while a program can access
//! them.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::Memory;
use crate::addr::{Frame, PAGE_SHIFT, PageRange, VirtAddr, VirtRange};
use crate::arch::MemoryType;
use crate::error::Error;
use crate::frame::FrameRange;
use crate::platform::Platform;
use crate::vma::{MappingFlags, Vma};

use super::Object;
use super::backing::Backing;
use super::create::add;
use super::lent::Lent;
use super::mappings::{MappingCopies, unmap};
use super::seals::Seals;
use super::state::{ObjectState, pages_of};

/// Consecutive frames that an object shows at consecutive pages.
///
/// ```
/// use bindery::addr::Frame;
/// use bindery::{FramePiece, FrameRange};
///
/// /// A frame buffer of 8 MiB, from the beginning of its object on.
/// const BUFFER: FramePiece =
///     FramePiece { page: 0, frames: FrameRange { first: Frame(0xe_0000), count: 2048 } };
/// assert!(BUFFER.frame_of(2047).is_some() && BUFFER.frame_of(2048).is_none());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FramePiece {
    /// The page of the object that shows the first frame.
    pub page: u64,
    /// The frames.
    pub frames: FrameRange,
}

impl FramePiece {
    /// The frame at page `page` of the object; `None` for a page of another piece.
    ///
    /// Context: any.
    pub const fn frame_of(&self, page: u64) -> Option<Frame> {
        let number = page.wrapping_sub(self.page);
        if number < self.frames.count as u64 {
            Some(Frame(self.frames.first.0.wrapping_add(number as u32)))
        } else {
            None
        }
    }

    /// The pages of the object that the piece covers.
    pub(crate) fn pages(&self) -> PageRange {
        let end = self.page.saturating_add(u64::from(self.frames.count));
        PageRange { first: self.page, end }
    }
}

/// The frames behind an object of [`Memory::frame_object`]. The embedder provides them, for example
/// as a list of a device's memory or through a driver's handler (Linux: `remap_pfn_range`,
/// `vmf_insert_pfn`).
///
/// A fault requests the piece around its page. It maps the part of the piece that one entry of level
/// 3 covers, if one leaf of 1 GiB can ([`Platform::largest_shown_leaf`]), or else the part that one
/// entry of level 2 covers, in the largest entries that fit. So the longer the piece, the fewer the
/// faults. A leaf of 1 GiB takes 513 tables, with which it can be cut at any page; without memory
/// for them, the fault maps 2 MiB.
///
/// # Context
/// Context: spins. [`FrameSource::piece`] is called with the VMA and the object's `invalidate_lock`
/// held for reading, on any CPU, for several pages at the same time. `mmap`, when it chooses an
/// address, also calls it with the mutex of an address space held. It answers from its own data and
/// calls no function of the core. The notices may be called with the mutex of an address space and
/// locks of the object held. So they acquire only innermost spin locks, and call no function of the
/// core either. [`Object::revoke`] is called without a lock that one of the methods acquires.
///
/// `mmap` of a private mapping that may be written asks for all of its pages, without a lock of the
/// core. A notice is called in the thread of the call or of the exit that it reports. A call that
/// fails may have made mappings and removed them, or split one; it has moved none. `mremap` that moves a part of a mapping makes a mapping of it, moves the pages, and
/// removes the part; if it moves a whole mapping, it may only move that.
///
/// # Safety
/// 1. From the answer on until [`Object::revoke`] of their pages returns, programs may read and
///    write the frames of a piece, as their mappings allow, and so may the core when a private
///    mapping copies a page. No safe code relies on the frames' content in that time.
/// 2. Until then the frames keep their use: they are not added to a [`Memory`], and those of
///    [`Memory::allocate_frames`] are not freed.
pub unsafe trait FrameSource: Send + Sync {
    /// The piece with page `page` of the object. `None` if no piece has the page now: the access
    /// fails with [`crate::FaultError::Bus`].
    fn piece(&self, page: u64) -> Option<FramePiece>;

    /// Called when a mapping of the object was made: by a call, by `fork`, or because a part was
    /// split off another mapping, for example to be unmapped (Linux: `vm_operations_struct::open`).
    fn mapped(&self) {}

    /// Called when a mapping of the object was removed, or the part of one that was split off
    /// (Linux: `vm_operations_struct::close`). None of its pages is mapped any longer.
    fn unmapped(&self) {}

    /// Called when `mremap` has moved the mapping at `from`, or this part of a mapping, to `to`.
    /// The pages are mapped there now, and nothing is mapped at `from`. Both are addresses of the
    /// process that calls.
    fn moved(&self, _from: VirtRange, _to: VirtAddr) {}

    /// Whether `mremap` may move the mapping at `from`, or this part of a mapping, to `to` (Linux: the
    /// error of `vm_operations_struct::mremap`). Asked before anything has changed, once or more often
    /// for each move; the move may fail afterwards. The provided version consents.
    ///
    /// # Errors
    /// The error that `mremap` returns; the mapping stays, and so do those at `to`.
    fn may_move(&self, _from: VirtRange, _to: VirtAddr) -> Result<(), Error> {
        Ok(())
    }

    /// Whether the mapping may be cut in two at `at`, an address inside, so that a call can unmap,
    /// move or change a part of it (Linux: `vm_operations_struct::may_split`). Asked before the call
    /// changes the mapping, once or more often for each cut; the call may fail afterwards. The provided
    /// version consents.
    ///
    /// # Errors
    /// The error that the call returns. The mapping stays as it is. Like any error of the call, it
    /// leaves what the call has done to other mappings before this one.
    fn may_split(&self, _mapping: VirtRange, _at: VirtAddr) -> Result<(), Error> {
        Ok(())
    }
}

/// A fixed list of frames as a [`FrameSource`].
///
/// ```
/// use bindery::addr::Frame;
/// use bindery::arch::MemoryType;
/// use bindery::{Error, FrameList, FramePiece, FrameRange, Memory, Object, Platform};
///
/// /// The registers of a device: two pages in other places.
/// static REGISTERS: [FramePiece; 2] = [
///     FramePiece { page: 0, frames: FrameRange { first: Frame(0xfe_c00), count: 1 } },
///     FramePiece { page: 1, frames: FrameRange { first: Frame(0xfe_d00), count: 1 } },
/// ];
/// // SAFETY: 1. and 2. of `FrameSource`: a device's registers, which nothing else uses.
/// static DEVICE: Option<FrameList<'static>> = unsafe { FrameList::new(&REGISTERS) };
///
/// fn open<P: Platform>(memory: &Memory<P>) -> Result<Object<'_, P>, Error> {
///     let list = DEVICE.as_ref().ok_or(Error::Invalid)?;
///     memory.frame_object(list, 2 << 12, MemoryType::Device)
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct FrameList<'l>(&'l [FramePiece]);

impl<'l> FrameList<'l> {
    /// A list of pieces in ascending order of their pages. `None` if two overlap or are not in
    /// order.
    ///
    /// Context: any. Complexity: linear in the pieces.
    ///
    /// # Safety
    /// 1. The frames meet the two obligations of [`FrameSource`], for as long as an object has the
    ///    list.
    pub const unsafe fn new(pieces: &'l [FramePiece]) -> Option<Self> {
        let mut number = 1;
        while number < pieces.len() {
            let (low, high) = (&pieces[number - 1], &pieces[number]);
            if low.page.saturating_add(low.frames.count as u64) > high.page {
                return None;
            }
            number += 1;
        }
        Some(Self(pieces))
    }
}

// SAFETY: 1. and 2. obligation 1 of `FrameList::new`.
unsafe impl FrameSource for FrameList<'_> {
    fn piece(&self, page: u64) -> Option<FramePiece> {
        let after = self.0.partition_point(|piece| piece.page <= page);
        let piece = self.0.get(after.checked_sub(1)?)?;
        piece.frame_of(page).map(|_| *piece)
    }
}

/// The frames that an object shows.
#[derive(Clone, Copy)]
pub(crate) struct ShownFrames<'o> {
    source: &'o dyn FrameSource,
    /// The memory type of the leaves that map the frames.
    pub(crate) memory: MemoryType,
}

impl<'o> ShownFrames<'o> {
    pub(super) fn new(source: &'o dyn FrameSource, memory: MemoryType) -> Self {
        Self { source, memory }
    }

    /// The piece with page `page` of an object of `pages` pages, limited to the object.
    pub(crate) fn piece(&self, page: u64, pages: u64) -> Option<FramePiece> {
        let mut piece = self.source.piece(page)?;
        piece.frame_of(page)?;
        // The frame numbers of a piece do not wrap, and neither do its pages.
        let most = u64::from(u32::MAX - piece.frames.first.0);
        let count = u64::from(piece.frames.count).min(most).min(pages.checked_sub(piece.page)?);
        piece.frames.count = count as u32;
        piece.frame_of(page).map(|_| piece)
    }

    /// Checks that the source has all of these pages of an object of `size` pages now. Calls
    /// `between` before each piece.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it lacks a page; those of `between`.
    pub(crate) fn check_all(
        &self,
        pages: PageRange,
        size: u64,
        between: impl Fn() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut page = pages.first;
        while page < pages.end {
            between()?;
            page = self.piece(page, size).ok_or(Error::Invalid)?.pages().end;
        }
        Ok(())
    }

    pub(super) fn note_mapped(&self) {
        self.source.mapped();
    }

    pub(super) fn note_unmapped(&self) {
        self.source.unmapped();
    }
}

impl ObjectState {
    /// Tells the source of the object's frames, if it has one, that a mapping has lost a part. For
    /// the source, the part was split off and removed.
    #[cold]
    pub(crate) fn note_shortened(&self) {
        if let Some(frames) = self.frames() {
            frames.source.mapped();
            frames.source.unmapped();
        }
    }

    /// Tells the source of the object's frames, if it has one, that the pages at `from` have moved.
    #[cold]
    pub(crate) fn note_moved(&self, from: VirtRange, to: VirtAddr) {
        if let Some(frames) = self.frames() {
            frames.source.moved(from, to);
        }
    }
}

impl Vma {
    /// Whether a call may cut `range` out of the VMA. Frames that the core does not own may have a
    /// source that refuses the cut.
    ///
    /// # Errors
    /// [`FrameSource::may_split`].
    #[inline]
    pub(crate) fn may_be_cut(&self, range: VirtRange) -> Result<(), Error> {
        if self.has(MappingFlags::FRAMES) { self.ask_to_cut(range) } else { Ok(()) }
    }

    #[cold]
    fn ask_to_cut(&self, range: VirtRange) -> Result<(), Error> {
        let Some(frames) = self.object().and_then(ObjectState::frames) else { return Ok(()) };
        let (start, end) = (range.start(), range.end());
        if self.start() < start.0 && start.0 < self.end() {
            frames.source.may_split(self.range(), start)?;
        }
        if self.start() < end.0 && end.0 < self.end() {
            frames.source.may_split(self.range(), end)?;
        }
        Ok(())
    }

    /// Whether a call may move `source`, a part of the VMA, to `to`.
    ///
    /// # Errors
    /// [`FrameSource::may_split`] and [`FrameSource::may_move`].
    #[inline]
    pub(crate) fn may_be_moved(&self, source: VirtRange, to: VirtAddr) -> Result<(), Error> {
        if self.has(MappingFlags::FRAMES) { self.ask_to_move(source, to) } else { Ok(()) }
    }

    #[cold]
    fn ask_to_move(&self, source: VirtRange, to: VirtAddr) -> Result<(), Error> {
        self.ask_to_cut(source)?;
        let frames = self.object().and_then(ObjectState::frames);
        frames.map_or(Ok(()), |frames| frames.source.may_move(source, to))
    }
}

impl<P: Platform> Memory<P> {
    /// An object of `size` bytes that shows frames of `source`, which are not the core's. Programs
    /// map it with [`crate::AddressSpace::mmap_object`], and access it with the memory type
    /// `memory`. A memory type is part of an entry, like its permissions, and all calls preserve
    /// it.
    ///
    /// Such a mapping behaves like one of Linux with `VM_PFNMAP`: it does not count as resident, is
    /// never swapped, is neither pinned nor copied by the kernel, and refuses advice that changes
    /// contents. Reads and writes through the handle are refused ([`Error::Invalid`]). `source`
    /// outlives the object and all its holders.
    ///
    /// A private mapping of [`MemoryType::Normal`] may be writable: the first write to a page
    /// copies it, and the copy is anonymous memory, which is swapped and forked like any other.
    /// `source` has frames for the whole of such a mapping when it is made; otherwise `mmap` fails
    /// with [`Error::Invalid`], also for a mapping that is not writable yet.
    /// Only frames of [`Memory::allocate_frames`] can be copied, because the direct map has them; a
    /// private write to any other fails with [`crate::FaultError::Bus`]. A private mapping of any
    /// other memory type is never writable, because the direct map is normal memory.
    ///
    /// Without an address, `mmap` chooses one that is congruent with the first frame, modulo the
    /// largest leaf for which the mapping has room.
    ///
    /// Frames of the memory are shown only if they came from [`Memory::allocate_frames`]; an access
    /// to any other frame of the memory fails with [`crate::FaultError::Bus`].
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the architecture or the machine
    /// ([`Platform::page_based_memory_types`]) has no such memory type; [`Error::TooLarge`] above
    /// 2^63 - 1 bytes; [`Error::OutOfMemory`].
    pub fn frame_object<'m>(
        &'m self,
        source: &'m dyn FrameSource,
        size: u64,
        memory: MemoryType,
    ) -> Result<Object<'m, P>, Error> {
        new_object(self, source, size, memory)
    }
}

fn new_object<'m, P: Platform>(
    memory: &'m Memory<P>,
    source: &'m dyn FrameSource,
    size: u64,
    memory_type: MemoryType,
) -> Result<Object<'m, P>, Error> {
    if memory.memory_type_bits(memory_type).is_none() {
        return Err(Error::Invalid);
    }
    // SAFETY: 1. the source is lent for 'm, the lifetime of all holders and of the last release.
    let source = unsafe { Lent::source(source) };
    add(memory, Backing::Frames { source, memory: memory_type }, size, Seals::SEAL)
}

impl<P: Platform> Object<'_, P> {
    /// Unmaps `length` bytes from `offset` on in all programs, in whole pages, and flushes every
    /// TLB. A later access asks the [`FrameSource`] again, so the source forgets or replaces the
    /// frames before this call. When the call returns, no program can access a frame that the
    /// source had named before. Copies that private mappings have made belong to the program and
    /// stay. A length of zero revokes nothing. (Linux: `unmap_mapping_range` without `even_cows`,
    /// where zero means the rest.)
    ///
    /// Needs no memory, and always succeeds for an object with a frame source.
    ///
    /// Context: may sleep. Complexity: linear in the mappings of the range and in their runs; a
    /// whole table is unmapped by one entry, except in private mappings.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an object that shows no frames of a [`FrameSource`].
    pub fn revoke(&self, offset: u64, length: u64) -> Result<(), Error> {
        let object = self.state();
        if object.frames().is_none() {
            return Err(Error::Invalid);
        }
        if length == 0 {
            return Ok(());
        }
        let end = offset.saturating_add(length);
        let pages = PageRange { first: offset >> PAGE_SHIFT, end: pages_of(end) };
        revoke(self.memory, object, pages);
        Ok(())
    }

    /// Whether the object shows frames of a [`FrameSource`].
    ///
    /// Context: any.
    pub fn shows_frames(&self) -> bool {
        self.state().frames().is_some()
    }
}

/// Unmaps the pages, except the copies that private mappings have made of them, which refer to no
/// frame of the source. A fault that has asked the source and has not yet mapped the answer holds
/// the lock for reading, so its leaves are unmapped too.
fn revoke<P: Platform>(memory: &Memory<P>, object: &ObjectState, pages: PageRange) {
    object.invalidate_lock.with_write(memory.platform(), |proof| {
        unmap(memory, object, pages, MappingCopies::Kept, proof);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(page: u64, first: u32, count: u32) -> FramePiece {
        FramePiece { page, frames: FrameRange { first: Frame(first), count } }
    }

    #[test]
    fn a_list_is_in_order_without_overlaps() {
        // SAFETY: 1. no object has the list.
        let is_list = |pieces: &[FramePiece]| unsafe { FrameList::new(pieces) }.is_some();
        assert!(is_list(&[]) && is_list(&[piece(0, 7, 2), piece(2, 1, 1), piece(9, 1, 1)]));
        assert!(!is_list(&[piece(0, 7, 3), piece(2, 1, 1)]));
        assert!(!is_list(&[piece(2, 1, 1), piece(0, 7, 2)]));
    }

    #[test]
    fn a_page_is_found_in_its_piece() {
        let pieces = [piece(1, 100, 2), piece(5, 7, 1)];
        // SAFETY: 1. no object has the list.
        let list = unsafe { FrameList::new(&pieces) }.unwrap();
        let found = [0, 1, 2, 3, 5, 6].map(|page| list.piece(page).map(|found| found.page));
        assert_eq!(found, [None, Some(1), Some(1), None, Some(5), None]);
        assert_eq!(pieces[0].frame_of(2), Some(Frame(101)));
    }

    #[test]
    fn a_piece_ends_with_object_and_frames() {
        let pieces = [piece(0, u32::MAX - 2, 100)];
        // SAFETY: 1. no object has the list.
        let list = unsafe { FrameList::new(&pieces) }.unwrap();
        let frames = ShownFrames::new(&list, MemoryType::Device);
        assert_eq!(frames.piece(0, 50).map(|piece| piece.frames.count), Some(2));
        assert_eq!(frames.piece(0, 1).map(|piece| piece.frames.count), Some(1));
        assert_eq!(frames.piece(2, 50), None, "no frame has the number `u32::MAX`");
        assert_eq!(frames.piece(1, 1), None, "beyond the object");
    }
}
