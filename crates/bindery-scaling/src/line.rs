//! The cost of a cache line that two CPUs exchange.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use crate::Problem;
use crate::grace::Apart;
use crate::team::stay_on;

/// Lines that are handed over together, like the lines of a lock and of the data that it guards. An
/// atomic operation waits for its line, so the fetches are sequential.
const LINES: usize = 8;
/// The number of hand-overs by each thread in a sample.
const PASSES: u64 = 200;

/// The additional cost in nanoseconds of an atomic operation on a line that the other CPU held
/// before; the median of `rounds`.
///
/// # Errors
/// If a thread cannot be bound to its CPU.
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
                let turns = Turns { number, threads };
                Ok((0..rounds).map(|_| turns.sample(lines, barrier)).collect())
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

/// A thread that hands over lines to the next thread.
struct Turns {
    number: u16,
    threads: u16,
}

impl Turns {
    /// The nanoseconds per line in a hand-over. The first line holds the number of hand-overs so
    /// far, which determines whose turn it is.
    fn sample(&self, lines: &[Apart<AtomicU64>; LINES], barrier: &Barrier) -> f64 {
        let [turn, others @ ..] = lines;
        let threads = u64::from(self.threads);
        // No thread hands over between the two waits, so all read the same number.
        let first = turn.0.load(Ordering::Relaxed);
        barrier.wait();
        let start = Instant::now();
        for pass in 0..PASSES {
            let mine = first + pass * threads + u64::from(self.number);
            while turn.0.load(Ordering::Acquire) != mine {
                std::hint::spin_loop();
            }
            others.iter().for_each(|line| {
                line.0.fetch_add(1, Ordering::Relaxed);
            });
            turn.0.store(mine + 1, Ordering::Release);
        }
        let taken = start.elapsed().as_nanos() as f64;
        barrier.wait();
        taken / (PASSES * threads * LINES as u64) as f64
    }
}
