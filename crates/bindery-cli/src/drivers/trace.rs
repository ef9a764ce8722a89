//! The last steps of each CPU, and its progress.

use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::step::Step;
use super::world::lock;

/// The number of steps kept for each CPU.
const KEPT: usize = 50;

/// A step, and its result once the step has ended.
struct Taken {
    step: Step,
    result: Option<i64>,
}

#[derive(Default)]
struct Lane {
    steps: Mutex<VecDeque<Taken>>,
    count: AtomicU64,
}

/// The last steps of all CPUs.
pub(super) struct Trace {
    lanes: Vec<Lane>,
}

impl Trace {
    pub(super) fn new(cpus: u16) -> Self {
        Self { lanes: (0..cpus).map(|_| Lane::default()).collect() }
    }

    /// Performs a step and records it.
    pub(super) fn take(&self, cpu: u16, step: Step, perform: impl FnOnce(&Step) -> i64) -> i64 {
        let lane = &self.lanes[usize::from(cpu)];
        {
            let mut steps = lock(&lane.steps);
            if steps.len() == KEPT {
                steps.pop_front();
            }
            steps.push_back(Taken { step, result: None });
        }
        let result = perform(&step);
        if let Some(last) = lock(&lane.steps).back_mut() {
            last.result = Some(result);
        }
        lane.count.fetch_add(1, Relaxed);
        result
    }

    /// The number of steps taken on all CPUs.
    pub(super) fn count(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.count.load(Relaxed)).sum()
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (cpu, lane) in self.lanes.iter().enumerate() {
            writeln!(f, "CPU {cpu}, {} steps:", lane.count.load(Relaxed))?;
            // A CPU that holds its lane's lock is about to store a result; the other lanes are
            // still reported.
            let Ok(steps) = lane.steps.try_lock() else { continue };
            for Taken { step, result } in &*steps {
                let mut shown = String::from("not over");
                if let Some(result) = result {
                    shown.clear();
                    write!(shown, "{result}")?;
                }
                writeln!(f, "    {} = {shown}", step.code())?;
            }
        }
        Ok(())
    }
}
