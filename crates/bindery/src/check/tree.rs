//! Verifies the tables and entries of one address space.

use crate::addr::{Frame, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{
    self, Absent, AbsentFormat, Arch, Entry, EntryIndex, Kind, Level, Marker, MemoryType,
    Permissions,
};
use crate::folio::OwnerKind;
use crate::frame::{FrameRange, pending};
use crate::memory::{folio_limit, may_show};
use crate::platform::Platform;
use crate::space::{AddressSpace, Resident};
use crate::swap::SlotRun;
use crate::table::EntryAt;
use crate::table::deposit::deposits_below;
use crate::table::locking::Node;
use crate::table::run::{self, Entries};
use crate::vma::{MappingFlags, Vma};
use crate::vmas::VmaView;

use super::{Audit, Violation};

/// A leaf, possibly `PROT_NONE`, with its location in memory and in the table.
struct FoundLeaf<A: Arch> {
    range: VirtRange,
    level: Level<A>,
    frame: Frame,
}

/// The memory type of the VMA's leaves, as encoded in entries.
fn memory_type<A: Arch>(vma: &Vma) -> MemoryType {
    let frames = vma.object().and_then(|object| object.frames());
    let bits = frames.and_then(|frames| A::memory_type(frames.memory));
    bits.map_or(MemoryType::Normal, |bits| A::memory_type_of(Entry(bits)))
}

/// The VMA that contains the mapped `range`.
fn mapping<P: Platform>(vmas: VmaView<'_, P>, range: VirtRange) -> Result<&Vma, Violation> {
    let vma = vmas.first_ending_after(range.start().0).filter(|vma| vma.range().covers(range));
    vma.ok_or(Violation::OutsideMappings(range.start()))
}

impl<P: Platform> Audit<'_, '_, P> {
    pub(super) fn space(&mut self, space: &AddressSpace<'_, P>) -> Result<(), Violation> {
        let vmas = space.vmas.lock();
        if !vmas.check() {
            return Err(Violation::MappingIndex);
        }
        for vma in vmas.view().iter() {
            let aligned = (vma.start() | vma.end()).is_multiple_of(PAGE_SIZE);
            if !aligned || vma.start() >= vma.end() || vma.end() > P::Arch::USER_END {
                return Err(Violation::MappingBounds(VirtAddr(vma.start())));
            }
            self.report.mappings += 1;
        }
        drop(vmas);
        let root = Node { table: space.page_table.root, level: P::Arch::ROOT };
        self.resident = Resident::default();
        self.table(space, root, VirtAddr(0))?;
        let says = space.resident();
        if says != self.resident {
            return Err(Violation::Resident { says, holds: self.resident });
        }
        Ok(())
    }

    fn table(
        &mut self,
        space: &AddressSpace<'_, P>,
        node: Node<P::Arch>,
        base: VirtAddr,
    ) -> Result<(), Violation> {
        let (table, at) = (node.table, base);
        self.meet_table(table, at)?;
        let meta = self.memory.frames.table(table);
        if !meta.is_table_of(node.level) {
            return Err(Violation::NotATable { table, at });
        }
        if meta.is_stray() {
            return Err(Violation::StrayTable { table, at });
        }
        if meta.is_locked() {
            return Err(Violation::LockedTable { table, at });
        }
        if pending::is_any(meta.pending()) {
            return Err(Violation::PendingFlush { table, at });
        }
        let root = node.level == P::Arch::ROOT;
        let span = node.level.table_span();
        let last = base.0.saturating_add(span - 1);
        let mapped = |vma: &Vma| vma.start() <= last;
        if !root && !space.vmas.lock().view().first_ending_after(base.0).is_some_and(mapped) {
            return Err(Violation::TableOutsideMappings { table, at });
        }
        let (mut holds, mut needs) = (0, 0);
        for index in EntryIndex::all::<P::Arch>() {
            let start = base.offset(u64::from(index) * node.level.span());
            if root && start >= space.limit() {
                // The kernel's half belongs to the embedder.
                break;
            }
            let entry = run::load(self.entries(table), index);
            let kind = node.level.kind(entry);
            if kind != Kind::Empty {
                holds += 1;
            }
            if node.level > Level::PTE && matches!(kind, Kind::Leaf | Kind::Absent) {
                needs += 1;
            }
            let range = VirtRange::raw(start.0, start.0 + node.level.span());
            match kind {
                Kind::Empty => {}
                Kind::Table => {
                    let child = node.child(P::Arch::frame(entry));
                    self.table(space, child, start)?;
                }
                Kind::Leaf => self.leaf(space, EntryAt { node, index, entry }, range)?,
                Kind::Absent => {
                    let guard = Some(Absent::Marker(Marker::Guard));
                    if P::Arch::decode_absent(entry) == guard && !meta.has_guards() {
                        return Err(Violation::UnknownGuard(start));
                    }
                    self.absent(space, EntryAt { node, index, entry }, range)?;
                }
            }
        }
        let says = space.page_table.entry_count(table);
        if says != holds {
            return Err(Violation::LiveCount { table, says, holds });
        }
        self.deposit(node, base, needs)
    }

    /// Checks that the table has `needs` tables on deposit, each with the deposits that it needs.
    fn deposit(
        &mut self,
        Node { table: holder, level }: Node<P::Arch>,
        at: VirtAddr,
        needs: u32,
    ) -> Result<(), Violation> {
        let mut says = 0;
        let mut next = self.memory.frames.table(holder).deposit();
        while let Some(table) = next {
            self.meet_table(table, at)?;
            if level > Level::PTE {
                let below = Node { table, level: level.below() };
                self.deposit(below, at, deposits_below(level))?;
            }
            says += 1;
            next = self.memory.frames.table(table).next();
        }
        if says != needs {
            return Err(Violation::Deposit { table: holder, says, needs });
        }
        Ok(())
    }

    fn leaf(
        &mut self,
        space: &AddressSpace<'_, P>,
        EntryAt { node, index, entry: raw }: EntryAt<P::Arch>,
        range: VirtRange,
    ) -> Result<(), Violation> {
        let at = range.start();
        let entry = node.single(raw, index);
        let vmas = space.vmas.lock();
        let vma = mapping(vmas.view(), range)?;
        let protection = vma.protection();
        let attributes = P::Arch::attributes(entry);
        if !attributes.permissions.intersects(Permissions::ACCESS) {
            return Err(Violation::LeafWithoutAccess(at));
        }
        // Includes the permissions that the architecture adds to the VMA's.
        let widest = protection.permissions();
        if protection.is_none() {
            return Err(Violation::WrongProtNone(at));
        }
        let allowed = P::Arch::implied(widest | Permissions::USER);
        let user = attributes.permissions.contains(Permissions::USER);
        if !allowed.contains(attributes.permissions) || !user {
            return Err(Violation::TooWide(at));
        }
        if (allowed - attributes.permissions).contains(Permissions::BTI) {
            return Err(Violation::TooWide(at));
        }
        if attributes.key != vma.flags().key() {
            return Err(Violation::WrongKey(at));
        }
        let writable = attributes.permissions.contains(Permissions::WRITE);
        let found = FoundLeaf { range, level: node.level, frame: P::Arch::frame(entry) };
        if attributes.memory != memory_type::<P::Arch>(vma) {
            return Err(Violation::WrongMemoryType(at));
        }
        let exclusive = self.page(vma, &found)?;
        if writable && !exclusive && !vma.is_shared() {
            return Err(Violation::WritableButShared(at));
        }
        if node.in_contig(raw) && !self.contig_is_whole(node, index) {
            return Err(Violation::BrokenBlock(at));
        }
        self.owned(vma, &found)
    }

    fn absent(
        &mut self,
        space: &AddressSpace<'_, P>,
        EntryAt { node, entry, .. }: EntryAt<P::Arch>,
        range: VirtRange,
    ) -> Result<(), Violation> {
        let at = range.start();
        let vmas = space.vmas.lock();
        let vma = mapping(vmas.view(), range)?;
        match P::Arch::decode_absent(entry) {
            None => Err(Violation::BadAbsent(at)),
            Some(Absent::ProtNone { frame, memory, .. }) => {
                if !vma.protection().is_none() {
                    return Err(Violation::WrongProtNone(at));
                }
                if memory != memory_type::<P::Arch>(vma) {
                    return Err(Violation::WrongMemoryType(at));
                }
                let found = FoundLeaf { range, level: node.level, frame };
                self.page(vma, &found)?;
                self.owned(vma, &found)
            }
            Some(Absent::Swap { device, slot, exclusive, .. }) => {
                let count = node.level.order().pages();
                self.swap_entry(at, SlotRun { area: device, first: slot, count }, exclusive)
            }
            Some(Absent::Marker(_)) => Ok(()),
        }
    }

    /// Checks that the reverse map finds the leaf. Zero pages have no owner.
    fn owned(&self, vma: &Vma, found: &FoundLeaf<P::Arch>) -> Result<(), Violation> {
        let Some(folio) = self.memory.frames.folio_of(found.frame) else { return Ok(()) };
        self.owner(vma, found.range.start(), folio, found.frame.0 - folio.head.0)
    }

    /// Counts the pages of a leaf and returns whether they are exclusive.
    fn page(&mut self, vma: &Vma, found: &FoundLeaf<P::Arch>) -> Result<bool, Violation> {
        let order = found.level.order();
        let pages = order.pages();
        if vma.has(MappingFlags::FRAMES) && !self.is_copy(vma, found.frame) {
            return self.shown_page(found).map(|()| false);
        }
        self.report.pages += u64::from(pages);
        let zeroes = self.memory.huge_zero.pages_from(found.frame, P::Arch::PMD.order());
        if found.frame == self.memory.zero_frame && found.level == Level::PTE
            || zeroes >= pages && found.frame.is_aligned(order)
        {
            return Ok(false);
        }
        let broken = Violation::NotAFolio { at: found.range.start(), frame: found.frame };
        if !self.memory.frames.manages(found.frame) || !found.frame.is_aligned(order) {
            return Err(broken);
        }
        let folio = self.memory.frames.folio_of(found.frame).ok_or(broken)?;
        let number = found.frame.0 - folio.head.0;
        if number + pages > folio.pages() {
            return Err(broken);
        }

        *match self.memory.frames.folio(folio).owner_kind() {
            OwnerKind::Anonymous => &mut self.resident.anonymous,
            OwnerKind::File => &mut self.resident.file,
            OwnerKind::SharedMemory => &mut self.resident.shared,
        } += u64::from(pages);
        for page in 0..pages {
            if let Some(count) = self.count(found.frame.plus(page)) {
                *count += 1;
            }
        }
        Ok(self.memory.frames.folio(folio).exclusive().contains_all(number, pages))
    }

    /// Whether the frame is a private mapping's copy of a frame outside the core's management.
    fn is_copy(&self, vma: &Vma, frame: Frame) -> bool {
        let folio = self.memory.frames.folio_of(frame).filter(|_| !vma.is_shared());
        folio.is_some_and(|folio| self.memory.frames.folio(folio).is_anonymous())
    }

    /// Counts the pages of a leaf that maps frames outside the core's management.
    fn shown_page(&mut self, found: &FoundLeaf<P::Arch>) -> Result<(), Violation> {
        let pages = found.level.order().pages();
        if !may_show(self.memory, FrameRange { first: found.frame, count: pages }) {
            return Err(Violation::NotShown { at: found.range.start(), frame: found.frame });
        }
        for page in 0..pages {
            if let Some(count) = self.count(found.frame.plus(page)) {
                *count += 1;
            }
        }
        Ok(())
    }

    /// Whether the contiguous run around `index` is complete: aligned, consecutive, in one folio,
    /// and equal in all bits that the MMU uses.
    fn contig_is_whole(&self, node: Node<P::Arch>, index: EntryIndex) -> bool {
        let entries = self.entries(node.table);
        let first = index.align_down(P::Arch::CONTIG_ENTRIES);
        let head = run::load(entries, first);
        if head.0 & P::Arch::PRESENT == 0 {
            return false;
        }
        let entry = P::Arch::clear_contig(head, first);
        let (limit, step) =
            folio_limit(self.memory, P::Arch::frame(entry), P::Arch::CONTIG_ENTRIES);
        let equal = arch::Equal::WRITABLE;
        let (alike, _) =
            P::Arch::match_leaves(&entries[first.positions(limit)], first, equal, step, 0);
        let contigs = |at| P::Arch::is_contig(run::load(entries, at));
        step != 0
            && alike == P::Arch::CONTIG_ENTRIES
            && P::Arch::may_fold(entry, first)
            && first.stretch(P::Arch::CONTIG_ENTRIES).all(contigs)
    }
}
