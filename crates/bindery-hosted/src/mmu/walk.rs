//! One walk through the tables, from the root or from the table of a cached intermediate entry,
//! down to a leaf.
//!
//! With [`Effect::Use`] it acts like the hardware: it checks the permission, then records the use
//! (and the write) by compare-exchange; if the entry has changed, the walk reads the entry again.
//! In a contiguous run the hardware may record either in any entry and treat the block as used or
//! written if any of its entries is. This walker exercises that freedom: it picks an entry by a
//! number that changes each time. With [`Effect::None`] the walk only reads, and then checks
//! contiguous runs strictly: all entries present, without holes, with one permission. (The hardware
//! may encounter a block with holes while software builds or splits the block.)

use std::sync::atomic::{AtomicU64, Ordering};

use bindery::addr::Frame;
use bindery::arch::{MemoryType, Permissions};

use super::{Access, Fetches, Leaf, Meaning, Rights, Rules, Translation, Walk};
use crate::control::BrokenControl;
use crate::memory::DirectMap;
use crate::violation::{Log, Place, Violation};

/// The maximum number of levels of tables, including the roots.
pub(crate) const MAX_LEVELS: usize = 6;

/// The effects of a walk.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Effect {
    /// None, for reads by software.
    None,
    /// The effects of this access; the number chooses among the entries of a block.
    Use(Access, u64),
}

/// A table, and the rights that the entries above it allow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Table {
    pub(crate) frame: Frame,
    pub(crate) rights: Rights,
}

impl Table {
    /// The root of an address space, without restrictions.
    pub(crate) fn root(frame: Frame) -> Self {
        Self { frame, rights: Rights::all() }
    }
}

/// The end of a walk.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    /// At an invalid entry of this level.
    Invalid(u8),
    /// At an entry that the manual forbids, which was reported.
    Malformed,
    /// At a leaf that does not allow the access.
    Denied(Translation),
    /// At a leaf that allows the access.
    Leaf(Translation),
}

/// A completed walk.
#[derive(Debug)]
pub(crate) struct Walked {
    /// For each level, the table that holds the entry of this level, if the walk read one.
    tables: [Option<Table>; MAX_LEVELS],
    pub(crate) end: End,
}

impl Walked {
    /// The table that holds the entry of `level`.
    pub(crate) fn table(&self, level: u8) -> Option<Table> {
        self.tables[usize::from(level)]
    }

    /// The tables that were read, each with the level of the entry that points to it.
    pub(crate) fn tables(&self) -> impl Iterator<Item = (u8, Table)> {
        (0..).zip(self.tables).filter_map(|(level, table)| Some((level, table?)))
    }
}

/// The machine around a walk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct World<'a> {
    pub(crate) memory: &'a DirectMap,
    pub(crate) log: &'a Log,
    /// The control bit that has the wrong value.
    pub(crate) broken: Option<BrokenControl>,
}

/// Walks to `place.addr` from `table`, whose level is `level`.
pub(crate) fn walk<A: Walk>(
    world: World<'_>,
    place: Place,
    table: Table,
    level: u8,
    effect: Effect,
) -> Walked {
    let mut walked = Walked { tables: [None; MAX_LEVELS], end: End::Malformed };
    let (mut table, mut level) = (table, level);
    loop {
        let at = At { world, place, table, level };
        match at.step::<A>(effect) {
            Step::Again => {}
            Step::Down(next) => {
                walked.tables[usize::from(level)] = Some(next);
                table = next;
                level -= 1;
            }
            Step::End(end) => {
                walked.end = end;
                return walked;
            }
        }
    }
}

enum Step {
    /// The entry changed concurrently.
    Again,
    Down(Table),
    End(End),
}

/// A position in a walk.
struct At<'a> {
    world: World<'a>,
    place: Place,
    table: Table,
    level: u8,
}

