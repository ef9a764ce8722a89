//! Writes to files that stop where they would wait for the pager and continue later.

use std::thread;

use bindery::platform::Cpu;
use bindery::{Accounting, Error, PagerError, PendingWrite, Sealing, Seals, Step};
use bindery_hosted::Config;

use super::content_steps::{
    A, File, Fixture, PAGES, RANGES, Result, SIZE, begin, blocked, bytes, ready, with_file,
};
use crate::support::objects::PAGE;
use crate::support::{MIB, audit, memory_with};

const PAGE_BYTES: usize = PAGE as usize;

#[test]
fn stepped_and_blocking_writes_do_the_same() {
    let far = (SIZE as u64 + 9 * PAGE + 3, 300);
    for (offset, length) in RANGES.into_iter().chain([far, (5, 0)]) {
        let in_way = |steps: bool| {
            with_file(|fixture, file| {
                let from = vec![0x5a; length];
                let result = if steps {
                    fixture.write(&file, offset, &from)
                } else {
                    fixture.pager.keep_reads(false);
                    file.write(offset, &from)
                };
                let asked = fixture.asked();
                fixture.pager.keep_reads(false);
                file.sync(0, u64::MAX).unwrap();
                (result, file.size(), asked, fixture.pager.files.content(1))
            })
        };
        let (stepped, blocking) = (in_way(true), in_way(false));
        assert!(stepped == blocking, "{offset}, {length}: {:?}, {:?}", stepped.0, blocking.0);
        assert_eq!(stepped.0, Ok(length));
        let mut pages = stepped.2.clone();
        pages.dedup();
        assert_eq!(pages, stepped.2, "a page was asked for twice");
    }
}

#[test]
fn a_position_beyond_all_files_is_refused() {
    with_file(|_, file| {
        for (offset, length) in [(u64::MAX, 1), (i64::MAX as u64, 1)] {
            assert_eq!(PendingWrite::new(&file, offset, length).err(), Some(Error::Invalid));
        }
    });
}

/// The start of a write whose first and last page must be read from the pager.
const AT: u64 = 10;
const LENGTH: usize = 2 * PAGE_BYTES;

#[test]
fn a_failed_read_writes_nothing() {
    for failing in [0, 2] {
        with_file(|fixture, file| {
            let mut write = PendingWrite::new(&file, AT, LENGTH).unwrap();
            let from = [1; LENGTH];
            let mut last = None;
            for page in [0, 2] {
                let mut wait = blocked(write.step(last.take(), &from));
                assert!(wait.is_for_storage());
                begin(&mut wait);
                let fails = page == failing;
                fixture.answer(page, if fails { Err(PagerError::InputOutput) } else { Ok(()) });
                last = Some(ready(&mut wait));
                if fails {
                    break;
                }
            }
            assert_eq!(write.step(last, &from).map(drop), Err(Error::InputOutput));
            assert_eq!(write.moved(), 0);
            assert!(matches!(write.step(None, &from), Ok(Step::Done)), "it is over");
            let mut into = vec![0; SIZE];
            assert_eq!(fixture.read(&file, 0, &mut into), Ok(SIZE));
            assert!(into == bytes(SIZE));
        });
    }
}

#[test]
fn a_write_dropped_at_a_wait_writes_nothing() {
    for (waits, polls) in [(0, false), (0, true), (1, false), (1, true)] {
        with_file(|fixture, file| {
            let from = [9; LENGTH];
            let mut write = PendingWrite::new(&file, AT, LENGTH).unwrap();
            let mut last = None;
            for _ in 0..waits {
                last = Some(fixture.until_ready(blocked(write.step(last.take(), &from))));
            }
            let mut wait = blocked(write.step(last, &from));
            if polls {
                begin(&mut wait);
            }
            drop((wait, write));
            assert_eq!(fixture.asked().len(), waits + usize::from(polls));
            let mut into = vec![0; SIZE];
            assert_eq!(fixture.read(&file, 0, &mut into), Ok(SIZE));
            assert!(into == bytes(SIZE), "nothing was written");
            let pages: u64 = fixture.asked().iter().map(|(_, pages)| pages).sum();
            assert_eq!(pages, PAGES, "each page was read once");
        });
    }
}

