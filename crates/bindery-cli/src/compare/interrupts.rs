//! `bindery compare interrupts`: the interrupts of other CPUs by changes of a process' memory, as
//! both kernels count them in `/proc/interrupts`.
//!
//! On x86-64 only: AArch64 invalidates the TLBs of other CPUs without an interrupt.

use std::fmt::Write;
use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use bindery_cli::guest::initramfs::EXECUTABLE;
use bindery_cli::guest::{Architecture, Problem, busybox};

use super::guests::{self, Kernel};
use super::script::{BEGIN, TO_HOST, failed, host_lines};
use super::{ours, programs, working_set};
use crate::output::show;
use crate::plugin::Emulator;
use crate::size::MIB;

/// The workload, and its source under `programs/workloads`.
const WORKLOAD: &str = "interrupts";

/// The number of interrupts for each change that may be the kernel's own work beside it.
const OF_THE_KERNEL: f64 = 0.1;
/// The CPUs of the machines.
const CPUS: u32 = 4;
/// The memory of the machines.
const MEMORY: u64 = 512 * MIB;
/// A machine that takes longer counts as hung.
const TIMEOUT: Duration = Duration::from_secs(10 * 60);

const HELP: &str = "\
The workload
  A process stays on CPU 0 and changes its memory (64 KiB), again and again. Threads of its own run
  on 0, 1 or 3 other CPUs, in a loop without system calls, or have run there and sleep. `exit` ends
  a process with a thread on each CPU.

The machines
  Four CPUs, of which QEMU runs one at a time, and a clock that counts instructions. So the same run
  gives the same figures.

The table
  Interrupts for each change: those for a TLB flush, and all others (rescheduling, calls).

Exit status
  1 if Bindery sends more flushes than Linux for any change, or interrupts of any kind where no
  other CPU runs the process, but for threads that end. (0.1 more is taken for the kernel's own
  work.)";

/// Count the interrupts of other CPUs by changes of a process' memory, beside Linux
#[derive(clap::Args)]
#[command(after_long_help = HELP,
          after_help = "More: bindery compare interrupts --help")]
pub struct Arguments {
    /// The number of changes of each kind
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(8..=10_000))]
    rounds: u32,

    /// Do not run Linux
    #[arg(long)]
    no_linux: bool,
}

/// A line of the workload.
#[derive(Clone, PartialEq, Debug)]
struct Line {
    /// The change, the number of CPUs, and whether the other CPUs run the process.
    place: String,
    /// The number of interrupts for each change: flushes, and others.
    interrupts: [f64; 2],
}

/// Runs the workload on both kernels and prints a table.
///
/// # Errors
/// If a requirement is missing, a machine failed, or Bindery sends more interrupts than it may.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Problem> {
    let architecture = Architecture::X86_64;
    let emulator = Emulator::installed(architecture)?;
    let program = programs::build(architecture, WORKLOAD)?;
    let program_bytes =
        fs::read(&program.path).map_err(|error| Problem::io("read", &program.path, &error))?;
    let measure = |kernel: &Kernel, name: &str| {
        let mut files = guests::file_system(&busybox::program(architecture)?)?;
        files.file(&format!("/bin/{WORKLOAD}"), EXECUTABLE, program_bytes.clone())?;
        files.file("/init", EXECUTABLE, script(arguments.rounds))?;
        let mut machine = guests::machine(architecture, kernel, files, &guests::CALM)?;
        machine.memory = MEMORY;
        machine.processors = CPUS;
        machine.timeout = Some(TIMEOUT);
        let console = guests::console(&machine, &format!("{WORKLOAD} on {name}, {architecture}"))?;
        read(&console)
    };
    let bindery = measure(&ours(architecture)?, "Bindery")?;
    let linux = working_set::linux(arguments.no_linux, architecture)?;
    let linux = linux.map(|kernel| measure(&kernel, "Linux")).transpose()?;
    let (version, library) = (&emulator.version, &program.library);
    show(&format!(
        "\n{architecture}, QEMU {version} (TCG, {CPUS} CPUs, -icount), linked with {library}\n\
         {WORKLOAD} --rounds {}: interrupts for each change\n\n{}",
        arguments.rounds,
        table(&bindery, linux.as_deref())
    ))?;
    match &*excess(&bindery, linux.as_deref()) {
        [] => Ok(ExitCode::SUCCESS),
        excess => Err(Problem::Failed(excess.join("\nerror: "))),
    }
}

/// The first program. Linux gets three seconds for the work that continues after its boot.
fn script(rounds: u32) -> String {
    format!(
        "{BEGIN}$box sleep 3\n\
         /bin/{WORKLOAD} --rounds {rounds}\n\
         echo \"{TO_HOST}status $?\"\n\
         $box poweroff -f\n"
    )
}

/// Reads the console of a machine that ran the [`script`].
fn read(console: &str) -> Result<Vec<Line>, Problem> {
    if host_lines(console).collect::<Vec<_>>() != ["status 0"] {
        return Err(failed("the machine ended before the workload did", console));
    }
    let texts = console.lines().filter_map(|line| line.split_once("interrupts: "));
    let lines: Option<Vec<Line>> = texts.map(|(_, line)| parse(line.trim_end())).collect();
    lines
        .filter(|lines| !lines.is_empty())
        .ok_or_else(|| failed("the workload printed other lines than expected", console))
}

