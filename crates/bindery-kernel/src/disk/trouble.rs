//! Faults that the command line injects: transfers of content that fail, answers that come late or
//! never, writes after which the power fails, and writes that fail or that a cache loses.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bindery::Platform;

use crate::arch::{self, Ended};
use crate::platform::Machine;
use crate::sync::Mutex;
use crate::{control, options};

use super::{Answer, JOBS, Piece, finish};

/// The maximum number of jobs whose answers a silent device withholds. Later jobs fail, so that
/// other transfers find free jobs.
const WITHHELD: usize = JOBS - 16;

/// The stores of content that fail (`disk-errors=`).
static STORES: Errors = Errors::none();
/// The reads of content that fail (`disk-read-errors=`).
static READS: Errors = Errors::none();
/// The time after which the device answers transfers of content, in nanoseconds (`disk-delay=`).
static DELAY: AtomicU64 = AtomicU64::new(0);
/// The number of stretches of content that the device still answers (`disk-silent=`).
static ANSWERED: AtomicU64 = AtomicU64::new(u64::MAX);
/// The answers that a silent device withholds, each with the requesting thread and its job.
static SILENCE: Mutex<Vec<(u32, usize, Answer)>> = Mutex::new(Vec::new());
/// The plan of a test, if there is one.
static PLAN: Mutex<Option<Plan>> = Mutex::new(None);
/// Whether there is a plan.
static IS_PLANNED: AtomicBool = AtomicBool::new(false);

/// Transfers of content of one kind, of which some fail.
struct Errors {
    /// Every Nth transfer fails; 0 for none.
    every: AtomicU64,
    /// The number of transfers so far.
    count: AtomicU64,
}

impl Errors {
    const fn none() -> Self {
        Self { every: AtomicU64::new(0), count: AtomicU64::new(0) }
    }

    /// Counts a transfer, and returns whether it fails.
    fn next_fails(&self) -> bool {
        let every = self.every.load(Ordering::Relaxed);
        every > 0 && (self.count.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(every)
    }
}

/// The pieces that meet a fault, by number; 0 for none.
#[derive(Default)]
struct Plan {
    /// The number of pieces of all kinds written since the plan was made.
    pieces: u64,
    /// The power fails before the piece with this number.
    power: u64,
    /// The device's cache holds the piece with this number and loses it, because the power fails at
    /// the next flush.
    lost: u64,
    /// The piece with this number fails.
    failed: u64,
    /// The first block of the lost piece, and the block after its end.
    hole: (u64, u64),
}

/// The fate of a piece that is about to be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// The piece is written.
    Written,
    /// The piece is not written, but the device reports success.
    Lost,
    /// The piece is not written, and the device reports the failure.
    Failed,
}

/// Reads the command line.
pub fn begin() {
    let number = |key| options::value(key).and_then(|value| value.parse().ok());
    STORES.every.store(number("disk-errors").unwrap_or(0), Ordering::Relaxed);
    READS.every.store(number("disk-read-errors").unwrap_or(0), Ordering::Relaxed);
    DELAY.store(number("disk-delay").unwrap_or(0).saturating_mul(1000), Ordering::Relaxed);
    ANSWERED.store(number("disk-silent").unwrap_or(u64::MAX), Ordering::Relaxed);
    SILENCE.lock().reserve_exact(WITHHELD);
}

/// Whether the device has stopped transferring content.
pub fn is_silent() -> bool {
    ANSWERED.load(Ordering::Relaxed) == 0
}

/// Plans faults for pieces that are written from now on. `numbers` holds three 16-bit piece
/// numbers, from the lowest bits up: the piece before which the power fails, the lost piece and the
/// failing piece.
pub fn plan(numbers: u64) {
    let number = |at: u32| numbers >> (16 * at) & 0xffff;
    let plan = Plan { power: number(0), lost: number(1), failed: number(2), ..Plan::default() };
    *PLAN.lock() = Some(plan);
    IS_PLANNED.store(true, Ordering::Relaxed);
}

