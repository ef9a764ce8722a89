//! `bindery compare wide`: compares every operation with Linux and sorts them by ratio, highest
//! first.
//!
//! | file | contents |
//! |---|---|
//! | `cases` | operations that no workload has |

mod cases;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::slice;

use bindery_cli::guest::{Architecture, Problem};
use clap::ValueEnum;
use serde::Serialize;

use super::counts::{Counter, Counts};
use super::guests::{Kernel, Repeat};
use super::interpreter::{self, Program, machines};
use super::measure::{self, Plan};
use super::results::Comparison;
use super::rows::{FOLIOS, Workload};
use crate::output::{JsonFile, show, thousands};
use crate::size::FolioSize;
use cases::Case;

const HELP: &str = "\
The operations are those of all workloads of `bindery compare`, and some two dozen more, which the
interpreter of `bindery compare random` makes (crates/bindery-cli/src/compare/wide/cases.rs): each
several times in a row, with folios of 4 KiB, 64 KiB and 2 MiB.

Examples
  bindery compare wide
  bindery compare wide --arch x86-64 --json wide.json
  bindery compare wide --only swap             the other operations with that in their names
  bindery compare wide --profile 'MADV_FREE of 1 MiB' --arch x86-64
                                               the hottest functions of one";

/// Compare every operation there is with Linux, in one table sorted by ratio
#[derive(clap::Args)]
#[command(after_long_help = HELP, after_help = "More, with examples: bindery compare wide --help")]
pub struct Arguments {
    /// The architectures, separated by commas [default: all]
    #[arg(long, value_name = "ARCH", value_delimiter = ',')]
    arch: Vec<Architecture>,

    /// Leave the workloads out, and take only the other operations whose names contain this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,

    /// Write all operations to a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Show instead which functions of Bindery's kernel execute the instructions of one of those
    /// other operations
    #[arg(long, value_name = "OPERATION", conflicts_with_all = ["only", "json"])]
    profile: Option<String>,

    /// The folio size of the profile
    #[arg(long, value_name = "SIZE", requires = "profile", default_value = "4k")]
    folio: FolioSize,
}

/// An operation with fewer instructions does not count, because it caused no work for the kernel.
const LEAST: f64 = 100.0;

/// An operation on both kernels.
#[derive(Debug, Serialize)]
struct Line {
    architecture: String,
    operation: String,
    folio_bytes: Option<u64>,
    /// Our instructions divided by Linux's.
    ratio: f64,
    bindery: f64,
    linux: f64,
}