/// `munmap, 2 CPUs, running: 64 flushes and 0 others in 64`
fn parse(line: &str) -> Option<Line> {
    let (place, counts) = line.rsplit_once(": ")?;
    let (flushes, counts) = counts.split_once(" flushes and ")?;
    let (others, rounds) = counts.split_once(" others in ")?;
    let rounds = rounds.parse::<u32>().ok().filter(|rounds| *rounds > 0)?;
    let for_each = |count: &str| Some(f64::from(count.parse::<u32>().ok()?) / f64::from(rounds));
    Some(Line { place: place.to_owned(), interrupts: [for_each(flushes)?, for_each(others)?] })
}

/// A line for each change, with Linux's counts if it ran.
fn table(bindery: &[Line], linux: Option<&[Line]>) -> String {
    let mut text = format!(
        "{:28}{:>16}{:>17}\n{:28}{:>8}{:>8}{:>9}{:>8}\n",
        "", "flushes", "others", "change", "Bindery", "Linux", "Bindery", "Linux"
    );
    for line in bindery {
        let theirs = linux.and_then(|linux| find(linux, line));
        let [flushes, others] = [0, 1].map(|kind| {
            let theirs = theirs.map_or_else(|| "-".to_owned(), |line| shown(line.interrupts[kind]));
            format!("{:>8}{theirs:>8}", shown(line.interrupts[kind]))
        });
        let _ = writeln!(text, "{:28}{flushes} {others}", line.place);
    }
    text
}

fn find<'a>(lines: &'a [Line], line: &Line) -> Option<&'a Line> {
    lines.iter().find(|other| other.place == line.place)
}

fn shown(count: f64) -> String {
    format!("{count:.2}")
}

/// The places where Bindery interrupts other CPUs more than it may.
fn excess(bindery: &[Line], linux: Option<&[Line]>) -> Vec<String> {
    let mut excess = Vec::new();
    for line in bindery {
        let [flushes, others] = line.interrupts;
        if let Some(linux) = linux.and_then(|linux| find(linux, line))
            && flushes > linux.interrupts[0] + OF_THE_KERNEL
        {
            let theirs = shown(linux.interrupts[0]);
            excess.push(format!("{}: {} flushes, Linux {theirs}", line.place, shown(flushes)));
        }
        let runs_elsewhere = line.place.ends_with("running") && !line.place.contains(" 1 CPUs");
        let may = runs_elsewhere || line.place.starts_with("exit");
        if !may && flushes + others > OF_THE_KERNEL {
            let all = shown(flushes + others);
            excess.push(format!("{}: {all} interrupts, none is needed", line.place));
        }
    }
    excess
}

#[cfg(test)]
mod tests {
    use super::super::script::tests::check;
    use super::*;

    const GOOD: &str = "noise\r\ninterrupts: munmap, 1 CPUs, running: 0 flushes and 0 others in 64\r\n\
        [ 9.9] interrupts: munmap, 4 CPUs, running: 192 flushes and 16 others in 64\r\n\
        interrupts: exit, 4 CPUs, slept: 0 flushes and 24 others in 8\r\ncompare: status 0\r\n";

    #[test]
    fn each_change_has_a_line() {
        let lines = read(GOOD).unwrap();
        let interrupts: Vec<_> = lines.iter().map(|line| line.interrupts).collect();
        assert_eq!(interrupts, [[0.0, 0.0], [3.0, 0.25], [0.0, 3.0]]);
        let text = table(&lines, Some(&lines[..2]));
        let widths: Vec<usize> = text.lines().skip(1).map(str::len).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "{text}");
        let words: Vec<&str> = text.lines().nth(3).unwrap().split_whitespace().collect();
        assert_eq!(words, ["munmap,", "4", "CPUs,", "running", "3.00", "3.00", "0.25", "0.25"]);
        assert!(text.lines().nth(4).unwrap().ends_with("3.00       -"), "{text}");
    }

    #[test]
    fn a_failure_has_no_table() {
        for (from, to) in [
            ("status 0", "status 1"),
            ("compare: status 0", ""),
            ("192 flushes", "some flushes"),
            ("others in 8", "others in 0"),
        ] {
            let console = GOOD.replace(from, to);
            assert_ne!(console, GOOD);
            assert!(read(&console).is_err(), "{to}");
        }
        assert!(read("compare: status 0\r\n").is_err());
    }

    #[test]
    fn more_than_linux_or_without_need_is_excess() {
        let bindery = read(GOOD).unwrap();
        assert!(excess(&bindery, Some(&bindery)).is_empty() && excess(&bindery, None).is_empty());
        let fewer = read(&GOOD.replace("192", "185")).unwrap();
        let [found] = &excess(&bindery, Some(&fewer))[..] else { panic!("no excess") };
        assert_eq!(found, "munmap, 4 CPUs, running: 3.00 flushes, Linux 2.89");
        let idle = read(&GOOD.replace("0 others in 64", "7 others in 64")).unwrap();
        assert_eq!(
            excess(&idle, None),
            ["munmap, 1 CPUs, running: 0.11 interrupts, none is needed"]
        );
    }

    #[test]
    fn the_script_parses() {
        check(&script(64));
    }
}
