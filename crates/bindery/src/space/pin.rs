//! Pins: pages that stay in place while a device, or any other user besides the page tables, reads
//! or writes them.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::fmt;

use crate::Memory;
use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{self, Arch, KeyRights, Kind, Level};
use crate::error::{FaultError, PinError};
use crate::folio::Folio;
use crate::object::{Object, mapped_write};
use crate::platform::Platform;
use crate::table::cursor::Cursor;
use crate::table::locking::Depth;
use crate::table::run::Entries;
use crate::table::{EntryAt, Table};

use super::fault::{Access, record_access, unshare};
use super::pin_count::{PinCount, Share, pin_count};
use super::{AddressSpace, Protection};
use crate::vma::{MappingFlags, Vma};

/// The duration of a pin.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{Access, AddressSpace, PinError, PinTime, Pinned, Platform};
///
/// /// For a device that keeps on reading the page.
/// fn register<'m, P: Platform>(
///     space: &AddressSpace<'m, P>,
///     at: VirtAddr,
/// ) -> Result<Pinned<'m, P>, PinError> {
///     space.pin(at, 1, Access::Read, PinTime::Long)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PinTime {
    /// Until the end of one transfer.
    Short,
    /// Until user space releases the pin (Linux: `FOLL_LONGTERM`). Even for reading, a private
    /// mapping first gets a page of its own, because the object's page would not show the program's
    /// later writes.
    Long,
}

/// Pinned pages of one folio. The pages keep their frames, and so the program's view of them, until
/// this value is dropped. `fork` gives the child copies of the pages; collapse skips them; moves
/// carry them along.
///
/// Dropping the value marks pages that were pinned for writing as dirty, even if they were saved
/// during the pin. The file stays alive until then, even if all other holders have released it, so
/// that the writes can be saved. Dropping such a pin may therefore sleep.
///
/// ```
/// use bindery::addr::{Frame, VirtAddr};
/// use bindery::{Access, AddressSpace, PinError, PinTime, Platform};
///
/// /// Lets a device write a page of a program.
/// fn transfer<P: Platform>(
///     space: &AddressSpace<'_, P>,
///     at: VirtAddr,
///     device: impl FnOnce(Frame),
/// ) -> Result<(), PinError> {
///     let pinned = space.pin(at, 1, Access::Write, PinTime::Short)?;
///     device(pinned.first());
///     Ok(()) // dropping it unpins
/// }
/// ```
///
/// Pinned pages may outlive their address space:
///
/// ```
/// # use bindery::{Access, AddressSpace, Memory, PinTime, Platform, addr::VirtAddr};
/// fn keep<P: Platform>(memory: Memory<P>, at: VirtAddr) -> Option<()> {
///     let space = AddressSpace::new(&memory, Default::default()).ok()?;
///     let pinned = space.pin(at, 1, Access::Read, PinTime::Long).ok()?;
///     drop(space);
///     drop(pinned);
///     drop(memory);
///     Some(())
/// }
/// ```
///
/// but not their memory:
///
/// ```compile_fail,E0505
/// # use bindery::{Access, AddressSpace, Memory, PinTime, Platform, addr::VirtAddr};
/// fn keep<P: Platform>(memory: Memory<P>, at: VirtAddr) -> Option<()> {
///     let space = AddressSpace::new(&memory, Default::default()).ok()?;
///     let pinned = space.pin(at, 1, Access::Read, PinTime::Long).ok()?;
///     drop(space);
///     drop(memory);
///     drop(pinned);
///     Some(())
/// }
/// ```
pub struct Pinned<'m, P: Platform> {
    memory: &'m Memory<P>,
    folio: Folio,
    first: Frame,
    pages: u32,
    access: Access,
    /// The file that must be notified of the writes, and the index of the first page in the file.
    file: Option<(Object<'m, P>, u64)>,
    /// The pin's share of the address space's pin count; the pin may outlive that address space.
    /// Released last.
    _share: Share<'m, P>,
}

