//! Writes to shared memory that stop where they would wait for a swap device and continue later.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bindery::addr::{Order, VirtAddr};
use bindery::{
    Error, Memory, Object, PendingWrite, ReadPattern, Seals, SizeMode, Step, SwapOperation,
};
use bindery_hosted::{DelayedFiles, SwapFile};

use super::fixture::Swapping;
use super::interposed::{Interposed, Moment, interposed};
use super::pending_reads::{A, AT, LENGTH, P, PAGES, until_ready, with_shared};
use crate::support::{MIB, audit};

const PAGE: usize = 4096;

/// Writes in steps. Returns the result and the number of waits.
fn write<'m>(
    (swapping, device): (&Swapping<'_, 'm, A>, &SwapFile),
    object: &Object<'m, P>,
    (offset, from): (u64, &[u8]),
    polls: bool,
) -> (Result<usize, Error>, u64) {
    let mut write = PendingWrite::new(object, offset, from.len()).unwrap();
    let (mut ready, mut waits) = (None, 0);
    loop {
        match write.step(ready.take(), from) {
            Ok(Step::Blocked(wait)) => {
                assert_eq!(write.moved(), 0, "others see all of it or nothing");
                assert!(wait.is_for_storage());
                ready = Some(until_ready(swapping, device, wait, polls));
                waits += 1;
            }
            Ok(Step::Done) => return (Ok(write.moved()), waits),
            Err(error) => return (Err(error), waits),
        }
    }
}

#[test]
fn a_write_waits_before_its_first_byte() {
    for polls in [true, false] {
        with_shared(|swapping, device, object| {
            let from = vec![0x11; LENGTH - 100];
            let written = write((swapping, device), &object, (50, &from), polls);
            assert_eq!(written, (Ok(from.len()), PAGES));
            assert_eq!(device.counts().reads, PAGES);
            let mut into = vec![0; LENGTH];
            assert_eq!(object.read(0, &mut into), Ok(LENGTH));
            assert!(into[50..LENGTH - 50] == from);
            assert_eq!(into[..8], AT.to_le_bytes());
            audit(swapping.machine, swapping.memory, &[swapping.space]);
        });
    }
}

/// Pages that leave again, while the write waits for others, are waited for once more and not with
/// the changes locked.
#[test]
fn pages_that_leave_again_are_waited_for() {
    for times in [1, 3] {
        with_shared(|swapping, device, object| {
            let from = vec![0x44; LENGTH];
            let mut write = PendingWrite::new(&object, 0, LENGTH).unwrap();
            let (mut ready, mut waits) = (None, 0_u64);
            while let Step::Blocked(wait) = write.step(ready.take(), &from).unwrap() {
                ready = Some(until_ready(swapping, device, wait, true));
                waits += 1;
                // The last page of a round has come, and two others leave. The write holds the two
                // that it has waited for last.
                let round = waits.checked_sub(PAGES).filter(|after| after.is_multiple_of(2));
                if let Some(first) = round.filter(|first| *first < 2 * times) {
                    let at = AT + first * PAGE as u64;
                    swapping.served(device, || {
                        // Only pages that are mapped are paged out.
                        swapping.assert_filled(at, 2, AT + first);
                        swapping.page_out(at, 2);
                    });
                    assert_eq!(object.swapped_pages(), 3, "and the one that has just come");
                }
            }
            assert_eq!((write.moved(), waits), (LENGTH, PAGES + 2 * times));
            let mut into = vec![0; LENGTH];
            assert_eq!(object.read(0, &mut into), Ok(LENGTH));
            assert!(into == from);
            audit(swapping.machine, swapping.memory, &[swapping.space]);
        });
    }
}

#[test]
fn a_dropped_write_leaves_the_page_in_swap() {
    with_shared(|swapping, device, object| {
        let mut write = PendingWrite::new(&object, 0, 4).unwrap();
        let Ok(Step::Blocked(wait)) = write.step(None, b"text") else { panic!("a device") };
        drop(wait);
        drop(write);
        assert_eq!((device.waiting(), object.swapped_pages()), (0, PAGES));
        swapping.served(device, || swapping.assert_filled(AT, PAGES, AT));
    });
}

#[test]
fn pages_before_lost_content_are_written() {
    for (lost, polls) in [(0, true), (0, false), (5, true), (5, false)] {
        // Writes the same number of bytes as a blocking write.
        let in_way = |steps: bool| {
            let mut result = Ok(0);
            with_shared(|swapping, device, object| {
                let from = vec![0x22; LENGTH - 50];
                // The pages before the lost page are read successfully.
                swapping.served(device, || object.read(0, &mut vec![0; lost * PAGE])).unwrap();
                device.fail(|request| request.operation() == SwapOperation::Read);
                result = if steps {
                    let written = write((swapping, device), &object, (50, &from), polls);
                    assert_eq!(written.1, 1, "the page is not read twice");
                    written.0
                } else {
                    swapping.served(device, || object.write(50, &from))
                };
                device.fail(|_| false);
                if let Ok(moved) = result {
                    let mut into = vec![0; moved];
                    assert_eq!(object.read(50, &mut into), Ok(moved));
                    assert!(into == from[..moved]);
                }
                let (at, left) = (AT + (lost * PAGE) as u64, PAGES - lost as u64);
                swapping.served(device, || swapping.assert_filled(at, left, AT + lost as u64));
            });
            result
        };
        let expected = if lost == 0 { Err(Error::InputOutput) } else { Ok(lost * PAGE - 50) };
        assert_eq!(in_way(false), expected, "a write that blocks");
        assert_eq!(in_way(true), expected, "a write in steps");
    }
}

