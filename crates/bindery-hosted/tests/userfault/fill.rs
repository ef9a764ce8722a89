//! Pages that a handler supplies, and requests that are refused.

use bindery::addr::{Order, VirtAddr};
use bindery::{
    Error, FaultError, FileAccess, FillMode, Inspection, MapObject, MapRequest, PartialFill,
    Sharing, SizeMode, UserfaultFeatures, UserfaultModes,
};
use bindery_hosted::MemoryFiles;
use bindery_linux::{UserfaultRequest, userfault_control};

use super::fixture::{AT, PAGE, PAGES, at, with_features, with_fixture};
use crate::support::fixed;

fn refused(done: u64, error: Error) -> Result<(), PartialFill> {
    Err(PartialFill { done, error })
}

#[test]
fn copies_fill_large_folios_where_the_range_allows() {
    with_fixture(|fixture| {
        fixture.memory.folio_policy().set(Order(4), SizeMode::Always);
        fixture.memory.folio_policy().set(Order(9), SizeMode::Always);
        let folios = |page, pages, byte| {
            let before = fixture.space.counts().folios_touched;
            fixture.copy(page, pages * PAGE, byte).unwrap();
            fixture.space.counts().folios_touched - before
        };
        assert_eq!(folios(0, 16, 1), 1);
        // One page, one folio of 16 pages, one page.
        assert_eq!(folios(31, 18, 2), 3);
        assert_eq!(folios(512, 512, 3), 1);
        for (page, byte) in [(0, 1), (15, 1), (31, 2), (48, 2), (512, 3), (1023, 3)] {
            assert_eq!(fixture.byte(page), byte, "page {page}");
        }
    });
}

#[test]
fn base_pages_are_copied_singly_mapped_together() {
    with_fixture(|fixture| {
        fixture.copy(0, PAGE, 9).unwrap();
        let before = fixture.space.counts();
        fixture.copy(1, 600 * PAGE, 1).unwrap();
        let cost = fixture.space.counts() - before;
        // One more entry is that of the second table.
        assert_eq!((cost.folios_touched, cost.entries_written), (600, 601), "{cost:?}");
        assert_eq!(cost.bytes_copied, 600 * PAGE);
        // 32 pages under one lock acquisition, and the rest of each table.
        assert!(cost.tables_locked <= 600 / 32 + 4, "{cost:?}");
        assert_eq!((fixture.byte(0), fixture.byte(1), fixture.byte(600)), (9, 1, 1));
        // The call ends before a present page.
        let over = fixture.copy(590, 40 * PAGE, 2);
        assert_eq!(over, refused(0, Error::Exists(at(590))));
        fixture.copy(620, PAGE, 3).unwrap();
        assert_eq!(fixture.copy(601, 40 * PAGE, 2), refused(19 * PAGE, Error::Exists(at(620))));
    });
}

#[test]
fn a_copied_page_may_be_the_next_source() {
    with_fixture(|fixture| {
        fixture.memory.folio_policy().set(Order(4), SizeMode::Always);
        let space = fixture.space;
        fixture.copy(15, PAGE, 7).unwrap();
        let mut words = [at(16).0, at(15).0, 64 * PAGE, 0, 0];
        // No thread waits here, so a missing source page is an error.
        let mut source = |from: VirtAddr, piece: &mut [u8]| match space.inspect(from) {
            Inspection::Page { .. } => space.read_foreign(from, piece),
            _ => Err(FaultError::NotMapped),
        };
        let (request, fd) = (UserfaultRequest::Copy, fixture.fd);
        let done = userfault_control(space, space, fd, request, &mut words, &mut source);
        assert_eq!((done, words[4]), (Ok(0), 64 * PAGE));
        assert_eq!((fixture.byte(16), fixture.byte(79)), (7, 7));
    });
}

#[test]
fn zeroes_are_the_zero_page_in_runs() {
    with_fixture(|fixture| {
        let before = fixture.space.counts();
        fixture
            .space
            .handler(fixture.fd)
            .fill_zeroes(at(1), 700 * PAGE, FillMode::empty())
            .unwrap();
        let after = fixture.space.counts();
        assert_eq!(after.bytes_zeroed, before.bytes_zeroed);
        assert!(after.tables_locked - before.tables_locked < 20);
        assert_eq!((fixture.byte(1), fixture.byte(700)), (0, 0));
        fixture.space.write_user(at(5), b"x").unwrap();
        assert_eq!((fixture.byte(5), fixture.byte(6)), (b'x', 0));
    });
}

