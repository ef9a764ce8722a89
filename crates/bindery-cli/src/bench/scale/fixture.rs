//! A machine, and the cost of one kind of call on it.

use std::time::Instant;

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{AddressSpace, Memory, Object, Overcommit, Protection, SpaceOptions};
use bindery_hosted::{Config, Machine, TlbKind, Walk};
use serde::Serialize;

use crate::size::GIB;

/// Makes calls among a number of mappings on a machine of the given size. Returns the name and the
/// cost of each kind of call.
pub type Scene = fn(u64, u64) -> Result<Vec<(&'static str, Sample)>, String>;

/// Loads and stores.
pub const READ_WRITE: Protection = Protection::READ.union(Protection::WRITE);

/// The total cost of calls of one kind.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Sample {
    /// The number of mappings.
    pub mappings: u64,
    /// The number of calls, or the number of mappings if one call visits all of them.
    pub calls: u64,
    /// Nodes visited in the index of mappings and in the trees of the object.
    pub steps: u64,
    /// Entries of page tables that were read or written.
    pub entries: u64,
    /// Locks of page tables.
    pub locks: u64,
    /// Time.
    pub nanoseconds: u64,
}

impl Sample {
    pub fn steps_of_one(&self) -> f64 {
        self.steps as f64 / self.calls.max(1) as f64
    }
}

/// A memory on a machine whose TLB costs nothing.
pub fn memory<A: Walk>(bytes: u64) -> Result<Memory<Machine<A>>, String> {
    let config = Config { memory: bytes, tlb: TlbKind::Plain, ..Config::default() };
    let machine = Machine::<A>::new(config);
    let memory =
        machine.memory().map_err(|error| format!("no memory on the hosted machine: {error}"))?;
    // Only base pages, unless the caller chooses.
    memory.folio_policy().set_global(bindery::SizeMode::Never);
    memory.commitment().set_mode(Overcommit::Always);
    Ok(memory)
}

/// An address space with room for two more mappings than `mappings`.
pub fn space<A: Walk>(
    memory: &Memory<Machine<A>>,
    mappings: u64,
) -> Result<AddressSpace<'_, Machine<A>>, String> {
    let maximum_mappings = mappings as usize + 2;
    let options = SpaceOptions { maximum_mappings, ..SpaceOptions::default() };
    AddressSpace::new(memory, options).map_err(|error| format!("no address space: {error}"))
}

/// The address of mapping `number`. No two mappings are adjacent.
pub fn at(number: u64) -> VirtAddr {
    VirtAddr(GIB + 2 * number * PAGE_SIZE)
}

/// The numbers below `count`, a power of ten, in a scattered order.
pub fn numbers(count: u64) -> impl Iterator<Item = u64> {
    // The factor is odd and not a multiple of five, so each number occurs once.
    (0..count).map(move |number| number * 61_803_398_877 % count)
}

/// The state that is measured around calls.
pub struct Fixture<'a, 'm, A: Walk> {
    pub space: &'a AddressSpace<'m, Machine<A>>,
    pub object: Option<&'a Object<'m, Machine<A>>>,
    pub mappings: u64,
}

impl<A: Walk> Fixture<'_, '_, A> {
    fn steps(&self) -> u64 {
        let objects = self.object.map_or(0, |object| object.mapping_steps() + object.page_steps());
        self.space.mappings_looked_at() + objects
    }

    /// Forks, which visits `mappings` mappings. Returns the cost, including the child's steps.
    pub fn measure_fork(&self, mappings: u64) -> Result<Sample, String> {
        let mut child = None;
        let mut fork = self.measure(mappings, || {
            child = Some(self.space.fork()?);
            Ok(())
        })?;
        fork.steps += child.map_or(0, |child| child.mappings_looked_at());
        Ok(fork)
    }

    /// Makes `calls` calls and returns their cost.
    pub fn measure(
        &self,
        calls: u64,
        work: impl FnOnce() -> Result<(), bindery::Error>,
    ) -> Result<Sample, String> {
        let (steps, counts, begin) = (self.steps(), self.space.counts(), Instant::now());
        work().map_err(|error| format!("among {} mappings: {error}", self.mappings))?;
        let nanoseconds = begin.elapsed().as_nanos() as u64;
        let counts = self.space.counts() - counts;
        Ok(Sample {
            mappings: self.mappings,
            calls,
            steps: self.steps() - steps,
            entries: counts.entries_read + counts.entries_written + counts.entries_descended,
            locks: counts.tables_locked,
            nanoseconds,
        })
    }
}
