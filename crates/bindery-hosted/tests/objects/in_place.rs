//! Objects whose pages are read and written in place, in steps that may stop early.

use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;

use bindery::{Error, Object};
use bindery_hosted::{Machine, MemoryFiles};

use crate::support::objects::{Failing, PAGE, content, in_memory, memfd, use_object_order};

type Arch = bindery::arch::X86_64<4>;

/// The result of a read: the return value, the bytes, and for each step the bytes so far and the
/// requested number.
type Outcome = (Result<usize, Error>, Vec<u8>, Vec<(usize, usize)>);

/// Reads into a vector until there are `limit` bytes.
fn read_up_to(
    object: &Object<'_, Machine<Arch>>,
    offset: u64,
    length: usize,
    limit: usize,
) -> Outcome {
    let (mut bytes, mut steps) = (Vec::new(), Vec::new());
    let result = object.read_with(offset, length, |done, from: NonNull<u8>, length| {
        steps.push((done, length));
        bytes.truncate(done);
        let count = length.min(limit - done);
        // SAFETY: the object owns the bytes, and no thread writes them during the call.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(from.as_ptr(), count) });
        count
    });
    (result, bytes, steps)
}

/// Writes bytes, but supplies only the first `limit`.
fn write_up_to(
    object: &Object<'_, Machine<Arch>>,
    offset: u64,
    bytes: &[u8],
    limit: usize,
) -> Result<usize, Error> {
    object.write_with(offset, bytes.len(), |done, to: NonNull<u8>, length| {
        let count = length.min(limit - done);
        // SAFETY: the object owns the destination, and no other thread uses it during the call.
        unsafe { to.as_ptr().copy_from_nonoverlapping(bytes[done..].as_ptr(), count) };
        count
    })
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 7 + at / 251) as u8 | 1).collect()
}

#[test]
fn reads_in_place_have_bounded_steps() {
    in_memory(|memory, _| {
        for order in [0, 4, 9] {
            use_object_order(memory, order);
            let object = memfd(memory, 0);
            let bytes = pattern(600 << 10);
            object.write(77, &bytes).unwrap();
            let (result, read, steps) = read_up_to(&object, 80, bytes.len(), usize::MAX);
            assert_eq!(result, Ok(bytes.len() - 3), "up to the end");
            assert!(read == bytes[3..]);
            assert!(steps.iter().all(|(_, length)| *length <= 64 << 10));
            let ends = steps.iter().map(|(done, length)| done + length);
            assert!(steps.iter().skip(1).map(|(done, _)| *done).eq(ends.take(steps.len() - 1)));
            assert_eq!(read_up_to(&object, 1 << 30, 10, 0).0, Ok(0), "nothing is behind the end");
            assert_eq!(read_up_to(&object, u64::MAX, 10, 0).0, Err(Error::Invalid));
        }
    });
}

#[test]
fn a_reading_ends_where_a_step_stops() {
    in_memory(|memory, _| {
        let object = memfd(memory, 0);
        let bytes = pattern(200_000);
        object.write(0, &bytes).unwrap();
        for limit in [0, 1, 4095, 4096, 4097, 65_536, 65_537, 199_999] {
            let (result, read, steps) = read_up_to(&object, 0, bytes.len(), limit);
            assert_eq!(result, Ok(limit));
            assert!(read == bytes[..limit]);
            let (last, length) = *steps.last().unwrap();
            assert!(last <= limit && last + length >= limit);
        }
    });
}

#[test]
fn holes_read_in_place_take_no_memory() {
    in_memory(|memory, audit| {
        let object = memfd(memory, 100 * PAGE);
        object.write(50 * PAGE + 10, b"x").unwrap();
        let (result, read, _) = read_up_to(&object, 5, 100 * PAGE as usize, usize::MAX);
        assert_eq!(result, Ok(100 * PAGE as usize - 5));
        assert_eq!(read.iter().position(|byte| *byte != 0), Some(50 * PAGE as usize + 5));
        assert_eq!((object.resident_pages(), audit().object_pages), (1, 1));
    });
}