/// Runs the comparison of the arguments.
///
/// # Errors
/// If a requirement is missing, or a machine failed.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Problem> {
    let architectures = match &*arguments.arch {
        [] => Architecture::ALL.to_vec(),
        chosen => chosen.to_vec(),
    };
    if let Some(name) = &arguments.profile {
        return profile(name, arguments.folio, &architectures);
    }
    let file = arguments.json.as_deref().map(JsonFile::create).transpose()?;
    let mut all = Vec::new();
    for architecture in architectures {
        let mut lines = match arguments.only {
            Some(_) => Vec::new(),
            None => of_workloads(architecture)?,
        };
        lines.extend(of_cases(architecture, arguments.only.as_deref().unwrap_or_default())?);
        lines.sort_by(|one, other| other.ratio.total_cmp(&one.ratio));
        show(&table(architecture, &lines))?;
        all.extend(lines);
    }
    if let Some(file) = file {
        file.write(&all)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Shows the instructions of our kernel in one step of an operation, by function: the last step that
/// takes at least half the mean. A fork and its exit are two steps.
fn profile(
    name: &str,
    folio: FolioSize,
    architectures: &[Architecture],
) -> Result<ExitCode, Problem> {
    let Some(case) = cases::all().into_iter().find(|case| case.names.contains(&Some(name))) else {
        return Err(Problem::Wrong(format!(
            "{name:?} is not an operation; give --profile a whole name from the table of `bindery \
             compare wide`"
        )));
    };
    let program = Program { seed: 0, folio, steps: case.steps.clone() };
    for &architecture in architectures {
        let (bench, _) = interpreter::prepare(architecture)?;
        let kernel = super::ours(architecture)?;
        let Kernel::Bindery { symbols, .. } = &kernel else { continue };
        let measured = bench.measure(&kernel, slice::from_ref(&program))?;
        let costs: Vec<u64> =
            measured.programs[0].iter().map(|step| instructions(&step.counts)).collect();
        let chosen = typical(&case.names, name, &costs);
        let is_exit = |step: usize| program.steps.get(step).is_some_and(|it| it.operation == 'X');
        let (first, last) =
            (chosen - usize::from(is_exit(chosen)), chosen + usize::from(is_exit(chosen + 1)));
        for step in first..=last {
            let lines = bench.profile(&kernel, &program, step)?;
            let table = super::profile::table(&lines, symbols)?;
            let part = match program.steps[step].operation {
                'F' => " (the fork)",
                'X' => " (the exit)",
                _ => "",
            };
            let folio = program.folio;
            show(&format!("\n{name}{part}, folios of {folio}, {architecture}\n\n{table}\n"))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The last step of the operation that costs at least half the mean of its steps. Of reads that find
/// the page of an earlier one, for example, the last step costs nothing and shows nothing; of steps
/// that cost the same, the first is cold.
fn typical(names: &[Option<&str>], name: &str, costs: &[u64]) -> usize {
    let steps = || (0..names.len()).filter(|step| names[*step] == Some(name));
    let (sum, count) = (steps().map(|step| costs[step]).sum::<u64>(), steps().count() as u64);
    steps().rfind(|step| 2 * costs[*step] * count >= sum).unwrap_or(0)
}

fn of_workloads(architecture: Architecture) -> Result<Vec<Line>, Problem> {
    let workloads = Workload::value_variants();
    let (bench, _) = super::prepare(architecture, workloads)?;
    let plan = Plan {
        bindery: Some(super::ours(architecture)?),
        linux: super::newest(architecture, workloads),
        workloads,
        folios: &FOLIOS,
        repeat: Repeat::Never,
    };
    let mut problems = Vec::new();
    let pairs = measure::all(&bench, &plan, &mut problems);
    if let Some(problem) = problems.into_iter().next() {
        return Err(problem);
    }
    let comparisons = Comparison::all(architecture, &pairs);
    let lines = comparisons.iter().filter_map(|comparison| {
        let linux = comparison.linux_instructions()?;
        let ours = comparison.bindery?.mean.of(Counter::Kernel);
        Some(line(architecture, comparison.row.name, comparison.folio, ours, linux))
    });
    Ok(lines.collect())
}

/// The operations of the cases that contain `text`.
fn of_cases(architecture: Architecture, text: &str) -> Result<Vec<Line>, Problem> {
    let (bench, _) = interpreter::prepare(architecture)?;
    let linux = interpreter::linux(architecture)?;
    let ours = super::ours(architecture)?;
    let is_wanted = |name: &str| name.contains(text);
    let mut cases = cases::all();
    cases.retain(|case| case.names.iter().flatten().any(|name| is_wanted(name)));
    let mut lines = Vec::new();
    for folio in FOLIOS {
        let programs: Vec<Program> = (0..)
            .zip(&cases)
            .map(|(seed, case)| Program { seed, folio, steps: case.steps.clone() })
            .collect();
        let [ours, linux] = interpreter::measure(&bench, [&ours, &linux], &programs)?;
        for (number, case) in cases.iter().enumerate() {
            let ours = means(case, &ours.programs[number])?;
            let linux = means(case, &linux.programs[number])?;
            let both = ours.iter().zip(&linux).filter(|((name, _), _)| is_wanted(name));
            lines.extend(both.map(|((name, ours), (_, linux))| {
                line(architecture, name, Some(folio), *ours, *linux)
            }));
        }
    }
    Ok(lines)
}

/// The mean instructions of each operation of a case. A failed step does not count as an operation.
fn means(
    case: &Case,
    executed: &[machines::Executed],
) -> Result<BTreeMap<&'static str, f64>, Problem> {
    let mut sums: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for ((name, step), made) in case.names.iter().zip(executed).zip(&case.steps) {
        if step.result < 0 {
            let mut line = String::new();
            made.write(&mut line);
            return Err(Problem::Failed(format!(
                "{}: the step `{}` failed with errno {}",
                name.unwrap_or("a step without a name"),
                line.trim_end(),
                -step.result
            )));
        }
        let Some(name) = name else { continue };
        let (sum, count) = sums.entry(name).or_default();
        *sum += instructions(&step.counts);
        // A fork and its exit are one operation.
        *count += u64::from(made.operation != 'X');
    }
    Ok(sums
        .into_iter()
        .map(|(name, (sum, count))| (name, sum as f64 / count.max(1) as f64))
        .collect())
}

fn instructions(counts: &Counts<u64>) -> u64 {
    counts.of(Counter::Kernel)
}

fn line(
    architecture: Architecture,
    name: &str,
    folio: Option<FolioSize>,
    ours: f64,
    linux: f64,
) -> Line {
    Line {
        architecture: architecture.name().to_owned(),
        operation: name.to_owned(),
        folio_bytes: folio.map(FolioSize::bytes),
        ratio: ours / linux.max(1.0),
        bindery: ours,
        linux,
    }
}

fn table(architecture: Architecture, lines: &[Line]) -> String {
    let mut text = format!(
        "\n{architecture}, kernel instructions\n\nratio         Bindery           Linux  folios  operation\n"
    );
    let (compared, idle): (Vec<_>, Vec<_>) = lines.iter().partition(|line| line.linux >= LEAST);
    for Line { operation, folio_bytes, ratio, bindery, linux, .. } in &compared {
        let [bindery, linux] = [bindery, linux].map(|count| thousands(count.round() as u64));
        let folio =
            folio_bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{}k", bytes / 1024));
        text += &format!("{ratio:5.2}  {bindery:>14}  {linux:>14}  {folio:>6}  {operation}\n");
    }
    for Line { operation, folio_bytes, bindery, .. } in idle {
        let folio = folio_bytes.map_or(0, |bytes| bytes / 1024);
        text += &format!(
            "{operation}, folios of {folio}k: {} here; Linux has nothing to do\n",
            thousands(bindery.round() as u64)
        );
    }
    let dearer = compared.iter().filter(|line| line.ratio > 1.0).count();
    text + &format!("\n{dearer} of {} rows are dearer than on Linux.\n", compared.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profiled_step_is_dear_and_warm() {
        let names = [None, Some("read"), Some("read"), Some("read"), Some("read"), Some("write")];
        assert_eq!(typical(&names, "read", &[900, 50, 10, 50, 2, 1_000]), 3);
        assert_eq!(typical(&names, "read", &[900, 150, 60, 60, 60, 1_000]), 4, "one is cold");
        assert_eq!(typical(&names, "write", &[0; 6]), 5);
    }

    #[test]
    fn the_last_line_counts_what_is_dearer() {
        let lines = [
            line(Architecture::X86_64, "one", None, 200.0, 100.0),
            line(Architecture::X86_64, "other", Some(FolioSize::BASE), 50.0, 100.0),
            line(Architecture::X86_64, "none", Some(FolioSize::BASE), 2_000.0, 0.0),
        ];
        let text = table(Architecture::X86_64, &lines);
        assert!(text.contains(" 2.00             200             100       -  one\n"), "{text}");
        assert!(
            text.contains("none, folios of 4k: 2,000 here; Linux has nothing to do\n"),
            "{text}"
        );
        assert!(text.ends_with("1 of 2 rows are dearer than on Linux.\n"), "{text}");
    }
}
