//! Pipes.

use alloc::format;
use alloc::sync::Arc;
use core::any::Any;
use core::ptr::NonNull;
use core::slice;

use bindery::{Access, VmallocOptions};
use linux_raw_sys::general::{
    O_NONBLOCK, O_RDONLY, O_WRONLY, POLLERR, POLLHUP, POLLIN, POLLOUT, SIGPIPE,
};

use crate::errno::{Errno, Outcome};
use crate::heap;
use crate::memory::Pages;
use crate::process::{Interrupted, WaitQueue, signal};
use crate::sync::Mutex;

use super::attributes::{Attributes, Kind, Patience};
use super::descriptor::Description;
use super::inode::new_number;
use super::node::{Node, Place, may_read, may_write};
use super::poll;
use super::segments::Segments;
use super::transfer::{Step, by_steps};

/// The capacity of a pipe in bytes.
pub const CAPACITY: usize = 64 << 10;

/// Writes of up to this many bytes are atomic.
const ATOMIC: usize = 4096;

/// Bytes that are added or removed together.
const PIECE: usize = 4096;

/// A pipe, whose two ends are openings of this node.
pub struct Pipe {
    number: u64,
    state: Mutex<State>,
    changed: WaitQueue,
}

#[derive(Default)]
struct State {
    bytes: Ring,
    readers: u32,
    writers: u32,
    /// Whether a call is copying the first bytes to another file. That may sleep, so no other call
    /// may take these bytes.
    claimed: bool,
    /// The numbers of openings for reading and for writing. A thread that waits for the other side
    /// may wake after that side was opened and closed.
    openings: [u64; 2],
}

impl State {
    /// The number of bytes that can be read now. `None` if the pipe is empty but more bytes may
    /// come.
    fn readable(&self) -> Option<usize> {
        let empty = self.bytes.length == 0;
        (!self.claimed && (!empty || self.writers == 0)).then_some(self.bytes.length)
    }
}

/// The buffered bytes, at most [`CAPACITY`]. The first write allocates their memory.
#[derive(Default)]
struct Ring {
    memory: Option<Pages>,
    first: usize,
    length: usize,
}

impl Ring {
    fn free(&self) -> usize {
        CAPACITY - self.length
    }

    /// Appends up to `count` bytes, for which there is room. `take` fills them: its arguments are
    /// the number of bytes so far, the place for further bytes, and the number of bytes wanted. It
    /// returns the number of bytes that it filled.
    fn push(
        &mut self,
        count: usize,
        mut take: impl FnMut(usize, NonNull<u8>, usize) -> usize,
    ) -> Step {
        let at = (self.first + self.length) % CAPACITY;
        let step = self.step(at, count, &mut take);
        self.length += step.count;
        step
    }

    /// Removes at most `count` bytes and passes them to `put`, as in [`Ring::push`].
    fn pop(
        &mut self,
        count: usize,
        mut put: impl FnMut(usize, NonNull<u8>, usize) -> usize,
    ) -> Step {
        let step = self.step(self.first, count.min(self.length), &mut put);
        self.length -= step.count;
        // Restarts at the beginning if the ring is empty, so that few bytes touch few pages.
        self.first = if self.length == 0 { 0 } else { (self.first + step.count) % CAPACITY };
        step
    }

    /// Copies `count` bytes to or from `at` in the ring.
    fn step(
        &mut self,
        at: usize,
        count: usize,
        act: &mut dyn FnMut(usize, NonNull<u8>, usize) -> usize,
    ) -> Step {
        let Some(memory) = &mut self.memory else { return Step::default() };
        let before_end = count.min(CAPACITY - at);
        let bytes = memory.bytes();
        let mut reached = act(0, NonNull::from(&mut bytes[at..]).cast(), before_end);
        if reached == before_end && count > before_end {
            reached += act(before_end, NonNull::from(bytes).cast(), count - before_end);
        }
        // As on Linux, a page is copied completely or not at all.
        if reached < count {
            return Step { count: reached - reached % PIECE, fault: Some(reached) };
        }
        Step { count, fault: None }
    }
}

