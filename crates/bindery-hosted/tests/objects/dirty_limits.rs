//! Limits for dirty pages: a writer at the limit stores pages of its own device, and pages that
//! cannot be stored block no other file system.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{Access, AddressSpace, DirtyLimit, Error, FaultError, Memory, Object, Sharing};
use bindery_hosted::{Config, DelayedFiles, Machine, MemoryFiles};

use super::held_pager::{HeldFiles, Io};
use crate::support::objects::{Failing, PAGE, content, in_memory};
use crate::support::objects_fixture::{AT, map};
use crate::support::{MIB, audit, memory_with, options};

pub type A = X86_64<4>;

/// The shared counts are exact up to this number of pages per file and multiples of it above.
pub const STEP: u64 = 32;

/// Writes one byte to each of the pages.
pub fn write(file: &Object<'_, Machine<A>>, pages: std::ops::Range<u64>) -> Result<(), Error> {
    for page in pages {
        file.write(page * PAGE, &[(page as u8).wrapping_add(1)])?;
    }
    Ok(())
}

#[test]
fn dirty_pages_are_counted_until_stored() {
    let (files, limit) = (MemoryFiles::new(), DirtyLimit::new(u64::MAX));
    in_memory(|memory, audit| {
        let counts = || (limit.pages(), memory.dirty_limit().pages());
        let disk = memory.file_system_within(&files, &limit);
        let file = disk.file(1, 0).unwrap();
        write(&file, 0..5).unwrap();
        write(&file, 0..5).unwrap();
        assert_eq!(counts(), (5, 5));
        audit();
        file.sync(0, 2 * PAGE).unwrap();
        assert_eq!(counts(), (3, 3));
        file.punch_hole(2 * PAGE, PAGE).unwrap();
        assert_eq!(counts(), (2, 2));
        write(&file, 0..STEP + 1).unwrap();
        assert_eq!(counts(), (2 * STEP, 2 * STEP));
        audit();
        file.set_size(PAGE).unwrap();
        assert_eq!(counts(), (1, 1));
        // A file without a file system counts only towards the common limit.
        let other = memory.file(&files, 2, 0).unwrap();
        write(&other, 0..2).unwrap();
        assert_eq!(counts(), (1, 3));
        drop((file, other));
        assert_eq!(counts(), (0, 0));
    });
}

#[test]
fn a_writer_stores_pages_at_the_limit() {
    let (files, limit) = (MemoryFiles::new(), DirtyLimit::new(2 * STEP));
    in_memory(|memory, audit| {
        let disk = memory.file_system_within(&files, &limit);
        let file = disk.file(1, 0).unwrap();
        for page in 0..1000 {
            write(&file, page..page + 1).unwrap();
            assert!(limit.pages() <= 2 * STEP, "{} pages are dirty", limit.pages());
        }
        audit();
        assert!(files.counts().pages_written >= 1000 - 2 * STEP);
        // In batches: most writes store nothing.
        assert!(files.counts().writes <= 1000 / STEP, "{:?}", files.counts());
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(files.content(1), content(&file));
    });
}

#[test]
fn a_faulting_writer_stores_pages_at_the_limit() {
    let (files, limit) = (MemoryFiles::new(), DirtyLimit::new(STEP));
    let (machine, memory) = memory_with::<A>(Config { memory: 32 * MIB, ..Config::default() });
    {
        let disk = memory.file_system_within(&files, &limit);
        let file = disk.file(1, 300 * PAGE).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        map(&space, &file, AT, 300 * PAGE, Sharing::Shared).unwrap();
        for page in 0..300 {
            space.write_user(VirtAddr(AT + page * PAGE), &[page as u8]).unwrap();
            assert!(limit.pages() <= 2 * STEP, "{} pages are dirty", limit.pages());
        }
        audit(&machine, &memory, &[&space]);
        // Pages that are mapped for writing are dirty, and may be written at the limit.
        space.write_user(VirtAddr(AT + 299 * PAGE), &[7]).unwrap();
        // A page that is present and clean becomes writable.
        space.write_user(VirtAddr(AT), &[9]).unwrap();
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(files.content(1), content(&file));
    }
    assert_eq!(audit(&machine, &memory, &[]).objects, 0);
    assert_eq!(memory.dirty_limit().pages(), 0);
}

#[test]
fn files_of_one_file_system_make_room() {
    let (files, limit) = (MemoryFiles::new(), DirtyLimit::new(8));
    in_memory(|memory, audit| {
        let disk = memory.file_system_within(&files, &limit);
        let open: Vec<_> = (0..40).map(|number| disk.file(number, 0).unwrap()).collect();
        for file in &open {
            write(file, 0..1).unwrap();
            assert!(limit.pages() <= 8);
        }
        audit();
        // The page that became dirty first was stored first.
        assert_eq!(files.stored_pages(0), 1);
        assert_eq!(files.stored_pages(39), 0);
    });
}

