//! Files without mappings: the pager's reads and stores, the sizes of its requests, and its errors.

use std::sync::atomic::Ordering::Relaxed;

use bindery::{Error, Growth, Pager, PagerError, ReadBuffer, Seals, StoredBytes};
use bindery_hosted::MemoryFiles;

use crate::support::MIB;
use crate::support::objects::{Failing, PAGE, content, in_memory, use_object_order};

#[test]
fn a_file_is_read_once_in_large_pieces() {
    let files = MemoryFiles::new();
    files.put(3, &(0..40 * PAGE).map(|at| (at / PAGE) as u8 + 1).collect::<Vec<_>>());
    in_memory(|memory, audit| {
        use_object_order(memory, 4);
        let file = memory.file(&files, 3, 40 * PAGE).unwrap();
        for _ in 0..2 {
            let bytes = content(&file);
            assert!(bytes.iter().zip(0_u64..).all(|(byte, at)| u64::from(*byte) == at / PAGE + 1));
        }
        let counts = files.counts();
        assert_eq!((counts.reads, counts.pages_read), (1, 40));
        // Two folios of 16 pages; the remaining eight pages do not fill one.
        assert_eq!(audit().folios, 10);
    });
    assert_eq!(files.counts().removed, 1);
}

#[test]
fn written_pages_are_stored_in_runs() {
    let files = MemoryFiles::new();
    in_memory(|memory, audit| {
        let file = memory.file(&files, 1, 0).unwrap();
        // Base pages, at any frames.
        file.write(0, &[1; 20 * PAGE as usize + 10]).unwrap();
        assert_eq!(files.counts().pages_read, 0, "what is behind the end need not be read");
        assert_eq!(files.size(1), 20 * PAGE + 10);
        assert_eq!(files.stored_pages(1), 0);
        file.sync(0, u64::MAX).unwrap();
        let counts = files.counts();
        assert_eq!((counts.writes, counts.pages_written), (1, 21));
        assert_eq!(files.content(1), content(&file));
        // No page is dirty now.
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(files.counts().writes, 1);
        file.write(5 * PAGE + 1, &[2]).unwrap();
        file.write(7 * PAGE, &[3]).unwrap();
        file.write(8 * PAGE, &[3]).unwrap();
        // Only the requested pages.
        file.sync(0, 7 * PAGE).unwrap();
        assert_eq!((files.counts().writes, files.counts().pages_written), (2, 22));
        file.sync(8 * PAGE, 1).unwrap();
        assert_eq!((files.counts().writes, files.counts().pages_written), (3, 23));
        file.sync(0, u64::MAX).unwrap();
        assert_eq!((files.counts().writes, files.counts().pages_written), (4, 24));
        assert_eq!(files.content(1), content(&file));
        audit();
    });
}

#[test]
fn what_is_written_whole_is_not_read_before() {
    let pager = Failing::new();
    pager.files.put(1, &[5; 32 * PAGE as usize]);
    in_memory(|memory, audit| {
        use_object_order(memory, 3);
        let file = memory.file(&pager, 1, 32 * PAGE).unwrap();
        pager.reads_left.store(0, Relaxed);
        assert_eq!(file.write(4 * PAGE, &[6; 16 * PAGE as usize]), Ok(16 * PAGE as usize));
        // Pages 4 to 7 and 16 to 19 do not fill a folio; pages 8 to 15 do.
        assert_eq!((file.resident_pages(), audit().folios), (16, 9));
        assert_eq!(file.write(4 * PAGE - 1, &[6; 2]), Err(Error::InputOutput));
        pager.never();
        assert_eq!(pager.files.counts().reads, 0);
        file.sync(0, u64::MAX).unwrap();
        let bytes = content(&file);
        let written = 4 * PAGE as usize..20 * PAGE as usize;
        assert!(bytes.iter().enumerate().all(|(at, byte)| (*byte == 6) == written.contains(&at)));
        assert_eq!(pager.files.content(1), bytes);
    });
}

#[test]
fn a_large_folio_is_one_piece() {
    let files = MemoryFiles::new();
    in_memory(|memory, _| {
        use_object_order(memory, 9);
        let file = memory.file(&files, 1, 0).unwrap();
        file.write(0, &vec![1; 4 * MIB as usize]).unwrap();
        file.sync(0, u64::MAX).unwrap();
        let counts = files.counts();
        assert_eq!((counts.writes, counts.pages_written), (1, 1024));
        assert!(counts.pieces_written <= 2);
    });
}

#[test]
fn the_last_handle_stores_what_is_dirty() {
    let files = MemoryFiles::new();
    in_memory(|memory, _| {
        let file = memory.file(&files, 1, 0).unwrap();
        file.write(100, b"late").unwrap();
        let other = file.clone();
        drop(file);
        assert_eq!(files.counts().writes, 0);
        drop(other);
    });
    assert_eq!(&files.content(1)[100..], b"late");
    assert_eq!(files.counts().removed, 1);
}

