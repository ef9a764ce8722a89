//! Runs a script on several subjects and measures the cost of each phase.

use std::time::Instant;

use bindery::Counts;

use super::statistics::Summary;
use super::workload::{Call, Effort, Script};

/// Something that manages memory: the engine at one reach, or Linux.
pub trait Subject {
    /// Makes the call. An error describes why it was refused.
    fn perform(&mut self, call: Call) -> Result<(), String>;

    /// The work counted so far, if it is counted.
    fn tally(&self) -> Option<Tally>;
}

/// A subject, or the reason why it is missing.
pub type Candidate<'a> = Result<Box<dyn Subject + 'a>, String>;

/// Work on page tables and TLBs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// The engine's counts.
    pub counts: Counts,
    /// Invalidations only on the faulting CPU (RISC-V needs them after a first touch).
    pub local_invalidations: u64,
}

impl Tally {
    fn since(self, earlier: Self) -> Self {
        Self {
            counts: self.counts - earlier.counts,
            local_invalidations: self.local_invalidations - earlier.local_invalidations,
        }
    }
}

/// The costs of one phase for one subject, one for each run.
#[derive(Clone, Debug)]
pub struct Samples {
    nanoseconds: Vec<u64>,
    tally: Option<Tally>,
    steady: bool,
}

impl Samples {
    const NONE: Self = Self { nanoseconds: Vec::new(), tally: None, steady: true };

    fn push(&mut self, nanoseconds: u64, tally: Option<Tally>) {
        if !self.nanoseconds.is_empty() {
            self.steady &= tally == self.tally;
        }
        self.nanoseconds.push(nanoseconds);
        self.tally = tally;
    }

    /// A summary of the times; `None` without times.
    pub fn summary(&self) -> Option<Summary> {
        Summary::of(&self.nanoseconds)
    }

    /// The counts of the last call.
    pub fn tally(&self) -> Option<Tally> {
        self.tally
    }

    /// Whether every call had the same counts.
    pub fn steady(&self) -> bool {
        self.steady
    }
}

/// The costs of all phases of a script for one subject.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// One for each phase of the script.
    pub phases: Vec<Samples>,
    /// The reason why figures are missing, if any are.
    pub problem: Option<String>,
}

/// The clock and the cost of reading it, which is subtracted each time.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Nanoseconds between two consecutive readings.
    pub cost: u64,
}

impl Clock {
    pub fn calibrate() -> Self {
        Self { cost: Self { cost: 0 }.median(10_001, || {}) }
    }

    /// The median time of `work` in nanoseconds.
    pub fn median(self, samples: usize, mut work: impl FnMut()) -> u64 {
        let samples: Vec<u64> = (0..samples).map(|_| self.time(&mut work).0).collect();
        Summary::of(&samples).map_or(0, |summary| summary.median)
    }

    fn time<R>(self, work: impl FnOnce() -> R) -> (u64, R) {
        let start = Instant::now();
        let result = work();
        (elapsed(start).saturating_sub(self.cost), result)
    }
}

fn elapsed(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Runs the script on all candidates in turn. `tick` is called after each candidate's turn,
/// [`ticks`] times.
pub fn measure<const N: usize>(
    script: &Script,
    mut candidates: [Candidate<'_>; N],
    clock: Clock,
    tick: impl Fn(),
) -> [Outcome; N] {
    let Effort { turns, repeats } = script.effort;
    let mut results: [Vec<Samples>; N] =
        std::array::from_fn(|_| vec![Samples::NONE; script.phases.len()]);
    for _ in 0..turns {
        for (candidate, samples) in candidates.iter_mut().zip(&mut results) {
            for _ in 0..repeats {
                let Ok(subject) = candidate else { break };
                if let Err(problem) = round(script, subject.as_mut(), clock, samples) {
                    *candidate = Err(problem);
                }
            }
            tick();
        }
    }
    let mut problems = candidates.map(Result::err).into_iter();
    results.map(|phases| Outcome { phases, problem: problems.next().flatten() })
}

/// The number of calls of `tick` that [`measure`] makes for this number of candidates.
pub fn ticks(script: &Script, candidates: usize) -> usize {
    script.effort.turns * candidates
}

/// Runs the script once.
fn round(
    script: &Script,
    subject: &mut dyn Subject,
    clock: Clock,
    samples: &mut [Samples],
) -> Result<(), String> {
    for step in &script.steps {
        let Some(phase) = step.phase else {
            subject.perform(step.call)?;
            continue;
        };
        let before = subject.tally();
        let (nanoseconds, result) = clock.time(|| subject.perform(step.call));
        result?;
        let nanoseconds = nanoseconds / script.phases[phase].repetitions;
        let tally = subject.tally().zip(before).map(|(after, before)| after.since(before));
        samples[phase].push(nanoseconds, tally);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::floor::Geometry;
    use crate::bench::workload::Workload;
    use crate::size::FolioSize;

    /// Counts calls and refuses those from a given number on.
    struct Fake {
        calls: u64,
        limit: u64,
    }

    impl Subject for Fake {
        fn perform(&mut self, call: Call) -> Result<(), String> {
            self.calls += 1;
            if self.calls > self.limit { Err(format!("{}: tired", call.name())) } else { Ok(()) }
        }

        fn tally(&self) -> Option<Tally> {
            let counts = Counts { entries_read: self.calls, ..Counts::default() };
            Some(Tally { counts, local_invalidations: 0 })
        }
    }

    fn run(limits: [u64; 2]) -> [Outcome; 2] {
        let geometry = Geometry::FOUR_LEVELS;
        let mut script = Workload::Remap1m.scripts(FolioSize::BASE, geometry, true).swap_remove(0);
        script.effort = Effort { turns: 3, repeats: 2 };
        let candidates =
            limits.map(|limit| -> Candidate<'_> { Ok(Box::new(Fake { calls: 0, limit })) });
        measure(&script, candidates, Clock { cost: 0 }, || {})
    }

    #[test]
    fn every_phase_is_sampled_in_every_round() {
        let [outcome, _] = run([u64::MAX; 2]);
        assert_eq!((outcome.phases.len(), &outcome.problem), (4, &None));
        for samples in &outcome.phases {
            assert_eq!(samples.summary().unwrap().samples, 3 * 2);
            assert_eq!(samples.tally().unwrap().counts.entries_read, 1);
            assert!(samples.steady());
        }
    }

    #[test]
    fn a_failed_subject_keeps_its_figures() {
        // The second round of the five calls fails after its mmap.
        let [failed, fine] = run([5 + 2, u64::MAX]);
        assert_eq!(failed.problem.as_deref(), Some("first touch: tired"));
        let measured = |phase: usize| failed.phases[phase].summary().unwrap().samples;
        assert_eq!([0, 1, 2, 3].map(measured), [2, 1, 1, 1]);
        assert_eq!(fine.phases[3].summary().unwrap().samples, 6);
    }

    #[test]
    fn differing_counts_are_not_steady() {
        let mut samples = Samples::NONE;
        let tally = |local_invalidations| Some(Tally { local_invalidations, ..Tally::default() });
        samples.push(1, tally(1));
        assert!(samples.steady());
        samples.push(1, tally(2));
        samples.push(1, tally(2));
        assert!(!samples.steady());
    }
}