impl Pipe {
    /// A pipe that is not open.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new() -> Result<Arc<Self>, Errno> {
        heap::room(1024)?;
        let state = Mutex::new(State::default());
        Ok(Arc::new(Self { number: new_number(), state, changed: WaitQueue::new() }))
    }

    /// The number of unread bytes.
    pub fn waiting(&self) -> usize {
        self.state.lock().bytes.length
    }

    /// Waits until there is room. Returns its size.
    ///
    /// # Errors
    /// `EPIPE` with `SIGPIPE` if there are no readers; `EAGAIN`; the error of an interruption by a
    /// signal; `ENOMEM`.
    pub fn room(&self, patience: Patience) -> Result<usize, Errno> {
        let room = self.wait(patience, |state| {
            if state.readers == 0 {
                return Some(Err(Errno::EPIPE));
            }
            Some(state.bytes.free()).filter(|free| *free > 0).map(Ok)
        });
        if room == Err(Errno::EPIPE) {
            signal::send_to_this_thread(SIGPIPE);
        }
        room
    }

    /// Waits until the pipe has bytes and copies those that fit. The bytes stay in the pipe.
    /// Returns 0 without writers.
    ///
    /// # Errors
    /// `EAGAIN`, or the error of an interruption by a signal.
    pub fn peek(&self, into: &mut [u8], patience: Patience) -> Result<usize, Errno> {
        self.look(into, patience, |_| {})
    }

    /// As [`Pipe::peek`]. The bytes, if any, are reserved for the caller until
    /// [`Pipe::take_claimed`], which must follow.
    ///
    /// # Errors
    /// As [`Pipe::peek`].
    pub fn claim(&self, into: &mut [u8], patience: Patience) -> Result<usize, Errno> {
        self.look(into, patience, |state| state.claimed = true)
    }

    /// Removes `count` of the bytes that the caller has claimed and releases the rest to other
    /// readers.
    pub fn take_claimed(&self, count: usize) {
        let mut state = self.state.lock();
        state.claimed = false;
        state.bytes.pop(count, |_, _, length| length);
        drop(state);
        self.tell();
    }

    fn look(
        &self,
        into: &mut [u8],
        patience: Patience,
        found: impl Fn(&mut State),
    ) -> Result<usize, Errno> {
        self.wait(patience, |state| {
            let count = into.len().min(state.readable()?);
            if count == 0 {
                return Some(Ok(0));
            }
            found(state);
            let put = |done: usize, from: NonNull<u8>, length: usize| {
                // SAFETY: as in `read`.
                let from = unsafe { slice::from_raw_parts(from.as_ptr(), length) };
                into[done..done + length].copy_from_slice(from);
                length
            };
            let first = state.bytes.first;
            Some(Ok(state.bytes.step(first, count, &mut { put }).count))
        })
    }

    /// Counts an opening.
    fn join(&self, flags: u32) {
        let mut state = self.state.lock();
        let (reads, writes) = (may_read(flags), may_write(flags));
        state.readers += u32::from(reads);
        state.writers += u32::from(writes);
        state.openings[0] += u64::from(reads);
        state.openings[1] += u64::from(writes);
        drop(state);
        self.tell();
    }

    fn tell(&self) {
        self.changed.wake_all();
        poll::changed();
    }

    /// Sleeps until `ready` returns a value.
    fn wait<T>(
        &self,
        patience: Patience,
        mut ready: impl FnMut(&mut State) -> Option<Result<T, Errno>>,
    ) -> Result<T, Errno> {
        if patience == Patience::None {
            return ready(&mut self.state.lock()).unwrap_or(Err(Errno::EAGAIN));
        }
        match self.changed.wait(None, || ready(&mut self.state.lock())) {
            Ok(result) => result,
            Err(Interrupted::Signal | Interrupted::Deadline) => Err(Errno::RESTART),
        }
    }
}

