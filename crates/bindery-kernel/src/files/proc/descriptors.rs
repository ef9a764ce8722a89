//! `/proc/PID/fdinfo`: the state of an open descriptor.

use alloc::sync::Arc;
use core::fmt::{self, Write};

use linux_raw_sys::general::O_CLOEXEC;

use crate::errno::Errno;
use crate::process;

use super::super::attributes::{Attributes, Kind, Patience};
use super::super::descriptor::{AtExec, Description, Files};
use super::super::node::Node;
use super::super::sequence::SequenceBuffer;
use super::number;

/// The text about one descriptor of a process.
pub(super) struct DescriptorText {
    pub(super) process: u32,
    pub(super) descriptor: i32,
}

impl DescriptorText {
    fn description(&self) -> Result<(Arc<Description>, AtExec), Errno> {
        let process = process::find(self.process).ok_or(Errno::ENOENT)?;
        if !process::may_look_into(&process) {
            return Err(Errno::EACCES);
        }
        let files = Files::of_process(&process).ok_or(Errno::ENOENT)?;
        let description = files.get(self.descriptor).map_err(|_| Errno::ENOENT)?;
        let at_exec = files.at_exec(self.descriptor).map_err(|_| Errno::ENOENT)?;
        Ok((description, at_exec))
    }
}

impl Node for DescriptorText {
    fn kind(&self) -> Kind {
        Kind::Regular
    }

    fn attributes(&self) -> Attributes {
        let owner = super::owner(self.process);
        let number = number(self.process, self.descriptor as usize + 10_000);
        Attributes { owner, ..Attributes::plain(number, 0o400) }
    }

    fn read(&self, at: u64, into: &mut [u8], _: Patience) -> Result<usize, Errno> {
        let (description, at_exec) = self.description()?;
        let mut out = SequenceBuffer::new(at, into);
        // An error means that the buffer is full.
        let _ = tell(&description, at_exec, &mut out);
        Ok(out.filled())
    }

    fn has_end(&self) -> bool {
        false
    }
}

fn tell(description: &Description, at_exec: AtExec, out: &mut SequenceBuffer<'_>) -> fmt::Result {
    // A transfer in progress has locked the position, and the final position is not known yet.
    let position = description.position.try_lock().map_or(0, |position| *position);
    let closed = if at_exec == AtExec::Closed { O_CLOEXEC } else { 0 };
    writeln!(out, "pos:\t{position}")?;
    writeln!(out, "flags:\t0{:o}", description.flags() | closed)?;
    writeln!(out, "mnt_id:\t1")?;
    writeln!(out, "ino:\t{}", description.node.attributes().number)?;
    description.node.tell(out)
}
