//! The driver of the disk: a virtio block device, whose interrupt answers the requests of pagers.
//!
//! A request of a pager is a *job* of one or more pieces, each a stretch of memory and of the disk.
//! Pieces that the device's queue has no room for wait in a list, and the interrupt handler begins
//! them. Jobs, pieces and the device's own buffers lie in fixed pools, so no transfer allocates,
//! but for the timers of `disk-delay`.

mod hal;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::mem;
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use bindery::{KeptRead, KeptWrite, PagerError, Platform};
use spin::Once;
use virtio_drivers::device::blk::{BlkReq, BlkResp, SECTOR_SIZE, VirtIOBlk};

use crate::arch::disk::{Found, Transport, find};
use crate::memory::memory;
use crate::platform::Machine;
use crate::sync::{self, Mutex};
use crate::time::{self, Event};
use crate::{arch, log, options};
use hal::KernelMemory;

/// The size of a block of the file system, in bytes.
pub const BLOCK_SIZE: usize = 4096;

/// The most pieces that the device works on: its queue has 16 entries, and a piece takes three.
const SLOTS: usize = 5;
/// The most jobs at a time.
const JOBS: usize = 64;
/// The most pieces that wait.
const WAITING: usize = 512;
/// The most jobs whose answers a silent device withholds. It fails those after them, so that other
/// transfers find free jobs.
const WITHHELD: usize = JOBS - 16;

/// The way of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

/// The request that a job answers.
pub enum Answer {
    /// Pages were read, and the number of bytes.
    Read(KeptRead, usize),
    /// Pages were stored.
    Write(KeptWrite),
}

#[derive(Clone, Copy)]
struct Piece {
    block: u64,
    /// The physical address of the memory, and its length in bytes.
    at: u64,
    length: usize,
    direction: Direction,
    job: usize,
}

struct Slot {
    token: u16,
    piece: Piece,
}

#[derive(Default)]
struct Job {
    is_used: bool,
    /// Whether a piece was added.
    has_pieces: bool,
    /// Pieces that are not done, and one for the thread that adds them.
    left: u32,
    has_failed: bool,
    answer: Option<Answer>,
}

/// The device's own part of a transfer.
#[derive(Default)]
struct Buffers {
    request: BlkReq,
    response: BlkResp,
}

struct Driver {
    device: VirtIOBlk<KernelMemory, Transport>,
    slots: [Option<Slot>; SLOTS],
    /// The physical address of a [`Buffers`] for each slot.
    buffers: u64,
    /// The physical address of a page for the file system.
    page: u64,
    jobs: [Job; JOBS],
    waiting: VecDeque<Piece>,
    /// Whether pieces were written since the last flush.
    has_written: bool,
}

static DRIVER: Once<Mutex<Driver>> = Once::new();

/// Changes with each piece that is done: threads that wait for the driver sleep on it.
static CHANGED: AtomicU32 = AtomicU32::new(0);

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

/// The jobs of each direction, their pieces and their bytes.
static TRANSFERS: [[AtomicU64; 3]; 2] = [const { [const { AtomicU64::new(0) }; 3] }; 2];

/// Of one direction: the requests of pagers and the transfers of the file system itself, the pieces
/// that the device was given for them, and the bytes.
pub fn transfers(direction: Direction) -> [u64; 3] {
    TRANSFERS[direction as usize].each_ref().map(|count| count.load(Ordering::Relaxed))
}

/// Finds the disk, if the command line says that there is one.
pub fn begin() {
    if options::value("disk").is_none() {
        return;
    }
    let number = |key| options::value(key).and_then(|value| value.parse().ok());
    ERRORS.store(number("disk-errors").unwrap_or(0), Ordering::Relaxed);
    DELAY.store(number("disk-delay").unwrap_or(0).saturating_mul(1000), Ordering::Relaxed);
    ANSWERED.store(number("disk-silent").unwrap_or(u64::MAX), Ordering::Relaxed);
    SILENCE.lock().reserve_exact(WITHHELD);
    let Some(found) = find::<KernelMemory>() else {
        log!("no disk was found");
        return;
    };
    let (transport, wiring) = found.into_parts();
    let prepared = hal::begin();
    let (Ok(device), Some(buffers), Some(page), Some(())) =
        (VirtIOBlk::new(transport), hal::frames(1), hal::frames(1), prepared)
    else {
        log!("the disk cannot be set up");
        return;
    };
    Found::begin(wiring);
    let driver = Driver {
        device,
        slots: [const { None }; SLOTS],
        buffers: hal::physical(buffers),
        page: hal::physical(page),
        jobs: core::array::from_fn(|_| Job::default()),
        waiting: VecDeque::with_capacity(WAITING),
        has_written: true,
    };
    DRIVER.call_once(|| Mutex::new(driver));
}

/// The disk's size in blocks; `None` without a disk.
pub fn blocks() -> Option<u64> {
    let driver = DRIVER.get()?.lock();
    Some(driver.device.capacity() * SECTOR_SIZE as u64 / BLOCK_SIZE as u64)
}

