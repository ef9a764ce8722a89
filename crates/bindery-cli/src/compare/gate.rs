//! `bindery compare gate`: detects operations that have grown.
//!
//! A committed table holds the instructions of each operation of our kernel and the best figure
//! ever reached. A row above 103 % of its present figure fails, and so does one that misses a
//! target it had reached. `--write` rewrites the table: then a row that grew needs a reason, which
//! the table keeps, together with the row's best figure.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use bindery_cli::guest::kernel::{self, Features};
use bindery_cli::guest::{Architecture, Problem, process, workspace};
use clap::ValueEnum;

use super::baseline;
use super::counts::Counter;
use super::guests::{Kernel, Repeat};
use super::measure::{self, Plan};
use super::results::Comparison;
use super::rows::{FOLIOS, Row, Workload};
use crate::output::{show, thousands};
use crate::size::FolioSize;

const ARCHITECTURE: Architecture = Architecture::X86_64;
const TABLE: &str = "docs/figures/gate-x86-64.txt";
/// The allowed growth of a row.
const ALLOWED: f64 = 1.03;

const HELP: &str = "\
The table
  docs/figures/gate-x86-64.txt has Bindery's instructions for each operation, the best figure
  ever reached, and the reason of each row that is above its best by more than 3 %. Counts depend
  on the compiler and on QEMU. With others than those that the table names, the commit of
  the table is built and measured as well, under target/gate, and the two are compared.

Exit status
  0  no row grew by more than 3 %, and none has left its target
  1  a row grew, has left its target, or is only in the table or only measured

Examples
  bindery compare gate
  bindery compare gate --without-features
  bindery compare gate --write --reason \"folios are in LRU lists\"";

/// Compare Bindery's instructions for each operation with those of the committed table
#[derive(clap::Args)]
#[command(after_long_help = HELP, after_help = "More, with examples: bindery compare gate --help")]
pub struct Arguments {
    /// Write the table anew
    #[arg(long, conflicts_with = "print")]
    write: bool,

    /// Why rows grew by more than 3 %
    #[arg(long, value_name = "TEXT", requires = "write")]
    reason: Option<String>,

    /// Print the figures as a table with a mark at those above their targets, and compare nothing
    #[arg(long)]
    print: bool,

    /// Measure a kernel whose core is built without features, by the operations that need none
    #[arg(long, conflicts_with = "write")]
    without_features: bool,
}

