//! Error numbers of system calls.

use core::fmt;

use linux_raw_sys::errno;

/// An error number of Linux.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub u32);

/// The outcome of a system call: a value for the program, or an errno.
pub type Outcome = Result<u64, Errno>;

macro_rules! names {
    ($($name:ident)*) => {
        #[allow(missing_docs, reason = "the names are those of errno(3)")]
        impl Errno {
            $(pub const $name: Self = Self(errno::$name);)*
        }
    };
}

names! {
    E2BIG EACCES EAFNOSUPPORT EAGAIN EBADF EBUSY ECHILD EEXIST EFAULT EFBIG EINTR EINVAL EIO
    EISDIR ELOOP EMFILE EMSGSIZE ENAMETOOLONG ENODEV ENOENT ENOEXEC ENOMEM ENOSPC ENOSYS
    ENOTDIR ENOTEMPTY ENOTTY ENXIO EOPNOTSUPP EOVERFLOW EPERM EPIPE EPROTONOSUPPORT ERANGE EROFS
    ESOCKTNOSUPPORT ESPIPE ESRCH ESTALE ETIMEDOUT EXDEV
}

impl Errno {
    /// A signal interrupted the call before it had an effect. The call is restarted after the
    /// handler if the handler allows that (`SA_RESTART`); otherwise it fails with `EINTR`. This
    /// errno never reaches a program.
    pub const RESTART: Self = Self(512);

    /// As [`Errno::RESTART`], but restarts only if no handler runs; otherwise it fails with `EINTR`
    /// (`nanosleep`, `poll`, `futex` with a timeout).
    pub const RESTART_WITHOUT_HANDLER: Self = Self(514);
}

impl From<bindery::Errno> for Errno {
    fn from(errno: bindery::Errno) -> Self {
        Self(errno as u32)
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "errno {}", self.0)
    }
}

/// The raw result of the core's Linux ABI as an outcome.
pub fn from_raw(result: i64) -> Outcome {
    if result < 0 { Err(Errno(result.unsigned_abs() as u32)) } else { Ok(result as u64) }
}