/// Serves the device's interrupt. Called with interrupts off, by the handler and by threads that
/// wait: at boot no interrupt comes.
pub fn interrupt() {
    let Some(driver) = DRIVER.get() else { return };
    // Before the look: the device interrupts again only after that.
    driver.lock().device.ack_interrupt();
    loop {
        // The lock is free again when an answer wakes threads.
        let Some(finished) = driver.lock().next_finished() else { break };
        if let Some((answer, result)) = finished {
            give(answer, result);
        }
        CHANGED.fetch_add(1, Ordering::Relaxed);
        sync::unpark(&raw const CHANGED);
    }
}

fn give(answer: Answer, result: Result<(), PagerError>) {
    match answer {
        Answer::Read(kept, bytes) => {
            let Ok(mut request) = memory().resume_read(kept) else { return };
            match result {
                Ok(()) => {
                    request.has_filled(bytes);
                    request.supply();
                }
                Err(error) => request.fail(error),
            }
        }
        Answer::Write(kept) => {
            let Ok(request) = memory().resume_write(kept) else { return };
            match result {
                Ok(()) => request.stored(),
                Err(error) => request.fail(error),
            }
        }
    }
}

type Finished = Option<(Answer, Result<(), PagerError>)>;

impl Driver {
    fn buffers(&self, slot: usize) -> NonNull<Buffers> {
        let start = arch::direct_map(self.buffers).cast::<Buffers>();
        // SAFETY: the frame has room for all slots.
        unsafe { start.add(slot) }
    }

    /// Takes the next piece that the device is done with, and begins others. `Some(None)` if its
    /// job has pieces left.
    fn next_finished(&mut self) -> Option<Finished> {
        // The device reads the mark that the last `complete` left before it decides whether to
        // interrupt, so it is visible before the look.
        fence(Ordering::SeqCst);
        let token = self.device.peek_used()?;
        let used = |slot: &Option<Slot>| slot.as_ref().is_some_and(|slot| slot.token == token);
        let index = self.slots.iter().position(used).expect("the device returns what it was given");
        let Slot { piece, .. } = self.slots[index].take()?;
        let mut buffers = self.buffers(index);
        // SAFETY: the slot's buffers are the device's no more, and the piece's memory belongs to
        // the job's request until that is answered. They are those that `start` passed.
        let outcome = unsafe {
            let Buffers { request, response } = buffers.as_mut();
            let bytes = arch::direct_map(piece.at).as_ptr();
            let bytes = slice::from_raw_parts_mut(bytes, piece.length);
            match piece.direction {
                Direction::Read => {
                    self.device.complete_read_blocks(token, request, bytes, response)
                }
                Direction::Write => {
                    self.device.complete_write_blocks(token, request, bytes, response)
                }
            }
        };
        if let Some(next) = self.waiting.pop_front() {
            self.start(next);
        }
        Some(self.done(piece.job, outcome.is_ok()))
    }

    /// A piece of the job is done, or its last one was added.
    fn done(&mut self, job: usize, is_well: bool) -> Finished {
        let job = &mut self.jobs[job];
        job.has_failed |= !is_well;
        job.left -= 1;
        if job.left > 0 {
            return None;
        }
        // A job without an answer is taken by the thread that waits for it.
        let answer = job.answer.take()?;
        let result = if job.has_failed { Err(PagerError::InputOutput) } else { Ok(()) };
        *job = Job::default();
        Some((answer, result))
    }

    /// Makes the device keep what was written. It works on nothing.
    fn flush(&mut self) -> Result<(), PagerError> {
        if self.has_written {
            self.device.flush().map_err(|_| PagerError::InputOutput)?;
            self.has_written = false;
        }
        Ok(())
    }

    /// Begins a piece, or puts it into the list.
    fn start(&mut self, piece: Piece) {
        let Some(index) = self.slots.iter().position(Option::is_none) else {
            self.waiting.push_front(piece);
            return;
        };
        let [_, pieces, bytes] = &TRANSFERS[piece.direction as usize];
        pieces.fetch_add(1, Ordering::Relaxed);
        bytes.fetch_add(piece.length as u64, Ordering::Relaxed);
        self.has_written |= piece.direction == Direction::Write;
        let sector = piece.block as usize * (BLOCK_SIZE / SECTOR_SIZE);
        let mut buffers = self.buffers(index);
        // SAFETY: the slot is free, so the device does not use its buffers; the piece's memory
        // belongs to the job's request until that is answered, which comes after `complete`.
        let token = unsafe {
            let Buffers { request, response } = buffers.as_mut();
            let bytes = arch::direct_map(piece.at).as_ptr();
            let bytes = slice::from_raw_parts_mut(bytes, piece.length);
            match piece.direction {
                Direction::Read => self.device.read_blocks_nb(sector, request, bytes, response),
                Direction::Write => self.device.write_blocks_nb(sector, request, bytes, response),
            }
        };
        // Each slot has its share of the queue.
        let token = token.expect("the queue has room for each slot");
        self.slots[index] = Some(Slot { token, piece });
    }
}

