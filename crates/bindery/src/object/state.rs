//! The state of an object and its holders.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::Memory;
use crate::addr::{Orders, PAGE_SIZE};
use crate::error::Error;
use crate::folio::{LiveOwner, OWNER_ALIGN, Owner};
use crate::memory::{Name, NameLinks, Record, RecordKind, Reservation};
use crate::platform::Platform;
use crate::rmap::{ObjectTree, TreeLock};
use crate::sync::rw_lock::RwLock;
use crate::vma::MappingFlags;

use super::attachments::SegmentMark;
use super::backing::{Accounting, Backing, Secrecy};
use super::frame_source::ShownFrames;
use super::invalidate::InvalidateLock;
use super::last_holder::release;
use super::lent::Lent;
use super::page_index::Pages;
use super::pager::Pager;
use super::quota::Quota;
use super::read_ahead::ReadAhead;
use super::registry::RegistryLinks;
use super::seals::{SealState, Seals};
use super::swap_ahead::SwapAhead;
use super::unsaved::Unsaved;
use super::write_errors::WriteErrors;
use crate::collections::page_tree::IndexNode;

/// The state of an object.
///
/// The fields are grouped by use. Faults on shared memory write the first group, which fits into
/// one cache line: two locks, the root of the index, and the page counts. Calls write the second
/// group. Both read the third.
#[repr(C, align(64))]
pub(crate) struct ObjectState {
    pub(crate) invalidate_lock: InvalidateLock,
    /// The number of pages that count as committed.
    pub(super) committed: AtomicU64,
    pub(crate) pages: Pages,
    pub(super) changes: RwLock,
    /// The number of handles and VMAs. Never wraps, even if a program forgets handles throughout
    /// its lifetime.
    holders: AtomicU64,
    /// One reference for all holders together, and one for each weak handle. Dropping the last
    /// reference frees the record.
    records: AtomicU64,
    /// The number of times that a search or a weak handle has added a holder.
    found: AtomicU64,
    pub(super) seals: SealState,
    pub(crate) mapping_lock: TreeLock,
    pub(crate) mappers: ObjectTree,
    pub(super) links: RegistryLinks,
    pub(super) name: NameLinks,
    pub(super) write_errors: WriteErrors,
    pub(super) swap_ahead: SwapAhead,
    /// The last page read by a call.
    pub(super) last_read: AtomicU64,
    /// The size in bytes. Shrinks only with the invalidate lock held for writing.
    size: AtomicU64,
    pub(crate) ahead: ReadAhead,
    /// Whether the object's pages stay in memory (`SHM_LOCK`).
    stays_in_memory: AtomicBool,
    identity: u64,
    pub(super) backing: Backing,
}

/// The number of pages that `bytes` bytes touch.
pub(super) fn pages_of(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_SIZE)
}

const _: () = assert!(align_of::<ObjectState>() as u64 >= OWNER_ALIGN);

