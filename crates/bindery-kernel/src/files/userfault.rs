//! `userfaultfd(2)`: a descriptor for a [`Userfault`] of the core, and `/dev/userfaultfd`.

use alloc::sync::{Arc, Weak};
use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, Ordering};

use bindery::addr::VirtAddr;
use bindery::{Access, FaultError, ForkIsNext, Userfault, UserfaultScope};
use bindery_linux::{
    USERFAULT_MESSAGE, UserfaultRequest, userfault_api, userfault_control, userfault_message,
    userfault_text,
};
use linux_raw_sys::general::{
    O_CLOEXEC, O_NONBLOCK, O_RDONLY, POLLERR, POLLIN, UFFD_USER_MODE_ONLY, UFFDIO,
};

use crate::errno::{Errno, Outcome};
use crate::memory::Space;
use crate::platform::Machine;
use crate::process::{self, Capability, Interrupted};
use crate::sync::Mutex;
use crate::{heap, user};

use super::attributes::{Attributes, Kind, Patience};
use super::descriptor::at_exec;
use super::descriptor::{Description, Files};
use super::inode::new_number;
use super::node::{Node, Place};
use super::poll;
use super::segments::Segments;
use super::sequence::SequenceBuffer;
use super::transfer::move_all;

type Handle = Arc<Userfault<'static, Machine>>;

/// `USERFAULTFD_IOC_NEW`.
const NEW: u32 = UFFDIO << 8;

/// Whether every program may handle faults of the kernel (`vm.unprivileged_userfaultfd`).
static UNPRIVILEGED: AtomicBool = AtomicBool::new(false);

/// `vm.unprivileged_userfaultfd`.
pub fn unprivileged() -> bool {
    UNPRIVILEGED.load(Ordering::Relaxed)
}

/// Sets it.
pub fn set_unprivileged(may: bool) {
    UNPRIVILEGED.store(may, Ordering::Relaxed);
}

/// The state of a userfaultfd.
enum Purpose {
    /// The address space of the userfaultfd's creator. `UFFDIO_API` has not been called yet.
    New(Weak<Space>, UserfaultScope),
    /// The userfaultfd serves this address space.
    Serving(Weak<Space>, Handle),
    /// The userfaultfd was created by a fork for a child whose address space did not exist yet.
    Inherited(Handle),
    /// Closed.
    Closed,
}

/// A userfaultfd.
pub struct Userfaultfd {
    number: u64,
    /// `O_CLOEXEC` and `O_NONBLOCK` at its creation, which the userfaultfds of children inherit.
    flags: u32,
    purpose: Mutex<Purpose>,
}

/// `userfaultfd(2)`.
///
/// # Errors
/// `EPERM` if it is for faults of the kernel and the caller lacks `CAP_SYS_PTRACE`, unless every
/// program may handle them; `EINVAL` for unknown flags; `ENOMEM`; `EMFILE`.
pub fn call(flags: u32) -> Outcome {
    if flags & UFFD_USER_MODE_ONLY == 0 && !unprivileged() {
        process::credentials().demand(Capability::Trace)?;
    }
    make(flags)
}

fn make(flags: u32) -> Outcome {
    if flags & !(O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY) != 0 {
        return Err(Errno::EINVAL);
    }
    let scope = if flags & UFFD_USER_MODE_ONLY == 0 {
        UserfaultScope::All
    } else {
        UserfaultScope::UserMode
    };
    let space = Arc::downgrade(&process::current().process.space());
    Ok(insert(Purpose::New(space, scope), flags)?.descriptor as u64)
}

/// A new userfaultfd.
struct Inserted {
    node: Arc<Userfaultfd>,
    description: Arc<Description>,
    descriptor: i32,
}

/// A new userfaultfd and its descriptor.
fn insert(purpose: Purpose, flags: u32) -> Result<Inserted, Errno> {
    heap::room(512)?;
    let flags = flags & (O_CLOEXEC | O_NONBLOCK);
    let node = Arc::new(Userfaultfd { number: new_number(), flags, purpose: Mutex::new(purpose) });
    let place = Place::alone(node.clone(), b"anon_inode:[userfaultfd]");
    let description = Description::new(place, node.clone(), O_RDONLY | flags & O_NONBLOCK)?;
    let files = Files::current();
    let descriptor = files.insert(description.clone(), at_exec(flags))?;
    Ok(Inserted { node, description, descriptor })
}

