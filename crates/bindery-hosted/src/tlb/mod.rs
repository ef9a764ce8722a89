//! The TLB of a CPU. The TLB stays locked for the whole of an access, including the copying of
//! bytes. So once an invalidation has held the lock, no access through the removed entries is in
//! flight.

mod audit;
mod frames;
mod loaded;
mod plain;
mod space;
mod strict;

use bindery::addr::Frame;
use bindery::platform::{Cpu, Invalidation};

use crate::mmu::walk::World;
use crate::mmu::{Access, Translation, Walk};
use crate::stats::MmuCounts;

use plain::Plain;
use strict::Strict;

/// The behavior of a machine's TLBs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TlbKind {
    /// As bad as the architecture allows: caches everything that may be cached, drops nothing
    /// before an invalidation, and reports undefined cases. For tests.
    #[default]
    Strict,
    /// Small and fast, without checks. For benchmarks.
    Plain,
}

/// The MMU's reason for a refusal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// No translation exists.
    Absent,
    /// The translation does not allow the access.
    Denied,
}

/// The TLB of one CPU, and the counts of its MMU.
#[derive(Debug)]
pub(crate) struct Tlb<A> {
    kind: Kind<A>,
    pub(crate) counts: MmuCounts,
}

#[derive(Debug)]
enum Kind<A> {
    Strict(Strict<A>),
    Plain(Plain<A>),
}

impl<A: Walk> Tlb<A> {
    pub(crate) fn new(kind: TlbKind, cpu: Cpu) -> Self {
        let kind = match kind {
            TlbKind::Strict => Kind::Strict(Strict::new(cpu)),
            TlbKind::Plain => Kind::Plain(Plain::new(cpu)),
        };
        Self { kind, counts: MmuCounts::default() }
    }

    /// Translates like the hardware.
    #[inline]
    pub(crate) fn translate(
        &mut self,
        world: World<'_>,
        root: Frame,
        addr: u64,
        access: Access,
    ) -> Result<Translation, Refusal> {
        if !A::translates(addr, access.mode) {
            self.counts.faults += 1;
            return Err(Refusal::Absent);
        }
        let counts = &mut self.counts;
        let result = match &mut self.kind {
            Kind::Strict(tlb) => tlb.translate(world, counts, root, addr, access),
            Kind::Plain(tlb) => tlb.translate(world, counts, root, addr, access),
        };
        self.counts.faults += u64::from(result.is_err());
        result
    }

    pub(crate) fn invalidate(&mut self, world: World<'_>, root: Frame, what: &Invalidation) {
        match &mut self.kind {
            Kind::Strict(tlb) => tlb.invalidate(world, root, what),
            Kind::Plain(tlb) => tlb.invalidate(root, what),
        }
    }

    /// Loads a root, or the kernel's, without a flush ([`loaded`]).
    pub(crate) fn load(&mut self, world: World<'_>, root: Option<Frame>) {
        match &mut self.kind {
            Kind::Strict(tlb) => tlb.load(world, root),
            Kind::Plain(_) => {}
        }
    }

    /// Drops all entries of a root, or of all roots.
    pub(crate) fn flush_root(&mut self, world: World<'_>, root: Option<Frame>) {
        match &mut self.kind {
            Kind::Strict(tlb) => tlb.flush_root(world, root),
            Kind::Plain(tlb) => tlb.flush(),
        }
    }

    /// Walks for no access, as a CPU may at any time.
    pub(crate) fn speculate(&mut self, world: World<'_>) {
        match &mut self.kind {
            Kind::Strict(tlb) => tlb.speculate(world),
            Kind::Plain(_) => {}
        }
    }

    /// Reports entries that are still cached for frames that return to the allocator.
    pub(crate) fn released(&mut self, world: World<'_>, first: Frame, count: u32) {
        match &mut self.kind {
            Kind::Strict(tlb) => tlb.released(world, first, count),
            Kind::Plain(_) => {}
        }
    }

    /// Reports cached entries that disagree with the tables.
    pub(crate) fn audit(&self, world: World<'_>) {
        match &self.kind {
            Kind::Strict(tlb) => tlb.audit(world),
            Kind::Plain(_) => {}
        }
    }

    /// The cached translations of an address space, in ascending order; none for a plain TLB.
    pub(crate) fn cached(&self, root: Frame) -> Vec<Translation> {
        match &self.kind {
            Kind::Strict(tlb) => tlb.cached(root),
            Kind::Plain(_) => Vec::new(),
        }
    }
}
