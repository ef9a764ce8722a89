//! Recorded figures of Linux, and the targets derived from them.
//!
//! Linux 7.2.13 of Debian's cloud flavour, QEMU 7.2, the same workloads, musl on both architectures
//! (a module for system 5), the command lines of `docs/compare.md`. The figures are kernel
//! instructions (string iterations apart) and TLB invalidations, each the mean of all operations.
//! The targets (T) are kernel instructions and invalidations too; they were set before the kernel
//! was written, from minimal compiled loops and fixed costs. `docs/compare.md` lists those that
//! were adjusted since, with the arithmetic.

use bindery_cli::guest::Architecture;

use crate::size::{FolioSize, MIB};

/// Instructions, and invalidations where they were recorded or set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct Figure {
    /// Kernel instructions.
    pub instructions: u64,
    /// TLB invalidations.
    pub invalidations: Option<u64>,
}

/// The folio sizes of one recorded row.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Folios {
    Any,
    Base,
    Kib64,
    UpToKib64,
    Mib2,
}

impl Folios {
    /// Operations without folios have no folio size.
    fn contain(self, folio: Option<FolioSize>) -> bool {
        let Some(folio) = folio else { return self == Self::Any };
        match self {
            Self::Any => true,
            Self::Base => folio == FolioSize::BASE,
            Self::Kib64 => folio == FolioSize::KIB_64,
            Self::UpToKib64 => folio == FolioSize::BASE || folio == FolioSize::KIB_64,
            Self::Mib2 => folio.bytes() == 2 * MIB,
        }
    }
}