impl Userfaultfd {
    /// The core's handle.
    ///
    /// # Errors
    /// `EINVAL` before `UFFDIO_API`.
    fn handle(&self) -> Result<Handle, Errno> {
        match &*self.purpose.lock() {
            Purpose::Serving(_, handle) | Purpose::Inherited(handle) => Ok(handle.clone()),
            Purpose::New(..) | Purpose::Closed => Err(Errno::EINVAL),
        }
    }

    /// The address space that the userfaultfd serves.
    ///
    /// # Errors
    /// `ESRCH` if the address space has been dropped.
    fn space(&self, handle: &Handle) -> Result<Arc<Space>, Errno> {
        if let Purpose::Serving(space, _) = &*self.purpose.lock() {
            return space.upgrade().ok_or(Errno::ESRCH);
        }
        let space = process::spaces().find(|space| space.owns_userfault(handle));
        let space = space.ok_or(Errno::ESRCH)?;
        *self.purpose.lock() = Purpose::Serving(Arc::downgrade(&space), handle.clone());
        Ok(space)
    }

    /// `UFFDIO_API`.
    fn agree(&self, argument: u64) -> Outcome {
        let mut words: [u64; 3] = user::read(argument)?;
        let may_follow = process::credentials().demand(Capability::Trace).is_ok();
        let agreed = userfault_api(&mut words, may_follow).map_err(Errno::from);
        let made = agreed.and_then(|features| {
            // Written first, so that a program that gets `EFAULT` can call again.
            user::write(argument, &words)?;
            let (space, scope) = match &*self.purpose.lock() {
                Purpose::New(space, scope) => (space.clone(), *scope),
                Purpose::Serving(..) | Purpose::Inherited(_) | Purpose::Closed => {
                    return Err(Errno::EINVAL);
                }
            };
            let served = space.upgrade().ok_or(Errno::ESRCH)?;
            let handle = served.userfault(features, scope).map_err(|_| Errno::ENOMEM)?;
            let mut purpose = self.purpose.lock();
            if let Purpose::New(..) = &*purpose {
                *purpose = Purpose::Serving(space, Arc::new(handle));
                return Ok(0);
            }
            drop(purpose);
            // The allocation yielded, and another thread has completed `UFFDIO_API`.
            served.close_userfault(handle);
            Err(Errno::EINVAL)
        });
        if made.is_err() {
            user::write(argument, &[0_u64; 3])?;
        }
        made
    }

    /// Any other request.
    fn serve(&self, request: UserfaultRequest, argument: u64) -> Outcome {
        let handle = self.handle()?;
        let mut words = [0; 5];
        user::read_into(argument, &mut words[..request.arguments()])?;
        let space = self.space(&handle)?;
        let mut source = |at: VirtAddr, piece: &mut [u8]| {
            user::read_bytes(at.0, piece).map_err(|_| FaultError::NotMapped)
        };
        let caller = process::current().process.space();
        let done = userfault_control(&space, &caller, &handle, request, &mut words, &mut source);
        // The result's word was not read, and no result is 0.
        if let Some(index) = request.result()
            && words[index] != 0
        {
            user::write(argument.wrapping_add(8 * index as u64), &words[index])?;
        }
        done.map_err(Errno::from)
    }

    /// The next message, as bytes.
    fn next(&self, handle: &Handle) -> Option<Result<[u8; USERFAULT_MESSAGE], Errno>> {
        match handle.try_read_but_fork() {
            Ok(message) => {
                message.map(|message| userfault_message(message, |_| Err(Errno::EINVAL)))
            }
            Err(ForkIsNext) => self.next_with_descriptor(handle).transpose(),
        }
    }

    /// As [`Userfaultfd::next`], with a descriptor for a child's userfaultfd. If no descriptor is
    /// free, the message stays in the queue.
    #[cold]
    fn next_with_descriptor(
        &self,
        handle: &Handle,
    ) -> Result<Option<[u8; USERFAULT_MESSAGE]>, Errno> {
        let child = insert(Purpose::Closed, self.flags)?;
        let mut used = false;
        let message = handle.try_read().map(|message| {
            userfault_message(message, |made| {
                used = true;
                *child.node.purpose.lock() = Purpose::Inherited(Arc::new(made));
                Ok(child.descriptor as u32)
            })
        });
        if !used {
            // Another reader has taken the fork event.
            Files::current().withdraw(child.descriptor, &child.description);
        }
        message.transpose()
    }

