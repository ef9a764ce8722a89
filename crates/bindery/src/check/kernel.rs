//! Compares the areas of a kernel map with their frames and their tables.

use core::sync::atomic::Ordering;

use crate::KernelMap;
use crate::addr::{PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, EntryIndex, Kind, Level, Permissions};
use crate::frame::meta;
use crate::platform::Platform;
use crate::table::locking::Node;
use crate::table::run;

use super::{Audit, Violation};

impl<P: Platform> Audit<'_, '_, P> {
    /// Verifies all areas of a kernel map; returns their number.
    pub(super) fn kernel_map(&mut self, map: &KernelMap<'_, P>) -> Result<u64, Violation> {
        if !map.index_is_sound() {
            return Err(Violation::MappingIndex);
        }
        let mut areas = 0;
        for area in self.areas(map) {
            areas += 1;
            let mut at = area.range().start();
            for (head, order) in area.frames(self.memory) {
                let is_contig = self.memory.frames.meta(head).kind() == meta::MetaKind::Kernel;
                let Some(count) = self.count(head).filter(|_| is_contig) else {
                    return Err(Violation::AreaPage(at));
                };
                *count += 1;
                for page in 0..order.pages() {
                    let expected = head.plus(page).start();
                    if area.is_live() && map.physical(at) != Some(expected) {
                        return Err(Violation::AreaPage(at));
                    }
                    at = at.offset(1 << PAGE_SHIFT);
                }
            }
            if area.is_live() && area.owns_frames() && at != area.range().end() {
                return Err(Violation::AreaPage(at));
            }
            if area.is_live() {
                self.every_page_is_mapped(map, area.range())?;
            }
        }
        self.kernel_root(map)?;
        Ok(areas)
    }

    fn every_page_is_mapped(
        &self,
        map: &KernelMap<'_, P>,
        range: VirtRange,
    ) -> Result<(), Violation> {
        let mut end = range.start();
        map.for_each_piece(range, |piece| {
            if piece.range.start() == end {
                end = piece.range.end();
            }
        });
        if end == range.end() { Ok(()) } else { Err(Violation::AreaPage(end)) }
    }

    fn kernel_root(&mut self, map: &KernelMap<'_, P>) -> Result<(), Violation> {
        let root = map.root();
        let arena = map.arena();
        if map.owns_root() {
            self.meet_table(root, arena.start())?;
        }
        let level = P::Arch::ROOT;
        let span = level.span();
        let mut at = arena.start().align_down(span);
        while at < arena.end() {
            let index = level.index_of(at);
            let entry = run::load(map.root_entries(), index);
            if level.kind(entry) != Kind::Table {
                return Err(Violation::NotATable { table: root, at });
            }
            let child = Node { table: root, level }.child(P::Arch::frame(entry));
            self.kernel_table(map, child, at)?;
            let Some(next) = at.checked_add(span) else { break };
            at = next;
        }
        Ok(())
    }

    fn kernel_table(
        &mut self,
        map: &KernelMap<'_, P>,
        node: Node<P::Arch>,
        base: VirtAddr,
    ) -> Result<(), Violation> {
        let Node { table, level } = node;
        let frames = &self.memory.frames;
        let known = frames.manages(table) && frames.table(table).is_table_of(level);
        if !known {
            return Err(Violation::NotATable { table, at: base });
        }
        self.meet_table(table, base)?;
        let top = level.above() == P::Arch::ROOT;
        if !top && !map.has_area_under(base, level.table_span()) {
            return Err(Violation::TableOutsideMappings { table, at: base });
        }
        if level == Level::PTE {
            let says = self.memory.frames.table(table).entry_count();
            let entries = self.entries(table).iter();
            let holds = entries.filter(|word| word.load(Ordering::Relaxed) != 0).count() as u32;
            if says != holds {
                return Err(Violation::LiveCount { table, says, holds });
            }
        }
        for index in EntryIndex::all::<P::Arch>() {
            let at = base.offset(u64::from(index) << level.span_shift());
            let entry = run::load(self.entries(table), index);
            match level.kind(entry) {
                Kind::Empty => {}
                Kind::Table => self.kernel_table(map, node.child(P::Arch::frame(entry)), at)?,
                Kind::Absent => return Err(Violation::BadAbsent(at)),
                Kind::Leaf => self.kernel_leaf(map, node, at)?,
            }
        }
        Ok(())
    }

    fn kernel_leaf(
        &mut self,
        map: &KernelMap<'_, P>,
        Node { table, level }: Node<P::Arch>,
        at: VirtAddr,
    ) -> Result<(), Violation> {
        let (entries, index) = (self.entries(table), level.index_of(at));
        let entry = run::load(entries, index);
        let single = P::Arch::clear_contig(entry, index);
        let span = level.span();
        let whole = VirtRange::raw(at.0, at.0 + span);
        let Some(area) = self.area_of(map, at).filter(|area| area.range().covers(whole)) else {
            return Err(Violation::OutsideMappings(at));
        };
        if !area.allows(level, P::Arch::is_contig(entry), P::Arch::memory_type_of(single)) {
            return Err(Violation::TooWide(at));
        }
        if P::Arch::attributes(single).permissions.contains(Permissions::USER) {
            return Err(Violation::TooWide(at));
        }
        if P::Arch::is_contig(entry) {
            let first = index.align_down(P::Arch::CONTIG_ENTRIES);
            let step = P::Arch::STEP << level.order().0;
            let head = P::Arch::clear_contig(run::load(entries, first), first).0;
            let continues = |ahead: u32| {
                let other = run::load(entries, first + ahead);
                let expected = Entry(head.wrapping_add(step * u64::from(ahead)));
                P::Arch::is_contig(other) && P::Arch::clear_contig(other, first + ahead) == expected
            };
            let frames = u32::from(level.order().0);
            let aligned =
                P::Arch::frame(Entry(head)).0 >> frames & (P::Arch::CONTIG_ENTRIES - 1) == 0;
            if level > P::Arch::LARGEST_CONTIG_LEVEL
                || !aligned
                || !(0..P::Arch::CONTIG_ENTRIES).all(continues)
            {
                return Err(Violation::BrokenBlock(at));
            }
        }
        self.report.pages += u64::from(level.order().pages());
        Ok(())
    }
}