impl<P: Platform> Pinned<'_, P> {
    /// The frame of the first page; the frames of the other pages are consecutive.
    ///
    /// Context: any.
    pub fn first(&self) -> Frame {
        self.first
    }

    /// The number of pinned pages, at least one.
    ///
    /// Context: any.
    pub fn pages(&self) -> u32 {
        self.pages
    }
}

impl<P: Platform> Drop for Pinned<'_, P> {
    fn drop(&mut self) {
        if self.access == Access::Write {
            self.memory.frames.folio(self.folio).mark_dirty();
        }
        if let Some((file, page)) = &self.file {
            mapped_write::end_pinned(file, *page, u64::from(self.pages));
        }
        // SAFETY: 1. the pins belong to this value.
        unsafe { self.memory.frames.folio(self.folio).unpin() };
        self.memory.clock.exhausted.forget();
    }
}

impl<P: Platform> fmt::Debug for Pinned<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("first", &self.first).field("pages", &self.pages).finish()
    }
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Pins the page at `at` and up to `pages - 1` pages after it that belong to the same folio and
    /// are mapped consecutively with the same permissions. If the pin could not be kept otherwise,
    /// the program first gets an exclusive page: for writing, and for reading anonymous memory that
    /// was never written or that is shared with another process until either of them writes.
    /// (Linux: `pin_user_pages`.)
    ///
    /// Context: may sleep. Complexity: linear in the number of pinned pages; one atomic
    /// instruction.
    ///
    /// # Errors
    /// [`PinError::Fault`] with the fault that the access would have raised;
    /// [`PinError::LimitReached`] if the address space would exceed [`super::Limits::pinned`];
    /// [`PinError::FolioLimit`] if the folio has 2^15 pins, or has 2^14 pins while the address
    /// space has more than 1,024 pinned pages in all. After an error, nothing is pinned.
    pub fn pin(
        &self,
        at: VirtAddr,
        pages: u32,
        access: Access,
        time: PinTime,
    ) -> Result<Pinned<'m, P>, PinError> {
        pin(self, at, pages, access, time)
    }
}

fn pin<'m, P: Platform>(
    space: &AddressSpace<'m, P>,
    at: VirtAddr,
    pages: u32,
    access: Access,
    time: PinTime,
) -> Result<Pinned<'m, P>, PinError> {
    if at >= space.limit() {
        return Err(FaultError::NotMapped.into());
    }
    let page = at.align_down(PAGE_SIZE);
    let count = space.page_table.memory.retry(|| pin_count(space))?;
    loop {
        let locked = space.lock_vma(page).ok_or(FaultError::NotMapped)?;
        let vma = locked.vma();
        if vma.flags().intersects(MappingFlags::SECRET | MappingFlags::FRAMES) {
            return Err(FaultError::Protection.into());
        }
        let own = !vma.is_shared() && (vma.is_anonymous() || time == PinTime::Long);
        let range = VirtRange::from_len(page, u64::from(pages.max(1)) * PAGE_SIZE)
            .map_or(VirtRange::raw(page.0, page.0 + PAGE_SIZE), |range| {
                range.intersection(vma.range())
            });
        // One table at a time: the run does not extend beyond the table.
        let table = P::Arch::PMD.span();
        let end = range.end().0.min((page.0 | (table - 1)).saturating_add(1));
        let range = VirtRange::raw(page.0, end);
        let section = space.page_table.read_section();
        let mut cursor = space.page_table.cursor(&section, range, Depth::Floor(Level::PTE));
        let own = match pages_to_pin(&mut cursor, access, own) {
            PinnablePage::Pages(found) => return pin_pages(space, &mut cursor, vma, found, count),
            PinnablePage::Other => own,
            // A private mapping of an object may also contain the zero page (`UFFDIO_ZEROPAGE`),
            // and a read would leave it in place.
            PinnablePage::ZeroPage => true,
        };
        drop(cursor);
        drop(section);
        // A write fault gives the program an exclusive page, if writes are allowed.
        let writable = vma.protection().contains(Protection::WRITE);
        drop(locked);
        let needed = if own && writable { Access::Write } else { access };
        space.fault_for_kernel(page, needed, KeyRights::ALL)?;
        if own && !writable {
            space.page_table.memory.retry(|| unshare(space, page))?;
        }
    }
}

