//! Background writeback: the results of [`bindery::FileSystem::write_back`], and pages that a pager
//! fails to store.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

use bindery::platform::Cpu;
use bindery::{DirtyLimit, Error, PagerError};
use bindery_hosted::{Config, MemoryFiles};

use super::dirty_limits::{A, write};
use super::held_pager::{HeldFiles, Io};
use super::refusing_pager::RefusingFiles;
use crate::support::objects::{Failing, PAGE, content, in_memory};
use crate::support::{MIB, audit, memory_with};

#[test]
fn writing_back_takes_files_in_turn() {
    let (files, limit) = (MemoryFiles::new(), DirtyLimit::new(u64::MAX));
    let (others, bad) = (MemoryFiles::new(), Failing::new());
    in_memory(|memory, audit| {
        let disk = memory.file_system_within(&files, &limit);
        let [one, two] = [1, 2].map(|number| disk.file(number, 0).unwrap());
        let other = memory.file_system(&others).file(1, 0).unwrap();
        write(&two, 0..6).unwrap();
        write(&other, 0..6).unwrap();
        write(&one, 0..6).unwrap();
        assert_eq!(disk.write_back(4), 4);
        assert_eq!((files.stored_pages(2), files.stored_pages(1)), (4, 0));
        // The rest of a file is stored after the other files.
        assert_eq!(disk.write_back(6), 6);
        assert_eq!((files.stored_pages(2), files.stored_pages(1)), (4, 6));
        audit();
        assert_eq!(disk.write_back(u64::MAX), 2);
        assert_eq!(disk.write_back(u64::MAX), 0);
        assert_eq!((limit.pages(), others.stored_pages(1)), (0, 0));
        // A failing file ends only its own turn.
        let failing = memory.file_system(&bad);
        let [first, second] = [1, 2].map(|number| failing.file(number, 0).unwrap());
        write(&first, 0..3).unwrap();
        write(&second, 0..3).unwrap();
        bad.writes_left.store(0, Relaxed);
        assert_eq!(failing.write_back(u64::MAX), 0);
        bad.never();
        // Pages whose store failed are left to a sync.
        write(&second, 0..1).unwrap();
        assert_eq!(failing.write_back(u64::MAX), 1);
        first.sync(0, u64::MAX).unwrap();
        assert_eq!(bad.files.content(1), content(&first));
    });
}

#[test]
fn writing_back_ends_after_a_fatal_signal() {
    for signal in 0..6 {
        let files = MemoryFiles::new();
        let (machine, memory) = memory_with::<A>(Config { memory: 32 * MIB, ..Config::default() });
        {
            let disk = memory.file_system(&files);
            let open = [1, 2, 3].map(|number| disk.file(number, 0).unwrap());
            open.iter().for_each(|file| write(file, 0..1).unwrap());
            machine.fatal_signal_after(Some(signal));
            let stored = disk.write_back(u64::MAX);
            machine.fatal_signal_after(None);
            assert_eq!(stored + disk.write_back(u64::MAX), 3);
        }
        assert_eq!(audit(&machine, &memory, &[]).objects, 0);
    }
}

#[test]
fn writing_back_asks_a_pager_without_memory_once() {
    let asked = Arc::new(AtomicU64::new(0));
    let count = asked.clone();
    let files = RefusingFiles::new(move |asked| {
        (asked.file == 2).then(|| {
            count.fetch_add(1, Relaxed);
            PagerError::OutOfMemory
        })
    });
    in_memory(|memory, audit| {
        let disk = memory.file_system(&files);
        let [one, two] = [1, 2].map(|number| disk.file(number, 0).unwrap());
        write(&one, 0..1).unwrap();
        write(&two, 0..1).unwrap();
        assert_eq!(disk.write_back(u64::MAX), 1);
        assert_eq!(asked.load(Relaxed), 1);
        files.refuse(|_| None);
        assert_eq!(disk.write_back(u64::MAX), 1);
        audit();
    });
}

#[test]
fn writing_back_passes_by_pages_being_stored() {
    let held = HeldFiles::new();
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    {
        let disk = memory.file_system(&held);
        let [one, two] = [1, 2].map(|number| disk.file(number, 0).unwrap());
        // The next file in line leaves the list.
        write(&one, 0..1).unwrap();
        write(&two, 1..2).unwrap();
        held.hold_next(Io::Write, 1);
        thread::scope(|scope| {
            let saver = scope.spawn(|| machine.on_cpu(Cpu(1), || two.sync(0, u64::MAX)));
            held.wait_until_held();
            assert_eq!(disk.write_back(u64::MAX), 1);
            held.release();
            assert_eq!(saver.join().unwrap(), Ok(()));
        });
    }
    assert_eq!(audit(&machine, &memory, &[]).objects, 0);
}

#[test]
fn the_last_close_retries_a_pager_without_memory() {
    let (files, clean) = (RefusingFiles::new(|_| None), MemoryFiles::new());
    in_memory(|memory, _| {
        // Provides pages for reclaim to examine.
        clean.put(1, &[1; 64 * PAGE as usize]);
        let cache = memory.file(&clean, 1, 64 * PAGE).unwrap();
        content(&cache);
        let file = memory.file(&files, 1, 0).unwrap();
        write(&file, 0..3).unwrap();
        let mut left = 2;
        files.refuse(move |_| {
            left -= i32::from(left > 0);
            (left > 0).then_some(PagerError::OutOfMemory)
        });
        drop(file);
        assert_eq!(files.files.stored_pages(1), 3);
    });
}

#[test]
fn a_sync_goes_on_after_a_failed_page() {
    let files = RefusingFiles::new(|asked| asked.has(0).then_some(PagerError::InputOutput));
    in_memory(|memory, audit| {
        let file = memory.file(&files, 1, 0).unwrap();
        // More runs than fit into a batch.
        for page in 0..80 {
            write(&file, 2 * page..2 * page + 1).unwrap();
        }
        assert_eq!(file.sync(0, u64::MAX), Err(Error::InputOutput));
        assert_eq!(files.files.stored_pages(1), 79);
        audit();
        files.refuse(|_| None);
        assert_eq!(file.sync(0, u64::MAX), Ok(()));
        assert_eq!(files.files.content(1), content(&file));
    });
}

#[test]
fn the_memorys_limit_counts_a_page_once() {
    let files = MemoryFiles::new();
    in_memory(|memory, _| {
        let disk = memory.file_system_within(&files, memory.dirty_limit());
        let file = disk.file(1, 0).unwrap();
        write(&file, 0..5).unwrap();
        assert_eq!(memory.dirty_limit().pages(), 5);
    });
}
