//! `bindery bench latency`: the maximum work of each call in one read section, in counts.
//!
//! | file | contents |
//! |---|---|
//! | `meter` | the longest section of a call, and the bounds |
//! | `shapes` | the calls on private memory, faults, user copies |
//! | `objects` | those on shared memory and files, and pins |
//! | `kernel` | those on the kernel's own mappings |
//! | `report` | the table |
//!
//! [`bindery_cli::measured`] is the machine that adds up the work of each read section.

mod kernel;
mod meter;
mod objects;
mod report;
mod shapes;

use std::path::PathBuf;

use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery_hosted::{ArchitectureName, MemoryFiles, Walk};
use serde::Serialize;

use super::enough_memory;
use crate::Problem;
use crate::output::{JsonFile, show};
use crate::size::{GIB, MIB};
use meter::{BOUNDS, Bounds, Meter, Row};

const HELP: &str = "\
What is counted
  A read section keeps tables and mappings from being freed; a kernel does not preempt it. Locks of
  page tables are taken only in read sections. So the longest section bounds how long a call keeps
  a CPU from other work, whatever its arguments: the entries that it looks at, the tables that it
  marks as detached, the bytes that it zeroes or copies. Each call is made on 16 pages, on folios
  of 4 KiB, 64 KiB and 2 MiB, and on a range with one page in each table.
  Detached tables and removed records are freed after all read sections of that time have ended. The
  column `later` counts those that still wait when the call returns, with one reader kept in its
  section.
  The locks of the reverse map may be held across sections, by a walk or a move. The
  column `rmap` counts the entries examined under such a lock.
  Counts need no clock: they are the same on every host.

Bounds
  1,024 entries, 512 tables, 64 KiB in a section; 1,024 entries and 128 VMAs on the way to them
  under a lock of the reverse map. The exit status is 1 if a call exceeds one of them.

The JSON
  bindery; architecture; quick; bounds {entries, tables_marked, bytes, reverse_map_entries};
  results[]: call, arguments, longest {entries, tables_marked, bytes, reverse_map_entries, sections,
  grace_periods, tables_deferred, records_deferred}, within_bounds.";

/// Count the most that each call does in one read section, for small and for hostile arguments
#[derive(clap::Args)]
#[command(after_long_help = HELP, after_help = "More: bindery bench latency --help")]
pub struct Arguments {
    /// The page-table format of the hosted machine: x86-64, aarch64 or riscv64
    #[arg(long, value_name = "ARCH", default_value = "x86-64", value_parser = parse_architecture)]
    arch: ArchitectureName,

    /// Write all figures to a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Smaller ranges, which still exceed the bounds: a second in all
    #[arg(long)]
    quick: bool,
}

/// Accepts one architecture of each table format. Others differ only in their number of levels, and
/// the whole core is compiled once more for each.
fn parse_architecture(name: &str) -> Result<ArchitectureName, String> {
    match name.parse() {
        Ok(
            name @ (ArchitectureName::X86_64
            | ArchitectureName::AArch64
            | ArchitectureName::Riscv64Sv48),
        ) => Ok(name),
        _ => Err("give x86-64, aarch64 or riscv64".to_owned()),
    }
}

/// The size of the hostile arguments, in bytes.
struct Extent {
    /// For present memory.
    dense: u64,
    /// For memory with one present page in each table.
    sparse: u64,
    /// Of the machine.
    memory: u64,
}

const QUICK: Extent = Extent { dense: 32 * MIB, sparse: 4 * GIB, memory: 192 * MIB };
const FULL: Extent = Extent { dense: GIB, sparse: 32 * GIB, memory: 3 * GIB / 2 };

/// All figures of a run. Fields are only ever added.
#[derive(Serialize)]
struct Document<'a> {
    /// The version of the program.
    bindery: &'static str,
    architecture: String,
    quick: bool,
    bounds: Bounds,
    results: &'a [Row],
}

/// Runs the measurements of the arguments.
///
/// # Errors
/// The message for the user: a call that failed, or one that exceeds the bounds.
pub fn run(arguments: &Arguments) -> Result<(), Problem> {
    let file = arguments.json.as_deref().map(JsonFile::create).transpose()?;
    let extent = if arguments.quick { QUICK } else { FULL };
    enough_memory(extent.memory)?;
    let rows = match arguments.arch {
        ArchitectureName::AArch64 => measure::<AArch64>(&extent)?,
        ArchitectureName::Riscv64Sv48 => measure::<Riscv64<4>>(&extent)?,
        // `parse_architecture` refuses the others.
        ArchitectureName::X86_64
        | ArchitectureName::X86_64La57
        | ArchitectureName::Riscv64Sv39
        | ArchitectureName::Tiny => measure::<X86_64<4>>(&extent)?,
    };
    show(&format!("{}{}", report::rows(&rows), report::legend()))?;
    if let Some(file) = file {
        let document = Document {
            bindery: env!("CARGO_PKG_VERSION"),
            architecture: arguments.arch.to_string(),
            quick: arguments.quick,
            bounds: BOUNDS,
            results: &rows,
        };
        file.write(&document)?;
    }
    match rows.iter().filter(|row| !row.within_bounds).count() {
        0 => Ok(()),
        beyond => Err(format!("{beyond} of {} calls go beyond the bounds", rows.len()).into()),
    }
}

/// Makes all calls.
fn measure<A: Walk>(extent: &Extent) -> Result<Vec<Row>, String> {
    let files = MemoryFiles::new();
    let memory = meter::memory::<A>(extent.memory)?;
    let mut meter = Meter { memory: &memory, rows: Vec::new() };
    shapes::measure(&mut meter, extent)?;
    objects::measure(&mut meter, &files, extent)?;
    kernel::measure(&mut meter, extent)?;
    Ok(meter.rows)
}