#[test]
fn a_stopped_write_leaves_its_beginning_and_zeroes() {
    for order in [0, 2, 4] {
        in_memory(|memory, audit| {
            use_object_order(memory, order);
            let bytes = pattern(40 * PAGE as usize);
            for at in [0, 10] {
                for limit in [1, 4095, 4096, 4097, 5 * 4096, 65_536, 100_001] {
                    let object = memfd(memory, 0);
                    assert_eq!(write_up_to(&object, at, &bytes, limit), Ok(limit));
                    assert_eq!(object.size(), at + limit as u64);
                    assert!(content(&object)[at as usize..] == bytes[..limit]);
                    // The rest was never passed to the step, so it reads as zeroes.
                    object.set_size(at + bytes.len() as u64).unwrap();
                    assert!(content(&object)[at as usize + limit..].iter().all(|byte| *byte == 0));
                    // Writes the rest, as a kernel continues after a fault.
                    let rest = write_up_to(&object, at + limit as u64, &bytes[limit..], usize::MAX);
                    assert_eq!(rest, Ok(bytes.len() - limit));
                    assert!(content(&object)[at as usize..] == bytes[..]);
                    audit();
                }
            }
        });
    }
}

#[test]
fn a_write_that_stops_at_once_changes_nothing() {
    in_memory(|memory, audit| {
        for order in [0, 4] {
            use_object_order(memory, order);
            let object = memfd(memory, 10);
            let (free, bytes) = (memory.free_frame_count(), pattern(20 * PAGE as usize));
            assert_eq!(write_up_to(&object, 16 * PAGE, &bytes, 0), Ok(0));
            assert_eq!((object.size(), object.resident_pages()), (10, 0));
            memory.trim();
            assert_eq!(memory.free_frame_count(), free);
            assert_eq!(write_up_to(&object, 0, &[], 0), Ok(0));
            audit();
        }
    });
}

#[test]
fn a_stopped_write_keeps_the_pagers_content() {
    let files = MemoryFiles::new();
    let old = vec![2; 40 * PAGE as usize];
    for (number, limit) in [5 * 4096, 5 * 4096 + 1, 65_535, 100_001].into_iter().enumerate() {
        let file = number as u64;
        files.put(file, &old);
        in_memory(|memory, audit| {
            use_object_order(memory, 3);
            let object = memory.file(&files, file, old.len() as u64).unwrap();
            let bytes = pattern(32 * PAGE as usize);
            assert_eq!(write_up_to(&object, PAGE, &bytes, limit), Ok(limit));
            let mut expected = old.clone();
            expected[PAGE as usize..][..limit].copy_from_slice(&bytes[..limit]);
            assert!(content(&object) == expected);
            object.sync(0, u64::MAX).unwrap();
            assert!(files.content(file) == expected);
            audit();
        });
    }
}

#[test]
fn a_failing_pager_ends_a_read_first() {
    let pager = Failing::new();
    pager.files.put(1, &[5; 32 * PAGE as usize]);
    in_memory(|memory, _| {
        let file = memory.file(&pager, 1, 32 * PAGE).unwrap();
        pager.reads_left.store(0, Relaxed);
        let (result, _, steps) = read_up_to(&file, 0, 10 * PAGE as usize, usize::MAX);
        assert_eq!((result, steps.len()), (Err(Error::InputOutput), 0));
        pager.never();
    });
}

#[test]
fn a_refused_write_takes_no_step() {
    in_memory(|memory, _| {
        let object = memfd(memory, 10);
        object.add_seals(bindery::Seals::WRITE).unwrap();
        let mut steps = 0;
        let refused = object.write_with(0, 10, |_, _, length| {
            steps += 1;
            length
        });
        assert_eq!((refused, steps), (Err(Error::SealForbids), 0));
    });
}
