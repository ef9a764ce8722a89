//! The steps of both kernels side by side, sorted by ratio to Linux, highest first.

use std::collections::BTreeMap;

use bindery_cli::guest::Architecture;
use serde::Serialize;

use super::super::counts::{Counter, Counts};
use super::super::interpreter::Program;
use super::super::interpreter::machines::{Executed, Measured};
use super::super::interpreter::step::Class;
use super::dearer;
use crate::output::thousands;

/// A step counts as dearer if it takes more than this multiple of Linux's instructions.
pub const DEARER: f64 = 1.1;
/// Steps with fewer instructions on both kernels involve no real work of a kernel.
const LEAST: u64 = 100;

/// A step on both kernels.
#[derive(Debug, Serialize)]
pub struct Line {
    pub architecture: String,
    pub seed: u64,
    /// The step's index in the program.
    pub step: usize,
    pub class: Class,
    pub detail: String,
    pub folio_bytes: u64,
    /// Our instructions divided by Linux's.
    pub ratio: f64,
    /// The known reason why the step is dearer, if any.
    pub reason: Option<String>,
    pub bindery_result: i64,
    pub linux_result: i64,
    pub bindery: Counts<u64>,
    pub linux: Counts<u64>,
}

impl Line {
    fn new(
        architecture: Architecture,
        program: &Program,
        step: usize,
        ours: &Executed,
        linux: &Executed,
    ) -> Option<Self> {
        let instructions = |executed: &Executed| executed.counts.of(Counter::Kernel);
        let (mine, theirs) = (instructions(ours), instructions(linux));
        if mine < LEAST && theirs < LEAST {
            return None;
        }
        let made = &program.steps[step];
        let ratio = mine as f64 / theirs.max(1) as f64;
        Some(Self {
            architecture: architecture.name().to_owned(),
            seed: program.seed,
            step,
            class: made.class,
            detail: made.detail.clone(),
            folio_bytes: program.folio.bytes(),
            ratio,
            reason: (ratio > DEARER).then(|| dearer::reason(made.class.operation, ratio)).flatten(),
            bindery_result: ours.result,
            linux_result: linux.result,
            bindery: ours.counts,
            linux: linux.counts,
        })
    }

    /// Whether both kernels have the same result.
    pub fn agrees(&self) -> bool {
        self.bindery_result == self.linux_result
    }

    /// Whether the step is dearer than on Linux for an unknown reason.
    pub fn is_unexplained(&self) -> bool {
        self.agrees() && self.ratio > DEARER && self.reason.is_none()
    }
}

/// All steps of one architecture, dearest first.
pub fn lines(
    architecture: Architecture,
    programs: &[Program],
    ours: &Measured,
    linux: &Measured,
) -> Vec<Line> {
    let mut lines = Vec::new();
    for (program, (ours, linux)) in programs.iter().zip(ours.programs.iter().zip(&linux.programs)) {
        for (step, (ours, linux)) in ours.iter().zip(linux).enumerate() {
            lines.extend(Line::new(architecture, program, step, ours, linux));
        }
    }
    lines.sort_by(|one, other| other.ratio.total_cmp(&one.ratio));
    lines
}

/// The dearest steps, then each class of operations, then the steps whose results differ.
pub fn tables(lines: &[Line], worst: usize) -> String {
    let agreeing = || lines.iter().filter(|line| line.agrees());
    let mut text = String::from("ratio  Bindery        Linux          program:step  operation\n");
    for line in agreeing().take(worst) {
        let [ours, linux] =
            [&line.bindery, &line.linux].map(|counts| thousands(counts.of(Counter::Kernel)));
        let place = format!("{}:{}", line.seed, line.step);
        let Line { ratio, class, detail, .. } = line;
        let folios = line.folio_bytes / 1024;
        text += &format!(
            "{ratio:5.2}  {ours:>13}  {linux:>13}  {place:12}  {class}: {detail}, folios of {folios} KiB\n"
        );
        if let Some(reason) = &line.reason {
            text += &format!("{:48}known: {reason}\n", "");
        }
    }
    text += "\nratio   worst  dearer    steps  class (ratio of the sums of instructions)\n";
    for (class, sum) in classes(agreeing()) {
        let Sum { ours, linux, worst, dearer, steps } = sum;
        let ratio = ours as f64 / linux.max(1) as f64;
        text += &format!("{ratio:5.2}  {worst:6.2}  {dearer:6}  {steps:7}  {class}\n");
    }
    let differing: Vec<_> = lines.iter().filter(|line| !line.agrees()).collect();
    if !differing.is_empty() {
        text += "\nSteps whose results differ, Bindery's first; none of them is compared:\n";
    }
    for Line { seed, step, class, detail, bindery_result, linux_result, .. } in differing {
        text += &format!("{seed}:{step}  {class}: {detail}: {bindery_result}, {linux_result}\n");
    }
    text
}

