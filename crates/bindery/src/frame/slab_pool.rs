//! Frames that a slab keeps in advance, until a trim ([`Slab::stock`]) or for longer
//! ([`Slab::pool`]).

use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;

use super::magazine::MAGAZINES;
use super::meta::NONE;
use super::slab::{Reserved, Slab};
use super::{AllocateFor, Frames};
use crate::addr::Order;
use crate::platform::Platform;

impl<T, P: Platform> Slab<T, P> {
    /// Adds empty frames for `objects` more objects, after an allocation failed that could not wait
    /// for memory. The caller calls this where it can wait and then retries. `false` if memory is
    /// exhausted; added frames are kept until [`Slab::trim`].
    #[cold]
    pub(crate) fn stock(&self, frames: &Frames<P>, objects: u16) -> bool {
        (0..objects.div_ceil(Self::PER_FRAME)).all(|_| {
            let frame = frames.allocate(Order::PAGE, AllocateFor::Use);
            let Some(frame) = frame else { return false };
            Self::make_empty(frames, frame);
            let mut lists = self.lock();
            frames.meta(frame).next.store(lists.spare, Relaxed);
            lists.spare = frame.0;
            lists.frames += 1;
            true
        })
    }

    /// Adds frames until the slab has enough for `objects` objects, and keeps that many, also in
    /// [`Slab::trim`], until each call has its [`Slab::unpool`]. So while fewer objects exist,
    /// [`Slab::allocate_pooled`] does not fail. `false` if memory is exhausted. All calls pass the
    /// same number. For a slab without magazines, because the free objects could lie in those of
    /// another CPU.
    pub(crate) fn pool(&self, frames: &Frames<P>, objects: u16) -> bool {
        debug_assert!(self.place >= MAGAZINES);
        let wanted = objects.div_ceil(Self::PER_FRAME);
        loop {
            {
                let lists = &mut *self.lock();
                if lists.frames >= u64::from(wanted) {
                    lists.pooled = wanted.into();
                    lists.pools += 1;
                    return true;
                }
            }
            if !self.stock(frames, 1) {
                return false;
            }
        }
    }

    /// Ends a [`Slab::pool`]. The frames stay until [`Slab::trim`].
    pub(crate) fn unpool(&self) {
        let lists = &mut *self.lock();
        lists.pools -= 1;
        if lists.pools == 0 {
            lists.pooled = 0;
        }
    }

    /// As [`Slab::allocate_with`], from the slab's own frames only. `None` if they are full.
    pub(crate) fn allocate_pooled(
        &self,
        frames: &Frames<P>,
        make: impl FnOnce() -> T,
    ) -> Option<NonNull<T>> {
        let slot = {
            let lists = &mut *self.lock();
            if lists.partial == NONE && lists.spare == NONE {
                return None;
            }
            Self::take(lists, frames)?
        };
        Some(Reserved { slot: slot.cast() }.fill(make))
    }

    /// Empties all magazines and returns the spare frames to the allocator, except those of a
    /// [`Slab::pool`].
    pub(crate) fn trim(&self, frames: &Frames<P>) {
        self.drain(frames);
        loop {
            let mut lists = self.lock();
            if lists.frames <= u64::from(lists.pooled) {
                return;
            }
            let Some(spare) = Self::take_spare(&mut lists, frames) else { return };
            lists.frames -= 1;
            drop(lists);
            Self::free_frame(frames, spare);
        }
    }
}
