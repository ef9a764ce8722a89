//! The workloads, the phases of each, and the operations that the tables show.

use clap::ValueEnum;

use crate::size::FolioSize;

/// The programs that a kernel is measured with. Each runs in a machine of its own, so that its
/// figures do not depend on the choice of the others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Debug)]
pub enum Workload {
    /// 1 MiB is mapped, written, moved and unmapped, again and again
    #[value(name = "system1")]
    System1,
    /// 1 GiB of touched memory is moved, in four ways, and unmapped
    #[value(name = "system2")]
    System2,
    /// 256 MiB go to swap by MADV_PAGEOUT, come back, and are unmapped there
    #[value(name = "system3", alias = "pageout")]
    System3,
    /// 16 MiB come to a range of a userfaultfd by MOVE and by COPY
    #[value(name = "system4")]
    System4,
    /// a child writes memory of its parent after a fork
    #[value(name = "fork")]
    Fork,
    /// live objects move together while threads use them, by MOVE and by COPY
    #[value(name = "compaction")]
    Compaction,
    /// the kernel maps memory and devices for itself: vmalloc, vmap, ioremap
    #[value(name = "kernel-map")]
    KernelMap,
    /// a process reads what /proc tells of its memory: maps, smaps, statm, PROCMAP_QUERY
    #[value(name = "proc")]
    Proc,
    /// bytes between a program and files in memory, and through pipes
    #[value(name = "copy")]
    Copy,
}

/// The form of a workload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Runner {
    /// A program under `programs/workloads`, once for each list of arguments.
    Program(&'static [&'static [&'static str]]),
    /// The kernel itself: our kernel runs the workload at boot; on Linux a module runs it.
    Kernel,
}

impl Workload {
    /// The workload's name on the command lines of this program and of our kernel, and the name of
    /// a program's source.
    pub fn name(self) -> &'static str {
        match self {
            Self::System1 => "system1",
            Self::System2 => "system2",
            Self::System3 => "system3",
            Self::System4 => "system4",
            Self::Fork => "fork",
            Self::Compaction => "compaction",
            Self::KernelMap => "kernel-map",
            Self::Proc => "proc",
            Self::Copy => "copy",
        }
    }

    /// Whether the workload is a program or a part of the kernel.
    pub fn runner(self) -> Runner {
        Runner::Program(match self {
            Self::System1 => {
                &[&["--iterations", "1000"], &["--iterations", "1000", "--offset", "4096"]]
            }
            Self::System2 => &[&["--mib", "1024", "--moves", "4"]],
            Self::System3 => {
                &[&["--mib", "256", "--rounds", "2"], &["--mib", "32", "--rounds", "2", "--random"]]
            }
            Self::System4 => &[&["--mib", "16", "--rounds", "3"]],
            Self::Fork => &[&["--mib", "16", "--rounds", "4"]],
            Self::Compaction => &[&["--mib", "32"]],
            Self::Proc | Self::Copy => &[&["--rounds", "10"]],
            Self::KernelMap => return Runner::Kernel,
        })
    }

    /// The folio sizes with which the workload runs: each of the given sizes, or once without a
    /// size if the workload has no folios.
    pub fn folios(self, chosen: &[FolioSize]) -> Vec<Option<FolioSize>> {
        match self {
            Self::KernelMap | Self::Proc | Self::Copy => vec![None],
            Self::System1
            | Self::System2
            | Self::System3
            | Self::System4
            | Self::Fork
            | Self::Compaction => chosen.iter().copied().map(Some).collect(),
        }
    }

    /// Whether the workload needs a swap device.
    pub fn swaps(self) -> bool {
        self == Self::System3
    }

    /// Whether the workload uses optional features of the core: swap or userfaultfds.
    pub fn needs_features(self) -> bool {
        match self {
            Self::System3 | Self::System4 | Self::Compaction => true,
            Self::System1
            | Self::System2
            | Self::Fork
            | Self::KernelMap
            | Self::Proc
            | Self::Copy => false,
        }
    }

    /// The operations of the workload.
    pub fn rows(self) -> impl Iterator<Item = &'static Row> {
        ROWS.iter().filter(move |row| row.workload == self)
    }
}

