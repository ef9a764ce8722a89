//! The position of a transfer, and the flags of `preadv2` and `pwritev2`.

use linux_raw_sys::general::{O_APPEND, RWF_APPEND, RWF_DSYNC, RWF_HIPRI, RWF_NOWAIT, RWF_SYNC};

use crate::errno::{Errno, Outcome};
use crate::process;

use super::attributes::{Kind, Patience};
use super::descriptor::Description;
use super::node::Node;
use super::segments::Segments;

/// Writes at the offset even if the file was opened for appending (Linux 6.9).
const RWF_NOAPPEND: u32 = 1 << 5;

/// The start of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// At the opening's position, which the transfer advances.
    Position,
    /// At this offset; the position does not change.
    At(u64),
}

impl Start {
    /// The offset of `pread(2)` and `pwrite(2)`.
    ///
    /// # Errors
    /// `EINVAL` if the offset is negative.
    pub fn at(offset: i64) -> Result<Self, Errno> {
        u64::try_from(offset).map(Self::At).map_err(|_| Errno::EINVAL)
    }

    /// The offset of `preadv2(2)` and `pwritev2(2)`: -1 is the position. Both architectures pass
    /// the whole offset in one register.
    ///
    /// # Errors
    /// `EINVAL` for any other negative offset.
    pub fn at_or_position(offset: i64) -> Result<Self, Errno> {
        if offset == -1 { Ok(Self::Position) } else { Self::at(offset) }
    }
}

/// The mode of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Manner {
    /// Whether the transfer may sleep.
    pub patience: Patience,
    /// Whether a write appends to the file.
    pub appends: bool,
}

impl Manner {
    /// The opening's mode, changed by the call's flags.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if flags are unknown or the file does not support them; `EINVAL` if flags
    /// contradict each other.
    pub fn new(description: &Description, flags: u32) -> Result<Self, Errno> {
        const KNOWN: u32 =
            RWF_HIPRI | RWF_DSYNC | RWF_SYNC | RWF_NOWAIT | RWF_APPEND | RWF_NOAPPEND;
        let node = &*description.node;
        let appends = description.flags() & O_APPEND != 0;
        let plain = Self { patience: description.patience(), appends };
        if flags == 0 {
            return Ok(plain);
        }
        let has_object = node.object().is_some();
        // A file whose text the read generates.
        let is_generated = node.kind() == Kind::Regular && !has_object;
        if flags & !KNOWN != 0 || is_generated && flags & !RWF_HIPRI != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if flags & RWF_APPEND != 0 && flags & RWF_NOAPPEND != 0 {
            return Err(Errno::EINVAL);
        }
        if flags & RWF_NOWAIT != 0 && has_object {
            // Linux's tmpfs also refuses the flag, because a transfer may have to wait for memory.
            return Err(Errno::EOPNOTSUPP);
        }
        // All contents are in memory, so RWF_SYNC and RWF_DSYNC require nothing.
        Ok(Self {
            patience: if flags & RWF_NOWAIT != 0 { Patience::None } else { plain.patience },
            appends: flags & RWF_APPEND != 0 || appends && flags & RWF_NOAPPEND == 0,
        })
    }
}

/// The number of bytes, up to `count`, that may be written at `at`: `RLIMIT_FSIZE` bounds writes to
/// a regular file.
///
/// # Errors
/// `EFBIG` if `at` is not below the limit; the running thread then gets `SIGXFSZ`.
pub fn within_limit(node: &dyn Node, at: u64, count: u64) -> Result<u64, Errno> {
    if count == 0 || node.object().is_none() {
        return Ok(count);
    }
    match process::file_size_limit() {
        u64::MAX => Ok(count),
        limit if at >= limit => Err(process::file_is_too_large()),
        limit => Ok(count.min(limit - at)),
    }
}

/// Calls `write` with the part of a program's memory that [`within_limit`] allows at `at`.
///
/// # Errors
/// As [`within_limit`]; those of `write`.
pub fn limited(
    node: &dyn Node,
    at: u64,
    segments: &Segments,
    write: impl FnOnce(&Segments) -> Outcome,
) -> Outcome {
    let asked = segments.total();
    let allowed = within_limit(node, at, asked)?;
    if allowed < asked { write(&segments.first(allowed)?) } else { write(segments) }
}

/// Refuses to grow a file of `size` bytes to `wanted` beyond `RLIMIT_FSIZE`.
///
/// # Errors
/// `EFBIG`; the running thread then gets `SIGXFSZ`.
pub fn check_growth(size: u64, wanted: u64) -> Result<(), Errno> {
    if wanted > size && wanted > process::file_size_limit() {
        return Err(process::file_is_too_large());
    }
    Ok(())
}
