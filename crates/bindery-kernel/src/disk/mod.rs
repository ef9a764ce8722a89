//! The driver of the disk: a virtio block device, whose interrupt answers the requests of pagers.
//!
//! A request of a pager is a *job* of one or more pieces, each a stretch of memory and of the disk.
//! Pieces that do not fit in the device's queue wait in a list until the interrupt handler submits
//! them. Jobs, pieces and the device's own buffers lie in fixed pools, so a transfer never
//! allocates, except the timers of `disk-delay`.

mod hal;
mod trouble;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use core::mem;
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use bindery::{KeptRead, KeptWrite, PagerError};
use spin::Once;
use virtio_drivers::device::blk::{BlkReq, BlkResp, SECTOR_SIZE, VirtIOBlk};

use crate::arch::disk::{Found, Transport, find};
use crate::memory::memory;
use crate::sync::{self, Mutex};
use crate::time::{self, Event};
use crate::{arch, log, options};
use hal::KernelMemory;
use trouble::{Fate, Passed};

pub use trouble::{end_silence, give_up, lose_power, plan};

/// The size of a block of the file system, in bytes.
pub const BLOCK_SIZE: usize = 4096;

/// The maximum number of pieces in flight: the device's queue has 16 entries, and a piece takes
/// three.
const SLOTS: usize = 5;
/// The most jobs at a time.
const JOBS: usize = 64;
/// The maximum number of waiting pieces.
const WAITING: usize = 512;

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
    /// Pages were stored; the function to call first.
    Write(KeptWrite, Option<Ended>),
}

/// A function of the file system that is called when a store ends, before the request is answered.
pub struct Ended {
    /// The function. Its arguments are `with` and whether the device has the content.
    pub call: fn(usize, bool),
    /// The function's first argument.
    pub with: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Piece {
    block: u64,
    /// The physical address of the memory, and its length in bytes.
    at: u64,
    length: usize,
    direction: Direction,
    job: usize,
}

impl Piece {
    /// The block after the piece.
    fn end(&self) -> u64 {
        self.block + (self.length / BLOCK_SIZE) as u64
    }
}

/// An entry of the list. Flushes preserve order: the pieces before a flush complete first, and the
/// pieces after it are submitted afterwards, so no flush waits for later pieces.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waiting {
    Piece(Piece),
    /// The flush with this number, which its thread performs once no piece is in flight.
    Flush(u64),
}

struct Slot {
    token: u16,
    piece: Piece,
    /// The fate that a test has planned for the piece.
    fate: Fate,
}

#[derive(Default)]
struct Job {
    is_used: bool,
    /// Whether a piece was added.
    has_pieces: bool,
    /// The number of incomplete pieces, plus one while a thread still adds pieces.
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
    waiting: VecDeque<Waiting>,
    /// The number of the last flush.
    flushes: u64,
    /// Whether pieces were written since the last flush.
    has_written: bool,
}

static DRIVER: Once<Mutex<Driver>> = Once::new();

/// Changes whenever a piece completes. Threads that wait for the driver sleep on it.
static CHANGED: AtomicU32 = AtomicU32::new(0);

/// The jobs of each direction, their pieces and their bytes.
static TRANSFERS: [[AtomicU64; 3]; 2] = [const { [const { AtomicU64::new(0) }; 3] }; 2];

/// The counts of one direction: the requests of pagers plus the file system's own transfers, the
/// pieces submitted to the device for them, and the bytes.
pub fn transfers(direction: Direction) -> [u64; 3] {
    TRANSFERS[direction as usize].each_ref().map(|count| count.load(Ordering::Relaxed))
}

/// Finds the disk, if the command line says that there is one.
pub fn begin() {
    if options::value("disk").is_none() {
        return;
    }
    trouble::begin();
    let Some(found) = find::<KernelMemory>() else {
        log!("/disk is not mounted: the machine has no virtio disk");
        return;
    };
    let (transport, wiring) = found.into_parts();
    let prepared = hal::begin();
    let (Ok(device), Some(buffers), Some(page), Some(())) =
        (VirtIOBlk::new(transport), hal::frames(1), hal::frames(1), prepared)
    else {
        log!("/disk is not mounted: the disk's driver cannot be set up");
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
        flushes: 0,
        has_written: true,
    };
    DRIVER.call_once(|| Mutex::new(driver));
}