#[test]
fn a_call_stops_at_a_present_page() {
    with_fixture(|fixture| {
        fixture.copy(4, PAGE, 4).unwrap();
        let zeroes = |page, pages| {
            fixture.space.handler(fixture.fd).fill_zeroes(at(page), pages * PAGE, FillMode::empty())
        };
        assert_eq!(fixture.copy(4, PAGE, 1), refused(0, Error::Exists(at(4))));
        assert_eq!(fixture.copy(2, 4 * PAGE, 2), refused(2 * PAGE, Error::Exists(at(4))));
        assert_eq!(zeroes(5, 3), Ok(()));
        assert_eq!(zeroes(0, 5), refused(2 * PAGE, Error::Exists(at(2))));
        assert_eq!((fixture.byte(3), fixture.byte(4), fixture.byte(5)), (2, 4, 0));
    });
}

#[test]
fn arguments_are_refused_as_on_linux() {
    with_fixture(|fixture| {
        let space = fixture.space;
        assert_eq!(fixture.copy(0, 0, 1), refused(0, Error::ZeroLength));
        assert_eq!(fixture.copy(0, 1, 1), refused(0, Error::Unaligned(at(0))));
        let behind = at(PAGES);
        assert_eq!(fixture.copy(PAGES, PAGE, 1), refused(0, Error::NotMapped(behind)));
        let last = at(PAGES - 1);
        let over = fixture.copy(PAGES - 1, 2 * PAGE, 1);
        assert_eq!(over, refused(0, Error::NotMapped(last)), "beyond the mapping");
        space.mmap(&fixed(4 * AT, PAGE)).unwrap();
        let unregistered =
            space.handler(fixture.fd).fill_zeroes(VirtAddr(4 * AT), PAGE, FillMode::empty());
        assert_eq!(unregistered, refused(0, Error::NotMapped(VirtAddr(4 * AT))));
        let protected = fixture.copy_as(0, PAGE, 1, FillMode::WRITE_PROTECT);
        assert_eq!(protected, refused(0, Error::Invalid));
        let mut bad = |offset, piece: &mut [u8]| {
            piece.fill(1);
            if offset < 2 * PAGE { Ok(()) } else { Err(FaultError::NotMapped) }
        };
        let faulted =
            space.handler(fixture.fd).fill_copy(at(0), 4 * PAGE, FillMode::empty(), &mut bad);
        assert_eq!(faulted, refused(2 * PAGE, Error::Fault(at(2))));
        assert_eq!(space.resident().anonymous, 2);
    });
}

#[test]
fn no_memory_leaves_what_is_done() {
    with_fixture(|fixture| {
        fixture.copy(0, PAGE, 1).unwrap();
        fixture.memory.fail_allocations_after(Some(3));
        let failed = fixture.copy(1, 8 * PAGE, 1).unwrap_err();
        fixture.memory.fail_allocations_after(None);
        assert_eq!(failed.error, Error::OutOfMemory);
        assert_eq!(failed.done, fixture.space.resident().anonymous * PAGE - PAGE);
        fixture.copy(1 + failed.done / PAGE, 8 * PAGE - failed.done, 1).unwrap();
    });
}

#[test]
fn no_handler_supplies_pages_of_files() {
    with_features(UserfaultFeatures::WP_ASYNC, |fixture| {
        let space = fixture.space;
        let start = VirtAddr(4 * AT);
        let file = fixture.memory.file(Box::leak(Box::new(MemoryFiles::new())), 1, PAGE).unwrap();
        let request = MapRequest { sharing: Sharing::Shared, ..fixed(start.0, PAGE) };
        let access = FileAccess::READ | FileAccess::WRITE;
        space.mmap_object(&request, &MapObject { object: &file, offset: 0, access }).unwrap();
        let modes = UserfaultModes::WRITE_PROTECT;
        space.register_userfault(fixture.fd, start, PAGE, modes).unwrap();
        let handler = space.handler(fixture.fd);
        let mode = FillMode::empty();
        let mut source = |_, piece: &mut [u8]| {
            piece.fill(1);
            Ok(())
        };
        let filled = handler.fill_copy(start, PAGE, mode, &mut source);
        assert_eq!(filled, refused(0, Error::Invalid));
        assert_eq!(handler.fill_zeroes(start, PAGE, mode), refused(0, Error::Invalid));
        assert_eq!(handler.fill_poison(start, PAGE, mode), refused(0, Error::Invalid));
        assert_eq!(space.inspect(start), Inspection::Empty);
        space.munmap(start, PAGE).unwrap();
    });
}
