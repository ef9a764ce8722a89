//! Pages that another client of the file has changed, and pages that an embedder evicts.

use bindery::platform::Cpu;
use bindery::{Error, FaultError, Inspection, Sharing};
use bindery_hosted::{MemoryFiles, Program, Walk};

use super::held_pager::{HeldFiles, Io};
use crate::support::objects::{PAGE, content, in_memory, memfd};
use crate::support::objects_fixture::{AT, Fixture, map, with_fixture};
use crate::support::{MIB, memory_with};

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{Access, Object};
use bindery_hosted::{Config, Machine};

const PAGES: u64 = 16;

fn bytes(of: u8) -> Vec<u8> {
    (0..PAGES * PAGE).map(|at| (at / PAGE) as u8 + of).collect()
}

fn at(page: u64) -> VirtAddr {
    VirtAddr(AT + page * PAGE)
}

/// The value that a program loads from a page that holds `byte`.
fn word(byte: u8) -> u64 {
    u64::from(byte) * 0x0101_0101_0101_0101
}

fn with_file<A: Walk>(
    order: u8,
    scenario: impl FnOnce(&Fixture<'_, A>, &Object<'_, Machine<A>>, &MemoryFiles),
) {
    let files = MemoryFiles::new();
    files.put(1, &bytes(1));
    with_fixture::<A>(order, |fixture| {
        let file = fixture.memory.file(&files, 1, PAGES * PAGE).unwrap();
        scenario(fixture, &file, &files);
        fixture.audit(&[]);
    });
}

