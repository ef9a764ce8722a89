//! Pipes.

use alloc::collections::VecDeque;
use alloc::format;
use alloc::sync::Arc;

use linux_raw_sys::general::{
    O_NONBLOCK, O_RDONLY, O_WRONLY, POLLERR, POLLHUP, POLLIN, POLLOUT, SIGPIPE,
};

use crate::errno::Errno;
use crate::heap;
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
    bytes: VecDeque<u8>,
    readers: u32,
    writers: u32,
    /// How often it was opened for reading, for writing: who waits for the other side may wake when
    /// that has come and gone.
    openings: [u64; 2],
}

impl Pipe {
    /// A pipe that nobody has opened.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new() -> Result<Arc<Self>, Errno> {
        heap::room(CAPACITY)?;
        let state = Mutex::new(State::default());
        Ok(Arc::new(Self { number: new_number(), state, changed: WaitQueue::new() }))
    }

    /// How many bytes wait to be read.
    pub fn waiting(&self) -> usize {
        self.state.lock().bytes.len()
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
        let count = self.wait(patience, |state| {
            if state.bytes.is_empty() {
                return (state.writers == 0).then_some(Ok(0));
            }
            let count = into.len().min(state.bytes.len());
            for (slot, byte) in into.iter_mut().zip(state.bytes.drain(..count)) {
                *slot = byte;
            }
            Some(Ok(count))
        })?;
        self.tell();
        Ok(count)
    }

    fn write(&self, _: u64, from: &[u8], patience: Patience) -> Result<usize, Errno> {
        let mut done = 0;
        while done < from.len() {
            let rest = &from[done..];
            let count = self.wait(patience, |state| {
                if state.readers == 0 {
                    return Some(Err(Errno::EPIPE));
                }
                let free = CAPACITY - state.bytes.len();
                let needed = if from.len() <= ATOMIC { rest.len() } else { 1 };
                if free < needed {
                    return None;
                }
                let count = free.min(rest.len());
                if let Err(errno) = heap::room(count) {
                    return Some(Err(errno));
                }
                state.bytes.extend(&rest[..count]);
                Some(Ok(count))
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
        if !state.bytes.is_empty() {
            ready |= POLLIN;
        }
        if CAPACITY - state.bytes.len() >= ATOMIC {
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
