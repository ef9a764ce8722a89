//! `bindery compare conflicts`: the cache lines that the same operation on two CPUs shares, in our
//! kernel and in Linux.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use bindery_cli::guest::initramfs::EXECUTABLE;
use bindery_cli::guest::machine::Plugin;
use bindery_cli::guest::{Architecture, Problem, busybox, workspace};

use super::guests::{self, Kernel};
use super::profile::Symbols;
use super::script::{BEGIN, TO_HOST, failed, host_lines};
use super::{ours, programs, working_set};
use crate::bench::conflicts::{Pair, Sharing, TABLE, Word, committed_row, figure, median, pairs};
use crate::output::show;
use crate::plugin::{self, Emulator};
use crate::size::MIB;

/// The workload, and its source under `programs/workloads`.
const WORKLOAD: &str = "conflicts";

/// The repetitions of an operation that fill caches; their lines do not count.
const WARM: usize = 10;
/// The CPUs of the machines.
const CPUS: u32 = 2;
/// The memory of the machines.
const MEMORY: u64 = 512 * MIB;
/// A machine that takes longer counts as hung.
const TIMEOUT: Duration = Duration::from_secs(20 * 60);

const HELP: &str = "\
What is measured
  A program makes a call on CPU 0, then the same call on CPU 1, never both at once. A plugin of QEMU
  records the loads and stores of the kernel between the marks of each call, by physical address. A
  figure is the median, over 50 repetitions, of the lines of 64 bytes that both calls touched and
  one of them wrote: those on which the calls would wait for each other at any number of CPUs.
  \"threads\": both CPUs run threads of one process; \"processes\": each runs its own.

The machines
  Two CPUs, of which QEMU runs one at a time, and a clock that counts instructions. So the same run
  gives the same figures. All folios are base pages.

What is not measured
  Waiting, the time that a lock is held, page walks, instruction fetches, interrupts of the other
  CPU. On AArch64 the instruction that clears a line is no store.

Exit status
  1 if Bindery's kernel has more lines than Linux in any row, or shares data in a row in which the
  library alone shares none (bindery bench conflicts)";

/// Count the cache lines that the calls of two CPUs share, one of them writing, beside Linux
#[derive(clap::Args)]
#[command(after_long_help = HELP, after_help = "More: bindery compare conflicts --help")]
pub struct Arguments {
    /// The architectures, separated by commas [default: all]
    #[arg(long, value_name = "ARCH", value_delimiter = ',')]
    arch: Vec<Architecture>,

    /// Do not run Linux
    #[arg(long)]
    no_linux: bool,

    /// Show the functions of Bindery's kernel that share data
    #[arg(long)]
    data: bool,
}

/// The lines of one kernel.
struct Figures {
    /// The operations in the order in which they ran.
    operations: Vec<(Sharing, String)>,
    /// The counted repetitions of each of them.
    repetitions: Vec<Vec<Pair>>,
}

/// Runs the workload on both kernels and prints a table for each architecture.
///
/// # Errors
/// If a requirement is missing, a machine failed, or Bindery has more lines than it may.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Problem> {
    let architectures = match &*arguments.arch {
        [] => Architecture::ALL.to_vec(),
        chosen => chosen.to_vec(),
    };
    let path = workspace::root()?.join(TABLE);
    let library = fs::read_to_string(&path).map_err(|error| Problem::io("read", &path, &error))?;
    let mut all = Vec::new();
    for architecture in architectures {
        all.extend(compare(arguments, architecture, &library)?);
    }
    match &*all {
        [] => Ok(ExitCode::SUCCESS),
        excess => Err(Problem::Failed(excess.join("\nerror: "))),
    }
}

