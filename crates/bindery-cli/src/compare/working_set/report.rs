//! A line for each run, and a line for the medians of each kind of run.

use std::fmt::{self, Write};

use bindery_cli::guest::Architecture;
use bindery_hosted::fewest_moved;

use super::machines::Booted;
use super::run::{Lists, Moved, Order, Run, WORKLOAD, options};
use crate::output::thousands;
use crate::size::MIB;

/// A run on one kernel.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    pub run: Run,
    pub lists: Lists,
    pub moved: Moved,
}

/// The kernel's name in the tables.
const fn name(lists: Lists) -> &'static str {
    match lists {
        Lists::Own => "Bindery",
        Lists::Generations => "MGLRU",
        Lists::Classic => "classic",
    }
}

impl Line {
    /// The minimum number of pages moved with the same number of frames.
    fn fewest(&self) -> Option<u64> {
        let trace = self.run.trace()?;
        Some(fewest_moved(&trace, self.moved.frames).all())
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Run { order, processes, seed, .. } = self.run;
        let Moved { into_memory, out, frames, kernel } = self.moved;
        let all = self.moved.all();
        let [into_memory, out, all, frames] = [into_memory, out, all, frames].map(thousands);
        let (name, millions) = (name(self.lists), thousands(kernel / 1_000_000));
        write!(
            f,
            "{order:10} {processes:>10} {seed:>5}  {name:8} {into_memory:>10} {out:>10} {all:>10} \
             {frames:>10} {millions:>10}"
        )
    }
}

/// A description of the runs, and the heading of the lines.
pub fn heading(
    architecture: Architecture,
    emulator: &str,
    library: &str,
    size: u64,
    kernels: &[Booted],
) -> String {
    let mut text = format!(
        "\n{architecture}, QEMU {emulator} (TCG, one CPU, -icount), linked with {library}\n\
         {WORKLOAD} {} --processes N --seed N --pattern NAME\n",
        options(size)
    );
    for Booted { name, version, memory, frames, .. } in kernels {
        let (memory, frames) = (*memory as f64 / MIB as f64, thousands(*frames));
        let _ = writeln!(text, "{name:8} {memory:.1} MiB, {frames} frames; {version}");
    }
    text + "\npages moved, the frames in which the working set was meanwhile, and millions of \
            instructions\nof the kernel\n\
            order       processes  seed  kernel           in        out     in all     frames  \
            in kernel\n"
}

/// The figure of a median.
#[derive(Clone, Copy)]
enum Figure {
    Pages,
    Kernel,
}

impl Figure {
    fn of(self, line: &Line) -> u64 {
        match self {
            Self::Pages => line.moved.all(),
            Self::Kernel => line.moved.kernel,
        }
    }

    fn shown(self, value: u64) -> String {
        match self {
            Self::Pages => thousands(value),
            Self::Kernel => thousands(value / 1_000_000),
        }
    }
}

