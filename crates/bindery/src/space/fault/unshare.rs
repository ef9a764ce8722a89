//! Copies for pins and debuggers: a private read-only page becomes exclusive to the process without
//! a write by the program.

use crate::addr::{Frame, PAGE_SHIFT, VirtAddr};
use crate::arch::{Absent, AbsentFormat, Arch, Entry, EntryIndex, Kind, Level};
use crate::error::{Failure, FaultError};
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::space::stack_growth::prepare_group;
use crate::table::EntryAt;
use crate::table::locking::Node;
use crate::vma::Protection;

use super::Access;
use super::copy_on_write::folio_range;
use super::slow::Fault;

/// Gives the program its own read-only copy of the page at `page`, in a private read-only mapping:
/// a copy of the zero page, of the object's page, or of a page that other processes map. Does
/// nothing if the page is already private or no longer mapped. (Linux: `FAULT_FLAG_UNSHARE`.)
pub(in crate::space) fn unshare<P: Platform>(
    space: &AddressSpace<'_, P>,
    page: VirtAddr,
) -> Result<(), Failure<FaultError>> {
    loop {
        let locked = space.lock_vma(page).ok_or(FaultError::NotMapped)?;
        let vma = locked.vma();
        if vma.is_shared() || vma.protection().contains(Protection::WRITE) {
            // The mapping has changed.
            return Ok(());
        }
        if vma.group_pointer().is_none() {
            drop(locked);
            prepare_group(space, page)?;
            continue;
        }
        let fault = Fault::new(space, vma, page, Access::Read);
        let Some(object) = vma.object() else { return unshare_locked(&fault) };
        // Keeps the object's pages from being dropped until they are copied.
        return object.invalidate_lock.with_read(space.platform(), |_| unshare_locked(&fault));
    }
}

fn unshare_locked<P: Platform>(fault: &Fault<'_, '_, P>) -> Result<(), Failure<FaultError>> {
    let frames = &fault.memory().frames;
    let shown = {
        let section = fault.read_section();
        let mut cursor = fault.cursor(&section);
        let EntryAt { node, index, entry: raw } = cursor.entry_at(fault.page);
        let Some(first) = mapped_frame(node, index, raw) else { return Ok(()) };
        let inside = (fault.page.0 & (node.level.span() - 1)) >> PAGE_SHIFT;
        let frame = first.plus(inside as u32);
        let is_leaf = node.level.kind(raw) == Kind::Leaf;
        if is_leaf && node.level == Level::PMD && fault.memory().is_zero(frame) {
            drop(cursor);
            drop(section);
            return fault.fill_huge().map(|_| ());
        }
        frames.folio_of(frame).map(|folio| (folio, frame.0 - folio.head.0))
    };
    if let Some((folio, number)) = shown.filter(|(folio, _)| frames.folio(*folio).is_anonymous())
        && (frames.folio(folio).exclusive().contains(number)
            || fault.claim(folio_range(fault.vma, fault.page, number, folio), folio))
    {
        return Ok(());
    }
    fault.copy().map(|_| ())
}

/// The frame at which a leaf or a `PROT_NONE` entry begins; `None` if the entry maps no page.
pub(in crate::space) fn mapped_frame<A: Arch, T>(
    node: Node<A, T>,
    index: EntryIndex,
    raw: Entry,
) -> Option<Frame> {
    match node.level.kind(raw) {
        Kind::Leaf => Some(A::frame(node.single(raw, index))),
        Kind::Absent => match A::decode_absent(raw) {
            Some(Absent::ProtNone { frame, .. }) => Some(frame),
            Some(Absent::Swap { .. } | Absent::Marker(_)) | None => None,
        },
        Kind::Empty | Kind::Table => None,
    }
}
