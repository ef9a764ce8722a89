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

const SPLIT: &str = "a folio of which the range has a part is split first";
const EXPANDED: &str = "a page is decompressed for 14,000 to 22,000 instructions, where the whole of Linux's step takes \
     fewer";
const ENTRIES: &str = "on AArch64, entries of base pages are changed one at a time";
const COPIES: &str =
    "base pages of private copies are unmapped one at a time, at 440 instructions each";
const NO_ACCESS: &str = "base pages without access (PROT_NONE) are unmapped one at a time";
const FAILS: &str = "the call fails on both kernels; ours has set its locks up by then";
const UNKNOWN: &str = "not analyzed";

/// All known operations, from 300 programs on each architecture. The causes come from profiles
/// (`--profile`) of the most expensive steps.
const KNOWN: &[Known] = &[
    Known {
        operation: "MADV_COLD",
        up_to: 3.5,
        reasons: &["folios are looked up one at a time for the age of each", SPLIT],
    },
    Known { operation: "MADV_DONTNEED", up_to: 1.4, reasons: &[UNKNOWN] },
    Known {
        operation: "MADV_FREE",
        up_to: 1.9,
        reasons: &["runs of base pages are found one at a time", SPLIT],
    },
    Known {
        operation: "MADV_HUGEPAGE",
        up_to: 1.8,
        reasons: &["a huge leaf is split where the VMA is: 5,200 instructions"],
    },
    Known {
        operation: "MADV_PAGEOUT",
        up_to: 2.4,
        reasons: &["on AArch64 the compressor takes 1.6 times as many as Linux's"],
    },
    Known {
        operation: "MADV_PAGEOUT",
        up_to: 18.3,
        reasons: &[
            "folios that several processes map are compressed, which Linux leaves in memory",
        ],
    },
    Known {
        operation: "MADV_POPULATE_READ",
        up_to: 2.8,
        reasons: &["on AArch64 the first use of the huge zero page clears it"],
    },
    Known { operation: "MADV_POPULATE_WRITE", up_to: 2.0, reasons: &[EXPANDED] },
    Known { operation: "MADV_WILLNEED", up_to: 48.8, reasons: &[EXPANDED] },
    Known { operation: "UFFDIO_COPY", up_to: 2.7, reasons: &[EXPANDED] },
    Known { operation: "UFFDIO_MOVE", up_to: 3.1, reasons: &[FAILS, SPLIT] },
    Known {
        operation: "UFFDIO_WRITEPROTECT",
        up_to: 3.6,
        reasons: &["on AArch64 a huge leaf is split first: 5,200 instructions"],
    },
    Known { operation: "UFFDIO_WRITEPROTECT, removed", up_to: 1.2, reasons: &[ENTRIES] },
    Known { operation: "UFFDIO_ZEROPAGE", up_to: 1.5, reasons: &[UNKNOWN] },
    Known {
        operation: "exit and wait",
        up_to: 2.2,
        reasons: &["contents in swap are freed page by page"],
    },
    Known { operation: "first writes", up_to: 2.4, reasons: &[UNKNOWN] },
    Known { operation: "fork", up_to: 1.2, reasons: &[UNKNOWN] },
    Known {
        operation: "memfd_create, ftruncate",
        up_to: 1.3,
        reasons: &[
            "the reference kernel's heap: its allocator takes 500 to 2,000 instructions a call",
        ],
    },
    Known {
        operation: "mincore",
        up_to: 1.3,
        reasons: &["entries are reported one at a time, and the vector is cleared first"],
    },
    Known { operation: "mlock", up_to: 1.4, reasons: &[EXPANDED] },
    Known { operation: "mprotect to nothing", up_to: 1.5, reasons: &[ENTRIES] },
    Known { operation: "mprotect to read", up_to: 2.4, reasons: &[ENTRIES] },
    Known { operation: "mprotect to read and write", up_to: 2.4, reasons: &[ENTRIES] },
    Known { operation: "mremap, moved", up_to: 1.4, reasons: &[UNKNOWN] },
    Known { operation: "mremap, smaller", up_to: 1.6, reasons: &[COPIES, NO_ACCESS] },
    Known { operation: "munmap of a part", up_to: 1.4, reasons: &[COPIES] },
    Known { operation: "reads", up_to: 6.0, reasons: &[EXPANDED] },
    Known { operation: "writes", up_to: 2.0, reasons: &[EXPANDED] },
    Known {
        operation: "writes",
        up_to: 2_580.0,
        reasons: &["a fault on one page reads the rest of a folio of 2 MiB: 366 pages"],
    },
    Known { operation: "writes again", up_to: 2.0, reasons: &[EXPANDED] },
    Known {
        operation: "writes again",
        up_to: 188.7,
        reasons: &["one fault of 185 instructions, where Linux takes none"],
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_has_the_reason_of_its_bound() {
        assert!(reason("mincore", 1.2).is_some());
        assert!(reason("mincore", 1_000.0).is_none());
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