/// Pins pages that the cursor's tables map, in a locked VMA.
fn pin_pages<'m, P: Platform>(
    space: &AddressSpace<'m, P>,
    cursor: &mut Cursor<'_, 'm, P>,
    vma: &Vma,
    found: PagesToPin<P::Arch>,
    count: &PinCount,
) -> Result<Pinned<'m, P>, PinError> {
    let memory = space.page_table.memory;
    let PagesToPin { leaf, folio, first, pages, access, shared } = found;
    let share = Share::add(space, count, pages)?;
    if !memory.frames.folio(folio).pin(share.room) {
        return Err(PinError::FolioLimit);
    }
    record_access(cursor, leaf.node, leaf.index, access);
    let noticed = vma.object().is_some_and(|object| object.notices_writes());
    let file = if access == Access::Write && shared && noticed {
        let at = cursor.range().start();
        space.object_of(vma).map(|object| (object, vma.page_offset_of(at)))
    } else {
        None
    };
    Ok(Pinned { memory, folio, first, pages, access, file, _share: share })
}

/// The pages mapped from the start of the cursor's range on, if the mapping allows the access and,
/// with `own`, no other process maps the pages.
fn pages_to_pin<'s, P: Platform>(
    cursor: &mut Cursor<'s, '_, P>,
    access: Access,
    own: bool,
) -> PinnablePage<'s, P::Arch> {
    let (page_table, range) = (cursor.page_table, cursor.range());
    let (memory, at) = (page_table.memory, range.start());
    let leaf = cursor.entry_at(at);
    let EntryAt { node, index, entry: raw } = leaf;
    if node.level.kind(raw) != Kind::Leaf {
        return PinnablePage::Other;
    }
    let entry = node.single(raw, index);
    let permissions = P::Arch::attributes(entry).permissions;
    let inside = (at.0 & (node.level.span() - 1)) >> PAGE_SHIFT;
    let first = P::Arch::frame(entry).plus(inside as u32);
    let Some(folio) = memory.frames.folio_of(first) else { return PinnablePage::ZeroPage };
    let number = first.0 - folio.head.0;
    let limit = (folio.pages() - number).min(range.pages() as u32);
    let found = memory.frames.folio(folio).exclusive().run(number, limit);
    let shared = memory.frames.folio(folio).is_of_object() && !own;
    if !permissions.contains(access.permission()) || own && !found.exclusive {
        return PinnablePage::Other;
    }
    let wanted = if shared { limit } else { found.count };
    let pages = if node.level > Level::PTE {
        wanted
    } else {
        let entries = page_table.entries(node.table);
        let equal = arch::Equal::WRITABLE;
        let step = P::Arch::STEP;
        P::Arch::match_leaves(&entries[index.positions(wanted)], index, equal, step, 0).0
    };
    PinnablePage::Pages(PagesToPin { leaf, folio, first, pages, access, shared })
}

/// The page that a pin finds.
enum PinnablePage<'s, A: Arch> {
    Pages(PagesToPin<'s, A>),
    /// A zero page, or a page of the huge zero page; only private mappings contain these.
    ZeroPage,
    /// No page, or an unsuitable one.
    Other,
}

/// Mapped pages of one folio that allow the access of a pin.
struct PagesToPin<'s, A: Arch> {
    /// The entry that maps the first page.
    leaf: EntryAt<A, Table<'s>>,
    folio: Folio,
    first: Frame,
    pages: u32,
    access: Access,
    /// Whether the pages belong to an object.
    shared: bool,
}