/// The key of the operation, the folios, and, for x86-64 and AArch64, the recorded figures and the
/// target: instructions, invalidations.
struct Entry(&'static str, Folios, [(u64, Option<u64>); 2], [(u64, Option<u64>); 2]);

const NONE: Option<u64> = None;

const ENTRIES: &[Entry] = &[
    Entry(
        "mremap-1m",
        Folios::Base,
        [(20_108, Some(1)), (24_161, Some(1))],
        [(5_000, Some(1)), (5_000, Some(1))],
    ),
    Entry(
        "mremap-1m",
        Folios::Kib64,
        [(20_097, Some(1)), (26_273, Some(1))],
        [(5_000, Some(1)), (5_000, Some(1))],
    ),
    Entry(
        "mremap-1m-off-4k",
        Folios::Kib64,
        [(21_971, Some(2)), (29_387, Some(5))],
        [(6_000, Some(1)), (6_000, Some(1))],
    ),
    Entry(
        "touch-1m",
        Folios::Base,
        [(710_386, NONE), (804_592, NONE)],
        [(250_000, NONE), (250_000, NONE)],
    ),
    Entry(
        "touch-1m",
        Folios::Kib64,
        [(82_925, NONE), (133_105, NONE)],
        [(25_000, NONE), (60_000, NONE)],
    ),
    Entry(
        "munmap-1m",
        Folios::Base,
        [(227_372, Some(1)), (248_944, Some(2))],
        [(60_000, Some(1)), (60_000, Some(1))],
    ),
    Entry(
        "munmap-1m",
        Folios::Kib64,
        [(40_980, Some(1)), (43_646, Some(2))],
        [(9_000, Some(1)), (9_000, Some(1))],
    ),
    Entry(
        "mremap-1g",
        Folios::Any,
        [(9_244, Some(1)), (10_210, Some(1))],
        [(2_000, Some(1)), (2_000, Some(1))],
    ),
    Entry(
        "mremap-1g-by-2m",
        Folios::UpToKib64,
        [(391_094, Some(514)), (312_101, Some(513))],
        [(40_000, Some(8)), (40_000, Some(8))],
    ),
    Entry(
        "mremap-1g-by-2m",
        Folios::Mib2,
        [(469_244, Some(514)), (379_695, Some(513))],
        [(40_000, Some(8)), (40_000, Some(8))],
    ),
    Entry(
        "mremap-1g-off-64k",
        Folios::Base,
        [(12_725_025, Some(8_706)), (15_547_310, Some(1_540))],
        [(5_000_000, Some(9)), (5_000_000, Some(9))],
    ),
    Entry(
        "mremap-1g-off-64k",
        Folios::Kib64,
        [(12_613_483, Some(8_706)), (17_689_976, Some(1_540))],
        [(5_000_000, Some(9)), (5_000_000, Some(9))],
    ),
    Entry(
        "mremap-1g-off-4k",
        Folios::Kib64,
        [(12_338_625, Some(1_026)), (26_387_471, Some(10_500))],
        [(5_000_000, Some(9)), (5_000_000, Some(9))],
    ),
    Entry(
        "munmap-1g",
        Folios::Base,
        [(314_045_738, Some(29)), (315_357_356, Some(87))],
        [(70_000_000, Some(8)), (70_000_000, Some(8))],
    ),
    Entry(
        "munmap-1g",
        Folios::Kib64,
        [(34_773_499, Some(5)), (36_575_553, Some(19))],
        [(6_000_000, Some(8)), (6_000_000, Some(8))],
    ),
    Entry(
        "pageout-256m",
        Folios::Base,
        [(432_417_823, Some(65_536)), (445_945_033, Some(65_663))],
        [(120_000_000, Some(256)), (120_000_000, Some(256))],
    ),
    Entry(
        "pageout-256m",
        Folios::Kib64,
        [(257_011_877, Some(65_536)), (256_449_038, Some(69_759))],
        [(70_000_000, Some(256)), (70_000_000, Some(256))],
    ),
    Entry(
        "pageout-256m",
        Folios::Mib2,
        [(244_687_450, Some(65_664)), (243_503_699, Some(69_760))],
        [(65_000_000, Some(256)), (65_000_000, Some(256))],
    ),
    Entry(
        "swap-in-256m",
        Folios::Base,
        [(364_185_706, NONE), (359_648_543, NONE)],
        [(120_000_000, NONE), (120_000_000, NONE)],
    ),
    Entry(
        "swap-in-256m",
        Folios::Kib64,
        [(102_550_672, NONE), (65_919_754, NONE)],
        [(15_000_000, NONE), (20_000_000, NONE)],
    ),
    Entry(
        "swap-in-256m",
        Folios::Mib2,
        [(370_838_668, NONE), (379_954_337, NONE)],
        [(15_000_000, NONE), (20_000_000, NONE)],
    ),
    Entry(
        "munmap-256m-swapped",
        Folios::Any,
        [(15_232_573, Some(1)), (14_180_782, Some(2))],
        [(3_000_000, Some(1)), (3_000_000, Some(1))],
    ),
    // No more than Linux, whose figure also includes its compressor.
    Entry(
        "pageout-32m-random",
        Folios::Kib64,
        [(513_127_341, Some(8_192)), (534_500_396, Some(8_719))],
        [(513_127_341, Some(16)), (534_500_396, Some(16))],
    ),
    Entry(
        "uffd-move-16m",
        Folios::Base,
        [(823_464, Some(8)), (769_863, Some(8))],
        [(180_000, Some(1)), (180_000, Some(1))],
    ),
    Entry(
        "uffd-move-16m",
        Folios::Kib64,
        [(10_034_081, Some(8_192)), (9_510_647, Some(4_608))],
        [(50_000, Some(1)), (50_000, Some(1))],
    ),
    Entry(
        "uffd-move-16m",
        Folios::Mib2,
        [(10_860, Some(8)), (10_181, Some(8))],
        [(8_000, Some(1)), (8_000, Some(1))],
    ),
    Entry(
        "uffd-move-16m-by-4k",
        Folios::Base,
        [(9_873_356, Some(4_096)), (9_499_175, Some(4_096))],
        [(5_300_000, Some(4_096)), (5_300_000, Some(4_096))],
    ),
    Entry(
        "uffd-move-16m-by-4k",
        Folios::Kib64,
        [(18_748_338, Some(8_192)), (18_064_644, Some(8_448))],
        [(5_300_000, Some(4_096)), (5_300_000, Some(4_096))],
    ),
    // On AArch64 this includes the copy itself: 11 instructions for 64 bytes.
    Entry(
        "uffd-copy-16m",
        Folios::Any,
        [(7_406_529, NONE), (13_240_693, NONE)],
        [(2_000_000, NONE), (4_900_000, NONE)],
    ),
    Entry(
        "uffd-faults-move",
        Folios::Base,
        [(63_619_254, Some(4_096)), (60_411_819, Some(4_096))],
        [(25_000_000, Some(4_096)), (25_000_000, Some(4_096))],
    ),
    // With base pages no more than Linux; with larger folios no more than Bindery needed with base
    // pages when these targets were set. Each write copies one page, whatever its folio.
    Entry(
        "child-writes-1m",
        Folios::Base,
        [(943_916, Some(256)), (955_327, Some(256))],
        [(943_916, Some(256)), (955_327, Some(256))],
    ),
    Entry(
        "child-writes-1m",
        Folios::Kib64,
        [(817_908, Some(256)), (983_508, Some(272))],
        [(719_927, Some(256)), (841_362, Some(272))],
    ),
    Entry(
        "child-writes-1m",
        Folios::Mib2,
        [(842_547, Some(257)), (1_004_540, Some(273))],
        [(719_927, Some(257)), (841_362, Some(273))],
    ),
    Entry(
        "child-writes-16m",
        Folios::Base,
        [(13_116_259, Some(4_096)), (15_574_124, Some(4_096))],
        [(13_116_259, Some(4_096)), (15_574_124, Some(4_096))],
    ),
    Entry(
        "child-writes-16m",
        Folios::Kib64,
        [(13_370_190, Some(4_097)), (16_155_292, Some(4_352))],
        [(11_583_228, Some(4_097)), (13_453_296, Some(4_352))],
    ),
    Entry(
        "child-writes-16m",
        Folios::Mib2,
        [(13_545_770, Some(4_104)), (16_322_097, Some(4_360))],
        [(11_583_228, Some(4_104)), (13_453_296, Some(4_360))],
    ),
    Entry(
        "vmalloc-1m",
        Folios::Any,
        [(32_396, NONE), (37_401, NONE)],
        [(8_000, NONE), (8_000, NONE)],
    ),
    Entry(
        "vmalloc-1m-huge",
        Folios::Any,
        [(32_861, NONE), (19_111, NONE)],
        [(5_000, NONE), (5_000, NONE)],
    ),
    Entry("vmap-1m", Folios::Any, [(25_125, NONE), (30_055, NONE)], [(6_000, NONE), (6_000, NONE)]),
    Entry(
        "vmap-1m-order-4",
        Folios::Any,
        [(25_232, NONE), (29_542, NONE)],
        [(5_000, NONE), (5_000, NONE)],
    ),
    Entry(
        "vmap-1m-order-8",
        Folios::Any,
        [(25_226, NONE), (29_544, NONE)],
        [(3_800, NONE), (3_800, NONE)],
    ),
    Entry(
        "ioremap-1m",
        Folios::Any,
        [(12_535, NONE), (9_225, NONE)],
        [(2_500, NONE), (2_500, NONE)],
    ),
    Entry(
        "vfree-1m",
        Folios::Any,
        [(49_354, NONE), (63_936, NONE)],
        [(8_000, NONE), (8_000, NONE)],
    ),
];

/// The recorded figure of Linux for an operation.
pub fn recorded(key: &str, folio: Option<FolioSize>, architecture: Architecture) -> Option<Figure> {
    let Entry(_, _, recorded, _) = entry(key, folio)?;
    Some(figure(recorded, architecture))
}

/// The target for an operation.
pub fn target(key: &str, folio: Option<FolioSize>, architecture: Architecture) -> Option<Figure> {
    let Entry(_, _, _, target) = entry(key, folio)?;
    Some(figure(target, architecture))
}

fn entry(key: &str, folio: Option<FolioSize>) -> Option<&'static Entry> {
    ENTRIES.iter().find(|Entry(row, folios, ..)| *row == key && folios.contain(folio))
}

