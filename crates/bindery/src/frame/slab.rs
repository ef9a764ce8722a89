//! [`Slab`]: small objects of the core, whose allocations may fail.
//!
//! ```text
//! frame of kind Slab   | Header | slot 0 | slot 1 | slot 2 | ... | slot n-1 | rest |
//!                        ^ number of the frame
//! ```
//!
//! The slab's header is found by rounding an object's address down to a page. It names the frame
//! and records the positions of the slots, for code that does not know the object type. The rest is
//! in the frame's metadata, in `word`: the first free slot (low 16 bits, all ones for none), the
//! number of slots that were ever used (next 16), so that a new frame need not be threaded, and the
//! number of objects in use (next 16). A free slot begins with the number of the next free slot.
//! Frames with both room and objects are on a list through `next` and `previous`. Full frames are
//! on no list. One empty frame is kept as a spare, and others are freed. More spare frames are kept
//! if a caller has requested them ([`super::slab_pool`]).
//!
//! Each slab has one spin lock, held for a constant number of steps. The allocator's lock is
//! acquired inside the slab's lock. For slabs of the most frequently allocated kinds, each CPU has
//! a magazine of free objects ([`super::magazine`]), whose lock is acquired before the slab's lock.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::marker::PhantomData;
use core::ptr::{self, NonNull};
use core::sync::atomic::Ordering::Relaxed;

use super::magazine::MAGAZINES;
use super::meta::{FrameMeta, MetaKind, NONE};
use super::{AllocateFor, Frames};
use crate::addr::{Frame, Order, PAGE_SIZE};
use crate::platform::Platform;
use crate::sync::{Mutex, MutexGuard};

/// The largest object, in bytes: at least three fit in a frame.
pub(crate) const MAX_OBJECT: usize = 1024;

/// The first bytes of a slab's frame.
struct Header {
    frame: u32,
    shape: Shape,
}

/// The positions of the slots in a frame.
#[derive(Clone, Copy)]
struct Shape {
    first: u16,
    size: u16,
    /// The number of slots.
    count: u16,
}

/// The frame that contains an object of a slab. Only the address of `object` is used, because a
/// pointer made from a reference may not be valid beyond the object.
///
/// # Safety
/// 1. The address is that of a live object of a slab.
pub(crate) unsafe fn frame_of<T>(object: NonNull<T>) -> Frame {
    let page = object.addr().get() & !(PAGE_SIZE as usize - 1);
    let header = ptr::with_exposed_provenance::<Header>(page);
    // SAFETY: the object lies in a slab's frame (obligation 1), which is page-aligned and begins
    // with a header that does not change while the frame has objects. `Slab::make_empty` has
    // exposed the frame's provenance.
    Frame(unsafe { header.read() }.frame)
}

/// Unused memory for an object of a slab. Must be filled or freed ([`Slab::unreserve`]).
#[must_use]
pub(crate) struct Reserved<T> {
    pub(super) slot: NonNull<T>,
}

impl<T> Reserved<T> {
    /// Builds the object in place, where it remains until [`Slab::free`].
    #[inline]
    pub(crate) fn fill(self, make: impl FnOnce() -> T) -> NonNull<T> {
        // SAFETY: `Slab::reserve` has allocated the slot: aligned and large enough for a `T`,
        // occupied by no object, and not allocated again until it is freed.
        unsafe { self.slot.write(make()) };
        self.slot
    }
}

/// The free-slot number that means "none".
const NO_SLOT: u16 = u16::MAX;

/// Objects of one type, each allocated and freed separately.
///
/// Dropping a slab does not free its objects or its spare frame, because the drop has no access to
/// the platform: free all objects and call [`Slab::trim`] before. The memory layout is the same for
/// all object types.
// At most two cache lines: a larger array of slabs would be placed before the frames in `Memory`,
// and each fault would have to add their offset.
#[repr(C, align(128))]
pub(crate) struct Slab<T, P: Platform> {
    /// The index of the slab's magazine among those of a CPU.
    pub(super) place: usize,
    lists: Line<Mutex<P::SpinLock, SlabLists>>,
    /// Objects are accessed only through the pointers that the slab returned.
    objects: PhantomData<fn(T) -> T>,
}

