//! Dirty pages that cannot be stored, at a limit for dirty pages.

use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use bindery::addr::VirtAddr;
use bindery::platform::Cpu;
use bindery::{AddressSpace, DirtyLimit, Error, PagerError, Protection, Sharing};
use bindery_hosted::{Config, DelayedFiles, MemoryFiles};

use super::dirty_limits::{A, STEP, write};
use super::refusing_pager::RefusingFiles;
use crate::support::objects::{Failing, PAGE, content, in_memory};
use crate::support::objects_fixture::{AT, map};
use crate::support::{MIB, audit, memory_with, options};

#[test]
fn a_failing_device_stops_its_own_writers() {
    let (bad, good) = (Failing::new(), MemoryFiles::new());
    let limit = DirtyLimit::new(STEP);
    in_memory(|memory, audit| {
        memory.dirty_limit().set_limit(STEP + 8);
        let failing = memory.file_system_within(&bad, &limit).file(1, 0).unwrap();
        let healthy = memory.file_system(&good).file(1, 0).unwrap();
        bad.writes_left.store(0, Relaxed);
        write(&failing, 0..STEP).unwrap();
        // Each page of the failing file is tried once. None can be cleaned.
        assert_eq!(write(&failing, STEP..STEP + 1), Err(Error::InputOutput));
        assert_eq!(limit.pages(), STEP);
        assert_eq!(failing.check_errors(&mut failing.error_mark()), Err(Error::InputOutput));
        // Dirty pages may be written again because no further page becomes dirty. Their writeback
        // is retried.
        write(&failing, 0..4).unwrap();
        write(&healthy, 0..200).unwrap();
        audit();
        assert!(good.counts().pages_written > 100);
        // The device works again: pages written since then are stored, and a sync retries the
        // others.
        bad.never();
        write(&failing, STEP..STEP + 1).unwrap();
        assert_eq!(bad.files.stored_pages(1), 4);
        failing.sync(0, u64::MAX).unwrap();
        assert_eq!(bad.files.content(1), content(&failing));
        assert_eq!(limit.pages(), 0);
    });
}

#[test]
fn one_bad_page_fails_no_write() {
    let pager = RefusingFiles::new(|asked| asked.has(3).then_some(PagerError::InputOutput));
    in_memory(|memory, audit| {
        let file = memory.file(&pager, 1, 0).unwrap();
        write(&file, 0..20).unwrap();
        write(&file, 100..180).unwrap();
        // The run that contains the bad page fails as a whole; the other pages can be stored.
        memory.dirty_limit().set_limit(64);
        write(&file, 200..201).unwrap();
        audit();
        write(&file, 201..400).unwrap();
        pager.refuse(|_| None);
        assert_eq!(file.sync(0, u64::MAX), Ok(()));
        assert_eq!(pager.files.content(1), content(&file));
    });
}

#[test]
fn a_pager_without_memory_fails_no_write() {
    let files = RefusingFiles::new(|_| Some(PagerError::OutOfMemory));
    let limit = DirtyLimit::new(1);
    in_memory(|memory, _| {
        let file = memory.file_system_within(&files, &limit).file(1, 0).unwrap();
        write(&file, 0..1).unwrap();
        assert_eq!(write(&file, 1..2), Err(Error::OutOfMemory));
        files.refuse(|_| None);
        write(&file, 1..2).unwrap();
        assert_eq!(files.files.stored_pages(1), 1);
    });
}

#[test]
fn failed_pages_are_tried_once_more() {
    let bad = Failing::new();
    in_memory(|memory, audit| {
        let file = memory.file(&bad, 1, 8 * PAGE).unwrap();
        let stored = || bad.files.stored_pages(1);
        write(&file, 0..2).unwrap();
        bad.writes_left.store(0, Relaxed);
        for _ in 0..2 {
            assert_eq!(file.sync(0, u64::MAX), Err(Error::InputOutput));
        }
        bad.never();
        assert_eq!((file.sync(0, u64::MAX), stored()), (Ok(()), 0), "they are given up");
        // Neither reclaim nor an eviction drops the only copy of a page.
        assert_eq!((file.evict(0, u64::MAX), memory.drop_clean_pages()), (0, 0));
        assert_eq!(file.invalidate(0, PAGE), Err(Error::Busy));
        write(&file, 1..2).unwrap();
        assert_eq!((file.sync(0, u64::MAX), stored()), (Ok(()), 1));
        audit();
        // A lack of memory does not count as a failure of the device.
        assert_eq!(file.discard_failed(), Ok(1));
        assert_eq!(content(&file)[..1], [0]);
        assert_eq!(content(&file)[PAGE as usize], 2);
        assert_eq!(file.discard_failed(), Ok(0));
        let memfd = crate::support::objects::memfd(memory, PAGE);
        assert_eq!(memfd.discard_failed(), Err(Error::Invalid));
    });
}

#[test]
fn a_mapped_page_that_failed_is_forgotten() {
    let bad = Failing::new();
    bad.files.put(1, &[5; 3 * PAGE as usize]);
    let (machine, memory) = memory_with::<A>(Config { memory: 32 * MIB, ..Config::default() });
    let file = memory.file(&bad, 1, 3 * PAGE).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &file, AT, 3 * PAGE, Sharing::Shared).unwrap();
    space.write_user(VirtAddr(AT), &[1]).unwrap();
    bad.writes_left.store(0, Relaxed);
    assert_eq!(file.sync(0, u64::MAX), Err(Error::InputOutput));
    space.write_user(VirtAddr(AT + PAGE), &[2]).unwrap();
    assert_eq!(file.discard_failed(), Ok(1));
    audit(&machine, &memory, &[&space]);
    let mut bytes = [0; 1];
    space.read_user(VirtAddr(AT), &mut bytes).unwrap();
    assert_eq!(bytes, [5]);
    space.read_user(VirtAddr(AT + PAGE), &mut bytes).unwrap();
    assert_eq!(bytes, [2], "a page that was written and not tried stays");
    space.mprotect(VirtAddr(AT), PAGE, Protection::READ).unwrap();
    bad.never();
}

#[test]
fn a_pager_without_memory_is_tried_again() {
    let files = DelayedFiles::new();
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let file = memory.file(&files, 1, 0).unwrap();
    write(&file, 0..1).unwrap();
    files.keep_writes(true);
    for _ in 0..3 {
        thread::scope(|scope| {
            let sync = scope.spawn(|| machine.on_cpu(Cpu(1), || file.sync(0, u64::MAX)));
            while !sync.is_finished() {
                if let Some(kept) = files.try_take_write(|_| true) {
                    files.answer_write(&memory, kept, Err(PagerError::OutOfMemory));
                }
                thread::yield_now();
            }
            assert!(sync.join().unwrap().is_err());
        });
    }
    files.keep_writes(false);
    assert_eq!((file.sync(0, u64::MAX), files.files.stored_pages(1)), (Ok(()), 1));
}
