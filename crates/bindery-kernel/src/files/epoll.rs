//! `epoll`: a set of descriptors for repeated waits. Edges (`EPOLLET`) are reported as levels.

use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::any::Any;

use linux_raw_sys::general::{
    EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLONESHOT, O_RDWR, POLLERR, POLLHUP, POLLIN,
};

use crate::errno::{Errno, Outcome};
use crate::process::Interrupted;
use crate::sync::Mutex;
use crate::{heap, user};

use super::attributes::{Attributes, Kind};
use super::descriptor::{Description, Files};
use super::inode::new_number;
use super::node::{Node, Place};
use super::poll;

/// `struct epoll_event` in the architecture's layout: x86-64 packs it.
const EVENT_SIZE: u64 = if cfg!(target_arch = "x86_64") { 12 } else { 16 };
const DATA_OFFSET: u64 = EVENT_SIZE - 8;

struct Watched {
    description: Weak<Description>,
    /// The bits that are reported: errors and hang-ups always, and nothing after the one report of
    /// `EPOLLONESHOT`.
    events: u32,
    data: u64,
}

/// An epoll instance.
pub struct Epoll {
    number: u64,
    /// The key includes the description, because the descriptor may by now name a different one.
    watched: Mutex<BTreeMap<(i32, usize), Watched>>,
}

impl Epoll {
    /// A description of a new instance.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn describe(flags: u32) -> Result<Arc<Description>, Errno> {
        heap::room(256)?;
        let node = Arc::new(Self { number: new_number(), watched: Mutex::new(BTreeMap::new()) });
        let place = Place::alone(node.clone(), b"anon_inode:[eventpoll]");
        Description::new(place, node, O_RDWR | flags)
    }

    /// `epoll_ctl(2)`.
    pub fn change(&self, operation: u32, descriptor: i32, event: u64) -> Outcome {
        let description = Files::description(descriptor)?;
        if of(&*description.node).is_some() {
            return Err(Errno::EINVAL);
        }
        if description.node.is_seekable() {
            return Err(Errno::EPERM);
        }
        heap::room(256)?;
        let new = if operation == EPOLL_CTL_DEL {
            None
        } else {
            let (events, data): (u32, _) =
                (user::read(event)?, user::read(event.wrapping_add(DATA_OFFSET))?);
            let events = events | POLLERR | POLLHUP;
            Some(Watched { description: Arc::downgrade(&description), events, data })
        };
        let key = (descriptor, Arc::as_ptr(&description).addr());
        let mut watched = self.watched.lock();
        watched.retain(|_, one| one.description.strong_count() > 0);
        match (operation, new, watched.contains_key(&key)) {
            (EPOLL_CTL_ADD, _, true) => return Err(Errno::EEXIST),
            (EPOLL_CTL_ADD, Some(new), false) | (EPOLL_CTL_MOD, Some(new), true) => {
                watched.insert(key, new);
            }
            (EPOLL_CTL_MOD | EPOLL_CTL_DEL, _, false) => return Err(Errno::ENOENT),
            (EPOLL_CTL_DEL, ..) => {
                watched.remove(&key);
            }
            _ => return Err(Errno::EINVAL),
        }
        drop(watched);
        poll::changed();
        Ok(0)
    }

    /// `epoll_wait(2)` until `deadline`.
    pub fn wait(&self, events: u64, most: i32, deadline: Option<u64>) -> Outcome {
        if most <= 0 {
            return Err(Errno::EINVAL);
        }
        let most = (most as usize).min(256);
        let found = poll::wait(deadline, || {
            let mut found = Vec::new();
            for one in self.watched.lock().values_mut() {
                let Some(description) = one.description.upgrade() else { continue };
                let ready = poll::ready(&description) & one.events;
                if ready == 0 || found.len() == most {
                    continue;
                }
                found.push((ready, one.data));
                if one.events & EPOLLONESHOT != 0 {
                    one.events = 0;
                }
            }
            (!found.is_empty()).then_some(found)
        });
        let found = match found {
            Ok(found) => found,
            Err(Interrupted::Deadline) => return Ok(0),
            Err(Interrupted::Signal) => return Err(Errno::EINTR),
        };
        for (index, (ready, data)) in found.iter().enumerate() {
            let at = events.wrapping_add(index as u64 * EVENT_SIZE);
            user::write(at, ready)?;
            user::write(at.wrapping_add(DATA_OFFSET), data)?;
        }
        Ok(found.len() as u64)
    }

    fn is_ready(&self) -> bool {
        self.watched.lock().values().any(|one| {
            let ready =
                one.description.upgrade().map_or(0, |description| poll::ready(&description));
            ready & one.events != 0
        })
    }
}

impl Node for Epoll {
    fn kind(&self) -> Kind {
        Kind::Anonymous
    }

    fn attributes(&self) -> Attributes {
        Attributes::plain(self.number, 0o600)
    }

    fn ready(&self) -> u32 {
        if self.is_ready() { POLLIN } else { 0 }
    }

    fn special(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

/// The epoll instance of a node, if the node is one.
pub fn of(node: &dyn Node) -> Option<&Epoll> {
    node.special()?.downcast_ref()
}
