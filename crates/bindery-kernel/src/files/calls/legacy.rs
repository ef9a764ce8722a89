//! Calls that only x86-64 has. Newer architectures dropped them, because each is a call of `mod.rs`
//! with fewer arguments.

use linux_raw_sys::general as nr;
use linux_raw_sys::general::{
    AT_FDCWD, AT_REMOVEDIR, AT_SYMLINK_NOFOLLOW, O_CREAT, O_TRUNC, O_WRONLY,
};

use crate::errno::{Errno, Outcome};

use super::super::descriptor::AtExec;
use super::super::epoll::Epoll;
use super::super::poll::{self, Fraction};
use super::super::{names, status};
use super::{create, descriptors, get, insert, milliseconds, with_epoll};

/// Makes a call; `None` if the number belongs to another one.
pub(super) fn call(number: u32, arguments: [u64; 6]) -> Option<Outcome> {
    let [a, b, c, d, e, _] = arguments;
    let outcome = match number {
        nr::__NR_open => names::open(AT_FDCWD, a, b as u32, c as u32),
        nr::__NR_creat => names::open(AT_FDCWD, a, O_CREAT | O_WRONLY | O_TRUNC, b as u32),
        nr::__NR_stat => status::stat_at(AT_FDCWD, a, b, 0),
        nr::__NR_lstat => status::stat_at(AT_FDCWD, a, b, AT_SYMLINK_NOFOLLOW),
        nr::__NR_access => status::access(AT_FDCWD, a, b as u32, 0),
        nr::__NR_pipe => create::pipe(a, 0),
        nr::__NR_dup2 if a == b => get(a as i32).map(|_| b),
        nr::__NR_dup2 => descriptors::duplicate_to(a as i32, b as i32, 0),
        nr::__NR_rename => names::rename((AT_FDCWD, a), (AT_FDCWD, b), 0),
        nr::__NR_mkdir => names::make_directory(AT_FDCWD, a, b as u32),
        nr::__NR_mknod => names::make_node(AT_FDCWD, a, b as u32),
        nr::__NR_rmdir => names::unlink(AT_FDCWD, a, AT_REMOVEDIR),
        nr::__NR_unlink => names::unlink(AT_FDCWD, a, 0),
        nr::__NR_link => names::link((AT_FDCWD, a), (AT_FDCWD, b), 0),
        nr::__NR_symlink => names::make_link(a, AT_FDCWD, b),
        nr::__NR_readlink => names::read_link(AT_FDCWD, a, b, c as i32),
        nr::__NR_chmod => status::change_mode(AT_FDCWD, a, b as u32),
        nr::__NR_chown => status::change_owner(AT_FDCWD, a, b as u32, c as u32, 0),
        nr::__NR_lchown => {
            status::change_owner(AT_FDCWD, a, b as u32, c as u32, AT_SYMLINK_NOFOLLOW)
        }
        nr::__NR_poll => poll::poll(a, b, milliseconds(c)),
        nr::__NR_select => {
            poll::timed(e, Fraction::Microseconds, |deadline| poll::select(a, [b, c, d], deadline))
        }
        nr::__NR_eventfd => create::event_counter(a as u32, 0),
        nr::__NR_epoll_create if (a as i32) <= 0 => Err(Errno::EINVAL),
        nr::__NR_epoll_create => Epoll::describe(0).and_then(|epoll| insert(epoll, AtExec::Kept)),
        nr::__NR_epoll_wait => {
            with_epoll(a as i32, |epoll| epoll.wait(b, c as i32, milliseconds(d)))
        }
        _ => return None,
    };
    Some(outcome)
}
