//! Files whose text is made when it is read: `/proc` and `/sys`.
//!
//! Nothing is kept: each read makes the text anew and takes its part of it, so that a long text
//! costs no memory of the kernel.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use crate::errno::Errno;

use super::attributes::{Attributes, Entry, Kind, Patience};
use super::inode::new_number;
use super::node::{Node, may_read, may_write};
use super::sequence::SequenceBuffer;

/// A function that writes a text. It may stop at the first error of the writer: the part is full
/// then.
pub type Make = fn(&mut SequenceBuffer<'_>) -> fmt::Result;

/// A function that takes a written text.
pub type Take = fn(&str) -> Result<(), Errno>;

/// A file with a text.
pub struct Text {
    number: u64,
    make: Option<Make>,
    take: Option<Take>,
}

impl Text {
    /// A file that can only be read.
    #[inline(never)]
    pub fn new(make: Make) -> Arc<Self> {
        Arc::new(Self { number: new_number(), make: Some(make), take: None })
    }

    /// A file that can be written too.
    #[inline(never)]
    pub fn writable(make: Make, take: Take) -> Arc<Self> {
        Arc::new(Self { number: new_number(), make: Some(make), take: Some(take) })
    }

    /// A file that can only be written.
    #[inline(never)]
    pub fn write_only(take: Take) -> Arc<Self> {
        Arc::new(Self { number: new_number(), make: None, take: Some(take) })
    }
}

impl Node for Text {
    fn kind(&self) -> Kind {
        Kind::Regular
    }

    fn attributes(&self) -> Attributes {
        let readable = if self.make.is_some() { 0o444 } else { 0 };
        Attributes::plain(self.number, readable | if self.take.is_some() { 0o200 } else { 0 })
    }

    fn open(&self, flags: u32) -> Result<Option<Arc<dyn Node>>, Errno> {
        // Root's rights do not help: as on Linux, the file has no such side.
        if may_write(flags) && self.take.is_none() || may_read(flags) && self.make.is_none() {
            return Err(Errno::EACCES);
        }
        Ok(None)
    }

    fn read(&self, at: u64, into: &mut [u8], _: Patience) -> Result<usize, Errno> {
        let mut buffer = SequenceBuffer::new(at, into);
        let make = self.make.ok_or(Errno::EINVAL)?;
        let _ = make(&mut buffer); // an error only means that the buffer is full
        Ok(buffer.filled())
    }

    fn write(&self, _: u64, from: &[u8], _: Patience) -> Result<usize, Errno> {
        let take = self.take.ok_or(Errno::EINVAL)?;
        take(core::str::from_utf8(from).map_err(|_| Errno::EINVAL)?.trim())?;
        Ok(from.len())
    }
}

/// A directory whose names never change.
pub struct FixedDirectory {
    number: u64,
    entries: Vec<(String, Arc<dyn Node>)>,
}

impl FixedDirectory {
    /// A directory with these.
    #[inline(never)]
    pub fn new(entries: Vec<(String, Arc<dyn Node>)>) -> Arc<Self> {
        Arc::new(Self { number: new_number(), entries })
    }

    /// As [`FixedDirectory::new`], with names that are known.
    pub fn of<const N: usize>(entries: [(&str, Arc<dyn Node>); N]) -> Arc<Self> {
        Self::with_all(&mut entries.into_iter())
    }

    #[inline(never)]
    fn with_all(entries: &mut dyn Iterator<Item = (&str, Arc<dyn Node>)>) -> Arc<Self> {
        Self::new(entries.map(|(name, node)| (name.into(), node)).collect())
    }
}

impl Node for FixedDirectory {
    fn kind(&self) -> Kind {
        Kind::Directory
    }

    fn attributes(&self) -> Attributes {
        Attributes { links: 2, ..Attributes::plain(self.number, 0o555) }
    }

    fn child(&self, name: &[u8]) -> Result<Arc<dyn Node>, Errno> {
        let found = self.entries.iter().find(|(known, _)| known.as_bytes() == name);
        found.map(|(_, node)| node.clone()).ok_or(Errno::ENOENT)
    }

    fn children(&self) -> Result<Vec<Entry>, Errno> {
        let entry = |(index, (name, node)): (usize, &(String, Arc<dyn Node>))| Entry {
            name: name.clone().into_bytes(),
            number: node.attributes().number,
            kind: node.kind(),
            cookie: index as u64 + 3,
        };
        Ok(self.entries.iter().enumerate().map(entry).collect())
    }
}
