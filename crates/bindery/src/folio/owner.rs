//! The owner of a folio: the anchor of the reverse map.
//!
//! ```text
//! owner (32 bits)  the frame of the slab that holds the owner
//! word   63..62  61..54                      53        52  51 ................. 0
//!        kind    where in that frame, by 16  detached      index of the folio's first page
//! ```
//!
//! The owner and the index are two words, read and written under the folio's lock ([`super::lock`])
//! except while the folio is fresh. A holder of a mapping or a reference may read the kind from the
//! second word without the lock, because the kind does not change while the folio is mapped.
//!
//! An index is a [`FolioIndex`], which has 52 bits and no sign. If the first page of a folio would
//! have a negative index at a requested place, the folio is not used whole there: its later pages
//! become separate folios.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::marker::PhantomData;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;

use super::handle::FolioHandle;
use crate::addr::{Frame, PAGE_SIZE};
use crate::frame::meta::FrameMeta;
use crate::frame::slab;
use crate::platform::Platform;
use crate::stats::Counts;

const INDEX_BITS: u32 = 52;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;
const PLACE_SHIFT: u32 = 54;
const KIND_SHIFT: u32 = 62;
/// Kinds of owner in the second word; 0 means no owner, 1 an anon group.
const SHARED_MEMORY: u64 = 2;
const FILE: u64 = 3;
/// In the owner word: the object no longer refers to any page of the folio. The kind is retained,
/// so entries that are removed later are subtracted from the count to which they were added.
const DETACHED: u64 = 1 << 53;
/// The alignment of owners, in bytes.
pub(crate) const ALIGN: u64 = 16;

const _: () = assert!(PAGE_SIZE / ALIGN <= 1 << (KIND_SHIFT - PLACE_SHIFT));

/// The index of a folio's first page in its owner: below [`FolioIndex::END`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FolioIndex(u64);

impl FolioIndex {
    /// The exclusive end of indexes: `mmap` and `mremap` refuse VMAs with larger ones.
    pub(crate) const END: u64 = 1 << INDEX_BITS;
    /// The owner word of a folio without an owner.
    pub(crate) const NONE: Self = Self(0);

    /// The index of a folio whose first page has index `page` in a VMA or an object.
    #[inline(always)]
    pub(crate) const fn new(page: u64) -> Self {
        debug_assert!(page < Self::END);
        Self(page & INDEX_MASK)
    }

    /// The index of a folio whose page `number` has index `page`. `None` if the index of its first
    /// page would be negative.
    #[inline(always)]
    pub(crate) const fn for_folio(page: u64, number: u32) -> Option<Self> {
        match page.checked_sub(number as u64) {
            Some(first) if first < Self::END => Some(Self(first)),
            _ => None,
        }
    }

    /// The index of the first page.
    #[inline(always)]
    pub(crate) const fn first(self) -> u64 {
        self.0
    }

    /// The index of page `number` of the folio.
    #[inline(always)]
    pub(crate) const fn page(self, number: u32) -> u64 {
        self.0 + number as u64
    }
}

/// The owner of a folio. Higher modules define the types behind the pointers: an `AnonGroup` of
/// `rmap` and an `ObjectState` of `object`, each in a slab and aligned to [`ALIGN`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Owner {
    /// No owner.
    None,
    /// Anonymous memory: the anon group.
    Group(NonNull<()>),
    /// Shared memory: the object.
    Memory(NonNull<()>),
    /// A file: the object.
    File(NonNull<()>),
}

/// An owner that lives as long as the value that it is borrowed from: the group or object itself,
/// or a VMA that holds it. A folio's owner is set only from this type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LiveOwner<'o> {
    owner: Owner,
    _lives: PhantomData<&'o ()>,
}