/// A value that each use writes, on its own cache line, without any read-only field.
#[repr(align(64))]
struct Line<T>(T);

pub(super) struct SlabLists {
    /// The first of the frames with room and objects.
    pub(super) partial: u32,
    /// The first of the frames without objects.
    pub(super) spare: u32,
    /// The number of allocations that are draining the magazines.
    pub(super) drains: u32,
    /// The number of frames that the slab keeps ([`Slab::pool`]).
    pub(super) pooled: u32,
    /// The number of calls that keep them.
    pub(super) pools: u64,
    /// The number of objects, including slots in magazines.
    pub(super) objects: u64,
    pub(super) frames: u64,
}

/// The `word` in the metadata of a slab's frame.
#[derive(Clone, Copy)]
struct SlabWord {
    free: u16,
    /// The number of slots that were ever used; later slots are fresh.
    used: u16,
    /// The number of slots that hold an object.
    objects: u16,
}

impl SlabWord {
    const EMPTY: Self = Self { free: NO_SLOT, used: 0, objects: 0 };

    fn load(meta: &FrameMeta) -> Self {
        let word = meta.word.load(Relaxed);
        Self { free: word as u16, used: (word >> 16) as u16, objects: (word >> 32) as u16 }
    }

    fn store(self, meta: &FrameMeta) {
        let slots = u64::from(self.free) | u64::from(self.used) << 16;
        meta.word.store(slots | u64::from(self.objects) << 32, Relaxed);
    }
}

impl SlabLists {
    const EMPTY: Self =
        Self { partial: NONE, spare: NONE, drains: 0, pooled: 0, pools: 0, objects: 0, frames: 0 };

    /// Whether a frame has both room and objects.
    #[inline]
    pub(super) fn has_partial(&self) -> bool {
        self.partial != NONE
    }
}

impl<T, P: Platform> Slab<T, P> {
    /// Slots are aligned for the object and for the number stored in a free slot.
    const ALIGN: usize =
        if align_of::<T>() > align_of::<u16>() { align_of::<T>() } else { align_of::<u16>() };
    const SLOT: usize = {
        assert!(size_of::<T>() <= MAX_OBJECT, "too large for a slab");
        let size =
            if size_of::<T>() > size_of::<u16>() { size_of::<T>() } else { size_of::<u16>() };
        size.next_multiple_of(Self::ALIGN)
    };
    const FIRST: usize = size_of::<Header>().next_multiple_of(Self::ALIGN);
    /// The number of objects in a frame.
    pub(crate) const PER_FRAME: u16 = {
        assert!(Self::ALIGN <= MAX_OBJECT, "aligned too much for a slab");
        ((PAGE_SIZE as usize - Self::FIRST) / Self::SLOT) as u16
    };

    const SHAPE: Shape =
        Shape { first: Self::FIRST as u16, size: Self::SLOT as u16, count: Self::PER_FRAME };

    /// A slab without objects, frames and magazines.
    pub(crate) const fn new() -> Self {
        Self::with_magazine(MAGAZINES)
    }

    /// A slab without objects and frames, whose magazines are those at `place` of each CPU. No
    /// other slab uses that place with the same [`Frames`]. At [`MAGAZINES`] and above, the slab
    /// has no magazines.
    pub(crate) const fn with_magazine(place: usize) -> Self {
        Self { place, lists: Line(Mutex::new(SlabLists::EMPTY)), objects: PhantomData }
    }

