//! Runs machines in parallel.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use bindery_cli::guest::Architecture;
use indicatif::{ProgressBar, ProgressStyle};

/// The maximum number of machines at a time. Each takes 3 GiB, and hosts with many CPUs may lack
/// the memory for one machine per CPU.
const MOST_AT_A_TIME: usize = 4;

/// The results of all tasks, in their order. Each task is a machine, and one machine runs per CPU
/// of the host.
pub fn all<T: Sync, R: Send>(
    architecture: Architecture,
    tasks: &[T],
    run: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let progress = progress(architecture, tasks.len());
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(task) = tasks.get(number) else { break };
            let result = run(task);
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

/// A progress bar on standard error; indicatif hides it if standard error is not a terminal.
fn progress(architecture: Architecture, machines: usize) -> ProgressBar {
    let template = "{msg:8} [{bar:40}] {pos} of {len} machines  {elapsed}";
    let style = ProgressStyle::with_template(template).expect("the template is a constant");
    let progress = ProgressBar::new(machines as u64).with_style(style);
    progress.set_message(architecture.name());
    progress.enable_steady_tick(Duration::from_secs(1));
    progress
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_stand_in_the_order_of_the_tasks() {
        let tasks: Vec<u64> = (0..50).collect();
        let squares = all(Architecture::X86_64, &tasks, |task| {
            // The first ones end last.
            thread::sleep(Duration::from_millis(20_u64.saturating_sub(*task)));
            task * task
        });
        assert_eq!(squares, tasks.iter().map(|task| task * task).collect::<Vec<_>>());
    }
}
