//! The cost of a cache line that two CPUs exchange.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use crate::Problem;
use crate::grace::Apart;
use crate::team::stay_on;

/// Lines that a CPU writes one after the other: a single one would often stay with one CPU.
const LINES: usize = 8;
/// Passes over the lines in a sample.
const PASSES: usize = 400;

/// Nanoseconds that a write costs more if another CPU writes the same lines: the median of `rounds`.
///
/// # Errors
/// If a thread cannot be kept on its CPU.
pub fn cost(rounds: u32) -> Result<f64, Problem> {
    let alone = median(rounds, 1)?;
    let together = median(rounds, 2)?;
    Ok((together - alone).max(0.0))
}

fn median(rounds: u32, threads: u16) -> Result<f64, Problem> {
    let lines = [const { Apart(AtomicU64::new(0)) }; LINES];
    let barrier = Barrier::new(usize::from(threads));
    let samples = thread::scope(|scope| {
        let (lines, barrier) = (&lines, &barrier);
        let workers = (0..threads).map(|number| {
            scope.spawn(move || -> Result<Vec<f64>, Problem> {
                stay_on(number)?;
                Ok((0..rounds).map(|_| sample(lines, barrier)).collect())
            })
        });
        let workers: Vec<_> = workers.collect();
        let results = workers.into_iter().map(|worker| worker.join().expect("nothing panics"));
        results.collect::<Result<Vec<_>, _>>()
    })?;
    let mut samples = samples.concat();
    samples.sort_unstable_by(f64::total_cmp);
    Ok(samples[samples.len() / 2])
}

/// Nanoseconds of a write.
fn sample(lines: &[Apart<AtomicU64>; LINES], barrier: &Barrier) -> f64 {
    barrier.wait();
    let start = Instant::now();
    for _ in 0..PASSES {
        lines.iter().for_each(|line| {
            line.0.fetch_add(1, Ordering::Relaxed);
        });
    }
    start.elapsed().as_nanos() as f64 / (PASSES * LINES) as f64
}