/// Shows the table of one architecture. Returns what exceeds Linux or the library.
fn compare(
    arguments: &Arguments,
    architecture: Architecture,
    library: &str,
) -> Result<Vec<String>, Problem> {
    let emulator = Emulator::installed(architecture)?;
    let program = programs::build(architecture, WORKLOAD)?;
    let program_bytes =
        fs::read(&program.path).map_err(|error| Problem::io("read", &program.path, &error))?;
    let plugin = plugin::build(plugin::Plugin::Conflicts, &emulator)?;
    let measure = |kernel: &Kernel, name: &str| {
        let directory = guests::temporary_directory()?;
        let out = directory.path().join("pairs");
        let mut files = guests::file_system(&busybox::program(architecture)?)?;
        files.file(&format!("/bin/{WORKLOAD}"), EXECUTABLE, program_bytes.clone())?;
        files.file("/init", EXECUTABLE, script())?;
        let options = [&guests::CALM[..], &[guests::SAME_FRAMES]].concat();
        let mut machine = guests::machine(architecture, kernel, files, &options)?;
        machine.memory = MEMORY;
        machine.processors = CPUS;
        machine.timeout = Some(TIMEOUT);
        let arguments = vec![("out".to_owned(), out.clone().into())];
        machine.plugin = Some(Plugin { path: plugin.clone(), arguments });
        let console = guests::console(&machine, &format!("{WORKLOAD} on {name}, {architecture}"))?;
        let recorded =
            fs::read_to_string(&out).map_err(|error| Problem::io("read", &out, &error))?;
        Figures::read(&console, &recorded)
    };
    let kernel = ours(architecture)?;
    let bindery = measure(&kernel, "Bindery")?;
    let linux = working_set::linux(arguments.no_linux, architecture)?;
    let linux = linux.map(|kernel| measure(&kernel, "Linux")).transpose()?;
    let (version, linked) = (&emulator.version, &program.library);
    show(&format!(
        "\n{architecture}, QEMU {version} (TCG, {CPUS} CPUs, -icount), linked with {linked}\n\n{}",
        table(&bindery, linux.as_ref())
    ))?;
    if let (true, Kernel::Bindery { symbols, .. }) = (arguments.data, &kernel) {
        show(&data(&bindery, &Symbols::read(symbols)))?;
    }
    let named = |text: String| format!("{architecture}: {text}");
    Ok(excess(&bindery, linux.as_ref(), library).into_iter().map(named).collect())
}

/// The first program. Linux gets three seconds for the work that continues after its boot.
fn script() -> String {
    format!(
        "{BEGIN}$box sleep 3\n\
         /bin/{WORKLOAD}\n\
         echo \"{TO_HOST}status $?\"\n\
         $box poweroff -f\n"
    )
}

impl Figures {
    /// Reads the console of a machine that ran the [`script`], and the plugin's output.
    ///
    /// # Errors
    /// If the workload failed, or one of the two was not understood.
    fn read(console: &str, recorded: &str) -> Result<Self, Problem> {
        if host_lines(console).collect::<Vec<_>>() != ["status 0"] {
            return Err(failed("the machine ended before the workload did", console));
        }
        let mut recorded = pairs(recorded).map_err(Problem::Failed)?.into_iter();
        let mut figures = Self { operations: Vec::new(), repetitions: Vec::new() };
        let texts = console.lines().filter_map(|line| line.split_once("conflicts: "));
        for (_, text) in texts {
            let Some((sharing, name, rounds)) = parse(text.trim_end()) else {
                return Err(failed("the workload printed another line than expected", console));
            };
            let repetitions: Vec<Pair> = recorded.by_ref().take(rounds).skip(WARM).collect();
            if repetitions.len() + WARM != rounds {
                let text = format!("the plugin recorded too few repetitions of {name:?}");
                return Err(Problem::Failed(text));
            }
            if repetitions.iter().any(|pair| pair.touched.contains(&0)) {
                let text = format!("no access of the kernel was recorded for {name:?}");
                return Err(Problem::Failed(text));
            }
            figures.operations.push((sharing, name));
            figures.repetitions.push(repetitions);
        }
        if figures.operations.is_empty() || recorded.next().is_some() {
            return Err(failed("the workload printed other operations than it marked", console));
        }
        Ok(figures)
    }

    /// The median of an operation's lines; `None` if it did not run so.
    fn lines(&self, sharing: Sharing, name: &str) -> Option<f64> {
        self.lines_that(sharing, name, |_| true)
    }

    /// As [`Figures::lines`], without the lines that conflict by layout only: the calls use
    /// different words of them.
    fn shared_lines(&self, sharing: Sharing, name: &str) -> Option<f64> {
        self.lines_that(sharing, name, |line| line.iter().any(Word::conflicts))
    }