#[test]
fn a_fault_without_room_is_a_bus_error() {
    let (bad, limit) = (Failing::new(), DirtyLimit::new(1));
    let (machine, memory) = memory_with::<A>(Config { memory: 32 * MIB, ..Config::default() });
    let file = memory.file_system_within(&bad, &limit).file(1, 4 * PAGE).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &file, AT, 4 * PAGE, Sharing::Shared).unwrap();
    bad.writes_left.store(0, Relaxed);
    space.write_user(VirtAddr(AT), &[1]).unwrap();
    let fault = || space.fault(VirtAddr(AT + PAGE), Access::Write).map(|_| ());
    assert_eq!(fault(), Err(FaultError::Bus));
    // The page may be read.
    assert!(space.fault(VirtAddr(AT + PAGE), Access::Read).is_ok());
    assert_eq!(fault(), Err(FaultError::Bus));
    assert_eq!(file.discard_failed(), Ok(1));
    assert_eq!(fault(), Ok(()));
    audit(&machine, &memory, &[&space]);
    bad.never();
}

#[test]
fn a_limit_that_others_fill_stops_none() {
    let (bad, good) = (Failing::new(), MemoryFiles::new());
    let limit = DirtyLimit::new(4);
    in_memory(|memory, audit| {
        let failing = memory.file_system_within(&bad, &limit).file(1, 0).unwrap();
        bad.writes_left.store(0, Relaxed);
        write(&failing, 0..4).unwrap();
        assert_eq!(write(&failing, 4..5), Err(Error::InputOutput));
        // Another file system within the same limit has no page to store.
        let healthy = memory.file_system_within(&good, &limit).file(1, 0).unwrap();
        write(&healthy, 0..20).unwrap();
        audit();
        assert!(good.counts().pages_written >= 19);
        // A page that has failed does not block a device below its own limit.
        let (own, half) = (DirtyLimit::new(100), Failing::new());
        let file = memory.file_system_within(&half, &own).file(1, 0).unwrap();
        write(&file, 0..1).unwrap();
        half.writes_left.store(0, Relaxed);
        assert_eq!(file.sync(0, u64::MAX), Err(Error::InputOutput));
        half.never();
        memory.dirty_limit().set_limit(1);
        write(&file, 1..20).unwrap();
        assert_eq!(file.sync(0, u64::MAX), Ok(()));
    });
}

#[test]
fn writes_across_dirty_pages_keep_to_the_limit() {
    let (files, limit) = (MemoryFiles::new(), DirtyLimit::new(STEP));
    in_memory(|memory, audit| {
        files.put(1, &[1; 200 * PAGE as usize]);
        let file = memory.file_system_within(&files, &limit).file(1, 200 * PAGE).unwrap();
        content(&file);
        // Each write begins in the page in which the previous write ended.
        for page in 0..199 {
            file.write(page * PAGE + 100, &[2; PAGE as usize]).unwrap();
            assert!(limit.pages() <= 2 * STEP, "{} pages are dirty", limit.pages());
        }
        audit();
    });
}

#[test]
fn a_silent_device_stops_its_own_writers() {
    let (held, good) = (HeldFiles::new(), MemoryFiles::new());
    let limit = DirtyLimit::new(4);
    let config = Config { memory: 32 * MIB, cpus: 3, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    {
        let silent = memory.file_system_within(&held, &limit).file(1, 0).unwrap();
        let healthy = memory.file_system(&good).file(1, 0).unwrap();
        write(&silent, 0..4).unwrap();
        held.hold_next(Io::Write, 0);
        thread::scope(|scope| {
            let writer = scope.spawn(|| machine.on_cpu(Cpu(1), || write(&silent, 4..5)));
            held.wait_until_held();
            memory.dirty_limit().set_limit(4);
            write(&healthy, 0..100).unwrap();
            assert!(!writer.is_finished());
            held.release();
            assert_eq!(writer.join().unwrap(), Ok(()));
        });
        assert_eq!(limit.pages(), 1);
    }
    assert_eq!(audit(&machine, &memory, &[]).objects, 0);
}

#[test]
fn a_fatal_signal_ends_the_wait_for_room() {
    let (files, limit) = (MemoryFiles::new(), DirtyLimit::new(1));
    let (machine, memory) = memory_with::<A>(Config { memory: 32 * MIB, ..Config::default() });
    let disk = memory.file_system_within(&files, &limit);
    let (file, other) = (disk.file(1, 0).unwrap(), disk.file(2, 2 * PAGE).unwrap());
    write(&file, 0..1).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &other, AT, 2 * PAGE, Sharing::Shared).unwrap();
    machine.fatal_signal_after(Some(0));
    let fault = space.fault(VirtAddr(AT), Access::Write).map(|_| ());
    assert_eq!(fault, Err(FaultError::Interrupted));
    assert_eq!(write(&file, 1..2), Err(Error::Interrupted));
    machine.fatal_signal_after(None);
    assert_eq!(limit.pages(), 1);
    assert_eq!(files.counts().pages_written, 0);
}

