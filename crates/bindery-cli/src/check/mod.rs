//! `bindery check`: a script of calls, run on a hosted machine and audited.
//!
//! | file | what |
//! |---|---|
//! | `script.pest`, `syntax` | the grammar of a line, and the message for a line that breaks it |
//! | `mistake` | an error in a script, shown with the line and a caret |
//! | `usage` | every statement in one line |
//! | `words`, `number`, `failure` | flags, sums, names of errno and signals |
//! | `scope` | the meaning of names, before anything runs |
//! | `script`, `read` | a script as a value, and how its text becomes one |
//! | `fixture` | processes and files on one machine |
//! | `perform` | what each statement does there |
//! | `outcome` | the outcome of a statement, compared with the expectation |
//! | `layout`, `audit` | the mappings, and broken invariants |
//! | `show` | numbers and bytes as `strace` shows them |
//! | `report` | the results, for people and for programs |

mod audit;
mod failure;
mod fixture;
mod layout;
mod mistake;
mod number;
mod outcome;
mod perform;
mod read;
mod report;
mod scope;
mod script;
mod show;
mod syntax;
mod usage;
mod words;

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use bindery::platform::Cpu;
use bindery_hosted::{ArchitectureName, Config, Machine, MemoryFiles, Visitor, Walk, dispatch};

use crate::Problem;
use crate::output::JsonFile;
use crate::size::{FolioSize, GIB, KIB, parse_bytes};
use fixture::{Fixture, Stop};
use mistake::{Mistake, Source};
use outcome::Outcome;
use report::Report;
use script::{Action, MAIN, Script};

/// Run a script of memory calls on a hosted machine with a strict TLB, and audit the result
///
/// Prints the result of each call, as strace does, then the layout, as /proc/self/maps does, and
/// the findings of the audit. Exit status: 0 if all expectations were met and the audit found
/// nothing, 1 if an expectation was not met or the audit found a violation, 2 if the script is
/// invalid.
#[derive(clap::Args)]
#[command(after_long_help = usage::help(), after_help = "The format of scripts: bindery help check")]
pub struct Arguments {
    /// The script; - for standard input
    #[arg(long, value_name = "FILE")]
    script: PathBuf,

    /// The architecture of the hosted machine: x86-64, x86-64-la57, aarch64, riscv64
    /// (riscv64-sv48), riscv64-sv39, or tiny, which has 64 pages of addresses
    #[arg(long, value_name = "ARCH", default_value = "x86-64")]
    arch: ArchitectureName,

    /// The machine's memory, from 256k to 16g
    #[arg(long, value_name = "SIZE", default_value = "256m", value_parser = memory_size)]
    memory: u64,

    /// Folio sizes of first touches, separated by commas, from 8k to 2m; like `policy SIZE always`
    /// for all kinds of memory
    #[arg(long, value_name = "SIZE", value_delimiter = ',')]
    folios: Vec<FolioSize>,

    /// Write all results to a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn memory_size(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text).filter(|bytes| (256 * KIB..=16 * GIB).contains(bytes));
    bytes.ok_or_else(|| {
        format!("{text:?} is not a memory size; give a size from 256k to 16g, for example 256m")
    })
}

/// The number of errors shown; further ones are counted.
const SHOWN_MISTAKES: usize = 20;

/// Runs the script.
///
/// # Errors
/// The message for the user.
pub fn run(arguments: &Arguments) -> Result<(), Problem> {
    let source = source(&arguments.script).map_err(Problem::Wrong)?;
    let script = read::script(source).map_err(|(source, mistakes)| wrong(&source, &mistakes))?;
    let json = arguments.json.as_deref().map(JsonFile::create).transpose()?;
    let memory = arguments.memory;
    let mut report = Report::new(&script.source.name, arguments.arch.to_string(), memory);
    let line = Cell::new(0);
    let run = Run { script: &script, arguments, report: &mut report, line: &line };
    // A panic comes from the engine, whose assertions are part of the check.
    let ended = catch_unwind(AssertUnwindSafe(|| dispatch(arguments.arch, run)));
    let result = match ended {
        Ok(Ok(())) => Ok(()),
        Ok(Err(Halt::Script(Stop::Lost(mistake)))) => {
            report.stopped = Some(script.source.show(&mistake));
            Ok(())
        }
        Ok(Err(Halt::Script(Stop::Wrong(mistake)))) => {
            report.stopped = Some(mistake.message.clone());
            Err(wrong(&script.source, &[mistake]))
        }
        Ok(Err(Halt::Machine(problem))) => {
            report.stopped = Some(problem);
            Ok(())
        }
        Err(_) if line.get() == 0 => {
            report.stopped = Some(
                "the host has no memory for the hosted machine; give a smaller --memory".to_owned(),
            );
            Ok(())
        }
        Err(_) => {
            report.stopped = Some(format!(
                "Bindery panicked in line {}; please report this with the script and the message above",
                line.get()
            ));
            Ok(())
        }
    };
    if let Some(file) = json {
        file.write(&report)?;
    }
    result?;
    report.problem().map_or(Ok(()), |problem| Err(Problem::Failed(problem)))
}

