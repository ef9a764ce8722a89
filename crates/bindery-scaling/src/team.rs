//! Workers that perform an operation concurrently. A sample counts only if no worker was preempted
//! during it.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use nix::libc;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, wait, waitpid};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{ForkResult, Pid, fork};

use crate::Problem;
use crate::board::Board;
use crate::crew::Crew;
use crate::operations::{Operation, Worker};

/// The possible difference between thread time and clock time that results from the two separate
/// readings.
const SPARE: Duration = Duration::from_micros(20);

/// The samples of an operation on one number of CPUs.
#[derive(Default)]
pub struct Samples {
    /// Operations per second of all workers together.
    pub rates: Vec<f64>,
    /// Samples in which a worker was preempted.
    pub left_out: usize,
}

impl Samples {
    /// The median of the rates; 0 without samples.
    pub fn median(&mut self) -> f64 {
        self.rates.sort_unstable_by(f64::total_cmp);
        self.rates.get(self.rates.len() / 2).copied().unwrap_or_default()
    }

    /// Performs an operation `rounds` times on all CPUs of the crew concurrently and adds the
    /// samples.
    ///
    /// # Errors
    /// If a worker cannot be created or bound to its CPU, or a call of a worker fails.
    pub fn add(
        &mut self,
        crew: &dyn Crew,
        operation: &Operation,
        rounds: u32,
    ) -> Result<(), Problem> {
        let board = Board::new(crew.cpus(), rounds)?;
        let work = Work { crew, operation, board: &board, rounds };
        if crew.is_of_processes() { work.by_processes() } else { work.by_threads() }?;
        for round in 0..rounds {
            let times = (0..crew.cpus()).map(|worker| board.sample(worker, round));
            let times = times.map(|sample| sample.load(Ordering::Acquire));
            match (times.clone().min(), times.max()) {
                (Some(1..), Some(longest)) => {
                    let operations = u64::from(crew.cpus()) * operation.count;
                    self.rates.push(operations as f64 * 1e9 / longest as f64);
                }
                _ => self.left_out += 1,
            }
        }
        Ok(())
    }
}

/// The work of all workers.
struct Work<'w> {
    crew: &'w dyn Crew,
    operation: &'w Operation,
    board: &'w Board,
    rounds: u32,
}

impl Work<'_> {
    /// Runs a step on one worker at a time.
    fn one_by_one(&self, step: fn(&Worker<'_>)) {
        (0..self.crew.cpus()).for_each(|number| self.crew.as_worker(number, &mut |it| step(it)));
    }

    fn by_threads(&self) -> Result<(), Problem> {
        self.one_by_one(self.operation.start);
        let done = thread::scope(|scope| {
            let workers = (0..self.crew.cpus()).map(|number| {
                scope.spawn(move || -> Result<(), Problem> {
                    stay_on(number)?;
                    self.crew.as_worker(number, &mut |worker| self.rounds(worker));
                    Ok(())
                })
            });
            // Spawns all workers before it joins the first, because the workers wait for each
            // other.
            let workers: Vec<_> = workers.collect();
            let mut ends = workers.into_iter().map(|worker| worker.join());
            ends.try_for_each(|end| end.unwrap_or_else(|_| Err(failed())))
        });
        self.one_by_one(self.operation.end);
        done
    }

    /// The children share only the board. This process has one thread.
    fn by_processes(&self) -> Result<(), Problem> {
        let mut children = Vec::new();
        for number in 0..self.crew.cpus() {
            // SAFETY: the process has one thread, so the child inherits no held lock.
            match unsafe { fork() }? {
                ForkResult::Parent { child } => children.push(child),
                ForkResult::Child => {
                    let end = self.child(number);
                    // SAFETY: `_exit` ends the child at once, so the parent's destructors do not
                    // run twice.
                    unsafe { libc::_exit(i32::from(end.is_err())) }
                }
            }
        }
        wait_for(children)
    }

    fn child(&self, number: u16) -> Result<(), Problem> {
        stay_on(number)?;
        self.crew.as_worker(number, &mut |worker| {
            (self.operation.start)(worker);
            self.rounds(worker);
        });
        Ok(())
    }

    /// The rounds of one worker.
    fn rounds(&self, worker: &Worker<'_>) {
        for round in 0..self.rounds {
            let times = u64::from(round) + 1;
            let sleep = |times| worker.calls.rest(self.board, worker.count, times);
            sleep(2 * times - 1);
            let (before, awake) = (Switches::now(), time_of_thread());
            self.board.spin_until_all(worker.count, times);
            let start = Instant::now();
            (self.operation.run)(worker);
            let taken = start.elapsed();
            let awake = time_of_thread().saturating_sub(awake);
            let after = Switches::now();
            // A thread that slept was waiting for another thread, as on any machine.
            let ran = after.voluntary > before.voluntary || awake + SPARE > taken;
            let clean = after.involuntary == before.involuntary && ran;
            let sample = if clean { (taken.as_nanos() as u64).max(1) } else { 0 };
            self.board.sample(worker.number, round).store(sample, Ordering::Release);
            // A reset during the work of others would slow it down.
            sleep(2 * times);
            (self.operation.reset)(worker);
        }
    }
}

fn failed() -> Problem {
    Problem("a call of an operation failed; the panic above has the reason".to_owned())
}

/// Waits for all children. If one fails, kills the others, which would wait for it.
fn wait_for(mut children: Vec<Pid>) -> Result<(), Problem> {
    while !children.is_empty() {
        let status = wait()?;
        children.retain(|child| Some(*child) != status.pid());
        if !matches!(status, WaitStatus::Exited(_, 0)) {
            for child in children {
                kill(child, Signal::SIGKILL)?;
                waitpid(child, None)?;
            }
            return Err(failed());
        }
    }
    Ok(())
}

/// Binds the running thread to one of the process's CPUs.
///
/// # Errors
/// If the process may use fewer CPUs.
pub fn stay_on(number: u16) -> Result<(), Problem> {
    let allowed = allowed_cpus()?;
    let cpu = allowed.get(usize::from(number));
    let cpu = cpu.ok_or_else(|| {
        Problem(format!("this process may use {} CPUs, and needs more", allowed.len()))
    })?;
    let mut set = CpuSet::new();
    set.set(*cpu)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

/// Refuses more workers than the number of CPUs that the process may use, because a worker without
/// a CPU would keep the others waiting.
///
/// # Errors
/// If a number in `cpus` is too large.
pub fn check(cpus: &[u16]) -> Result<(), Problem> {
    let allowed = allowed_cpus()?.len();
    match cpus.iter().find(|cpus| usize::from(**cpus) > allowed) {
        Some(many) => Err(Problem(format!("this process may use {allowed} CPUs, not {many}"))),
        None => Ok(()),
    }
}

fn allowed_cpus() -> Result<Vec<usize>, Problem> {
    // Uses the set of the process, whose first thread is never bound to a single CPU.
    let set = sched_getaffinity(Pid::this())?;
    Ok((0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).collect())
}

/// The number of times that the running thread left its CPU.
struct Switches {
    /// Switches to wait for another thread.
    voluntary: i64,
    /// Switches because another thread took the CPU.
    involuntary: i64,
}

impl Switches {
    fn now() -> Self {
        let usage = getrusage(UsageWho::RUSAGE_THREAD).expect("the argument is valid");
        Self {
            voluntary: usage.voluntary_context_switches(),
            involuntary: usage.involuntary_context_switches(),
        }
    }
}

/// The time that the running thread was on a CPU.
fn time_of_thread() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("threads have clocks").into()
}
