//! `bindery bench scale`: the cost of calls among many mappings of one address space, and of one
//! object.
//!
//! | file | contents |
//! |---|---|
//! | `fixture` | a machine, and the cost of one kind of call |
//! | `spaces` | many mappings in one address space |
//! | `objects` | many mappings of one object |
//! | `report` | the tables, and whether a row grows with the logarithm |

mod fixture;
mod objects;
mod report;
mod spaces;

use std::path::PathBuf;

use bindery_hosted::{ArchitectureName, Visitor, Walk, dispatch};
use serde::Serialize;

use super::{enough_memory, parse_architecture};
use crate::Problem;
use crate::output::{JsonFile, show};
use crate::size::MIB;
use fixture::Sample;

const HELP: &str = "\
What is measured
  One address space with 1,000, 10,000 and 100,000 mappings of one page: each is mapped, written to
  and unmapped, in random order, and all are forked. One object with 100, 1,000 and 10,000 mappings:
  each is mapped, written to and unmapped; a hole is punched where one of them maps a page; the
  object is truncated; and a file with every second page mapped separately is synced.
  All figures are those of one call; those of fork, truncate and sync are of one mapping, because
  these calls visit each. Steps are the nodes looked at in the index of mappings, in the object's
  tree of mappings, and in its page index. Entries and locks are those of page tables. Time is the
  mean; steps and the other counts need no clock.

Growth
  Steps among the most mappings, divided by those among the fewest. A logarithm grows by 1.7 (or 2),
  a linear search by 100. The exit status is 1 if steps grow by more than twice the logarithm.

The JSON
  bindery; architecture; quick; results[]: scene, call, samples[] {mappings, calls, steps, entries,
  locks, nanoseconds} (sums over all calls), growth, logarithm, logarithmic.";

/// Measure calls among up to 100,000 mappings of an address space, and 10,000 of an object
#[derive(clap::Args)]
#[command(after_long_help = HELP, after_help = "More: bindery bench scale --help")]
pub struct Arguments {
    /// The page-table format of the hosted machine
    #[arg(long, value_name = "ARCH", default_value = "x86-64", value_parser = parse_architecture)]
    arch: ArchitectureName,

    /// Write all figures to a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// At most a tenth of the mappings: a second in all
    #[arg(long)]
    quick: bool,
}

/// The numbers of mappings, and the memory that they need.
struct Extent {
    of_a_space: &'static [u64],
    of_an_object: &'static [u64],
    memory: u64,
}

const QUICK: Extent = Extent {
    of_a_space: &[100, 1_000, 10_000],
    of_an_object: &[10, 100, 1_000],
    memory: 128 * MIB,
};
const FULL: Extent = Extent {
    of_a_space: &[1_000, 10_000, 100_000],
    of_an_object: &[100, 1_000, 10_000],
    memory: 768 * MIB,
};

/// The cost of one kind of call among few, more, and many mappings.
#[derive(Serialize)]
struct Row {
    /// "space" or "object".
    scene: &'static str,
    call: &'static str,
    samples: Vec<Sample>,
    /// The steps of a call among the most mappings, divided by the steps among the fewest.
    growth: f64,
    /// The growth of a logarithm.
    logarithm: f64,
    /// Whether `growth` is at most twice the growth of a logarithm.
    logarithmic: bool,
}

/// All figures of a run. Fields are only ever added.
#[derive(Serialize)]
struct Document<'a> {
    /// The version of the program.
    bindery: &'static str,
    architecture: String,
    quick: bool,
    results: &'a [Row],
}

/// Runs the measurements of the arguments.
///
/// # Errors
/// The message for the user: a call that failed, or one whose steps grow faster than a logarithm.
pub fn run(arguments: &Arguments) -> Result<(), Problem> {
    let file = arguments.json.as_deref().map(JsonFile::create).transpose()?;
    let extent = if arguments.quick { QUICK } else { FULL };
    enough_memory(extent.memory)?;
    let rows = dispatch(arguments.arch, Run { extent })?;
    show(&format!("{}{}", report::rows(&rows), report::LEGEND))?;
    if let Some(file) = file {
        let document = Document {
            bindery: env!("CARGO_PKG_VERSION"),
            architecture: arguments.arch.to_string(),
            quick: arguments.quick,
            results: &rows,
        };
        file.write(&document)?;
    }
    match rows.iter().filter(|row| !row.logarithmic).count() {
        0 => Ok(()),
        faster => {
            Err(format!("{faster} of {} calls grow faster than a logarithm", rows.len()).into())
        }
    }
}

/// All calls, to be made on an architecture known by name.
struct Run {
    extent: Extent,
}

impl Visitor for Run {
    type Output = Result<Vec<Row>, String>;

    fn visit<A: Walk>(self) -> Self::Output {
        let Self { extent } = self;
        let mut rows = Vec::new();
        for (scene, counts, calls) in [
            ("space", extent.of_a_space, spaces::measure::<A> as fixture::Scene),
            ("object", extent.of_an_object, objects::measure::<A>),
        ] {
            for count in counts {
                for (call, sample) in calls(*count, extent.memory)? {
                    let alike = |row: &&mut Row| row.scene == scene && row.call == call;
                    match rows.iter_mut().find(alike) {
                        Some(row) => row.add(sample),
                        None => rows.push(Row::new(scene, call, sample)),
                    }
                }
            }
        }
        Ok(rows)
    }
}

impl Row {
    fn new(scene: &'static str, call: &'static str, sample: Sample) -> Self {
        let samples = vec![sample];
        Self { scene, call, samples, growth: 1.0, logarithm: 1.0, logarithmic: true }
    }

    fn add(&mut self, sample: Sample) {
        let first = &self.samples[0];
        // A call that takes almost no steps among few mappings may take a few among many.
        self.growth = sample.steps_of_one().max(8.0) / first.steps_of_one().max(8.0);
        self.logarithm = (sample.mappings as f64).ln() / (first.mappings as f64).ln();
        self.logarithmic = self.growth <= 2.0 * self.logarithm;
        self.samples.push(sample);
    }
}
