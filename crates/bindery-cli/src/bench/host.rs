//! The host of the measurements.

use std::collections::BTreeMap;
use std::fs;
use std::thread;

use rustix::param::page_size;
use serde::Serialize;

use crate::size::{FolioSize, KIB, MIB};

const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// The host's properties that affect the figures.
#[derive(Clone, Debug, Serialize)]
pub struct Host {
    /// The operating system and its release (`uname -sr`).
    pub kernel: String,
    /// The CPU's own name.
    pub cpu: String,
    /// CPUs that this process may use.
    pub cpus: usize,
    /// The architecture that this program was compiled for.
    pub architecture: &'static str,
    /// Bytes in a base page of the host.
    pub page_bytes: usize,
    /// The chosen word in each file `enabled` under `/sys/kernel/mm/transparent_hugepage`, by
    /// folder (`hugepages-64kB`; `all` for the file above these folders).
    pub transparent_huge_pages: BTreeMap<String, String>,
}

impl Host {
    pub fn look() -> Self {
        let uname = rustix::system::uname();
        let words = [uname.sysname(), uname.release()].map(|word| word.to_string_lossy());
        Self {
            kernel: words.join(" "),
            cpu: cpu_model().unwrap_or_else(|| "unknown CPU".to_owned()),
            cpus: thread::available_parallelism().map_or(1, usize::from),
            architecture: std::env::consts::ARCH,
            page_bytes: page_size(),
            transparent_huge_pages: transparent_huge_pages(),
        }
    }

    /// Bytes that can be used without swapping; `None` if the host does not report it.
    pub fn available_memory() -> Option<u64> {
        let text = fs::read_to_string("/proc/meminfo").ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kilobytes * KIB)
    }
}

fn cpu_model() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    // x86-64 has "model name", RISC-V "uarch", AArch64 only numbers.
    ["model name", "uarch", "CPU part"].into_iter().find_map(|key| {
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    })
}

fn transparent_huge_pages() -> BTreeMap<String, String> {
    let mut modes = BTreeMap::new();
    let mut read = |name: &str, folder: &str| {
        if let Some(mode) = mode_in(folder) {
            modes.insert(name.to_owned(), mode);
        }
    };
    read("all", THP);
    for entry in fs::read_dir(THP).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("hugepages-") {
            read(&name, &format!("{THP}/{name}"));
        }
    }
    modes
}

fn mode_in(folder: &str) -> Option<String> {
    chosen(&fs::read_to_string(format!("{folder}/enabled")).ok()?).map(str::to_owned)
}

/// The word in brackets.
fn chosen(text: &str) -> Option<&str> {
    Some(text.split_once('[')?.1.split_once(']')?.0)
}

/// The folios that a mapping of this process can get.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostFolios {
    /// Base pages are wanted.
    Base,
    /// The wanted ones, on request by `madvise`.
    Wanted,
    /// Base pages, as the wanted size is disabled or unknown.
    Unavailable,
}

/// The folios that the host provides if this size is wanted. The host's settings are not changed.
pub fn host_folios(folio: FolioSize) -> HostFolios {
    if folio.order() == 0 {
        return HostFolios::Base;
    }
    let size = mode_in(&format!("{THP}/hugepages-{}kB", folio.bytes() / KIB));
    available(size.as_deref(), mode_in(THP).as_deref(), folio)
}

fn available(size: Option<&str>, all: Option<&str>, folio: FolioSize) -> HostFolios {
    // Before there were sizes (Linux 6.8), there was one: 2 MiB.
    let inherits = size == Some("inherit") || size.is_none() && folio.bytes() == 2 * MIB;
    match if inherits { all } else { size } {
        Some("always" | "madvise") => HostFolios::Wanted,
        _ => HostFolios::Unavailable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_word_is_the_one_in_brackets() {
        assert_eq!(chosen("always [madvise] never\n"), Some("madvise"));
        assert_eq!(chosen("nonsense"), None);
    }

    #[test]
    fn an_inherited_folio_size_follows_the_global_setting() {
        let huge = "2m".parse().unwrap();
        assert_eq!(available(Some("inherit"), Some("madvise"), huge), HostFolios::Wanted);
        assert_eq!(available(Some("inherit"), Some("never"), huge), HostFolios::Unavailable);
        assert_eq!(available(Some("always"), Some("never"), huge), HostFolios::Wanted);
        assert_eq!(available(None, Some("always"), huge), HostFolios::Wanted);
        assert_eq!(available(None, Some("always"), FolioSize::KIB_64), HostFolios::Unavailable);
    }
}
