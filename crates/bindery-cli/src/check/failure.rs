//! Names of failures: errno values and signals.

use bindery::{Errno, FaultError};
use serde::Serialize;

use super::words::{Unknown, nearest};

/// The failure of a call or an access, actual or expected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Failure {
    /// `EINVAL`, `SIGSEGV`.
    pub name: &'static str,
    /// Distinguishes signals of one name: `SEGV_MAPERR`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<&'static str>,
    /// The number of an errno.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<i64>,
    pub text: &'static str,
}

macro_rules! errnos {
    ($($name:ident: $text:literal,)*) => {
        /// With the texts of C libraries.
        const ERRNOS: &[Failure] = &[$(Failure {
            name: stringify!($name),
            code: None,
            number: Some(Errno::$name as i64),
            text: $text,
        },)*];
    };
}

errnos! {
    EPERM: "Operation not permitted",
    ESRCH: "No such process",
    EINTR: "Interrupted system call",
    EIO: "Input/output error",
    EBADF: "Bad file descriptor",
    EAGAIN: "Resource temporarily unavailable",
    ENOMEM: "Cannot allocate memory",
    EACCES: "Permission denied",
    EFAULT: "Bad address",
    EBUSY: "Device or resource busy",
    EEXIST: "File exists",
    ENODEV: "No such device",
    EINVAL: "Invalid argument",
    EFBIG: "File too large",
    ENOSPC: "No space left on device",
    ENOSYS: "Function not implemented",
    EOVERFLOW: "Value too large for defined data type",
    EOPNOTSUPP: "Operation not supported",
    EHWPOISON: "Memory page has hardware error",
}

const fn signal(name: &'static str, code: Option<&'static str>, text: &'static str) -> Failure {
    Failure { name, code, number: None, text }
}

const NOT_MAPPED: Failure =
    signal("SIGSEGV", Some("SEGV_MAPERR"), "nothing is mapped at the address");
const DENIED: Failure =
    signal("SIGSEGV", Some("SEGV_ACCERR"), "the mapping does not allow the access");
const BUS: Failure = signal("SIGBUS", None, "what backs the mapping has nothing there");
const OUT_OF_MEMORY: Failure = signal("OOM", None, "physical memory ran out");

const SIGNALS: &[Failure] = &[NOT_MAPPED, DENIED, BUS, OUT_OF_MEMORY];

impl Failure {
    /// The failure that a raw result expresses, if any. Linux reserves -4095 to -1 for failures.
    pub fn of_call(result: i64) -> Option<Self> {
        let number = (-4095..0).contains(&result).then_some(-result)?;
        let known = ERRNOS.iter().find(|known| known.number == Some(number));
        let unknown = Self { name: "errno", code: None, number: Some(number), text: "" };
        Some(known.copied().unwrap_or(unknown))
    }

    pub fn of_errno(errno: Errno) -> Self {
        Self::of_call(-i64::from(errno as i32)).unwrap_or(NOT_MAPPED)
    }

    /// The signal for a fault that was not resolved.
    pub fn of_fault(fault: FaultError) -> Self {
        match fault {
            FaultError::NotMapped => NOT_MAPPED,
            FaultError::Protection | FaultError::ProtectionKey(_) => DENIED,
            FaultError::OutOfMemory => OUT_OF_MEMORY,
            FaultError::Bus | FaultError::Interrupted | _ => BUS,
        }
    }

    /// Whether the failure is the result of an access rather than of a call.
    pub fn is_signal(self) -> bool {
        self.number.is_none()
    }

    /// The failure as `strace` shows it.
    pub fn show(self) -> String {
        let Self { name, code, number, text } = self;
        match (number, code) {
            (Some(number), _) if text.is_empty() => format!("-1 errno {number}"),
            (Some(_), _) => format!("-1 {name} ({text})"),
            (None, Some(code)) => format!("{name} ({code}: {text})"),
            (None, None) => format!("{name} ({text})"),
        }
    }
}

/// A failure that a script expects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Awaited {
    name: &'static str,
    pub signal: bool,
}

impl Awaited {
    /// Reads `EINVAL`, `SIGSEGV`, `SEGV_ACCERR`.
    ///
    /// # Errors
    /// If no failure has this name.
    pub fn read(word: &str) -> Result<Self, Unknown> {
        let all = || {
            let names = ERRNOS.iter().chain(SIGNALS).map(|known| (known.name, known.is_signal()));
            names.chain(SIGNALS.iter().filter_map(|known| Some((known.code?, true))))
        };
        let found = all().find(|(name, _)| *name == word);
        found.map(|(name, signal)| Self { name, signal }).ok_or_else(|| {
            let names: Vec<&str> = all().map(|(name, _)| name).collect();
            let help = match nearest(&names, word) {
                Some(near) => format!("did you mean `{near}`?"),
                None => "calls fail with EINVAL, ENOMEM and their kin, accesses with SIGSEGV \
                         (SEGV_MAPERR, SEGV_ACCERR), SIGBUS and OOM"
                    .to_owned(),
            };
            Unknown { message: format!("no errno or signal is called `{word}`"), help }
        })
    }

    pub fn matches(self, failure: Failure) -> bool {
        failure.name == self.name || failure.code == Some(self.name)
    }

    pub fn name(self) -> &'static str {
        self.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errno_is_shown_as_strace_does() {
        let shown = |result| Failure::of_call(result).map(Failure::show);
        assert_eq!(shown(-12).as_deref(), Some("-1 ENOMEM (Cannot allocate memory)"));
        assert_eq!(shown(-4000).as_deref(), Some("-1 errno 4000"));
        assert_eq!((shown(0), shown(4096), shown(-4096)), (None, None, None));
    }

    #[test]
    fn a_signal_is_found_by_name_and_code() {
        let fault = Failure::of_fault(FaultError::Protection);
        let matches = |word| Awaited::read(word).map(|awaited| awaited.matches(fault));
        assert_eq!((matches("SIGSEGV"), matches("SEGV_ACCERR")), (Ok(true), Ok(true)));
        assert_eq!((matches("SEGV_MAPERR"), matches("SIGBUS")), (Ok(false), Ok(false)));
        assert_eq!(Awaited::read("ENIVAL").unwrap_err().help, "did you mean `EINVAL`?");
    }
}
