//! Pipes.

use alloc::format;
use alloc::sync::Arc;

use bindery::VmallocOptions;
use linux_raw_sys::general::{
    O_NONBLOCK, O_RDONLY, O_WRONLY, POLLERR, POLLHUP, POLLIN, POLLOUT, SIGPIPE,
};

use crate::errno::Errno;
use crate::heap;
use crate::memory::Pages;
use crate::process::{self, Interrupted, WaitQueue, signal};
use crate::sync::Mutex;

use super::descriptor::Description;
use super::memory::new_number;
use super::node::{Attributes, Kind, Node, Patience, Place, Special, may_read, may_write};
use super::poll;

/// How much a pipe holds, in bytes.
pub const CAPACITY: usize = 64 << 10;

/// Writes up to this many bytes are never mixed with others.
const ATOMIC: usize = 4096;

/// A pipe; both ends are openings of it.
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
    /// How often it was opened for reading, for writing: who waits for the other side may wake when
    /// that has come and gone.
    openings: [u64; 2],
}

/// Bytes that wait, at most [`CAPACITY`]. There is memory for them from the first write on.
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

    /// Appends bytes for which there is room.
    fn push(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        let Some(memory) = &mut self.memory else { return Err(Errno::ENOMEM) };
        let at = (self.first + self.length) % CAPACITY;
        let (before_end, rest) = bytes.split_at(bytes.len().min(CAPACITY - at));
        memory.bytes()[at..][..before_end.len()].copy_from_slice(before_end);
        memory.bytes()[..rest.len()].copy_from_slice(rest);
        self.length += bytes.len();
        Ok(())
    }

    /// Takes as many bytes as there are, or fit; says how many.
    fn pop(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.length);
        let Some(memory) = &mut self.memory else { return 0 };
        let (before_end, rest) = into[..count].split_at_mut(count.min(CAPACITY - self.first));
        before_end.copy_from_slice(&memory.bytes()[self.first..][..before_end.len()]);
        rest.copy_from_slice(&memory.bytes()[..rest.len()]);
        self.length -= count;
        // From the beginning again where it can be: few bytes stay in few pages.
        self.first = if self.length == 0 { 0 } else { (self.first + count) % CAPACITY };
        count
    }
}

impl Pipe {
    /// A pipe that nobody has opened.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new() -> Result<Arc<Self>, Errno> {
        heap::room(1024)?;
        let state = Mutex::new(State::default());
        Ok(Arc::new(Self { number: new_number(), state, changed: WaitQueue::new() }))
    }

    /// How many bytes wait to be read.
    pub fn waiting(&self) -> usize {
        self.state.lock().bytes.length
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

    /// Waits until `ready` gives something.
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

impl Node for Pipe {
    fn kind(&self) -> Kind {
        Kind::Pipe
    }

    fn attributes(&self) -> Attributes {
        Attributes::plain(self.number, 0o600)
    }

    fn open(self: Arc<Self>, flags: u32) -> Result<Arc<dyn Node>, Errno> {
        // A pipe with a name: each side waits for the other (see fifo(7)).
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
        Ok(self)
    }

    fn closed(&self, flags: u32) {
        let mut state = self.state.lock();
        state.readers -= u32::from(may_read(flags));
        state.writers -= u32::from(may_write(flags));
        drop(state);
        self.tell();
    }

    fn read(&self, _: u64, into: &mut [u8], patience: Patience) -> Result<usize, Errno> {
        if into.is_empty() {
            return Ok(0);
        }
        let count = self.wait(patience, |state| match state.bytes.pop(into) {
            0 => (state.writers == 0).then_some(Ok(0)),
            count => Some(Ok(count)),
        })?;
        self.tell();
        Ok(count)
    }

    fn write(&self, _: u64, from: &[u8], patience: Patience) -> Result<usize, Errno> {
        if !from.is_empty() && self.state.lock().bytes.memory.is_none() {
            // Without the lock, since whoever takes memory may sleep.
            let mut memory = Some(Pages::new(CAPACITY, &VmallocOptions::default())?);
            let mut state = self.state.lock();
            if state.bytes.memory.is_none() {
                state.bytes.memory = memory.take();
            }
            drop(state);
        }
        let mut done = 0;
        while done < from.len() {
            let rest = &from[done..];
            let count = self.wait(patience, |state| {
                if state.readers == 0 {
                    return Some(Err(Errno::EPIPE));
                }
                let free = state.bytes.free();
                let needed = if from.len() <= ATOMIC { rest.len() } else { 1 };
                if free < needed {
                    return None;
                }
                let count = free.min(rest.len());
                Some(state.bytes.push(&rest[..count]).map(|()| count))
            });
            match count {
                Ok(count) => done += count,
                Err(Errno::EPIPE) => {
                    signal::send(&process::current().process, SIGPIPE);
                    return Err(Errno::EPIPE);
                }
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => break,
            }
            self.tell();
        }
        Ok(done)
    }

    fn ready(&self) -> u32 {
        let state = self.state.lock();
        let mut ready = 0;
        if state.bytes.length > 0 {
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

    fn special(&self) -> Special<'_> {
        Special::Pipe(self)
    }
}

/// A pipe with both ends: a description to read from, one to write to.
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