#[derive(Clone, Copy, Default)]
struct Sum {
    ours: u64,
    linux: u64,
    worst: f64,
    dearer: usize,
    steps: usize,
}

/// The classes, dearest first.
fn classes<'a>(lines: impl Iterator<Item = &'a Line>) -> Vec<(Class, Sum)> {
    let mut sums: BTreeMap<Class, Sum> = BTreeMap::new();
    for line in lines {
        let sum = sums.entry(line.class).or_default();
        sum.ours += line.bindery.of(Counter::Kernel);
        sum.linux += line.linux.of(Counter::Kernel);
        sum.worst = sum.worst.max(line.ratio);
        sum.dearer += usize::from(line.ratio > DEARER);
        sum.steps += 1;
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    let ratio = |sum: &Sum| sum.ours as f64 / sum.linux.max(1) as f64;
    sums.sort_by(|(_, one), (_, other)| ratio(other).total_cmp(&ratio(one)));
    sums
}

/// The numbers of all steps and of dearer ones.
pub fn conclusion(lines: &[Line]) -> String {
    let agreeing = lines.iter().filter(|line| line.agrees()).count();
    let differing = lines.len() - agreeing;
    let dearer = lines.iter().filter(|line| line.agrees() && line.ratio > DEARER);
    let (known, unexplained): (Vec<_>, Vec<_>) = dearer.partition(|line| line.reason.is_some());
    let mut text = format!(
        "Of {agreeing} steps, {} take more than {DEARER} times Linux's instructions: {} for a known \
         reason, {} for none. {differing} steps have other results than on Linux.\n",
        known.len() + unexplained.len(),
        known.len(),
        unexplained.len(),
    );
    if let Some(first) = unexplained.first() {
        text += &format!(
            "Repeat one with: bindery compare random --arch {} --programs 1 --seed {}\n",
            first.architecture, first.seed
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::super::counts::tests::with_kernel;
    use super::super::grammar;
    use super::*;

    fn measured(program: &Program, kernel: impl Fn(usize) -> (i64, u64)) -> Measured {
        let steps = (0..program.steps.len()).map(|step| {
            let (result, instructions) = kernel(step);
            Executed { result, counts: with_kernel(instructions) }
        });
        Measured { kernel: "Kernel 1".to_owned(), programs: vec![steps.collect()] }
    }

    fn compared(ours: impl Fn(usize) -> (i64, u64)) -> Vec<Line> {
        let program = grammar::program(3);
        let linux = measured(&program, |_| (0, 1_000));
        let ours = measured(&program, ours);
        lines(Architecture::X86_64, &[program], &ours, &linux)
    }

    #[test]
    fn the_dearest_step_comes_first() {
        let lines = compared(|step| (0, 1_000 + step as u64));
        let last = grammar::program(3).steps.len() - 1;
        assert_eq!(lines[0].step, last);
        assert!(lines.iter().all(|line| !line.is_unexplained()));
    }

    #[test]
    fn an_unlisted_step_above_the_bound_is_unexplained() {
        let lines = compared(|step| (0, if step == 2 { 1_101 } else { 1_100 }));
        let unexplained: Vec<_> = lines.iter().filter(|line| line.is_unexplained()).collect();
        assert_eq!(unexplained.len(), 1);
        assert_eq!((unexplained[0].step, unexplained[0].seed), (2, 3));
        assert!(conclusion(&lines).contains("1 for none"), "{}", conclusion(&lines));
        assert!(conclusion(&lines).contains("--programs 1 --seed 3"));
    }

    #[test]
    fn steps_with_other_results_are_listed_apart() {
        let lines = compared(|step| if step == 1 { (-12, 9_000) } else { (0, 900) });
        assert!(lines.iter().all(|line| !line.is_unexplained()));
        assert!(tables(&lines, 5).contains(": -12, 0\n"), "{}", tables(&lines, 5));
        assert!(conclusion(&lines).contains("1 steps have other results"));
    }

    #[test]
    fn steps_without_kernel_work_are_left_out() {
        let program = grammar::program(3);
        let idle = measured(&program, |_| (0, 20));
        assert!(lines(Architecture::X86_64, &[program], &idle, &idle).is_empty());
    }
}
