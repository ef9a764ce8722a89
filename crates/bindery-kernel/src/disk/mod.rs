//! The driver of the disk: a virtio block device, whose interrupt answers the requests of pagers.
//!
//! A request of a pager is a *job* of one or more pieces, each a stretch of memory and of the disk.
//! Pieces that the device's queue has no room for wait in a list, and the interrupt handler begins
//! them. Jobs, pieces and the device's own buffers lie in fixed pools, so no transfer allocates,
//! but for the timers of `disk-delay`.

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

/// The most pieces that the device works on: its queue has 16 entries, and a piece takes three.
const SLOTS: usize = 5;
/// The most jobs at a time.
const JOBS: usize = 64;
/// The most pieces that wait.
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
    /// Pages were stored; whom to tell first.
    Write(KeptWrite, Option<Ended>),
}

/// A function of the file system that hears of the end of a store before the request is answered.
pub struct Ended {
    /// The function: of `with`, and whether the device has the content.
    pub call: fn(usize, bool),
    /// Its first argument.
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
    /// The block behind it.
    fn end(&self) -> u64 {
        self.block + (self.length / BLOCK_SIZE) as u64
    }
}

/// An entry of the list. The order is kept around flushes: pieces before one are done first, and
/// those behind it begin afterwards, so no flush waits for later pieces.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waiting {
    Piece(Piece),
    /// A flush of this number, which its thread does once the device works on nothing.
    Flush(u64),
}

struct Slot {
    token: u16,
    piece: Piece,
    /// What a test wants of it.
    fate: Fate,
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
    waiting: VecDeque<Waiting>,
    /// The number of the last flush.
    flushes: u64,
    /// Whether pieces were written since the last flush.
    has_written: bool,
}

static DRIVER: Once<Mutex<Driver>> = Once::new();

/// Changes with each piece that is done: threads that wait for the driver sleep on it.
static CHANGED: AtomicU32 = AtomicU32::new(0);

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

    /// Takes the next piece that the device is done with, and begins others. `Some(None)` if its
    /// job has pieces left.
    fn next_finished(&mut self) -> Option<Finished> {
        // The device reads the mark that the last `complete` left before it decides whether to
        // interrupt, so it is visible before the look.
        fence(Ordering::SeqCst);
        let token = self.device.peek_used()?;
        let used = |slot: &Option<Slot>| slot.as_ref().is_some_and(|slot| slot.token == token);
        let index = self.slots.iter().position(used).expect("the device returns what it was given");
        let Slot { piece, fate, .. } = self.slots[index].take()?;
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
        self.start_waiting();
        Some(self.done(piece.job, outcome.is_ok() && fate != Fate::Failed))
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

    /// Adds a flush to the list; `Some(None)` if there is nothing to flush, and `None` if there is
    /// no room.
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

    /// Does a flush of the list if it is the next thing to do.
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

    /// Begins the next pieces of the list, up to a flush.
    fn start_waiting(&mut self) {
        while self.slots.iter().any(Option::is_none)
            && let Some(Waiting::Piece(next)) = self.waiting.front().copied()
        {
            self.waiting.pop_front();
            self.start(next);
        }
    }

    /// Begins a piece. There is a free slot.
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
            // To the disk's last blocks, which those tests leave free.
            Fate::Lost | Fate::Failed => {
                self.device.capacity() as usize - piece.length / SECTOR_SIZE
            }
        };
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
        self.slots[index] = Some(Slot { token, piece, fate });
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
pub struct NewJob {
    index: usize,
    /// The device is silent: it transfers nothing.
    is_silent: bool,
}

impl NewJob {
    /// A job of content without pieces. Sleeps while there are too many.
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
    /// while too many wait.
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

    /// Answers a request when all pieces are done. Content may fail, and answers may be late or
    /// withheld, on request of the command line.
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
    /// If one has failed.
    pub fn wait(self) -> Result<(), PagerError> {
        let is_well = wait_for(|driver| {
            let job = &mut driver.jobs[self.index];
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
        note_change();
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

/// Makes the device keep all that was written, if anything was. Waits for the transfers that were
/// begun before, and for none that are begun later.
///
/// # Errors
/// The device's failure.
pub fn flush() -> Result<(), PagerError> {
    let Some(number) = wait_for(Driver::add_flush) else { return Ok(()) };
    // The driver waits for the answer itself, so nothing else may be under way.
    let flushed = wait_for(|driver| driver.flush(number));
    note_change();
    flushed
}

/// Wakes the threads that wait for the driver.
fn note_change() {
    CHANGED.fetch_add(1, Ordering::Relaxed);
    sync::unpark(&raw const CHANGED);
}

/// A page of the kernel's own for the transfers of the file system: its physical address.
pub fn own_page() -> Option<u64> {
    Some(DRIVER.get()?.lock().page)
}