#[test]
fn resizing_and_punching_a_file_reach_its_storage() {
    let files = MemoryFiles::new();
    files.put(1, &[6; 10 * PAGE as usize]);
    in_memory(|memory, audit| {
        let file = memory.file(&files, 1, 10 * PAGE).unwrap();
        file.write(0, &[7; 3]).unwrap();
        // Pages 2 to 4 are written completely, 1 and 5 partly.
        file.punch_hole(2 * PAGE - 5, 3 * PAGE + 10).unwrap();
        assert_eq!(files.stored_pages(1), 7);
        let bytes = content(&file);
        let hole = 2 * PAGE as usize - 5..5 * PAGE as usize + 5;
        assert!(bytes.iter().enumerate().all(|(at, byte)| (*byte == 0) == hole.contains(&at)));
        file.set_size(7 * PAGE + 100).unwrap();
        assert_eq!(files.size(1), 7 * PAGE + 100);
        file.set_size(9 * PAGE).unwrap();
        let bytes = content(&file);
        assert!(bytes[7 * PAGE as usize + 100..].iter().all(|byte| *byte == 0));
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(files.content(1), bytes);
        assert_eq!(file.allocate(0, PAGE, Growth::Allowed), Err(Error::NotSupported));
        assert_eq!(file.add_seals(Seals::GROW), Err(Error::Invalid));
        // Stores everything, the last page partly.
        file.set_size(9 * PAGE - 1).unwrap();
        file.punch_hole(0, 100 * PAGE).unwrap();
        assert_eq!((files.stored_pages(1), file.resident_pages()), (0, 0));
        audit();
    });
}

#[test]
fn an_unstorable_page_stays_dirty() {
    let pager = Failing::new();
    in_memory(|memory, audit| {
        let file = memory.file(&pager, 1, 0).unwrap();
        file.write(0, &[1; 10]).unwrap();
        file.write(5 * PAGE, &[2; 10]).unwrap();
        pager.writes_left.store(1, Relaxed);
        assert_eq!(file.sync(0, u64::MAX), Err(Error::InputOutput));
        assert_eq!(pager.files.content(1)[..10], [1; 10]);
        assert_eq!(pager.files.content(1)[5 * PAGE as usize..], [0; 10]);
        audit();
        assert_eq!(file.sync(0, u64::MAX), Err(Error::InputOutput));
        pager.never();
        file.write(5 * PAGE, &[3; 10]).unwrap();
        assert_eq!(file.sync(0, u64::MAX), Ok(()));
        assert_eq!(pager.files.content(1), content(&file));
        assert_eq!(pager.files.counts().pages_written, 2);
    });
}

#[test]
fn what_cannot_be_read_is_not_there() {
    let pager = Failing::new();
    pager.files.put(1, &[4; 20 * PAGE as usize]);
    in_memory(|memory, audit| {
        use_object_order(memory, 3);
        let file = memory.file(&pager, 1, 20 * PAGE).unwrap();
        pager.reads_left.store(0, Relaxed);
        let mut bytes = [0; 16];
        assert_eq!(file.read(0, &mut bytes), Err(Error::InputOutput));
        assert_eq!(file.write(PAGE + 5, &bytes), Err(Error::InputOutput));
        assert_eq!(file.punch_hole(5, 5), Err(Error::InputOutput));
        assert_eq!(file.resident_pages(), 0);
        audit();
        // Stores everything before the bad page, in large and small folios.
        pager.never();
        pager.bad_page.store(9, Relaxed);
        let mut bytes = vec![0; 20 * PAGE as usize];
        assert_eq!(file.read(0, &mut bytes), Ok(9 * PAGE as usize));
        assert!(bytes[..9 * PAGE as usize].iter().all(|byte| *byte == 4));
        assert_eq!(file.read(9 * PAGE, &mut bytes), Err(Error::InputOutput));
        assert_eq!(file.read(10 * PAGE, &mut bytes), Ok(10 * PAGE as usize));
        audit();
        pager.never();
        assert_eq!(content(&file), [4; 20 * PAGE as usize]);
    });
}

/// A file of fixed size in which every byte is 2.
struct Rigid;

impl Pager for Rigid {
    fn read(&self, _: u64, _: u64, into: &mut ReadBuffer<'_>) -> Result<(), PagerError> {
        into.append_all(2);
        Ok(())
    }

    fn write(&self, _: u64, _: u64, _: &[StoredBytes<'_>]) -> Result<(), PagerError> {
        Err(PagerError::NoSpace)
    }

    fn resize(&self, _: u64, _: u64) -> Result<(), PagerError> {
        Err(PagerError::NoSpace)
    }

    fn removed(&self, _: u64) {}
}

#[test]
fn what_the_pager_refuses_is_as_it_was() {
    in_memory(|memory, audit| {
        let file = memory.file(&Rigid, 1, PAGE + 100).unwrap();
        assert_eq!(file.set_size(PAGE), Err(Error::NoSpace));
        assert_eq!(file.set_size(2 * PAGE), Err(Error::NoSpace));
        assert_eq!(file.write(PAGE, &[1; 101]), Err(Error::NoSpace));
        assert_eq!(file.punch_hole(0, PAGE), Err(Error::NotSupported));
        assert_eq!(content(&file), [2; PAGE as usize + 100]);
        assert_eq!(file.write(PAGE, &[1; 100]), Ok(100));
        assert_eq!(file.sync(0, u64::MAX), Err(Error::NoSpace));
        assert_eq!(content(&file)[PAGE as usize..], [1; 100]);
        audit();
    });
}
