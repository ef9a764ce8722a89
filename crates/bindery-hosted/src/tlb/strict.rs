//! The strict TLB: as bad as the architecture allows.
//!
//! | the architecture allows | the strict TLB always does it |
//! |---|---|
//! | to cache translations, whole contiguous runs at once | held until invalidated, without limit |
//! | to cache intermediate entries | a walk starts at the nearest cached table |
//! | to cache a translation that denied an access (not x86-64) | it denies until invalidated |
//! | to cache invalid entries (RISC-V) | it faults until invalidated |
//! | to keep intermediate entries when invalidating by address | it drops them only on request |
//!
//! A root frame is an address space: the identifier (PCID, ASID) of this machine.
//!
//! **An invalidation for leaves only, on RISC-V.** `SFENCE.VMA` with an address orders only
//! accesses to *leaf* entries for the address (privileged specification, 4.2.1). If the walk
//! stopped at an invalid entry above level 1 and that entry is now a *table*, it is not a leaf
//! entry. So the TLB still treats the entry as invalid until an invalidation with
//! [`Tables::Changed`](bindery::platform::Tables).

use std::collections::BTreeMap;
use std::marker::PhantomData;

use bindery::addr::Frame;
use bindery::arch::{MemoryType, Permissions};
use bindery::platform::{Cpu, Invalidation, Tables};

use super::Refusal;
use super::frames::FrameIndex;
use super::loaded::Loaded;
use super::space::{Space, names};
use crate::mmu::walk::{Effect, End, Table, Walked, World, walk};
use crate::mmu::{Access, Denial, InvalidEntries, Translation, Walk};
use crate::stats::MmuCounts;
use crate::violation::{Place, Violation};

#[derive(Debug)]
pub(crate) struct Strict<A> {
    pub(super) cpu: Cpu,
    pub(super) spaces: BTreeMap<u32, Space>,
    frames: FrameIndex,
    /// The number of translations whose memory is not normal.
    typed: usize,
    /// Chooses among the entries of a block; changes at each use.
    choice: u64,
    pub(super) loaded: Loaded,
    arch: PhantomData<A>,
}

impl<A: Walk> Strict<A> {
    pub(crate) fn new(cpu: Cpu) -> Self {
        let (spaces, frames) = Default::default();
        let (choice, loaded) = (u64::from(cpu.0), Loaded::NotRecorded);
        Self { cpu, spaces, frames, typed: 0, choice, loaded, arch: PhantomData }
    }

    pub(crate) fn translate(
        &mut self,
        world: World<'_>,
        counts: &mut MmuCounts,
        root: Frame,
        addr: u64,
        access: Access,
    ) -> Result<Translation, Refusal> {
        self.note_access(root, addr);
        let space = self.spaces.entry(root.0).or_default();
        match space.leaf(addr) {
            Some(leaf) if leaf.serves(access) => {
                counts.hits += 1;
                return Ok(leaf);
            }
            // The write must be recorded in the table.
            Some(leaf) if leaf.allows(access) => {}
            Some(_) if A::RULES.denial == Denial::Report => return Err(Refusal::Denied),
            Some(_) => self.forget_address(root, addr),
            None if space.is_invalid(&A::RULES, addr) => return Err(Refusal::Absent),
            None => {}
        }
        counts.walks += 1;
        let walked = self.walk(world, root, addr, access);
        self.remember_tables(root, addr, &walked);
        let place = Place { cpu: self.cpu, root, addr };
        let refusal = match walked.end {
            End::Leaf(leaf) => {
                counts.fills += 1;
                self.fill(world, place, leaf);
                return Ok(leaf);
            }
            End::Denied(leaf) => {
                if A::RULES.denial == Denial::Report && leaf.accessed {
                    self.fill(world, place, leaf);
                }
                Refusal::Denied
            }
            End::Malformed => Refusal::Denied,
            End::Invalid(level) => {
                if A::RULES.invalid == InvalidEntries::Cached {
                    let start = A::RULES.start(addr, level);
                    self.space(root).invalid[usize::from(level)].insert(start);
                }
                Refusal::Absent
            }
        };
        if A::RULES.denial == Denial::ReadAgain {
            self.forget_address(root, addr);
        }
        Err(refusal)
    }