impl LiveOwner<'_> {
    /// No owner.
    pub(crate) const NONE: Self = Self { owner: Owner::None, _lives: PhantomData };

    /// An owner that the caller keeps alive.
    ///
    /// # Safety
    /// 1. The record that `owner` names is in a slab and remains alive while the result is used.
    #[inline(always)]
    pub(crate) const unsafe fn new(owner: Owner) -> Self {
        Self { owner, _lives: PhantomData }
    }

    /// The owner, which may outlive the record.
    #[inline(always)]
    pub(crate) const fn owner(self) -> Owner {
        self.owner
    }
}

/// An owner in the format of a folio's metadata, for a caller that sets the same owner for many
/// folios.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct OwnerMark {
    frame: u32,
    /// The second word, without an index.
    word: u64,
}

impl OwnerMark {
    /// The mark of `owner`.
    pub(crate) fn of(owner: LiveOwner<'_>) -> Self {
        let (kind, address) = match owner.owner() {
            Owner::None => (0, None),
            Owner::Group(group) => (1, Some(group)),
            Owner::Memory(object) => (SHARED_MEMORY, Some(object)),
            Owner::File(object) => (FILE, Some(object)),
        };
        let (frame, place) = address.map_or((0, 0), |address| {
            let inside = address.addr().get() as u64 & (PAGE_SIZE - 1);
            // SAFETY: 1. obligation 1 of `LiveOwner::new`.
            (unsafe { slab::frame_of(address) }.0, inside / ALIGN)
        });
        Self { frame, word: kind << KIND_SHIFT | place << PLACE_SHIFT }
    }

    /// The owner of `count` pages with consecutive indexes. `None` if an index is too high.
    #[inline]
    pub(crate) fn run_from(self, first: u64, count: u64) -> Option<OwnerRun> {
        let fits = first.checked_add(count).is_some_and(|end| end <= FolioIndex::END);
        fits.then_some(OwnerRun { frame: self.frame, word: self.word | first })
    }

    /// Stores the owner and the index of the folio's first page in the folio's metadata. The folio
    /// is fresh, or the caller has its lock.
    #[inline(always)]
    pub(super) fn write(self, head: &FrameMeta, index: FolioIndex) {
        head.owner.store(self.frame, Relaxed);
        head.word.store(self.word | index.0, Relaxed);
    }
}

/// The owner of pages with consecutive indexes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct OwnerRun {
    frame: u32,
    /// The second word, with the index of the first page.
    word: u64,
}

impl OwnerRun {
    /// As [`OwnerMark::write`], for the page `number` after the first.
    #[inline(always)]
    pub(super) fn write(self, head: &FrameMeta, number: u64) {
        head.owner.store(self.frame, Relaxed);
        head.word.store(self.word + number, Relaxed);
    }
}

/// The kind of owner of a folio.
///
/// ```
/// use bindery::OwnerKind;
///
/// /// Whether the folio can be read again from a file.
/// fn has_file(owner: OwnerKind) -> bool {
///     owner == OwnerKind::File
/// }
/// assert!(!has_file(OwnerKind::Anonymous));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OwnerKind {
    /// Anonymous memory: owned by the address spaces that map it.
    Anonymous,
    /// Shared memory.
    SharedMemory,
    /// A file.
    File,
}

/// The owner of a folio, and the folio's position in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FolioOwner {
    pub(crate) owner: Owner,
    /// The index of the folio's first page in the owner.
    pub(crate) first: FolioIndex,
}