impl ObjectState {
    /// The object as the owner of folios. Only its address is used: `FolioHandle::owner` recreates
    /// the pointer from the direct map.
    pub(crate) fn as_owner(&self) -> LiveOwner<'_> {
        let kind = if self.is_file() { Owner::File } else { Owner::Memory };
        // SAFETY: 1. all objects are in a slab; this one is borrowed.
        unsafe { LiveOwner::new(kind(NonNull::from(self).cast())) }
    }

    /// The number of a page among the pages of the whole memory, for code that follows the order of
    /// faults across objects; each object numbers its own pages separately.
    pub(super) fn place_of(&self, page: u64) -> u64 {
        page.wrapping_add(NonNull::from(self).addr().get() as u64)
    }

    pub(super) fn new(identity: u64, backing: Backing, size: u64, seals: Seals) -> Self {
        let read_ahead = match &backing {
            Backing::File { pager, .. } => pager.get().read_ahead(),
            Backing::Memory { .. } | Backing::Frames { .. } => 0,
        };
        let name = match backing {
            Backing::File { file, file_system, .. } => Name { space: file_system, number: file },
            Backing::Memory { .. } | Backing::Frames { .. } => Name { space: 0, number: 0 },
        };
        let dirty_limit = match &backing {
            Backing::File { dirty_limit, .. } => *dirty_limit,
            Backing::Memory { .. } | Backing::Frames { .. } => None,
        };
        Self {
            invalidate_lock: InvalidateLock::new(),
            committed: AtomicU64::new(0),
            pages: Pages::new(Unsaved::new(dirty_limit)),
            changes: RwLock::new(),
            holders: AtomicU64::new(1),
            records: AtomicU64::new(1),
            found: AtomicU64::new(0),
            seals: SealState::new(seals),
            mapping_lock: TreeLock::new(),
            mappers: ObjectTree::new(),
            links: RegistryLinks::new(),
            name: NameLinks::new(name),
            write_errors: WriteErrors::new(),
            swap_ahead: SwapAhead::new(),
            last_read: AtomicU64::new(u64::MAX),
            size: AtomicU64::new(size),
            ahead: ReadAhead::new(read_ahead),
            stays_in_memory: AtomicBool::new(false),
            identity,
            backing,
        }
    }

    /// A number that no other object of the memory has or has had.
    pub(crate) fn identity(&self) -> u64 {
        self.identity
    }

    /// The size in bytes.
    pub(crate) fn size(&self) -> u64 {
        // Acquire: a reader of a byte within the size sees the data that was written there before.
        self.size.load(Ordering::Acquire)
    }

    /// The number of pages that the object has in whole or in part; pages at or after that number
    /// are beyond its end.
    pub(crate) fn size_in_pages(&self) -> u64 {
        pages_of(self.size())
    }

    pub(super) fn set_size(&self, bytes: u64) {
        self.size.store(bytes, Ordering::Release);
    }

    /// The pager's number of a file. Does not access the pager, which may no longer exist if a
    /// program has leaked its handles.
    pub(super) fn file_number(&self) -> Option<u64> {
        match self.backing {
            Backing::File { file, .. } => Some(file),
            Backing::Memory { .. } | Backing::Frames { .. } => None,
        }
    }

    /// The pager and its number for the file, if the object is a file.
    pub(super) fn file(&self) -> Option<(&dyn Pager, u64)> {
        match &self.backing {
            Backing::Memory { .. } | Backing::Frames { .. } => None,
            Backing::File { pager, file, .. } => Some((pager.get(), *file)),
        }
    }

    /// Whether reclaim may use the pager ([`Memory::lasting_file_system`]).
    pub(super) fn has_lasting_pager(&self) -> bool {
        matches!(self.backing, Backing::File { lasts: true, .. })
    }

    pub(crate) fn is_file(&self) -> bool {
        matches!(self.backing, Backing::File { .. })
    }

    /// The frames that the object shows, if the core does not own them.
    #[inline]
    pub(crate) fn frames(&self) -> Option<ShownFrames<'_>> {
        match &self.backing {
            Backing::Memory { .. } | Backing::File { .. } => None,
            Backing::Frames { source, memory } => Some(ShownFrames::new(source.get(), *memory)),
        }
    }

    /// Whether the object is shared memory: the core owns its pages, and no pager stores them.
    pub(crate) fn is_shared_memory(&self) -> bool {
        matches!(self.backing, Backing::Memory { .. })
    }

    /// Whether a page must be marked before an entry may allow writes to it
    /// ([`super::pages::mark_dirty`]).
    pub(crate) fn notices_writes(&self) -> bool {
        self.is_file()
    }

    /// The orders above 0 that folios for a mapping with these flags may have.
    pub(crate) fn orders<P: Platform>(&self, memory: &Memory<P>, flags: MappingFlags) -> Orders {
        let policy = match self.backing {
            // Linux does the same: each page leaves the kernel's map separately.
            Backing::Memory { content: Secrecy::Secret, .. } => return Orders::default(),
            Backing::Memory { .. } => memory.shared_folio_policy(),
            Backing::File { .. } => memory.file_folio_policy(),
            // Such an object has no folios; the order serves to choose an address for a large leaf.
            Backing::Frames { .. } => return Orders::of(memory.huge_order()),
        };
        policy.orders(flags.huge_advice())
    }

    /// The way in which the memory counts as committed.
    pub(crate) fn accounting(&self) -> Accounting {
        match self.backing {
            Backing::Memory { accounting, .. } => accounting,
            // The content can always be read again from the storage.
            Backing::File { .. } | Backing::Frames { .. } => Accounting::None,
        }
    }

    /// The quota to which committed pages are also charged.
    pub(crate) fn quota(&self) -> Option<&Quota> {
        match &self.backing {
            Backing::Memory { quota, .. } => quota.as_ref().map(Lent::get),
            Backing::File { .. } | Backing::Frames { .. } => None,
        }
    }

    /// Whether only programs that map the object may access the content.
    pub(crate) fn is_secret(&self) -> bool {
        matches!(self.backing, Backing::Memory { content: Secrecy::Secret, .. })
    }

    /// Fails with `refusal` if only programs that map the object may access the content, because it
    /// is secret or the core does not own the frames.
    pub(super) fn refuse_hidden(&self, refusal: Error) -> Result<(), Error> {
        let hidden = self.is_secret() || self.frames().is_some();
        if hidden { Err(refusal) } else { Ok(()) }
    }

    /// Whether the object's pages may be swapped out.
    pub(crate) fn may_be_swapped(&self) -> bool {
        let stays = self.is_secret() || self.stays_in_memory.load(Ordering::Relaxed);
        self.is_shared_memory() && !stays
    }

    /// Sets whether the object's pages stay in memory. Pages already in swap stay there until the
    /// next access.
    pub(crate) fn keep_in_memory(&self, keep: bool) {
        self.stays_in_memory.store(keep, Ordering::Relaxed);
    }

    /// The System V segment that this object backs.
    pub(crate) fn segment(&self) -> Option<SegmentMark> {
        match self.backing {
            Backing::Memory { segment, .. } => segment,
            Backing::File { .. } | Backing::Frames { .. } => None,
        }
    }

    /// The number of pages that count as committed.
    pub(crate) fn committed(&self) -> u64 {
        self.committed.load(Ordering::Relaxed)
    }

    /// Commits `pages` more.
    pub(super) fn commit<P: Platform>(&self, memory: &Memory<P>, pages: u64) -> Result<(), Error> {
        let mut reservation = Reservation::new(memory);
        reservation.reserve(pages)?;
        if let Some(quota) = self.quota() {
            quota.charge(pages)?;
        }
        reservation.pass(pages as i64);
        self.committed.fetch_add(pages, Ordering::Relaxed);
        Ok(())
    }

    /// Returns a commitment of `pages`.
    pub(super) fn uncommit<P: Platform>(&self, memory: &Memory<P>, pages: u64) {
        if let Some(quota) = self.quota() {
            quota.uncharge(pages);
        }
        memory.commitment().add(-(pages as i64));
        self.committed.fetch_sub(pages, Ordering::Relaxed);
    }

    /// If the whole size counts as committed, adjusts the commitment to a size of `bytes`.
    pub(super) fn promise_size<P: Platform>(
        &self,
        memory: &Memory<P>,
        bytes: u64,
    ) -> Result<(), Error> {
        if self.accounting() != Accounting::Whole {
            return Ok(());
        }
        let (now, then) = (self.committed(), pages_of(bytes));
        if then > now {
            return self.commit(memory, then - now);
        }
        self.uncommit(memory, now - then);
        Ok(())
    }

    /// Adds a holder. The caller is a holder, or knows a VMA that is one.
    pub(super) fn hold(&self) {
        self.holders.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds a holder unless the last one was released. Returns whether a holder was added. The
    /// caller holds the lock of the registry and keeps the record from being freed during the call.
    pub(super) fn try_hold(&self) -> bool {
        let more = |holders: u64| (holders > 0).then_some(holders + 1);
        let held = self.holders.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        if held {
            self.found.fetch_add(1, Ordering::Relaxed);
        }
        held
    }

    /// The number of holders that lookups and weak handles have added.
    pub(super) fn times_found(&self) -> u64 {
        self.found.load(Ordering::Relaxed)
    }

    /// Removes a holder unless it is the last. Returns whether it was removed.
    #[inline]
    pub(super) fn drop_shared_holder(&self) -> bool {
        let fewer = |holders: u64| (holders > 1).then(|| holders - 1);
        self.holders.fetch_update(Ordering::Release, Ordering::Acquire, fewer).is_ok()
    }

    /// Removes the last holder. The caller holds the lock of the registry, so no holder is added.
    /// Because [`ObjectState::drop_shared_holder`] has failed, the caller sees all that the other
    /// holders wrote before they left.
    pub(super) fn drop_last_holder(&self) {
        self.holders.store(0, Ordering::Relaxed);
    }

    /// Adds a reference to the record. The caller already has one.
    pub(super) fn keep_record(&self) {
        self.records.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether only one reference to the record is left. Once the object has left, no reference is
    /// added to the last one.
    pub(super) fn is_last_record(&self) -> bool {
        self.records.load(Ordering::Acquire) == 1
    }

    /// Undoes [`ObjectState::keep_record`]. Returns whether that was the last reference; if so, the
    /// caller frees the record.
    pub(super) fn drop_record(&self) -> bool {
        self.records.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether any pages are in flight to or from the pager.
    pub(crate) fn has_in_flight<P: Platform>(&self, platform: &P) -> bool {
        let listed = self.pages.alone(platform, |_, in_flight, _| !in_flight.is_empty());
        listed || !self.pages.ends.no_writes()
    }

    /// The number of holders: handles and VMAs.
    pub(crate) fn holders(&self) -> u64 {
        self.holders.load(Ordering::Relaxed)
    }

    /// The number of shared mappings that are or may become writable.
    pub(crate) fn writable_mappings(&self) -> u32 {
        self.seals.writable()
    }

    /// Records that a VMA with these flags maps the object from now on.
    pub(crate) fn map_added(&self, flags: MappingFlags) {
        self.hold();
        if is_writable(flags) {
            self.seals.writable_added();
        }
        if let Some(mark) = self.segment() {
            mark.follower().attached(mark.id.segment);
        }
        if let Some(frames) = self.frames() {
            frames.note_mapped();
        }
    }
}

fn is_writable(flags: MappingFlags) -> bool {
    flags.contains(MappingFlags::SHARED | MappingFlags::MAY_WRITE)
}

/// Records the removal of a VMA with these flags. None of its pages is mapped, and no walker knows
/// it. Frees the object if the VMA was its last holder; may sleep.
///
/// # Safety
/// 1. The VMA is one of the counted holders and ends its hold.
pub(crate) unsafe fn map_removed<P: Platform>(
    memory: &Memory<P>,
    node: NonNull<ObjectState>,
    flags: MappingFlags,
) {
    // SAFETY: the VMA is counted until `release` (obligation 1).
    let object = unsafe { node.as_ref() };
    if is_writable(flags) {
        object.seals.writable_removed();
    }
    let mark = object.segment();
    if let Some(frames) = object.frames() {
        frames.note_unmapped();
    }
    // SAFETY: 1. the caller's obligation 1.
    unsafe { release(memory, node) };
    if let Some(mark) = mark {
        mark.follower().detached(mark.id.segment);
    }
}

// SAFETY: 1. No other type has this kind.
unsafe impl Record for ObjectState {
    const KIND: RecordKind = RecordKind::Object;
}

// SAFETY: 1. No other type has this kind.
unsafe impl Record for IndexNode {
    const KIND: RecordKind = RecordKind::PageIndexNode;
}

#[cfg(test)]
mod layout {
    use core::mem::offset_of;

    use super::{ObjectState, Pages};

    #[test]
    fn a_fault_writes_one_line() {
        let end = offset_of!(ObjectState, pages) + Pages::FAULTED_END;
        assert!(end <= 64, "{end}");
        assert!(offset_of!(ObjectState, size) >= 64);
    }
}