impl At<'_> {
    fn step<A: Walk>(&self, effect: Effect) -> Step {
        let index = A::RULES.index(self.place.addr, self.level);
        let Some(cell) = self.cell(index) else {
            return Step::End(self.no_memory(0, u64::from(self.table.frame.0)));
        };
        let entry = cell.load(Ordering::Acquire);
        match A::decode(entry, self.level, index) {
            Meaning::Invalid => Step::End(End::Invalid(self.level)),
            Meaning::Malformed(why) => Step::End(self.malformed(entry, why)),
            Meaning::Table { frame, rights, accessed } => {
                if self.level == 1 {
                    return Step::End(self.malformed(entry, "a table below level 1"));
                }
                if !self.world.memory.holds(frame, 1) {
                    return Step::End(self.no_memory(entry, frame));
                }
                if !accessed && matches!(effect, Effect::Use(..)) {
                    let used = A::with_accessed(entry);
                    if !replace(cell, entry, used) {
                        return Step::Again;
                    }
                }
                let rights = self.table.rights.both(rights);
                Step::Down(Table { frame: Frame(frame as u32), rights })
            }
            Meaning::Leaf(leaf) => self.leaf::<A>(index, entry, leaf, effect),
        }
    }

    fn cell(&self, index: u32) -> Option<&AtomicU64> {
        let frame = self.table.frame;
        let memory = self.world.memory;
        memory.holds(u64::from(frame.0), 1).then(|| memory.word(frame, index as usize * 8))
    }

    fn leaf<A: Walk>(&self, index: u32, entry: u64, leaf: Leaf, effect: Effect) -> Step {
        let rules = A::RULES;
        let frames = 1_u64 << (rules.index_bits * (u32::from(self.level) - 1));
        if !self.may_map(leaf.frame, frames, leaf.memory) {
            return Step::End(self.no_memory(entry, leaf.frame));
        }
        if leaf.frame & (frames - 1) != 0 {
            return Step::End(self.malformed(entry, "a frame not aligned to the leaf's size"));
        }
        let mut found = self.translation(&rules, leaf);
        if let Some(broken) = self.world.broken {
            if broken.reserves(entry, &leaf) {
                return Step::End(End::Malformed);
            }
            broken.narrow(&mut found);
        }
        if rules.fetches == Fetches::Ahead
            && matches!(leaf.memory, MemoryType::Device | MemoryType::Uncached)
            && found.permissions.contains(Permissions::EXECUTE)
        {
            let why = "executable, and a device: a fetch ahead of the program would read it";
            return Step::End(self.malformed(entry, why));
        }
        if leaf.block > 0 {
            let base = u64::from(found.frame);
            if base & ((frames << leaf.block) - 1) != 0
                || !self.may_map(base, frames << leaf.block, leaf.memory)
            {
                return Step::End(self.malformed(entry, "a contiguous run that is misaligned"));
            }
            let strict = matches!(effect, Effect::None);
            let Some(state) = self.block::<A>(index, entry, leaf, strict) else {
                return Step::End(End::Malformed);
            };
            (found.accessed, found.dirty) = state;
        }
        match effect {
            Effect::None => Step::End(End::Leaf(found)),
            Effect::Use(access, _) if !found.allows(access) => Step::End(End::Denied(found)),
            Effect::Use(access, _)
                if self.world.broken.is_some_and(|bit| bit.refuses_to_record(&found, access)) =>
            {
                Step::End(End::Denied(found))
            }
            Effect::Use(access, choice) => {
                let write = access.is_write();
                if (!found.accessed || write && !found.dirty)
                    && !self.record::<A>(index, entry, leaf, write, choice)
                {
                    return Step::Again;
                }
                found.accessed = true;
                found.dirty |= write;
                Step::End(End::Leaf(found))
            }
        }
    }

    /// Whether leaves of this type may map the frames. Addresses outside of memory may be devices,
    /// whose mappings must be uncached; device frame numbers fit 32 bits like all others.
    fn may_map(&self, first: u64, count: u64, memory: MemoryType) -> bool {
        self.world.memory.holds(first, count)
            || memory != MemoryType::Normal && first + count <= 1 << u32::BITS
    }

    /// The translation of the leaf, or of the leaf's block.
    fn translation(&self, rules: &Rules, leaf: Leaf) -> Translation {
        let order = rules.index_bits * (u32::from(self.level) - 1);
        let shift = rules.shift(self.level) + u32::from(leaf.block);
        let start = self.place.addr >> shift << shift;
        let position = rules.start(self.place.addr, self.level) - start;
        Translation {
            start,
            order: order as u8 + leaf.block,
            frame: (leaf.frame - (position >> bindery::addr::PAGE_SHIFT)) as u32,
            permissions: self.table.rights.both(leaf.rights).permissions(),
            memory: leaf.memory,
            accessed: leaf.accessed,
            dirty: leaf.dirty,
            key: leaf.key,
        }
    }

    /// Reads the whole block; returns whether it was accessed and written. `None` for a broken
    /// block, which was reported.
    fn block<A: Walk>(
        &self,
        index: u32,
        entry: u64,
        leaf: Leaf,
        strict: bool,
    ) -> Option<(bool, bool)> {
        let frames = 1_u64 << (A::RULES.index_bits * (u32::from(self.level) - 1));
        let first = index >> leaf.block << leaf.block;
        let base = leaf.frame - u64::from(index - first) * frames;
        let (mut accessed, mut dirty) = (leaf.accessed, leaf.dirty);
        for position in 0..1 << leaf.block {
            let other = self.cell(first + position)?.load(Ordering::Acquire);
            let expected = base + u64::from(position) * frames;
            let wrong = match A::decode(other, self.level, first + position) {
                Meaning::Invalid if strict => Some("it is invalid"),
                Meaning::Invalid => None,
                Meaning::Leaf(other) if other.block != leaf.block => Some("it is not in the block"),
                Meaning::Leaf(other) if other.frame != expected => {
                    Some("its frame is not the next")
                }
                Meaning::Leaf(other)
                    if (other.attributes, other.memory) != (leaf.attributes, leaf.memory) =>
                {
                    Some("its attributes differ")
                }
                Meaning::Leaf(other) if strict && other.rights != leaf.rights => {
                    Some("its permissions differ")
                }
                Meaning::Leaf(other) => {
                    accessed |= other.accessed;
                    dirty |= other.dirty;
                    None
                }
                Meaning::Table { .. } => Some("it is a table"),
                Meaning::Malformed(why) => Some(why),
            };
            if let Some(why) = wrong {
                let place = self.place;
                self.world.log.report(Violation::BrokenBlock {
                    place,
                    entry,
                    position,
                    other,
                    why,
                });
                return None;
            }
        }
        Some((accessed, dirty))
    }

    /// Records the use in the leaf, or in any entry of its block. Fails if the entry has changed.
    fn record<A: Walk>(
        &self,
        index: u32,
        entry: u64,
        leaf: Leaf,
        write: bool,
        choice: u64,
    ) -> bool {
        let recorded = |entry| if write { A::with_dirty(entry) } else { A::with_accessed(entry) };
        if leaf.block > 0 {
            let first = index >> leaf.block << leaf.block;
            let chosen = first + (choice & ((1 << leaf.block) - 1)) as u32;
            if let Some(cell) = self.cell(chosen).filter(|_| chosen != index) {
                let other = cell.load(Ordering::Acquire);
                let same =
                    |decoded: &Leaf| decoded.block == leaf.block && decoded.rights == leaf.rights;
                if let Meaning::Leaf(decoded) = A::decode(other, self.level, chosen)
                    && same(&decoded)
                {
                    return replace(cell, other, recorded(other));
                }
            }
        }
        self.cell(index).is_some_and(|cell| replace(cell, entry, recorded(entry)))
    }

    fn malformed(&self, entry: u64, why: &'static str) -> End {
        let (place, level) = (self.place, self.level);
        self.world.log.report(Violation::Malformed { place, level, entry, why });
        End::Malformed
    }

    fn no_memory(&self, entry: u64, frame: u64) -> End {
        let (place, level) = (self.place, self.level);
        self.world.log.report(Violation::NoMemory { place, level, entry, frame });
        End::Malformed
    }
}

fn replace(cell: &AtomicU64, old: u64, new: u64) -> bool {
    cell.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}
