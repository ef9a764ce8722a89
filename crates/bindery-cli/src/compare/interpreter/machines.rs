//! Programs in machines: several in each machine, one after the other, while the plugin counts.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

use bindery_cli::guest::initramfs::{EXECUTABLE, PLAIN};
use bindery_cli::guest::machine::{Machine, Plugin};
use bindery_cli::guest::{Architecture, Problem};

use super::super::cache::{self, Record};
use super::super::counts::{self, Counts};
use super::super::guests::{self, Kernel};
use super::super::script;
use super::Program;
use crate::size::{FolioSize, KIB};

/// The workload's name.
pub const WORKLOAD: &str = "random";
/// The number of the phase in `programs/include/mark.h`.
const PHASE_STEP: u16 = 160;

/// The common parts of all machines of one architecture.
#[derive(Debug)]
pub struct Bench {
    pub architecture: Architecture,
    pub emulator: String,
    pub plugin: PathBuf,
    pub busybox: PathBuf,
    pub program: PathBuf,
}

/// An executed step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Executed {
    /// 0 or more, `-errno`, or `-(1000 + signal)`.
    pub result: i64,
    pub counts: Counts<u64>,
}

/// The steps of each program on one kernel, in the order of the programs.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The kernel's own name.
    pub kernel: String,
    pub programs: Vec<Vec<Executed>>,
}

impl Bench {
    /// Boots the kernel and runs the programs while the plugin counts, or reads the counts from the
    /// cache.
    ///
    /// # Errors
    /// If QEMU does not start, the kernel dies, or a program does not end.
    pub fn measure(&self, kernel: &Kernel, programs: &[Program]) -> Result<Measured, Problem> {
        let directory = guests::temporary_directory()?;
        let counts = directory.path().join("counts");
        let machine =
            self.machine(kernel, programs, vec![("out".to_owned(), counts.clone().into())])?;
        let place = cache::place(&machine, &self.emulator)?;
        if let Some(record) = cache::read(&place) {
            return measured(&record, programs);
        }
        let (kernel, results) = self.run(&machine, programs)?;
        let counts =
            fs::read_to_string(&counts).map_err(|error| Problem::io("read", &counts, &error))?;
        let record = Record { kernel, counts: format!("{results}{counts}") };
        let measured = measured(&record, programs)?;
        cache::write(&place, &record)?;
        Ok(measured)
    }

    /// Runs one program and counts each of the kernel's instructions in one of its steps: lines of
    /// an address and a number.
    ///
    /// # Errors
    /// The errors of [`Self::measure`].
    pub fn profile(
        &self,
        kernel: &Kernel,
        program: &Program,
        step: usize,
    ) -> Result<String, Problem> {
        let directory = guests::temporary_directory()?;
        let [counts, profile] = ["counts", "profile"].map(|name| directory.path().join(name));
        let arguments = vec![
            ("out".to_owned(), counts.into()),
            ("profile".to_owned(), profile.clone().into()),
            ("phase".to_owned(), PHASE_STEP.to_string().into()),
            ("occurrence".to_owned(), (step + 1).to_string().into()),
        ];
        let programs = std::slice::from_ref(program);
        self.run(&self.machine(kernel, programs, arguments)?, programs)?;
        fs::read_to_string(&profile).map_err(|error| Problem::io("read", &profile, &error))
    }

    /// Runs a machine to its end. Returns the name of its kernel and the programs' results.
    fn run(&self, machine: &Machine, programs: &[Program]) -> Result<(String, String), Problem> {
        let seeds = match programs {
            [only] => format!("seed {}", only.seed),
            [first, .., last] => format!("seeds {} to {}", first.seed, last.seed),
            [] => "no seed".to_owned(),
        };
        let what = format!("{WORKLOAD}, {seeds}, {}", self.architecture);
        let console = guests::console(machine, &what)?;
        judge(&console, programs.len()).map_err(|error| Problem::Failed(format!("{what}: {error}")))
    }

    fn machine(
        &self,
        kernel: &Kernel,
        programs: &[Program],
        arguments: Vec<(String, OsString)>,
    ) -> Result<Machine, Problem> {
        let mut files = guests::file_system(&self.busybox)?;
        let program =
            fs::read(&self.program).map_err(|error| Problem::io("read", &self.program, &error))?;
        files.file(&format!("/bin/{WORKLOAD}"), EXECUTABLE, program)?;
        files.directory("/programs")?;
        for program in programs {
            files.file(&format!("/programs/{}", program.seed), PLAIN, program.text())?;
        }
        files.file("/init", EXECUTABLE, text(programs))?;
        if let Kernel::Linux { swap, .. } = kernel {
            guests::add_swap_modules(&mut files, swap)?;
        }
        let mut machine = guests::machine(self.architecture, kernel, files, &guests::CALM)?;
        machine.plugin = Some(Plugin { path: self.plugin.clone(), arguments });
        Ok(machine)
    }
}

