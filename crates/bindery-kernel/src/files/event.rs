//! Descriptors without contents: `eventfd(2)` and `pidfd_open(2)`.

use alloc::sync::{Arc, Weak};

use linux_raw_sys::general::{O_RDWR, POLLIN, POLLOUT};

use crate::errno::Errno;
use crate::heap;
use crate::process::{self, Interrupted, Process, WaitQueue};
use crate::sync::Mutex;

use super::attributes::{Attributes, Kind, Patience};
use super::descriptor::Description;
use super::inode::new_number;
use super::node::{Node, Place};
use super::poll;

/// The effect of a read on an eventfd's counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reading {
    /// The read returns the whole counter and clears it.
    Whole,
    /// The read decrements the counter (`EFD_SEMAPHORE`).
    ByOne,
}

/// A counter.
pub struct EventCounter {
    number: u64,
    count: Mutex<u64>,
    reading: Reading,
    changed: WaitQueue,
}

impl EventCounter {
    /// A description of a new counter.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn describe(count: u32, reading: Reading, flags: u32) -> Result<Arc<Description>, Errno> {
        heap::room(256)?;
        let count = Mutex::new(count.into());
        let node =
            Arc::new(Self { number: new_number(), count, reading, changed: WaitQueue::new() });
        let place = Place::alone(node.clone(), b"anon_inode:[eventfd]");
        Description::new(place, node, O_RDWR | flags)
    }

    fn wait<T>(
        &self,
        patience: Patience,
        mut ready: impl FnMut(&mut u64) -> Option<T>,
    ) -> Result<T, Errno> {
        let result = if patience == Patience::None {
            ready(&mut self.count.lock()).ok_or(Errno::EAGAIN)
        } else {
            let waited = self.changed.wait(None, || ready(&mut self.count.lock()));
            waited.map_err(|(Interrupted::Signal | Interrupted::Deadline)| Errno::RESTART)
        }?;
        self.changed.wake_all();
        poll::changed();
        Ok(result)
    }
}

impl Node for EventCounter {
    fn kind(&self) -> Kind {
        Kind::Anonymous
    }

    fn attributes(&self) -> Attributes {
        Attributes::plain(self.number, 0o600)
    }

    fn read(&self, _: u64, into: &mut [u8], patience: Patience) -> Result<usize, Errno> {
        let slot = into.get_mut(..8).ok_or(Errno::EINVAL)?;
        let value = self.wait(patience, |count| {
            let taken = match self.reading {
                Reading::Whole => *count,
                Reading::ByOne => (*count).min(1),
            };
            *count -= taken;
            (taken > 0).then_some(taken)
        })?;
        slot.copy_from_slice(&value.to_ne_bytes());
        Ok(8)
    }

    fn write(&self, _: u64, from: &[u8], patience: Patience) -> Result<usize, Errno> {
        let value = from.get(..8).and_then(|bytes| bytes.try_into().ok());
        let value = u64::from_ne_bytes(value.ok_or(Errno::EINVAL)?);
        if value == u64::MAX {
            return Err(Errno::EINVAL);
        }
        self.wait(patience, |count| {
            let sum = count.checked_add(value).filter(|sum| *sum < u64::MAX)?;
            *count = sum;
            Some(())
        })?;
        Ok(8)
    }

    fn ready(&self) -> u32 {
        let count = *self.count.lock();
        let readable = if count > 0 { POLLIN } else { 0 };
        let writable = if count < u64::MAX - 1 { POLLOUT } else { 0 };
        readable | writable
    }
}

/// A process by descriptor.
pub struct ProcessHandle {
    number: u64,
    /// Not a number, which another process may have later.
    process: Weak<Process>,
}

impl ProcessHandle {
    /// A description of a process.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn describe(process: &Arc<Process>, flags: u32) -> Result<Arc<Description>, Errno> {
        heap::room(256)?;
        let process = Arc::downgrade(process);
        let node = Arc::new(Self { number: new_number(), process });
        let place = Place::alone(node.clone(), b"anon_inode:[pidfd]");
        Description::new(place, node, O_RDWR | flags)
    }
}

impl Node for ProcessHandle {
    fn kind(&self) -> Kind {
        Kind::Anonymous
    }

    fn attributes(&self) -> Attributes {
        Attributes::plain(self.number, 0o600)
    }

    fn process(&self) -> Option<&Weak<Process>> {
        Some(&self.process)
    }

    fn ready(&self) -> u32 {
        // Readable once the process has ended.
        let process = process::find_behind(&self.process);
        let lives = process.is_some_and(|process| process.letter() != 'Z');
        if lives { 0 } else { POLLIN }
    }
}
