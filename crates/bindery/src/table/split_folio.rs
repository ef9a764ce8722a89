//! Folios that are split into smaller ones where they are mapped.

use crate::addr::{Order, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Kind, Level};
use crate::error::NoMemory;
use crate::events::RareEvents;
use crate::folio::{Folio, MAX_FOLIO_ORDER};
use crate::platform::Platform;

use super::cursor::Cursor;
use super::locking::Depth;
use super::{EntryAt, PageTable, TableEntry, run};

/// The reason why a folio was not split. Its leaves may have been split; nothing else has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Uncut {
    /// No page of the folio is mapped in the range.
    NotMapped,
    /// The folio has references or is mapped elsewhere.
    Busy,
    NoMemory,
}

impl From<NoMemory> for Uncut {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

/// One bit per page of a folio.
type PageBits = [u64; MAX_FOLIO_ORDER.pages() as usize / 64];

/// Splits a folio whose pages are mapped in `range`, in order, into folios of `order`. `hold`
/// acquires the only reference to the folio, or reports that the folio cannot be held. The
/// reference becomes one reference to each of the new folios.
pub(crate) fn split_folio<P: Platform>(
    page_table: &PageTable<'_, P>,
    folio: Folio,
    range: VirtRange,
    order: Order,
    hold: impl FnOnce() -> bool,
) -> Result<(), Uncut> {
    let frames = &page_table.memory.frames;
    let section = page_table.read_section();
    let mut cursor = page_table.cursor(&section, range, Depth::Floor(Level::PTE));
    let mut mapped: PageBits = [0; _];
    let mut at = range.start();
    while at < range.end() {
        let EntryAt { node, .. } = cursor.entry_at(at);
        let Some((_, page)) = cursor.folio_at(at).filter(|(found, _)| *found == folio) else {
            let last = at.0 | (node.level.span() - 1);
            at = VirtAddr(last.saturating_add(1));
            continue;
        };
        let table = cursor.split_table_at(at)?;
        let index = P::Arch::PTE.index_of(at);
        let small = u32::from(order.0) < P::Arch::CONTIG_ENTRIES.trailing_zeros();
        if small && P::Arch::is_contig(run::load(page_table.entries(table), index)) {
            page_table.unfold(TableEntry { table, index }, at, &mut cursor.counts);
        }
        mapped[page as usize / 64] |= 1 << (page % 64);
        at = at.offset(PAGE_SIZE);
    }
    if mapped == [0; _] {
        // The folio has been unmapped since the caller read the entry.
        return Err(Uncut::NotMapped);
    }
    let holds = |page: u32| (mapped[page as usize / 64] >> (page % 64) & 1) as u32;
    if !hold() {
        return Err(Uncut::Busy);
    }
    frames.folio(folio).split(order, holds).map_err(|_| Uncut::Busy)?;
    RareEvents::note(&page_table.memory.rare.folio_splits);
    Ok(())
}

impl<P: Platform> Cursor<'_, '_, P> {
    /// The folio that a leaf or a `PROT_NONE` entry maps at `page`, and the page's number in the
    /// folio.
    pub(crate) fn folio_at(&mut self, page: VirtAddr) -> Option<(Folio, u32)> {
        let EntryAt { node, index, entry: raw } = self.entry_at(page);
        let first = match node.level.kind(raw) {
            Kind::Leaf if node.level == Level::PTE => P::Arch::frame(node.single(raw, index)),
            Kind::Leaf => P::Arch::frame(raw),
            Kind::Absent => match P::Arch::decode_absent(raw) {
                Some(Absent::ProtNone { frame, .. }) => frame,
                Some(Absent::Swap { .. } | Absent::Marker(_)) | None => return None,
            },
            Kind::Empty | Kind::Table => return None,
        };
        let inside = (page.0 & (node.level.span() - 1)) >> PAGE_SHIFT;
        let frame = first.plus(inside as u32);
        let folio = self.page_table.memory.frames.folio_of(frame)?;
        Some((folio, frame.0 - folio.head.0))
    }
}
