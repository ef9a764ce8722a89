//! `bindery bench conflicts`: the cache lines that operations of two CPUs share.
//!
//! | file | contents |
//! |---|---|
//! | `machine` | builds and runs the program of the operations and the plugin |
//! | `read` | their outputs |
//! | `rows` | the figures of each operation |
//! | `names` | the names of shared data |
//! | `report` | the table, and the comparison with the committed one |

mod machine;
mod names;
mod read;
mod report;
mod rows;

use bindery_cli::guest::{Problem, workspace};

use crate::output::show;
use names::Names;
use read::{Grace, Program};
pub use read::{Pair, Sharing, Word, pairs};
pub use report::{committed_row, figure};
pub use rows::median;

/// The committed table, from the workspace on.
pub const TABLE: &str = "docs/figures/conflicts.txt";

const HELP: &str = "\
What is measured
  Two operations of different CPUs scale if they share no cache line that one of them writes
  (Clements et al., The Scalable Commutativity Rule, SOSP 2013). The core runs each operation on one
  CPU, then on the other, never at once, on a machine whose CPUs share nothing but memory. A plugin
  of QEMU records their loads and stores. A figure is the median, over 50 repetitions, of the lines
  of 64 bytes that both touched and one wrote. \"threads\": both CPUs are in one address space;
  \"processes\": each is in its own. \"readers\": a grace period is over only after the next step of
  the other CPU, as on a real machine; otherwise at once. All folios are base pages. Two runs of one
  build have the same figures.

What is not measured
  Waiting, the time that a lock is held, page walks, instruction fetches.

Exit status
  0  no row has more lines than the committed table, docs/figures/conflicts.txt, allows: none more
     where it has 0, and otherwise one line or 3 %
  1  a row has more, or is only in the table or only measured

Examples
  bindery bench conflicts
  bindery bench conflicts --write";

/// Count the cache lines that operations of two CPUs share, one of them writing
#[derive(clap::Args)]
#[command(after_long_help = HELP, after_help = "More: bindery bench conflicts --help")]
pub struct Arguments {
    /// Write the committed table anew
    #[arg(long)]
    write: bool,
}

/// Runs the measurement.
///
/// # Errors
/// The message for the user: a requirement is missing, a step failed, or a row has grown.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    let text = measure(arguments)?;
    Ok(show(&text)?)
}

fn measure(arguments: &Arguments) -> Result<String, Problem> {
    let outputs = machine::run()?;
    let program = Program::read(&outputs.printed).map_err(Problem::Failed)?;
    let pairs = pairs(&outputs.pairs).map_err(Problem::Failed)?;
    let rows = rows::rows(&program, &pairs).map_err(Problem::Failed)?;
    let table = report::rows(&rows);
    let path = workspace::root()?.join(TABLE);
    if arguments.write {
        workspace::write_if_changed(&path, table.as_bytes())?;
    }
    let committed =
        std::fs::read_to_string(&path).map_err(|error| Problem::io("read", &path, &error))?;
    let file = &outputs.program;
    let file = std::fs::read(file).map_err(|error| Problem::io("read", file, &error))?;
    let mut names = Names::of(&file, &program)?;
    let mut text = table;
    for (title, sharing) in [
        ("Data that threads share: place: file and function of the core", Sharing::Threads),
        ("Data that processes share", Sharing::Processes),
    ] {
        let data = rows::data(&program, &pairs, &mut names, (sharing, Grace::Quiet));
        text.push_str(&report::data(title, &data));
    }
    let grown = report::grown(&rows, &committed);
    if grown.is_empty() {
        Ok(text)
    } else {
        let grown = grown.join("\n");
        Err(Problem::Failed(format!(
            "the figures exceed those of {TABLE}, or have other rows:\n{grown}\n\n{text}"
        )))
    }
}
