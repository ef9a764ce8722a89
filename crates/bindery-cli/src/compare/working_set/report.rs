//! A line for each run, and a line for the median of each kind of run.

use std::fmt::{self, Write};

use bindery_cli::guest::Architecture;

use super::machines::Booted;
use super::run::{Moved, Order, Run, WORKLOAD, options};
use crate::output::thousands;
use crate::size::MIB;

/// A run on one kernel.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    pub run: Run,
    pub kernel: &'static str,
    pub moved: Moved,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Run { order, processes, seed, .. } = self.run;
        let Moved { into_memory, out, frames } = self.moved;
        let all = self.moved.all();
        let [into_memory, out, all, frames] = [into_memory, out, all, frames].map(thousands);
        let kernel = self.kernel;
        writeln!(
            f,
            "{order:10} {processes:>10} {seed:>5}  {kernel:8} {into_memory:>10} {out:>10} {all:>10} \
             {frames:>10}"
        )
    }
}

/// What was run, and the head of the lines.
pub fn heading(
    architecture: Architecture,
    emulator: &str,
    library: &str,
    size: u64,
    kernels: &[Booted],
) -> String {
    let mut text = format!(
        "\n{architecture}, QEMU {emulator} (TCG, one CPU, -icount), linked with {library}\n\
         {WORKLOAD} {} --processes N --seed N [--random]\n",
        options(size)
    );
    for Booted { name, version, memory, frames, .. } in kernels {
        let (memory, frames) = (*memory as f64 / MIB as f64, thousands(*frames));
        let _ = writeln!(text, "{name:8} {memory:.1} MiB, {frames} frames; {version}");
    }
    text + "\npages moved, and the frames in which the working set was meanwhile\n\
            order       processes  seed  kernel           in        out     in all     frames\n"
}

/// For each kind of run the median of all seeds, and how many pages Bindery moved for each of
/// Linux's.
pub fn medians(lines: &[Line]) -> String {
    let mut text =
        "\nmedian pages moved\norder       processes  seeds     Bindery       Linux  ratio\n"
            .to_owned();
    let mut kinds: Vec<(Order, u64)> = Vec::new();
    for Line { run, .. } in lines {
        let kind = (run.order, run.processes);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    for (order, processes) in kinds {
        let of = |kernel: &str| -> Vec<u64> {
            let same = |line: &&Line| {
                line.kernel == kernel && (line.run.order, line.run.processes) == (order, processes)
            };
            lines.iter().filter(same).map(|line| line.moved.all()).collect()
        };
        let (ours, theirs) = (of("Bindery"), of("Linux"));
        let seeds = ours.len();
        let (ours, theirs) = (median(ours), median(theirs));
        let shown = |pages: Option<u64>| pages.map_or_else(|| "-".to_owned(), thousands);
        let ratio = ours.zip(theirs).filter(|(_, theirs)| *theirs > 0);
        let ratio = ratio.map(|(ours, theirs)| format!("{:.3}", ours as f64 / theirs as f64));
        let _ = writeln!(
            text,
            "{order:10} {processes:>10} {seeds:>6} {:>11} {:>11} {:>6}",
            shown(ours),
            shown(theirs),
            ratio.as_deref().unwrap_or("-")
        );
    }
    text
}

/// The middle of the numbers; of an even number of them, the mean of both in the middle.
fn median(mut numbers: Vec<u64>) -> Option<u64> {
    numbers.sort_unstable();
    let above = *numbers.get(numbers.len() / 2)?;
    let below = numbers[(numbers.len() - 1) / 2];
    Some(below.midpoint(above))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(order: Order, seed: u64, kernel: &'static str, out: u64) -> Line {
        let run = Run { size: MIB, order, processes: 4, seed };
        Line { run, kernel, moved: Moved { into_memory: 1_000, out, frames: 900 } }
    }

    #[test]
    fn a_line_is_as_wide_as_its_head() {
        let text = line(Order::Random, 2, "Bindery", 608_288).to_string();
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words, ["random", "4", "2", "Bindery", "1,000", "608,288", "609,288", "900"]);
        let head = heading(Architecture::X86_64, "7.2", "musl", MIB, &[]);
        assert_eq!(head.lines().last().unwrap().len(), text.trim_end().len());
    }

    #[test]
    fn medians_of_both_kernels_stand_beside_each_other() {
        let mut lines = Vec::new();
        for (seed, out) in [(1, 3_000), (2, 1_000), (3, 2_000)] {
            lines.push(line(Order::Sequential, seed, "Bindery", out));
            lines.push(line(Order::Sequential, seed, "Linux", out * 2));
        }
        lines.push(line(Order::Random, 1, "Bindery", 0));
        let text = medians(&lines);
        let rows: Vec<Vec<&str>> =
            text.lines().skip(3).map(|row| row.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["sequential", "4", "3", "3,000", "5,000", "0.600"]);
        assert_eq!(rows[1], ["random", "4", "1", "1,000", "-", "-"]);
    }

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![9, 1, 5]), Some(5));
        assert_eq!(median(vec![4, 1, 9, 2]), Some(3));
    }
}
