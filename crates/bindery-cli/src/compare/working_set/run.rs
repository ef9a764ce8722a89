//! The runs of the workload in one boot of a machine: their script, and the report on the console.

use std::fmt::{self, Write};

use bindery_cli::guest::Problem;
use bindery_hosted::Pattern;
use clap::ValueEnum;

use super::super::script::{BEGIN, LOAD_SWAP, SWAP_MODULES, TO_HOST, failed, host_lines};
use crate::size::{KIB, MIB};

/// The workload, and its source under `programs/workloads`.
pub const WORKLOAD: &str = "working_set";

/// The average number of visits of each page.
const PASSES: u64 = 1;

/// The order in which a process visits its pages, and their kind of memory.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub enum Order {
    /// one after the other
    #[value(name = "sequential")]
    Sequential,
    /// at random
    #[value(name = "random")]
    Random,
    /// 80 % of the visits are to a fifth of the pages
    #[value(name = "80-20")]
    Hot80,
    /// 95 % of the visits are to a fifth of the pages
    #[value(name = "95-20")]
    Hot95,
    /// by Zipf's law
    #[value(name = "zipf")]
    Zipf,
    /// a fifth is visited at random, and the rest in order
    #[value(name = "scan")]
    Scan,
    /// at random, in shared memory
    #[value(name = "shared")]
    Shared,
}

impl Order {
    /// All orders.
    pub const ALL: [Self; 7] = [
        Self::Sequential,
        Self::Random,
        Self::Hot80,
        Self::Hot95,
        Self::Zipf,
        Self::Scan,
        Self::Shared,
    ];

    fn pattern(self) -> Pattern {
        match self {
            Self::Sequential => Pattern::Sequential,
            Self::Random | Self::Shared => Pattern::Random,
            Self::Hot80 => Pattern::Hot80,
            Self::Hot95 => Pattern::Hot95,
            Self::Zipf => Pattern::Zipf,
            Self::Scan => Pattern::Scan,
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.pad(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// One run of the workload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// Bytes of the working set.
    pub size: u64,
    pub order: Order,
    pub processes: u64,
    pub seed: u64,
}

/// The maximum number of processes, by which the workload multiplies its seed.
const MOST_PROCESSES: u64 = 16;

impl Run {
    fn command(&self) -> String {
        let Self { size, order, processes, seed } = self;
        let options = options(*size);
        format!("/bin/{WORKLOAD} {options} --processes {processes} --seed {seed} --pattern {order}")
    }

    /// The pages that the run touches, if only one process runs.
    pub fn trace(&self) -> Option<Vec<u64>> {
        let pages = self.size / (4 * KIB);
        let seed = self.seed * MOST_PROCESSES;
        (self.processes == 1).then(|| self.order.pattern().trace(pages, PASSES, seed).collect())
    }
}

/// The options of all runs.
pub fn options(size: u64) -> String {
    format!("--mib {} --passes {PASSES} --swap --moved --verify", size / MIB)
}

/// Linux's two algorithms for choosing pages to evict.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lists {
    /// The kernel has no choice.
    Own,
    /// The multi-generational LRU.
    Generations,
    /// An active and an inactive list.
    Classic,
}

impl Lists {
    /// The word that selects the algorithm, and the words with which a shell checks the selection.
    /// The file shows all enabled parts of the generations, which differ between processors: 7, or
    /// less if the MMU records no accessed bits in entries for tables.
    fn setting(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Own => None,
            Self::Generations => Some(("y", "grep -qvx 0x0000")),
            Self::Classic => Some(("n", "grep -qx 0x0000")),
        }
    }
}

/// The report of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moved {
    /// Pages read from the swap device.
    pub into_memory: u64,
    /// Pages written to the swap device.
    pub out: u64,
    /// Frames that held pages of the working set during the visits, on average.
    pub frames: u64,
    /// Instructions of the kernel: all instructions minus the program's own, as measured with all
    /// pages in memory.
    pub kernel: u64,
}

impl Moved {
    pub fn all(self) -> u64 {
        self.into_memory + self.out
    }
}

/// The report of a machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Told {
    /// The kernel's own name.
    pub kernel: String,
    /// The report of each run, in the order of the script.
    pub moved: Vec<Moved>,
}

/// The first program of both kernels: all runs with each of the lists. The files of the modules are
/// deleted, because they would take memory from the workload. Each run sets up a new swap area.
pub fn script(runs: &[Run], lists: &[Lists]) -> String {
    let mut text = format!(
        "{BEGIN}{LOAD_SWAP}\n\
         $box rm -rf {SWAP_MODULES}\n\
         $box sleep 3\n\
         echo \"{TO_HOST}kernel $($box uname -srv)\"\n"
    );
    for lists in lists {
        if let Some((setting, is_in_force)) = lists.setting() {
            let _ = writeln!(
                text,
                "echo {setting} > /sys/kernel/mm/lru_gen/enabled\n\
                 $box {is_in_force} /sys/kernel/mm/lru_gen/enabled || \
                 echo \"{TO_HOST}refused {setting} > lru_gen/enabled\""
            );
        }
        for run in runs {
            let _ = writeln!(text, "{}\necho \"{TO_HOST}status $?\"", run.command());
        }
    }
    text + "$box poweroff -f\n"
}