impl Pipe {
    /// Reads up to `length` bytes. `put` receives them in place, with the pipe locked. If `put`
    /// stops early, `fault_in` is called for that place without the lock.
    fn take_out(
        &self,
        length: usize,
        patience: Patience,
        mut put: impl FnMut(usize, NonNull<u8>, usize) -> usize,
        fault_in: impl Fn(usize) -> Result<(), Errno>,
    ) -> Result<usize, Errno> {
        if length == 0 {
            return Ok(0);
        }
        let step = |done: usize| {
            let now = if done > 0 { Patience::None } else { patience };
            let step = self.wait(now, |state| {
                if state.readable()? == 0 {
                    return Some(Ok(Step::default()));
                }
                let put = |moved, from, length| put(done + moved, from, length);
                Some(Ok(state.bytes.pop(length - done, put)))
            });
            step.inspect(|step| self.tell_of(step))
        };
        by_steps(step, fault_in, |_| false)
    }

    /// Writes `length` bytes, which `take` supplies; otherwise as [`Pipe::take_out`].
    fn put_in(
        &self,
        length: usize,
        patience: Patience,
        mut take: impl FnMut(usize, NonNull<u8>, usize) -> usize,
        fault_in: impl Fn(usize) -> Result<(), Errno>,
    ) -> Result<usize, Errno> {
        if length == 0 {
            return Ok(0);
        }
        self.make_room()?;
        let step = |done: usize| {
            let left = length - done;
            let step = self.wait(patience, |state| {
                if state.readers == 0 {
                    return Some(Err(Errno::EPIPE));
                }
                let free = state.bytes.free();
                let needed = if length <= ATOMIC { left } else { 1 };
                if free < needed {
                    return None;
                }
                let take = |moved, to, length| take(done + moved, to, length);
                Some(Ok(state.bytes.push(left.min(free), take)))
            });
            if step.as_ref().is_err_and(|errno| *errno == Errno::EPIPE) {
                signal::send_to_this_thread(SIGPIPE);
            }
            step.inspect(|step| self.tell_of(step))
        };
        by_steps(step, fault_in, |done| done < length)
    }

    /// Wakes the other side if a step has moved bytes.
    fn tell_of(&self, step: &Step) {
        if step.count > 0 {
            self.tell();
        }
    }

    /// Allocates the memory of the ring unless it exists, so that the write itself allocates
    /// nothing.
    ///
    /// # Errors
    /// `ENOMEM`.
    #[inline]
    pub fn make_room(&self) -> Result<(), Errno> {
        if self.state.lock().bytes.memory.is_some() { Ok(()) } else { self.make_ring() }
    }

    #[cold]
    fn make_ring(&self) -> Result<(), Errno> {
        // Done without the lock, because an allocation may sleep.
        let mut memory = Some(Pages::new(CAPACITY, &VmallocOptions::default())?);
        let mut state = self.state.lock();
        if state.bytes.memory.is_none() {
            state.bytes.memory = memory.take();
        }
        drop(state);
        Ok(())
    }
}

impl Node for Pipe {
    fn kind(&self) -> Kind {
        Kind::Pipe
    }

    fn attributes(&self) -> Attributes {
        Attributes::plain(self.number, 0o600)
    }

    fn open(&self, flags: u32) -> Result<Option<Arc<dyn Node>>, Errno> {
        // A named pipe: opening one side waits for the other (see fifo(7)).
        let waits = flags & O_NONBLOCK == 0;
        let (reads, writes) = (may_read(flags), may_write(flags));
        if writes && !reads && !waits && self.state.lock().readers == 0 {
            return Err(Errno::ENXIO);
        }
        let seen = self.state.lock().openings;
        self.join(flags);
        if waits && reads != writes {
            let met = self.wait(Patience::Wait, |state| {
                let others = if reads { state.writers } else { state.readers };
                let other = usize::from(reads);
                (others > 0 || state.openings[other] != seen[other]).then_some(Ok(()))
            });
            met.inspect_err(|_| self.closed(flags))?;
        }
        Ok(None)
    }