fn figure(pair: &[(u64, Option<u64>); 2], architecture: Architecture) -> Figure {
    let (instructions, invalidations) = match architecture {
        Architecture::X86_64 => pair[0],
        Architecture::AArch64 => pair[1],
    };
    Figure { instructions, invalidations }
}

#[cfg(test)]
mod tests {
    use super::super::rows::{FOLIOS, ROWS, Row};
    use super::*;

    #[test]
    fn every_recorded_figure_belongs_to_an_operation() {
        for Entry(key, _, recorded, target) in ENTRIES {
            Row::from_key(key).unwrap();
            for (recorded, target) in recorded.iter().zip(target) {
                assert!(recorded.0 >= target.0, "{key}");
                assert_eq!(recorded.1.is_some(), target.1.is_some(), "{key}");
            }
        }
    }

    #[test]
    fn no_operation_has_two_entries_for_a_size() {
        let all = |row: &'static Row| {
            row.workload.folios(&FOLIOS).into_iter().map(move |folio| (row, folio))
        };
        for (row, folio) in ROWS.iter().flat_map(all) {
            let fits = |Entry(key, folios, ..): &&Entry| *key == row.key && folios.contain(folio);
            assert!(ENTRIES.iter().filter(fits).count() <= 1, "{} {folio:?}", row.key);
        }
    }

    #[test]
    fn figures_are_found_by_operation_folio_and_architecture() {
        let touch = |architecture| target("touch-1m", Some(FolioSize::KIB_64), architecture);
        let instructions = |figure: Option<Figure>| figure.unwrap().instructions;
        assert_eq!(instructions(touch(Architecture::X86_64)), 25_000);
        assert_eq!(instructions(touch(Architecture::AArch64)), 60_000);
        let moved = recorded("mremap-1g-by-2m", Some(FolioSize::MIB_2), Architecture::AArch64);
        assert_eq!(moved, Some(Figure { instructions: 379_695, invalidations: Some(513) }));
        assert_eq!(target("mmap-1m", Some(FolioSize::BASE), Architecture::X86_64), None);
        assert_eq!(instructions(target("vmap-1m", None, Architecture::X86_64)), 6_000);
        assert_eq!(target("touch-1m", None, Architecture::X86_64), None);
    }
}