/// Passes the plan to `look`, if there is one. Most machines pay only a comparison.
fn planned<T>(look: impl FnOnce(&mut Plan) -> T) -> Option<T> {
    if !IS_PLANNED.load(Ordering::Relaxed) {
        return None;
    }
    PLAN.lock().as_mut().map(look)
}

/// Called before a piece is submitted for writing. Earlier pieces are written or lost.
pub fn before_a_write(piece: &Piece) -> Fate {
    let fate = planned(|plan| {
        plan.pieces += 1;
        if plan.power == plan.pieces {
            lose_power();
        }
        if plan.lost == plan.pieces {
            plan.hole = (piece.block, piece.end());
            return Fate::Lost;
        }
        if plan.failed == plan.pieces { Fate::Failed } else { Fate::Written }
    });
    fate.unwrap_or(Fate::Written)
}

/// Called before a piece is submitted for reading. The power fails if the piece covers a lost one,
/// because a device that still had the lost piece in its cache would return it.
pub fn before_a_read(piece: &Piece) {
    planned(|plan| {
        if piece.block < plan.hole.1 && plan.hole.0 < piece.end() {
            lose_power();
        }
    });
}

/// Called before the device makes all submitted pieces durable. If one was lost, the power fails
/// first.
pub fn before_a_flush() {
    planned(|plan| {
        if plan.hole.1 > 0 {
            lose_power();
        }
    });
}

/// Stops the machine at once.
pub fn lose_power() -> ! {
    control::send(format_args!("status 0"));
    arch::power_off(Ended::Program(0))
}

/// An answer that is not withheld.
pub struct Passed {
    /// The answer.
    pub answer: Answer,
    /// Whether the answer reports success.
    pub is_well: bool,
    /// The time until the answer is due, in nanoseconds.
    pub delay: u64,
}

/// Forwards the answer of a job, unless the device is silent.
pub fn pass(job: usize, answer: Answer) -> Option<Passed> {
    let errors = if matches!(answer, Answer::Write(..)) { &STORES } else { &READS };
    let mut fails = errors.next_fails();
    if ANSWERED.load(Ordering::Relaxed) != u64::MAX {
        // Read again with the lock held, because `end_silence` changes the count under the lock. An
        // answer added after that would be withheld forever.
        let mut withheld = SILENCE.lock();
        match ANSWERED.load(Ordering::Relaxed) {
            0 if withheld.len() < WITHHELD => {
                withheld.push((Machine.thread(), job, answer));
                return None;
            }
            0 => fails = true,
            u64::MAX => {}
            left => ANSWERED.store(left - 1, Ordering::Relaxed),
        }
    }
    Some(Passed { answer, is_well: !fails, delay: DELAY.load(Ordering::Relaxed) })
}

/// Fails the withheld requests of a thread that is about to be killed or has ended. Also fails
/// those of the kernel's own threads, because the thread may wait for one of them. Each request is
/// answered once the device no longer uses its memory.
pub fn give_up(thread: u32) {
    give_up_some(|asker| asker == thread || asker == OF_KERNEL);
}

/// The number of the kernel's own threads.
const OF_KERNEL: u32 = 0;

/// Fails all withheld requests and withholds no further ones, because the machine ends.
pub fn end_silence() {
    {
        let _withheld = SILENCE.lock();
        ANSWERED.store(u64::MAX, Ordering::Relaxed);
    }
    give_up_some(|_| true);
}

fn give_up_some(is_given_up: impl Fn(u32) -> bool) {
    loop {
        // The lock is released before an answer wakes threads.
        let (job, answer) = {
            let mut withheld = SILENCE.lock();
            let Some(at) = withheld.iter().position(|(asker, ..)| is_given_up(*asker)) else {
                return;
            };
            let (_, job, answer) = withheld.swap_remove(at);
            (job, answer)
        };
        finish(job, answer, false);
    }
}