    fn closed(&self, flags: u32) {
        let mut state = self.state.lock();
        state.readers -= u32::from(may_read(flags));
        state.writers -= u32::from(may_write(flags));
        drop(state);
        self.tell();
    }

    fn read(&self, _: u64, into: &mut [u8], patience: Patience) -> Result<usize, Errno> {
        let all = into.len();
        let put = |done: usize, from: NonNull<u8>, length: usize| {
            // SAFETY: the ring has the bytes and does not overlap `into`.
            let from = unsafe { slice::from_raw_parts(from.as_ptr(), length) };
            into[done..done + length].copy_from_slice(from);
            length
        };
        self.take_out(all, patience, put, |_| Err(Errno::EFAULT))
    }

    fn write(&self, _: u64, from: &[u8], patience: Patience) -> Result<usize, Errno> {
        let take = |done: usize, to: NonNull<u8>, length: usize| {
            // SAFETY: as in `read`.
            let to = unsafe { slice::from_raw_parts_mut(to.as_ptr(), length) };
            to.copy_from_slice(&from[done..done + length]);
            length
        };
        self.put_in(from.len(), patience, take, |_| Err(Errno::EFAULT))
    }

    fn read_into(&self, _: u64, to: &Segments, patience: Patience) -> Option<Outcome> {
        // SAFETY: the ring has the bytes.
        let put = |done, from, length| unsafe { to.put(done, from, length) };
        let fault_in = |done: usize| to.fault_in(done as u64, Access::Write);
        let read = self.take_out(to.total() as usize, patience, put, fault_in);
        Some(read.map(|count| count as u64))
    }

    fn write_from(&self, _: u64, from: &Segments, patience: Patience) -> Option<Outcome> {
        // SAFETY: as above.
        let take = |done, to, length| unsafe { from.take(done, to, length) };
        let fault_in = |done: usize| from.fault_in(done as u64, Access::Read);
        let written = self.put_in(from.total() as usize, patience, take, fault_in);
        Some(written.map(|count| count as u64))
    }

    fn ready(&self) -> u32 {
        let state = self.state.lock();
        let mut ready = 0;
        if state.bytes.length > 0 && !state.claimed {
            ready |= POLLIN;
        }
        if state.bytes.free() >= ATOMIC {
            ready |= POLLOUT;
        }
        if state.writers == 0 {
            ready |= POLLHUP;
        }
        if state.readers == 0 {
            ready |= POLLERR;
        }
        ready
    }

    fn writers_so_far(&self) -> u64 {
        let state = self.state.lock();
        // With a writer, the count is not 0: the opening has seen one.
        if state.writers == 0 { state.openings[1] } else { 0 }
    }

    fn lacks_writer_since(&self, remembered: u64) -> bool {
        self.state.lock().openings[1] == remembered
    }

    fn special(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

/// A pipe and its two ends: a description to read from, one to write to.
///
/// # Errors
/// `ENOMEM`.
pub fn both_ends(flags: u32) -> Result<[Arc<Description>; 2], Errno> {
    let pipe = Pipe::new()?;
    let place = Place::alone(pipe.clone(), format!("pipe:[{}]", pipe.number).as_bytes());
    let end = |access: u32| {
        pipe.join(access);
        let end = Description::new(place.clone(), pipe.clone(), access | flags);
        end.inspect_err(|_| pipe.closed(access))
    };
    Ok([end(O_RDONLY)?, end(O_WRONLY)?])
}

/// The pipe behind a node, if the node is one.
pub fn of(node: &dyn Node) -> Option<&Pipe> {
    node.special()?.downcast_ref()
}
