//! A small, direct-mapped TLB of base pages that checks nothing.

use std::marker::PhantomData;

use bindery::addr::{Frame, PAGE_SHIFT, PAGE_SIZE};
use bindery::platform::{Cpu, Invalidation};

use super::Refusal;
use crate::mmu::walk::{Effect, End, Table, World, walk};
use crate::mmu::{Access, Translation, Walk};
use crate::stats::MmuCounts;
use crate::violation::Place;

/// The number of translations that the TLB holds.
const SLOTS: usize = 1024;

/// A page number that no address has.
const EMPTY: u64 = u64::MAX;

#[derive(Clone, Copy, Debug)]
struct Slot {
    page: u64,
    root: u32,
    leaf: Translation,
}

#[derive(Debug)]
pub(crate) struct Plain<A> {
    cpu: Cpu,
    slots: Box<[Slot]>,
    arch: PhantomData<A>,
}

impl<A: Walk> Plain<A> {
    pub(crate) fn new(cpu: Cpu) -> Self {
        let leaf = Translation {
            start: 0,
            order: 0,
            frame: 0,
            permissions: Default::default(),
            memory: Default::default(),
            accessed: false,
            dirty: false,
            key: 0,
        };
        let slots = vec![Slot { page: EMPTY, root: 0, leaf }; SLOTS].into_boxed_slice();
        Self { cpu, slots, arch: PhantomData }
    }

    #[inline]
    fn slot(&mut self, root: Frame, page: u64) -> &mut Slot {
        let mixed = page ^ u64::from(root.0).wrapping_mul(0x9e37_79b9);
        &mut self.slots[mixed as usize % SLOTS]
    }

    #[inline]
    pub(crate) fn translate(
        &mut self,
        world: World<'_>,
        counts: &mut MmuCounts,
        root: Frame,
        addr: u64,
        access: Access,
    ) -> Result<Translation, Refusal> {
        let page = addr >> PAGE_SHIFT;
        let slot = self.slot(root, page);
        if slot.page == page && slot.root == root.0 && slot.leaf.serves(access) {
            counts.hits += 1;
            return Ok(slot.leaf);
        }
        counts.walks += 1;
        let place = Place { cpu: self.cpu, root, addr };
        // In a contiguous run, each use is recorded in the entry of its own page.
        let effect = Effect::Use(access, page);
        let walked = walk::<A>(world, place, Table::root(root), A::RULES.levels, effect);
        match walked.end {
            End::Leaf(leaf) => {
                counts.fills += 1;
                *self.slot(root, page) = Slot { page, root: root.0, leaf };
                Ok(leaf)
            }
            End::Invalid(_) => Err(Refusal::Absent),
            End::Denied(_) | End::Malformed => Err(Refusal::Denied),
        }
    }

    /// Drops all entries.
    pub(crate) fn flush(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.page = EMPTY);
    }

    pub(crate) fn invalidate(&mut self, root: Frame, what: &Invalidation) {
        let first = what.range.start().0 >> PAGE_SHIFT;
        let end = what.range.end().0.div_ceil(PAGE_SIZE);
        if end - first < SLOTS as u64 / 4 {
            for page in first..end {
                let slot = self.slot(root, page);
                if slot.page == page && slot.root == root.0 {
                    slot.page = EMPTY;
                }
            }
        } else {
            for slot in &mut self.slots {
                if slot.root == root.0 && (first..end).contains(&slot.page) {
                    slot.page = EMPTY;
                }
            }
        }
    }
}
