//! Look-ups of the models' CPUs: by the core, and by their MMUs.

use std::vec::Vec;

use crate::sync::model::sync::atomic::Ordering;

use crate::addr::{Frame, PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, Kind, Level, Tiny};
use crate::kernel_map::protocol::{self, KernelTree};

use super::cpu::{Cpu, whole_contig};
use super::world::{Omit, ROOT, Tlb, count, page};

impl Cpu {
    /// Like `KernelMap::physical`.
    pub(super) fn physical(&self, number: u64) -> Option<Frame> {
        self.look(page(number)).0
    }

    /// The frame at `at`, if it is mapped, and the next address to examine.
    fn look(&self, at: VirtAddr) -> (Option<Frame>, VirtAddr) {
        let mut found = self.in_section(|| protocol::find(self, at));
        if found.paused {
            count(&self.world.seen.pauses);
        }
        if self.world.omit == Omit::OneLook {
            let again = self.in_section(|| protocol::find(self, at));
            found.entry = if again.level == found.level { again.entry } else { Entry::EMPTY };
        }
        let span = found.level.span();
        let next = VirtAddr(at.align_down(span).0 + span);
        match found.level.kind(found.entry) {
            Kind::Leaf => {
                let single = Tiny::frame(Tiny::clear_contig(found.entry, found.index));
                let offset = (at.0 & (span - 1)) >> PAGE_SHIFT;
                (Some(single.plus(offset as u32)), next)
            }
            Kind::Empty => {
                count(&self.world.seen.absences);
                (None, next)
            }
            kind => panic!("a walk ended at a {kind:?}"),
        }
    }

    /// Like `KernelMap::for_each_piece`: the frame of each page of `range`.
    pub(super) fn dump(&self, range: VirtRange) -> Vec<Option<Frame>> {
        let (mut at, mut told) = (range.start(), Vec::new());
        while at < range.end() {
            let (found, next) = self.look(at);
            let pages = (next.0.min(range.end().0) - at.0) >> PAGE_SHIFT;
            told.extend((0..pages).map(|page| found.map(|frame| frame.plus(page as u32))));
            at = next;
        }
        told
    }

    /// Reads a page that is mapped to `frame` and never paused.
    pub(super) fn access(&self, number: u64, frame: Frame) {
        let reached = self.read(number);
        assert!(reached.is_some(), "a live page faulted");
        assert_eq!(reached, Some(frame), "reached what another area had mapped");
    }

    /// Like [`Cpu::access`], for a page that may be paused: handles the faults.
    pub(super) fn access_paused(&self, number: u64, frame: Frame) {
        loop {
            if let Some(reached) = self.read(number) {
                assert_eq!(reached, frame, "reached something else");
                return;
            }
            // Like `KernelMap::resolve`.
            let found = self.in_section(|| protocol::find(self, page(number)));
            assert!(!found.entry.is_empty(), "a hole in a live area");
            if found.paused {
                count(&self.world.seen.pauses);
                self.world.wait_for(&self.world.pausing);
            }
        }
    }

    /// Reads as a processor that speculates: a fault has no effect.
    pub(super) fn guess(&self, number: u64) {
        self.read(number);
    }

    /// One access, from TLB or tables to the frame: an invalidation waits for the whole access.
    fn read(&self, number: u64) -> Option<Frame> {
        self.world.with(&self.world.tlbs[self.number], |tlb| {
            let frame = self.translate(tlb, page(number));
            frame.inspect(|frame| self.world.touch(*frame))
        })
    }

    fn translate(&self, tlb: &mut Tlb, at: VirtAddr) -> Option<Frame> {
        let to = |range: VirtRange, entry: Entry| {
            Tiny::frame(entry).plus(((at.0 - range.start().0) >> PAGE_SHIFT) as u32)
        };
        if let Some((range, entry)) = tlb.leaves.iter().find(|(range, _)| range.contains(at)) {
            return Some(to(*range, *entry));
        }
        let known = tlb.tables.iter().find(|(range, _)| range.contains(at));
        let (mut table, mut level) =
            known.map_or((ROOT, Tiny::ROOT), |(_, table)| (*table, Level::PTE));
        loop {
            let index = level.index_of(at);
            // Acquire: the reads of a table depend on the read of the entry above.
            let entry = self.load(table, index, Ordering::Acquire);
            let span = level.span();
            let range = VirtRange::from_len(at.align_down(span), span)?;
            match level.kind(entry) {
                Kind::Leaf => {
                    let (range, first) = whole_contig(range, entry, index);
                    tlb.leaves.push((range, first));
                    return Some(to(range, first));
                }
                Kind::Table => {
                    (table, level) = (Tiny::frame(entry), level.below());
                    if level == Level::PTE {
                        tlb.tables.push((range, table));
                    }
                }
                Kind::Empty | Kind::Absent => return None,
            }
        }
    }
}
