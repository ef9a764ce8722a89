//! Inode numbers, and the attributes of a node in memory.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::errno::Errno;
use crate::process::credentials;
use crate::sync::Mutex;
use crate::{heap, time};

use super::attributes::{Attributes, Change};

/// The maximum heap memory for a new node, in bytes.
pub const NODE_SIZE: usize = 1024;

/// Regular files use the identity of their object, which counts from 1.
static NUMBERS: AtomicU64 = AtomicU64::new(1 << 32);

/// A new inode number.
pub fn new_number() -> u64 {
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

/// The number, the link count and the changeable attributes of a node in memory.
pub struct Common {
    number: u64,
    links: AtomicU32,
    /// Written only with `changeable` locked.
    mode: AtomicU32,
    changeable: Mutex<Changeable>,
}

#[derive(Clone, Copy)]
struct Changeable {
    owner: (u32, u32),
    times: [u64; 3],
}

impl Common {
    pub fn new(number: u64, mode: u32) -> Result<Self, Errno> {
        heap::room(NODE_SIZE)?;
        let who = credentials();
        let owner = (who.user.file, who.group.file);
        let (links, mode) = (AtomicU32::new(1), AtomicU32::new(mode));
        let changeable = Mutex::new(Changeable { owner, times: [time::real_time(); 3] });
        Ok(Self { number, links, mode, changeable })
    }

    pub fn permissions(&self) -> (u32, (u32, u32)) {
        let changeable = self.changeable.lock();
        (self.mode(), changeable.owner)
    }

    /// The permission bits.
    #[inline]
    pub fn mode(&self) -> u32 {
        self.mode.load(Ordering::Relaxed)
    }

    pub fn attributes(&self, size: u64, blocks: u64) -> Attributes {
        let changeable = self.changeable.lock();
        let (mode, Changeable { owner, times }) = (self.mode(), *changeable);
        let links = self.links.load(Ordering::Relaxed);
        Attributes { number: self.number, mode, links, owner, size, blocks, times, device: (0, 0) }
    }

    pub fn change(&self, change: &Change) {
        let mut changeable = self.changeable.lock();
        if let Some(mode) = change.mode {
            self.mode.store(mode & 0o7777, Ordering::Relaxed);
        }
        if let Some(owner) = change.owner.0 {
            changeable.owner.0 = owner;
        }
        if let Some(group) = change.owner.1 {
            changeable.owner.1 = group;
        }
        for (slot, new) in changeable.times.iter_mut().zip(change.times) {
            if let Some(new) = new {
                *slot = new;
            }
        }
        changeable.times[2] = time::real_time();
    }

    pub fn written(&self) {
        self.written_at(time::real_time());
    }

    /// As `written`, with a time in nanoseconds since 1970.
    pub fn written_at(&self, time: u64) {
        let mut changeable = self.changeable.lock();
        changeable.times[1] = time;
        changeable.times[2] = time;
    }

    /// Counts the node's names.
    pub fn count_links(&self, by: i32) {
        self.links.fetch_add(by as u32, Ordering::Relaxed);
        self.changeable.lock().times[2] = time::real_time();
    }
}
