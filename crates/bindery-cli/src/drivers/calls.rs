//! The driver of random calls on one CPU.

use std::fmt;
use std::time::Instant;

use super::generate::{Generator, Mix};
use super::rng::Rng;
use super::sequence::{Failure, Run, replay};
use super::shrink::shrink;
use super::step::Step;
use super::threads;
use super::world::Setup;

/// Steps of one sequence. After the last step all processes end and the next machine is built.
const STEPS: usize = 400;

/// Sequences that are tried to shorten a failure.
const TRIES: usize = 600;

/// An architecture, and its run functions.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The architecture's name, as users type it.
    pub name: &'static str,
    /// The architecture's type, as written in code.
    pub code: &'static str,
    /// The end of the architecture's user space.
    pub user_end: u64,
    /// [`super::sequence::run`] for this architecture.
    pub run: Run,
    /// [`super::threads::run`] for this architecture.
    pub run_threads: threads::Run,
}

/// A sequence that fails.
#[derive(Clone, Debug)]
pub struct Found {
    /// The seed of the sequence.
    pub seed: u64,
    target: Target,
    setup: Setup,
    steps: Vec<Step>,
    failure: Failure,
}

impl Found {
    /// The remaining steps.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The failure.
    pub fn failure(&self) -> &Failure {
        &self.failure
    }
}

/// The failure, and a test that reproduces it.
impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, target, setup, steps, failure } = self;
        writeln!(f, "random calls, seed {seed}, {}: {failure}", target.name)?;
        writeln!(f)?;
        writeln!(f, "#[test]")?;
        writeln!(f, "fn seed_{seed}_on_{}() {{", target.name.replace('-', "_"))?;
        writeln!(f, "    let setup = {setup:?};")?;
        writeln!(f, "    let steps = [")?;
        for step in steps {
            writeln!(f, "        {},", step.code())?;
        }
        writeln!(f, "    ];")?;
        writeln!(f, "    replay(run::<{}>, &setup, &steps).unwrap();", target.code)?;
        writeln!(f, "}}")
    }
}

/// The result of a sequence.
#[derive(Debug)]
pub struct Sequence {
    /// The number of steps taken.
    pub steps: usize,
    /// The maximum work of one step.
    pub most_work: u64,
    /// The failure, if the sequence failed.
    pub found: Option<Box<Found>>,
}

/// Runs the sequence of a seed until the deadline and shrinks its failure.
pub fn sequence(
    target: &Target,
    seed: u64,
    change: impl FnOnce(&mut Setup),
    deadline: Instant,
) -> Sequence {
    let mut rng = Rng::new(seed);
    let mut setup = Setup::random(&mut rng, 1);
    change(&mut setup);
    let mut generator = Generator::new(rng, Mix::Extreme, target.user_end);
    let mut steps = Vec::new();
    let result = (target.run)(&setup, &mut |result| {
        if steps.len() == STEPS || Instant::now() > deadline {
            return None;
        }
        let step = generator.next(result);
        steps.push(step);
        Some(step)
    });
    match result {
        Ok(done) => Sequence { steps: done.steps, most_work: done.most_work, found: None },
        Err(failure) => {
            let taken = steps.len();
            let found = Some(Box::new(shorten(target, seed, setup, steps, failure)));
            Sequence { steps: taken, most_work: 0, found }
        }
    }
}

/// A shorter sequence with the same failure.
fn shorten(
    target: &Target,
    seed: u64,
    setup: Setup,
    steps: Vec<Step>,
    mut failure: Failure,
) -> Found {
    let kind = kind(&failure);
    let steps = shrink(steps, TRIES, |steps| match replay(target.run, &setup, steps) {
        Err(other) if self::kind(&other) == kind => {
            failure = other;
            true
        }
        _ => false,
    });
    Found { seed, target: *target, setup, steps, failure }
}

/// A failure's message without its numbers; failures with the same message count as equal. Of a
/// list, such as violations of the TLB, only the heading and the first item up to its details are
/// used, because a shorter sequence has fewer items.
fn kind(failure: &Failure) -> String {
    let mut lines = failure.message.lines();
    let heading = lines.next().unwrap_or_default();
    let item = lines.next().and_then(|line| line.split(':').next()).unwrap_or_default();
    let letters = heading.chars().chain(item.chars());
    letters.filter(|letter| !letter.is_ascii_hexdigit()).collect()
}
