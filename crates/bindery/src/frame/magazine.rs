//! Magazines: free objects of one slab that one CPU keeps for itself.
//!
//! Two CPUs that map and unmap unrelated memory would otherwise write to the lists of the same
//! slabs. So an online CPU ([`crate::cpu`]) has its own magazine, a stack of [`SIZE`] slots, for
//! the kinds of objects that such calls use. An empty magazine takes [`BATCH`] slots from the
//! slab's lists, and a full magazine returns [`BATCH`] slots.
//!
//! The slab's frames count a slot in a magazine as used; [`Slab::objects`] does not. [`Slab::trim`]
//! empties all magazines of its slab, so reclaim finds the frames that only magazines held. A CPU
//! that is taken offline empties its own magazines.
//!
//! A thread that was preempted after it determined its CPU may use another CPU's magazine, so each
//! magazine has a spin lock. If that CPU is offline, the objects remain there until the next trim
//! or the next failed allocation.
//!
//! # The last object
//! An allocation must not fail for lack of a slot that another CPU keeps. An allocation that finds
//! no slot moves the slots of all magazines to the lists and takes a slot from there. It misses no
//! slot that is free when it begins, unless another allocation gets the slot
//! (`magazine_loom_model`) or a trim is about to free the slot's frame. In the latter case, the
//! caller's second attempt, after reclaim, finds the frame.
//! 1. A magazine's lock is held until its slots are on the lists. Otherwise a second drain could
//!    find both the magazine and the lists empty.
//! 2. While a drain runs ([`SlabLists::drains`]), a refill takes only one slot. Otherwise it could
//!    move slots from the lists to a magazine that the drain has passed.
//! 3. The lists are tried again even if the magazines were empty, because another drain may have
//!    moved slots there.
//!
//! [`SlabLists::drains`]: super::slab::SlabLists

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;

use crossbeam_utils::CachePadded;

use super::Frames;
use super::meta::MetaKind;
use super::slab::{Slab, frame_of};
use crate::addr::Frame;
use crate::platform::{Cpu, Platform};
use crate::sync::{Mutex, MutexGuard};

/// The maximum number of slots in a magazine: enough for a fork of 20 VMAs and the child's exit.
const SIZE: usize = 32;

/// The number of slots that an empty magazine takes, and that a full one returns.
const BATCH: usize = 8;

/// The number of slabs that have magazines.
pub(crate) const MAGAZINES: usize = 4;

/// The magazines of one CPU, each on lines of its own.
pub(crate) struct Magazines<P: Platform>([CachePadded<Magazine<P>>; MAGAZINES]);

impl<P: Platform> Magazines<P> {
    pub(crate) const fn new() -> Self {
        Self([const { CachePadded::new(Magazine(Mutex::new(Kept::EMPTY))) }; MAGAZINES])
    }

    /// The magazine at this index; `None` for a slab without magazines.
    #[inline]
    fn get(&self, place: usize) -> Option<&Magazine<P>> {
        self.0.get(place).map(|magazine| &**magazine)
    }
}

/// Free objects of one slab, for one CPU.
pub(super) struct Magazine<P: Platform>(Mutex<P::SpinLock, Kept>);

impl<P: Platform> Magazine<P> {
    #[inline]
    fn lock(&self) -> MutexGuard<'_, P::SpinLock, Kept> {
        self.0.lock()
    }
}

/// The content of a magazine: slots without an object that the slab's lists count as used.
pub(super) struct Kept {
    count: usize,
    /// The first `count` elements are slots; the last of them was freed most recently.
    slots: [Option<NonNull<u8>>; SIZE],
}

// SAFETY: a slot in a magazine is memory without an object, and no other thread can find it.
unsafe impl Send for Kept {}

impl Kept {
    pub(super) const EMPTY: Self = Self { count: 0, slots: [None; SIZE] };

    /// Removes the slot that was freed last.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<NonNull<u8>> {
        let count = self.count.checked_sub(1)?;
        self.count = count;
        self.slots.get_mut(count)?.take()
    }

    /// Adds a free slot. The magazine must not be full.
    #[inline]
    pub(super) fn push(&mut self, slot: NonNull<u8>) {
        debug_assert!(!self.slots.contains(&Some(slot)), "an object was freed twice");
        if let Some(place) = self.slots.get_mut(self.count) {
            *place = Some(slot);
            self.count += 1;
        }
    }

    /// Removes the [`BATCH`] slots that were freed first, if the magazine is full.
    #[inline]
    fn take_batch_if_full(&mut self) -> Option<[Option<NonNull<u8>>; BATCH]> {
        if self.count < SIZE {
            return None;
        }
        let batch = *self.slots.first_chunk()?;
        self.slots.copy_within(BATCH.., 0);
        self.slots[SIZE - BATCH..].fill(None);
        self.count = SIZE - BATCH;
        Some(batch)
    }

    /// Removes all slots.
    pub(super) fn take_all(&mut self) -> [Option<NonNull<u8>>; SIZE] {
        core::mem::replace(self, Self::EMPTY).slots
    }
}

