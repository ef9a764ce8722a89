//! All machines of one architecture, several at a time.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use bindery_cli::guest::Problem;
use indicatif::{ProgressBar, ProgressStyle};

use super::guests::{Bench, Job, Kernel, Measurement, Repeat};
use super::results::Pair;
use super::rows::Workload;
use crate::size::FolioSize;

/// Each machine takes 3 GiB, and hosts with many CPUs need not have memory for so many.
const MOST_AT_A_TIME: usize = 4;

/// What is to be measured.
pub struct Plan<'a> {
    pub bindery: Option<Kernel>,
    pub linux: Option<Kernel>,
    pub workloads: &'a [Workload],
    pub folios: &'a [FolioSize],
    pub repeat: Repeat,
}

/// A machine to run: whose place in the list of pairs its measurement has, and its kernel.
struct Task<'a> {
    pair: usize,
    job: Job,
    who: Who,
    kernel: &'a Kernel,
}

#[derive(Clone, Copy)]
enum Who {
    Bindery,
    Linux,
}

/// Runs all machines. One that fails leaves its place empty and a problem.
pub fn all(bench: &Bench, plan: &Plan<'_>, problems: &mut Vec<Problem>) -> Vec<Pair> {
    let jobs = plan.workloads.iter().flat_map(|&workload| {
        let folios = workload.folios(plan.folios).into_iter();
        folios.map(move |folio| Job { workload, folio })
    });
    let jobs: Vec<Job> = jobs.collect();
    let mut tasks = Vec::new();
    // The machines that take longest first.
    for (pair, &job) in jobs.iter().enumerate().rev() {
        let kernels = [(Who::Linux, &plan.linux), (Who::Bindery, &plan.bindery)];
        for (who, kernel) in kernels {
            let able = kernel.iter().filter(|kernel| kernel.can_run(job.workload));
            tasks.extend(able.map(|kernel| Task { pair, job, who, kernel }));
        }
    }
    let mut pairs: Vec<Pair> = jobs
        .iter()
        .map(|&Job { workload, folio }| Pair { workload, folio, bindery: None, linux: None })
        .collect();
    for (task, result) in tasks.iter().zip(run(bench, &tasks, plan.repeat)) {
        match (result, task.who) {
            (Ok(measurement), Who::Bindery) => pairs[task.pair].bindery = Some(measurement),
            (Ok(measurement), Who::Linux) => pairs[task.pair].linux = Some(measurement),
            (Err(problem), Who::Bindery) => problems.push(named("Bindery", &problem)),
            (Err(problem), Who::Linux) => problems.push(named("Linux", &problem)),
        }
    }
    pairs
}

fn named(who: &str, problem: &Problem) -> Problem {
    Problem::Failed(format!("{who}, {problem}"))
}

/// The results of all tasks, in their order.
fn run(bench: &Bench, tasks: &[Task<'_>], repeat: Repeat) -> Vec<Result<Measurement, Problem>> {
    let progress = progress(bench, tasks.len());
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(task) = tasks.get(number) else { break };
            let result = bench.measure(task.kernel, task.job, repeat);
            progress.inc(1);
            match results.lock() {
                Ok(mut results) => results.push((number, result)),
                Err(poisoned) => poisoned.into_inner().push((number, result)),
            }
        }
    };
    let workers = thread::available_parallelism().map_or(1, usize::from).min(MOST_AT_A_TIME);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(work);
        }
    });
    progress.finish_and_clear();
    let mut results = results.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    results.sort_by_key(|(number, _)| *number);
    results.into_iter().map(|(_, result)| result).collect()
}

/// A bar on standard error; indicatif hides it where that is no terminal.
fn progress(bench: &Bench, machines: usize) -> ProgressBar {
    let template = "{msg:8} [{bar:40}] {pos} of {len} machines  {elapsed}";
    let style = ProgressStyle::with_template(template).expect("the template is a constant");
    let progress = ProgressBar::new(machines as u64).with_style(style);
    progress.set_message(bench.architecture.name());
    progress.enable_steady_tick(Duration::from_secs(1));
    progress
}
