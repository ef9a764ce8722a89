//! One run of the workload: the script that makes it, and what its console tells.

use std::fmt;

use bindery_cli::guest::Problem;
use clap::ValueEnum;

use super::super::script::{BEGIN, LOAD_SWAP, SWAP_MODULES, TO_HOST, failed, told};
use crate::size::MIB;

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
    /// Frames that held pages of the working set during the visits, on average.
    pub frames: u64,
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
    pub moved: Moved,
}

/// The first program of both kernels. The modules' files would take memory from the workload.
pub fn script(run: Run) -> String {
    let command = run.command();
    format!(
        "{BEGIN}{LOAD_SWAP}\n\
         $box rm -rf {SWAP_MODULES}\n\
         $box sleep 3\n\
         echo \"{TO_HOST}kernel $($box uname -srv)\"\n\
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
pub fn judge(console: &str) -> Result<Told, Problem> {
    let (mut kernel, mut succeeded) = (None, false);
    for line in told(console) {
        match line.split_once(' ') {
            Some(("kernel", name)) => kernel = Some(name.to_owned()),
            Some(("status", "0")) => succeeded = true,
            _ => return Err(failed(line, console)),
        }
    }
    let moved = console.lines().find_map(moved);
    let verified = console.contains("contents are right");
    match (kernel, moved) {
        (Some(kernel), Some(moved)) if succeeded && verified => Ok(Told { kernel, moved }),
        _ => Err(failed("it did not come to its end", console)),
    }
}

/// `working_set: 10 pages came back, 20 went out, 30 in all, in 40 frames`
fn moved(line: &str) -> Option<Moved> {
    let (_, line) = line.split_once("working_set: ")?;
    let (into_memory, line) = line.split_once(" pages came back, ")?;
    let (out, line) = line.split_once(" went out, ")?;
    let (_, line) = line.split_once(" in all, in ")?;
    let (frames, _) = line.split_once(" frames")?;
    let number = |text: &str| text.parse().ok();
    Some(Moved { into_memory: number(into_memory)?, out: number(out)?, frames: number(frames)? })
}

#[cfg(test)]
mod tests {
    use super::super::super::script::tests::check;
    use super::*;

    const RUN: Run = Run { size: 64 * MIB, order: Order::Random, processes: 4, seed: 2 };

    const GOOD: &str = "[ 0.1] noise\r\ncompare: kernel Linux 7.2.13 #1\r\n\
        working_set: contents are right after 1 passes\r\n\
        [ 9.9] working_set: 10 pages came back, 20 went out, 30 in all, in 40 frames\r\n\
        compare: status 0\r\n";

    #[test]
    fn a_run_that_succeeds_tells_how_many_pages_it_moved_in_how_many_frames() {
        let told = judge(GOOD).unwrap();
        assert_eq!(told.kernel, "Linux 7.2.13 #1");
        let moved = told.moved;
        assert_eq!((moved.into_memory, moved.out, moved.all(), moved.frames), (10, 20, 30, 40));
    }

    #[test]
    fn anything_less_is_a_failure() {
        for (from, to) in [
            ("status 0", "status 1"),
            ("compare: status 0", ""),
            ("contents are right", "page 7, word 3 is 0"),
            ("20 went out", "some went out"),
            ("in 40 frames", "in many frames"),
            ("compare: kernel", "kernel"),
            ("[ 0.1] noise", "compare: refused swapon"),
        ] {
            let console = GOOD.replace(from, to);
            assert_ne!(console, GOOD);
            assert!(judge(&console).is_err(), "{to}");
        }
    }

    #[test]
    fn the_script_is_one_for_a_shell_and_runs_the_workload_in_the_order_wanted() {
        let wanted = "/bin/working_set --mib 64 --passes 1 --swap --moved --verify \
                      --processes 4 --seed 2 --random\n";
        let text = script(RUN);
        assert!(text.contains(wanted), "{text}");
        check(&text);
        let text = script(Run { order: Order::Sequential, ..RUN });
        assert!(!text.contains("--random"), "{text}");
        check(&text);
    }
}
