//! Troubles that the command line asks for: content that fails, late answers, none at all, and
//! writes after which the power fails, or that fail themselves, or that a cache loses.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bindery::Platform;

use crate::arch::{self, Ended};
use crate::platform::Machine;
use crate::sync::Mutex;
use crate::{control, options};

use super::{Answer, JOBS, Piece, finish};

/// The most jobs whose answers a silent device withholds. It fails those after them, so that other
/// transfers find free jobs.
const WITHHELD: usize = JOBS - 16;

/// Each so manyth stretch of content that is written fails; 0 for none (`disk-errors=`).
static ERRORS: AtomicU64 = AtomicU64::new(0);
/// The time after which the device answers transfers of content, in nanoseconds (`disk-delay=`).
static DELAY: AtomicU64 = AtomicU64::new(0);
/// Stretches of content that the device still answers (`disk-silent=`).
static ANSWERED: AtomicU64 = AtomicU64::new(u64::MAX);
/// The answers that a silent device withholds, each with its job and the thread that has asked.
static SILENCE: Mutex<Vec<(u32, usize, Answer)>> = Mutex::new(Vec::new());
/// Stretches of content that were written.
static WRITTEN: AtomicU64 = AtomicU64::new(0);
/// What a test has planned, if it has.
static PLAN: Mutex<Option<Plan>> = Mutex::new(None);
/// Whether there is a plan.
static IS_PLANNED: AtomicBool = AtomicBool::new(false);

/// The pieces to which something happens, by their numbers; 0 for none.
#[derive(Default)]
struct Plan {
    /// The pieces of all kinds that were written since it was made.
    pieces: u64,
    /// The power fails before this one.
    power: u64,
    /// The device's cache has this one, and loses it: the power fails at the next flush.
    lost: u64,
    /// This one fails.
    failed: u64,
    /// The first block of the lost piece, and the one behind it.
    hole: (u64, u64),
}

/// The fate of a piece that is about to be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It is written.
    Written,
    /// It is not, and the device says that it is.
    Lost,
    /// It is not, and the device says so.
    Failed,
}

/// Reads the command line.
pub fn begin() {
    let number = |key| options::value(key).and_then(|value| value.parse().ok());
    ERRORS.store(number("disk-errors").unwrap_or(0), Ordering::Relaxed);
    DELAY.store(number("disk-delay").unwrap_or(0).saturating_mul(1000), Ordering::Relaxed);
    ANSWERED.store(number("disk-silent").unwrap_or(u64::MAX), Ordering::Relaxed);
    SILENCE.lock().reserve_exact(WITHHELD);
}

/// Whether the device transfers no content any more.
pub fn is_silent() -> bool {
    ANSWERED.load(Ordering::Relaxed) == 0
}

/// Has something happen to pieces that are written from now on. The number of the one before which
/// the power fails has 16 bits, and so have those of the lost one and of the one that fails above
/// it.
pub fn plan(numbers: u64) {
    let number = |at: u32| numbers >> (16 * at) & 0xffff;
    let plan = Plan { power: number(0), lost: number(1), failed: number(2), ..Plan::default() };
    *PLAN.lock() = Some(plan);
    IS_PLANNED.store(true, Ordering::Relaxed);
}

/// Looks at the plan, if there is one: most machines pay a comparison.
fn planned<T>(look: impl FnOnce(&mut Plan) -> T) -> Option<T> {
    if !IS_PLANNED.load(Ordering::Relaxed) {
        return None;
    }
    PLAN.lock().as_mut().map(look)
}

/// The device is about to be given a piece to write. Earlier ones are written or lost.
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

/// The device is about to be given a piece to read. The power fails if a lost one was there: a
/// device that has it in its cache would show it.
pub fn before_a_read(piece: &Piece) {
    planned(|plan| {
        if piece.block < plan.hole.1 && plan.hole.0 < piece.end() {
            lose_power();
        }
    });
}

/// The device is about to keep all that it was given. The power fails first if one was lost.
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
    /// Whether it does not fail.
    pub is_well: bool,
    /// The time to its end, in nanoseconds.
    pub delay: u64,
}

/// Passes the answer of a job on, unless the device is silent.
pub fn pass(job: usize, answer: Answer) -> Option<Passed> {
    let errors = ERRORS.load(Ordering::Relaxed);
    let mut fails = matches!(answer, Answer::Write(..))
        && errors > 0
        && (WRITTEN.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(errors);
    if ANSWERED.load(Ordering::Relaxed) != u64::MAX {
        // Read again with the lock held: `end_silence` changes it under the lock. An answer that
        // joined the others after that would be withheld for ever.
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

/// Fails the requests of a thread that a silent device withholds: the thread is about to be killed,
/// or has ended. So do those of the kernel's own threads, for one of which the thread may wait.
/// Each is answered when the device is done with its memory.
pub fn give_up(thread: u32) {
    give_up_some(|asker| asker == thread || asker == OF_KERNEL);
}

/// The number of the kernel's own threads.
const OF_KERNEL: u32 = 0;

/// Fails all requests that a silent device withholds, and withholds no more: the machine ends.
pub fn end_silence() {
    {
        let _withheld = SILENCE.lock();
        ANSWERED.store(u64::MAX, Ordering::Relaxed);
    }
    give_up_some(|_| true);
}

fn give_up_some(is_given_up: impl Fn(u32) -> bool) {
    loop {
        // The lock is free again when an answer wakes threads.
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
