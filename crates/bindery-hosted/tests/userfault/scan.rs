//! Scans of pages by category, and protection of matching pages.

use bindery::addr::{Order, VirtAddr, VirtRange};
use bindery::{
    Advice, Errno, Error, PageCategories, PageRegion, PageRegions, PageScan, Scanned, SizeMode,
    UserfaultFeatures, UserfaultModes, WriteProtectMode,
};
use bindery_linux::proc::{SCAN_END, SCAN_WORDS, pagemap_scan};

use super::fixture::{AT, Fixture, PAGE, PAGES, Wish, at, with_wish};
use crate::support::fixed;

const WRITTEN: PageCategories = PageCategories::WRITTEN;
const HERE: PageCategories =
    PageCategories::PROTECTABLE.union(PageCategories::WRITTEN).union(PageCategories::PRESENT);

/// Runs `scenario` with memory whose protection sends no messages; all of it is protected.
fn with_protected(scenario: impl FnOnce(&Fixture<'_, '_>)) {
    let features = UserfaultFeatures::WP_ASYNC | UserfaultFeatures::WP_UNPOPULATED;
    let wish = Wish { features, modes: UserfaultModes::WRITE_PROTECT, ..Wish::default() };
    with_wish(wish, |fixture| {
        fixture
            .space
            .handler(fixture.fd)
            .write_protect(at(0), PAGES * PAGE, WriteProtectMode::PROTECT)
            .unwrap();
        scenario(fixture);
    });
}

fn range(first: u64, count: u64) -> VirtRange {
    VirtRange::from_len(at(first), count * PAGE).unwrap()
}

fn region(first: u64, count: u64, categories: PageCategories) -> PageRegion {
    PageRegion { range: range(first, count), categories }
}

/// A scan for written pages; `protects` is whether the scan protects them again.
fn written(protects: bool) -> PageScan {
    PageScan { required: WRITTEN, protects, ..PageScan::of(range(0, PAGES)) }
}

#[track_caller]
fn assert_found(fixture: &Fixture<'_, '_>, scan: &PageScan, expected: &[PageRegion]) {
    let mut room = [PageRegion::default(); 64];
    let mut regions = PageRegions::new(&mut room);
    let scanned = fixture.space.scan_pages(scan, Some(&mut regions)).unwrap();
    assert_eq!(regions.found(), expected);
    let pages = expected.iter().map(|region| region.range.pages()).sum();
    assert_eq!(scanned, Scanned { end: scan.range.end(), pages });
}

#[test]
fn what_was_written_is_reported_and_protected_again() {
    with_protected(|fixture| {
        assert_found(fixture, &written(false), &[]);
        for page in [0, 1, 2, 700, 1023] {
            fixture.space.write_user(at(page), &[1]).unwrap();
        }
        let soft_dirty = HERE | PageCategories::SOFT_DIRTY;
        let expected =
            [region(0, 3, soft_dirty), region(700, 1, soft_dirty), region(1023, 1, soft_dirty)];
        assert_found(fixture, &written(false), &expected);
        assert_found(fixture, &written(true), &expected);
        assert_found(fixture, &written(true), &[]);
        fixture.space.write_user(at(1), &[2]).unwrap();
        assert_found(fixture, &written(true), &[region(1, 1, soft_dirty)]);
        assert!(!fixture.fd.is_readable());
    });
}

#[test]
fn absent_pages_count_as_written_with_marker() {
    with_protected(|fixture| {
        for page in 4..8 {
            fixture.space.write_user(at(page), &[1]).unwrap();
        }
        fixture.space.madvise(at(4), 600 * PAGE, Advice::DontNeed).unwrap();
        let vacant = PageCategories::PROTECTABLE | WRITTEN | PageCategories::SOFT_DIRTY;
        assert_found(fixture, &written(true), &[region(4, 600, vacant)]);
        assert_found(fixture, &written(true), &[]);
        fixture.space.write_user(at(300), &[1]).unwrap();
        let scan = PageScan { reported: WRITTEN, ..written(false) };
        assert_found(fixture, &scan, &[region(300, 1, WRITTEN)]);
    });
}

