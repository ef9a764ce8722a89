//! The pools of huge pages (hugetlb), which are always empty: their files in `/sys`, their lines in
//! `/proc/meminfo`, and their memfds.

use alloc::format;
use alloc::sync::Arc;
use core::fmt::{self, Write};

use crate::errno::Errno;
use crate::{arch, options};

use super::attributes::{Attributes, Kind};
use super::generated::{FixedDirectory, Text};
use super::inode::new_number;
use super::node::Node;
use super::sequence::SequenceBuffer;

/// The size of the default pool, as the binary logarithm of bytes.
const DEFAULT: u32 = 21;

/// The files of a pool.
const FILES: [&str; 5] = [
    "free_hugepages",
    "nr_hugepages",
    "nr_overcommit_hugepages",
    "resv_hugepages",
    "surplus_hugepages",
];

/// The sizes that have a pool, as binary logarithms of bytes.
fn sizes() -> impl Iterator<Item = u32> {
    arch::huge_page_sizes().iter().copied()
}

/// `/sys/kernel/mm/hugepages`. The option `huge-page-pools=none` leaves it empty.
pub fn directory() -> Arc<FixedDirectory> {
    let pool = |size: u32| {
        let zero = |out: &mut SequenceBuffer<'_>| out.write_str("0\n");
        let file = |name: &str| -> Arc<dyn Node> {
            if name.starts_with("nr_") { Text::writable(zero, fill) } else { Text::new(zero) }
        };
        let files = FixedDirectory::of(FILES.map(|name| (name, file(name))));
        (format!("hugepages-{}kB", 1_u64 << size >> 10), files as Arc<dyn Node>)
    };
    let is_hidden = options::value("huge-page-pools") == Some("none");
    FixedDirectory::new(sizes().filter(|_| !is_hidden).map(pool).collect())
}

/// Fills a pool as far as there are pages for it, which is not at all. As on Linux, that is no
/// error.
fn fill(text: &str) -> Result<(), Errno> {
    text.parse::<u64>().map_err(|_| Errno::EINVAL)?;
    Ok(())
}

/// The lines of `/proc/meminfo`.
pub fn meminfo(out: &mut SequenceBuffer<'_>) -> fmt::Result {
    for name in ["Total", "Free", "Rsvd", "Surp"] {
        writeln!(out, "{:<16}{:>8}", format!("HugePages_{name}:"), 0)?;
    }
    writeln!(out, "{:<16}{:>8} kB", "Hugepagesize:", 1_u64 << DEFAULT >> 10)?;
    writeln!(out, "{:<16}{:>8} kB", "Hugetlb:", 0)
}

/// A file on a pool. It cannot be mapped.
struct PoolFile {
    number: u64,
}

impl Node for PoolFile {
    fn kind(&self) -> Kind {
        Kind::Regular
    }

    fn attributes(&self) -> Attributes {
        Attributes::plain(self.number, 0o777)
    }

    fn unmappable(&self) -> Errno {
        Errno::ENOMEM
    }
}

/// A file on the pool of pages of 2^`size` bytes; 0 is the default pool.
///
/// # Errors
/// `ENODEV` if that size has no pool.
pub fn file(size: u32) -> Result<Arc<dyn Node>, Errno> {
    if size != 0 && !sizes().any(|known| known == size) {
        return Err(Errno::ENODEV);
    }
    Ok(Arc::new(PoolFile { number: new_number() }))
}