/// Reads the console of a machine that ran a [`script`] with this number of runs.
///
/// # Errors
/// If a setting was refused, or a run failed, read wrong contents, or did not end.
pub fn judge(console: &str, runs: usize) -> Result<Told, Problem> {
    let (mut kernel, mut succeeded) = (None, 0);
    for line in host_lines(console) {
        match line.split_once(' ') {
            Some(("kernel", name)) => kernel = Some(name.to_owned()),
            Some(("status", "0")) => succeeded += 1,
            _ => return Err(failed(line, console)),
        }
    }
    let moved: Vec<Moved> = console.lines().filter_map(moved).collect();
    let verified = console.matches("contents are right").count();
    match kernel {
        Some(kernel) if [succeeded, verified, moved.len()] == [runs; 3] => {
            Ok(Told { kernel, moved })
        }
        _ => Err(failed("the machine ended before the workload did", console)),
    }
}

/// `working_set: 10 pages came back, 20 went out, 30 in all, in 40 frames; 60 ns, and 50 ns`
fn moved(line: &str) -> Option<Moved> {
    let (_, line) = line.split_once("working_set: ")?;
    let (into_memory, line) = line.split_once(" pages came back, ")?;
    let (out, line) = line.split_once(" went out, ")?;
    let (_, line) = line.split_once(" in all, in ")?;
    let (frames, line) = line.split_once(" frames; ")?;
    let (took, line) = line.split_once(" ns, and ")?;
    let (again, _) = line.split_once(" ns")?;
    let number = |text: &str| text.parse::<u64>().ok();
    // The clock advances one nanosecond per instruction.
    let kernel = number(took)?.saturating_sub(number(again)?);
    Some(Moved {
        into_memory: number(into_memory)?,
        out: number(out)?,
        frames: number(frames)?,
        kernel,
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use bindery_cli::guest::{process, workspace};

    use super::super::super::script::tests::check;
    use super::*;

    const RUN: Run = Run { size: 64 * MIB, order: Order::Random, processes: 4, seed: 2 };

    const GOOD: &str = "[ 0.1] noise\r\ncompare: kernel Linux 7.2.13 #1\r\n\
        working_set: contents are right after 1 passes\r\n\
        [ 9.9] working_set: 10 pages came back, 20 went out, 30 in all, in 40 frames; 60 ns, and 50 ns\r\n\
        compare: status 0\r\n";

    #[test]
    fn a_successful_run_reports_pages_and_frames() {
        let told = judge(GOOD, 1).unwrap();
        assert_eq!(told.kernel, "Linux 7.2.13 #1");
        let [moved] = told.moved[..] else { panic!("{told:?}") };
        assert_eq!((moved.into_memory, moved.out, moved.all(), moved.frames), (10, 20, 30, 40));
        assert_eq!(moved.kernel, 10);
        let (_, run) = GOOD.split_once("#1\r\n").unwrap();
        assert_eq!(judge(&format!("{GOOD}{run}"), 2).unwrap().moved, [moved; 2]);
    }

    #[test]
    fn anything_less_is_a_failure() {
        for (from, to) in [
            ("status 0", "status 1"),
            ("compare: status 0", ""),
            ("contents are right", "page 7, word 3 is 0"),
            ("20 went out", "some went out"),
            ("in 40 frames", "in many frames"),
            ("60 ns", "no time"),
            ("compare: kernel", "kernel"),
            ("[ 0.1] noise", "compare: refused swapon"),
        ] {
            let console = GOOD.replace(from, to);
            assert_ne!(console, GOOD);
            assert!(judge(&console, 1).is_err(), "{to}");
        }
        assert!(judge(GOOD, 2).is_err(), "a run is missing");
    }

    #[test]
    fn the_script_parses_and_makes_all_runs() {
        let wanted = "/bin/working_set --mib 64 --passes 1 --swap --moved --verify \
                      --processes 4 --seed 2 --pattern random\n";
        let text = script(&[RUN], &[Lists::Own]);
        assert!(text.contains(wanted) && !text.contains("lru_gen"), "{text}");
        check(&text);
        let runs = [RUN, Run { order: Order::Hot80, ..RUN }];
        let text = script(&runs, &[Lists::Generations, Lists::Classic]);
        assert_eq!(text.matches("--pattern 80-20\n").count(), 2, "{text}");
        let place = |word: &str| text.find(word).unwrap();
        assert!(place("echo y") < place("echo n"), "{text}");
        check(&text);
    }

    /// The patterns are implemented separately in C and in Rust.
    #[test]
    fn the_program_visits_the_pages_of_the_trace() {
        let root = workspace::root().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join(WORKLOAD);
        let source = root.join(format!("programs/workloads/{WORKLOAD}.c"));
        let mut compiler = Command::new("cc");
        compiler.arg("-I").arg(root.join("programs/include")).arg(source).arg("-o").arg(&program);
        process::output(&mut compiler).unwrap();
        for order in Order::ALL {
            let run = Run { size: 3 * MIB, order, processes: 1, seed: 7 };
            let mut command = Command::new(&program);
            command.args(["--trace", "--mib", "3", "--passes", "1", "--seed", "7"]);
            let visited = process::output(command.args(["--pattern", &order.to_string()])).unwrap();
            let visited: Vec<u64> = visited.lines().map(|page| page.parse().unwrap()).collect();
            let trace = run.trace().unwrap();
            let pages = trace.len() / 3;
            assert_eq!(visited, trace[pages..2 * pages], "{order}");
        }
    }
}