    /// Delivers messages while any are pending and there is room for them. Waits only for the
    /// first. Returns their size in bytes.
    fn read_messages(
        &self,
        room: usize,
        patience: Patience,
        mut put: impl FnMut(usize, &[u8; USERFAULT_MESSAGE]) -> Result<(), Errno>,
    ) -> Result<usize, Errno> {
        let handle = self.handle()?;
        if room < USERFAULT_MESSAGE {
            return Err(Errno::EINVAL);
        }
        let mut done = 0;
        while done + USERFAULT_MESSAGE <= room {
            let next = match self.next(&handle) {
                Some(next) => next,
                None if done > 0 => break,
                None if patience == Patience::None => return Err(Errno::EAGAIN),
                None => {
                    let waited = poll::wait(None, || handle.is_readable().then_some(()));
                    waited
                        .map_err(|(Interrupted::Signal | Interrupted::Deadline)| Errno::RESTART)?;
                    continue;
                }
            };
            match next.and_then(|message| put(done, &message)) {
                Ok(()) => done += USERFAULT_MESSAGE,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// The operations that would not wait. As on Linux, a descriptor whose reads wait cannot be
    /// polled.
    fn ready_with(&self, flags: u32) -> u32 {
        match self.handle() {
            Ok(handle) if flags & O_NONBLOCK != 0 => {
                if handle.is_readable() {
                    POLLIN
                } else {
                    0
                }
            }
            _ => POLLERR,
        }
    }
}

impl Node for Userfaultfd {
    fn kind(&self) -> Kind {
        Kind::Anonymous
    }

    fn attributes(&self) -> Attributes {
        Attributes::plain(self.number, 0o600)
    }

    fn read(&self, _: u64, into: &mut [u8], patience: Patience) -> Result<usize, Errno> {
        self.read_messages(into.len(), patience, |done, message| {
            into[done..done + message.len()].copy_from_slice(message);
            Ok(())
        })
    }

    fn read_into(&self, _: u64, to: &Segments, patience: Patience) -> Option<Outcome> {
        let read = self.read_messages(to.total() as usize, patience, |done, message| {
            let from = NonNull::from(message).cast::<u8>();
            // SAFETY: the message has the bytes.
            let put =
                |moved| unsafe { to.put(done + moved, from.add(moved), message.len() - moved) };
            let fault_in = |moved: usize| to.fault_in((done + moved) as u64, Access::Write);
            // As on Linux, a message that does not fit into the program's memory is lost.
            match move_all(message.len(), put, fault_in)? {
                moved if moved == message.len() => Ok(()),
                _ => Err(Errno::EFAULT),
            }
        });
        Some(read.map(|count| count as u64))
    }

    fn ready(&self) -> u32 {
        self.ready_with(O_NONBLOCK)
    }

    fn control(&self, request: u32, argument: u64) -> Outcome {
        match UserfaultRequest::from_number(request) {
            Some(UserfaultRequest::Api) => self.agree(argument),
            Some(request) => self.serve(request, argument),
            None => Err(Errno::EINVAL),
        }
    }

    fn closed(&self, _: u32) {
        let purpose = core::mem::replace(&mut *self.purpose.lock(), Purpose::Closed);
        let (space, handle) = match purpose {
            Purpose::Serving(space, handle) => (space.upgrade(), handle),
            Purpose::Inherited(handle) => {
                (process::spaces().find(|space| space.owns_userfault(&handle)), handle)
            }
            Purpose::New(..) | Purpose::Closed => return,
        };
        if let Some(space) = space
            && let Some(handle) = Arc::into_inner(handle)
        {
            space.close_userfault(handle);
        }
    }

    fn tell(&self, out: &mut SequenceBuffer<'_>) -> fmt::Result {
        let handle = self.handle().ok();
        userfault_text(handle.as_deref(), out)
    }

    fn ready_as_opened(&self, flags: u32) -> Option<u32> {
        Some(self.ready_with(flags))
    }
}

/// `/dev/userfaultfd`: a program that may open it may make userfaultfds.
pub struct Device {
    number: u64,
}

impl Device {
    /// The device.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { number: new_number() })
    }
}

impl Node for Device {
    fn kind(&self) -> Kind {
        Kind::Device
    }

    fn attributes(&self) -> Attributes {
        Attributes { device: (10, 126), ..Attributes::plain(self.number, 0o600) }
    }

    fn control(&self, request: u32, argument: u64) -> Outcome {
        if request == NEW { make(argument as u32) } else { Err(Errno::EINVAL) }
    }
}
