//! Operations known to cost more than on Linux, with the reasons.

/// An operation that may take up to this multiple of Linux's instructions.
#[derive(Clone, Copy, Debug)]
struct Known {
    /// The operation of the class.
    operation: &'static str,
    /// The maximum seen, plus 2 %.
    up_to: f64,
    /// The causes.
    reasons: &'static [&'static str],
}

/// The reasons for an operation's ratio, if known.
pub fn reason(operation: &str, ratio: f64) -> Option<String> {
    let fits = |known: &&Known| known.operation == operation && ratio <= known.up_to;
    KNOWN.iter().find(fits).map(|known| known.reasons.join("; "))
}

const PAGE_INDEX: &str =
    "each page of shared memory takes the table locks and the page index by itself";
const SPLIT: &str = "a folio of which the range has a part is split first";
const OWN_AGAIN: &str = "a write to a page that is its process' own again takes 2,300 \
                         instructions more than on Linux, most of them for table locks";
const EXPANDED: &str =
    "a page is decompressed for 22,000 instructions, where the whole of Linux's step takes fewer";
const ENTRIES: &str =
    "entries of base pages are changed one at a time, at 370 to 640 instructions each";
const COPIES: &str =
    "base pages of private copies are unmapped one at a time, at 440 instructions each";
const FAILS: &str = "the call fails on both kernels; ours has set its locks up by then";

/// All known operations, from 300 programs on each architecture. The causes come from profiles
/// (`--profile`) of the most expensive steps.
const KNOWN: &[Known] = &[
    Known {
        operation: "MADV_COLD",
        up_to: 3.7,
        reasons: &["folios are looked up one at a time for the age of each", SPLIT],
    },
    Known {
        operation: "MADV_DONTNEED",
        up_to: 4.7,
        reasons: &[
            "a lock span with room for 64 tables is set up for any range, and its tables are \
             searched for emptiness: some 3,600 instructions more than Linux for a range of few \
             pages",
        ],
    },
    Known {
        operation: "MADV_FREE",
        up_to: 3.1,
        reasons: &["runs of base pages are found one at a time", SPLIT],
    },
    Known {
        operation: "MADV_HUGEPAGE",
        up_to: 1.8,
        reasons: &["a huge leaf is split where the VMA is: 5,200 instructions"],
    },
    Known {
        operation: "MADV_PAGEOUT",
        up_to: 5.2,
        reasons: &[
            "the call for shared memory takes 7,600 instructions before its first page; on AArch64 \
             the compressor takes 1.6 times as many as Linux's",
        ],
    },
    Known {
        operation: "MADV_PAGEOUT",
        up_to: 60.8,
        reasons: &[
            "folios that several processes map are compressed, which Linux leaves in memory",
        ],
    },
    Known {
        operation: "MADV_POPULATE_READ",
        up_to: 2.8,
        reasons: &[PAGE_INDEX, "on AArch64 the first use of the huge zero page clears it"],
    },
    Known { operation: "MADV_POPULATE_WRITE", up_to: 2.6, reasons: &[OWN_AGAIN] },
    Known { operation: "UFFDIO_COPY", up_to: 2.1, reasons: &["the source is in swap:", EXPANDED] },
    Known { operation: "UFFDIO_MOVE", up_to: 3.5, reasons: &[FAILS, SPLIT] },
    Known {
        operation: "UFFDIO_REGISTER",
        up_to: 1.4,
        reasons: &[
            "the reference kernel's heap takes 1,000 instructions, and a page of the program that \
             is its own again is written in the call",
        ],
    },
    Known {
        operation: "UFFDIO_WRITEPROTECT",
        up_to: 3.6,
        reasons: &["on AArch64 a huge leaf is split first: 5,200 instructions"],
    },
    Known { operation: "UFFDIO_WRITEPROTECT, removed", up_to: 3.0, reasons: &[ENTRIES] },
    Known {
        operation: "UFFDIO_ZEROPAGE",
        up_to: 1.6,
        reasons: &[
            "the call takes 220 instructions more than on Linux before it maps; not analyzed \
             further",
        ],
    },
    Known {
        operation: "exit and wait",
        up_to: 3.2,
        reasons: &["folios that several processes map are unmapped entry by entry"],
    },
    Known {
        operation: "first writes",
        up_to: 2.9,
        reasons: &[OWN_AGAIN, "(the page of zeroes was mapped)", PAGE_INDEX],
    },
    Known {
        operation: "fork",
        up_to: 2.7,
        reasons: &[
            "the entry of a base page takes 450 instructions, of them 160 to find runs; Linux takes \
             190",
        ],
    },
    Known {
        operation: "memfd_create, ftruncate",
        up_to: 1.2,
        reasons: &[
            "the reference kernel's heap: its allocator takes 500 to 2,000 instructions a call",
        ],
    },
    Known {
        operation: "mincore",
        up_to: 7.3,
        reasons: &["entries are reported one at a time, and the vector is cleared first"],
    },
    Known { operation: "mlock", up_to: 2.1, reasons: &[PAGE_INDEX, EXPANDED] },
    Known { operation: "mmap with MAP_POPULATE", up_to: 2.1, reasons: &[PAGE_INDEX] },
    Known { operation: "mprotect to nothing", up_to: 1.6, reasons: &[ENTRIES] },
    Known { operation: "mprotect to read", up_to: 2.4, reasons: &[ENTRIES] },
    Known { operation: "mprotect to read and write", up_to: 2.3, reasons: &[ENTRIES] },
    Known { operation: "mremap, larger", up_to: 2.2, reasons: &[FAILS] },
    Known {
        operation: "mremap, moved",
        up_to: 1.4,
        reasons: &["seen once: 22,800 instructions for 8 MiB of a shared file, 10,000 of them in \
             move_congruent; not analyzed further"],
    },
    Known { operation: "mremap, smaller", up_to: 1.7, reasons: &[COPIES] },
    Known { operation: "munmap of a part", up_to: 1.7, reasons: &[COPIES] },
    Known { operation: "reads", up_to: 9.0, reasons: &[PAGE_INDEX, EXPANDED] },
    Known { operation: "writes", up_to: 3.8, reasons: &[OWN_AGAIN, EXPANDED] },
    Known {
        operation: "writes",
        up_to: 101.8,
        reasons: &[
            "a fault on one page settles the slots of a folio of 2 MiB at once: 550 instructions a \
             slot",
        ],
    },
    Known { operation: "writes again", up_to: 3.4, reasons: &[OWN_AGAIN, EXPANDED] },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_has_the_reason_of_its_bound() {
        assert!(reason("fork", 1.5).is_some());
        assert!(reason("fork", 1_000.0).is_none());
        assert!(reason("mmap", 1.2).is_none());
        assert_ne!(reason("writes", 2.0), reason("writes", 50.0));
    }

    #[test]
    fn bounds_of_an_operation_rise() {
        for (number, known) in KNOWN.iter().enumerate() {
            assert!(known.up_to > 1.1 && !known.reasons.is_empty());
            let later = KNOWN[number + 1..].iter();
            let same = later.filter(|other| other.operation == known.operation);
            assert!(same.clone().all(|other| other.up_to > known.up_to), "{}", known.operation);
        }
    }
}