/// An operation: a phase of a workload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// The workload that executes the operation.
    pub workload: Workload,
    /// The phase's number in `programs/include/mark.h`.
    pub phase: u16,
    /// The operation's name for `--profile` and in the JSON.
    pub key: &'static str,
    /// The operation's name in the table.
    pub name: &'static str,
}

impl Row {
    /// The operation with this key.
    pub fn from_key(key: &str) -> Result<Self, String> {
        ROWS.iter().copied().find(|row| row.key == key).ok_or_else(|| {
            let keys: Vec<&str> = ROWS.iter().map(|row| row.key).collect();
            format!("operations are {}", keys.join(", "))
        })
    }
}

/// All operations, in the order of the table.
pub const ROWS: &[Row] = &[
    row(Workload::System1, 2, "mmap-1m", "mmap 1 MiB"),
    row(Workload::System1, 3, "touch-1m", "first touch of 1 MiB (memset)"),
    row(Workload::System1, 4, "mremap-1m", "mremap 1 MiB, congruent by 1 MiB"),
    row(Workload::System1, 260, "mremap-1m-off-4k", "mremap 1 MiB, off by 4 KiB"),
    row(Workload::System1, 5, "munmap-1m", "munmap 1 MiB"),
    row(Workload::System1, 261, "munmap-1m-off-4k", "munmap 1 MiB, moved off by 4 KiB"),
    row(Workload::System1, 1, "loop-1m", "1,000 times all four"),
    row(Workload::System1, 257, "loop-1m-off-4k", "1,000 times all four, off by 4 KiB"),
    row(Workload::System2, 20, "touch-1g", "mmap and first touch of 1 GiB"),
    row(Workload::System2, 16, "mremap-1g", "mremap 1 GiB, congruent by 1 GiB"),
    row(Workload::System2, 17, "mremap-1g-by-2m", "mremap 1 GiB, congruent by 2 MiB"),
    row(Workload::System2, 18, "mremap-1g-off-64k", "mremap 1 GiB, off by 64 KiB"),
    row(Workload::System2, 19, "mremap-1g-off-4k", "mremap 1 GiB, off by 4 KiB"),
    row(Workload::System2, 21, "munmap-1g", "munmap 1 GiB"),
    row(Workload::System3, 32, "pageout-256m", "pageout of 256 MiB of zeroes"),
    row(Workload::System3, 33, "swap-in-256m", "swap-in of 256 MiB, touched in order"),
    row(Workload::System3, 34, "munmap-256m-swapped", "munmap of 256 MiB swapped out"),
    row(Workload::System3, 35, "pageout-32m-random", "pageout of 32 MiB, compressed"),
    row(Workload::System3, 36, "swap-in-32m-random", "swap-in of 32 MiB, compressed"),
    row(Workload::System3, 37, "munmap-32m-random", "munmap of 32 MiB swapped out, compressed"),
    row(Workload::System4, 48, "uffd-move-16m", "UFFDIO_MOVE 16 MiB, one call"),
    row(Workload::System4, 49, "uffd-move-16m-by-64k", "UFFDIO_MOVE 16 MiB, 256 calls"),
    row(Workload::System4, 50, "uffd-move-16m-by-4k", "UFFDIO_MOVE 16 MiB, 4,096 calls"),
    row(Workload::System4, 51, "uffd-copy-16m", "UFFDIO_COPY 16 MiB, one call"),
    row(Workload::System4, 52, "uffd-copy-16m-by-64k", "UFFDIO_COPY 16 MiB, 256 calls"),
    row(Workload::System4, 53, "uffd-copy-16m-by-4k", "UFFDIO_COPY 16 MiB, 4,096 calls"),
    row(Workload::System4, 54, "uffd-release-16m", "MADV_DONTNEED of 16 MiB copied"),
    row(Workload::System4, 55, "uffd-faults-move", "4,096 faults served with MOVE"),
    row(Workload::System4, 56, "uffd-faults-copy", "4,096 faults served with COPY"),
    row(Workload::Fork, 144, "child-writes-1m", "a child writes 1 MiB after a fork"),
    row(Workload::Fork, 145, "child-writes-16m", "a child writes 16 MiB after a fork"),
    row(Workload::Compaction, 128, "compact-copy-4k", "compaction by 4 KiB, COPY"),
    row(Workload::Compaction, 129, "compact-move-4k", "compaction by 4 KiB, MOVE"),
    row(Workload::Compaction, 130, "compact-copy-4k-fresh", "compaction by 4 KiB, COPY, fresh"),
    row(Workload::Compaction, 131, "compact-move-4k-fresh", "compaction by 4 KiB, MOVE, fresh"),
    row(Workload::Compaction, 132, "compact-copy-64k", "compaction by 64 KiB, COPY"),
    row(Workload::Compaction, 133, "compact-move-64k", "compaction by 64 KiB, MOVE"),
    row(Workload::Compaction, 134, "compact-copy-64k-fresh", "compaction by 64 KiB, COPY, fresh"),
    row(Workload::Compaction, 135, "compact-move-64k-fresh", "compaction by 64 KiB, MOVE, fresh"),
    row(Workload::Compaction, 136, "compact-copy-2m", "compaction by 2 MiB, COPY"),
    row(Workload::Compaction, 137, "compact-move-2m", "compaction by 2 MiB, MOVE"),
    row(Workload::Compaction, 138, "compact-copy-2m-fresh", "compaction by 2 MiB, COPY, fresh"),
    row(Workload::Compaction, 139, "compact-move-2m-fresh", "compaction by 2 MiB, MOVE, fresh"),
    row(Workload::KernelMap, 64, "vmalloc-1m", "vmalloc 1 MiB"),
    row(Workload::KernelMap, 65, "vfree-1m", "vfree 1 MiB"),
    row(Workload::KernelMap, 66, "vmalloc-1m-huge", "vmalloc 1 MiB, huge mappings allowed"),
    row(Workload::KernelMap, 67, "vfree-1m-huge", "vfree 1 MiB, huge mappings allowed"),
    row(Workload::KernelMap, 78, "vmalloc-16m-huge", "vmalloc 16 MiB, huge mappings allowed"),
    row(Workload::KernelMap, 79, "vfree-16m-huge", "vfree 16 MiB, huge mappings allowed"),
    row(Workload::KernelMap, 68, "vmap-1m", "vmap 1 MiB, order-0 pages"),
    row(Workload::KernelMap, 69, "vunmap-1m", "vunmap 1 MiB, order-0 pages"),
    row(Workload::KernelMap, 70, "vmap-1m-order-4", "vmap 1 MiB, order-4 pages"),
    row(Workload::KernelMap, 71, "vunmap-1m-order-4", "vunmap 1 MiB, order-4 pages"),
    row(Workload::KernelMap, 72, "vmap-1m-order-8", "vmap 1 MiB, order-8 pages"),
    row(Workload::KernelMap, 73, "vunmap-1m-order-8", "vunmap 1 MiB, order-8 pages"),
    row(Workload::KernelMap, 74, "ioremap-1m", "ioremap 1 MiB"),
    row(Workload::KernelMap, 75, "iounmap-1m", "iounmap 1 MiB"),
    row(Workload::KernelMap, 76, "ioremap-1m-off-64k", "ioremap 1 MiB, off by 64 KiB"),
    row(Workload::KernelMap, 77, "iounmap-1m-off-64k", "iounmap 1 MiB, off by 64 KiB"),
    row(Workload::Proc, 96, "maps-30000", "/proc/self/maps, 30,000 mappings"),
    row(Workload::Proc, 97, "maps-2000-by-1k", "maps, 2,000 mappings, read by 1 KiB"),
    row(Workload::Proc, 98, "smaps-1000", "/proc/self/smaps, 1,000 mappings"),
    row(Workload::Proc, 99, "statm", "/proc/self/statm, 16 MiB resident"),
    row(Workload::Proc, 100, "map-query", "PROCMAP_QUERY among 30,000 mappings"),
    row(Workload::Copy, 112, "read-memfd-1m", "read 1 MiB of a memfd"),
    row(Workload::Copy, 113, "write-memfd-1m", "write 1 MiB of a memfd"),
    row(Workload::Copy, 114, "read-tmpfs-1m", "read 1 MiB of a file in tmpfs"),
    row(Workload::Copy, 115, "write-tmpfs-1m", "write 1 MiB of a file in tmpfs"),
    row(Workload::Copy, 116, "write-new-1m", "write 1 MiB to an empty file in tmpfs"),
    row(Workload::Copy, 117, "pread-4k", "pread of a page"),
    row(Workload::Copy, 118, "pwrite-4k", "pwrite of a page"),
    row(Workload::Copy, 119, "pread-1", "pread of a byte"),
    row(Workload::Copy, 120, "pwrite-1", "pwrite of a byte"),
    row(Workload::Copy, 121, "pipe-4k", "a page through a pipe"),
    row(Workload::Copy, 122, "pipe-64k", "64 KiB through a pipe"),
    row(Workload::Copy, 123, "pipe-1", "a byte through a pipe"),
];

