//! Makes calls in a row and measures the longest section of each.

use std::fmt::Display;

use bindery::{FrameRange, Memory, Overcommit};
use bindery_hosted::{Config, Machine, TlbKind, Walk};
use serde::Serialize;

use bindery_cli::measured::{Longest, Measured};

/// The maximum work in one section, or under one lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Bounds {
    /// Entries examined.
    pub entries: u64,
    /// Tables marked as detached.
    pub tables_marked: u64,
    /// Bytes zeroed or copied.
    pub bytes: u64,
    /// Entries examined while a reverse-map lock was held, plus the VMAs on the way to them.
    pub reverse_map_entries: u64,
}

/// A walk of the reverse map counts the VMAs that it visits in addition to the entries of each VMA.
const VMAS_OF_A_WALK: u64 = 128;

/// The bounds that every call keeps.
pub const BOUNDS: Bounds = Bounds {
    entries: 1024,
    tables_marked: 512,
    bytes: 64 << 10,
    reverse_map_entries: 1024 + VMAS_OF_A_WALK,
};

impl Bounds {
    /// Whether all figures are within them.
    pub fn hold(&self, longest: &Longest) -> bool {
        longest.entries <= self.entries
            && longest.tables_marked <= self.tables_marked
            && longest.bytes <= self.bytes
            && longest.reverse_map_entries <= self.reverse_map_entries
    }
}

/// One call.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Row {
    /// The call's name.
    pub call: &'static str,
    /// The call's arguments, in words.
    pub arguments: String,
    /// The maximum work that it did at once.
    pub longest: Longest,
    /// Whether that is within the bounds.
    pub within_bounds: bool,
}

/// Records the work of calls.
pub struct Meter<'m, A: Walk> {
    pub memory: &'m Memory<Measured<A>>,
    pub rows: Vec<Row>,
}

impl<A: Walk> Meter<'_, A> {
    /// Makes a call and records the longest of its sections.
    ///
    /// # Errors
    /// The call's error, with its name.
    pub fn measure<R, E: Display>(
        &mut self,
        call: &'static str,
        arguments: &str,
        make: impl FnOnce() -> Result<R, E>,
    ) -> Result<R, String> {
        let platform = self.memory.platform();
        self.memory.drain_deferred();
        platform.take();
        platform.set_reader(true);
        let result = make();
        let deferred = self.memory.deferred();
        platform.set_reader(false);
        let longest = Longest {
            tables_deferred: deferred.tables,
            records_deferred: deferred.records,
            ..platform.take()
        };
        let within_bounds = BOUNDS.hold(&longest);
        self.rows.push(Row { call, arguments: arguments.to_owned(), longest, within_bounds });
        result.map_err(|error| format!("{call} of {arguments}: {error}"))
    }
}

/// A memory of this size on a measured machine.
///
/// # Errors
/// The message for the user.
pub fn memory<A: Walk>(bytes: u64) -> Result<Memory<Measured<A>>, String> {
    let config = Config { memory: bytes, tlb: TlbKind::Plain, ..Config::default() };
    let machine = Machine::<A>::new(config);
    let (first, count) = machine.frames();
    let measured = Measured::new(machine);
    // SAFETY: 1. the frames of a machine that has no other memory; 2. it has no table yet.
    let memory = unsafe { Memory::new(measured, &[FrameRange { first, count }]) }
        .map_err(|error| format!("the machine's memory: {error}"))?;
    // Only base pages, unless the caller chooses.
    memory.folio_policy().set_global(bindery::SizeMode::Never);
    memory.commitment().set_mode(Overcommit::Always);
    Ok(memory)
}