/// The signal arrives while the pager has the pages, of this writer or of a sync, and is silent.
#[test]
fn a_kill_ends_waits_for_silent_pagers() {
    for is_synced in [false, true] {
        let (files, limit) = (DelayedFiles::new(), DirtyLimit::new(2));
        let config = Config { memory: 32 * MIB, cpus: 4, ..Config::default() };
        let (machine, memory) = memory_with::<A>(config);
        {
            files.keep_reads(false);
            let file = memory.file_system_within(&files, &limit).file(1, 8 * PAGE).unwrap();
            let space = AddressSpace::new(&memory, options()).unwrap();
            map(&space, &file, AT, 8 * PAGE, Sharing::Shared).unwrap();
            write(&file, 0..2).unwrap();
            files.keep_writes(true);
            thread::scope(|scope| {
                if is_synced {
                    scope.spawn(|| machine.on_cpu(Cpu(3), || file.sync(0, u64::MAX)));
                    files.wait_for_writes(1);
                }
                let writer = scope.spawn(|| machine.on_cpu(Cpu(1), || write(&file, 2..3)));
                let program = scope.spawn(|| {
                    let fault = || space.fault(VirtAddr(AT + 5 * PAGE), Access::Write).map(drop);
                    machine.on_cpu(Cpu(2), fault)
                });
                files.wait_for_writes(1);
                while machine.parked_threads() < 2 + u32::from(is_synced) {
                    thread::yield_now();
                }
                machine.kill(Cpu(1));
                assert_eq!(writer.join().unwrap(), Err(Error::Interrupted));
                assert!(!program.is_finished());
                machine.kill(Cpu(2));
                assert_eq!(program.join().unwrap(), Err(FaultError::Interrupted));
                assert_eq!(limit.pages(), 2);
                files.keep_writes(false);
                files.answer_all(&memory);
            });
            audit(&machine, &memory, &[&space]);
            assert_eq!(limit.pages(), 0);
            assert_eq!(files.files.stored_pages(1), 2);
        }
    }
}

#[test]
fn a_sync_leaves_what_was_appended_since() {
    let held = HeldFiles::new();
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let file = memory.file(&held, 1, 0).unwrap();
    write(&file, 0..4).unwrap();
    held.hold_next(Io::Write, 0);
    thread::scope(|scope| {
        let sync = scope.spawn(|| machine.on_cpu(Cpu(1), || file.sync(0, u64::MAX)));
        held.wait_until_held();
        write(&file, 4..40).unwrap();
        held.release();
        assert_eq!(sync.join().unwrap(), Ok(()));
    });
    assert_eq!(held.files.stored_pages(1), 4);
    file.sync(0, u64::MAX).unwrap();
    assert_eq!(held.files.stored_pages(1), 40);
}

/// Several threads write files of two file systems concurrently, at their limits.
#[test]
fn many_writers_keep_within_the_limits() {
    let (disks, limits) =
        ([(); 2].map(|()| MemoryFiles::new()), [8, 3 * STEP].map(DirtyLimit::new));
    let config = Config { memory: 32 * MIB, cpus: 5, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    memory.dirty_limit().set_limit(3 * STEP + 4);
    {
        let over = AtomicBool::new(false);
        let work = |cpu: u64| {
            let at = cpu as usize % 2;
            let disk = memory.file_system_within(&disks[at], &limits[at]);
            for round in 0..40 {
                let file = disk.file(cpu, 0).unwrap();
                write(&file, 0..20 + round).unwrap();
                if round % 8 == 0 {
                    file.sync(0, u64::MAX).unwrap();
                    file.set_size(0).unwrap();
                }
            }
        };
        thread::scope(|scope| {
            let flusher = scope.spawn(|| {
                machine.on_cpu(Cpu(4), || {
                    let disk = memory.file_system_within(&disks[1], &limits[1]);
                    while !over.load(Relaxed) {
                        disk.write_back(16);
                        thread::yield_now();
                    }
                });
            });
            let writers: Vec<_> = (0..4)
                .map(|cpu| {
                    let (machine, work) = (&machine, &work);
                    scope.spawn(move || machine.on_cpu(Cpu(cpu), || work(cpu.into())))
                })
                .collect();
            let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
            over.store(true, Relaxed);
            flusher.join().unwrap();
            ended.into_iter().for_each(|writer| writer.unwrap());
        });
    }
    assert_eq!(audit(&machine, &memory, &[]).objects, 0);
    assert_eq!(limits.map(|limit| limit.pages()), [0, 0]);
    assert_eq!(memory.dirty_limit().pages(), 0);
}

/// Initially the limit of all files is a fifth of memory.
#[test]
fn a_file_larger_than_memory_can_be_written() {
    let files = MemoryFiles::new();
    in_memory(|memory: &Memory<Machine<A>>, audit| {
        let pages = 2 * memory.total_frames();
        assert_eq!(memory.dirty_limit().limit(), memory.total_frames() / 5);
        let file = memory.file_system(&files).file(1, 0).unwrap();
        write(&file, 0..pages).unwrap();
        audit();
        assert!(memory.dirty_limit().pages() <= memory.total_frames() / 5 + STEP);
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(files.stored_pages(1) as u64, pages);
        let mut byte = [0];
        for page in (0..pages).step_by(97) {
            assert_eq!(file.read(page * PAGE, &mut byte), Ok(1));
            assert_eq!(byte, [(page as u8).wrapping_add(1)]);
        }
    });
}