#[test]
fn categories_are_asked_for_in_three_ways() {
    with_protected(|fixture| {
        fixture.memory.folio_policy().set(Order(9), SizeMode::Always);
        fixture.space.write_user(at(0), &[1]).unwrap();
        fixture.byte(700);
        fixture.space.madvise(at(900), 2 * PAGE, Advice::GuardInstall).unwrap();
        let all = PageScan {
            reported: PageCategories::all() - PageCategories::SOFT_DIRTY,
            ..written(false)
        };
        let huge = PageScan { required: PageCategories::HUGE, ..all };
        // Only the marker of one page was removed, so the fault mapped a small folio.
        assert_found(fixture, &huge, &[]);
        let zero = PageScan { required: PageCategories::ZERO, ..all };
        let categories = PageCategories::PROTECTABLE | PageCategories::PRESENT;
        assert_found(fixture, &zero, &[region(700, 1, categories | PageCategories::ZERO)]);
        let either = PageScan {
            required: PageCategories::empty(),
            any_of: PageCategories::ZERO | PageCategories::GUARD,
            ..all
        };
        let guard = PageCategories::PROTECTABLE | PageCategories::SWAPPED | PageCategories::GUARD;
        let expected =
            [region(700, 1, categories | PageCategories::ZERO), region(900, 2, guard | WRITTEN)];
        assert_found(fixture, &either, &expected);
        let not = PageScan { inverted: PageCategories::ZERO | WRITTEN, ..either };
        let not = PageScan {
            required: WRITTEN | PageCategories::PRESENT,
            any_of: PageCategories::empty(),
            ..not
        };
        assert_found(fixture, &not, &[region(700, 1, categories | PageCategories::ZERO)]);
    });
}

#[test]
fn a_huge_leaf_region_is_protected_partly() {
    with_wish(Wish::default(), |fixture| {
        fixture.memory.folio_policy().set(Order(9), SizeMode::Always);
        let space = fixture.space;
        space.mmap(&fixed(4 * AT, 1024 * PAGE)).unwrap();
        let features = UserfaultFeatures::WP_ASYNC | UserfaultFeatures::WP_UNPOPULATED;
        let fd = space.userfault(features, Default::default()).unwrap();
        let start = VirtAddr(4 * AT);
        space.write_user(start, &[1]).unwrap();
        let modes = UserfaultModes::WRITE_PROTECT;
        space.register_userfault(&fd, start, 1024 * PAGE, modes).unwrap();
        let whole = VirtRange::from_len(start, 512 * PAGE).unwrap();
        let reported = PageCategories::HUGE | PageCategories::PRESENT | WRITTEN;
        let scan = PageScan { required: reported, reported, ..PageScan::of(whole) };
        assert_found(fixture, &scan, &[PageRegion { range: whole, categories: reported }]);
        let part = PageScan { maximum_pages: 10, protects: true, ..scan };
        let mut room = [PageRegion::default(); 4];
        let mut regions = PageRegions::new(&mut room);
        let scanned = space.scan_pages(&part, Some(&mut regions)).unwrap();
        let end = VirtAddr(start.0 + 10 * PAGE);
        assert_eq!(scanned, Scanned { end, pages: 10 });
        let reported = reported - PageCategories::HUGE;
        let rest = VirtRange::from_len(end, 502 * PAGE).unwrap();
        let scan = PageScan {
            required: reported,
            reported: PageCategories::all() - PageCategories::SOFT_DIRTY,
            ..scan
        };
        let categories = reported | PageCategories::PROTECTABLE;
        assert_found(fixture, &scan, &[PageRegion { range: rest, categories }]);
        space.close_userfault(fd);
        space.munmap(start, 1024 * PAGE).unwrap();
    });
}

#[test]
fn a_scan_stops_at_a_page_without_room() {
    with_protected(|fixture| {
        // More stretches than a scan buffers at a time.
        for page in (0..PAGES).step_by(2) {
            fixture.space.write_user(at(page), &[1]).unwrap();
        }
        let mut room = [PageRegion::default(); 3];
        let mut regions = PageRegions::new(&mut room);
        let scanned = fixture.space.scan_pages(&written(true), Some(&mut regions)).unwrap();
        assert_eq!(scanned, Scanned { end: at(6), pages: 3 });
        assert!(regions.is_full());
        let scan = PageScan { maximum_pages: 2, ..written(true) };
        let mut room = [PageRegion::default(); 3];
        let mut regions = PageRegions::new(&mut room);
        let scanned = fixture.space.scan_pages(&scan, Some(&mut regions)).unwrap();
        assert_eq!(scanned, Scanned { end: at(10), pages: 2 });
        // Protects the rest at once, without a report.
        let scanned = fixture.space.scan_pages(&written(true), None).unwrap();
        assert_eq!(scanned, Scanned { end: at(PAGES), pages: 0 });
        assert_found(fixture, &written(true), &[]);
    });
}

