//! Reads of files that stop where they would wait for the pager and continue later.

use std::thread;

use bindery::platform::Cpu;
use bindery::{Error, PagerError, PendingRead, ReadPattern, Step};

use super::content_steps::{
    File, Fixture, PAGES, RANGES, Result, SIZE, begin, blocked, bytes, ready, with_file, with_half,
};
use crate::support::objects::PAGE;

#[test]
fn stepped_and_blocking_reads_do_the_same() {
    let patterns = [ReadPattern::Random, ReadPattern::Unknown, ReadPattern::Sequential];
    for (pattern, (offset, length)) in patterns.iter().flat_map(|p| RANGES.map(|r| (*p, r))) {
        let in_way = |steps: bool| {
            with_file(|fixture, mut file| {
                file.set_read_pattern(pattern);
                let mut into = vec![0xee; length];
                let result = if steps {
                    fixture.read(&file, offset, &mut into)
                } else {
                    fixture.pager.keep_reads(false);
                    file.read(offset, &mut into)
                };
                let events = fixture.memory.events();
                (result, into, fixture.asked(), events.major_faults)
            })
        };
        let (stepped, blocking) = (in_way(true), in_way(false));
        assert_eq!(stepped.0, blocking.0, "{offset}, {length}");
        assert_eq!((&stepped.1, stepped.3), (&blocking.1, blocking.3));
        let pages = |asked: &Vec<(u64, u64)>| asked.iter().map(|(_, pages)| pages).sum::<u64>();
        assert_eq!(pages(&stepped.2), pages(&blocking.2), "{pattern:?}, {offset}, {length}");
        if pattern == ReadPattern::Random {
            assert_eq!(stepped.2, blocking.2);
        }
        let within = SIZE.saturating_sub(offset as usize).min(length);
        assert_eq!(stepped.0, Ok(within));
        assert!(within == 0 || stepped.1[..within] == bytes(SIZE)[offset as usize..][..within]);
    }
}

#[test]
fn a_position_beyond_all_files_is_refused() {
    with_file(|_, file| {
        for (offset, length) in [(u64::MAX, 1), (i64::MAX as u64, 1)] {
            assert_eq!(PendingRead::new(&file, offset, length).err(), Some(Error::Invalid));
        }
    });
}

#[test]
fn a_failed_read_ends_with_the_bytes_before() {
    for before in [0, 1, 3] {
        with_half(|fixture, file| {
            let mut into = vec![0; SIZE];
            let mut read = PendingRead::new(&file, 0, SIZE).unwrap();
            let mut last = None;
            for page in 0..before {
                let mut wait = blocked(read.step(last.take(), &mut into));
                assert!(wait.is_for_storage());
                begin(&mut wait);
                fixture.answer(2 * page, Ok(()));
                last = Some(ready(&mut wait));
            }
            let mut wait = blocked(read.step(last, &mut into));
            begin(&mut wait);
            fixture.answer(2 * before, Err(PagerError::InputOutput));
            let error = ready(&mut wait);
            let end = read.step(Some(error), &mut into).map(drop);
            assert_eq!(end, if before == 0 { Err(Error::InputOutput) } else { Ok(()) });
            assert_eq!(read.moved() as u64, 2 * before * PAGE);
            // The read is over, so it sends no further request to the pager.
            assert!(matches!(read.step(None, &mut into), Ok(Step::Done)));
            assert_eq!(fixture.asked_even() as u64, before + 1);
            // The next call continues reading.
            assert_eq!(fixture.read(&file, 2 * before * PAGE, &mut into[..10]), Ok(10));
        });
    }
}

#[test]
fn a_dropped_read_leaves_its_request_to_others() {
    for polls in [false, true] {
        with_half(|fixture, file| {
            let mut into = vec![0; SIZE];
            let mut wait = blocked(PendingRead::new(&file, 0, SIZE).unwrap().step(None, &mut into));
            if polls {
                begin(&mut wait);
            }
            drop(wait);
            assert_eq!(fixture.asked_even(), usize::from(polls));
            assert_eq!(fixture.read(&file, 0, &mut into), Ok(SIZE));
            assert!(into == bytes(SIZE));
            assert_eq!(fixture.asked().len() as u64, PAGES, "each page was read once");
        });
    }
}

/// Makes a read wait for its fifth page, applies a change and continues the read. Returns the
/// number of bytes read, the bytes, and the number of even pages requested from the pager.
fn read_with(change: impl for<'m> FnOnce(&Fixture<'m>, &File<'m>)) -> (usize, Vec<u8>, usize) {
    with_half(|fixture, file| {
        let mut into = vec![0xee; SIZE];
        let mut read = PendingRead::new(&file, 0, SIZE).unwrap();
        let mut last = None;
        for _ in 0..2 {
            last = Some(fixture.until_ready(blocked(read.step(last, &mut into))));
        }
        let mut wait = blocked(read.step(last, &mut into));
        assert_eq!(read.moved(), READ);
        begin(&mut wait);
        change(fixture, &file);
        // A thread completes the wait of a canceled read.
        let mut first = Some(fixture.somehow(wait));
        fixture.finish(|ready| read.step(first.take().or(ready), &mut into)).unwrap();
        (read.moved(), into, fixture.asked_even())
    })
}

/// The bytes that are read before the change.
const READ: usize = 4 * PAGE as usize;