    fn lines_that(
        &self,
        sharing: Sharing,
        name: &str,
        counts: impl Fn(&[Word]) -> bool,
    ) -> Option<f64> {
        let is_wanted = |(found, other): &(Sharing, String)| *found == sharing && other == name;
        let at = self.operations.iter().position(is_wanted)?;
        let lines = |pair: &Pair| pair.lines.iter().filter(|line| counts(line)).count() as f64;
        Some(median(self.repetitions[at].iter().map(lines)))
    }

    /// The names of the operations, each once.
    fn names(&self) -> Vec<&str> {
        let of = |wanted: Sharing| {
            let all = self.operations.iter();
            all.filter(move |(sharing, _)| *sharing == wanted).map(|(_, name)| name.as_str())
        };
        let mut names: Vec<&str> = of(Sharing::Threads).collect();
        let more: Vec<&str> = of(Sharing::Processes).filter(|name| !names.contains(name)).collect();
        names.extend(more);
        names
    }
}

/// `threads mmap, fixed: 60`
fn parse(text: &str) -> Option<(Sharing, String, usize)> {
    let (sharing, rest) = text.split_once(' ')?;
    let sharing = match sharing {
        "threads" => Sharing::Threads,
        "processes" => Sharing::Processes,
        _ => return None,
    };
    let (name, rounds) = rest.rsplit_once(": ")?;
    let rounds = rounds.parse().ok().filter(|rounds| *rounds > WARM)?;
    Some((sharing, name.to_owned(), rounds))
}

const SHARINGS: [Sharing; 2] = [Sharing::Threads, Sharing::Processes];

/// A line for each operation, with Linux's figures if it ran.
fn table(bindery: &Figures, linux: Option<&Figures>) -> String {
    let mut text = format!(
        "{:30}{:>17}{:>18}\n{:30}{:>9}{:>8}{:>10}{:>8}\n",
        "", "threads", "processes", "lines of conflict", "Bindery", "Linux", "Bindery", "Linux"
    );
    for name in bindery.names() {
        let of = |sharing| {
            let theirs = linux.and_then(|linux| linux.lines(sharing, name));
            format!("{:>9}{:>8}", figure(bindery.lines(sharing, name)), figure(theirs))
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:30}{} {}", of(Sharing::Threads), of(Sharing::Processes));
    }
    text
}

/// The functions of the kernel that share data: for each operation, the mean of their lines.
fn data(bindery: &Figures, symbols: &Symbols<'_>) -> String {
    let mut text = String::new();
    for ((sharing, name), repetitions) in bindery.operations.iter().zip(&bindery.repetitions) {
        let mut sums = BTreeMap::<&str, u32>::new();
        for line in repetitions.iter().flat_map(|pair| &pair.lines) {
            let word = line.iter().find(|word| word.conflicts()).unwrap_or(&line[0]);
            *sums.entry(symbols.at(word.instruction())).or_default() += 1;
        }
        // A tick of the clock in one repetition is none of the operation's.
        sums.retain(|_, sum| *sum as usize * 4 >= repetitions.len());
        if !sums.is_empty() {
            let _ = writeln!(text, "\n{sharing}: {name}");
        }
        for (function, sum) in sums {
            let mean = f64::from(sum) / repetitions.len() as f64;
            let _ = writeln!(text, "  {mean:5.1}  {function}");
        }
    }
    text
}

/// The rows in which the kernel has more lines than Linux, or shares data where the library shares
/// none.
fn excess(bindery: &Figures, linux: Option<&Figures>, library: &str) -> Vec<String> {
    let mut excess = Vec::new();
    for name in bindery.names() {
        let alone = committed_row(library, name);
        if alone.is_none() {
            excess.push(format!("{name}: the library has no such row in {TABLE}"));
        }
        for (column, sharing) in SHARINGS.into_iter().enumerate() {
            let Some(lines) = bindery.lines(sharing, name) else { continue };
            let theirs = linux.and_then(|linux| linux.lines(sharing, name));
            if theirs.is_some_and(|theirs| lines > theirs) {
                let text = format!("{name}, {sharing}: {} lines, Linux ", figure(Some(lines)));
                excess.push(text + &figure(theirs));
            }
            let shared = bindery.shared_lines(sharing, name).unwrap_or_default();
            if shared > 0.0 && alone.and_then(|row| row[column]) == Some(0.0) {
                let text = format!(
                    "{name}, {sharing}: {} lines with data of both CPUs, the library has none",
                    figure(Some(shared))
                );
                excess.push(text);
            }
        }
    }
    excess
}

