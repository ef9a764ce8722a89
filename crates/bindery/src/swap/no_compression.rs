//! The store of compressed pages in a build without the feature `compression`. It has no room, so
//! no page is stored, and all areas are on devices.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::marker::PhantomData;

use crate::addr::Frame;
use crate::cpu::CpuTable;
use crate::error::NoMemory;
use crate::frame::Frames;
use crate::platform::{Cpu, Platform};

use super::CompressedUsage;

/// The reason why a page was not stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NoStore;

/// A stored page; no such page exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Handle {}

impl Handle {
    #[inline]
    pub(crate) const fn to_raw(self) -> u64 {
        match self {}
    }

    #[inline]
    pub(crate) const fn from_raw(_raw: u64) -> Option<Self> {
        None
    }
}

/// A CPU's part of the store, which is empty.
pub(crate) struct StorePart<P: Platform>(PhantomData<fn(P)>);

impl<P: Platform> StorePart<P> {
    pub(crate) const fn new(_cpu: Cpu) -> Self {
        Self(PhantomData)
    }
}

pub(crate) struct CompressedStore<P: Platform>(CpuTable<StorePart<P>>);

impl<P: Platform> CompressedStore<P> {
    pub(crate) const fn new(_limit: u64) -> Self {
        Self(CpuTable::new())
    }

    pub(crate) fn parts(&self) -> &CpuTable<StorePart<P>> {
        &self.0
    }

    #[inline]
    pub(crate) fn hand_over(&self, _frames: &Frames<P>, _cpu: Cpu) {}

    #[inline]
    pub(crate) fn prepare(&self, _frames: &Frames<P>) -> Result<(), NoMemory> {
        Err(NoMemory)
    }

    /// # Safety
    /// No obligation for the caller; the real store has some.
    #[inline]
    pub(crate) unsafe fn store(
        &self,
        _frames: &Frames<P>,
        _page: Frame,
    ) -> Result<Handle, NoStore> {
        Err(NoStore)
    }

    /// # Safety
    /// As [`CompressedStore::store`].
    #[inline]
    pub(crate) unsafe fn load(
        &self,
        _frames: &Frames<P>,
        handle: &Handle,
        _page: Frame,
    ) -> Result<(), NoStore> {
        match *handle {}
    }

    /// # Safety
    /// As [`CompressedStore::store`].
    #[inline]
    pub(crate) unsafe fn free(&self, _frames: &Frames<P>, handle: Handle) {
        match handle {}
    }

    #[inline]
    pub(crate) fn release(&self, _frames: &Frames<P>) {}

    #[inline]
    pub(crate) fn limit(&self) -> u64 {
        0
    }

    #[inline]
    pub(crate) fn set_limit(&self, _frames: u64) {}

    #[inline]
    pub(crate) fn may_take(&self, _frames: &Frames<P>) -> bool {
        false
    }

    #[inline]
    pub(crate) fn has_room_for(&self, _frames: &Frames<P>, _pages: u32) -> bool {
        false
    }

    #[inline]
    pub(crate) fn usage(&self) -> CompressedUsage {
        CompressedUsage::NONE
    }

    #[inline]
    pub(crate) fn frames_held(&self) -> u64 {
        0
    }

    #[inline]
    pub(crate) fn check(&self, _frames: &Frames<P>) -> Result<(), Frame> {
        Ok(())
    }
}