#[test]
fn a_truncation_between_steps_ends_a_read() {
    let pages = PAGE as usize;
    // The new end is in the awaited page, in a page already read, or in a later page.
    for (size, moved) in [(READ + 5, READ + 5), (10, READ), (7 * pages, 7 * pages)] {
        let (count, into, _) = read_with(|_, file| file.set_size(size as u64).unwrap());
        assert_eq!(count, moved, "{size}");
        assert!(into[..count] == bytes(SIZE)[..count], "{size}");
        assert!(into[count..].iter().all(|byte| *byte == 0xee));
    }
}

#[test]
fn a_file_cut_and_grown_reads_as_zeroes() {
    let (count, into, _) = read_with(|_, file| {
        file.set_size(10).unwrap();
        file.set_size(SIZE as u64).unwrap();
    });
    assert_eq!(count, SIZE);
    assert!(into[..READ] == bytes(SIZE)[..READ]);
    assert!(into[READ..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_write_between_steps_is_read() {
    let (count, into, asked) = read_with(|_, file| {
        assert_eq!(file.write(6 * PAGE, &[7; PAGE as usize]), Ok(PAGE as usize));
    });
    assert_eq!(count, SIZE);
    assert!(into[6 * PAGE as usize..][..PAGE as usize].iter().all(|byte| *byte == 7));
    assert_eq!(asked as u64, PAGES / 2 - 1, "the page that was written whole is not read");
}

#[test]
fn a_copy_that_stops_goes_on() {
    with_half(|fixture, file| {
        // The target accepts 3,000 bytes at a time.
        let (mut into, mut room) = (vec![0; SIZE], 3000);
        let mut read = PendingRead::new(&file, 0, SIZE).unwrap();
        let (mut last, mut waits, mut stops) = (None, 0, 0);
        while read.moved() < SIZE {
            let before = read.moved();
            let step = read.step_with(last.take(), |done, from, length| {
                let count = length.min(room);
                room -= count;
                // SAFETY: the object owns the bytes.
                let bytes = unsafe { std::slice::from_raw_parts(from.as_ptr(), count) };
                into[done..done + count].copy_from_slice(bytes);
                count
            });
            match step.unwrap() {
                Step::Blocked(wait) => {
                    (last, waits) = (Some(fixture.until_ready(wait)), waits + 1);
                }
                Step::Done => {
                    assert!(read.moved() > before || room == 0);
                    (room, stops) = (3000, stops + 1);
                }
            }
        }
        assert!(into == bytes(SIZE));
        assert_eq!((waits, stops), (PAGES as usize / 2, SIZE.div_ceil(3000)));
    });
}

#[test]
fn a_thread_waits_in_place_of_the_task() {
    with_half(|fixture, file| {
        let mut into = vec![0; SIZE];
        let mut read = PendingRead::new(&file, 0, SIZE).unwrap();
        let mut last = None;
        while let Step::Blocked(wait) = read.step(last.take(), &mut into).unwrap() {
            last = Some(fixture.in_thread(wait));
        }
        assert!(into == bytes(SIZE));
        assert_eq!(fixture.asked().len() as u64, PAGES);
    });
}

#[test]
fn another_thread_may_read_the_same_page() {
    with_file(|fixture, file| {
        let mut into = vec![0; PAGE as usize];
        let mut read = PendingRead::new(&file, 0, into.len()).unwrap();
        let wait = thread::scope(|scope| {
            let mut wait = blocked(read.step(None, &mut into));
            let other = scope.spawn(|| {
                let mut byte = [0];
                fixture.machine.on_cpu(Cpu(1), || file.read(7, &mut byte)).map(|_| byte)
            });
            let kept = fixture.pager.take(|asked| asked.first == 0);
            begin(&mut wait);
            assert_eq!(fixture.asked().len(), 1, "the other thread's read is waited for");
            fixture.pager.answer(fixture.memory, kept, Ok(()));
            assert_eq!(other.join().unwrap(), Ok([bytes(8)[7]]));
            wait
        });
        let ready = fixture.until_ready(wait);
        assert!(matches!(read.step(Some(ready), &mut into), Ok(Step::Done)));
        assert!(into == bytes(PAGE as usize));
    });
}

#[test]
fn reads_without_memory_end_and_leave_the_file() {
    let mut done = false;
    for point in 0..200 {
        if done {
            return;
        }
        with_file(|fixture, file| {
            let Fixture { memory, .. } = fixture;
            let mut into = vec![0; 3 * PAGE as usize];
            memory.fail_allocations_after(Some(point));
            let mut run = || -> Result<()> {
                let mut read = PendingRead::new(&file, 0, into.len())?;
                let mut last = None;
                while let Step::Blocked(wait) = read.step(last.take(), &mut into)? {
                    last = Some(fixture.somehow(wait));
                }
                if read.moved() < into.len() { Err(Error::OutOfMemory) } else { Ok(()) }
            };
            let result = run();
            memory.fail_allocations_after(None);
            assert!(matches!(result, Ok(()) | Err(Error::OutOfMemory)), "{result:?}");
            done = result.is_ok();
            // With memory, the read succeeds.
            assert_eq!(fixture.read(&file, 0, &mut into), Ok(into.len()));
            assert!(into == bytes(into.len()));
        });
    }
    assert!(done, "it never had enough memory");
}