#[test]
fn seals_forbid_before_the_device_works() {
    with_shared(|swapping, device, object| {
        swapping.served(device, || swapping.space.munmap(VirtAddr(AT), LENGTH as u64)).unwrap();
        object.add_seals(Seals::GROW).unwrap();
        let from = vec![1; PAGE];
        // Only the page before the end is written.
        let written = write((swapping, device), &object, (LENGTH as u64 - 50, &from), true);
        assert_eq!(written, (Ok(50), 1));
        let written = write((swapping, device), &object, (LENGTH as u64, &from), true);
        assert_eq!(written, (Err(Error::SealForbids), 0));
        object.add_seals(Seals::WRITE).unwrap();
        let written = write((swapping, device), &object, (0, &from), true);
        assert_eq!(written, (Err(Error::SealForbids), 0));
        assert_eq!((device.counts().reads, object.swapped_pages()), (1, PAGES - 1));
    });
}

#[test]
fn a_signal_comes_before_the_device() {
    with_shared(|swapping, device, object| {
        swapping.machine.fatal_signal_after(Some(0));
        let written = write((swapping, device), &object, (0, &[1; 10]), true);
        swapping.machine.fatal_signal_after(None);
        assert_eq!(written, (Err(Error::Interrupted), 0));
        assert_eq!(device.counts().reads, 0);
        swapping.served(device, || swapping.assert_filled(AT, PAGES, AT));
    });
}

#[test]
fn a_source_that_stops_waits_for_later_pages() {
    with_shared(|swapping, device, object| {
        let from = vec![0x33; LENGTH];
        let mut write = PendingWrite::new(&object, 0, LENGTH).unwrap();
        let mut ready = None;
        while write.moved() < LENGTH {
            let mut room = 3 * PAGE / 2;
            let step = write.step_with(ready.take(), |done, to, length| {
                let count = length.min(room);
                room -= count;
                // SAFETY: the object owns the bytes.
                unsafe { to.as_ptr().copy_from(from[done..].as_ptr(), count) };
                count
            });
            match step.unwrap() {
                Step::Blocked(wait) => ready = Some(until_ready(swapping, device, wait, true)),
                // All remaining pages are swapped out between two steps; the steps wait for them
                // without holding a lock.
                Step::Done => {
                    swapping.served(device, || {
                        (0..8).for_each(|_| _ = swapping.memory.reclaim(64));
                    });
                    assert_eq!(object.swapped_pages(), PAGES);
                }
            }
        }
        let mut into = vec![0; LENGTH];
        swapping.served(device, || object.read(0, &mut into)).unwrap();
        assert!(into == from);
    });
}

#[test]
fn reclaim_leaves_the_last_page_of_a_write() {
    const FILE: usize = 41 * PAGE;
    for steps in [true, false] {
        let memory: &'static Memory<Interposed> = Box::leak(Box::new(interposed(32 * MIB).1));
        (1..=9).for_each(|order| memory.file_folio_policy().set(Order(order), SizeMode::Never));
        let pager: &'static DelayedFiles = Box::leak(Box::new(DelayedFiles::new()));
        pager.keep_reads(false);
        pager.files.put(1, &[1; FILE]);
        let mut file = memory.file(pager, 1, FILE as u64).unwrap();
        file.set_read_pattern(ReadPattern::Random);
        file.read(FILE as u64 - 1, &mut [0]).unwrap();
        let pieces = Arc::new(AtomicU64::new(0));
        let before = pieces.clone();
        // Between two pieces no lock excludes reclaim; the record of the change does.
        memory.platform().at(Moment::Signal, move || {
            if before.fetch_add(1, Relaxed) > 0 {
                // A page that was used is spared once.
                (0..4).for_each(|_| _ = memory.reclaim(64));
            }
        });
        let from = vec![2; FILE - 100];
        if steps {
            let mut write = PendingWrite::new(&file, 0, from.len()).unwrap();
            let step = write.step(None, &from);
            assert!(matches!(step, Ok(Step::Done)), "it waits after {} bytes", write.moved());
            assert_eq!(write.moved(), from.len());
        } else {
            assert_eq!(file.write(0, &from), Ok(from.len()));
        }
        assert_eq!(pieces.load(Relaxed), 3);
        assert_eq!(pager.log().len(), 1, "the last page is read once");
        // The page is reclaimed afterwards, like any clean page.
        file.sync(0, u64::MAX).unwrap();
        assert!(memory.reclaim(64).freed > 0);
    }
}