#[test]
fn unprotectable_mappings_are_skipped_or_refused() {
    with_protected(|fixture| {
        fixture.space.mmap(&fixed(AT + (PAGES + 4) * PAGE, 4 * PAGE)).unwrap();
        fixture.space.write_user(at(PAGES + 4), &[1]).unwrap();
        let both = |scan| PageScan { range: range(0, PAGES + 8), ..scan };
        assert_found(fixture, &both(written(true)), &[]);
        let refused = PageScan { refuses_others: true, ..both(written(false)) };
        assert_eq!(fixture.space.scan_pages(&refused, None), Err(Error::AccessDenied));
        let reported = PageScan { reported: WRITTEN, ..both(written(false)) };
        assert_found(fixture, &reported, &[region(PAGES + 4, 4, WRITTEN)]);
        fixture.space.munmap(at(PAGES + 4), 4 * PAGE).unwrap();
    });
}

/// Performs the call like a program. Returns the data written to the program's memory.
fn scan_as_linux(
    fixture: &Fixture<'_, '_>,
    words: &mut [u64; SCAN_WORDS],
) -> Result<Vec<[u64; 3]>, Errno> {
    let mut found = Vec::new();
    let done = pagemap_scan(fixture.space, words, &mut |place, bytes| {
        assert_eq!(place.0, ROOM + 24 * found.len() as u64);
        let word = |n: usize| u64::from_le_bytes(bytes[8 * n..8 * n + 8].try_into().unwrap());
        found.push([word(0), word(1), word(2)]);
        Ok(())
    })?;
    assert_eq!(done, found.len() as u64);
    Ok(found)
}

const ROOM: u64 = 0x10_0000;

fn words(length: u64, pages: u64) -> [u64; SCAN_WORDS] {
    let all = PageCategories::all().bits();
    [96, 0, AT, AT + PAGES * PAGE, 77, ROOM, length, pages, 0, WRITTEN.bits(), 0, all]
}

#[test]
fn the_ioctl_writes_regions_of_any_number() {
    with_protected(|fixture| {
        for page in (0..PAGES).step_by(3) {
            fixture.space.write_user(at(page), &[1]).unwrap();
        }
        for page in 90..110 {
            fixture.space.write_user(at(page), &[1]).unwrap();
        }
        let expect = |words: &mut [u64; SCAN_WORDS], count: usize, end: u64| {
            let found = scan_as_linux(fixture, words).unwrap();
            assert_eq!((found.len(), words[SCAN_END]), (count, AT + end * PAGE));
            found
        };
        let all = expect(&mut words(5000, 0), 336, PAGES);
        assert_eq!(all[30][..2], [AT + 90 * PAGE, AT + 110 * PAGE], "{:?}", &all[28..33]);
        for length in [1, 31, 32, 33, 64, 65, 335] {
            let next = (all[length as usize][0] - AT) / PAGE;
            let found = expect(&mut words(length, 0), length as usize, next);
            assert_eq!(found, all[..length as usize]);
        }
        expect(&mut words(5000, 35), 31, 95);
        assert_eq!(expect(&mut words(336, 0), 336, PAGES), all);
        let mut counted = words(0, 3);
        expect(&mut counted, 0, PAGES);
    });
}

#[test]
fn the_ioctl_refuses_what_linux_refuses() {
    with_protected(|fixture| {
        let refused = |index: usize, value: u64, errno| {
            let mut words = words(4, 0);
            words[index] = value;
            let before = words;
            assert_eq!(scan_as_linux(fixture, &mut words), Err(errno), "word {index}: {value:#x}");
            assert_eq!(words, before);
        };
        for (index, value) in [(0, 0), (0, 88), (0, 104), (1, 4), (1, 1 << 63), (2, AT + 1)] {
            refused(index, value, Errno::EINVAL);
        }
        for index in 8..12 {
            refused(index, 1 << 9, Errno::EINVAL);
            refused(index, 1 << 63, Errno::EINVAL);
        }
        refused(5, 0, Errno::EINVAL);
        for (index, value) in [(2, 1 << 63), (3, 0), (3, AT - 1), (3, u64::MAX), (3, 1 << 48)] {
            refused(index, value, Errno::EFAULT);
        }
        for (index, value) in [(5, u64::MAX), (5, (1 << 47) - 8), (6, u64::MAX), (6, 1 << 60)] {
            refused(index, value, Errno::EFAULT);
        }
        let mut words = words(4, 0);
        let fault = |_, _: &[u8]| Err(bindery::FaultError::NotMapped);
        fixture.space.write_user(at(5), &[1]).unwrap();
        let done = pagemap_scan(fixture.space, &mut words, &mut { fault });
        assert_eq!((done, words[SCAN_END]), (Err(Errno::EFAULT), AT + PAGES * PAGE));
    });
}
