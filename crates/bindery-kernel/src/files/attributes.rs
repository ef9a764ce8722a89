//! Kinds and attributes of files, as `stat` reports them.

use alloc::vec::Vec;

use linux_raw_sys::general::{S_IFBLK, S_IFCHR, S_IFDIR, S_IFIFO, S_IFLNK, S_IFREG, S_IFSOCK};

/// Set-user-ID: a program runs as its owner.
pub const SET_USER: u32 = 0o4000;
/// Set-group-ID: a program runs with its group.
pub const SET_GROUP: u32 = 0o2000;

/// Whether a program with these permission bits runs as its owner or with its group.
#[inline]
pub fn sets_ids(mode: u32) -> bool {
    mode & (SET_USER | SET_GROUP) != 0
}

/// The kind of a node, as `stat` reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// A device.
    Device,
    /// A device that holds blocks.
    Block,
    /// A pipe.
    Pipe,
    /// A socket.
    Socket,
    /// A node that has only a descriptor: eventfd, pidfd, epoll.
    Anonymous,
}

impl Kind {
    /// The type bits of `st_mode`.
    pub fn mode(self) -> u32 {
        match self {
            Self::Regular => S_IFREG,
            Self::Directory => S_IFDIR,
            Self::Link => S_IFLNK,
            Self::Device => S_IFCHR,
            Self::Block => S_IFBLK,
            Self::Pipe => S_IFIFO,
            Self::Socket => S_IFSOCK,
            Self::Anonymous => 0,
        }
    }

    /// The type of a directory's entry (`d_type`).
    pub fn entry_type(self) -> u8 {
        (self.mode() >> 12) as u8
    }
}

/// Attributes of a node, as `stat` reports them.
#[derive(Clone, Copy, Debug)]
pub struct Attributes {
    /// The inode's number.
    pub number: u64,
    /// Permission bits.
    pub mode: u32,
    /// The number of the node's names.
    pub links: u32,
    /// Owner and group.
    pub owner: (u32, u32),
    /// In bytes.
    pub size: u64,
    /// In units of 512 bytes.
    pub blocks: u64,
    /// Times of the last access, content change and attribute change: nanoseconds since 1970.
    pub times: [u64; 3],
    /// Major and minor number of a device node.
    pub device: (u32, u32),
}

impl Attributes {
    /// Attributes of a node that has only a number and permissions.
    pub fn plain(number: u64, mode: u32) -> Self {
        Self {
            number,
            mode,
            links: 1,
            owner: (0, 0),
            size: 0,
            blocks: 0,
            times: [0; 3],
            device: (0, 0),
        }
    }
}

/// A change of a node's attributes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Change {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner, group.
    pub owner: (Option<u32>, Option<u32>),
    /// New times of the last access and content change.
    pub times: [Option<u64>; 2],
}

/// A name in a directory.
pub struct Entry {
    /// The name.
    pub name: Vec<u8>,
    /// The inode's number.
    pub number: u64,
    /// The kind of the node.
    pub kind: Kind,
    /// The entry's position in the directory: rising, from 3 on, and fixed while the name exists.
    pub cookie: u64,
}

/// Whether a transfer may sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Patience {
    /// Sleeps until data is available.
    Wait,
    /// Fails with `EAGAIN` instead (`O_NONBLOCK`).
    None,
}