#[cfg(test)]
mod tests {
    use super::super::script::tests::check;
    use super::*;

    /// Eleven repetitions, of which one counts, with this many lines.
    fn recorded(lines: u64) -> String {
        let words: String = (0..lines).map(|n| format!("word {:x} 0 5 7 0\n", n * 64)).collect();
        format!("pair 3 3 1 1\n{words}").repeat(WARM + 1)
    }

    const CONSOLE: &str = "noise\r\nconflicts: threads brk: 11\r\n\
        [ 9.9] conflicts: processes brk: 11\r\nconflicts: processes fork: 11\r\n\
        compare: status 0\r\n";

    fn figures(threads: u64, processes: u64, fork: u64) -> Figures {
        let recorded = [threads, processes, fork].map(recorded).concat();
        Figures::read(CONSOLE, &recorded).unwrap()
    }

    #[test]
    fn each_operation_has_a_line() {
        let ours = figures(3, 0, 1);
        assert_eq!(ours.names(), ["brk", "fork"]);
        let text = table(&ours, Some(&figures(4, 0, 94)));
        let words = |line: usize| text.lines().nth(line).unwrap().split_whitespace().collect();
        let [brk, fork]: [Vec<&str>; 2] = [words(2), words(3)];
        assert_eq!(
            (&*brk, &*fork),
            (&["brk", "3", "4", "0", "0"][..], &["fork", "-", "-", "1", "94"][..])
        );
        let widths: Vec<usize> = text.lines().skip(1).map(str::len).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "{text}");
        let symbols = Symbols::read("4 first\n6 second\n");
        let data = data(&ours, &symbols);
        assert!(data.contains("threads: brk\n    3.0  first\n"), "{data}");
        assert!(!data.contains("processes: brk"), "{data}");
    }

    #[test]
    fn more_than_linux_or_the_library_is_excess() {
        let library = "header\n----\nbrk   3   0   3   0   7\nfork   -   1   -   1   7\n";
        let ours = figures(3, 0, 1);
        assert!(excess(&ours, Some(&figures(3, 0, 94)), library).is_empty());
        assert_eq!(
            excess(&ours, Some(&figures(2, 0, 94)), library),
            ["brk, threads: 3 lines, Linux 2"]
        );
        let found = excess(&figures(3, 2, 1), None, library);
        let text = "brk, processes: 2 lines with data of both CPUs, the library has none";
        assert_eq!(found, [text]);
        assert_eq!(excess(&ours, None, "header\n----\nbrk   3   0   3   0   7\n").len(), 1);
        let by_layout = "pair 3 3 1 1\nword 0 0 5 0 0\nword 8 0 0 7 0\n".repeat(WARM + 1);
        let all = [recorded(3), by_layout, recorded(1)].concat();
        let ours = Figures::read(CONSOLE, &all).unwrap();
        assert_eq!(ours.lines(Sharing::Processes, "brk"), Some(1.0));
        assert!(excess(&ours, None, library).is_empty());
        assert_eq!(excess(&ours, Some(&figures(3, 0, 94)), library).len(), 1);
    }

    #[test]
    fn an_incomplete_run_has_no_figures() {
        let all = [1, 1, 1].map(recorded).concat();
        assert!(Figures::read(CONSOLE, &all).is_ok());
        assert!(Figures::read(CONSOLE, &recorded(1).repeat(2)).is_err());
        assert!(Figures::read(CONSOLE, &recorded(1).repeat(4)).is_err());
        assert!(Figures::read(CONSOLE, &all.replace("pair 3 3", "pair 3 0")).is_err());
        for (from, to) in [
            ("status 0", "status 1"),
            ("threads brk: 11", "threads brk: 10"),
            ("processes brk", "both brk"),
        ] {
            assert!(Figures::read(&CONSOLE.replace(from, to), &all).is_err(), "{to}");
        }
    }

    #[test]
    fn the_script_parses() {
        check(&script());
    }
}