impl<P: Platform> FolioHandle<'_, P> {
    /// Records that the owning object no longer refers to any page of the folio: the folio has no
    /// owner, but [`FolioHandle::owner_kind`] is retained. Entries that mapped the folio may have
    /// been removed without having been subtracted from the counts:
    /// 1. CPU A removes a table from the tree and releases its locks;
    /// 2. CPU B truncates the object, finds no entry, and drops the pages;
    /// 3. CPU A subtracts the table's mappings, as pages of shared memory or of a file.
    ///
    /// The caller has the folio's lock.
    pub(super) fn detach_from_object(self) {
        let head = self.head();
        let kind = head.word.load(Relaxed) & !0 << KIND_SHIFT;
        head.owner.store(0, Relaxed);
        head.word.store(kind | DETACHED, Relaxed);
    }

    /// The folio's owner, and the index of its first page there. Exact for the holder of the
    /// folio's lock and for the auditor of a quiet system; a guess for any other caller.
    pub(crate) fn owner(self) -> FolioOwner {
        let head = self.head();
        let word = head.word.load(Relaxed);
        let address = || {
            let place = word >> PLACE_SHIFT & (PAGE_SIZE / ALIGN - 1);
            let page = self.platform().direct_map(Frame(head.owner.load(Relaxed)));
            page.map_addr(|page| page.saturating_add((place * ALIGN) as usize))
        };
        let owner = match word >> KIND_SHIFT {
            _ if word & DETACHED != 0 => Owner::None,
            1 => Owner::Group(address().cast()),
            SHARED_MEMORY => Owner::Memory(address().cast()),
            FILE => Owner::File(address().cast()),
            _ => Owner::None,
        };
        FolioOwner { owner, first: FolioIndex(word & INDEX_MASK) }
    }

    /// Whether `owner` owns the folio. Possibly stale unless the caller has the folio's lock.
    #[inline(always)]
    pub(crate) fn is_owned_by(self, owner: OwnerMark) -> bool {
        let head = self.head();
        head.owner.load(Relaxed) == owner.frame
            && head.word.load(Relaxed) & !INDEX_MASK == owner.word
    }

    /// Whether the folio is anonymous memory, which only its anon group may map. `false` once the
    /// last mapping is dropped and the owner removed.
    #[inline]
    pub(crate) fn is_anonymous(self) -> bool {
        is_anonymous(self.head().word.load(Relaxed))
    }

    /// Whether the folio belongs to an object.
    #[inline]
    pub(crate) fn is_of_object(self) -> bool {
        let word = self.head().word.load(Relaxed);
        word >> KIND_SHIFT >= SHARED_MEMORY && word & DETACHED == 0
    }

    /// The kind of owner that the folio has, or had when it was mapped. The caller keeps the folio
    /// mapped, so the kind does not change.
    #[inline]
    pub(crate) fn owner_kind(self) -> OwnerKind {
        match self.head().word.load(Relaxed) >> KIND_SHIFT {
            SHARED_MEMORY => OwnerKind::SharedMemory,
            FILE => OwnerKind::File,
            _ => OwnerKind::Anonymous,
        }
    }
}

/// Whether the mappings of the folio with this `word` count as mappings of an object's pages. The
/// sign of the word tells this: it is the upper bit of the kind.
#[inline]
pub(super) const fn is_counted_for_object(word: u64) -> bool {
    const { assert!(SHARED_MEMORY == 2 && FILE == 3) };
    word >> 63 != 0
}

/// Whether the owner in the `word` of a folio's head is an anon group.
#[inline]
pub(super) const fn is_anonymous(word: u64) -> bool {
    word >> KIND_SHIFT == 1
}

impl Counts {
    /// Counts `pages` mapped pages of a folio with this kind of owner.
    #[inline]
    pub(crate) fn mapped(&mut self, owner: OwnerKind, pages: u32) {
        let level = self.level(owner);
        *level = level.wrapping_add(u64::from(pages));
    }

    /// Counts `pages` unmapped pages of a folio with this kind of owner.
    #[inline]
    pub(crate) fn unmapped(&mut self, owner: OwnerKind, pages: u32) {
        let level = self.level(owner);
        *level = level.wrapping_sub(u64::from(pages));
    }

    #[inline]
    fn level(&mut self, owner: OwnerKind) -> &mut u64 {
        match owner {
            OwnerKind::Anonymous => &mut self.anonymous_pages,
            OwnerKind::File => &mut self.file_pages,
            OwnerKind::SharedMemory => &mut self.shared_pages,
        }
    }
}