/// The first program of both kernels.
fn text(programs: &[Program]) -> String {
    let mut script = String::from(script::BEGIN);
    let mut line = |text: &str| writeln!(script, "{text}").expect("a string takes all");
    line(script::LOAD_SWAP);
    line(script::SWAP_AREA);
    line("$box sleep 3");
    line(&format!("echo \"{}kernel $($box uname -srv)\"", script::TO_HOST));
    for Program { seed, folio, .. } in programs {
        let sizes = format!("$sizes/hugepages-{}kB/enabled", folio.bytes() / KIB);
        let large = *folio != FolioSize::BASE;
        if large {
            line(&format!("choose always {sizes}"));
        }
        line(&format!("/bin/{WORKLOAD} /programs/{seed}"));
        line(&format!("echo \"{}status $?\"", script::TO_HOST));
        if large {
            line(&format!("choose never {sizes}"));
        }
    }
    line("$box poweroff -f");
    script
}

/// The kernel's name, and the lines of results.
fn judge(console: &str, programs: usize) -> Result<(String, String), Problem> {
    let mut kernel = None;
    let mut results = String::new();
    let mut successes = 0;
    for line in script::host_lines(console) {
        match line.split_once(' ') {
            Some(("kernel", name)) => kernel = Some(name.to_owned()),
            Some(("status", "0")) => successes += 1,
            Some(("results", _)) => {
                results.push_str(line);
                results.push('\n');
            }
            _ => return Err(script::failed(line, console)),
        }
    }
    match kernel {
        Some(kernel) if successes == programs => Ok((kernel, results)),
        _ => Err(script::failed("the machine ended before the workload did", console)),
    }
}

/// The parts of a record: a line of results for each program, and the plugin's output.
fn measured(record: &Record, programs: &[Program]) -> Result<Measured, Problem> {
    let wrong = |what: &str| Problem::Failed(format!("{}: {what}", record.kernel));
    let mut results = Vec::new();
    let mut counts = record.counts.as_str();
    while let Some((line, rest)) = counts.split_once('\n')
        && let Some(numbers) = line.strip_prefix("results")
    {
        let numbers: Result<Vec<i64>, _> = numbers.split_whitespace().map(str::parse).collect();
        results.push(numbers.map_err(|_| wrong("a result is not a number"))?);
        counts = rest;
    }
    let mut phases: BTreeMap<u16, Vec<Counts<u64>>> = counts::occurrences(counts)?;
    let mut all = phases.remove(&PHASE_STEP).unwrap_or_default().into_iter();
    let mut executed = Vec::new();
    for (program, results) in programs.iter().zip(&results) {
        if results.len() != program.steps.len() {
            return Err(wrong(&format!(
                "the program of seed {} ended before its last step",
                program.seed
            )));
        }
        let steps = results.iter().map(|&result| Some(Executed { result, counts: all.next()? }));
        let steps: Option<Vec<_>> = steps.collect();
        executed.push(steps.ok_or_else(|| wrong("the plugin counted fewer steps than were made"))?);
    }
    if executed.len() != programs.len() || all.next().is_some() {
        return Err(wrong("the plugin counted more steps than were made"));
    }
    Ok(Measured { kernel: record.kernel.clone(), programs: executed })
}

#[cfg(test)]
mod tests {
    use super::super::super::random::grammar;
    use super::super::super::script::tests::check;
    use super::*;

    #[test]
    fn the_script_parses_and_runs_each_program() {
        let programs: Vec<_> = (0..20).map(grammar::program).collect();
        let script = text(&programs);
        check(&script);
        assert_eq!(script.matches("/bin/random /programs/").count(), 20);
        let large = programs.iter().filter(|program| program.folio != FolioSize::BASE).count();
        assert_eq!(script.matches("choose always").count(), large);
    }

    #[test]
    fn steps_get_results_and_counts_in_order() {
        let program = grammar::program(1);
        let count = program.steps.len();
        let results: Vec<_> = (0..count).map(|number| number.to_string()).collect();
        let mut text =
            format!("results {}\nphase\t{}\n", results.join(" "), counts::NAMES.join("\t"));
        for number in 0..count {
            text += &format!("160\t{}{}\n", 100 + number, "\t0".repeat(counts::NAMES.len() - 1));
        }
        let record = Record { kernel: "Kernel 1".to_owned(), counts: text.clone() };
        let found = measured(&record, std::slice::from_ref(&program)).unwrap();
        let kernel = |step: usize| found.programs[0][step].counts.of(counts::Counter::Kernel);
        assert_eq!((found.programs[0][3].result, kernel(3)), (3, 103));
        let short = text.trim_end().rsplit_once('\n').unwrap().0.to_owned() + "\n";
        let record = Record { kernel: "Kernel 1".to_owned(), counts: short };
        assert!(measured(&record, &[program]).is_err());
    }
}
