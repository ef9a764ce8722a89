//! `/sys/devices/system/cpu`: the CPUs that run programs.

use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt::Write;

use crate::errno::Errno;
use crate::process::cpus;

use super::super::attributes::{Attributes, Entry, Kind};
use super::super::generated::{FixedDirectory, Text};
use super::super::inode::new_number;
use super::super::node::Node;

/// The cookie of the first CPU's directory, behind those of the files.
const FIRST_COOKIE: u64 = 100;

/// The directory of all CPUs.
pub(super) fn directory() -> Arc<dyn Node> {
    let numbers = || {
        Text::new(|out| match cpus::count() {
            1 => out.write_str("0\n"),
            count => writeln!(out, "0-{}", count - 1),
        }) as _
    };
    Arc::new(Directory {
        files: FixedDirectory::of([
            ("possible", numbers()),
            ("present", numbers()),
            ("online", numbers()),
        ]),
        inodes: [(); cpus::MOST].map(|()| new_number()),
    })
}

/// Files about all CPUs, and a directory for each. CPUs begin to run programs after boot has made
/// this directory, so it asks for their number each time.
struct Directory {
    files: Arc<FixedDirectory>,
    /// The inode numbers of the CPUs' directories.
    inodes: [u64; cpus::MOST],
}

impl Directory {
    /// The inode numbers of the CPUs that run programs.
    fn online(&self) -> &[u64] {
        &self.inodes[..(cpus::count() as usize).min(cpus::MOST)]
    }
}

impl Node for Directory {
    fn kind(&self) -> Kind {
        Kind::Directory
    }

    fn attributes(&self) -> Attributes {
        self.files.attributes()
    }

    fn child(&self, name: &[u8]) -> Result<Arc<dyn Node>, Errno> {
        let is_named = |cpu: usize| format!("cpu{cpu}").as_bytes() == name;
        let mut cpus = self.online().iter().enumerate();
        match cpus.find(|(cpu, _)| is_named(*cpu)) {
            Some((_, inode)) => Ok(FixedDirectory::empty(*inode)),
            None => self.files.child(name),
        }
    }

    fn children(&self) -> Result<Vec<Entry>, Errno> {
        let mut entries = self.files.children()?;
        entries.extend(self.online().iter().enumerate().map(|(cpu, inode)| Entry {
            name: format!("cpu{cpu}").into_bytes(),
            number: *inode,
            kind: Kind::Directory,
            cookie: FIRST_COOKIE + cpu as u64,
        }));
        Ok(entries)
    }
}