const fn row(workload: Workload, phase: u16, key: &'static str, name: &'static str) -> Row {
    Row { workload, phase, key, name }
}

/// The default folio sizes.
pub const FOLIOS: [FolioSize; 3] = [FolioSize::BASE, FolioSize::KIB_64, FolioSize::MIB_2];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_has_its_own_phase_and_key() {
        for (number, row) in ROWS.iter().enumerate() {
            assert_eq!(Row::from_key(row.key), Ok(*row));
            assert!(ROWS[..number].iter().all(|other| other.phase != row.phase), "{}", row.name);
        }
        assert!(Row::from_key("swap").unwrap_err().contains("mremap-1g-by-2m"));
    }

    #[test]
    fn a_workload_without_folios_runs_once() {
        assert_eq!(Workload::KernelMap.folios(&FOLIOS), [None]);
        assert_eq!(Workload::Proc.folios(&FOLIOS), [None]);
        assert_eq!(Workload::Copy.folios(&FOLIOS), [None]);
        assert_eq!(
            Workload::System1.folios(&FOLIOS[1..]),
            FOLIOS[1..].iter().copied().map(Some).collect::<Vec<_>>()
        );
        assert_eq!(Workload::KernelMap.rows().count(), 16);
    }

    #[test]
    fn phases_are_those_of_the_marks() {
        let marks = include_str!("../../../../programs/include/mark.h");
        let number_of = |name: &str| -> u16 {
            let line = marks.lines().find_map(|line| line.trim().strip_prefix(name));
            let number = line.and_then(|line| line.strip_prefix(" = ")?.strip_suffix(','));
            number.unwrap_or_else(|| panic!("mark.h has no {name}")).parse().unwrap()
        };
        let offset = number_of("PHASE_OFFSET");
        for (key, phase) in [
            ("mmap-1m", number_of("PHASE_MMAP")),
            ("touch-1m", number_of("PHASE_FIRST_TOUCH")),
            ("mremap-1m", number_of("PHASE_MREMAP")),
            ("mremap-1m-off-4k", number_of("PHASE_MREMAP") + offset),
            ("munmap-1m", number_of("PHASE_MUNMAP")),
            ("munmap-1m-off-4k", number_of("PHASE_MUNMAP") + offset),
            ("loop-1m", number_of("PHASE_LOOP")),
            ("loop-1m-off-4k", number_of("PHASE_LOOP") + offset),
            ("touch-1g", number_of("PHASE_POPULATE_1G")),
            ("mremap-1g", number_of("PHASE_MOVE_BY_1G")),
            ("mremap-1g-by-2m", number_of("PHASE_MOVE_BY_2M")),
            ("mremap-1g-off-64k", number_of("PHASE_MOVE_OFF_64K")),
            ("mremap-1g-off-4k", number_of("PHASE_MOVE_OFF_4K")),
            ("munmap-1g", number_of("PHASE_MUNMAP_1G")),
            ("pageout-256m", number_of("PHASE_PAGEOUT")),
            ("swap-in-256m", number_of("PHASE_SWAP_IN")),
            ("munmap-256m-swapped", number_of("PHASE_MUNMAP_SWAPPED")),
            ("pageout-32m-random", number_of("PHASE_PAGEOUT_RANDOM")),
            ("swap-in-32m-random", number_of("PHASE_SWAP_IN_RANDOM")),
            ("munmap-32m-random", number_of("PHASE_MUNMAP_SWAPPED_RANDOM")),
            ("uffd-move-16m", number_of("PHASE_MOVE_PAGES_WHOLE")),
            ("uffd-move-16m-by-64k", number_of("PHASE_MOVE_PAGES_BY_64K")),
            ("uffd-move-16m-by-4k", number_of("PHASE_MOVE_PAGES_BY_4K")),
            ("uffd-copy-16m", number_of("PHASE_COPY_PAGES_WHOLE")),
            ("uffd-copy-16m-by-64k", number_of("PHASE_COPY_PAGES_BY_64K")),
            ("uffd-copy-16m-by-4k", number_of("PHASE_COPY_PAGES_BY_4K")),
            ("uffd-release-16m", number_of("PHASE_RELEASE")),
            ("uffd-faults-move", number_of("PHASE_FAULTS_MOVE")),
            ("uffd-faults-copy", number_of("PHASE_FAULTS_COPY")),
            ("child-writes-1m", number_of("PHASE_CHILD_WRITES_PART")),
            ("child-writes-16m", number_of("PHASE_CHILD_WRITES_ALL")),
            ("compact-copy-4k", number_of("PHASE_COMPACT_BY_4K")),
            ("compact-move-4k-fresh", number_of("PHASE_COMPACT_BY_4K") + 3),
            ("compact-copy-64k", number_of("PHASE_COMPACT_BY_64K")),
            ("compact-move-64k-fresh", number_of("PHASE_COMPACT_BY_64K") + 3),
            ("compact-copy-2m", number_of("PHASE_COMPACT_BY_2M")),
            ("compact-move-2m-fresh", number_of("PHASE_COMPACT_BY_2M") + 3),
            ("vmalloc-1m", number_of("PHASE_VMALLOC")),
            ("vfree-1m", number_of("PHASE_VFREE")),
            ("vmalloc-1m-huge", number_of("PHASE_VMALLOC_HUGE")),
            ("vfree-1m-huge", number_of("PHASE_VFREE_HUGE")),
            ("vmalloc-16m-huge", number_of("PHASE_VMALLOC_HUGE_16M")),
            ("vfree-16m-huge", number_of("PHASE_VFREE_HUGE_16M")),
            ("vmap-1m", number_of("PHASE_VMAP")),
            ("vunmap-1m", number_of("PHASE_VUNMAP")),
            ("vmap-1m-order-4", number_of("PHASE_VMAP_ORDER_4")),
            ("vunmap-1m-order-4", number_of("PHASE_VUNMAP_ORDER_4")),
            ("vmap-1m-order-8", number_of("PHASE_VMAP_ORDER_8")),
            ("vunmap-1m-order-8", number_of("PHASE_VUNMAP_ORDER_8")),
            ("ioremap-1m", number_of("PHASE_IOREMAP")),
            ("iounmap-1m", number_of("PHASE_IOUNMAP")),
            ("ioremap-1m-off-64k", number_of("PHASE_IOREMAP_OFF_64K")),
            ("iounmap-1m-off-64k", number_of("PHASE_IOUNMAP_OFF_64K")),
            ("maps-30000", number_of("PHASE_MAPS")),
            ("maps-2000-by-1k", number_of("PHASE_MAPS_IN_PIECES")),
            ("smaps-1000", number_of("PHASE_SMAPS")),
            ("statm", number_of("PHASE_STATM")),
            ("map-query", number_of("PHASE_MAP_QUERY")),
            ("read-memfd-1m", number_of("PHASE_READ_MEMFD")),
            ("write-memfd-1m", number_of("PHASE_WRITE_MEMFD")),
            ("read-tmpfs-1m", number_of("PHASE_READ_TMPFS")),
            ("write-tmpfs-1m", number_of("PHASE_WRITE_TMPFS")),
            ("write-new-1m", number_of("PHASE_WRITE_NEW")),
            ("pread-4k", number_of("PHASE_READ_PAGE")),
            ("pwrite-4k", number_of("PHASE_WRITE_PAGE")),
            ("pread-1", number_of("PHASE_READ_BYTE")),
            ("pwrite-1", number_of("PHASE_WRITE_BYTE")),
            ("pipe-4k", number_of("PHASE_PIPE_PAGE")),
            ("pipe-64k", number_of("PHASE_PIPE_64K")),
            ("pipe-1", number_of("PHASE_PIPE_BYTE")),
        ] {
            assert_eq!(Row::from_key(key).unwrap().phase, phase, "{key}");
        }
    }
}
