//! One run of the workload: the script that makes it, and what its console tells.

use std::fmt;

use bindery_cli::guest::Problem;
use clap::ValueEnum;

use super::super::script::{BEGIN, LOAD_SWAP, SWAP_MODULES, TO_HOST, failed, told};
use crate::size::{KIB, MIB};

/// The workload, and its source under `programs/workloads`.
pub const WORKLOAD: &str = "working_set";

/// In which order the pages of a process are visited.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub enum Order {
    /// one after the other
    #[value(name = "sequential")]
    Sequential,
    /// at random
    #[value(name = "random")]
    Random,
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Sequential => "sequential",
            Self::Random => "random",
        })
    }
}

/// What a machine runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// Bytes of the working set.
    pub size: u64,
    pub order: Order,
    pub processes: u64,
    pub seed: u64,
}

impl Run {
    /// The workload's command line, which makes the swap area too.
    fn command(&self) -> String {
        let Self { size, order, processes, seed } = self;
        let random = match order {
            Order::Sequential => "",
            Order::Random => " --random",
        };
        format!("/bin/{WORKLOAD} {} --processes {processes} --seed {seed}{random}", options(*size))
    }
}

/// The options that all runs have.
pub fn options(size: u64) -> String {
    format!("--mib {} --passes 1 --swap --moved --verify", size / MIB)
}

/// The pages that went between memory and the swap device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moved {
    pub into_memory: u64,
    pub out: u64,
}

impl Moved {
    pub fn all(self) -> u64 {
        self.into_memory + self.out
    }
}

/// What a machine has told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Told {
    /// The kernel, as it names itself.
    pub kernel: String,
    /// Bytes that were available (`MemAvailable`) when the workload began.
    pub available: u64,
    /// None where nothing was run.
    pub moved: Option<Moved>,
}

/// The first program of both kernels. It has a run of the workload, or only tells how much memory
/// there is. The modules' files would take memory from the workload.
pub fn script(run: Option<Run>) -> String {
    let command = run.map_or_else(|| "true".to_owned(), |run| run.command());
    format!(
        "{BEGIN}{LOAD_SWAP}\n\
         $box rm -rf {SWAP_MODULES}\n\
         $box sleep 3\n\
         echo \"{TO_HOST}kernel $($box uname -srv)\"\n\
         echo \"{TO_HOST}$($box grep MemAvailable /proc/meminfo)\"\n\
         {command}\n\
         echo \"{TO_HOST}status $?\"\n\
         $box poweroff -f\n"
    )
}

/// Reads the console of a machine that ran [`script`].
///
/// # Errors
/// A setting was refused; or the workload failed, did not find what it wrote, or did not come to
/// its end.
pub fn judge(console: &str, run: Option<Run>) -> Result<Told, Problem> {
    let (mut kernel, mut available, mut succeeded) = (None, None, false);
    for line in told(console) {
        match line.split_once(' ') {
            Some(("kernel", name)) => kernel = Some(name.to_owned()),
            Some(("MemAvailable:", size)) => available = kibibytes(size),
            Some(("status", "0")) => succeeded = true,
            _ => return Err(failed(line, console)),
        }
    }
    let moved = console.lines().find_map(moved);
    let verified = console.contains("contents are right");
    match (kernel, available, moved, run) {
        (Some(kernel), Some(available), _, None) if succeeded => {
            Ok(Told { kernel, available, moved: None })
        }
        (Some(kernel), Some(available), Some(moved), Some(_)) if succeeded && verified => {
            Ok(Told { kernel, available, moved: Some(moved) })
        }
        _ => Err(failed("it did not come to its end", console)),
    }
}

/// `480524 kB`, in bytes.
fn kibibytes(text: &str) -> Option<u64> {
    text.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(KIB)
}

/// `working_set: 10 pages came back, 20 went out, 30 in all`
fn moved(line: &str) -> Option<Moved> {
    let (_, line) = line.split_once("working_set: ")?;
    let (into_memory, line) = line.split_once(" pages came back, ")?;
    let (out, _) = line.split_once(" went out, ")?;
    Some(Moved { into_memory: into_memory.parse().ok()?, out: out.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::super::super::script::tests::check;
    use super::*;

    const RUN: Run = Run { size: 64 * MIB, order: Order::Random, processes: 4, seed: 2 };

    const GOOD: &str = "[ 0.1] noise\r\ncompare: kernel Linux 7.2.13 #1\r\n\
        compare: MemAvailable:     480524 kB\r\n\
        working_set: contents are right after 1 passes\r\n\
        [ 9.9] working_set: 10 pages came back, 20 went out, 30 in all\r\n\
        compare: status 0\r\n";

    #[test]
    fn a_run_that_succeeds_tells_how_many_pages_it_moved() {
        let told = judge(GOOD, Some(RUN)).unwrap();
        assert_eq!((&*told.kernel, told.available), ("Linux 7.2.13 #1", 480_524 * KIB));
        let moved = told.moved.unwrap();
        assert_eq!((moved.into_memory, moved.out, moved.all()), (10, 20, 30));
    }

    #[test]
    fn a_machine_without_a_run_tells_its_memory() {
        let bare: String = GOOD
            .lines()
            .filter(|line| !line.contains("working_set"))
            .collect::<Vec<_>>()
            .join("\n");
        assert_eq!(judge(&bare, None).unwrap().moved, None);
        assert!(judge(&bare, Some(RUN)).is_err());
    }

    #[test]
    fn anything_less_is_a_failure() {
        for (from, to) in [
            ("status 0", "status 1"),
            ("compare: status 0", ""),
            ("contents are right", "page 7, word 3 is 0"),
            ("20 went out", "some went out"),
            ("480524 kB", "much"),
            ("compare: kernel", "kernel"),
            ("[ 0.1] noise", "compare: refused swapon"),
        ] {
            let console = GOOD.replace(from, to);
            assert_ne!(console, GOOD);
            assert!(judge(&console, Some(RUN)).is_err(), "{to}");
        }
    }

    #[test]
    fn the_script_is_one_for_a_shell_and_runs_the_workload_in_the_order_wanted() {
        let wanted = "/bin/working_set --mib 64 --passes 1 --swap --moved --verify \
                      --processes 4 --seed 2 --random\n";
        let text = script(Some(RUN));
        assert!(text.contains(wanted), "{text}");
        check(&text);
        let text = script(Some(Run { order: Order::Sequential, ..RUN }));
        assert!(!text.contains("--random"), "{text}");
        let text = script(None);
        assert!(!text.contains("/bin/working_set"), "{text}");
        check(&text);
    }
}
