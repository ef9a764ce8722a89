//! One object per file: lookups by number, weak handles, and the race of the last close with an
//! open.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::Duration;

use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{Error, Memory, Pager, PagerError, ReadBuffer, StoredBytes};
use bindery_hosted::{Config, Machine, MemoryFiles};

use super::held_pager::{HeldFiles, Io};
use crate::support::kernel::rounds;
use crate::support::objects::{PAGE, content, in_memory, memfd};
use crate::support::{MIB, audit, memory_with};

type A = X86_64<4>;

/// Runs `scenario` on a machine with several CPUs. No object may be left afterwards.
fn with_cpus(scenario: impl FnOnce(&Machine<A>, &Memory<Machine<A>>)) {
    let config = Config { memory: 32 * MIB, cpus: 4, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let free = memory.free_frame_count();
    scenario(&machine, &memory);
    assert_eq!(audit(&machine, &memory, &[]).objects, 0);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

#[test]
fn a_file_has_one_object() {
    let files = MemoryFiles::new();
    in_memory(|memory, audit| {
        let disk = memory.file_system(&files);
        assert!(disk.find(1).is_none());
        let one = disk.file(1, PAGE).unwrap();
        // The existing object's size takes precedence.
        let same = disk.file(1, 7 * PAGE).unwrap();
        assert_eq!((one.identity(), same.size()), (same.identity(), PAGE));
        assert_eq!(disk.find(1).map(|found| found.identity()), Some(one.identity()));
        let other = disk.file(2, PAGE).unwrap();
        assert_ne!(other.identity(), one.identity());
        assert!(disk.find(3).is_none());
        one.write(5, &[7]).unwrap();
        assert_eq!(content(&same)[5], 7);
        drop(one);
        assert_eq!(files.counts().removed, 0);
        assert!(disk.find(1).is_some());
        audit();
        drop(same);
        assert!(disk.find(1).is_none());
        assert_eq!((files.counts().removed, files.content(1)[5]), (1, 7));
        let again = disk.file(1, PAGE).unwrap();
        assert_eq!(content(&again)[5], 7);
    });
}

#[test]
fn file_systems_share_no_numbers() {
    let (files, others) = (MemoryFiles::new(), MemoryFiles::new());
    in_memory(|memory, audit| {
        // The same with two files of one pager.
        let disks = [&files, &others, &others].map(|pager| memory.file_system(pager));
        let objects = disks.map(|disk| disk.file(1, PAGE).unwrap());
        for (object, byte) in objects.iter().zip(1..) {
            object.write(0, &[byte]).unwrap();
        }
        for ((disk, object), byte) in disks.iter().zip(&objects).zip(1..) {
            let found = disk.find(1).unwrap();
            assert_eq!((found.identity(), content(&found)[0]), (object.identity(), byte));
        }
        // A file without a file system is not found.
        let alone = memory.file(&files, 2, PAGE).unwrap();
        assert!(disks.iter().all(|disk| disk.find(2).is_none()));
        drop(alone);
        audit();
    });
}

#[test]
fn a_weak_handle_keeps_no_pages() {
    in_memory(|memory, audit| {
        let object = memfd(memory, 64 * PAGE);
        object.write(0, &[1; 64 * PAGE as usize]).unwrap();
        let weak = object.downgrade();
        let other = weak.clone();
        assert_eq!(weak.upgrade().unwrap().identity(), object.identity());
        let identity = object.identity();
        drop(object);
        assert!(weak.upgrade().is_none());
        assert_eq!(other.identity(), identity);
        // The auditor knows the remaining record.
        assert_eq!((audit().objects, audit().object_pages), (0, 0));
        drop(weak);
        audit();
        drop(other);
        audit();
    });
}

#[test]
fn a_file_without_memory_is_refused() {
    let files = MemoryFiles::new();
    in_memory(|memory, audit| {
        let disk = memory.file_system(&files);
        memory.fail_allocations_after(Some(0));
        assert_eq!(disk.file(1, PAGE).err(), Some(Error::OutOfMemory));
        memory.fail_allocations_after(None);
        assert!(disk.find(1).is_none());
        assert_eq!(disk.file(1, u64::MAX).err(), Some(Error::TooLarge));
        audit();
        assert!(disk.file(1, PAGE).is_ok());
    });
}

/// A lookup finds a file while its last holder saves it, and the finder's writes are saved too.
#[test]
fn a_file_found_during_its_save_is_resaved() {
    let pager = HeldFiles::new();
    with_cpus(|machine, memory| {
        let disk = memory.file_system(&pager);
        let last = disk.file(1, 0).unwrap();
        last.write(0, &[1; 2 * PAGE as usize]).unwrap();
        let identity = last.identity();
        pager.hold_next(Io::Write, 0);
        thread::scope(|scope| {
            let leaves = scope.spawn(move || machine.on_cpu(Cpu(1), || drop(last)));
            pager.wait_until_held();
            let found = disk.file(1, 0).unwrap();
            assert_eq!(found.identity(), identity);
            found.write(3 * PAGE, &[2]).unwrap();
            // Now the thread that saves is the last holder again.
            drop(found);
            pager.release();
            leaves.join().unwrap();
        });
        assert_eq!(pager.files.counts().removed, 1);
        assert_eq!(pager.files.content(1)[3 * PAGE as usize], 2);
        assert!(disk.find(1).is_none());
    });
}

/// A file survives if the finder still holds it when the save ends.
#[test]
fn a_file_found_while_it_is_saved_stays() {
    let pager = HeldFiles::new();
    with_cpus(|machine, memory| {
        let disk = memory.file_system(&pager);
        let last = disk.file(1, 0).unwrap();
        last.write(0, &[1]).unwrap();
        let (identity, weak) = (last.identity(), last.downgrade());
        pager.hold_next(Io::Write, 0);
        let found = thread::scope(|scope| {
            let leaves = scope.spawn(move || machine.on_cpu(Cpu(1), || drop(last)));
            pager.wait_until_held();
            let found = weak.upgrade().unwrap();
            pager.release();
            leaves.join().unwrap();
            found
        });
        assert_eq!(pager.files.counts().removed, 0);
        assert_eq!(disk.find(1).map(|file| file.identity()), Some(identity));
        drop(found);
        assert_eq!(pager.files.counts().removed, 1);
    });
}

/// Files whose pager is slow in `removed`.
#[derive(Default)]
struct SlowToForget {
    files: MemoryFiles,
    /// Whether the pager is in `removed`, and whether it may return.
    phase: Mutex<(bool, bool)>,
    changed: Condvar,
    /// Calls of `removed` that have returned.
    forgotten: AtomicU64,
}

impl Pager for SlowToForget {
    fn read(&self, file: u64, first: u64, into: &mut ReadBuffer<'_>) -> Result<(), PagerError> {
        self.files.read(file, first, into)
    }

    fn write(&self, file: u64, first: u64, from: &[StoredBytes<'_>]) -> Result<(), PagerError> {
        self.files.write(file, first, from)
    }

    fn resize(&self, file: u64, size: u64) -> Result<(), PagerError> {
        self.files.resize(file, size)
    }

    fn removed(&self, _: u64) {
        let mut phase = self.phase.lock().unwrap();
        phase.0 = true;
        self.changed.notify_all();
        let hangs = Duration::from_secs(60);
        let waited = self.changed.wait_timeout_while(phase, hangs, |phase| !phase.1).unwrap();
        assert!(!waited.1.timed_out(), "the test hangs");
        self.forgotten.fetch_add(1, Relaxed);
    }
}

#[test]
fn an_open_waits_until_the_pager_has_forgotten() {
    let pager = &SlowToForget::default();
    with_cpus(|machine, memory| {
        let disk = memory.file_system(pager);
        let last = disk.file(1, 0).unwrap();
        last.write(0, &[9]).unwrap();
        let identity = last.identity();
        thread::scope(|scope| {
            scope.spawn(move || machine.on_cpu(Cpu(1), || drop(last)));
            let inside = pager.changed.wait_while(pager.phase.lock().unwrap(), |phase| !phase.0);
            drop(inside.unwrap());
            // The file is neither found nor created again.
            assert!(disk.find(1).is_none());
            let opens = [2, 3].map(|cpu| {
                scope.spawn(move || {
                    machine.on_cpu(Cpu(cpu), || {
                        let file = disk.file(1, 1).unwrap();
                        (pager.forgotten.load(Relaxed), content(&file)[0], file.identity(), file)
                    })
                })
            });
            thread::sleep(Duration::from_millis(20));
            assert!(opens.iter().all(|open| !open.is_finished()));
            pager.phase.lock().unwrap().1 = true;
            pager.changed.notify_all();
            let opened = opens.map(|open| open.join().unwrap());
            assert!(opened.iter().all(|(forgot, byte, ..)| (*forgot, *byte) == (1, 9)));
            assert_eq!(opened[0].2, opened[1].2, "two objects of one file");
            assert_ne!(opened[0].2, identity);
        });
    });
    assert_eq!(pager.forgotten.load(Relaxed), 2);
}

/// Threads open a file, increment a counter in it and close it. Any close may be the last, but no
/// increment is lost.
#[test]
fn opens_beside_last_closes_lose_nothing() {
    let files = MemoryFiles::new();
    files.put(1, &[0; 4 * PAGE as usize]);
    with_cpus(|machine, memory| {
        let disk = memory.file_system(&files);
        let times = rounds(400);
        thread::scope(|scope| {
            for cpu in 0..4_u16 {
                scope.spawn(move || {
                    machine.on_cpu(Cpu(cpu), || {
                        let at = u64::from(cpu) * PAGE;
                        for round in 0..times {
                            let file = disk.file(1, 4 * PAGE).unwrap();
                            let weak = file.downgrade();
                            let mut bytes = [0; 8];
                            file.read(at, &mut bytes).unwrap();
                            assert_eq!(u64::from_le_bytes(bytes), round, "a write was lost");
                            file.write(at, &(round + 1).to_le_bytes()).unwrap();
                            drop(file);
                            drop(weak.upgrade());
                        }
                    });
                });
            }
        });
        assert!(disk.find(1).is_none());
    });
    let content = files.content(1);
    for cpu in 0..4 {
        let at = cpu * PAGE as usize;
        let count = u64::from_le_bytes(content[at..at + 8].try_into().unwrap());
        assert_eq!(count, rounds(400));
    }
}
