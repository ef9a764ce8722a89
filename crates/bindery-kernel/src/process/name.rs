//! Short names of threads (`comm`). A process has the name of its first thread.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::errno::{Errno, Outcome};
use crate::user;

use super::{Process, Thread, scheduler};

/// A name of up to 15 bytes, padded with zeroes (`TASK_COMM_LEN`).
pub(super) type ShortName = [u8; 16];

/// The bytes before the first zero.
pub(super) fn text(name: ShortName) -> Vec<u8> {
    name.iter().copied().take_while(|byte| *byte != 0).collect()
}

/// The first 15 bytes of a name.
pub(super) fn cut(name: &[u8]) -> ShortName {
    let mut cut = ShortName::default();
    let length = name.len().min(cut.len() - 1);
    cut[..length].copy_from_slice(&name[..length]);
    cut
}

impl Thread {
    /// The thread's short name.
    pub(super) fn name(&self) -> ShortName {
        if self.is_first() { self.process.state.lock().name } else { *self.own_name.lock() }
    }

    /// Changes the thread's short name.
    pub(super) fn set_name(&self, name: ShortName) {
        if self.is_first() {
            self.process.state.lock().name = name;
        } else {
            *self.own_name.lock() = name;
        }
    }

    fn is_first(&self) -> bool {
        self.id() == self.process.id
    }
}

impl Process {
    fn thread(&self, id: u32) -> Option<Arc<Thread>> {
        self.threads().into_iter().find(|thread| thread.id() == id)
    }

    /// The short name of one of the process's threads, without the zero. If that thread has ended,
    /// the first thread's name.
    pub fn name_of(&self, thread: u32) -> Vec<u8> {
        self.thread(thread).map_or_else(|| self.name(), |thread| text(thread.name()))
    }

    /// Changes the short name of one of the process's threads, truncated to 15 bytes.
    ///
    /// # Errors
    /// `EINVAL` if the running thread belongs to another process; `ESRCH` if the thread has ended.
    pub fn set_name_of(&self, thread: u32, name: &[u8]) -> Result<(), Errno> {
        if !scheduler::is_running(self) {
            return Err(Errno::EINVAL);
        }
        self.thread(thread).ok_or(Errno::ESRCH)?.set_name(cut(name));
        Ok(())
    }
}

/// `prctl(PR_SET_NAME)`: up to 15 bytes of a text of the program.
pub(super) fn set(at: u64) -> Outcome {
    let mut name = ShortName::default();
    let length = name.len() - 1;
    for (index, byte) in name.iter_mut().enumerate().take(length) {
        *byte = user::read(at.checked_add(index as u64).ok_or(Errno::EFAULT)?)?;
        if *byte == 0 {
            break;
        }
    }
    scheduler::current().set_name(name);
    Ok(0)
}

/// `prctl(PR_GET_NAME)`.
pub(super) fn get(at: u64) -> Outcome {
    user::write(at, &scheduler::current().name())?;
    Ok(0)
}