    pub(super) fn space(&mut self, root: Frame) -> &mut Space {
        self.spaces.entry(root.0).or_default()
    }

    /// Whether the TLB has an answer for the address without a walk.
    pub(super) fn has_entry(&self, root: Frame, addr: u64) -> bool {
        let has = |space: &Space| space.leaf(addr).is_some() || space.is_invalid(&A::RULES, addr);
        self.spaces.get(&root.0).is_some_and(has)
    }

    pub(super) fn walk(
        &mut self,
        world: World<'_>,
        root: Frame,
        addr: u64,
        access: Access,
    ) -> Walked {
        // Any generator that visits all residues serves; this one is Knuth's.
        self.choice = self.choice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let effect = Effect::Use(access, self.choice >> 32);
        let place = Place { cpu: self.cpu, root, addr };
        let nearest = self.space(root).nearest_table(&A::RULES, addr);
        let (table, level) = nearest.unwrap_or((Table::root(root), A::RULES.levels));
        walk::<A>(world, place, table, level, effect)
    }

    pub(super) fn remember_tables(&mut self, root: Frame, addr: u64, walked: &Walked) {
        let space = self.spaces.entry(root.0).or_default();
        for (level, table) in walked.tables() {
            let start = A::RULES.start(addr, level);
            let old = space.tables[usize::from(level)].insert(start, table);
            if let Some(old) = old {
                self.frames.remove_table(root, level, start, old.frame);
            }
            self.frames.add_table(root, level, start, table.frame);
        }
    }

    /// Caches a translation. An overlapping cached translation may differ only in permissions.
    pub(super) fn fill(&mut self, world: World<'_>, place: Place, leaf: Translation) {
        let overlapping: Vec<_> =
            self.space(place.root).leaves_in(leaf.start, leaf.last()).collect();
        for cached in overlapping {
            if !cached.agrees(&leaf) {
                world.log.report(Violation::Conflict { place, cached, now: leaf });
            }
            self.forget_leaf(place.root, &cached);
        }
        let typed = leaf.memory != MemoryType::Normal;
        if typed || self.typed > 0 {
            self.compare_types(world, place, &leaf);
        }
        self.typed += usize::from(typed);
        self.space(place.root).leaves.insert(leaf.start, leaf);
        self.frames.add_leaf(place.root, &leaf);
    }

    /// Reports translations of programs to the same frames, in any address space, with another
    /// memory type. A kernel may know that its other mapping is not used (`ioremap_wc` beside the
    /// direct map).
    fn compare_types(&self, world: World<'_>, place: Place, leaf: &Translation) {
        for (root, start) in self.frames.leaves_to(Frame(leaf.frame), 1 << leaf.order) {
            let cached = self.spaces.get(&root).and_then(|space| space.leaf(start));
            let of_programs = |cached: &Translation| {
                (cached.permissions & leaf.permissions).contains(Permissions::USER)
            };
            let other = cached.filter(of_programs).filter(|cached| cached.memory != leaf.memory);
            if let Some(cached) = other {
                world.log.report(Violation::MixedTypes { place, cached, now: *leaf });
            }
        }
    }

    fn forget_leaf(&mut self, root: Frame, leaf: &Translation) {
        let removed = self.space(root).leaves.remove(&leaf.start);
        self.typed -= usize::from(removed.is_some_and(|leaf| leaf.memory != MemoryType::Normal));
        self.frames.remove_leaf(root, leaf);
    }

    fn forget_tables(&mut self, root: Frame, start: u64, last: u64) {
        for (level, start, table) in self.space(root).tables_in(&A::RULES, start, last) {
            self.space(root).tables[usize::from(level)].remove(&start);
            self.frames.remove_table(root, level, start, table.frame);
        }
    }

    /// The effect of a page fault on x86-64 (SDM section 4.10.4.1).
    fn forget_address(&mut self, root: Frame, addr: u64) {
        if let Some(leaf) = self.space(root).leaf(addr) {
            self.forget_leaf(root, &leaf);
        }
        self.forget_tables(root, addr, addr);
    }

