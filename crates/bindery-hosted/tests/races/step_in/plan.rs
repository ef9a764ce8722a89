//! The pairs of calls and the steps at which they meet. A table lists the outcomes.

use std::collections::BTreeMap;
use std::env;

use bindery_hosted::Walk;

use super::blocked;
use super::operations::{Operation, operations};
use super::run::{At, Outcome, Verdict, run};

/// Runs of one architecture in the subset.
const RUNS: u64 = 24_000;
const SEED: u64 = 0x5eed_0001;
/// The approximate number of steps of a call at which the subset holds it.
const ENOUGH_STEPS: u32 = 200;
/// Runs of one pair whose problems are printed; the others are counted.
const PRINTED: u64 = 3;

/// The results of one pair of calls, or of one call.
#[derive(Clone, Copy, Default, Debug)]
struct Tally {
    runs: u64,
    audited: u64,
    refused: u64,
    blocked: u64,
    /// Runs with problems.
    wrong: u64,
}

impl Tally {
    fn add(&mut self, verdict: Verdict) {
        self.runs += 1;
        match verdict {
            Verdict::Audited => self.audited += 1,
            Verdict::Refused => self.refused += 1,
            Verdict::Blocked => self.blocked += 1,
            Verdict::NotHeld => {}
        }
    }

    fn counts(self) -> [u64; 5] {
        [self.runs, self.audited, self.refused, self.blocked, self.wrong]
    }
}

/// The runs of one architecture.
struct Plan<A: Walk> {
    operations: Vec<Operation<A>>,
    /// The number of steps of each call when no other call runs.
    steps: Vec<u32>,
    folio_order: u8,
    pairs: BTreeMap<(usize, usize), Tally>,
}

impl<A: Walk> Plan<A> {
    fn new(folio_order: u8) -> Self {
        let operations = operations::<A>();
        let alone = |operation| run(operation, operation, At::Nowhere, folio_order).steps;
        let steps = operations.iter().map(alone).collect();
        Self { operations, steps, folio_order, pairs: BTreeMap::new() }
    }

    fn meet(&mut self, held: usize, stepped_in: usize, at: At) {
        let (a, b) = (&self.operations[held], &self.operations[stepped_in]);
        let Outcome { verdict, step, problems, .. } = run(a, b, at, self.folio_order);
        let tally = self.pairs.entry((held, stepped_in)).or_default();
        tally.add(verdict);
        tally.wrong += u64::from(!problems.is_empty());
        if problems.is_empty() || tally.wrong > PRINTED {
            return;
        }
        let (a, b, arch) = (a.name, b.name, A::NAME);
        println!("{arch}: {a:?} held at {at:?} ({step:?}), {b:?} {verdict:?}:");
        problems.iter().for_each(|problem| println!("    {problem}"));
    }

    /// The points where a call can be held: at every step and where it waits for a lock. For a call
    /// with thousands of steps, `at_most` limits the number of points in the middle.
    fn places(&self, held: usize, at_most: u32) -> Vec<At> {
        let steps = self.steps[held];
        let stride = (steps / at_most).max(1);
        let edge = at_most / 4;
        let near = |step: u32| step < edge || step + edge >= steps;
        let chosen = (0..steps).filter(|step| near(*step) || step.is_multiple_of(stride));
        chosen.map(At::Step).chain([At::Contended]).collect()
    }

    fn everything(&mut self) {
        let only = env::var("BINDERY_STEP_HELD").ok();
        for held in 0..self.operations.len() {
            if only.as_ref().is_some_and(|only| *only != self.operations[held].name) {
                continue;
            }
            for stepped_in in 0..self.operations.len() {
                for at in self.places(held, u32::MAX) {
                    self.meet(held, stepped_in, at);
                }
            }
        }
    }