#[test]
fn a_lost_end_of_a_wait_asks_again() {
    with_file(|fixture, file| {
        let mut write = PendingWrite::new(&file, AT, 4).unwrap();
        // The answer never arrives while the write polls.
        for _ in 0..3 {
            begin(&mut blocked(write.step(None, b"text")));
        }
        let mut wait = blocked(write.step(None, b"text"));
        begin(&mut wait);
        assert_eq!(fixture.asked(), [(0, 1)]);
        fixture.answer(0, Ok(()));
        // The next poll consumes the answer.
        drop(wait);
        let _ = ready(&mut blocked(write.step(None, b"text")));
        assert_eq!(fixture.asked(), [(0, 1)]);
        assert!(matches!(write.step(None, b"text"), Ok(Step::Done)));
        assert_eq!(write.moved(), 4);
    });
}

/// Makes a write wait for its first page, applies a change and continues the write. Returns the
/// content.
fn write_after(change: impl for<'m> FnOnce(&Fixture<'m>, &File<'m>)) -> Vec<u8> {
    with_file(|fixture, file| {
        let from = [0x77; LENGTH];
        let mut write = PendingWrite::new(&file, AT, LENGTH).unwrap();
        let mut wait = blocked(write.step(None, &from));
        begin(&mut wait);
        change(fixture, &file);
        let mut first = Some(fixture.somehow(wait));
        fixture.finish(|ready| write.step(first.take().or(ready), &from)).unwrap();
        assert_eq!(write.moved(), LENGTH);
        let mut into = vec![0; file.size() as usize];
        assert_eq!(fixture.read(&file, 0, &mut into), Ok(into.len()));
        into
    })
}

/// The content after the write.
fn with_write(mut content: Vec<u8>) -> Vec<u8> {
    let end = content.len().max(AT as usize + LENGTH);
    content.resize(end, 0);
    content[AT as usize..][..LENGTH].fill(0x77);
    content
}

#[test]
fn a_truncation_between_steps_precedes_a_write() {
    for size in [0, 5, PAGE_BYTES + 3, 2 * PAGE_BYTES + 5, 5 * PAGE_BYTES] {
        let content = write_after(|_, file| file.set_size(size as u64).unwrap());
        assert!(content == with_write(bytes(SIZE)[..size].to_vec()), "{size}");
    }
}

#[test]
fn another_write_between_steps_precedes_a_write() {
    for (offset, length) in [(0, 3 * PAGE_BYTES), (5, 100), (2 * PAGE, 300)] {
        let content = write_after(|fixture, file| {
            fixture.pager.keep_reads(false);
            // The second call waits for the page that both need.
            thread::scope(|scope| {
                let from = vec![0x11; length];
                let machine = fixture.machine;
                let other =
                    scope.spawn(move || machine.on_cpu(Cpu(1), || file.write(offset, &from)));
                while !other.is_finished() {
                    fixture.pager.answer_all(fixture.memory);
                    thread::yield_now();
                }
                assert_eq!(other.join().unwrap(), Ok(length));
            });
            fixture.pager.keep_reads(true);
        });
        let mut expected = bytes(SIZE);
        expected[offset as usize..][..length].fill(0x11);
        assert!(content == with_write(expected), "{offset}");
    }
}

#[test]
fn a_source_that_stops_goes_on() {
    with_file(|fixture, file| {
        let from: Vec<_> = (0..3 * PAGE_BYTES).map(|at| at as u8 | 1).collect();
        let mut write = PendingWrite::new(&file, 50, from.len()).unwrap();
        let (mut written, mut last) = (Vec::new(), None);
        while write.moved() < from.len() {
            let mut room = 5000;
            let step = write.step_with(last.take(), |done, to, length| {
                let count = length.min(room);
                room -= count;
                written.push((done, count));
                // SAFETY: the object owns the bytes.
                unsafe { to.as_ptr().copy_from(from[done..].as_ptr(), count) };
                count
            });
            if let Step::Blocked(wait) = step.unwrap() {
                last = Some(fixture.until_ready(wait));
            }
        }
        // The source may be asked twice for the bytes of a page that had to be read.
        let end = written.iter().fold(0, |at, &(done, count)| {
            assert!(done <= at, "a gap");
            at.max(done + count)
        });
        assert_eq!(end, from.len());
        let mut into = vec![0; SIZE];
        assert_eq!(fixture.read(&file, 0, &mut into), Ok(SIZE));
        let mut expected = bytes(SIZE);
        expected[50..][..from.len()].copy_from_slice(&from);
        assert!(into == expected);
    });
}