    pub(crate) fn invalidate(&mut self, world: World<'_>, root: Frame, what: &Invalidation) {
        let Some(space) = self.spaces.get(&root.0) else {
            return;
        };
        if what.range.is_empty() {
            return;
        }
        let (start, last) = (what.range.start().0, what.range.end().0 - 1);
        let leaves: Vec<_> = space
            .leaves_in(start, last)
            .filter(|leaf| names(what, leaf.start, leaf.last()))
            .collect();
        for leaf in leaves {
            self.forget_leaf(root, &leaf);
        }
        if what.tables == Tables::Changed {
            self.forget_tables(root, start, last);
        }
        for (level, start) in self.space(root).invalid_in(&A::RULES, start, last) {
            if self.forgets_invalid(world, root, what, level, start) {
                self.space(root).invalid[usize::from(level)].remove(&start);
            }
        }
    }

    /// Whether an entry cached as invalid is dropped; see the module's text.
    fn forgets_invalid(
        &self,
        world: World<'_>,
        root: Frame,
        what: &Invalidation,
        level: u8,
        start: u64,
    ) -> bool {
        what.tables == Tables::Changed
            || names(what, start, A::RULES.last(start, level))
                && self.look(world, root, start).table(level).is_none()
    }

    /// Walks the current tables for `addr`.
    pub(super) fn look(&self, world: World<'_>, root: Frame, addr: u64) -> Walked {
        let place = Place { cpu: self.cpu, root, addr };
        walk::<A>(world, place, Table::root(root), A::RULES.levels, Effect::None)
    }

    pub(crate) fn released(&mut self, world: World<'_>, first: Frame, count: u32) {
        self.speculate(world);
        for (root, start) in self.frames.leaves_to(first, count) {
            let root = Frame(root);
            if let Some(cached) = self.space(root).leaf(start) {
                let place = Place { cpu: self.cpu, root, addr: start };
                let violation = Violation::ReleasedLeaf { place, first, count, cached };
                self.report_released(world, root, violation);
                self.forget_leaf(root, &cached);
            }
        }
        for (root, level, start) in self.frames.tables_in(first, count) {
            let root = Frame(root);
            if let Some(table) = self.space(root).tables[usize::from(level)].remove(&start) {
                let place = Place { cpu: self.cpu, root, addr: start };
                let cached = table.frame;
                let violation = Violation::ReleasedTable { place, first, count, level, cached };
                self.report_released(world, root, violation);
                self.frames.remove_table(root, level, start, cached);
            }
        }
        self.roots_released(world, first, count);
    }

    /// Handles the release of roots: no entry of their address spaces may be left.
    fn roots_released(&mut self, world: World<'_>, first: Frame, count: u32) {
        let end = first.0.saturating_add(count);
        let roots: Vec<_> = self.spaces.range(first.0..end).map(|(root, _)| *root).collect();
        for root in roots.into_iter().map(Frame) {
            let Some(space) = self.spaces.get(&root.0) else {
                continue;
            };
            let tables = space.tables_in(&A::RULES, 0, u64::MAX);
            let leaves: Vec<_> = space.leaves.values().copied().collect();
            let starts = leaves.iter().map(|leaf| leaf.start);
            if let Some(addr) = starts.chain(tables.iter().map(|(_, start, _)| *start)).min() {
                let place = Place { cpu: self.cpu, root, addr };
                let (leaves, tables) = (leaves.len(), tables.len());
                self.report_released(
                    world,
                    root,
                    Violation::ReleasedRoot { place, leaves, tables },
                );
            }
            self.forget_all(root);
        }
    }

    /// Drops the translations and intermediate entries of a root.
    pub(super) fn forget_all(&mut self, root: Frame) {
        let leaves: Vec<_> = self.space(root).leaves.values().copied().collect();
        leaves.iter().for_each(|leaf| self.forget_leaf(root, leaf));
        self.forget_tables(root, 0, u64::MAX);
    }

    pub(crate) fn cached(&self, root: Frame) -> Vec<Translation> {
        let space = self.spaces.get(&root.0);
        space.map_or(Vec::new(), |space| space.leaves.values().copied().collect())
    }
}