/// Sleeps until `ready` gives something. At boot it polls the device.
fn wait_for<T>(mut ready: impl FnMut(&mut Driver) -> Option<T>) -> T {
    let driver = DRIVER.get().expect("only the file system of a disk transfers");
    loop {
        let seen = CHANGED.load(Ordering::Acquire);
        if let Some(value) = ready(&mut driver.lock()) {
            return value;
        }
        sync::park(&CHANGED, seen);
        interrupt();
    }
}

/// A job whose pieces are being added.
pub struct NewJob(usize);

impl NewJob {
    /// A job without pieces. Sleeps while there are too many.
    pub fn new() -> Self {
        Self(wait_for(|driver| {
            let index = driver.jobs.iter().position(|job| !job.is_used)?;
            driver.jobs[index] = Job { is_used: true, left: 1, ..Job::default() };
            Some(index)
        }))
    }

    /// Adds a transfer of whole blocks from `block` on. The memory at the physical address `at`
    /// belongs to the request that the job answers, or to the caller of [`NewJob::wait`]. Sleeps
    /// while too many wait.
    pub fn add(&self, direction: Direction, block: u64, at: u64, length: usize) {
        let piece = Piece { block, at, length, direction, job: self.0 };
        wait_for(|driver| {
            if driver.waiting.len() >= WAITING {
                return None;
            }
            let job = &mut driver.jobs[piece.job];
            job.left += 1;
            if !mem::replace(&mut job.has_pieces, true) {
                TRANSFERS[piece.direction as usize][0].fetch_add(1, Ordering::Relaxed);
            }
            if driver.slots.iter().any(Option::is_none) {
                driver.start(piece);
            } else {
                driver.waiting.push_back(piece);
            }
            Some(())
        });
    }

    /// Answers a request when all pieces are done. Content may fail, and answers may be late or
    /// withheld, on request of the command line.
    pub fn answer(self, answer: Answer) {
        let errors = ERRORS.load(Ordering::Relaxed);
        let mut fails = matches!(answer, Answer::Write(_))
            && errors > 0
            && (WRITTEN.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(errors);
        if ANSWERED.load(Ordering::Relaxed) != u64::MAX {
            // Read again with the lock held: `end_silence` changes it under the lock. An answer
            // that joined the others after that would be withheld for ever.
            let mut withheld = SILENCE.lock();
            match ANSWERED.load(Ordering::Relaxed) {
                0 if withheld.len() < WITHHELD => {
                    withheld.push((Machine.thread(), self.0, answer));
                    return;
                }
                0 => fails = true,
                u64::MAX => {}
                left => ANSWERED.store(left - 1, Ordering::Relaxed),
            }
        }
        match DELAY.load(Ordering::Relaxed) {
            0 => finish(self.0, answer, !fails),
            delay => {
                let late = move || finish(self.0, answer, !fails);
                time::schedule(time::now().saturating_add(delay), Event::Call(Box::new(late)));
            }
        }
    }

    /// Waits until all pieces are done.
    ///
    /// # Errors
    /// If one has failed.
    pub fn wait(self) -> Result<(), PagerError> {
        let is_well = wait_for(|driver| {
            let job = &mut driver.jobs[self.0];
            (job.left == 1).then(|| !mem::take(job).has_failed)
        });
        if is_well { Ok(()) } else { Err(PagerError::InputOutput) }
    }
}

/// All pieces of a job have been added: it is answered once they are done.
fn finish(job: usize, answer: Answer, is_well: bool) {
    let driver = DRIVER.get().expect("only the file system of a disk transfers");
    let finished = {
        let mut driver = driver.lock();
        driver.jobs[job].answer = Some(answer);
        driver.done(job, is_well)
    };
    if let Some((answer, result)) = finished {
        give(answer, result);
        CHANGED.fetch_add(1, Ordering::Relaxed);
        sync::unpark(&raw const CHANGED);
    }
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

/// Transfers whole blocks, and returns when that is done.
///
/// # Errors
/// The device's failure.
pub fn transfer(
    direction: Direction,
    block: u64,
    at: u64,
    length: usize,
) -> Result<(), PagerError> {
    let job = NewJob::new();
    job.add(direction, block, at, length);
    job.wait()
}

/// Makes the device keep all that was written, if anything was.
///
/// # Errors
/// The device's failure.
pub fn flush() -> Result<(), PagerError> {
    // The driver waits for the answer itself, so nothing else may be under way.
    wait_for(|driver| {
        let is_idle = driver.waiting.is_empty() && driver.slots.iter().all(Option::is_none);
        is_idle.then(|| driver.flush())
    })
}

/// A page of the kernel's own for the transfers of the file system: its physical address.
pub fn own_page() -> Option<u64> {
    Some(DRIVER.get()?.lock().page)
}