    fn subset(&mut self, seed: u64) {
        let mut random = seed;
        let mut below = |limit: usize| {
            // SplitMix64.
            random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (random ^ random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((mixed ^ mixed >> 31) % limit as u64) as usize
        };
        let runs = env::var("BINDERY_STEP_RUNS").map_or(RUNS, |runs| runs.parse().unwrap());
        for _ in 0..runs {
            let (held, stepped_in) = (below(self.operations.len()), below(self.operations.len()));
            let places = self.places(held, ENOUGH_STEPS);
            self.meet(held, stepped_in, places[below(places.len())]);
        }
    }

    fn sum(&self, counts: impl Fn(&(usize, usize)) -> bool) -> Tally {
        let chosen = self.pairs.iter().filter(|(pair, _)| counts(pair));
        chosen.fold(Tally::default(), |sum, (_, tally)| Tally {
            runs: sum.runs + tally.runs,
            audited: sum.audited + tally.audited,
            refused: sum.refused + tally.refused,
            blocked: sum.blocked + tally.blocked,
            wrong: sum.wrong + tally.wrong,
        })
    }

    /// One line for each call, as the held call and as the call that steps in.
    fn table(&self) -> String {
        const COUNTS: [&str; 5] = ["runs", "audited", "refused", "blocked", "wrong"];
        let mut table = format!("{:<42}{:>8}{:>8}{:>40}\n", A::NAME, "", "held", "stepping in");
        let titles = COUNTS.iter().chain(&COUNTS).map(|title| format!("{title:>8}"));
        table += &format!("{:<42}{:>8}{}\n", "", "steps", titles.collect::<String>());
        for (number, operation) in self.operations.iter().enumerate() {
            let held = self.sum(|pair| pair.0 == number);
            let stepping = self.sum(|pair| pair.1 == number);
            let counts = [held, stepping].map(Tally::counts);
            let counts = counts.as_flattened().iter().map(|count| format!("{count:>8}"));
            let (name, steps) = (operation.name, self.steps[number]);
            table += &format!("{name:<42}{steps:>8}{}\n", counts.collect::<String>());
        }
        table + &format!("{}: {} pairs, {:?}", A::NAME, self.pairs.len(), self.sum(|_| true))
    }

    /// The pairs without an audited run.
    fn never_audited(&self) -> Vec<(&'static str, &'static str)> {
        let name = |number: usize| self.operations[number].name;
        let never = self.pairs.iter().filter(|(_, tally)| tally.audited == 0);
        never.map(|(pair, _)| (name(pair.0), name(pair.1))).collect()
    }

    fn assert_every_call_was_audited(&self) {
        for (number, operation) in self.operations.iter().enumerate() {
            let held = self.sum(|pair| pair.0 == number).audited;
            let stepping = self.sum(|pair| pair.1 == number).audited;
            let name = operation.name;
            assert!(held > 0, "{name:?} was held, and nothing was audited meanwhile");
            assert!(stepping > 0, "{name:?} never returned while another call was held");
        }
    }
}

/// Runs the pairs on one architecture: a subset, or with `BINDERY_STEP_IN=all` everything.
pub fn calls_meet<A: Walk>(folio_order: u8) {
    let mut plan = Plan::<A>::new(folio_order);
    if env::var("BINDERY_STEP_IN").is_ok_and(|what| what == "all") {
        plan.everything();
        println!("{}", plan.table());
        let never = plan.never_audited();
        println!("{}: pairs that were never audited: {never:?}", A::NAME);
        let grown: Vec<_> =
            never.iter().filter(|pair| !blocked::is_expected(pair.0, pair.1)).collect();
        assert!(grown.is_empty(), "never audited, though they could be: {grown:#?}");
    } else {
        let seed =
            env::var("BINDERY_STEP_SEED").map_or(SEED, |seed| seed.parse().expect("a number"));
        println!("BINDERY_STEP_SEED={seed}");
        plan.subset(seed);
        println!("{}", plan.table());
        plan.assert_every_call_was_audited();
    }
    let wrong = plan.sum(|_| true).wrong;
    assert_eq!(wrong, 0, "runs in which a promise was broken");
}