/// Performs the action of the arguments.
///
/// # Errors
/// If a requirement is missing, a machine failed, or the table cannot be read.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Problem> {
    let features = if arguments.without_features { Features::None } else { Features::All };
    let workloads = workloads(features);
    let (tools, measured) = measure(features, &workloads)?;
    if arguments.print {
        let mut table = Table::of(tools, &measured);
        table.mark_targets(&measured);
        show(&table.text())?;
        return Ok(ExitCode::SUCCESS);
    }
    let path = workspace::root()?.join(TABLE);
    let mut table = match std::fs::read_to_string(&path) {
        Ok(text) => Table::read(&text)?,
        Err(_) if arguments.write => Table::of(tools.clone(), &measured),
        Err(error) => return Err(Problem::io("read", &path, &error)),
    };
    if table.tools != tools {
        eprintln!("bindery: {TABLE} was made with {}, and this run uses {tools}", table.tools);
        let then = Table::read(&of_commit()?)?;
        table.adopt(then);
    }
    table.rows.retain(|line| {
        Row::from_key(&line.operation).map_or(true, |row| workloads.contains(&row.workload))
    });
    if arguments.write {
        table.update(tools, &measured, arguments.reason.as_deref())?;
        workspace::write_if_changed(&path, table.text().as_bytes())?;
        show(&format!("{TABLE} has {} rows\n", table.rows.len()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let problems = table.check(&measured);
    let grown = if problems.is_empty() {
        "none grew by more than 3 %\n".to_owned()
    } else {
        let next = if features == Features::All { ACCEPT } else { "" };
        format!("{}\n{PROFILE}\n{next}", problems.join("\n"))
    };
    show(&format!("{} rows: {grown}", measured.len()))?;
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The suggested next step after a failure, and the alternative if the table may be written.
const PROFILE: &str =
    "`bindery compare --profile OPERATION --arch x86-64` shows the functions of an operation.";
const ACCEPT: &str = "`bindery compare gate --write --reason TEXT` accepts the figures.\n";

/// An operation with folios of one size, and its instructions.
type Measured = Vec<(Row, Option<FolioSize>, u64)>;

/// The workloads that a kernel with these features can run.
fn workloads(features: Features) -> Vec<Workload> {
    let all = Workload::value_variants().iter().copied();
    all.filter(|workload| features == Features::All || !workload.needs_features()).collect()
}

/// Runs workloads on our kernel. Returns the tools used and all operations.
fn measure(features: Features, workloads: &[Workload]) -> Result<(String, Measured), Problem> {
    let (bench, _) = super::prepare(ARCHITECTURE, workloads)?;
    let kernel::Kernel { image, symbols, toolchain, .. } =
        kernel::build_with(ARCHITECTURE, features)?;
    let tools = format!("QEMU {}, {toolchain}", bench.emulator);
    let plan = Plan {
        bindery: Some(Kernel::Bindery { image, symbols }),
        linux: None,
        workloads,
        folios: &FOLIOS,
        repeat: Repeat::Never,
    };
    let mut problems = Vec::new();
    let pairs = measure::all(&bench, &plan, &mut problems);
    if let Some(problem) = problems.into_iter().next() {
        return Err(problem);
    }
    let measured = Comparison::all(ARCHITECTURE, &pairs).into_iter().map(|comparison| {
        let ours = comparison.bindery?.mean.of(Counter::Kernel);
        Some((comparison.row, comparison.folio, ours.round() as u64))
    });
    let measured: Option<_> = measured.collect();
    let measured = measured.ok_or_else(|| {
        Problem::Failed(
            "an operation has no count: its workload ended early, or has other marks than this \
             program"
                .into(),
        )
    })?;
    Ok((tools, measured))
}

/// The figures of the commit that wrote the table, with the current tools.
fn of_commit() -> Result<String, Problem> {
    let root = workspace::root()?;
    let git = || {
        let mut git = Command::new("git");
        git.current_dir(&root);
        git
    };
    let commit = process::output(git().args(["log", "-1", "--format=%H", "--", TABLE]))?;
    let commit = commit.trim();
    if commit.is_empty() {
        return Err(Problem::Failed(format!(
            "Git has no commit of {TABLE} to compare with; in a shallow clone, run `git fetch \
             --unshallow`"
        )));
    }
    let folder = workspace::target("gate")?.join(commit);
    if !folder.join("Cargo.toml").is_file() {
        unpack(&mut git(), commit, &folder)?;
    }
    eprintln!("bindery: building {commit} with the current tools, to compare with");
    let mut cargo = Command::new("cargo");
    cargo.current_dir(&folder).env_remove("CARGO_TARGET_DIR");
    cargo.args(["run", "--quiet", "-p", "bindery-cli", "--", "compare", "gate", "--print"]);
    process::output(&mut cargo)
}

fn unpack(git: &mut Command, commit: &str, folder: &Path) -> Result<(), Problem> {
    std::fs::create_dir_all(folder).map_err(|error| Problem::io("make", folder, &error))?;
    let archive: PathBuf = folder.join("archive.tar");
    process::output(git.args(["archive", "--output"]).arg(&archive).arg(commit))?;
    process::output(Command::new("tar").arg("-C").arg(folder).arg("-xf").arg(&archive))?;
    Ok(())
}

/// The committed table.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Table {
    /// QEMU and the kernel's compiler.
    tools: String,
    rows: Vec<Line>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Line {
    operation: String,
    folio: String,
    present: u64,
    best: u64,
    /// The reason why the present figure is above the best.
    reason: String,
}

const MADE_WITH: &str = "# Made with ";
/// The gap between two columns.
const GAP: &str = "  ";

impl Table {
    fn of(tools: String, measured: &Measured) -> Self {
        let rows = measured.iter().map(|(row, folio, figure)| Line {
            operation: row.key.to_owned(),
            folio: show_folio(*folio),
            present: *figure,
            best: *figure,
            reason: String::new(),
        });
        Self { tools, rows: rows.collect() }
    }

    fn text(&self) -> String {
        let mut text = format!(
            "# Kernel instructions of Bindery for each operation: `bindery compare gate`.\n\
             {MADE_WITH}{}\n# operation                 folios           present              best  \
             reason of a row that is more than 3 % above its best\n",
            self.tools
        );
        for Line { operation, folio, present, best, reason } in &self.rows {
            let (present, best) = (thousands(*present), thousands(*best));
            let line = format!(
                "{operation:26}{GAP}{folio:6}{GAP}{present:>14}{GAP}{best:>16}{GAP}{reason}"
            );
            writeln!(text, "{}", line.trim_end()).expect("a string takes all");
        }
        text
    }

    fn read(text: &str) -> Result<Self, Problem> {
        let tools = text.lines().find_map(|line| line.strip_prefix(MADE_WITH));
        let wrong = |line: &str| {
            Problem::Failed(format!(
                "{TABLE}: {line:?} is not a row; restore the file with `git checkout`"
            ))
        };
        let tools = tools.ok_or_else(|| wrong("(no line names the tools)"))?.to_owned();
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        let rows = lines.map(|line| {
            let mut columns = line.split(GAP).map(str::trim).filter(|column| !column.is_empty());
            let mut column = || columns.next();
            let number = |text: Option<&str>| text?.replace(',', "").parse().ok();
            let row = (|| {
                Some(Line {
                    operation: column()?.to_owned(),
                    folio: column()?.to_owned(),
                    present: number(column())?,
                    best: number(column())?,
                    reason: column().unwrap_or_default().to_owned(),
                })
            })();
            row.ok_or_else(|| wrong(line))
        });
        Ok(Self { tools, rows: rows.collect::<Result<_, _>>()? })
    }

    fn find(&self, row: &Row, folio: Option<FolioSize>) -> Option<&Line> {
        let folio = show_folio(folio);
        self.rows.iter().find(|line| line.operation == row.key && line.folio == folio)
    }

    /// Takes the present figures of a table made by other tools for the same commit. The best
    /// figures are scaled in proportion, because no run with these tools has reached them.
    fn adopt(&mut self, then: Self) {
        for line in &mut self.rows {
            let same = then
                .rows
                .iter()
                .find(|other| (&other.operation, &other.folio) == (&line.operation, &line.folio));
            if let Some(other) = same {
                line.best = (line.best as f64 * other.present as f64 / line.present as f64) as u64;
                line.present = other.present;
            }
        }
    }

    /// Marks the rows of a table of [`Table::of`] that are above their targets.
    fn mark_targets(&mut self, measured: &Measured) {
        for (line, (row, folio, figure)) in self.rows.iter_mut().zip(measured) {
            if let Some(target) = missed_target(row, *folio, *figure) {
                line.reason = format!("above its target, {}", thousands(target));
            }
        }
    }

    /// The rows that fail, each as a sentence.
    fn check(&self, measured: &Measured) -> Vec<String> {
        let mut problems = Vec::new();
        for (row, folio, figure) in measured {
            let name = format!("{} ({})", row.key, show_folio(*folio));
            let now = thousands(*figure);
            let Some(line) = self.find(row, *folio) else {
                problems.push(format!("{name} is not in the table; now {now}"));
                continue;
            };
            if grew(*figure, line.present) {
                let growth = (*figure as f64 / line.present as f64 - 1.0) * 100.0;
                let before = thousands(line.present);
                problems.push(format!("{name} grew by {growth:.1} %: {before}, now {now}"));
            }
            if let Some(target) = missed_target(row, *folio, *figure)
                && line.best <= target
            {
                let target = thousands(target);
                problems.push(format!("{name} has left its target, {target}: now {now}"));
            }
        }
        for line in &self.rows {
            let is_measured = |(row, folio, _): &(Row, Option<FolioSize>, u64)| {
                row.key == line.operation && show_folio(*folio) == line.folio
            };
            if !measured.iter().any(is_measured) {
                problems.push(format!(
                    "{} ({}) is in the table, and was not measured",
                    line.operation, line.folio
                ));
            }
        }
        problems
    }

    /// Writes new figures. A row above its best figure keeps its reason, and a row that grew needs
    /// a reason.
    fn update(
        &mut self,
        tools: String,
        measured: &Measured,
        reason: Option<&str>,
    ) -> Result<(), Problem> {
        let mut rows = Vec::new();
        let mut grown = Vec::new();
        for (row, folio, figure) in measured {
            let mut line = Line {
                operation: row.key.to_owned(),
                folio: show_folio(*folio),
                present: *figure,
                best: *figure,
                reason: String::new(),
            };
            if let Some(before) = self.find(row, *folio) {
                line.best = before.best.min(*figure);
                if grew(*figure, before.present) {
                    grown.push(format!("{} ({})", row.key, line.folio));
                    line.reason = reason.unwrap_or_default().to_owned();
                } else if grew(*figure, line.best) {
                    line.reason.clone_from(&before.reason);
                }
            }
            rows.push(line);
        }
        if !grown.is_empty() && reason.is_none() {
            let grown = grown.join(", ");
            return Err(Problem::Wrong(format!(
                "these operations grew by more than 3 %; give the reason with --reason: {grown}"
            )));
        }
        *self = Self { tools, rows };
        Ok(())
    }
}

/// The target that a figure exceeds; `None` if it exceeds none, or if the row has no target.
fn missed_target(row: &Row, folio: Option<FolioSize>, figure: u64) -> Option<u64> {
    let target = baseline::target(row.key, folio, ARCHITECTURE)?.instructions;
    (figure > target).then_some(target)
}

fn grew(now: u64, before: u64) -> bool {
    now as f64 > before as f64 * ALLOWED
}

fn show_folio(folio: Option<FolioSize>) -> String {
    folio.map_or_else(|| "-".to_owned(), |folio| folio.to_string().replace(' ', ""))
}

#[cfg(test)]
mod tests {
    use super::super::rows::ROWS;
    use super::*;

    fn measured(figures: &[(&str, Option<FolioSize>, u64)]) -> Measured {
        figures
            .iter()
            .map(|(key, folio, now)| (Row::from_key(key).unwrap(), *folio, *now))
            .collect()
    }

    fn one(now: u64) -> Measured {
        measured(&[("mmap-1m", Some(FolioSize::BASE), now)])
    }

    fn table(present: u64) -> Table {
        Table::of("QEMU 7, rustc 1".to_owned(), &one(present))
    }

    #[test]
    fn a_table_survives_a_round_trip() {
        let all =
            measured(&[("mmap-1m", Some(FolioSize::KIB_64), 2_000), ("vmap-1m", None, 1_234_567)]);
        let mut table = Table::of("QEMU 7, rustc 1".to_owned(), &all);
        table.rows[1].reason = "it looks twice".to_owned();
        assert_eq!(Table::read(&table.text()).unwrap(), table);
        assert!(Table::read(&table.text().replace("1,234,567", "many")).is_err());
    }

    #[test]
    fn a_row_may_grow_by_three_percent() {
        assert_eq!(table(1_000).check(&one(1_030)), [""; 0]);
        let problems = table(1_000).check(&one(1_031));
        assert_eq!(problems, ["mmap-1m (4KiB) grew by 3.1 %: 1,000, now 1,031"]);
    }

    #[test]
    fn a_row_that_reached_its_target_keeps_it() {
        let key = ("mremap-1m", Some(FolioSize::BASE));
        let table = Table::of(String::new(), &measured(&[(key.0, key.1, 4_990)]));
        let problems = table.check(&measured(&[(key.0, key.1, 5_010)]));
        assert_eq!(problems, ["mremap-1m (4KiB) has left its target, 5,000: now 5,010"]);
    }

    #[test]
    fn a_printed_row_above_its_target_says_so() {
        let figures = [("mremap-1m", 5_010), ("mremap-1m", 4_990), ("vmap-1m", 1)];
        let all = measured(&figures.map(|(key, now)| (key, Some(FolioSize::BASE), now)));
        let mut table = Table::of(String::new(), &all);
        table.mark_targets(&all);
        let marks: Vec<&str> = table.rows.iter().map(|line| &*line.reason).collect();
        assert_eq!(marks, ["above its target, 5,000", "", ""]);
    }

    #[test]
    fn rows_are_the_same_on_both_sides() {
        let both = measured(&[("mmap-1m", Some(FolioSize::BASE), 1), ("vmap-1m", None, 1)]);
        assert_eq!(table(1).check(&both), ["vmap-1m (-) is not in the table; now 1"]);
        assert_eq!(
            table(1).check(&Vec::new()),
            ["mmap-1m (4KiB) is in the table, and was not measured"]
        );
    }

    #[test]
    fn growth_needs_a_reason_kept_with_the_best() {
        let mut table = table(1_000);
        let tools = || "QEMU 7, rustc 1".to_owned();
        assert!(table.update(tools(), &one(1_100), None).is_err());
        table.update(tools(), &one(1_100), Some("more locks")).unwrap();
        table.update(tools(), &one(1_110), None).unwrap();
        let Line { present, best, reason, .. } = &table.rows[0];
        assert_eq!((*present, *best, reason.as_str()), (1_110, 1_000, "more locks"));
        table.update(tools(), &one(900), None).unwrap();
        let Line { present, best, reason, .. } = &table.rows[0];
        assert_eq!((*present, *best, reason.as_str()), (900, 900, ""));
    }

    #[test]
    fn a_build_without_features_runs_no_swap() {
        let without = workloads(Features::None);
        assert!(without.contains(&Workload::System2) && !without.contains(&Workload::System3));
        assert_eq!(workloads(Features::All), Workload::value_variants());
    }

    #[test]
    fn other_tools_are_compared_by_the_tables_commit() {
        let mut with_new_tools = table(1_000);
        with_new_tools.adopt(table(1_200));
        assert_eq!(with_new_tools.check(&one(1_230)), [""; 0]);
        assert_eq!(with_new_tools.check(&one(1_240)).len(), 1);
    }

    #[test]
    fn every_operation_has_a_key_without_a_gap() {
        assert!(ROWS.iter().all(|row| !row.key.contains(' ')));
    }
}