impl<T, P: Platform> Slab<T, P> {
    /// The magazine of the caller's CPU.
    #[inline]
    pub(super) fn magazine<'a>(&self, frames: &'a Frames<P>) -> Option<&'a Magazine<P>> {
        frames.magazines.of(|| frames.platform().cpu())?.get(self.place)
    }

    /// The magazines of all CPUs.
    fn magazines<'a>(&self, frames: &'a Frames<P>) -> impl Iterator<Item = &'a Magazine<P>> {
        let place = self.place;
        frames.magazines.iter().filter_map(move |magazines| magazines.get(place))
    }

    /// Takes a slot from the magazine or, if it is empty, from the lists.
    #[inline(never)]
    pub(super) fn take_kept(
        &self,
        frames: &Frames<P>,
        magazine: &Magazine<P>,
    ) -> Option<NonNull<u8>> {
        let mut kept = magazine.lock();
        let slot = kept.pop();
        if slot.is_some() { slot } else { self.refill(frames, &mut kept) }
    }

    /// Takes a slot from the lists, and further slots for an empty magazine. Allocates no frame for
    /// the further slots.
    #[inline(never)]
    fn refill(&self, frames: &Frames<P>, kept: &mut Kept) -> Option<NonNull<u8>> {
        let mut lists = self.lock();
        let slot = Self::take(&mut lists, frames)?;
        while kept.count < BATCH - 1 && lists.has_partial() && lists.drains == 0 {
            let Some(other) = Self::take(&mut lists, frames) else { break };
            kept.push(other);
        }
        Some(slot)
    }

    /// Takes a slot from the lists for an allocation that found none, after emptying all magazines
    /// into the lists.
    #[cold]
    #[inline(never)]
    pub(super) fn take_after_drain(&self, frames: &Frames<P>) -> Option<NonNull<u8>> {
        if self.place >= MAGAZINES || !frames.magazines.has_slots() {
            return None;
        }
        self.lock().drains += 1;
        self.drain(frames);
        let mut lists = self.lock();
        lists.drains -= 1;
        Self::take(&mut lists, frames)
    }

    /// Puts a slot into the magazine.
    ///
    /// # Safety
    /// 1. The slot belongs to this slab, with the same `frames`, and is not free.
    /// 2. It contains no object.
    #[inline(never)]
    pub(super) unsafe fn keep(
        &self,
        frames: &Frames<P>,
        magazine: &Magazine<P>,
        slot: NonNull<u8>,
    ) {
        let mut kept = magazine.lock();
        let Some(batch) = kept.take_batch_if_full() else { return kept.push(slot) };
        // SAFETY: 1. and 2. the caller of `keep` guaranteed both for each slot of the batch, or
        // `refill` took it.
        let emptied = unsafe { self.put_all(frames, &batch) };
        kept.push(slot);
        drop(kept);
        Self::free_frames(frames, emptied);
    }

    /// Puts the slots of all magazines on the lists.
    #[cold]
    pub(super) fn drain(&self, frames: &Frames<P>) {
        self.magazines(frames).for_each(|magazine| self.empty(frames, magazine));
    }

    /// Puts the slots of a CPU's magazine on the lists when the CPU is taken offline.
    pub(crate) fn empty_magazine(&self, frames: &Frames<P>, cpu: Cpu) {
        let magazines = frames.magazines.get(cpu);
        if let Some(magazine) = magazines.and_then(|magazines| magazines.get(self.place)) {
            self.empty(frames, magazine);
        }
    }

    /// Puts the slots of a magazine on the lists. The type of the objects may be unknown.
    fn empty(&self, frames: &Frames<P>, magazine: &Magazine<P>) {
        let mut kept = magazine.lock();
        if kept.count == 0 {
            return;
        }
        // SAFETY: 1. and 2. the caller of `keep` guaranteed both for each slot of the batch, or
        // `refill` took it.
        let emptied = unsafe { self.put_all(frames, &kept.take_all()) };
        drop(kept);
        Self::free_frames(frames, emptied);
    }

    /// The number of objects. Exact while no other thread allocates or frees one.
    pub(crate) fn objects(&self, frames: &Frames<P>) -> u64 {
        let kept: u64 = self.magazines(frames).map(|magazine| magazine.lock().count as u64).sum();
        self.lock().objects.saturating_sub(kept)
    }

    /// Verifies that each slot in a magazine lies in a frame of a slab and appears only once.
    ///
    /// # Errors
    /// An inconsistent frame.
    pub(crate) fn check_magazines(&self, frames: &Frames<P>) -> Result<(), Frame> {
        for magazine in self.magazines(frames) {
            let kept = magazine.lock();
            for (place, slot) in kept.slots.iter().enumerate() {
                let Some(slot) = *slot else { continue };
                // SAFETY: 1. a slab's frame is not freed while one of its slots is in a magazine.
                let frame = unsafe { frame_of(slot) };
                let before = kept.slots.iter().take(place);
                if frames.meta(frame).kind() != MetaKind::Slab
                    || place >= kept.count
                    || before.flatten().any(|other| *other == slot)
                {
                    return Err(frame);
                }
            }
        }
        Ok(())
    }
}
