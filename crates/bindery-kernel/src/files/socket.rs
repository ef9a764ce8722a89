//! Pairs of connected sockets (`socketpair`), which processes use as bidirectional pipes. There are
//! no other sockets: no network, and no names to connect to.

use alloc::collections::VecDeque;
use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;

use linux_raw_sys::general::{O_RDWR, POLLHUP, POLLIN, POLLOUT, SIGPIPE};

use crate::errno::Errno;
use crate::heap;
use crate::process::{Interrupted, WaitQueue, signal};
use crate::sync::Mutex;

use super::attributes::{Attributes, Kind, Patience};
use super::descriptor::Description;
use super::inode::new_number;
use super::node::{Node, Place};
use super::poll;

/// The capacity of one direction in bytes.
const CAPACITY: usize = 64 << 10;

/// The maximum length of a message. A message is smaller than a transfer's piece, so that one read
/// never meets two messages.
const MESSAGE_MAX: usize = 32 << 10;

/// Whether a reader sees the boundaries of writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Boundaries {
    /// Each write is a message, which one read consumes completely (`SOCK_SEQPACKET`).
    Kept,
    /// A stream of bytes (`SOCK_STREAM`).
    Lost,
}

/// One direction.
struct Channel {
    state: Mutex<State>,
    changed: WaitQueue,
}

#[derive(Default)]
struct State {
    messages: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Whether an end is closed: the sender will not send, or the receiver will not receive.
    is_closed: bool,
}

impl Channel {
    fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State::default()), changed: WaitQueue::new() })
    }

    /// Waits until `ready` returns a value and wakes the other end.
    fn wait<T>(
        &self,
        patience: Patience,
        mut ready: impl FnMut(&mut State) -> Option<Result<T, Errno>>,
    ) -> Result<T, Errno> {
        let result = if patience == Patience::None {
            ready(&mut self.state.lock()).unwrap_or(Err(Errno::EAGAIN))
        } else {
            let waited = self.changed.wait(None, || ready(&mut self.state.lock()));
            waited
                .unwrap_or_else(|(Interrupted::Signal | Interrupted::Deadline)| Err(Errno::RESTART))
        };
        if result.is_ok() {
            self.tell();
        }
        result
    }

    fn tell(&self) {
        self.changed.wake_all();
        poll::changed();
    }

    fn close(&self) {
        self.state.lock().is_closed = true;
        self.tell();
    }
}

/// One end of a pair of connected sockets.
pub struct Socket {
    number: u64,
    boundaries: Boundaries,
    incoming: Arc<Channel>,
    outgoing: Arc<Channel>,
}

impl State {
    fn take(&mut self, into: &mut [u8], boundaries: Boundaries) -> usize {
        let mut done = 0;
        while let Some(message) = self.messages.front_mut() {
            let count = message.len().min(into.len() - done);
            into[done..done + count].copy_from_slice(&message[..count]);
            done += count;
            if boundaries == Boundaries::Kept || count == message.len() {
                // The part of a message that does not fit is lost.
                self.bytes -= message.len();
                self.messages.pop_front();
            } else {
                self.bytes -= count;
                message.drain(..count);
            }
            if boundaries == Boundaries::Kept || done == into.len() {
                break;
            }
        }
        done
    }

    fn put(&mut self, from: &[u8]) -> Result<usize, Errno> {
        heap::room(from.len() + 128)?;
        self.messages.push_back(from.into());
        self.bytes += from.len();
        Ok(from.len())
    }
}

impl Node for Socket {
    fn kind(&self) -> Kind {
        Kind::Socket
    }

    fn attributes(&self) -> Attributes {
        Attributes::plain(self.number, 0o777)
    }

    fn open(&self, _: u32) -> Result<Option<Arc<dyn Node>>, Errno> {
        Err(Errno::ENXIO)
    }

    fn closed(&self, _: u32) {
        self.incoming.close();
        self.outgoing.close();
    }

    fn read(&self, _: u64, into: &mut [u8], patience: Patience) -> Result<usize, Errno> {
        if into.is_empty() {
            return Ok(0);
        }
        self.incoming.wait(patience, |state| {
            if state.messages.is_empty() {
                return state.is_closed.then_some(Ok(0));
            }
            Some(Ok(state.take(into, self.boundaries)))
        })
    }

    fn write(&self, _: u64, from: &[u8], patience: Patience) -> Result<usize, Errno> {
        let whole = self.boundaries == Boundaries::Kept;
        if whole && from.len() > MESSAGE_MAX {
            return Err(Errno::EMSGSIZE);
        }
        if !whole && from.is_empty() {
            return Ok(0);
        }
        let mut done = 0;
        loop {
            let rest = &from[done..];
            let written = self.outgoing.wait(patience, |state| {
                if state.is_closed {
                    return Some(Err(Errno::EPIPE));
                }
                let free = CAPACITY - state.bytes;
                let many = state.messages.len() >= MESSAGES_MAX;
                if free == 0 || many || whole && free < rest.len() {
                    return None;
                }
                Some(state.put(&rest[..free.min(rest.len())]))
            });
            match written {
                Ok(count) => done += count,
                Err(Errno::EPIPE) if done == 0 => {
                    signal::send_to_this_thread(SIGPIPE);
                    return Err(Errno::EPIPE);
                }
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => return Ok(done),
            }
            if done == from.len() {
                return Ok(done);
            }
        }
    }

    fn ready(&self) -> u32 {
        let (mut ready, incoming) = (0, self.incoming.state.lock());
        if !incoming.messages.is_empty() || incoming.is_closed {
            ready |= POLLIN;
        }
        if incoming.is_closed {
            ready |= POLLHUP;
        }
        drop(incoming);
        let outgoing = self.outgoing.state.lock();
        let room = outgoing.bytes < CAPACITY && outgoing.messages.len() < MESSAGES_MAX;
        if room || outgoing.is_closed {
            ready |= POLLOUT;
        }
        ready
    }
}

/// The maximum number of messages in one direction; each message costs memory in addition to its
/// bytes.
const MESSAGES_MAX: usize = 256;

/// Two connected sockets.
///
/// # Errors
/// `ENOMEM`.
pub fn pair(boundaries: Boundaries, flags: u32) -> Result<[Arc<Description>; 2], Errno> {
    heap::room(1024)?;
    let channels = [Channel::new(), Channel::new()];
    let end = |incoming: usize| {
        let [incoming, outgoing] = [incoming, 1 - incoming].map(|index| channels[index].clone());
        let number = new_number();
        let node = Arc::new(Socket { number, boundaries, incoming, outgoing });
        let place = Place::alone(node.clone(), format!("socket:[{number}]").as_bytes());
        Description::new(place, node, O_RDWR | flags)
    };
    Ok([end(0)?, end(1)?])
}