fn source(path: &Path) -> Result<Source, String> {
    let name = if path == Path::new("-") { "standard input" } else { &*path.to_string_lossy() };
    let mut bytes = Vec::new();
    let read = if path == Path::new("-") {
        io::stdin().lock().read_to_end(&mut bytes)
    } else {
        File::open(path).and_then(|mut file| file.read_to_end(&mut bytes))
    };
    read.map_err(|error| format!("cannot read {name}: {error}"))?;
    let text = String::from_utf8(bytes).map_err(|_| format!("{name} is not UTF-8 text"))?;
    Ok(Source::new(name, &text))
}

fn wrong(source: &Source, mistakes: &[Mistake]) -> Problem {
    let shown: Vec<_> =
        mistakes.iter().take(SHOWN_MISTAKES).map(|mistake| source.show(mistake)).collect();
    let mut text = shown.join("\n\nerror: ");
    if let Some(more @ 1..) = mistakes.len().checked_sub(SHOWN_MISTAKES) {
        text.push_str(&format!("\n\nerror: {more} more lines are wrong"));
    }
    Problem::Wrong(text)
}

/// The reason why a run ended early.
enum Halt {
    Script(Stop),
    /// The machine could not be set up, or the output could not be written.
    Machine(String),
}

impl From<Stop> for Halt {
    fn from(stop: Stop) -> Self {
        Self::Script(stop)
    }
}

impl From<String> for Halt {
    fn from(problem: String) -> Self {
        Self::Machine(problem)
    }
}

/// The extent of a script's run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// To its last line.
    Last,
    /// The script ended early.
    Early,
}

/// A script, to be run on an architecture known by name.
struct Run<'a> {
    script: &'a Script,
    arguments: &'a Arguments,
    report: &'a mut Report,
    /// The line that runs.
    line: &'a Cell<usize>,
}

impl Visitor for Run<'_> {
    type Output = Result<(), Halt>;

    fn visit<A: Walk>(mut self) -> Self::Output {
        let disk = MemoryFiles::new();
        let machine =
            Machine::<A>::new(Config { memory: self.arguments.memory, ..Config::default() });
        let memory = machine.memory().map_err(|error| {
            format!("the hosted machine has too little memory ({error}); give a larger --memory")
        })?;
        // Only base pages, unless the caller chooses.
        memory.folio_policy().set_global(bindery::SizeMode::Never);
        let free = memory.free_frame_count();
        // The thread stays on the CPU, as in a kernel.
        let _on_cpu = machine.bind(Cpu(0));
        let mut fixture = Fixture::new(&machine, &memory, &disk).map_err(|error| {
            format!("the hosted machine has too little memory ({error}); give a larger --memory")
        })?;
        for folio in &self.arguments.folios {
            fixture.use_folios(folio.order());
        }
        let ended = self.statements(&mut fixture);
        let ending = if ended.is_ok() { Ending::Last } else { Ending::Early };
        self.epilogue(&fixture, ending)?;
        let findings = fixture.finish(free);
        if !findings.violations.is_empty() {
            self.report.epilogue(MAIN, "after the end", Outcome::Audit(findings))?;
        }
        ended
    }
}

impl Run<'_> {
    fn statements<A: Walk>(&mut self, fixture: &mut Fixture<'_, A>) -> Result<(), Halt> {
        for statement in &self.script.statements {
            let line = statement.place.line;
            self.line.set(line);
            let performed = fixture.perform(statement)?;
            self.report.statement(line, &statement.process, performed)?;
        }
        Ok(())
    }

    /// Shows the layout of all processes unless the script shows it, and audits unless the script
    /// has just done so.
    fn epilogue<A: Walk>(&mut self, fixture: &Fixture<'_, A>, ending: Ending) -> Result<(), Halt> {
        let is = |wanted: fn(&Action) -> bool| move |s: &script::Statement| wanted(&s.action);
        // Statements after the end were not executed.
        let statements = match ending {
            Ending::Last => &*self.script.statements,
            Ending::Early => &[],
        };
        if !statements.iter().any(is(|action| matches!(action, Action::Layout))) {
            for (index, process) in fixture.processes().enumerate() {
                let mappings = fixture.layout(index);
                self.report.epilogue(&process.name, "layout()", Outcome::Layout { mappings })?;
            }
        }
        if !statements.last().is_some_and(is(|action| matches!(action, Action::Audit))) {
            self.report.epilogue(MAIN, "audit()", Outcome::Audit(fixture.audit()))?;
        }
        Ok(())
    }
}