/// For each kind of run the medians of all seeds, and the ratios of pages moved and of kernel
/// instructions, Bindery to Linux. MIN is the minimum number of pages that any choice of victims
/// moves with the frames of Bindery's run.
pub fn medians(lines: &[Line]) -> String {
    let kinds = kinds(lines);
    let mut text = String::new();
    for (figure, head) in [
        (Figure::Pages, "median pages moved"),
        (Figure::Kernel, "median millions of instructions of the kernel"),
    ] {
        let _ = writeln!(
            text,
            "\n{head}\norder       processes  seeds     Bindery       MGLRU  ratio     classic  ratio\
             {}",
            if let Figure::Pages = figure { "         MIN  ratio" } else { "" }
        );
        for &(order, processes) in &kinds {
            let of = |lists: Lists| {
                let same = move |line: &&Line| {
                    line.lists == lists
                        && (line.run.order, line.run.processes) == (order, processes)
                };
                lines.iter().filter(same)
            };
            let median_of = |lists| median(of(lists).map(|line| figure.of(line)).collect());
            let seeds = of(Lists::Own).count();
            let ours = median_of(Lists::Own);
            let shown = |value: Option<u64>| {
                value.map_or_else(|| "-".to_owned(), |value| figure.shown(value))
            };
            let _ = write!(text, "{order:10} {processes:>10} {seeds:>6} {:>11}", shown(ours));
            let mut beside = |theirs: Option<u64>| {
                let ratio = ours.zip(theirs).filter(|(_, theirs)| *theirs > 0);
                let ratio =
                    ratio.map(|(ours, theirs)| format!("{:.3}", ours as f64 / theirs as f64));
                let ratio = ratio.as_deref().unwrap_or("-");
                let _ = write!(text, " {:>11} {ratio:>6}", shown(theirs));
            };
            beside(median_of(Lists::Generations));
            beside(median_of(Lists::Classic));
            if let Figure::Pages = figure {
                let fewest = of(Lists::Own).map(Line::fewest).collect::<Option<Vec<_>>>();
                beside(fewest.and_then(median));
            }
            text.push('\n');
        }
    }
    text
}

/// The kinds of runs.
fn kinds(lines: &[Line]) -> Vec<(Order, u64)> {
    let mut kinds = Vec::new();
    for Line { run, .. } in lines {
        let kind = (run.order, run.processes);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    kinds
}

/// The median of the numbers; for an even number of them, the mean of the two in the middle.
fn median(mut numbers: Vec<u64>) -> Option<u64> {
    numbers.sort_unstable();
    let above = *numbers.get(numbers.len() / 2)?;
    let below = numbers[(numbers.len() - 1) / 2];
    Some(below.midpoint(above))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(order: Order, processes: u64, seed: u64, lists: Lists, out: u64) -> Line {
        let run = Run { size: MIB, order, processes, seed };
        let moved = Moved { into_memory: 1_000, out, frames: 250, kernel: 1_000_000 * out };
        Line { run, lists, moved }
    }

    #[test]
    fn a_line_is_as_wide_as_its_head() {
        let text = line(Order::Random, 4, 2, Lists::Own, 608_288).to_string();
        let words: Vec<&str> = text.split_whitespace().collect();
        let expected =
            ["random", "4", "2", "Bindery", "1,000", "608,288", "609,288", "250", "608,288"];
        assert_eq!(words, expected);
        let head = heading(Architecture::X86_64, "7.2", "musl", MIB, &[]);
        assert_eq!(head.lines().last().unwrap().len(), text.len());
    }

    #[test]
    fn medians_of_both_kernels_stand_beside_each_other() {
        let mut lines = Vec::new();
        for (seed, out) in [(1, 3_000), (2, 1_000), (3, 2_000)] {
            lines.push(line(Order::Zipf, 4, seed, Lists::Own, out));
            lines.push(line(Order::Zipf, 4, seed, Lists::Generations, out * 2));
            lines.push(line(Order::Zipf, 4, seed, Lists::Classic, out / 2));
        }
        lines.push(line(Order::Random, 1, 1, Lists::Own, 0));
        let text = medians(&lines);
        let rows: Vec<Vec<&str>> =
            text.lines().map(|row| row.split_whitespace().collect()).collect();
        let pages = ["zipf", "4", "3", "3,000", "5,000", "0.600", "2,000", "1.500", "-", "-"];
        assert_eq!(rows[3], pages);
        // There are six more pages than frames, so at least six pages are swapped out and in.
        let least: u64 = rows[4][8].parse().unwrap();
        assert!((12..100).contains(&least), "{least}");
        assert_eq!(rows[4][..8], ["random", "1", "1", "1,000", "-", "-", "-", "-"]);
        assert_eq!(rows[8], ["zipf", "4", "3", "2,000", "4,000", "0.500", "1,000", "2.000"]);
    }

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![9, 1, 5]), Some(5));
        assert_eq!(median(vec![4, 1, 9, 2]), Some(3));
    }
}