/// The disk's size in blocks; `None` without a disk.
pub fn blocks() -> Option<u64> {
    let driver = DRIVER.get()?.lock();
    Some(driver.device.capacity() * SECTOR_SIZE as u64 / BLOCK_SIZE as u64)
}

/// Serves the device's interrupt. Called with interrupts off, by the handler and by waiting
/// threads, because no interrupt arrives at boot.
pub fn interrupt() {
    let Some(driver) = DRIVER.get() else { return };
    // Before the queue is read, because the device interrupts again only after the acknowledgment.
    driver.lock().device.ack_interrupt();
    loop {
        // The lock is released before an answer wakes threads.
        let Some(finished) = driver.lock().next_finished() else { break };
        if let Some((answer, result)) = finished {
            give(answer, result);
        }
        note_change();
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
        Answer::Write(kept, ended) => {
            if let Some(Ended { call, with }) = ended {
                call(with, result.is_ok());
            }
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

    /// Removes the next completed piece and submits others. `Some(None)` if its job has pieces
    /// left.
    fn next_finished(&mut self) -> Option<Finished> {
        // The device reads the mark that the last `complete` left before it decides whether to
        // interrupt. The fence makes that mark visible before the queue is read.
        fence(Ordering::SeqCst);
        let token = self.device.peek_used()?;
        let used = |slot: &Option<Slot>| slot.as_ref().is_some_and(|slot| slot.token == token);
        let index = self.slots.iter().position(used).expect("the device returns what it was given");
        let Slot { piece, fate, .. } = self.slots[index].take()?;
        let mut buffers = self.buffers(index);
        // SAFETY: the device no longer uses the slot's buffers, and the piece's memory belongs to
        // the job's request until the request is answered. Both are the ones that `start` passed.
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
        self.start_waiting();
        Some(self.done(piece.job, outcome.is_ok() && fate != Fate::Failed))
    }

    /// Records that a piece of the job has completed, or that its last piece was added.
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

    /// Adds a flush to the list; `Some(None)` if nothing has to be flushed, and `None` if the list
    /// has no room.
    fn add_flush(&mut self) -> Option<Option<u64>> {
        if !self.has_written {
            return Some(None);
        }
        if self.waiting.len() >= WAITING {
            return None;
        }
        self.flushes += 1;
        self.waiting.push_back(Waiting::Flush(self.flushes));
        Some(Some(self.flushes))
    }

    /// Performs the flush with this number if it is first in the list and nothing is in flight.
    fn flush(&mut self, number: u64) -> Option<Result<(), PagerError>> {
        let is_next = self.waiting.front() == Some(&Waiting::Flush(number));
        if !is_next || self.slots.iter().any(Option::is_some) {
            return None;
        }
        let flushed = if self.has_written {
            trouble::before_a_flush();
            self.device.flush()
        } else {
            Ok(())
        };
        self.has_written &= flushed.is_err();
        self.waiting.pop_front();
        self.start_waiting();
        Some(flushed.map_err(|_| PagerError::InputOutput))
    }

    /// Submits the next pieces of the list, up to a flush.
    fn start_waiting(&mut self) {
        while self.slots.iter().any(Option::is_none)
            && let Some(Waiting::Piece(next)) = self.waiting.front().copied()
        {
            self.waiting.pop_front();
            self.start(next);
        }
    }

    /// Submits a piece. A slot must be free.
    fn start(&mut self, piece: Piece) {
        let free = self.slots.iter().position(Option::is_none);
        let index = free.expect("the caller has found a free slot");
        let fate = match piece.direction {
            Direction::Write => trouble::before_a_write(&piece),
            Direction::Read => {
                trouble::before_a_read(&piece);
                Fate::Written
            }
        };
        let [_, pieces, bytes] = &TRANSFERS[piece.direction as usize];
        pieces.fetch_add(1, Ordering::Relaxed);
        bytes.fetch_add(piece.length as u64, Ordering::Relaxed);
        self.has_written |= piece.direction == Direction::Write;
        let sector = match fate {
            Fate::Written => piece.block as usize * (BLOCK_SIZE / SECTOR_SIZE),
            // Such a piece is written to the disk's last blocks, which these tests leave free.
            Fate::Lost | Fate::Failed => {
                self.device.capacity() as usize - piece.length / SECTOR_SIZE
            }
        };
        let mut buffers = self.buffers(index);
        // SAFETY: the slot is free, so the device does not use its buffers; the piece's memory
        // belongs to the job's request, which is answered only after `complete`.
        let token = unsafe {
            let Buffers { request, response } = buffers.as_mut();
            let bytes = arch::direct_map(piece.at).as_ptr();
            let bytes = slice::from_raw_parts_mut(bytes, piece.length);
            match piece.direction {
                Direction::Read => self.device.read_blocks_nb(sector, request, bytes, response),
                Direction::Write => self.device.write_blocks_nb(sector, request, bytes, response),
            }
        };
        // Each slot has its own share of the queue.
        let token = token.expect("the queue has room for each slot");
        self.slots[index] = Some(Slot { token, piece, fate });
    }
}

/// Sleeps until `ready` returns a value. At boot it polls the device.
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
pub struct NewJob {
    index: usize,
    /// Whether the device is silent, so that it transfers nothing.
    is_silent: bool,
}

impl NewJob {
    /// A job for content, without pieces so far. Sleeps while too many jobs exist.
    pub fn of_content() -> Self {
        let is_silent = trouble::is_silent();
        Self { is_silent, ..Self::new() }
    }

    /// A job of the file system itself.
    fn new() -> Self {
        let index = wait_for(|driver| {
            let index = driver.jobs.iter().position(|job| !job.is_used)?;
            driver.jobs[index] = Job { is_used: true, left: 1, ..Job::default() };
            Some(index)
        });
        Self { index, is_silent: false }
    }

    /// Adds a transfer of whole blocks from `block` on. The memory at the physical address `at`
    /// belongs to the request that the job answers, or to the caller of [`NewJob::wait`]. Sleeps
    /// while too many pieces wait.
    pub fn add(&self, direction: Direction, block: u64, at: u64, length: usize) {
        if self.is_silent {
            return;
        }
        let piece = Piece { block, at, length, direction, job: self.index };
        wait_for(|driver| {
            if driver.waiting.len() >= WAITING {
                return None;
            }
            let job = &mut driver.jobs[piece.job];
            job.left += 1;
            if !mem::replace(&mut job.has_pieces, true) {
                TRANSFERS[piece.direction as usize][0].fetch_add(1, Ordering::Relaxed);
            }
            driver.waiting.push_back(Waiting::Piece(piece));
            driver.start_waiting();
            Some(())
        });
    }

    /// Answers a request when all pieces are done. At the command line's request, content may fail,
    /// and answers may be late or withheld.
    pub fn answer(self, answer: Answer) {
        let Some(Passed { answer, is_well, delay }) = trouble::pass(self.index, answer) else {
            return;
        };
        let is_well = is_well && !self.is_silent;
        if delay == 0 {
            return finish(self.index, answer, is_well);
        }
        let late = move || finish(self.index, answer, is_well);
        time::schedule(time::now().saturating_add(delay), Event::Call(Box::new(late)));
    }

    /// Waits until all pieces are done.
    ///
    /// # Errors
    /// If a transfer has failed.
    pub fn wait(self) -> Result<(), PagerError> {
        let is_well = wait_for(|driver| {
            let job = &mut driver.jobs[self.index];
            (job.left == 1).then(|| !mem::take(job).has_failed)
        });
        if is_well { Ok(()) } else { Err(PagerError::InputOutput) }
    }
}

/// Called when all pieces of a job have been added. The job is answered once they complete.
fn finish(job: usize, answer: Answer, is_well: bool) {
    let driver = DRIVER.get().expect("only the file system of a disk transfers");
    let finished = {
        let mut driver = driver.lock();
        driver.jobs[job].answer = Some(answer);
        driver.done(job, is_well)
    };
    if let Some((answer, result)) = finished {
        give(answer, result);
        note_change();
    }
}

/// Transfers whole blocks and returns when they have completed.
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

/// Makes all earlier writes durable, if there were any. Waits for the transfers begun before
/// the call, but not for later ones.
///
/// # Errors
/// The device's failure.
pub fn flush() -> Result<(), PagerError> {
    let Some(number) = wait_for(Driver::add_flush) else { return Ok(()) };
    // The driver waits for the answer itself, so nothing else may be in flight.
    let flushed = wait_for(|driver| driver.flush(number));
    note_change();
    flushed
}

/// Wakes the threads that wait for the driver.
fn note_change() {
    CHANGED.fetch_add(1, Ordering::Relaxed);
    sync::unpark(&raw const CHANGED);
}

/// The physical address of a kernel page that the file system uses for its own transfers.
pub fn own_page() -> Option<u64> {
    Some(DRIVER.get()?.lock().page)
}