    #[inline(always)]
    pub(super) fn lock(&self) -> MutexGuard<'_, P::SpinLock, SlabLists> {
        self.lists.0.lock()
    }

    /// Moves `value` into memory of its own, where it stays until [`Slab::free`]. `None`, with
    /// `value` dropped, if a frame is needed and none is free. Does not sleep. O(1); linear in the
    /// number of CPUs if a frame is needed and none is free.
    pub(crate) fn allocate(&self, frames: &Frames<P>, value: T) -> Option<NonNull<T>> {
        self.allocate_with(frames, || value)
    }

    /// As [`Slab::allocate`], for the value that `make` returns. Builds a large value in place
    /// instead of copying it.
    #[inline]
    pub(crate) fn allocate_with(
        &self,
        frames: &Frames<P>,
        make: impl FnOnce() -> T,
    ) -> Option<NonNull<T>> {
        Some(self.reserve(frames)?.fill(make))
    }

    /// Takes memory for one object, for a caller that must not fail halfway. The caller fills the
    /// memory later ([`Reserved::fill`]), or frees it ([`Slab::unreserve`]). `None` as for
    /// [`Slab::allocate`]. Does not sleep. O(1).
    #[inline]
    pub(crate) fn reserve(&self, frames: &Frames<P>) -> Option<Reserved<T>> {
        if frames.fails_on_purpose() {
            return None;
        }
        let slot = match self.magazine(frames) {
            Some(magazine) => self.take_kept(frames, magazine),
            None => Self::take(&mut self.lock(), frames),
        };
        let slot = if slot.is_some() { slot } else { self.take_after_drain(frames) };
        Some(Reserved { slot: slot?.cast() })
    }

    /// Takes a slot from the lists, or from a new frame if the lists have none.
    #[inline(always)]
    pub(super) fn take(lists: &mut SlabLists, frames: &Frames<P>) -> Option<NonNull<u8>> {
        let frame = Self::frame_with_room(lists, frames)?;
        lists.objects += 1;
        // SAFETY: 1. `frame_with_room` has returned the frame, and the lists have been borrowed
        // since.
        Some(unsafe { Self::take_slot(lists, frames, frame) })
    }

    /// Returns the memory of an object that was not needed. Does not sleep. O(1).
    ///
    /// # Safety
    ///
    /// 1. The memory came from [`Slab::reserve`] of this slab, with the same `frames`.
    #[cold]
    pub(crate) unsafe fn unreserve(&self, frames: &Frames<P>, reserved: Reserved<T>) {
        // SAFETY: 1. as the caller promises; 2. the slot holds no object.
        unsafe { self.free_slot(frames, reserved.slot) };
    }

    /// A frame on the partial list, allocated if necessary.
    fn frame_with_room(lists: &mut SlabLists, frames: &Frames<P>) -> Option<Frame> {
        if lists.partial != NONE {
            return Some(Frame(lists.partial));
        }
        let frame = match Self::take_spare(lists, frames) {
            Some(spare) => spare,
            None => {
                let frame = Self::new_frame(frames)?;
                lists.frames += 1;
                frame
            }
        };
        Self::link(lists, frames, frame);
        Some(frame)
    }

    #[cold]
    #[inline(never)]
    fn new_frame(frames: &Frames<P>) -> Option<Frame> {
        // Reclaim allocates no objects.
        let frame = frames.take(Order::PAGE, AllocateFor::Use)?;
        Self::make_empty(frames, frame);
        Some(frame)
    }

    /// Initializes a frame that is fresh from the allocator as an empty frame of the slab.
    pub(super) fn make_empty(frames: &Frames<P>, frame: Frame) {
        let meta = frames.meta(frame);
        meta.reset(MetaKind::Slab, Order::PAGE);
        SlabWord::EMPTY.store(meta);
        let header = frames.platform().direct_map(frame).cast::<Header>();
        // SAFETY: the direct map permits writes to the frame's bytes, which are page-aligned
        // (`Frames::new` checked it), and the frame is fresh from the allocator.
        unsafe { header.write(Header { frame: frame.0, shape: Self::SHAPE }) };
        // Exposed for `frame_of`.
        let _ = header.as_ptr().expose_provenance();
    }

    pub(super) fn take_spare(lists: &mut SlabLists, frames: &Frames<P>) -> Option<Frame> {
        let spare = Frame(lists.spare);
        if lists.spare == NONE {
            return None;
        }
        lists.spare = frames.meta(spare).next.load(Relaxed);
        Some(spare)
    }

    /// Takes a slot of a frame on the partial list.
    ///
    /// # Safety
    /// 1. The frame is on the partial list of `lists`, so it has a free slot.
    unsafe fn take_slot(lists: &mut SlabLists, frames: &Frames<P>, frame: Frame) -> NonNull<u8> {
        let meta = frames.meta(frame);
        let mut slots = SlabWord::load(meta);
        let slot;
        if slots.free != NO_SLOT {
            slot = Self::slot(frames, frame, slots.free);
            // SAFETY: a slot on the free list begins with the next slot's number, which `free`
            // wrote there, aligned; free slots are read and written only under the lock.
            slots.free = unsafe { slot.cast::<u16>().read() };
        } else {
            slot = Self::slot(frames, frame, slots.used);
            slots.used += 1;
        }
        slots.objects += 1;
        slots.store(meta);
        if slots.objects == Self::PER_FRAME {
            Self::unlink(lists, frames, frame);
        }
        slot
    }

    /// Drops the object and frees its memory; a frame that becomes empty is kept as a spare or
    /// returned to the allocator. Does not sleep, except in the object's `drop`. O(1).
    ///
    /// # Safety
    ///
    /// 1. `object` is the pointer, or a copy of the pointer, that [`Slab::allocate`] of this slab
    ///    returned with the same `frames` (not made from a reference to the object), and has not
    ///    been freed since.
    /// 2. The object is no longer used, and if it is not [`Send`], it was made on this CPU.
    pub(crate) unsafe fn free(&self, frames: &Frames<P>, object: NonNull<T>) {
        // SAFETY: by 1 and 2, this is a live object that only this call can access.
        unsafe { object.drop_in_place() };
        // SAFETY: 1. as the caller promises; 2. the object was dropped.
        unsafe { self.free_slot(frames, object) };
    }

    /// # Safety
    ///
    /// 1. As for [`Slab::free`].
    /// 2. The slot has no object.
    #[inline]
    unsafe fn free_slot(&self, frames: &Frames<P>, object: NonNull<T>) {
        if let Some(magazine) = self.magazine(frames) {
            // SAFETY: 1. and 2. as the caller promises.
            return unsafe { self.keep(frames, magazine, object.cast()) };
        }
        // SAFETY: 1. and 2. as the caller promises.
        let emptied =
            unsafe { Self::put(&mut self.lock(), frames, object.cast(), Some(Self::SHAPE)) };
        if let Some(frame) = emptied {
            Self::free_frame(frames, frame);
        }
    }

    /// Puts slots on the lists. Returns the first of the frames to be freed, linked by `next`. The
    /// caller need not know the type of the objects, because the frames contain the [`Shape`].
    ///
    /// # Safety
    ///
    /// As for `free_slot`, for each slot.
    pub(super) unsafe fn put_all(&self, frames: &Frames<P>, slots: &[Option<NonNull<u8>>]) -> u32 {
        let mut lists = self.lock();
        let mut emptied = NONE;
        for slot in slots.iter().flatten() {
            // SAFETY: 1. and 2. as the caller promises.
            if let Some(frame) = unsafe { Self::put(&mut lists, frames, *slot, None) } {
                frames.meta(frame).next.store(emptied, Relaxed);
                emptied = frame.0;
            }
        }
        emptied
    }

    /// Puts a slot on its frame's list. A frame that becomes empty is kept as the spare, or
    /// returned to be freed. If `shape` is `None`, it is read from the frame's header.
    ///
    /// # Safety
    ///
    /// As for `free_slot`.
    #[inline(always)]
    unsafe fn put(
        lists: &mut SlabLists,
        frames: &Frames<P>,
        slot: NonNull<u8>,
        shape: Option<Shape>,
    ) -> Option<Frame> {
        let page = slot.as_ptr().map_addr(|address| address & !(PAGE_SIZE as usize - 1));
        // SAFETY: by obligation 1 the object lies in a frame of this slab, which is page-aligned
        // and begins with a header that does not change while the frame has objects.
        let header = unsafe { &*page.cast::<Header>() };
        let (frame, shape) = (Frame(header.frame), shape.unwrap_or(header.shape));
        let offset = slot.as_ptr().addr() - page.addr() - usize::from(shape.first);
        let index = (offset / usize::from(shape.size)) as u16;
        debug_assert_eq!(frames.meta(frame).kind(), MetaKind::Slab);

        let meta = frames.meta(frame);
        let mut slots = SlabWord::load(meta);
        // SAFETY: the slot is aligned for the number and, because the object was dropped, belongs
        // to the slab.
        unsafe { slot.cast::<u16>().write(slots.free) };
        slots.free = index;
        slots.objects -= 1;
        slots.store(meta);
        lists.objects -= 1;
        if slots.objects + 1 == shape.count {
            Self::link(lists, frames, frame);
        }
        if slots.objects > 0 {
            return None;
        }
        Self::unlink(lists, frames, frame);
        if lists.spare == NONE || lists.frames <= u64::from(lists.pooled) {
            frames.meta(frame).next.store(lists.spare, Relaxed);
            lists.spare = frame.0;
            return None;
        }
        lists.frames -= 1;
        Some(frame)
    }

    /// Frees the frames that [`Slab::put_all`] has returned.
    pub(super) fn free_frames(frames: &Frames<P>, mut first: u32) {
        while first != NONE {
            let frame = Frame(first);
            first = frames.meta(frame).next.load(Relaxed);
            Self::free_frame(frames, frame);
        }
    }

    /// Frees a frame that was just removed from the lists.
    #[inline]
    pub(super) fn free_frame(frames: &Frames<P>, frame: Frame) {
        // SAFETY: 1. the slab allocated the frame and has just removed it from the lists; 2. none
        // of its slots is in use.
        unsafe { frames.free(frame, Order::PAGE) };
    }

    /// The number of frames of the slab, including spare ones.
    pub(crate) fn frames(&self) -> u64 {
        self.lock().frames
    }

    /// The address of the slot.
    fn slot(frames: &Frames<P>, frame: Frame, index: u16) -> NonNull<u8> {
        let offset = Self::FIRST + usize::from(index) * Self::SLOT;
        debug_assert!(offset + Self::SLOT <= PAGE_SIZE as usize);
        // SAFETY: slots below `PER_FRAME` end inside the frame's 4,096 bytes.
        unsafe { frames.platform().direct_map(frame).add(offset) }
    }

    fn link(lists: &mut SlabLists, frames: &Frames<P>, frame: Frame) {
        let meta = frames.meta(frame);
        meta.next.store(lists.partial, Relaxed);
        meta.previous.store(NONE, Relaxed);
        if lists.partial != NONE {
            frames.meta(Frame(lists.partial)).previous.store(frame.0, Relaxed);
        }
        lists.partial = frame.0;
    }

    fn unlink(lists: &mut SlabLists, frames: &Frames<P>, frame: Frame) {
        let meta = frames.meta(frame);
        let (next, previous) = (meta.next.load(Relaxed), meta.previous.load(Relaxed));
        if next != NONE {
            frames.meta(Frame(next)).previous.store(previous, Relaxed);
        }
        if previous != NONE {
            frames.meta(Frame(previous)).next.store(next, Relaxed);
        } else {
            lists.partial = next;
        }
        meta.next.store(NONE, Relaxed);
        meta.previous.store(NONE, Relaxed);
    }
}