#[test]
fn a_write_waits_for_pages_being_stored() {
    with_file(|fixture, file| {
        fixture.write(&file, 0, &[1; PAGE_BYTES]).unwrap();
        fixture.pager.keep_writes(true);
        let mut sync = file.begin_sync(0, u64::MAX);
        let mut stored = blocked(sync.step());
        begin(&mut stored);
        let mut write = PendingWrite::new(&file, 0, PAGE_BYTES).unwrap();
        let from = [2; PAGE_BYTES];
        let mut wait = blocked(write.step(None, &from));
        begin(&mut wait);
        // While the write waits, it blocks no other access to the page.
        let mut byte = [0];
        assert_eq!(file.read(0, &mut byte), Ok(1));
        assert_eq!(byte, [1]);
        let ready = fixture.until_ready(wait);
        assert!(matches!(write.step(Some(ready), &from), Ok(Step::Done)));
        assert_eq!(fixture.pager.files.content(1)[0], 1);
        assert_eq!(write.moved(), PAGE_BYTES);
        drop(fixture.until_ready(stored));
        assert!(matches!(sync.step(), Ok(Step::Done)));
        fixture.pager.keep_writes(false);
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(fixture.pager.files.content(1)[0], 2);
    });
}

#[test]
fn a_thread_waits_in_place_of_the_task() {
    with_file(|fixture, file| {
        let mut write = PendingWrite::new(&file, AT, LENGTH).unwrap();
        let from = [3; LENGTH];
        let mut last = None;
        while let Step::Blocked(wait) = write.step(last.take(), &from).unwrap() {
            last = Some(fixture.in_thread(wait));
        }
        assert_eq!((write.moved(), fixture.asked()), (LENGTH, vec![(0, 1), (2, 1)]));
    });
}

#[test]
fn writes_without_memory_end_and_leave_the_file() {
    let mut done = false;
    for point in 0..200 {
        if done {
            return;
        }
        with_file(|fixture, file| {
            let from = [3; LENGTH];
            fixture.memory.fail_allocations_after(Some(point));
            let mut moved = 0;
            let mut run = || -> Result<()> {
                let mut write = PendingWrite::new(&file, AT, LENGTH)?;
                let mut last = None;
                while let Step::Blocked(wait) = write.step(last.take(), &from)? {
                    last = Some(fixture.somehow(wait));
                }
                moved = write.moved();
                Ok(())
            };
            let result = run();
            fixture.memory.fail_allocations_after(None);
            assert!(matches!(result, Ok(()) | Err(Error::OutOfMemory)), "{result:?}");
            done = moved == LENGTH;
            let mut expected = bytes(SIZE);
            expected[AT as usize..][..moved].fill(3);
            let mut into = vec![0; SIZE];
            assert_eq!(fixture.read(&file, 0, &mut into), Ok(SIZE));
            assert!(into == expected, "{point}");
            // With memory, the write succeeds.
            assert_eq!(fixture.write(&file, AT, &from), Ok(LENGTH));
        });
    }
    assert!(done, "it never had enough memory");
}

#[test]
fn seals_of_other_steps_are_obeyed() {
    let (machine, memory) = memory_with::<A>(Config { memory: 32 * MIB, ..Config::default() });
    let size = 2 * PAGE + 7;
    for (seals, expected) in [
        (Seals::WRITE, Err(Error::SealForbids)),
        (Seals::FUTURE_WRITE, Err(Error::SealForbids)),
        (Seals::GROW, Ok(2 * PAGE_BYTES - 10)),
        (Seals::SHRINK, Ok(LENGTH)),
    ] {
        let memfd = memory.shared_memory(size, Sealing::Allowed, Accounting::PerPage).unwrap();
        let mut write = PendingWrite::new(&memfd, AT, LENGTH).unwrap();
        memfd.add_seals(seals).unwrap();
        let result = write.step(None, &[1; LENGTH]).map(|step| {
            assert!(matches!(step, Step::Done));
            write.moved()
        });
        assert_eq!(result, expected, "{seals:?}");
    }
    audit(&machine, &memory, &[]);
}

#[test]
fn a_fatal_signal_ends_a_write() {
    with_file(|fixture, file| {
        fixture.pager.keep_reads(false);
        fixture.machine.fatal_signal_after(Some(0));
        let mut write = PendingWrite::new(&file, 0, 40 * PAGE_BYTES).unwrap();
        let from = vec![1; 40 * PAGE_BYTES];
        assert_eq!(write.step(None, &from).map(drop), Err(Error::Interrupted));
        // One piece of 64 KiB is written before the second signal check.
        fixture.machine.fatal_signal_after(Some(1));
        let mut write = PendingWrite::new(&file, 0, from.len()).unwrap();
        assert!(matches!(write.step(None, &from), Ok(Step::Done)));
        assert_eq!(write.moved(), 64 << 10);
        fixture.machine.fatal_signal_after(None);
    });
}
