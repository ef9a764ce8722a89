//! `/dev`: null, zero, full, random, the console, the swap device, the frame buffer, userfaultfds.

use alloc::sync::Arc;

use crate::errno::Errno;
use crate::{options, process};

use super::attributes::{Attributes, Kind, Patience};
use super::inode::new_number;
use super::memory::{self, Directory, Link};
use super::node::{Node, Place};
use super::silent_file::SilentFile;
use super::tree::directory_at;
use super::{console, frame_buffer, swap, userfault};

/// A device of the memory class.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sort {
    Null,
    Zero,
    Full,
    Random,
}

struct Device {
    number: u64,
    sort: Sort,
    minor: u32,
}

impl Node for Device {
    fn kind(&self) -> Kind {
        Kind::Device
    }

    fn attributes(&self) -> Attributes {
        Attributes { device: (1, self.minor), ..Attributes::plain(self.number, 0o666) }
    }

    fn read(&self, _: u64, into: &mut [u8], _: Patience) -> Result<usize, Errno> {
        match self.sort {
            Sort::Null => return Ok(0),
            Sort::Zero | Sort::Full => into.fill(0),
            Sort::Random => process::random::fill(into),
        }
        Ok(into.len())
    }

    fn write(&self, _: u64, from: &[u8], _: Patience) -> Result<usize, Errno> {
        if self.sort == Sort::Full { Err(Errno::ENOSPC) } else { Ok(from.len()) }
    }

    fn is_zeroes(&self) -> bool {
        self.sort == Sort::Zero
    }

    fn is_seekable(&self) -> bool {
        true
    }

    fn ignores_seeks(&self) -> bool {
        true
    }
}

/// Fills `/dev`.
pub fn begin(root: &Arc<Place>) -> Result<(), Errno> {
    let place = directory_at(root, b"dev", 0o755)?;
    let directory = memory::directory(&*place.node).ok_or(Errno::ENOTDIR)?;
    let devices = [
        ("null", Sort::Null, 3),
        ("zero", Sort::Zero, 5),
        ("full", Sort::Full, 7),
        ("random", Sort::Random, 8),
        ("urandom", Sort::Random, 9),
    ];
    for (name, sort, minor) in devices {
        directory
            .insert(name.as_bytes(), Arc::new(Device { number: new_number(), sort, minor }))?;
    }
    directory.insert(b"zram0", swap::Device::new())?;
    directory.insert(b"fb0", frame_buffer::Device::new()?)?;
    if options::value("silent-file").is_some() {
        directory.insert(b"silent", SilentFile::new()?)?;
    }
    directory.insert(b"userfaultfd", userfault::Device::new())?;
    for name in ["console", "tty"] {
        directory.insert(name.as_bytes(), console::node())?;
    }
    directory.insert(b"shm", Directory::new(0o1777)?)?;
    directory.insert(b"fd", Link::new(b"/proc/self/fd")?)?;
    directory.insert(b"stdin", Link::new(b"/proc/self/fd/0")?)?;
    directory.insert(b"stdout", Link::new(b"/proc/self/fd/1")?)?;
    directory.insert(b"stderr", Link::new(b"/proc/self/fd/2")?)
}
