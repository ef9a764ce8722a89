//! Reclaim of file pages concurrent with calls and programs that use them.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::thread;

use bindery::addr::{Frame, VirtAddr};
use bindery::platform::Cpu;
use bindery::testing::{ObjectFolio, Spare, frame_of_page, reclaim_frame, reclaim_page};
use bindery::{AddressSpace, Object, Sharing};
use bindery_hosted::{Config, Machine, MemoryFiles, Program};

use super::held_pager::{HeldFiles, Io};
use super::reclaim::{PAGES, X, at, bytes, reclaim, word};
use crate::support::kernel::{Finished, rounds};
use crate::support::objects::{Chance, PAGE, content, use_object_order};
use crate::support::objects_fixture::{AT, map};
use crate::support::{MIB, audit, memory_with, options};

/// Runs `scenario` with a file whose pager can be held, on a machine with three CPUs.
fn with_held_file(scenario: impl FnOnce(&Machine<X>, &HeldFiles, &Object<'_, Machine<X>>)) {
    let (machine, memory) =
        memory_with::<X>(Config { memory: 64 * MIB, cpus: 3, ..Config::default() });
    let pager = HeldFiles::new();
    pager.files.put(1, &bytes());
    let file = memory.file(&pager, 1, PAGES * PAGE).unwrap();
    scenario(&machine, &pager, &file);
    drop(file);
    audit(&machine, &memory, &[]);
}

/// The page at which the pager is held.
const SLOW: u64 = 5;

/// Runs `slow` on another CPU, holds the pager in it, and runs `meanwhile`.
fn hold(
    machine: &Machine<X>,
    pager: &HeldFiles,
    io: Io,
    slow: impl FnOnce() + Send,
    meanwhile: impl FnOnce(),
) {
    pager.hold_next(io, SLOW);
    thread::scope(|scope| {
        let slow = scope.spawn(|| machine.on_cpu(Cpu(1), slow));
        pager.wait_until_held();
        meanwhile();
        pager.release();
        slow.join().unwrap();
    });
}

#[test]
fn a_page_written_during_its_read_stays() {
    with_held_file(|machine, pager, file| {
        let read = || {
            let mut byte = [0];
            assert_eq!(file.read(SLOW * PAGE, &mut byte), Ok(1));
            assert_eq!(byte, [77], "the page is older than what was written and saved");
        };
        hold(machine, pager, Io::Read, read, || {
            assert_eq!(file.write(SLOW * PAGE, &[77; PAGE as usize]), Ok(PAGE as usize));
            file.sync(0, u64::MAX).unwrap();
            assert_eq!(reclaim(file, SLOW), ObjectFolio::Busy);
        });
        assert_eq!(reclaim(file, SLOW), ObjectFolio::Freed(1));
    });
}

#[test]
fn a_page_stays_while_it_is_being_saved() {
    with_held_file(|machine, pager, file| {
        file.write(SLOW * PAGE, &[77; PAGE as usize]).unwrap();
        let save = || file.sync(0, u64::MAX).unwrap();
        hold(machine, pager, Io::Write, save, || {
            assert_eq!(reclaim(file, SLOW), ObjectFolio::Busy);
        });
        assert_eq!(reclaim(file, SLOW), ObjectFolio::Freed(1));
        assert_eq!(content(file)[(SLOW * PAGE) as usize], 77);
    });
}

#[test]
fn both_ends_of_a_fetching_write_stay() {
    with_held_file(|machine, pager, file| {
        let write = || {
            let bytes = vec![50; 3 * PAGE as usize];
            assert_eq!(file.write((SLOW - 3) * PAGE + 1, &bytes), Ok(bytes.len()));
        };
        hold(machine, pager, Io::Read, write, || {
            assert_eq!(reclaim(file, SLOW - 3), ObjectFolio::Busy);
        });
        let content = content(file);
        assert_eq!(content[((SLOW - 3) * PAGE) as usize], (SLOW - 2) as u8);
        assert_eq!(content[(SLOW * PAGE) as usize + 1], SLOW as u8 + 1);
    });
}

#[test]
fn programs_and_calls_agree_during_reclaim() {
    const CALLS: u64 = 8;
    let files = MemoryFiles::new();
    files.put(1, &bytes());
    let (machine, memory) =
        memory_with::<X>(Config { memory: 64 * MIB, cpus: 5, ..Config::default() });
    use_object_order(&memory, 2);
    let file = memory.file(&files, 1, PAGES * PAGE).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
    let (over, freed) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let (machine, space, file) = (&machine, &space, &file);
        let (over, freed) = (&over, &freed);
        let _finished = Finished(over);
        // Each word has one writer.
        let writers = [(1, 0), (2, 8)].map(|(cpu, place)| {
            scope.spawn(move || {
                machine.on_cpu(Cpu(cpu), || {
                    let program = Program::new(machine, space);
                    let mut chance = Chance::new(u64::from(cpu), (AT, PAGES * PAGE));
                    let mut last = [None; PAGES as usize];
                    let most = rounds(6_000);
                    // Also continues until the reclaimer has run, which may be late on a busy
                    // machine.
                    let enough = |round| round >= most && freed.load(Relaxed) > 0;
                    for round in (0..100 * most).take_while(|round| !enough(*round)) {
                        let page = chance.below(PAGES);
                        let place = page * PAGE + place;
                        if let Some(last) = last[page as usize] {
                            assert_eq!(program.load(VirtAddr(AT + place)), Ok(last));
                        }
                        if round % CALLS == 0 {
                            file.write(place, &round.to_le_bytes()).unwrap();
                        } else {
                            program.store(VirtAddr(AT + place), round).unwrap();
                        }
                        last[page as usize] = Some(round);
                    }
                });
            })
        });
        scope.spawn(move || {
            machine.on_cpu(Cpu(3), || {
                while !over.load(Relaxed) {
                    file.sync(0, u64::MAX).unwrap();
                }
            });
        });
        scope.spawn(move || {
            machine.on_cpu(Cpu(4), || {
                while !over.load(Relaxed) {
                    for page in 0..PAGES {
                        let third = freed.load(Relaxed).is_multiple_of(3);
                        let spare = if third { Spare::Nothing } else { Spare::Used };
                        if let Some(ObjectFolio::Freed(pages)) = reclaim_page(file, page, spare) {
                            freed.fetch_add(u64::from(pages), Relaxed);
                        }
                    }
                }
            });
        });
        for writer in writers {
            writer.join().unwrap();
        }
    });
    assert!(freed.into_inner() > 0, "nothing was reclaimed");
    audit(&machine, &memory, &[&space]);
}

