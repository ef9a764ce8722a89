//! All measurements of one architecture.

use bindery_cli::guest::Problem;

use super::guests::{Bench, Job, Kernel, Repeat};
use super::parallel;
use super::results::Pair;
use super::rows::Workload;
use crate::size::FolioSize;

/// The measurements to make.
pub struct Plan<'a> {
    pub bindery: Option<Kernel>,
    pub linux: Option<Kernel>,
    pub workloads: &'a [Workload],
    pub folios: &'a [FolioSize],
    pub repeat: Repeat,
}

/// A machine to run: its kernel, and the index of its measurement in the list of pairs.
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

/// Runs all machines. If a machine fails, leaves its entry empty and adds a problem.
pub fn all(bench: &Bench, plan: &Plan<'_>, problems: &mut Vec<Problem>) -> Vec<Pair> {
    let jobs = plan.workloads.iter().flat_map(|&workload| {
        let folios = workload.folios(plan.folios).into_iter();
        folios.map(move |folio| Job { workload, folio })
    });
    let jobs: Vec<Job> = jobs.collect();
    let mut tasks = Vec::new();
    // The slowest machines first.
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
    let results = parallel::all(bench.architecture, &tasks, |task| {
        bench.measure(task.kernel, task.job, plan.repeat)
    });
    for (task, result) in tasks.iter().zip(results) {
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