fn evicts<A: Walk>() {
    with_file::<A>(2, |fixture, file, files| {
        assert_eq!(content(file), bytes(1));
        let space = fixture.space();
        map(&space, file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        let program = Program::new(fixture.machine, &space);
        assert_eq!(program.load(at(8)), Ok(word(9)));
        file.write(0, &[99]).unwrap();
        // The range contains a dirty page and a part of a folio that extends beyond it.
        assert_eq!(file.evict(0, 6 * PAGE), 0);
        assert_eq!(file.evict(4 * PAGE, 4 * PAGE), 4);
        assert_eq!(file.evict(4 * PAGE, 4 * PAGE), 0);
        assert_eq!(file.evict(0, u64::MAX), 8);
        assert_eq!((file.resident_pages(), files.counts().writes), (4, 0));
        assert_eq!(space.inspect(at(8)), Inspection::Empty);
        assert_eq!(program.load(at(8)), Ok(word(9)));
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(file.evict(0, u64::MAX), 4 + 4);
        assert_eq!(content(file)[0], 99);
        fixture.audit(&[&space]);
        assert_eq!(memfd(fixture.memory, PAGE).evict(0, PAGE), 0);
    });
}

fn forgets<A: Walk>() {
    for order in [0, 2] {
        with_file::<A>(order, |fixture, file, files| {
            let spaces = [Sharing::Shared, Sharing::Private].map(|sharing| {
                let space = fixture.space();
                map(&space, file, AT, PAGES * PAGE, sharing).unwrap();
                space
            });
            let programs = spaces.each_ref().map(|space| Program::new(fixture.machine, space));
            for page in 0..PAGES {
                for program in &programs {
                    assert_eq!(program.load(at(page)), Ok(word(page as u8 + 1)));
                }
            }
            programs[1].store(at(3), 5).unwrap();
            programs[0].store(at(6), 6).unwrap();
            files.put(1, &bytes(100));
            // Page 6 is dirty and stays; the other pages have the content of the storage.
            assert_eq!(file.invalidate(0, u64::MAX), Err(Error::Busy));
            for (program, kept) in programs.iter().zip([None, Some(3)]) {
                for page in 0..PAGES {
                    let expected = match page {
                        6 => 6,
                        _ if Some(page) == kept => 5,
                        _ => word(page as u8 + 100),
                    };
                    assert_eq!(program.load(at(page)), Ok(expected), "page {page}");
                }
            }
            file.sync(0, u64::MAX).unwrap();
            files.put(1, &bytes(50));
            assert_eq!(file.invalidate(6 * PAGE, PAGE), Ok(()));
            assert_eq!(programs[0].load(at(6)), Ok(word(56)));
            assert_eq!(programs[0].load(at(7)), Ok(word(107)), "not in the range");
            fixture.audit(&spaces.each_ref());
        });
    }
}

fn follows_the_size<A: Walk>() {
    with_file::<A>(1, |fixture, file, files| {
        let space = fixture.space();
        map(&space, file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        let program = Program::new(fixture.machine, &space);
        (0..PAGES).for_each(|page| assert_eq!(program.load(at(page)), Ok(word(page as u8 + 1))));
        program.store(at(12), 3).unwrap();
        let size = files.size(1);
        // The file is smaller: the dirty page beyond the end is removed, and the pager is not
        // called.
        file.size_changed(3 * PAGE + 100).unwrap();
        assert_eq!((file.size(), files.size(1)), (3 * PAGE + 100, size));
        assert_eq!(space.fault(at(4), Access::Read), Err(FaultError::Bus));
        assert_eq!(content(file), bytes(1)[..3 * PAGE as usize + 100]);
        // The file is larger: the rest of its former last page comes from the storage.
        file.size_changed(5 * PAGE).unwrap();
        assert_eq!(content(file), bytes(1)[..5 * PAGE as usize]);
        assert_eq!(program.load(at(4)), Ok(word(5)));
        assert_eq!(files.counts().writes, 0);
        // A file of the same size does not change.
        let reads = files.counts().reads;
        file.size_changed(5 * PAGE).unwrap();
        assert_eq!(program.load(at(3)), Ok(word(4)));
        assert_eq!(files.counts().reads, reads);
        fixture.audit(&[&space]);
    });
}

on_every_architecture! {
    clean_pages_of_a_range_leave => evicts;
    a_changed_file_is_read_again => forgets;
    a_size_of_the_storage_is_taken_over => follows_the_size;
}

#[test]
fn a_dirty_last_page_keeps_the_size() {
    let files = MemoryFiles::new();
    files.put(1, &[1; 100]);
    in_memory(|memory, _| {
        let file = memory.file(&files, 1, 100).unwrap();
        file.write(0, &[2]).unwrap();
        assert_eq!(file.size_changed(200), Err(Error::Busy));
        assert_eq!((file.size(), content(&file)[0]), (100, 2));
        file.sync(0, 100).unwrap();
        assert_eq!(file.size_changed(200), Ok(()));
        assert_eq!((file.size(), content(&file)[0]), (200, 2));
    });
}

#[test]
fn only_files_have_another_side() {
    let files = MemoryFiles::new();
    in_memory(|memory, _| {
        let memfd = memfd(memory, PAGE);
        assert_eq!(memfd.invalidate(0, PAGE), Err(Error::Invalid));
        assert_eq!(memfd.size_changed(0), Err(Error::Invalid));
        assert_eq!(memfd.discard(0, PAGE), Err(Error::Invalid));
        let file = memory.file(&files, 1, PAGE).unwrap();
        assert_eq!(file.size_changed(1 << 63), Err(Error::TooLarge));
        assert_eq!(file.invalidate(0, 0), Ok(()));
        assert_eq!(file.size(), PAGE);
    });
}

/// Without its device, the pages of a removed file system would stay dirty forever.
#[test]
fn changes_that_cannot_be_stored_are_discarded() {
    let pager = HeldFiles::new();
    in_memory(|memory, audit| {
        let file = memory.file(&pager, 1, 0).unwrap();
        let (mut writer, mut reader) = (file.error_mark(), file.error_mark());
        file.write(0, &[1; 3 * PAGE as usize]).unwrap();
        *pager.failures.lock().unwrap() = 2;
        assert_eq!(file.sync(0, u64::MAX), Err(Error::InputOutput));
        assert_eq!(file.sync(0, u64::MAX), Err(Error::InputOutput));
        for mark in [&mut writer, &mut reader] {
            assert_eq!(file.check_errors(mark), Err(Error::InputOutput));
            assert_eq!(file.check_errors(mark), Ok(()));
        }
        assert_eq!(file.check_errors(&mut file.error_mark()), Ok(()));
        assert_eq!(file.invalidate(0, u64::MAX), Err(Error::Busy));
        // A length of zero touches no page.
        assert_eq!((file.discard(100, 0), file.invalidate(100, 0)), (Ok(()), Ok(())));
        assert_eq!((file.evict(100, 0), file.resident_pages()), (0, 3));
        assert_eq!(file.discard(PAGE, PAGE), Ok(()));
        assert_eq!(file.resident_pages(), 2);
        assert_eq!(file.discard(0, u64::MAX), Ok(()));
        assert_eq!((file.resident_pages(), file.size()), (0, 3 * PAGE));
        assert!(content(&file).iter().all(|byte| *byte == 0));
        assert_eq!(file.sync(0, u64::MAX), Ok(()));
        audit();
    });
    assert!(pager.files.content(1).iter().all(|byte| *byte == 0));
}

/// A read that the pager had begun before the change is discarded.
#[test]
fn a_read_of_before_is_not_seen_after() {
    let pager = HeldFiles::new();
    pager.files.put(1, &[1; PAGE as usize]);
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<X86_64<4>>(config);
    let file = memory.file(&pager, 1, PAGE).unwrap();
    pager.hold_next(Io::Read, 0);
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| machine.on_cpu(Cpu(1), || content(&file)));
        pager.wait_until_held();
        pager.files.put(1, &[2; PAGE as usize]);
        file.invalidate(0, PAGE).unwrap();
        pager.release();
        assert!(reads.join().unwrap().iter().all(|byte| *byte == 2));
    });
    assert_eq!(pager.times(Io::Read, 0), 2);
}