#[test]
fn a_file_is_cut_and_dropped_during_reclaim() {
    let files = MemoryFiles::new();
    files.put(1, &bytes());
    let (machine, memory) =
        memory_with::<X>(Config { memory: 64 * MIB, cpus: 2, ..Config::default() });
    let (over, seen) = (AtomicBool::new(false), AtomicU32::new(0));
    let freed = AtomicU64::new(0);
    thread::scope(|scope| {
        let (machine, memory, over, seen) = (&machine, &memory, &over, &seen);
        let freed = &freed;
        let _finished = Finished(over);
        scope.spawn(move || {
            machine.on_cpu(Cpu(1), || {
                while !over.load(Relaxed) {
                    // Searches around a current or former frame of the file.
                    let middle = seen.load(Relaxed);
                    for frame in middle.saturating_sub(32)..middle + 32 {
                        let found = reclaim_frame(memory, Frame(frame), Spare::Nothing);
                        let gone = u64::from(matches!(found, Some(ObjectFolio::Freed(_))));
                        freed.fetch_add(gone, Relaxed);
                    }
                }
            });
        });
        let most = rounds(640);
        // Also continues until the reclaimer has run, which may be late on a busy machine.
        let enough = |round| round >= most && freed.load(Relaxed) > 0;
        for round in (0..100 * most).take_while(|round| !enough(*round)) {
            use_object_order(memory, (round % 4) as u8);
            let file = memory.file(&files, 1, PAGES * PAGE).unwrap();
            assert_eq!(content(&file), bytes());
            if let Some(frame) = frame_of_page(&file, round % PAGES) {
                seen.store(frame.0, Relaxed);
            }
            if round % 3 == 0 {
                let space = AddressSpace::new(memory, options()).unwrap();
                map(&space, &file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
                let program = Program::new(machine, &space);
                (0..PAGES).for_each(|page| assert_eq!(program.load(at(page)), Ok(word(page))));
            }
            drop(file);
            let file = memory.file(&files, 1, PAGES * PAGE).unwrap();
            let mut some = [0; 3 * PAGE as usize];
            file.read(round % 8 * PAGE, &mut some).unwrap();
            file.set_size(PAGE).unwrap();
            files.put(1, &bytes());
        }
    });
    assert!(freed.into_inner() > 0, "nothing was reclaimed");
    audit(&machine, &memory, &[]);
}
